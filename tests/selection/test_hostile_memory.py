"""Stale, free and foreign memory never reaches a selection."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashqsa.selection import select_blocks
from flashqsa.testing import StepCase, assert_bitwise_equal, assert_same_selection, oracles, stream

FILLS = (math.nan, math.inf, -math.inf, 3e38, -3e38)


@pytest.mark.parametrize("fill", FILLS, ids=str)
@pytest.mark.parametrize("layout", ["split", "dense", "contiguous"])
def test_fault_29_blocks_that_a_row_does_not_see_change_nothing(
    integer_step: Any, select: Any, backend: str, fill: float, layout: str
) -> None:
    """Free pages, the rest of last pages, and the blocks that only later rows of the request see."""
    memory = dict(contiguous=True) if layout == "contiguous" else dict(layout=layout)
    case = StepCase("stale", ((40, 24), (7, 60)), topk_blocks=4, **memory)
    step = integer_step(case, seed=70)
    wanted = oracles.step_selection(step)
    pages = step.cache.block_keys
    used = torch.zeros(pages.shape[:2], dtype=torch.bool)
    kept_blocks = 13
    for request in step.requests:
        slots = request.block_slot_ids[:kept_blocks]
        used[slots // pages.shape[1], slots % pages.shape[1]] = True
    pages[~used] = fill
    selection = select(step, backend=backend, return_scores=True)
    clean = [row for row, visible in enumerate(step.plan.visible_blocks.tolist()) if visible <= kept_blocks]
    assert len(clean) > 40
    assert_same_selection(selection.take(torch.tensor(clean)), [wanted[row] for row in clean])


@pytest.mark.parametrize("remainder", [1, 2, 17, 31, 32, 33, 62, 63])
def test_fault_13_packed_requests_whose_blocks_fill_no_tile(
    integer_step: Any, select: Any, backend: str, remainder: int
) -> None:
    blocks = torch.randint(0, 12, (22,), generator=stream(71, remainder)).tolist()
    blocks.append((remainder - sum(blocks)) % 64)
    assert sum(blocks) % 64 == remainder
    requests = tuple((max(4 * n + i % 4 - 1, 0), 1) for i, n in enumerate(blocks))
    step = integer_step(StepCase("packed", requests, topk_blocks=3, padding_rows=1), seed=71)
    assert_same_selection(select(step, backend=backend, return_scores=True), oracles.step_selection(step))


@pytest.mark.parametrize("scores", [False, True])
def test_fault_45_rows_that_see_no_block_select_none(
    integer_step: Any, select: Any, backend: str, scores: bool
) -> None:
    """Requests of fewer than r tokens, requests of length 0 and padding, alone and beside long ones."""
    for requests in (((0, 3),), ((0, 0), (0, 1), (2, 1)), ((0, 2), (90, 3), (1, 1))):
        step = integer_step(StepCase("blind", requests, topk_blocks=5, padding_rows=2), seed=72)
        selection = select(step, backend=backend, return_scores=scores)
        wanted = oracles.step_selection(step)
        assert_same_selection(selection, wanted)
        blind = [row for row, ids in enumerate(wanted) if not ids]
        assert selection.block_ids[blind].eq(-1).all()
        if selection.scores is not None:
            assert selection.scores[blind].eq(-math.inf).all()


def test_fault_45_a_row_whose_keys_and_query_are_all_nan_selects_the_lowest_blocks(
    integer_step: Any, select: Any, backend: str
) -> None:
    step = integer_step(StepCase("nan", ((99, 2), (50, 1)), topk_blocks=5), seed=73)
    others = oracles.step_selection(step)[2]
    step.index_q[:2] = math.nan
    first = step.requests[0].block_slot_ids
    step.cache.block_keys[first // 4, first % 4] = math.nan
    assert_same_selection(select(step, backend=backend), [list(range(5)), list(range(5)), others])


def test_buffers_full_of_an_earlier_selection_leave_nothing_behind(integer_step: Any, backend: str) -> None:
    """`out` of a long step, refilled by one whose rows see less."""
    long, short = (
        integer_step(StepCase("out", requests, topk_blocks=6), seed=74)
        for requests in (((300, 2), (200, 2)), ((0, 2), (14, 2)))
    )
    out = select_blocks(long.index_q, long.cache, long.plan, return_scores=True, backend=backend)
    out.block_ids[:] = torch.where(out.block_ids >= 0, out.block_ids, 2**31 - 1)
    refilled = select_blocks(short.index_q, short.cache, short.plan, return_scores=True, out=out, backend=backend)
    fresh = select_blocks(short.index_q, short.cache, short.plan, return_scores=True, backend=backend)
    for name in ("block_ids", "block_counts", "scores", "visible_blocks", "request_ids"):
        assert_bitwise_equal(getattr(refilled, name), getattr(fresh, name), name)
