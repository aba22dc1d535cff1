"""Preparation with what every call promises checked, and sessions: one request after the other, step by step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from flashqsa.cache.state import read_slots
from flashqsa.checks import FP8, FP8_MAX
from flashqsa.plan import StepPlan, plan_step
from flashqsa.preparation import prepare
from flashqsa.results import Prepared
from flashqsa.testing import (
    RequestTruth,
    Step,
    StepCase,
    assert_bitwise_equal,
    assert_unchanged,
    make_step,
    oracles,
    poison,
    randn,
    snapshot,
    stream,
    ulp_distance,
)

BACKENDS = ("reference", "torch")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Both backends that need no kernel."""
    return str(request.param)


def _prepare_step(step: Step, **options: Any) -> Prepared:
    """`prepare` of a step: inputs untouched, caches written in the planned slots only, padding rows zero."""
    plan, cache = step.plan, step.cache
    inputs = [step.q_gate, step.k, step.v, step.index_qk, step.rope_positions]
    before = snapshot({"inputs": inputs, "norms": step.norms, "rope": step.rope, "plan": plan, "cache": cache})
    prepared = prepare(*inputs, step.rope, step.norms, cache, plan, **options)
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
    assert_bitwise_equal(prepared.gate[live], step.gate[live], "gate")
    return prepared


@pytest.fixture
def prepare_step() -> Callable[..., Prepared]:
    return _prepare_step


def _assert_holds(step: Step, truth: RequestTruth, *, first: int | None = None, length: int | None = None) -> None:
    """The caches hold tokens [first, length) of a request, the blocks that they close, and the ring of the last ones.

    Rounded as the design says: after the mean, after the norm, and once more as it is stored. By default the tokens
    are those of the step.
    """
    case, cache, norms, table = step.case, step.cache, step.norms, step.rope.cos_sin
    first = truth.context_before if first is None else first
    length = truth.seq_len if length is None else length
    tokens, blocks = slice(first, length), slice(first // case.block_tokens, length // case.block_tokens)
    section, r = step.rope.mrope_section, case.block_tokens
    keys = oracles.rms_norm(truth.raw_k, norms.k, norms.eps, case.dtype)
    keys = oracles.rotate(keys, truth.rope_positions, table, section)
    members = truth.raw_index_keys[: length // r * r].double().unflatten(0, (length // r, r))
    means = oracles.rms_norm(oracles.rounded(members.mean(1), case.dtype), norms.index_k, norms.eps, case.dtype)
    block_keys = oracles.rotate(means, truth.rope_positions[:, : length // r * r : r], table, section)
    k_scale, v_scale = case.scales
    for name, slots, exact in (
        ("k_pages", truth.slot_ids[tokens], keys[tokens] / k_scale),
        ("v_pages", truth.slot_ids[tokens], truth.raw_v[tokens].double() / v_scale),
        ("block_keys", truth.block_slot_ids[blocks], block_keys[blocks]),
    ):
        stored = read_slots(getattr(cache, name), slots)
        _assert_close(stored, exact, case.dtype, label=f"{name} of request {truth.request_id}")
    assert cache.ring is not None
    assert cache.ring_positions is not None
    kept = torch.arange(max(0, length - r), length)
    places = kept % cache.ring.shape[1]
    label = f"ring of request {truth.request_id}"
    assert_bitwise_equal(cache.ring[truth.ring_id, places], truth.raw_index_keys[kept], label)
    assert_bitwise_equal(
        cache.ring_positions[truth.ring_id, places], truth.rope_positions[:, kept].t().contiguous(), label
    )


def _assert_close(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, *, label: str = "") -> None:
    """A stored tensor is the exact one, rounded to its dtype, but for the few values that a tie decides.

    A norm that fp32 and float64 round to different neighbours moves two rotated values by about its last place.

    Args:
        got: [..., d] as stored.
        exact: [..., d] float64, not rounded to the dtype of `got`.
        dtype: The model dtype, which the norms are rounded to.
        label: First in the message.
    """
    widest = exact.abs().amax(dim=-1, keepdim=True)
    places = 16 if dtype in (torch.float32, torch.float64) else 2
    allowed = places * torch.finfo(dtype).eps * widest + torch.finfo(got.dtype).eps * exact.abs()
    allowed += torch.finfo(got.dtype).smallest_normal * 2.0 ** (-2)  # half the distance of subnormal numbers of float8
    error = (got.double() - exact.clamp(-FP8_MAX, FP8_MAX) if got.dtype == FP8 else got.double() - exact).abs()
    assert bool((error <= allowed).all()), f"{label}: error {float(error.max()):.3e}"
    if got.dtype not in (torch.float32, torch.float64):
        differing = int((ulp_distance(got, oracles.rounded(exact, got.dtype).to(got.dtype)) > 0).sum())
        assert differing <= max(4, 2e-3 * got.numel()), f"{label}: {differing} of {got.numel()} values differ"


@pytest.fixture
def assert_holds() -> Callable[..., None]:
    return _assert_holds


def _assert_queries(step: Step, prepared: Prepared) -> None:
    """The prepared queries of live rows are what the oracle makes of their projections."""
    case, norms, live = step.case, step.norms, step.live_rows
    positions = step.rope_positions if step.rope_positions.dim() == 2 else step.rope_positions.expand(3, -1)
    for name, projected, weight in (
        ("q", step.q_gate[..., : case.head_dim], norms.q),
        ("index_q", step.index_qk[:, : case.index_heads], norms.index_q),
    ):
        normed = oracles.rms_norm(projected[live], weight, norms.eps, case.dtype)
        exact = oracles.rotate(normed, positions[:, live], step.rope.cos_sin, step.rope.mrope_section)
        _assert_close(getattr(prepared, name)[live], exact, case.dtype, label=name)


@pytest.fixture
def assert_queries() -> Callable[..., None]:
    return _assert_queries


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens [start, end) of a request as the rows of one step; the last `rejected` of them hold other values."""

    request: int
    start: int
    end: int
    rejected: int = 0


class Session:
    """All requests of a case, prepared step by step into one pool.

    Attributes:
        whole: Every request from its first token to its last; it holds all inputs and the page table.
        cache: The pool: that of `whole`.
    """

    def __init__(self, case: StepCase, *, seed: int, backend: str = "torch") -> None:
        assert all(before == 0 for before, _ in case.requests), "a session starts at the first tokens"
        self.whole, self.backend, self.seed, self.steps = make_step(case, seed=seed, written=False), backend, seed, 0
        self.case, self.cache = case, self.whole.cache

    def plan(self, windows: Sequence[Window], *, padding_rows: int = 0) -> StepPlan:
        plan, case = self.whole.plan, self.case
        requests = [window.request for window in windows]
        starts = torch.tensor([0] + [w.end - w.start for w in windows]).cumsum(0)
        return plan_step(
            starts.to(torch.int32),
            torch.tensor([w.end for w in windows], dtype=torch.int32),
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

    def step(self, windows: Sequence[Window], *, padding_rows: int = 0) -> Step:
        """The step over some windows; rejected rows hold noise of their own in every step."""
        whole, rows = self.whole, []
        for window in windows:
            first = whole.requests[window.request].first_row
            rows += range(first + window.start, first + window.end)
        picked = torch.tensor(rows + [0] * padding_rows)
        inputs = {name: getattr(whole, name)[picked] for name in ("q_gate", "k", "v", "index_qk")}
        rope_positions = whole.rope_positions[..., picked]
        end = 0
        for number, window in enumerate(windows):
            end += window.end - window.start
            draft = slice(end - window.rejected, end)
            for name, values in inputs.items():
                noise = stream(self.seed, 77, self.steps, number, len(name))
                values[draft] = randn(noise, values.dtype, *values[draft].shape)
            rope_positions[..., draft] = 3
        if padding_rows:
            for values in inputs.values():
                poison(values[end:])
        self.steps += 1
        plan = self.plan(windows, padding_rows=padding_rows)
        case = dataclasses.replace(self.case, requests=tuple((w.start, w.end - w.start) for w in windows))
        return dataclasses.replace(
            whole, case=case, plan=plan, rope_positions=rope_positions, gate=inputs["q_gate"][..., case.head_dim :],
            **inputs,
        )  # fmt: skip

    def run(self, windows: Sequence[Window], **options: Any) -> Prepared:
        """Prepare the windows into the pool."""
        return _prepare_step(self.step(windows, **options), backend=self.backend)

    def assert_holds(self, request: int, length: int) -> None:
        _assert_holds(self.whole, self.whole.requests[request], first=0, length=length)

    def stored(self, request: int, length: int) -> dict[str, torch.Tensor]:
        """What the caches keep of the first tokens of a request, by token."""
        truth, r = self.whole.requests[request], self.case.block_tokens
        kept = torch.arange(max(0, length - r), length) % self.case.ring_tokens
        assert self.cache.block_keys is not None
        assert self.cache.ring is not None
        assert self.cache.ring_positions is not None
        return {
            "k": read_slots(self.cache.k_pages, truth.slot_ids[:length]),
            "v": read_slots(self.cache.v_pages, truth.slot_ids[:length]),
            "block keys": read_slots(self.cache.block_keys, truth.block_slot_ids[: length // r]),
            "ring": self.cache.ring[truth.ring_id, kept],
            "ring positions": self.cache.ring_positions[truth.ring_id, kept],
        }


@pytest.fixture
def session() -> type[Session]:
    return Session


@pytest.fixture
def window() -> type[Window]:
    return Window
