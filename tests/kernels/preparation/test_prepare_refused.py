"""What the kernel does not serve is refused by name with the reason, and served by torch under auto."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

from flashqsa.errors import UnsupportedError
from flashqsa.preparation import prepare
from flashqsa.results import Prepared
from flashqsa.testing import Step, StepCase, assert_bitwise_equal, assert_unchanged, make_step, snapshot


def call(step: Step, **options: Any) -> Prepared:
    inputs = (step.q_gate, step.k, step.v, step.index_qk, step.rope_positions)
    return prepare(*inputs, step.rope, step.norms, step.cache, step.plan, **options)


def double_norm(step: Step) -> Step:
    return dataclasses.replace(step, norms=dataclasses.replace(step.norms, index_k=step.norms.index_k.double()))


REFUSED = {
    "q_gate is float64": (dict(dtype=torch.float64), None),
    "k_pages is float64": (dict(kv_dtype=torch.float64), None),
    "block_keys is float64": (dict(index_dtype=torch.float64), None),
    "rope.cos_sin is float64": (dict(rope_dtype=torch.float64), None),
    "norms.index_k is float64": ({}, double_norm),
    "head_dim is 264, above 256": (dict(head_dim=264), None),
    "index_head_dim is 264, above 256": (dict(index_head_dim=264), None),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_prepare_names_the_reason(device: torch.device, refuses: Any, reason: str) -> None:
    options, change = REFUSED[reason]
    step = make_step(StepCase("refused", ((6, 3),), **options), seed=60, device=device, written=False)
    step = step if change is None else change(step)
    before = snapshot(step.cache)
    with refuses(UnsupportedError, "prepare", "'triton'", reason):
        call(step, backend="triton")
    assert_unchanged(before)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*backend 'torch' serves")
        call(step)


@pytest.mark.parametrize("name", ["q_gate", "k", "v", "norms.q", "norms.k"])
def test_gradients_are_refused(device: torch.device, refuses: Any, name: str) -> None:
    step = make_step(StepCase("gradients", ((6, 3),)), seed=61, device=device, written=False)
    holder, field = (step.norms, name.removeprefix("norms.")) if "." in name else (step, name)
    needy = getattr(holder, field).clone().requires_grad_()
    changed = dataclasses.replace(holder, **{field: needy})
    wanting = dataclasses.replace(step, norms=changed) if "." in name else changed
    with refuses(UnsupportedError, "prepare", "'triton'", "the kernel has no backward"):
        call(wanting, backend="triton")
    out = Prepared(torch.empty_like(step.index_q), torch.empty_like(step.q), torch.empty_like(step.gate))
    filled = call(wanting, backend="triton", out=out)
    assert not filled.q.requires_grad
    with torch.no_grad():
        assert_bitwise_equal(call(wanting, backend="triton").q, filled.q, "without gradients")


def test_auto_takes_torch_on_the_cpu_and_triton_on_a_gpu(device: torch.device) -> None:
    taken = "torch" if device.type == "cpu" else "triton"
    case = StepCase("auto", ((0, 9), (6, 3)), dtype=torch.float16)
    steps = [make_step(case, seed=62, device=device, written=False) for _ in range(2)]
    results = [call(steps[0]), call(steps[1], backend=taken)]
    assert_bitwise_equal(results[0].q, results[1].q)
    assert_bitwise_equal(steps[0].cache.block_keys, steps[1].cache.block_keys)
