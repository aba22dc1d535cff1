"""Union tiles in Gluon: what plain tiles promise, on the one architecture whose products they use."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.attention.gluon_tiles import attend_tiles_gluon
from flashqsa.attention.tokens import RowTokens
from flashqsa.attention.triton_tiles import tile_height
from flashqsa.attention.triton_union import LEAST_ROWS, UnionLists
from flashqsa.testing import (
    Step,
    StepCase,
    assert_bitwise_equal,
    assert_unchanged,
    guarded,
    make_step,
    poison,
    snapshot,
)

RAGGED = ((150, 1), (0, 19), (61, 40), (31, 1), (0, 3), (570, 65))
BF16, FP16 = torch.bfloat16, torch.float16
SMALL = StepCase("gluon", RAGGED, topk_blocks=24, q_heads=24, kv_heads=2, head_dim=128, dtype=BF16)

Result = tuple[torch.Tensor, torch.Tensor]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs compute capability 9.0"
    ),
]


def _attend(
    step: Step, selection: Any, *, include_tail: bool = True, gated: bool = True, **options: Any
) -> tuple[Result, UnionLists | None]:
    """Tiles into a poisoned output between canaries; nothing else is written."""
    visible = selection.visible_blocks if include_tail else None
    tokens = RowTokens(
        selection.block_ids, selection.block_counts, step.plan.block_tokens, visible, step.plan.positions
    )
    target = guarded(tuple(step.q.shape), step.q.dtype, padding=(1, 1, 8), device=step.q.device)
    poison(target.view)
    lse = torch.full(step.q.shape[:2], torch.nan, device=step.q.device)
    before = snapshot(step.q, step.gate, step.cache, selection)
    lists = attend_tiles_gluon(
        step.q, step.cache, step.plan, tokens, step.q.shape[2] ** -0.5, gate=step.gate if gated else None,
        out=target.view, lse=lse, **options,
    )  # fmt: skip
    target.assert_intact()
    step.assert_guards_intact()
    assert_unchanged(before)
    return (target.view.clone(), lse), lists


def _tiled_rows(step: Step) -> torch.Tensor:
    """[T] bool: rows of requests that tiles serve."""
    tiled = torch.zeros(step.num_rows, dtype=torch.bool)
    for request in step.requests:
        rows = [row for row, _ in request.rows()]
        tiled[rows] = len(rows) >= LEAST_ROWS
    return tiled


def _only(case: StepCase) -> StepCase:
    """The case without the requests that tiles leave to others."""
    return dataclasses.replace(case, requests=tuple(r for r in case.requests if r[1] >= LEAST_ROWS))


@pytest.mark.parametrize(
    ("heads", "head_dim", "page_tokens", "layout", "dtype", "parts"),
    [
        ((24, 2), 256, 64, "packed", BF16, 2),
        ((12, 1), 128, 848, "hnd", FP16, 2),
        ((3, 1), 64, 80, "split", BF16, 1),
        ((40, 1), 64, 16, "dense", BF16, 2),
    ],
    ids=str,
)
def test_rows_within_the_error_budget(
    heads: tuple[int, int], head_dim: int, page_tokens: int, layout: Any, dtype: torch.dtype, parts: int,
    device: torch.device, choose: Any, row_lists: Any, assert_attends: Any,
) -> None:  # fmt: skip
    case = dataclasses.replace(
        SMALL, padding_rows=2, padding_requests=1, dtype=dtype, q_heads=heads[0], kv_heads=heads[1], head_dim=head_dim,
        page_tokens=page_tokens, layout=layout,
    )  # fmt: skip
    step = make_step(case, seed=72, device=device)
    selection = choose(step)
    got, _ = _attend(step, selection, parts=parts)
    tiled = _tiled_rows(step).to(device)
    assert bool(got[0][~tiled].isnan().all()), "rows of other requests are not written"
    lists = row_lists(step, selection)
    alone = [tokens if tiled[row] else [] for row, tokens in enumerate(lists)]
    filled = (got[0].masked_fill(~tiled[:, None, None], 0), got[1].masked_fill(~tiled[:, None], -torch.inf))
    assert_attends(step, alone, filled)


def test_no_tail_and_no_gate(device: torch.device, choose: Any, row_lists: Any, assert_attends: Any) -> None:
    step = make_step(_only(SMALL), seed=73, device=device)
    selection = choose(step)
    got, _ = _attend(step, selection, include_tail=False, gated=False)
    assert_attends(step, row_lists(step, selection, False), got, gated=False)


def test_neighbours_without_a_common_block(
    device: torch.device, choose: Any, row_lists: Any, assert_attends: Any
) -> None:
    """The union of a tile is as long as its rows' lists together."""
    step = make_step(dataclasses.replace(SMALL, requests=((1600, 40),)), seed=74, device=device)
    selection = choose(step)
    for row in range(40):
        selection.block_ids[row] = torch.arange(24, device=device) * 16 + row % 16
    got, lists = _attend(step, selection, parts=1)
    assert lists is not None
    assert lists.tile_rows == 5
    assert int(lists.block_counts.max()) == 24 * 5
    assert_attends(step, row_lists(step, selection), got)


def test_programs_attend_many_tiles(device: torch.device, choose: Any, row_lists: Any, assert_attends: Any) -> None:
    """More tiles than multiprocessors, some of them left to others between: nothing is carried over."""
    case = dataclasses.replace(SMALL, requests=((40, 1200), (0, 3), (0, 30)))
    step = make_step(case, seed=78, device=device)
    selection = choose(step, noise=0.05)
    for row in range(400, 500):
        selection.block_ids[row] = torch.arange(24, device=device) * 4 + row % 4
    got, lists = _attend(step, selection, most_share=0.7, parts=1)
    assert lists is not None
    programs = 2 * int((lists.row_counts > 0).sum())
    assert programs > 2 * torch.cuda.get_device_properties(device).multi_processor_count
    served = lists.served == 1
    assert bool(served[:400].all())
    assert not bool(served[400:500].any())
    assert bool(got[0][~served].isnan().all())
    tokens = [tokens if served[row] else [] for row, tokens in enumerate(row_lists(step, selection))]
    filled = (got[0].masked_fill(~served[:, None, None], 0), got[1].masked_fill(~served[:, None], -torch.inf))
    assert_attends(step, tokens, filled)


@pytest.mark.parametrize("parts", [1, 2])
def test_fault_12_chunks_cut_at_tiles_have_the_same_bits(parts: int, device: torch.device, choose: Any) -> None:
    """The long prefill in two chunks, beside other requests, on other pages; and again, for a race would differ."""
    whole = dataclasses.replace(SMALL, requests=((0, 200),), request_seeds=(3,))
    step = make_step(whole, seed=75, device=device)
    wanted, _ = _attend(step, choose(step), parts=parts)
    again, _ = _attend(step, choose(step), parts=parts)
    assert_bitwise_equal(again[0], wanted[0], "output again")
    height = tile_height(12, 64 * parts)
    for cut in (8 * height, 11 * height):
        for start, end in ((0, cut), (cut, 200)):
            case = dataclasses.replace(
                whole, requests=((3, 21), (start, end - start), (5, 1)), request_seeds=(9, 3, 8), page_tokens=48
            )
            part = make_step(case, seed=75, device=device)
            got, _ = _attend(part, choose(part), parts=parts)
            rows = slice(21, 21 + end - start)
            assert_bitwise_equal(got[0][rows], wanted[0][start:end], f"output of {start} to {end}")
            assert_bitwise_equal(got[1][rows], wanted[1][start:end], f"lse of {start} to {end}")


def test_fault_45_nan_where_no_row_of_a_request_attends(
    device: torch.device, choose: Any, row_lists: Any, unseen_poisoned: Any
) -> None:
    step = make_step(dataclasses.replace(_only(SMALL), topk_blocks=3), seed=76, device=device)
    selection = choose(step, noise=0.1)
    wanted, _ = _attend(step, selection)
    assert bool(torch.isfinite(wanted[0]).all())
    got, _ = _attend(unseen_poisoned(step, row_lists(step, selection)), selection)
    assert_bitwise_equal(got[0], wanted[0], "output")
    assert_bitwise_equal(got[1], wanted[1], "lse")


def test_reused_selections_attend_all_tokens_since(
    device: torch.device, choose: Any, row_lists: Any, assert_attends: Any
) -> None:
    """Rows whose selections were made when they saw less: tails of different lengths in one tile, some of 300."""
    step = make_step(dataclasses.replace(SMALL, requests=((420, 20),)), seed=77, device=device)
    early = choose(step)
    seen = (early.visible_blocks - torch.arange(20, device=device, dtype=torch.int32) % 4 * 25).clamp(min=24)
    ids = torch.stack([torch.arange(24, device=device) * (int(n) // 24) for n in seen]).to(torch.int32)
    selection = dataclasses.replace(early, block_ids=ids, visible_blocks=seen.to(torch.int32))
    got, _ = _attend(step, selection)
    assert_attends(step, row_lists(step, selection), got)
