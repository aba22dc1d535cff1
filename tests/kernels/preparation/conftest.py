"""Preparation by kernel beside preparation by torch: the same steps in twin memories, every byte compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from flashqsa.plan import StepPlan, plan_step
from flashqsa.preparation import prepare
from flashqsa.results import Prepared
from flashqsa.testing import (
    Step,
    StepCase,
    assert_bitwise_equal,
    assert_unchanged,
    make_step,
    poison,
    randn,
    snapshot,
    stream,
)
from flashqsa.testing.hostile import as_bytes

E4M3 = torch.float8_e4m3fn
CACHES = ("k_pages", "v_pages", "block_keys", "ring", "ring_positions")


def _prepare(step: Step, backend: str = "triton", **options: Any) -> Prepared:
    """`prepare` of a step: inputs untouched, caches written in the planned slots only, padding rows zero."""
    plan, cache = step.plan, step.cache
    inputs = [step.q_gate, step.k, step.v, step.index_qk, step.rope_positions]
    before = snapshot({"inputs": inputs, "norms": step.norms, "rope": step.rope, "plan": plan, "cache": cache})
    prepared = prepare(*inputs, step.rope, step.norms, cache, plan, backend=backend, **options)
    live = step.live_rows
    written = {
        "cache.k_pages": plan.slot_ids[live],
        "cache.v_pages": plan.slot_ids[live],
        "cache.block_keys": plan.closed_block_slot_ids[live],
        "cache.ring": plan.ring_slot_ids[live],
        "cache.ring_positions": plan.ring_slot_ids[live],
    }
    assert_unchanged(before, written={name: slots for name, slots in written.items() if name in before.tensors})
    step.assert_guards_intact()
    for rows in (prepared.q, prepared.index_q):
        assert not bool(rows[~live].to(torch.float32).any()), "padding rows must be zero"
    return prepared


@pytest.fixture
def prepare_hostile() -> Callable[..., Prepared]:
    """`prepare_hostile(step, backend="triton", **options)`: what every call promises is checked."""
    return _prepare


def _assert_same_rows(actual: torch.Tensor, expected: torch.Tensor, model_dtype: torch.dtype, label: str) -> None:
    """Two results of the same roundings, whose norms summed in different orders.

    In 16 bits at most one number of 10,000 differs (or one pair), and by no more than a norm that fell on the other
    side moves a rotated pair: the last place of the larger of the two. fp32 itself differs by last places throughout.
    NaN must be the same NaN.

    Args:
        actual: [..., d].
        expected: [..., d], same dtype.
        model_dtype: The dtype that norms are rounded to.
        label: First in the message.
    """
    assert actual.dtype == expected.dtype, label
    assert actual.shape == expected.shape, label
    differs = (as_bytes(actual) != as_bytes(expected)).any(dim=1).view(actual.shape)
    if not bool(differs.any()):
        return
    one, other = actual.to(torch.float64), expected.to(torch.float64)
    widest = other.nan_to_num(0.0).abs().amax(dim=-1, keepdim=True)
    places = 4 if model_dtype == torch.float32 else 2
    allowed = places * torch.finfo(model_dtype).eps * widest + torch.zeros_like(other)
    if actual.dtype != model_dtype:  # the last cast may fall on another side too
        allowed += (
            torch.finfo(actual.dtype).eps * other.nan_to_num(0.0).abs() + torch.finfo(actual.dtype).smallest_normal / 4
        )
    error = torch.where(differs, (one - other).abs(), 0.0)
    assert bool((error <= allowed).all()), f"{label}: error {float(error.max()):.3e}"  # False for NaN on one side
    if model_dtype != torch.float32:
        live = int(torch.isfinite(other).sum())
        most = max(2, int(1e-4 * live))
        assert int(differs.sum()) <= most, f"{label}: {int(differs.sum())} of {live} numbers differ"


@pytest.fixture
def assert_same_rows() -> Callable[..., None]:
    """`assert_same_rows(actual, expected, model_dtype, label)`: up to where norms may fall on another side."""
    return _assert_same_rows


def _assert_same_caches(one: Step, other: Step) -> None:
    """Every byte of two pools: copies bit for bit, what was normed up to where norms may fall on another side."""
    copied = {"ring", "ring_positions", *(["v_pages"] if one.cache.v_scale is None else [])}
    for name in CACHES:
        got, wanted = getattr(one.cache, name), getattr(other.cache, name)
        if wanted is None:
            continue
        if name in copied and got.dtype != E4M3:
            assert_bitwise_equal(got, wanted, name)
        else:
            _assert_same_rows(got, wanted, one.case.dtype, name)


def _same_as_torch(
    case: StepCase,
    device: torch.device,
    *,
    seed: int,
    change: Callable[[Step], Step] = lambda step: step,
    expected: str = "torch",
    **options: Any,
) -> tuple[Step, Prepared]:
    """Prepare twin steps, one by kernel and one by another backend; all that they return and write is the same.

    Args:
        case: The step.
        device: Where.
        seed: Of the step.
        change: Applied to both steps.
        expected: The other backend.
        options: Arguments of `prepare`, functions of the step.

    Returns:
        The step prepared by kernel, and its result.
    """
    steps = [change(make_step(case, seed=seed, device=device, written=False)) for _ in range(2)]
    results = []
    for step, backend in zip(steps, ("triton", expected), strict=True):
        results.append(_prepare(step, backend, **{name: option(step) for name, option in options.items()}))
    for name in ("q", "index_q"):
        _assert_same_rows(getattr(results[0], name), getattr(results[1], name), case.dtype, name)
    assert_bitwise_equal(results[0].gate, results[1].gate, "gate")
    _assert_same_caches(*steps)
    return steps[0], results[0]


@pytest.fixture
def same_as_torch(device: torch.device) -> Callable[..., tuple[Step, Prepared]]:
    """`same_as_torch(case, seed=..., change=..., expected="torch", **options)` -> step, prepared."""
    return lambda case, **options: _same_as_torch(case, device, **options)


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens [start, end) of a request as the rows of one step; the last `rejected` of them hold other values."""

    request: int
    start: int
    end: int
    rejected: int = 0


class Twins:
    """All requests of a case, prepared step by step into two pools of equal contents: by kernel and by torch.

    After every step both pools are compared whole, so the kernel is right at each one, not only in the end.
    """

    def __init__(self, case: StepCase, device: torch.device, *, seed: int) -> None:
        assert all(before == 0 for before, _ in case.requests), "twins start at the first tokens"
        self.case, self.seed, self.steps, self.device = case, seed, 0, device
        self.wholes = [make_step(case, seed=seed, device=device, written=False) for _ in range(2)]

    def _plan(self, whole: Step, windows: Sequence[Window], padding_rows: int) -> StepPlan:
        plan, case = whole.plan, self.case
        requests = [window.request for window in windows]
        starts = torch.tensor([0] + [w.end - w.start for w in windows]).cumsum(0)
        lens = torch.tensor([w.end for w in windows], dtype=torch.int32)
        return plan_step(
            starts.to(device=self.device, dtype=torch.int32),
            lens.to(self.device),
            None if plan.page_table is None else plan.page_table[requests],
            page_tokens=plan.page_tokens,
            block_tokens=case.block_tokens,
            topk_blocks=case.topk_blocks,
            max_query_len=max(w.end - w.start for w in windows),
            max_seq_len=max(case.seq_lens),
            num_pages=plan.num_pages,
            first_slots=None if plan.first_slots is None else plan.first_slots[requests],
            first_block_slots=None if plan.first_block_slots is None else plan.first_block_slots[requests],
            ring_ids=plan.ring_ids[requests],
            ring_tokens=case.ring_tokens,
            speculative_rows=case.speculative_rows,
            num_rows=int(starts[-1]) + padding_rows,
        )

    def _step(self, whole: Step, windows: Sequence[Window], padding_rows: int) -> Step:
        rows = []
        for window in windows:
            first = whole.requests[window.request].first_row
            rows += range(first + window.start, first + window.end)
        picked = torch.tensor(rows + [0] * padding_rows, device=self.device)
        inputs = {name: getattr(whole, name)[picked] for name in ("q_gate", "k", "v", "index_qk")}
        rope_positions = whole.rope_positions[..., picked]
        end = 0
        for number, window in enumerate(windows):
            end += window.end - window.start
            draft = slice(end - window.rejected, end)
            for name, values in inputs.items():  # rejected rows hold noise of their own in every step
                noise = stream(self.seed, 77, self.steps, number, len(name))
                values[draft] = randn(noise, values.dtype, *values[draft].shape).to(self.device)
            rope_positions[..., draft] = 3
        for values in inputs.values():
            poison(values[end:])
        case = dataclasses.replace(self.case, requests=tuple((w.start, w.end - w.start) for w in windows))
        return dataclasses.replace(
            whole, case=case, plan=self._plan(whole, windows, padding_rows), rope_positions=rope_positions,
            gate=inputs["q_gate"][..., case.head_dim :], **inputs,
        )  # fmt: skip

    def run(self, *windows: Window | tuple[int, ...], padding_rows: int = 0) -> Prepared:
        """Prepare the windows (request, start, end, rejected) into both pools and compare."""
        named = [window if isinstance(window, Window) else Window(*window) for window in windows]
        steps = [self._step(whole, named, padding_rows) for whole in self.wholes]
        results = [_prepare(step, backend) for step, backend in zip(steps, ("triton", "torch"), strict=True)]
        self.steps += 1
        for name in ("q", "index_q"):
            _assert_same_rows(getattr(results[0], name), getattr(results[1], name), self.case.dtype, name)
        _assert_same_caches(*steps)
        return results[0]


@pytest.fixture
def twins(device: torch.device) -> Callable[..., Twins]:
    """`twins(case, seed=...)`: sessions by kernel and by torch, side by side."""
    return lambda case, **options: Twins(case, device, **options)
