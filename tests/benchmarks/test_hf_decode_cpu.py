"""The decode benchmark on short contexts: both engines go on from the same cache, and its gate can fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.__main__ import main
from benchmarks.gates import GateError

from benchmarks import hf_decode_cpu
from flashqsa.integrations import hf

pytestmark = pytest.mark.transformers


def test_rows_hold_steps_copies_and_growth(tmp_path: Path) -> None:
    out, threads = tmp_path / "rows.jsonl", str(torch.get_num_threads())
    words = ["hf-decode-cpu", "--contexts", "200", "300", "--layers", "4", "--repeats", "3", "--threads", threads]
    assert main([*words, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["tokens"] for row in rows] == [200, 300]
    for row in rows:
        assert row["environment"]["commit"]
        for engine in hf_decode_cpu.ENGINES:
            found = row[engine]
            assert found["step"]["calls"] == 3
            assert 0 < found["copies"]["median_ms"] < found["step"]["median_ms"]
            first = rows[0][engine]["rest"]["median_ms"]
            assert found["growth"] == pytest.approx(found["rest"]["median_ms"] / first, abs=1e-3)


@torch.no_grad()
def test_the_gate_fails_on_other_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hf_decode_cpu.small_model(4)
    cache, token = hf_decode_cpu.prefill(model, 260, 100)
    assert cache.get_seq_length() == 260
    hf_decode_cpu.check_step(model, cache, token)
    assert cache.get_seq_length() == 260, "the gate works on copies"
    monkeypatch.setattr(hf, "enabled", lambda model: _Damaged(model))
    with pytest.raises(GateError, match="260 tokens"):
        hf_decode_cpu.check_step(model, cache, token)


class _Damaged:
    """A model whose head is off inside the block."""

    def __init__(self, model: Any) -> None:
        self.weight = model.lm_head.weight

    def __enter__(self) -> None:
        self.before = self.weight.detach().clone()
        self.weight.data *= 1.5

    def __exit__(self, *_: object) -> None:
        self.weight.data.copy_(self.before)
