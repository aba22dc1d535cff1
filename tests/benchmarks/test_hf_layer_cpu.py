"""The layer benchmark on a tiny shape: what it times is what the drop-in runs, and its gate can fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.__main__ import main
from benchmarks.gates import GateError, check_layer
from benchmarks.single_layer import SHAPES, SingleLayer, neighbour_overlap
from benchmarks.timing import Ceilings

import flashqsa.integrations.hf.forward as drop_in

pytestmark = pytest.mark.transformers

TINY = SHAPES["tiny"]


def test_select_is_what_the_drop_in_runs(monkeypatch: pytest.MonkeyPatch):
    layer = SingleLayer(TINY, 203)
    seen = []

    def recording(index_q, cache, plan, **options):
        seen.append((index_q, cache.block_keys, select_blocks(index_q, cache, plan, **options)))
        return seen[-1][-1]

    select_blocks = drop_in.select_blocks
    monkeypatch.setattr(drop_in, "select_blocks", recording)
    monkeypatch.setattr("benchmarks.single_layer.select_blocks", recording)
    with torch.no_grad():
        with layer.flashqsa_layer() as call:
            call()
        with layer.flashqsa_indexer() as call:
            call()
    (q, keys, selection), (q_timed, keys_timed, selection_timed) = seen
    assert torch.equal(q, q_timed)
    assert torch.equal(keys, keys_timed)
    assert torch.equal(selection.block_ids, selection_timed.block_ids)


def test_engines_leave_the_module_as_it_was():
    layer = SingleLayer(TINY, 40)
    projection = layer.attention.indexer.index_qk_proj
    for prepared in (layer.flashqsa_layer, layer.flashqsa_indexer, layer.transformers_indexer):
        with torch.no_grad(), prepared() as call:
            call()
    assert layer.attention.indexer.index_qk_proj is projection
    assert layer.attention.config._attn_implementation == "sdpa"
    assert "forward" not in layer.attention.__dict__


@pytest.mark.parametrize("workload", ["independent", "drifting"])
def test_gate_passes_on_a_right_layer(workload: str):
    found = check_layer(SingleLayer(TINY, 160, workload))
    assert found["rows_compared"] >= 159
    assert found["flashqsa_error"] < 1e-5


def test_gate_refuses_a_wrong_output(monkeypatch: pytest.MonkeyPatch):
    attend = drop_in.attend
    monkeypatch.setattr(drop_in, "attend", lambda *args, **options: attend(*args, **options) * 1.0001)
    with pytest.raises(GateError, match="exceeds the budget"):
        check_layer(SingleLayer(TINY, 160))


def test_gate_refuses_a_wrong_selection(monkeypatch: pytest.MonkeyPatch):
    def unscored(index_q, cache, plan, **options):
        return drop_in.select_blocks(torch.zeros_like(index_q), cache, plan, **options)

    monkeypatch.setattr("benchmarks.single_layer.select_blocks", unscored)
    with pytest.raises(GateError, match="selected differently"):
        check_layer(SingleLayer(TINY, 160))


def test_workloads_differ_in_neighbour_overlap():
    overlaps = []
    for workload in ("independent", "drifting"):
        layer = SingleLayer(TINY, 400, workload)
        with torch.no_grad(), layer.flashqsa_indexer() as call:
            overlaps.append(neighbour_overlap(call()))
    assert overlaps[0] < 0.5 < 0.75 < overlaps[1]


def test_work_by_hand():
    layer = SingleLayer(TINY, 9)
    weights = 64 * (2 * 6 * 32 + 2 * 2 * 32 + 5 * 32 + 6 * 32)
    attended = sum(range(1, 10))  # within the budget everything is attended
    assert layer.layer_work().flop == 2 * 9 * weights + 4 * attended * 6 * 32
    assert layer.indexer_work().flop == 0


def test_a_run_writes_one_line_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("benchmarks.hf_layer_cpu.measure_ceilings", lambda: Ceilings(100.0, 10.0))
    out = tmp_path / "rows.jsonl"
    words = ["hf-layer-cpu", "--shape", "tiny", "--tokens", "96", "--workloads", "drifting", "--repeats", "2",
             "--no-memory", "--threads", str(torch.get_num_threads()), "--out", str(out)]  # fmt: skip
    assert main(words) == 0
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["measure"] for row in rows] == ["ceilings", "preparation + selection", "layer"]
    for row in rows:
        assert row["environment"]["commit"]
        assert row["command"].startswith("python -m benchmarks")
    for row in rows[1:]:
        assert row["speedup"] == pytest.approx(
            row["transformers"]["median_ms"] / row["flashqsa"]["median_ms"], abs=0.006
        )


@pytest.mark.parametrize("engine", ["transformers", "flashqsa"])
def test_a_child_reports_its_peak(engine: str, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("resource")
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peak memory is read from /proc")
    words = ["hf-layer-cpu", "--child", engine, "--shape", "tiny", "--tokens", "64",
             "--threads", str(torch.get_num_threads())]  # fmt: skip
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["peak_gb"] >= found["growth_gb"] >= 0
