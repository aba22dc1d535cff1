"""Nothing beyond a row's tokens is read, nothing beyond the output is written: empty rows, padding, NaN everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.attention import attend
from flashqsa.cache import LayerCache
from flashqsa.plan import StepPlan, plan_step
from flashqsa.results import Selection
from flashqsa.testing import Step, StepCase, assert_bitwise_equal, make_step, poison_slots

Check = Callable[..., tuple[torch.Tensor, torch.Tensor]]
E4M3 = torch.float8_e4m3fn


def _without_unselected(step: Step, lists: list[list[int]], keys_too: bool) -> LayerCache:
    """The caches with NaN wherever no row of the step attends."""
    attended: dict[int, set[int]] = {request.request_id: set() for request in step.requests}
    for request in step.requests:
        for row, _ in request.rows():
            attended[request.request_id].update(lists[row])
    k_pages, v_pages = step.cache.k_pages.clone(), step.cache.v_pages.clone()
    for request in step.requests:
        spare = [token for token in range(request.seq_len) if token not in attended[request.request_id]]
        for pages in (k_pages, v_pages) if keys_too else (v_pages,):
            poison_slots(pages, request.slot_ids[spare])
    return dataclasses.replace(step.cache, k_pages=k_pages, v_pages=v_pages)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, E4M3], ids=["fp32", "bf16", "e4m3"])
@pytest.mark.parametrize("keys_too", [False, True], ids=["V", "K and V"])
def test_fault_45_nan_where_no_row_attends(
    kv_dtype: torch.dtype, keys_too: bool, backend: str, choose: Any, row_lists: Any
) -> None:
    case = StepCase("nan", ((300, 1), (250, 6), (0, 90), (200, 40)), topk_blocks=3, kv_dtype=kv_dtype)
    step = make_step(case, seed=45)
    selection = choose(step, noise=0.1)
    lists = row_lists(step, selection)
    assert sum(len(set(tokens)) for tokens in lists) > 0
    wanted = attend(step.q, step.cache, selection, step.plan, gate=step.gate, return_lse=True, backend=backend)
    poisoned = _without_unselected(step, lists, keys_too)
    got = attend(step.q, poisoned, selection, step.plan, gate=step.gate, return_lse=True, backend=backend)
    assert bool(torch.isfinite(got[0]).all())
    assert_bitwise_equal(got[0], wanted[0], "output")
    assert_bitwise_equal(got[1], wanted[1], "lse")


def test_nan_that_is_attended_is_not_hidden(backend: str, choose: Any, row_lists: Any) -> None:
    """NaN in a row's own tokens comes out of that row, as of any attention, and of no other request."""
    step = make_step(StepCase("nan", ((40, 1), (50, 1), (0, 20))), seed=46)
    selection = choose(step)
    for name in ("k_pages", "v_pages"):
        pages = getattr(step.cache, name).clone()
        poison_slots(pages, step.requests[0].slot_ids[40:41])
        cache = dataclasses.replace(step.cache, **{name: pages})
        out = attend(step.q, cache, selection, step.plan, backend=backend)
        assert bool(out[0].isnan().all()), name
        assert bool(torch.isfinite(out[1:]).all()), name


def test_nan_and_infinite_inputs_stay_in_their_rows(backend: str, choose: Any) -> None:
    step = make_step(StepCase("inf", ((0, 70), (90, 1), (40, 3))), seed=47)
    selection = choose(step)
    wanted = attend(step.q, step.cache, selection, step.plan, gate=step.gate, backend=backend)
    q, gate = step.q.clone(), step.gate.clone()
    q[5] = float("nan")
    q[70] = float("inf")
    gate[72, 0] = float("nan")
    gate[72, 1], gate[72, 2] = float("inf"), -float("inf")
    got = attend(q, step.cache, selection, step.plan, gate=gate, backend=backend)
    assert bool(got[5].isnan().all())
    assert bool(got[70].isnan().all())
    assert bool(got[72, 0].isnan().all())
    ungated = attend(step.q, step.cache, selection, step.plan, backend=backend)
    assert_bitwise_equal(got[72, 1], ungated[72, 1], "a gate of +inf is 1")
    assert bool((got[72, 2] == 0).all())
    others = [row for row in range(74) if row not in (5, 70, 72)]
    assert_bitwise_equal(got[others], wanted[others], "other rows")


def _empty_plan(lens: list[int], rows: list[int], table: torch.Tensor, **options: Any) -> StepPlan:
    starts = torch.tensor([0, *rows]).cumsum(0).to(torch.int32)
    return plan_step(
        starts, torch.tensor(lens, dtype=torch.int32), table,
        page_tokens=16, block_tokens=4, topk_blocks=4, max_query_len=max(rows, default=0), max_seq_len=max([*lens, 0]),
        **options,
    )  # fmt: skip


def _everything(plan: StepPlan, garbage: int = -1) -> Selection:
    """All visible blocks; rows of padding carry garbage."""
    column = torch.arange(4, dtype=torch.int32)[None]
    block_ids = torch.where(column < plan.visible_blocks[:, None], column, -1)
    counts, visible = plan.visible_blocks.clamp(max=4), plan.visible_blocks.clone()
    padding = plan.request_ids < 0
    block_ids[padding], counts[padding], visible[padding] = garbage, garbage, garbage
    return Selection(block_ids, counts, None, visible, plan.request_ids.clone())


@pytest.mark.parametrize("garbage", [-1, 2**31 - 1, -(2**31), 0])
def test_fault_18_zero_length_requests(garbage: int, backend: str) -> None:
    """seq_lens [0, 5, 0] with page rows of garbage, and caches of NaN but for the five tokens."""
    pages = torch.full((2, 16, 2, 8), float("nan"))
    pages[1, :5] = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(18))
    table = torch.tensor([[garbage, garbage], [1, garbage], [garbage, garbage]], dtype=torch.int32)
    cache = LayerCache(pages, pages.clone(), None, None, None)
    alone_plan = _empty_plan([5], [1], table[1:2])
    q = torch.full((3, 4, 8), float("nan"))
    q[1] = 1.0
    wanted = attend(q[1:2], cache, _everything(alone_plan), alone_plan, return_lse=True, backend=backend)
    for lens, rows in (([0, 5, 0], [1, 1, 1]), ([0, 5, 0], [0, 1, 0])):
        plan = _empty_plan(lens, rows, table)
        live = plan.request_ids >= 0
        got = attend(
            q[: plan.num_rows] if plan.num_rows == 3 else q[1:2], cache, _everything(plan, garbage), plan,
            gate=None, return_lse=True, backend=backend,
        )  # fmt: skip
        assert_bitwise_equal(got[0][live], wanted[0], "the live request")
        assert_bitwise_equal(got[1][live], wanted[1], "the live request")
        assert bool((got[0][~live] == 0).all())
        assert bool((got[1][~live] == -torch.inf).all())


@pytest.mark.parametrize("lens", [[], [0], [0, 0]], ids=str)
@pytest.mark.parametrize("rows", [0, 2])
def test_steps_without_any_token(lens: list[int], rows: int, backend: str) -> None:
    """No request, no row, or rows of padding alone: zeros and -inf, from caches without a page."""
    table = torch.full((len(lens), 3), -1, dtype=torch.int32)
    plan = _empty_plan(lens, [0] * len(lens), table, num_rows=rows)
    cache = LayerCache(torch.empty(0, 16, 2, 8), torch.empty(0, 16, 2, 8), None, None, None)
    q = torch.full((rows, 4, 8), float("nan"))
    out, lse = attend(q, cache, _everything(plan), plan, gate=q, return_lse=True, backend=backend)
    assert out.shape == (rows, 4, 8)
    assert bool((out == 0).all())
    assert lse.shape == (rows, 4)
    assert bool((lse == -torch.inf).all())


def test_rows_without_a_token_read_nothing(backend: str, choose: Any) -> None:
    """Live rows that select nothing, on a shard without the tail: zeros whatever their gate, query and caches."""
    step = make_step(StepCase("nothing", ((40, 1), (0, 70), (63, 4)), dtype=torch.float32), seed=19)
    counts = [0 if row in (0, 5, 6, 30, 72) else min(8, seen) for row, seen in enumerate(step.plan.visible_blocks)]
    selection = choose(step, counts=[int(count) for count in counts])
    empty = selection.block_counts == 0
    q, gate = step.q.clone(), step.gate.clone()
    q[empty] = float("nan")
    gate[empty] = float("nan")
    pages = [x.clone() for x in (step.cache.k_pages, step.cache.v_pages)]
    for x in pages:
        poison_slots(x, step.requests[0].slot_ids)  # its one row selects nothing
    cache = dataclasses.replace(step.cache, k_pages=pages[0], v_pages=pages[1])
    out, lse = attend(q, cache, selection, step.plan, gate=gate, include_tail=False, return_lse=True, backend=backend)
    wanted, wanted_lse = attend(
        step.q, step.cache, selection, step.plan, gate=step.gate, include_tail=False, return_lse=True, backend=backend
    )
    assert int(empty.sum()) >= 5
    assert bool((out[empty] == 0).all())
    assert bool((lse[empty] == -torch.inf).all())
    assert_bitwise_equal(out[~empty], wanted[~empty], "other rows")
    assert_bitwise_equal(lse[~empty], wanted_lse[~empty], "other rows")


@pytest.mark.parametrize("tokens", [1, 2, 3])
def test_fault_11_steps_shorter_than_a_block(tokens: int, backend: str, choose: Any, check: Check) -> None:
    """Alone and beside a request of four tokens, pages at the end of a guarded allocation."""
    results = []
    for requests, seeds in ((((0, tokens),), (1,)), (((0, tokens), (0, 4)), (1, 0)), (((0, 4), (0, tokens)), (0, 1))):
        case = StepCase("short", requests, request_seeds=seeds, page_tokens=4, layout="dense")
        step = make_step(case, seed=11)
        first = step.requests[seeds.index(1)].first_row
        out, lse = check(step, choose(step), backend)
        results.append((out[first : first + tokens], lse[first : first + tokens]))
    for out, lse in results[1:]:
        assert_bitwise_equal(out, results[0][0], "output")
        assert_bitwise_equal(lse, results[0][1], "lse")


@pytest.mark.parametrize("extra", [0, 1, 31, 62])
def test_fault_13_packed_requests_of_every_size(extra: int, backend: str, choose: Any, check: Check) -> None:
    """23 requests whose tiles all end early, between canaries; each has the bits of its single run."""
    rows = [1 + (5 * request + extra) % 13 for request in range(23)]
    before = [(17 * request + extra) % 71 for request in range(23)]
    case = StepCase(
        "packed", tuple(zip(before, rows, strict=True)), head_dim=8, q_heads=2, kv_heads=1, padding_rows=extra % 3,
        padding_requests=extra % 2,
    )  # fmt: skip
    step = make_step(case, seed=13)
    out, lse = check(step, choose(step), backend)
    for request in range(0, 23, 4):
        part = StepCase("alone", ((before[request], rows[request]),), request_seeds=(request,), head_dim=8, q_heads=2,
                        kv_heads=1)  # fmt: skip
        alone = make_step(part, seed=13)
        wanted = attend(alone.q, alone.cache, choose(alone), alone.plan, gate=alone.gate, return_lse=True,
                        backend=backend)  # fmt: skip
        first = step.requests[request].first_row
        assert_bitwise_equal(out[first : first + rows[request]], wanted[0], f"request {request}")
        assert_bitwise_equal(lse[first : first + rows[request]], wanted[1], f"request {request}")


@pytest.mark.parametrize("kv_dtype", [torch.float32, E4M3], ids=["fp32", "e4m3"])
@pytest.mark.parametrize("padded", ["2x pages", "1.1x pages", "2x tokens", "2x heads", "odd elements"])
def test_fault_15_caches_as_views_of_larger_pools(
    padded: str, kv_dtype: torch.dtype, backend: str, choose: Any
) -> None:
    step = make_step(StepCase("views", ((60, 9), (90, 1), (0, 17)), kv_dtype=kv_dtype, layout="dense"), seed=15)
    selection = choose(step)
    wanted = attend(step.q, step.cache, selection, step.plan, gate=step.gate, backend=backend)
    views = []
    for pages in (step.cache.k_pages, step.cache.v_pages):
        count, tokens, heads, dim = pages.shape
        page = tokens * heads * dim
        strides = {
            "2x pages": (2 * page, heads * dim, dim),
            "1.1x pages": (page + page // 10, heads * dim, dim),
            "2x tokens": (2 * page, 2 * heads * dim, dim),
            "2x heads": (2 * page, 2 * heads * dim, 2 * dim),
            "odd elements": (page * 2 + 1, heads * dim + 3, dim + 1),
        }[padded]
        pool = torch.full((1 + strides[0] * count,), 0xFF, dtype=torch.uint8)
        if kv_dtype != E4M3:
            pool = torch.full((1 + strides[0] * count,), float("nan"))
        view = pool[1:].as_strided((count, tokens, heads, dim), (*strides, 1))
        view.copy_(pages.view(torch.uint8) if kv_dtype == E4M3 else pages)
        views.append(view.view(E4M3) if kv_dtype == E4M3 else view)
    cache = dataclasses.replace(step.cache, k_pages=views[0], v_pages=views[1])
    got = attend(step.q, cache, selection, step.plan, gate=step.gate, backend=backend)
    assert_bitwise_equal(got, wanted, padded)


@pytest.mark.parametrize("left_pad", [0, 1, 3, 4, 7])
def test_caches_as_transformers_keeps_them(left_pad: int, backend: str, choose: Any) -> None:
    """[B, heads, tokens, D] transposed: contiguous requests behind left pads, the same bits as from pages."""
    case = StepCase("pages", ((50, 9), (80, 1), (0, 33)))
    step = make_step(case, seed=27)
    selection = choose(step)
    wanted = attend(step.q, step.cache, selection, step.plan, gate=step.gate, backend=backend)
    states = [torch.full((3, 2, left_pad + 96, 16), float("nan")) for _ in range(2)]
    for request in step.requests:
        for state, tokens in zip(states, (request.k, request.v), strict=True):
            state[request.request_id, :, left_pad : left_pad + request.seq_len] = tokens.transpose(0, 1)
    views = [state.transpose(1, 2) for state in states]
    cache = LayerCache(views[0], views[1], None, None, None, layer_id=3)
    plan = plan_step(
        step.plan.query_starts, step.plan.seq_lens, None, page_tokens=None, block_tokens=4, topk_blocks=8,
        max_query_len=33, max_seq_len=81, first_slots=torch.arange(3) * (left_pad + 96) + left_pad,
    )  # fmt: skip
    assert_bitwise_equal(attend(step.q, cache, selection, plan, gate=step.gate, backend=backend), wanted, "output")
