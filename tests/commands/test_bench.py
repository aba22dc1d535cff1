"""`flashqsa bench`: figures beside the floor and dense attention, files, comparison, and wrong use in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from flashqsa.commands import bench as bench_command
from flashqsa.commands.app import main
from flashqsa.commands.bench_gate import first_difference
from flashqsa.commands.bench_output import unsteady_lines
from flashqsa.commands.bench_result import NAME, Measured, break_even
from flashqsa.commands.bench_timing import Ceilings, Spread
from flashqsa.commands.bench_workload import Setting, Workload
from flashqsa.config import QSAConfig

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.transformers

FAST = ("--device", "cpu", "--threads", "1", "--repeats", "2")
CEILINGS = Ceilings(copy_gb_per_s=10.0, matmul_tflops=0.1)
Capture = pytest.CaptureFixture[str]

SPREAD = {"median_us": float, "p20_us": float, "p80_us": float, "calls": int}
STAGES = ("prepare", "select", "attend", "select + attend", "layer")
CONTEXT = {
    "context": int,
    "neighbour_overlap": (float, None),
    "floor_us": float,
    "times": dict.fromkeys((*STAGES, "dense"), SPREAD),
    "speedup": (float, None),
}
FORM = {
    "benchmark": str,
    "checkpoint": (str, None),
    "shapes": dict.fromkeys(
        ("hidden_size", "q_heads", "kv_heads", "head_dim", "index_heads", "index_head_dim", "block_tokens",
         "budget_tokens"), int,
    ),
    "requests": int,
    "rows": int,
    "page_tokens": int,
    "dtype": str,
    "device": str,
    "device_name": str,
    "threads": int,
    "repeats": int,
    "date": str,
    "versions": {"flashqsa": str, "python": str, "torch": str, "triton": (str, None)},
    "backends": {"prepare": str, "select_blocks": str, "attend": str},
    "copy_gb_per_s": float,
    "matmul_tflops": float,
    "contexts": [CONTEXT],
    "break_even": {"tokens": (int, None), "told": str},
    "comparison": None,
}  # fmt: skip
COMPARISON = {
    "file": str,
    "versions": FORM["versions"],
    "differences": [str],
    "contexts": [{"context": int, "ratios": dict.fromkeys((*STAGES, "dense"), float)}],
}


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command, "measure_ceilings", lambda dtype, device: CEILINGS)


def _json(capfd: Capture, *words: Any) -> dict[str, Any]:
    capfd.readouterr()
    assert main(["bench", *map(str, words), *FAST, "--json"]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    result: dict[str, Any] = json.loads(captured.out)
    return result


def test_bench_measures_compares_and_draws(
    small_checkpoint: Path, capfd: Capture, assert_form: Callable[[Any, Any], None], tmp_path: Path
) -> None:
    words = (small_checkpoint, "--contexts", "300,20", "--rows", 5, "--requests", 2)
    first = _json(capfd, *words)
    assert_form(first, FORM)
    short, long = first["contexts"]
    assert (short["context"], long["context"]) == (20, 300)
    assert short["neighbour_overlap"] is None, "everything is selected"
    assert 0 < long["neighbour_overlap"] <= 1
    assert 0 < short["floor_us"] < long["floor_us"]
    earlier, picture = tmp_path / "earlier.json", tmp_path / "bench.svg"
    for context in first["contexts"]:
        context["times"]["layer"]["median_us"] *= 1e6
    earlier.write_text(json.dumps(first | {"threads": 7}))
    second = _json(capfd, *words, "--compare", earlier, "--plot", picture)
    assert_form(second["comparison"], COMPARISON)
    assert second["comparison"]["differences"] == ["threads"]
    assert all(row["ratios"]["layer"] < 0.01 for row in second["comparison"]["contexts"])
    texts = {"".join(found.itertext()).strip() for found in ElementTree.parse(picture).iter() if "text" in found.tag}
    assert {"select + attend", "dense attention", "floor of select + attend", "300"} <= texts


def test_bench_for_people(small_checkpoint: Path, capfd: Capture, tmp_path: Path) -> None:
    earlier = tmp_path / "earlier.json"
    earlier.write_text(json.dumps(_json(capfd, small_checkpoint, "--contexts", "100")))
    words = ("--contexts", "100,200", "--no-dense", "--compare", str(earlier), "--plot", str(tmp_path / "b.png"))
    assert main(["bench", str(small_checkpoint), *words, *FAST]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    for part in ("1 x 1 row, float32, cpu", "change", "10 GB/s and 0.1 TFLOP/s", "prepare torch",
                 "break-even: not looked for", "drawn: "):  # fmt: skip
        assert part in captured.out, part
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_grows_on_a_terminal_alone(
    small_checkpoint: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    monkeypatch.setattr(bench_command, "Console", partial(Console, force_terminal=True, width=100))
    for quiet in ([], ["--quiet"]):
        assert main(["bench", str(small_checkpoint), "--contexts", "32,64", *FAST, *quiet]) == 0
        shown = capfd.readouterr().err
        assert ("..." in shown and "1 x 1 row" in shown) != bool(quiet)


def _measured(context: int, sparse: float, dense: float) -> Measured:
    times = {"select + attend": sparse, "dense": dense}
    spreads = {name: Spread(median_us=us, p20_us=us, p80_us=us, calls=1) for name, us in times.items()}
    return Measured(context=context, times=spreads, floor_us=1.0, neighbour_overlap=None)


def test_break_even_is_where_dense_attention_is_last_faster() -> None:
    rows = [_measured(1000, 8, 1), _measured(2000, 8, 9), _measured(4000, 16, 4), _measured(16000, 16, 64)]
    assert break_even(rows) == (8000, "from about 8,000 tokens on faster than dense attention")
    assert break_even(rows[:3])[0] is None
    assert "not faster than dense attention at 4,000" in break_even(rows[:3])[1]
    assert "at every context, from 2,000 tokens on" in break_even(rows[1:2])[1]


def test_times_that_differ_much_are_told() -> None:
    def measured(context: int, name: str, p20_us: float, p80_us: float) -> Measured:
        steady = Spread(median_us=2.0, p20_us=2.0, p80_us=2.0, calls=7)
        times = dict.fromkeys(("select", "select + attend", "dense"), steady)
        times |= {name: Spread(median_us=2.0, p20_us=p20_us, p80_us=p80_us, calls=7)}
        return Measured(context=context, times=times, floor_us=1.0, neighbour_overlap=None)

    steady = [measured(1000, "select + attend", 2.0, 3.0), measured(2000, "select", 1.0, 9.0)]
    assert list(unsteady_lines(steady)) == []
    (line,) = unsteady_lines([*steady, measured(4000, "select + attend", 2.0, 3.1), measured(16000, "dense", 1.0, 2.0)])
    assert line.startswith("unsteady: at 4,000, 16,000 tokens calls took very different times")


@pytest.mark.parametrize(("rows", "context"), [(1, 203), (6, 203), (50, 50)])
def test_the_gate_sees_wrong_results(small_checkpoint: Path, rows: int, context: int) -> None:
    config = QSAConfig.from_checkpoint(small_checkpoint)
    setting = Setting(
        config=config, requests=2, rows=rows, page_tokens=16, dtype=torch.float32, device=torch.device("cpu")
    )
    work = Workload(setting, context, dense=True)
    assert first_difference(work) is None
    flop, moved = work.floor()
    visible = (torch.arange(context - rows, context) + 1) // 4
    scored = int(visible[visible > 8].sum())
    attended = int((visible.clamp(max=8) * 4 + torch.arange(context - rows, context) + 1 - visible * 4).sum())
    assert flop == 2 * (2 * scored * config.index_heads * config.index_head_dim
                        + 4 * attended * config.q_heads * config.head_dim)  # fmt: skip
    assert moved >= 4 * 2 * (8 * 4 * 2 * config.kv_heads * config.head_dim)
    right = work.select
    work.select = lambda: (right(), work.selection.block_ids[:, 0].fill_(0), work.selection.block_ids[:, 1].fill_(1))
    worse = first_difference(work)
    work.select, attend = right, work.attend
    work.attend = lambda: (attend(), work.out[-1].mul_(1.01))
    assert "attention is off" in (first_difference(work) or "")
    if context > 100:
        assert "left out" in (worse or "") or "in order" in (worse or "")
    work.attend, dense = attend, work.dense
    work.dense = lambda: dense() * 1.01
    assert "dense attention is off" in (first_difference(work) or "")


def test_a_wrong_result_is_not_timed(small_checkpoint: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_command, "first_difference", lambda work: "row 0: attention is off")
    assert main(["bench", str(small_checkpoint), "--contexts", "64", *FAST]) == 3
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == "flashqsa: bench: row 0: attention is off; nothing was timed there\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--contexts", "many"], "bench: contexts must be numbers of tokens"),
        (["--contexts", "1m"], "bench: contexts must fit into the model's 262,144 positions"),
        (["--rows", "0"], "bench: rows must be at least 1, got 0"),
        (["--rows", "200"], "bench: rows must be at most the shortest context, 100 tokens"),
        (["--page-tokens", "10"], "page_tokens must be a multiple of block_tokens"),
        (["--threads", "9999999999"], "bench: threads must be at least 1 and at most 1,024"),
        (["--dtype", "int4"], "bench: dtype must be among"),
        (["--device", "cuda:99"], "bench: device must be there"),
        (["--device", "tpu"], "bench: device must be auto, cpu"),
        (["--plot", "b.jpg"], "bench: plot must end in .png or .svg"),
        (["--plot", "no/such/folder/b.png"], "bench: plot must be a file that can be written"),
        (["--compare", "no/such/file"], "bench: compare must be a file that flashqsa bench --json has written"),
    ],
)  # fmt: skip
def test_bench_tells_a_bad_option_in_one_line(
    words: list[str], told: str, small_checkpoint: Path, capfd: Capture
) -> None:
    assert main(["bench", str(small_checkpoint), "--contexts", "100", *words]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert told in line


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", '{"benchmark": "other"}', json.dumps({"benchmark": NAME}),
             json.dumps(dict.fromkeys(FORM) | {"benchmark": NAME, "contexts": [3]})],
)  # fmt: skip
def test_bench_refuses_a_corrupt_earlier_result(text: str, capfd: Capture, tmp_path: Path) -> None:
    file = tmp_path / "earlier.json"
    file.write_text(text)
    assert main(["bench", "--compare", str(file)]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "bench: compare must be a file that flashqsa bench --json has written" in line


def test_bench_tells_a_bad_checkpoint_in_one_line(tmp_path: Path, capfd: Capture) -> None:
    assert main(["bench", str(tmp_path)]) == 2
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert main(["bench", str(tmp_path)]) == 2
    missing, other = capfd.readouterr().err.splitlines()
    assert "a config.json" in missing
    assert "qwen4_exp" in other


@pytest.mark.parametrize("at", ["time_in_turn", "_draw"])
def test_bench_interrupted_leaves_no_picture(
    at: str, small_checkpoint: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_command, at, interrupt)
    assert main(["bench", str(small_checkpoint), "--contexts", "64", "--plot", str(tmp_path / "b.png"), *FAST]) == 130
    assert capfd.readouterr().err == "flashqsa: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_bench_without_memory_or_matplotlib_says_so_in_one_line(
    small_checkpoint: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    monkeypatch.setattr(bench_command, "Workload", fail)
    assert main(["bench", str(small_checkpoint), *FAST]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("flashqsa: bench: caches and dense attention must fit in memory, got: CUDA out of memory.")
    monkeypatch.delitem(sys.modules, "flashqsa.commands.inspect_figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", str(small_checkpoint), "--plot", str(tmp_path / "b.png")]) == 2
    assert "needs matplotlib" in capfd.readouterr().err


@pytest.mark.gpu
def test_bench_on_a_gpu(
    small_checkpoint: Path, capfd: Capture, assert_form: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the ceilings of the card
    for rows in (1, 4, 300):
        words = ("--contexts", "300,2k", "--rows", str(rows), "--requests", "2", "--repeats", "3", "--json")
        assert main(["bench", str(small_checkpoint), "--device", "cuda", *words]) == 0
        result = json.loads(capfd.readouterr().out)
        assert_form(result, FORM)
        assert result["dtype"] == "bfloat16"


def test_the_documentation_names_all_fields() -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    section = page.partition("## flashqsa bench")[2].partition("\n## ")[0]
    nested = {name for form in ("shapes", "versions", "backends", "break_even") for name in FORM[form]}
    for name in {*FORM, *CONTEXT, *SPREAD, *COMPARISON, *STAGES, *nested, "ratios"}:
        assert f"`{name}`" in section, name
