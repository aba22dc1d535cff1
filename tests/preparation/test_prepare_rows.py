"""Which rows `prepare` touches: padding, slots of -1, tiny steps, empty requests, caches without some parts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.cache import LayerCache
from flashqsa.cache.state import read_slots
from flashqsa.plan import StepPlan, plan_step
from flashqsa.preparation import prepare
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


def from_tensors(step: Step, **changes: torch.Tensor) -> Step:
    """The same step, its plan made of tensors, some of them changed."""
    plan = step.plan
    names = (
        "query_starts", "seq_lens", "page_table", "request_ids", "positions", "visible_blocks", "slot_ids",
        "closed_block_slot_ids", "ring_slot_ids", "ring_ids", "page_tokens", "block_tokens", "topk_blocks",
        "max_query_len", "max_seq_len", "ring_tokens", "num_pages",
    )  # fmt: skip
    return dataclasses.replace(step, plan=StepPlan.from_tensors(**{n: getattr(plan, n) for n in names} | changes))


def run(step: Step, **options: Any) -> Any:
    inputs = (step.q_gate, step.k, step.v, step.index_qk, step.rope_positions)
    return prepare(*inputs, step.rope, step.norms, step.cache, step.plan, **options)


def test_rows_of_padding_leave_every_cache_as_it_was(backend: str) -> None:
    step = make_step(StepCase("padding", ((0, 0), (0, 0)), padding_rows=4, padding_requests=3), seed=40, written=False)
    before = snapshot(step.cache)
    prepared = run(step, backend=backend)
    assert_unchanged(before)
    step.assert_guards_intact()
    assert not bool(prepared.q.any())
    assert not bool(prepared.index_q.any())


def test_an_engines_padding_rows_hold_slots_of_an_earlier_step(backend: str) -> None:
    """Request -1 with slots, closed blocks and ring rows left over: nothing of them is written."""
    case = StepCase("stale", ((30, 2), (9, 3)), padding_rows=3)
    step, clean = (make_step(case, seed=41, written=False) for _ in range(2))
    run(clean, backend=backend)
    free_page = next(p for p in range(len(step.cache.k_pages)) if not bool((step.plan.slot_ids // 16 == p).any()))
    stale = {name: getattr(step.plan, name).clone() for name in ("slot_ids", "closed_block_slot_ids", "ring_slot_ids")}
    stale["slot_ids"][-3:] = torch.arange(3) + 16 * free_page
    stale["closed_block_slot_ids"][-3:] = torch.arange(3) + 4 * free_page
    unused = sorted(set(range(4)) - {request.ring_id for request in step.requests})
    stale["ring_slot_ids"][-3:] = torch.arange(3) + 4 * unused[0]
    stale_positions = torch.where(step.live_rows, step.plan.positions, 7)
    run(from_tensors(step, positions=stale_positions, **stale), backend=backend)
    for name in CACHES:
        assert_bitwise_equal(getattr(step.cache, name), getattr(clean.cache, name), name)


def test_padding_requests_may_name_any_ring(backend: str) -> None:
    step = make_step(StepCase("rings", ((30, 2),), padding_requests=2), seed=42, written=False)
    ring_ids = step.plan.ring_ids.clone()
    ring_ids[1:] = torch.tensor([2**31 - 1, 77])
    plan = plan_step(
        step.plan.query_starts, step.plan.seq_lens, step.plan.page_table, page_tokens=16, block_tokens=4, topk_blocks=8,
        max_query_len=2, max_seq_len=32, ring_ids=ring_ids, ring_tokens=4,
    )  # fmt: skip
    before = snapshot(step.cache)
    run(dataclasses.replace(step, plan=plan), backend=backend)
    written = {
        "k_pages": plan.slot_ids, "v_pages": plan.slot_ids, "block_keys": plan.closed_block_slot_ids,
        "ring": plan.ring_slot_ids, "ring_positions": plan.ring_slot_ids,
    }  # fmt: skip
    assert_unchanged(before, written=written)


def test_a_slot_of_minus_one_is_not_written(backend: str, prepare_step: Any) -> None:
    """Some rows of a request go nowhere, in each cache its own ones; the others go where they went."""
    case = StepCase("some", ((0, 24), (8, 9)), page_tokens=8)
    whole, part = (make_step(case, seed=43, written=False) for _ in range(2))
    hidden = {
        "slot_ids": torch.arange(33) % 3 == 0,
        "closed_block_slot_ids": torch.arange(33) % 8 == 3,
        "ring_slot_ids": torch.arange(33) % 2 == 0,
    }
    plan = part.plan
    slots = {name: getattr(plan, name).masked_fill(mask, -1) for name, mask in hidden.items()}
    prepared = prepare_step(from_tensors(part, **slots), backend=backend)  # checks what is written
    full = prepare_step(whole, backend=backend)
    assert_bitwise_equal(prepared.q, full.q)
    assert_bitwise_equal(prepared.index_q, full.index_q)
    for name, slot_ids in (
        ("k_pages", slots["slot_ids"]), ("v_pages", slots["slot_ids"]),
        ("block_keys", slots["closed_block_slot_ids"]), ("ring", slots["ring_slot_ids"]),
    ):  # fmt: skip
        kept = slot_ids[slot_ids >= 0]
        rows = [read_slots(getattr(each.cache, name), kept) for each in (part, whole)]
        assert_bitwise_equal(rows[0], rows[1], name)


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("company", [False, True], ids=["alone", "beside-four"])
def test_fault_11_steps_of_fewer_rows_than_a_block(
    prepare_step: Any, assert_holds: Any, backend: str, rows: int, company: bool
) -> None:
    """Inputs end where their allocation ends; every offset of the open block before the step."""
    for before in range(4):
        requests = ((before, rows), (before + 1, 4)) if company else ((before, rows),)
        case = StepCase("tiny", requests)
        step = make_step(case, seed=44, written=False)
        step = dataclasses.replace(step, **at_the_end(step))
        prepare_step(step, backend=backend)
        for request in step.requests:
            assert_holds(step, request)


def at_the_end(step: Step) -> dict[str, torch.Tensor]:
    """Inputs whose last element is the last of its storage."""
    moved = {}
    for name in ("q_gate", "k", "v", "index_qk"):
        values = getattr(step, name)
        storage = poison(torch.empty(values.numel() + 7, dtype=values.dtype))
        moved[name] = storage[7:].view(values.shape)
        moved[name].copy_(values)
    return moved | {"gate": moved["q_gate"][..., step.case.head_dim :]}


def test_fault_18_requests_of_length_zero_and_page_rows_of_minus_one(
    prepare_step: Any, assert_holds: Any, backend: str
) -> None:
    step = make_step(StepCase("zero", ((0, 0), (0, 5), (0, 0))), seed=45, written=False)
    step.plan.page_table[[0, 2]] = -1
    plan = plan_step(
        torch.tensor([0, 0, 5, 5], dtype=torch.int32), torch.tensor([0, 5, 0], dtype=torch.int32), step.plan.page_table,
        page_tokens=16, block_tokens=4, topk_blocks=8, max_query_len=5, max_seq_len=5, ring_ids=step.plan.ring_ids,
        ring_tokens=4,
    )  # fmt: skip
    step = dataclasses.replace(step, plan=plan)
    prepare_step(step, backend=backend)
    assert_holds(step, step.requests[0])


def twice_as_wide(tensor: torch.Tensor) -> tuple[torch.Tensor, Guarded]:
    """A view that takes every other page and every other row of a page: strides of 2x and more, canaries between."""
    shape = list(tensor.shape)
    guard = guarded([2 * shape[0], 2 * shape[1], *shape[2:]], tensor.dtype, padding=0)
    guard.views.clear()
    view = guard.cut(guard.inner.view(tensor.dtype).view(2 * shape[0], 2 * shape[1], *shape[2:])[::2, ::2])
    view.copy_(tensor)
    return view, guard


@pytest.mark.parametrize("layout", ["split", "packed", "hnd"])
def test_fault_15_strided_caches_keep_their_gaps(
    prepare_step: Any, assert_holds: Any, backend: str, layout: Any
) -> None:
    """Padded a little by the kit's layouts; here every cache is also spread over twice the pages and rows."""
    step = make_step(StepCase("gaps", ((0, 30), (21, 9), (6, 1)), layout=layout), seed=46, written=False)
    views = {name: twice_as_wide(getattr(step.cache, name)) for name in CACHES}
    cache = dataclasses.replace(step.cache, **{name: view for name, (view, _) in views.items()})
    spread = dataclasses.replace(step, cache=cache, guards=[guard for _, guard in views.values()])
    prepare_step(spread, backend=backend)
    prepare_step(step, backend=backend)
    for request in step.requests:
        assert_holds(spread, request)
    for name in CACHES:
        assert_bitwise_equal(views[name][0], getattr(step.cache, name).contiguous(), name)


def test_contiguous_caches_may_keep_their_blocks_in_rows_of_any_length(
    prepare_step: Any, assert_holds: Any, backend: str
) -> None:
    """Block slots count rows of `block_keys`, whatever K and V have."""
    case = StepCase("rows", ((0, 30), (21, 9)), contiguous=True)
    step = make_step(case, seed=47, written=False)
    old = step.cache.block_keys
    block_keys = poison(torch.empty(old.shape[0], old.shape[1] + 5, old.shape[2]))
    first_block_slots = step.plan.first_block_slots // old.shape[1] * block_keys.shape[1] + 3
    plan = plan_step(
        step.plan.query_starts, step.plan.seq_lens, None, page_tokens=None, block_tokens=4, topk_blocks=8,
        max_query_len=30, max_seq_len=30, first_slots=step.plan.first_slots, first_block_slots=first_block_slots,
        ring_ids=step.plan.ring_ids, ring_tokens=4,
    )  # fmt: skip
    requests = [
        dataclasses.replace(
            request, block_slot_ids=torch.arange(request.seq_len // 4) + first_block_slots[request.request_id]
        )
        for request in step.requests
    ]
    cache = dataclasses.replace(step.cache, block_keys=block_keys)
    step = dataclasses.replace(step, plan=plan, cache=cache, requests=requests)
    prepare_step(step, backend=backend)
    for request in requests:
        assert_holds(step, request)


def without(step: Step, *names: str) -> Step:
    return dataclasses.replace(step, cache=dataclasses.replace(step.cache, **dict.fromkeys(names)))


def test_a_cache_without_block_keys_takes_k_and_v_alone(prepare_step: Any, backend: str) -> None:
    """Where only attention runs; the plan is shared with layers that have both."""
    case = StepCase("attention", ((0, 10), (6, 7)))
    whole, part = (make_step(case, seed=48, written=False) for _ in range(2))
    full = prepare_step(whole, backend=backend)
    alone = prepare_step(without(part, "block_keys", "ring", "ring_positions"), backend=backend)
    assert_bitwise_equal(alone.q, full.q)
    assert_bitwise_equal(part.cache.k_pages, whole.cache.k_pages)
    assert_bitwise_equal(part.cache.v_pages, whole.cache.v_pages)


def test_a_plan_without_rings_prepares_steps_that_begin_with_a_block(
    prepare_step: Any, assert_holds: Any, backend: str
) -> None:
    """A whole prompt at once, as an encoder has it; no ring is there, and none is needed."""
    step = make_step(StepCase("whole", ((0, 23), (8, 5), (4, 4))), seed=49, written=False)
    plan = step.plan
    plan = plan_step(
        plan.query_starts, plan.seq_lens, plan.page_table, page_tokens=16, block_tokens=4, topk_blocks=8,
        max_query_len=23, max_seq_len=23, num_pages=plan.num_pages,
    )  # fmt: skip
    bare = without(dataclasses.replace(step, plan=plan), "ring", "ring_positions")
    prepare_step(bare, backend=backend)
    with_ring = make_step(StepCase("whole", ((0, 23), (8, 5), (4, 4))), seed=49, written=False)
    prepare_step(with_ring, backend=backend)
    assert_bitwise_equal(step.cache.block_keys, with_ring.cache.block_keys)
    assert_bitwise_equal(step.cache.k_pages, with_ring.cache.k_pages)
    for request in with_ring.requests:
        assert_holds(with_ring, request)


def test_a_step_inside_a_block_that_closes_none_needs_no_ring(prepare_step: Any, backend: str) -> None:
    step = make_step(StepCase("open", ((5, 2),)), seed=50, written=False)
    plan = plan_step(
        step.plan.query_starts, step.plan.seq_lens, step.plan.page_table, page_tokens=16, block_tokens=4,
        topk_blocks=8, max_query_len=2, max_seq_len=7, num_pages=step.plan.num_pages,
    )  # fmt: skip
    bare = without(dataclasses.replace(step, plan=plan), "ring", "ring_positions")
    before = snapshot(bare.cache.block_keys)
    prepare_step(bare, backend=backend)
    assert_unchanged(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_in_one_row_stays_in_that_row(backend: str, prepare_step: Any, dtype: torch.dtype) -> None:
    """Rows are prepared on their own; only the block that holds the row is touched beside it."""
    case = StepCase("nan", ((0, 24),), dtype=dtype)
    clean, dirty = (make_step(case, seed=51, written=False) for _ in range(2))
    for values in (dirty.q_gate, dirty.k, dirty.v, dirty.index_qk):
        values[9] = torch.nan
    results = [prepare_step(each, backend=backend) for each in (clean, dirty)]
    others = torch.arange(24) != 9
    for name in ("q", "index_q"):
        assert_bitwise_equal(getattr(results[1], name)[others], getattr(results[0], name)[others], name)
    truth = clean.requests[0]  # both come of one seed, so their pages are the same
    blocks = torch.tensor([0, 1, 3, 4, 5])
    for name, places in (
        ("k_pages", truth.slot_ids[others]), ("v_pages", truth.slot_ids[others]),
        ("block_keys", truth.block_slot_ids[blocks]),
    ):  # fmt: skip
        rows = [read_slots(getattr(each.cache, name), places) for each in (dirty, clean)]
        assert_bitwise_equal(rows[0], rows[1], name)


def test_float64_goes_through_from_end_to_end(prepare_step: Any, backend: str) -> None:
    """The two backends agree to float64's own accuracy, which nothing rounded to fp32 would."""
    case = StepCase("fp64", ((0, 13), (6, 7)), dtype=torch.float64, rope_dtype=torch.float64, mrope=True)
    one, other = (make_step(case, seed=52, written=False) for _ in range(2))
    mine = prepare_step(one, backend=backend)
    prepare_step(other, backend="reference")
    assert mine.q.dtype == mine.index_q.dtype == torch.float64
    for name in ("k_pages", "block_keys"):
        stored, wanted = (getattr(each.cache, name) for each in (one, other))
        torch.testing.assert_close(stored, wanted, rtol=1e-14, atol=1e-14, equal_nan=True)


def test_gradients_reach_queries_gates_keys_and_values(backend: str) -> None:
    """With the torch backend and without `out`; index queries and block keys are constants."""
    case = StepCase("train", ((0, 6), (2, 3)), q_heads=2, kv_heads=1, head_dim=6, index_heads=1, rotary_dim=4,
                    index_head_dim=8, dtype=torch.float64, layout="dense", page_tokens=8)  # fmt: skip
    step = make_step(case, seed=53, written=False)

    def call(q_gate: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fields = {name: getattr(step.cache, name).clone() for name in CACHES}
        cache = LayerCache(**fields)
        inputs = (q_gate, k, v, step.index_qk, step.rope_positions)
        prepared = prepare(*inputs, step.rope, step.norms, cache, step.plan, backend=backend)
        slots = step.plan.slot_ids
        return prepared.q, prepared.gate, read_slots(cache.k_pages, slots), read_slots(cache.v_pages, slots)

    leaves = [x.detach().clone().requires_grad_(True) for x in (step.q_gate, step.k, step.v)]
    if backend == "torch":
        assert torch.autograd.gradcheck(call, leaves)
    else:
        assert not call(*leaves)[0].requires_grad


def test_nothing_carries_a_gradient_into_buffers_or_index_tensors(backend: str) -> None:
    step = make_step(StepCase("leak", ((0, 9),)), seed=54, written=False)
    for values in (step.q_gate, step.k, step.v, step.index_qk):
        values.requires_grad_(True)
    out = Prepared(torch.empty_like(step.index_q), torch.empty_like(step.q), torch.empty_like(step.gate.detach()))
    run(step, out=out, backend=backend)
    for tensor in (out.q, out.index_q, out.gate, *(getattr(step.cache, name) for name in CACHES)):
        assert not tensor.requires_grad
    again = make_step(step.case, seed=54, written=False)
    again.index_qk.requires_grad_(True)
    assert not run(again, backend=backend).index_q.requires_grad
    assert not again.cache.block_keys.requires_grad
