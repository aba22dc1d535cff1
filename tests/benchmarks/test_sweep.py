"""The sweep: what it tries, what it leaves out, and what is reported of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.errors import OutOfResources

from benchmarks import gpu_decode, gpu_prefill, report_steps, sweep, sweep_kernels

SMALL = {
    "selection.score_blocks": gpu_decode.Shape(2, 4096, rows=2),
    "selection.top_blocks": gpu_decode.Shape(2, 16384, rows=2),
    "attention.attend_rows": gpu_prefill.Shape(2, 1, 4096, heads=(6, 1), churn=0.0),
    "attention.attend_tiles": gpu_prefill.Shape(1, 20, 4096, heads=(6, 1), churn=0.05),
    "attention.verify_lists": gpu_prefill.Shape(2, 4, 4096, heads=(6, 1), churn=0.05),
    "attention.union_lists": gpu_prefill.Shape(1, 20, 4096, heads=(6, 1), churn=0.05),
}


class CountingTimer:
    """Calls each contender once; the first takes 1 us, the next 2 us, and so on, the last one nothing."""

    def interleaved(self, contenders: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
        for run in contenders.values():
            run()
        times = {name: float(place + 1) for place, name in enumerate(contenders)}
        times[list(contenders)[-1]] = 0.5
        return {name: {"median_us": time} for name, time in times.items()}


def made_up(width: int = 4) -> sweep_kernels.Subject:
    """Of its candidates the one with 3 stages does not fit, with 4 it is wrong, with 5 it writes nothing."""
    out = torch.zeros(width)

    def run(config: sweep_kernels.Config) -> list[torch.Tensor]:
        if config["stages"] == 3:
            raise OutOfResources(2, 1, "shared memory")
        if config["stages"] != 5:
            out.copy_(torch.arange(width) + (config["stages"] == 4))
        return [out]

    chosen = {"stages": 1, "warps": 4}
    candidates = sweep_kernels.around(chosen, stages=(1, 2, 3, 4, 5))
    return sweep_kernels.Subject(
        "a.kernel", "a shape", chosen, candidates, run, sweep_kernels.same_bits, lambda found: [found[0].clone()]
    )


def test_a_candidate_differs_in_one_number():
    assert sweep_kernels.around({"a": 1, "b": 2}, a=(1, 3), b=(2, 5)) == [{"a": 3, "b": 2}, {"a": 1, "b": 5}]


def test_what_does_not_fit_or_gives_other_results_is_left_out_and_named():
    row = sweep.measure(made_up(), CountingTimer())
    assert [one["config"]["stages"] for one in row["timed"]] == [2, 1]
    why = {one["config"]["stages"]: one["why"] for one in row["left_out"]}
    assert why[3].startswith("does not compile or fit")
    assert why[4] == why[5] == "gives other results"
    assert sweep.chosen_time(row) == 1.0
    assert "chosen 1.0 us; best of 2: stages 2, 0.5 us, 0.500 of it. Left out: stages 3 does not" in sweep.told(row)
    text = report_steps.sweep_table([row])
    assert "| `a.kernel` | a shape | stages 1, warps 4 | 1.0 | 2 | stages 2 | 0.5 | 0.500 |" in text
    alone = sweep.measure(replace(made_up(), candidates=[]), CountingTimer())
    assert "best of 1: chosen, 0.5 us, 1.000 of it" in sweep.told(alone)


@pytest.mark.parametrize("kernel", sorted(SMALL))
def test_every_kernel_has_candidates_around_what_is_chosen(kernel: str):
    build, shapes = sweep_kernels.KERNELS[kernel]
    assert len(set(map(str, shapes))) == len(shapes)
    subject = build(SMALL[kernel], torch.Generator().manual_seed(3))
    assert subject is not None
    assert subject.kernel == kernel
    assert len(subject.candidates) > 3
    for config in subject.candidates:
        assert len([name for name, value in config.items() if value != subject.chosen[name]]) == 1


def test_kernels_of_another_device_are_passed_over():
    tiles = gpu_prefill.Shape(1, 20, 4096, heads=(6, 1), churn=0.05)
    assert sweep_kernels.tiles_of_hopper(tiles, torch.Generator()) is None


def test_words_choose_kernels_and_shapes():
    every = len(list(sweep_kernels.subjects("", "")))
    assert every == sum(len(shapes) for _, shapes in sweep_kernels.KERNELS.values())
    assert len(list(sweep_kernels.subjects("score", "fp8"))) == 3
    assert list(sweep_kernels.subjects("score", "no such shape")) == []


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sweep.run(argparse.Namespace()) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
