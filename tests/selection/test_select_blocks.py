"""`select_blocks` against the oracle: exact ids on integer scores, bounds and exact top-K on random ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.plan import StepPlan, plan_step
from flashqsa.results import Selection
from flashqsa.selection import select_blocks
from flashqsa.selection.reference import score_blocks_reference
from flashqsa.testing import (
    StepCase,
    assert_best_selection,
    assert_bitwise_equal,
    assert_same_selection,
    assert_scores_within,
    guarded_like,
    make_step,
    oracles,
    score_bounds,
    stream,
)

E4M3 = torch.float8_e4m3fn
RAGGED = ((0, 37), (5, 1), (62, 3), (0, 1), (130, 16), (64, 1), (0, 0), (97, 5), (11, 0))

CASES = (
    StepCase("split", RAGGED),
    StepCase("packed", RAGGED, layout="packed"),
    StepCase("hnd", RAGGED, layout="hnd"),
    StepCase("dense", RAGGED, layout="dense", page_tokens=64),
    StepCase("contiguous", RAGGED, contiguous=True),
    StepCase("page-1600", RAGGED, page_tokens=1600),
    StepCase("page-is-a-block", RAGGED, page_tokens=4),
    StepCase("blocks-of-1", RAGGED, block_tokens=1, topk_blocks=33, page_tokens=7),
    StepCase("blocks-of-2", RAGGED, block_tokens=2, topk_blocks=16, page_tokens=10),
    StepCase("blocks-of-8", RAGGED, block_tokens=8, topk_blocks=3, page_tokens=80),
    StepCase("topk-1", RAGGED, topk_blocks=1),
    StepCase("topk-above-visible", RAGGED, topk_blocks=500),
    StepCase("one-head", RAGGED, index_heads=1),
    StepCase("five-heads-of-22", RAGGED, index_heads=5, index_head_dim=22),
    StepCase("padding", RAGGED, padding_rows=5, padding_requests=3),
    StepCase("bounds-unknown", RAGGED, max_query_len=4096, max_seq_len=1 << 20),
    StepCase("mrope-verify", ((200, 5), (33, 9)), mrope=True, speculative_rows=8),
    StepCase("nothing", ()),
    StepCase("only-padding", ((0, 0), (0, 0)), padding_rows=3),
)

DTYPES = {
    "fp32": dict(dtype=torch.float32),
    "bf16": dict(dtype=torch.bfloat16),
    "fp16": dict(dtype=torch.float16),
    "bf16-e4m3": dict(dtype=torch.bfloat16, index_dtype=E4M3, index_q_dtype=E4M3),
    "fp16-e4m3-keys": dict(dtype=torch.float16, index_dtype=E4M3),
    "fp32-bf16-keys": dict(dtype=torch.float32, index_dtype=torch.bfloat16),
    "fp64": dict(dtype=torch.float64),
}


@pytest.mark.parametrize("scores", [False, True], ids=["ids", "scores"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_select_blocks_of_integer_scores_is_exact(
    integer_step: Any, select: Any, backend: str, case: StepCase, scores: bool
) -> None:
    step = integer_step(case, seed=1)
    selection = select(step, backend=backend, return_scores=scores)
    wanted = oracles.step_selection(step)
    assert_same_selection(selection, wanted)
    assert_bitwise_equal(selection.visible_blocks, step.plan.visible_blocks)
    assert_bitwise_equal(selection.request_ids, step.plan.request_ids)
    assert selection.layer_id == step.cache.layer_id
    assert (selection.scores is not None) == scores
    if selection.scores is None:
        return
    exact = oracles.step_scores(step)
    for row, ids in enumerate(wanted):
        rest = [-torch.inf] * (case.topk_blocks - len(ids))
        assert selection.scores[row].tolist() == exact[row][ids].tolist() + rest, f"scores of row {row}"


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES.keys())
def test_select_blocks_scores_are_within_the_bound_of_float64_and_their_top_is_exact(
    select: Any, backend: str, dtypes: dict[str, Any]
) -> None:
    wide = StepCase("wide", ((0, 20), (411, 3), (150, 1)), index_head_dim=128, topk_blocks=200, **dtypes)
    everything = select(make_step(wide, seed=2), backend=backend, return_scores=True)
    step = make_step(dataclasses.replace(wide, topk_blocks=7), seed=2)
    best = select(step, backend=backend, return_scores=True)
    without_scores = select(step, backend=backend)
    assert_bitwise_equal(best.block_ids, without_scores.block_ids, "ids with and without scores")
    for request in step.requests:
        for row, position in request.rows():
            visible = (position + 1) // 4
            exact = oracles.score_blocks(step.index_q[row], request.block_keys[:visible])
            bounds = score_bounds(step.index_q[row], request.block_keys[:visible])
            scores = everything.scores[row, :visible]
            assert_scores_within(scores, exact, bounds, f"row {row}")
            ids = best.block_ids[row, : min(7, visible)].tolist()
            assert_best_selection(ids, exact, bounds, 7, f"row {row}")
            if wide.dtype != torch.float64 or backend == "torch":  # the definition ranks float64 before rounding
                assert ids == oracles.select_best(scores, 7), f"row {row}: not the top of its own scores"
            assert_bitwise_equal(best.scores[row, : len(ids)], scores[ids], f"row {row}: scores in another selection")


@pytest.mark.parametrize(("heads", "dim"), [(1, 1), (1, 3), (3, 5), (7, 1), (2, 100), (16, 33)])
def test_select_blocks_takes_any_number_of_heads_and_dimensions(
    key_rows: Any, select: Any, backend: str, heads: int, dim: int
) -> None:
    generator = stream(3, heads, dim)
    keys = [torch.randint(-3, 4, (m, dim), generator=generator).float() for m in (1, 40, 19)]
    queries = [torch.randint(-3, 4, (rows, heads, dim), generator=generator).float() for rows in (1, 13, 2)]
    rows = key_rows(keys, queries, seed=3, topk_blocks=6)
    selection = select(rows, backend=backend)
    wanted = []
    for each, group in zip(keys, queries, strict=True):
        for row, query in enumerate(group):
            visible = (len(each) * 4 - len(group) + row + 1) // 4
            wanted.append(oracles.select_best(oracles.score_blocks(query, each[:visible]), 6))
    assert_same_selection(selection, wanted)


def test_score_blocks_reference_keeps_float64() -> None:
    generator = stream(4)
    query, keys = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (4, 30))
    scores = score_blocks_reference(query, keys)
    assert scores.dtype == torch.float64
    torch.testing.assert_close(scores, oracles.score_blocks(query, keys), rtol=1e-14, atol=1e-14)


def test_fault_08_heads_are_summed_after_the_relu(key_rows: Any, select: Any, backend: str) -> None:
    """Block 0 wins by the sum of relus, block 1 by the relu of the sum, block 2 by the largest head."""
    per_head = torch.tensor([[3.0, 3.0, -9.0], [2.0, 2.0, 1.5], [5.0, -7.0, 0.0]])
    rows = key_rows([per_head], [torch.eye(3)[None]], seed=5, topk_blocks=1)
    selection = select(rows, backend=backend, return_scores=True)
    assert selection.block_ids.tolist() == [[0]]
    assert selection.scores.tolist() == [[6.0]]
    for losing, winner in ((per_head.sum(1).relu(), 1), (per_head.amax(1), 2)):
        assert int(losing.argmax()) == winner, "the vectors must tell the reductions apart"


@pytest.mark.parametrize("page_tokens", [64, 1600])
def test_fault_37_contexts_just_past_a_page(integer_step: Any, select: Any, backend: str, page_tokens: int) -> None:
    lens = [*range(63, 71), *range(127, 131), 4097]
    case = StepCase("pages", tuple((n - 1, 1) for n in lens), page_tokens=page_tokens, topk_blocks=9)
    step = integer_step(case, seed=6)
    assert_same_selection(select(step, backend=backend), oracles.step_selection(step))


@pytest.mark.parametrize("contexts", [(1, 55_995), (2049, 1, 2047), (1, 2047, 2049, 2048, 7, 0, 2052)], ids=len)
def test_fault_25_ragged_batches_of_long_and_short_contexts(
    integer_step: Any, select: Any, backend: str, contexts: tuple[int, ...]
) -> None:
    case = StepCase(
        "ragged", tuple((max(n - 1, 0), min(n, 1)) for n in contexts), q_heads=1, kv_heads=1, head_dim=8,
        index_head_dim=8, page_tokens=64, topk_blocks=512,
    )  # fmt: skip
    step = integer_step(case, seed=7, largest=9)
    assert_same_selection(select(step, backend=backend), oracles.step_selection(step))


@pytest.mark.parametrize("requests", [1, 3, 64, 65])
def test_fault_48_verify_widths_are_not_tied_to_a_tile(
    integer_step: Any, select: Any, backend: str, requests: int
) -> None:
    widths = [1, 3, 5, 7, 2, 4, 6, 8]
    for width in widths if requests <= 3 else widths[:2]:
        case = StepCase("verify", tuple((20 + 3 * i, width) for i in range(requests)), topk_blocks=4)
        step = integer_step(case, seed=8)
        assert_same_selection(select(step, backend=backend), oracles.step_selection(step))


def test_select_blocks_fills_the_buffers_given(integer_step: Any, backend: str) -> None:
    step = integer_step(StepCase("out", RAGGED, padding_rows=3), seed=9)
    plain = select_blocks(step.index_q, step.cache, step.plan, return_scores=True, backend=backend)
    guards = {
        name: guarded_like(torch.full_like(getattr(plain, name), 77))
        for name in ("block_ids", "block_counts", "scores", "visible_blocks", "request_ids")
    }
    out = Selection(**{name: guard.view for name, guard in guards.items()}, layer_id=None)
    filled = select_blocks(step.index_q, step.cache, step.plan, return_scores=True, out=out, backend=backend)
    for name, guard in guards.items():
        assert getattr(filled, name).data_ptr() == guard.view.data_ptr(), f"{name} is not the buffer given"
        assert_bitwise_equal(guard.view, getattr(plain, name), name)
        guard.assert_intact()
    assert filled.layer_id == step.cache.layer_id


def test_select_blocks_leaves_rows_alone_that_an_engine_marks_as_padding(
    integer_step: Any, select: Any, backend: str
) -> None:
    """Padding rows of an engine keep positions, counts and slots of some earlier step."""
    step = integer_step(StepCase("engine", ((40, 3), (90, 2)), padding_rows=4, topk_blocks=5), seed=10)
    plan, live = step.plan, step.live_rows
    stale = StepPlan.from_tensors(
        query_starts=plan.query_starts, seq_lens=plan.seq_lens, page_table=plan.page_table,
        request_ids=plan.request_ids, positions=torch.where(live, plan.positions, 70),
        visible_blocks=torch.where(live, plan.visible_blocks, 17), slot_ids=plan.slot_ids,
        page_tokens=plan.page_tokens, block_tokens=4, topk_blocks=5, max_query_len=3, max_seq_len=92,
    )  # fmt: skip
    selection = select(dataclasses.replace(step, plan=stale), backend=backend)
    assert_same_selection(selection, oracles.step_selection(step))
    assert selection.visible_blocks[~live].tolist() == [0] * 4


def test_select_blocks_takes_visible_counts_that_fall_within_a_request(
    integer_step: Any, select: Any, backend: str
) -> None:
    """Draft rows may be shown fewer blocks than their positions would see."""
    step = integer_step(StepCase("frozen", ((100, 6), (63, 3)), topk_blocks=3), seed=11)
    plan = step.plan
    visible = torch.tensor([25, 0, 9, 2, 26, 0, 16, 0, 0], dtype=torch.int32)
    frozen = StepPlan.from_tensors(
        query_starts=plan.query_starts, seq_lens=plan.seq_lens, page_table=plan.page_table,
        request_ids=plan.request_ids, positions=plan.positions, visible_blocks=visible, slot_ids=plan.slot_ids,
        page_tokens=plan.page_tokens, block_tokens=4, topk_blocks=3, max_query_len=6, max_seq_len=106,
    )  # fmt: skip
    wanted = [oracles.select_best(s[:n], 3) for s, n in zip(oracles.step_scores(step), visible, strict=True)]
    for scores in (False, True):
        selection = select(dataclasses.replace(step, plan=frozen), backend=backend, return_scores=scores)
        assert_same_selection(selection, wanted)


def test_fault_50_one_plan_serves_layers_of_different_keys(integer_step: Any, select: Any, backend: str) -> None:
    case = StepCase("layers", RAGGED)
    steps = [integer_step(case, seed=seed) for seed in (12, 13)]
    plan = steps[0].plan
    groups = plan.row_groups()
    for step in steps:
        # the same plan over the other layer's caches: put their keys where the plan looks for them
        keys = [request.block_keys for request in step.requests]
        for request, each in zip(steps[0].requests, keys, strict=True):
            slots, pages = request.block_slot_ids, steps[0].cache.block_keys
            pages[slots // pages.shape[1], slots % pages.shape[1]] = each.to(pages.dtype)
        layer = dataclasses.replace(step, plan=plan, cache=steps[0].cache)
        assert_same_selection(select(layer, backend=backend), oracles.step_selection(step))
    assert plan.row_groups() is groups, "a layer rebuilt what the plan holds for all of them"


def test_select_blocks_of_a_refilled_plan_is_that_of_a_plan_made_anew(integer_step: Any, select: Any) -> None:
    first, second = (
        integer_step(StepCase("refill", ((before, 2), (33, 1)), padding_requests=1), seed=14) for before in (61, 62)
    )
    numbers = dict(page_tokens=16, block_tokens=4, topk_blocks=8, max_query_len=2, max_seq_len=64, num_rows=4,
                   num_pages=None)  # fmt: skip
    select(first)
    plan = plan_step(
        first.plan.query_starts.clone(), first.plan.seq_lens.clone(), second.plan.page_table.clone(), **numbers
    )
    select_blocks(first.index_q, second.cache, plan)
    plan_step(second.plan.query_starts, second.plan.seq_lens, second.plan.page_table, **numbers, out=plan)
    assert_same_selection(select(dataclasses.replace(second, plan=plan)), oracles.step_selection(second))
