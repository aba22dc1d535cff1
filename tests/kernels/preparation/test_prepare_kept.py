"""Which memory the kernel touches: padding, slots of -1, tiny steps, empty requests, missing caches, garbage."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.plan import StepPlan, plan_step
from flashqsa.preparation.triton_prepare import prepare_triton
from flashqsa.results import Prepared
from flashqsa.testing import (
    Guarded,
    Step,
    StepCase,
    assert_bitwise_equal,
    assert_unchanged,
    guarded,
    make_step,
    poison,
    snapshot,
)

CACHES = ("k_pages", "v_pages", "block_keys", "ring", "ring_positions")
PLAN_NAMES = (
    "query_starts", "seq_lens", "page_table", "request_ids", "positions", "visible_blocks", "slot_ids",
    "closed_block_slot_ids", "ring_slot_ids", "ring_ids", "page_tokens", "block_tokens", "topk_blocks",
    "max_query_len", "max_seq_len", "ring_tokens", "num_pages",
)  # fmt: skip


def from_tensors(step: Step, **changes: torch.Tensor) -> Step:
    """The same step, its plan made of tensors, some of them changed."""
    plan = step.plan
    return dataclasses.replace(step, plan=StepPlan.from_tensors(**{n: getattr(plan, n) for n in PLAN_NAMES} | changes))


def test_rows_of_padding_leave_every_cache_as_it_was(device: torch.device, prepare_hostile: Any) -> None:
    case = StepCase("padding", ((0, 0), (0, 0)), padding_rows=4, padding_requests=3)
    step = make_step(case, seed=40, device=device, written=False)
    before = snapshot(step.cache)
    prepare_hostile(step)
    assert_unchanged(before)


def test_an_engines_padding_rows_hold_slots_of_an_earlier_step(device: torch.device, prepare_hostile: Any) -> None:
    """Request -1 with slots, closed blocks and ring rows left over: nothing of them is written."""
    case = StepCase("stale", ((30, 2), (9, 3)), padding_rows=3)
    step, clean = (make_step(case, seed=41, device=device, written=False) for _ in range(2))
    prepare_hostile(clean)
    free_page = next(p for p in range(len(step.cache.k_pages)) if not bool((step.plan.slot_ids // 16 == p).any()))
    stale = {name: getattr(step.plan, name).clone() for name in ("slot_ids", "closed_block_slot_ids", "ring_slot_ids")}
    three = torch.arange(3, device=device)
    stale["slot_ids"][-3:] = three + 16 * free_page
    stale["closed_block_slot_ids"][-3:] = three + 4 * free_page
    unused = sorted(set(range(4)) - {request.ring_id for request in step.requests})
    stale["ring_slot_ids"][-3:] = three + 4 * unused[0]
    stale_positions = torch.where(step.live_rows, step.plan.positions, 7)
    prepare_hostile(from_tensors(step, positions=stale_positions, **stale))
    for name in CACHES:
        assert_bitwise_equal(getattr(step.cache, name), getattr(clean.cache, name), name)


def test_a_slot_of_minus_one_is_not_written(device: torch.device, same_as_torch: Any) -> None:
    """Some rows of a request go nowhere, in each cache its own ones; the others go where they went."""
    rows = torch.arange(33, device=device)
    hidden = {"slot_ids": rows % 3 == 0, "closed_block_slot_ids": rows % 8 == 3, "ring_slot_ids": rows % 2 == 0}

    def change(step: Step) -> Step:
        return from_tensors(step, **{n: getattr(step.plan, n).masked_fill(mask, -1) for n, mask in hidden.items()})

    same_as_torch(StepCase("some", ((0, 24), (8, 9)), page_tokens=8), seed=43, change=change)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside-four"])
def test_fault_11_steps_of_fewer_rows_than_a_block(same_as_torch: Any, rows: int, company: bool) -> None:
    """Inputs end where their allocation ends; every offset of the open block before the step."""
    for before in range(4):
        requests = ((before, rows), (before + 1, 4)) if company else ((before, rows),)
        same_as_torch(StepCase("tiny", requests), seed=44, change=at_the_end)


def at_the_end(step: Step) -> Step:
    """Inputs whose last element is the last of its storage."""
    moved = {}
    for name in ("q_gate", "k", "v", "index_qk"):
        values = getattr(step, name)
        storage = poison(torch.empty(values.numel() + 7, dtype=values.dtype, device=values.device))
        moved[name] = storage[7:].view(values.shape)
        moved[name].copy_(values)
    return dataclasses.replace(step, **moved, gate=moved["q_gate"][..., step.case.head_dim :])


def test_fault_18_requests_of_length_zero_and_page_rows_of_minus_one(device: torch.device, same_as_torch: Any) -> None:
    def change(step: Step) -> Step:
        step.plan.page_table[[0, 2]] = -1
        plan = plan_step(
            torch.tensor([0, 0, 5, 5], dtype=torch.int32, device=device),
            torch.tensor([0, 5, 0], dtype=torch.int32, device=device), step.plan.page_table, page_tokens=16,
            block_tokens=4, topk_blocks=8, max_query_len=5, max_seq_len=5, ring_ids=step.plan.ring_ids, ring_tokens=4,
            num_rows=5,
        )  # fmt: skip
        return dataclasses.replace(step, plan=plan)

    same_as_torch(StepCase("zero", ((0, 0), (0, 5), (0, 0))), seed=45, change=change)


def twice_as_wide(tensor: torch.Tensor) -> tuple[torch.Tensor, Guarded]:
    """A view that takes every other page and every other row of a page: strides of 2x and more, canaries between."""
    shape = list(tensor.shape)
    guard = guarded([2 * shape[0], 2 * shape[1], *shape[2:]], tensor.dtype, padding=0, device=tensor.device)
    guard.views.clear()
    view = guard.cut(guard.inner.view(tensor.dtype).view(2 * shape[0], 2 * shape[1], *shape[2:])[::2, ::2])
    view.copy_(tensor)
    return view, guard


@pytest.mark.parametrize("layout", ["split", "packed", "hnd"])
def test_fault_15_strided_caches_keep_their_gaps(same_as_torch: Any, layout: Any) -> None:
    """Padded a little by the kit's layouts; here every cache is also spread over twice the pages and rows."""

    def change(step: Step) -> Step:
        views = {name: twice_as_wide(getattr(step.cache, name)) for name in CACHES}
        cache = dataclasses.replace(step.cache, **{name: view for name, (view, _) in views.items()})
        return dataclasses.replace(step, cache=cache, guards=[*step.guards, *(guard for _, guard in views.values())])

    same_as_torch(StepCase("gaps", ((0, 30), (21, 9), (6, 1)), layout=layout), seed=46, change=change)


def test_contiguous_caches_may_keep_their_blocks_in_rows_of_any_length(
    device: torch.device, same_as_torch: Any
) -> None:
    """Block slots count rows of `block_keys`, whatever K and V have."""

    def change(step: Step) -> Step:
        old = step.cache.block_keys
        block_keys = poison(torch.empty(old.shape[0], old.shape[1] + 5, old.shape[2], device=device))
        first_block_slots = step.plan.first_block_slots // old.shape[1] * block_keys.shape[1] + 3
        plan = plan_step(
            step.plan.query_starts, step.plan.seq_lens, None, page_tokens=None, block_tokens=4, topk_blocks=8,
            max_query_len=30, max_seq_len=30, first_slots=step.plan.first_slots, first_block_slots=first_block_slots,
            ring_ids=step.plan.ring_ids, ring_tokens=4, num_rows=39,
        )  # fmt: skip
        return dataclasses.replace(step, plan=plan, cache=dataclasses.replace(step.cache, block_keys=block_keys))

    same_as_torch(StepCase("rows", ((0, 30), (21, 9)), contiguous=True), seed=47, change=change)


def without(step: Step, *names: str) -> Step:
    return dataclasses.replace(step, cache=dataclasses.replace(step.cache, **dict.fromkeys(names)))


def test_fault_41_k_and_v_alone_have_the_bits_of_all_together(same_as_torch: Any, dtype: torch.dtype) -> None:
    """A cache without block keys, where only attention runs; the plan is shared with layers that have both."""
    case = StepCase("attention", ((0, 10), (6, 7)), dtype=dtype)
    whole, fused = same_as_torch(case, seed=48)
    for missing in (("block_keys", "ring", "ring_positions"), ("block_keys",)):
        part, prepared = same_as_torch(case, seed=48, change=lambda step, names=missing: without(step, *names))
        for name in ("k_pages", "v_pages"):
            assert_bitwise_equal(getattr(part.cache, name), getattr(whole.cache, name), name)
        for name in ("q", "index_q"):
            assert_bitwise_equal(getattr(prepared, name), getattr(fused, name), name)


def unringed(step: Step) -> Step:
    plan = step.plan
    plan = plan_step(
        plan.query_starts, plan.seq_lens, plan.page_table, page_tokens=16, block_tokens=4, topk_blocks=8,
        max_query_len=23, max_seq_len=23, num_pages=plan.num_pages, num_rows=plan.num_rows,
    )  # fmt: skip
    return without(dataclasses.replace(step, plan=plan), "ring", "ring_positions")


@pytest.mark.parametrize("requests", [((0, 23), (8, 5), (4, 4)), ((5, 2),)], ids=["whole", "open"])
def test_a_plan_without_rings_prepares_steps_that_need_none(
    same_as_torch: Any, requests: tuple[tuple[int, int], ...]
) -> None:
    """A whole prompt at once, as an encoder has it; or a step inside a block that it does not close."""
    same_as_torch(StepCase("whole", requests), seed=49, change=unringed)


def test_nan_in_one_row_stays_in_that_row(device: torch.device, prepare_hostile: Any, dtype: torch.dtype) -> None:
    """Rows are prepared on their own; only the block that holds the row is touched beside it."""
    case = StepCase("nan", ((0, 24),), dtype=dtype)
    clean, dirty = (make_step(case, seed=51, device=device, written=False) for _ in range(2))
    for values in (dirty.q_gate, dirty.k, dirty.v, dirty.index_qk):
        values[9] = torch.nan
    results = [prepare_hostile(each) for each in (clean, dirty)]
    others = torch.arange(24, device=device) != 9
    for name in ("q", "index_q"):
        assert_bitwise_equal(getattr(results[1], name)[others], getattr(results[0], name)[others], name)
    truth = clean.requests[0]  # both come of one seed, so their pages are the same
    blocks = torch.tensor([0, 1, 3, 4, 5], device=device)
    for name, slots in (
        ("k_pages", truth.slot_ids[others]), ("v_pages", truth.slot_ids[others]),
        ("block_keys", truth.block_slot_ids[blocks]),
    ):  # fmt: skip
        rows = [getattr(each.cache, name).flatten(0, 1)[slots] for each in (dirty, clean)]
        assert_bitwise_equal(rows[0], rows[1], name)


GARBAGE = {
    "slot_ids": [2**62, 10**6, -(2**40)],
    "closed_block_slot_ids": [2**62, 10**6, -7],
    "ring_slot_ids": [2**62, 10**6, -(2**62)],
    "request_ids": [2**31 - 1, 3, -5],
    "ring_ids": [2**31 - 1, 77, -(2**31)],
    "positions": [2**62, 0, 1, -(2**62)],
    "query_starts": [2**31 - 1, 5, -(2**31)],
}


@pytest.mark.parametrize("name", GARBAGE)
def test_what_nobody_checked_stays_inside_its_memory(device: torch.device, name: str) -> None:
    """On a device values are not read: a number out of range is left out or held to the range, whatever it is."""
    step = make_step(StepCase("garbage", ((0, 9), (6, 3), (21, 5)), mrope=True), seed=52, device=device, written=False)
    for value in GARBAGE[name]:
        plan = dataclasses.replace(step.plan, **{name: torch.full_like(getattr(step.plan, name), value)})
        run_unchecked(dataclasses.replace(step, plan=plan))
        step.assert_guards_intact()


@pytest.mark.parametrize("value", [2**62, -(2**62), 10**9, -1])
def test_rotary_positions_out_of_range_read_the_ends_of_the_table(device: torch.device, value: int) -> None:
    """The step's own, and those in the ring."""
    step = make_step(StepCase("far", ((0, 9), (6, 3)), mrope=True), seed=53, device=device, written=False)
    step.rope_positions.fill_(value)
    step.cache.ring_positions.fill_(value)
    prepared = run_unchecked(step)
    step.assert_guards_intact()
    ends = make_step(StepCase("far", ((0, 9), (6, 3)), mrope=True), seed=53, device=device, written=False)
    end = ends.rope.cos_sin.shape[0] - 1 if value > 0 else 0
    ends.rope_positions.fill_(end)
    ends.cache.ring_positions.fill_(end)
    wanted = run_unchecked(ends)
    assert_bitwise_equal(prepared.q, wanted.q)
    assert_bitwise_equal(step.cache.block_keys, ends.cache.block_keys)


def run_unchecked(step: Step) -> Prepared:
    """The kernel without the checks of `prepare`."""
    positions = step.rope_positions if step.rope_positions.dim() == 2 else step.rope_positions.expand(3, -1)
    out = Prepared(torch.empty_like(step.index_q), torch.empty_like(step.q), step.gate)
    before = snapshot([step.q_gate, step.k, step.v, step.index_qk, step.rope_positions])
    prepare_triton(
        step.q_gate, step.k, step.v, step.index_qk, positions, step.rope, step.norms, step.cache, step.plan, out
    )
    assert_unchanged(before)
    return out
