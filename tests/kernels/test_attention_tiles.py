"""Union tiles: the lists are exact, the rows within the error budget, and their bits a function of their own tile."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.attention.tokens import RowTokens
from flashqsa.attention.triton_tiles import TilesKernelConfig, attend_tiles_triton, tile_height
from flashqsa.attention.triton_union import LEAST_ROWS, MOST_TILE_ROWS, UnionLists, union_lists
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

RAGGED = ((150, 1), (0, 19), (61, 40), (31, 1), (0, 3), (270, 25))
SMALL = TilesKernelConfig(block_m=16, stages=1, most_share=1.0)

Result = tuple[torch.Tensor, torch.Tensor]


def _tokens(step: Step, selection: Any, include_tail: bool = True) -> RowTokens:
    visible = selection.visible_blocks if include_tail else None
    return RowTokens(selection.block_ids, selection.block_counts, step.plan.block_tokens, visible, step.plan.positions)


def _attend(
    step: Step, selection: Any, *, config: TilesKernelConfig = SMALL, include_tail: bool = True, gated: bool = True,
    **options: Any,
) -> tuple[Result, UnionLists | None]:  # fmt: skip
    """Tiles into a poisoned output between canaries; nothing else is written."""
    target = guarded(tuple(step.q.shape), step.q.dtype, padding=(1, 1, 8), device=step.q.device)
    poison(target.view)
    lse = torch.full(step.q.shape[:2], torch.nan, device=step.q.device)
    before = snapshot(step.q, step.gate, step.cache, selection)
    lists = attend_tiles_triton(
        step.q, step.cache, step.plan, _tokens(step, selection, include_tail), step.q.shape[2] ** -0.5,
        gate=step.gate if gated else None, out=target.view, lse=lse, config=config, **options,
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


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (1, 1)], ids=str)
def test_union_lists_are_exact(heads: tuple[int, int], device: torch.device, choose: Any) -> None:
    """Every tile of every request once: its rows, the blocks that any of them has, ascending, and who has which."""
    step = make_step(
        StepCase("lists", RAGGED, padding_rows=2, padding_requests=1, topk_blocks=8, page_tokens=80), seed=70,
        device=device,
    )  # fmt: skip
    selection = choose(step)
    height = tile_height(heads[0] // heads[1], 16)
    lists = union_lists(_tokens(step, selection), step.plan, 80, height)
    assert lists is not None
    seen: dict[int, int] = {}
    slots, bits = lists.slot_ids.cpu(), lists.row_bits.cpu()
    ids, counts = selection.block_ids.cpu(), selection.block_counts.cpu()
    positions, requests = step.plan.positions.cpu(), step.plan.request_ids.cpu()
    for number, rows in enumerate(lists.row_counts.tolist()):
        first = int(lists.first_rows[number])
        if not rows:
            continue
        chosen = [ids[row, : counts[row]].tolist() for row in range(first, first + rows)]
        for row in range(first, first + rows):
            assert seen.setdefault(row, number) == number
            assert int(positions[row]) // height == int(positions[first]) // height, "one absolute tile"
        union = sorted(set().union(*chosen))
        found = int(lists.block_counts[number])
        assert found == len(union)
        request = int(requests[first])
        expected = step.plan.token_slots(request, torch.tensor(union, dtype=torch.int64, device=device) * 4).cpu()
        assert slots[number, :found].tolist() == expected.tolist()
        assert [int(b) & 0xFFFFFFFF for b in bits[number, :found]] == [
            sum(1 << j for j, blocks in enumerate(chosen) if block in blocks) for block in union
        ]
    assert sorted(seen) == _tiled_rows(step).nonzero().flatten().tolist()


def test_tile_numbers_never_meet(device: torch.device, choose: Any) -> None:
    """Requests around the least number of rows and around whole tiles, at odd offsets: each row in one tile."""
    requests = tuple(((7 * n) % 23, n) for n in (0, 1, 2, 16, 17, 0, 0, 18, 24, 1, 25, 23, 3, 31, 17, 16))
    step = make_step(StepCase("numbers", requests, topk_blocks=2, padding_requests=2), seed=71, device=device)
    selection = choose(step)
    for height in (3, 8):
        lists = union_lists(_tokens(step, selection), step.plan, 16, height)
        assert lists is not None
        rows = [
            row
            for first, count in zip(lists.first_rows.tolist(), lists.row_counts.tolist(), strict=True)
            for row in range(first, first + count)
        ]
        assert sorted(rows) == _tiled_rows(step).nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("heads", "head_dim", "page_tokens", "layout"),
    [((4, 2), 32, 16, "split"), ((3, 1), 96, 80, "hnd"), ((6, 1), 16, 848, "packed"), ((20, 1), 8, 16, "dense")],
    ids=str,
)
def test_rows_within_the_error_budget(
    heads: tuple[int, int], head_dim: int, page_tokens: int, layout: Any, dtype: torch.dtype, device: torch.device,
    choose: Any, row_lists: Any, assert_attends: Any,
) -> None:  # fmt: skip
    case = StepCase(
        "budget", RAGGED, padding_rows=2, padding_requests=1, topk_blocks=8, dtype=dtype, q_heads=heads[0],
        kv_heads=heads[1], head_dim=head_dim, rotary_dim=8, page_tokens=page_tokens, layout=layout,
    )  # fmt: skip
    step = make_step(case, seed=72, device=device)
    selection = choose(step)
    config = dataclasses.replace(SMALL, block_m=32 if heads == (20, 1) else 16)
    got, _ = _attend(step, selection, config=config)
    tiled = _tiled_rows(step).to(device)
    assert bool(got[0][~tiled].isnan().all()), "rows of other requests are not written"
    lists = row_lists(step, selection)
    alone = [tokens if tiled[row] else [] for row, tokens in enumerate(lists)]
    filled = (got[0].masked_fill(~tiled[:, None, None], 0), got[1].masked_fill(~tiled[:, None], -torch.inf))
    assert_attends(step, alone, filled)


@pytest.mark.parametrize("include_tail", [False, True], ids=["no tail", "tail"])
@pytest.mark.parametrize("contiguous", [False, True], ids=["paged", "contiguous"])
def test_options(
    include_tail: bool, contiguous: bool, device: torch.device, choose: Any, row_lists: Any, assert_attends: Any
) -> None:
    case = _only(StepCase("options", RAGGED, topk_blocks=8, head_dim=32, contiguous=contiguous))
    step = make_step(case, seed=73, device=device)
    selection = choose(step)
    got, _ = _attend(step, selection, include_tail=include_tail, gated=False)
    assert_attends(step, row_lists(step, selection, include_tail), got, gated=False)


def test_neighbours_without_a_common_block(
    device: torch.device, choose: Any, row_lists: Any, assert_attends: Any
) -> None:
    """The union of a tile is as long as its rows' lists together."""
    step = make_step(StepCase("disjoint", ((400, 24),), topk_blocks=10, head_dim=32), seed=74, device=device)
    selection = choose(step)
    for row in range(24):
        selection.block_ids[row] = torch.arange(10, device=device) * 8 + row % 8
    got, lists = _attend(step, selection)
    assert lists is not None
    height = lists.tile_rows
    assert int(lists.block_counts.max()) == 10 * height
    assert_attends(step, row_lists(step, selection), got)


def test_rows_with_too_large_unions_are_left(device: torch.device, choose: Any) -> None:
    """By tile, and told in the lists; tiles that are served have the bits that they have without the bound."""
    step = make_step(
        StepCase("left", ((398, 26), (40, 3)), padding_rows=2, topk_blocks=10, head_dim=32), seed=78, device=device
    )
    selection = choose(step)
    for row in range(14):
        selection.block_ids[row] = torch.arange(10, device=device) * 8 + row % 8
    selection.block_ids[14:26] = torch.arange(10, device=device, dtype=torch.int32) * 8
    whole, _ = _attend(step, selection)
    got, lists = _attend(step, selection, config=dataclasses.replace(SMALL, most_share=0.9))
    assert lists is not None
    assert lists.tile_rows == 5
    assert lists.row_counts.tolist() == [0, 0, 0, 5, 5, 4, 0, 0, 0, 0], "tiles begin at rows 0, 2, 7, 12, 17 and 22"
    assert lists.served[:29].tolist() == [0] * 12 + [1] * 14 + [0] * 3
    assert bool(got[0][:12].isnan().all())
    assert bool(got[0][26:].isnan().all())
    assert_bitwise_equal(got[0][12:26], whole[0][12:26], "output")
    assert_bitwise_equal(got[1][12:26], whole[1][12:26], "lse")


def test_fault_12_chunks_cut_at_tiles_have_the_same_bits(device: torch.device, choose: Any) -> None:
    """The long prefill in two chunks, beside other requests, on other pages."""
    whole = StepCase("whole", ((0, 90),), topk_blocks=6, head_dim=32, request_seeds=(3,))
    step = make_step(whole, seed=75, device=device)
    wanted, _ = _attend(step, choose(step))
    height = tile_height(3, SMALL.block_m)
    for cut in (8 * height, 11 * height):
        for start, end in ((0, cut), (cut, 90)):
            case = dataclasses.replace(
                whole, requests=((3, 21), (start, end - start), (5, 1)), request_seeds=(9, 3, 8), page_tokens=48
            )
            part = make_step(case, seed=75, device=device)
            got, _ = _attend(part, choose(part))
            rows = slice(21, 21 + end - start)
            assert_bitwise_equal(got[0][rows], wanted[0][start:end], f"output of {start} to {end}")
            assert_bitwise_equal(got[1][rows], wanted[1][start:end], f"lse of {start} to {end}")


def test_fault_45_nan_where_no_row_of_a_request_attends(
    device: torch.device, choose: Any, row_lists: Any, unseen_poisoned: Any
) -> None:
    case = _only(StepCase("nan", RAGGED, topk_blocks=3, head_dim=32))
    step = make_step(case, seed=76, device=device)
    selection = choose(step, noise=0.1)
    wanted, _ = _attend(step, selection)
    assert bool(torch.isfinite(wanted[0]).all())
    got, _ = _attend(unseen_poisoned(step, row_lists(step, selection)), selection)
    assert_bitwise_equal(got[0], wanted[0], "output")
    assert_bitwise_equal(got[1], wanted[1], "lse")


def test_reused_selections_attend_all_tokens_since(
    device: torch.device, choose: Any, row_lists: Any, assert_attends: Any
) -> None:
    """Rows whose selections were made when they saw less: tails of different lengths in one tile."""
    step = make_step(StepCase("late", ((120, 20),), topk_blocks=5, head_dim=32), seed=77, device=device)
    early = choose(step)
    seen = (early.visible_blocks - torch.arange(20, device=device, dtype=torch.int32) % 3 * 4).clamp(min=5)
    ids = torch.stack([torch.arange(5, device=device) * (int(n) // 5) for n in seen]).to(torch.int32)
    selection = dataclasses.replace(early, block_ids=ids, visible_blocks=seen.to(torch.int32))
    got, _ = _attend(step, selection)
    assert_attends(step, row_lists(step, selection), got)


def test_heights_fill_the_product() -> None:
    assert [tile_height(group, 128) for group in (12, 6, 3, 1)] == [10, 21, MOST_TILE_ROWS, MOST_TILE_ROWS]
    assert [tile_height(group, 64) for group in (12, 6, 3)] == [5, 10, 21]
    assert tile_height(64, 16) == 1


NARROW = ((150, 1), (40, 2), (3, 5), (0, 19), (270, 16), (61, 4), (0, 3), (90, 9))


def _narrow_rows(step: Step) -> torch.Tensor:
    """[T] bool: rows of requests that narrow tiles serve."""
    narrow = torch.zeros(step.num_rows, dtype=torch.bool)
    for request in step.requests:
        rows = [row for row, _ in request.rows()]
        narrow[rows] = 2 <= len(rows) < LEAST_ROWS
    return narrow


@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (6, 1), (10, 1)], ids=str)
def test_narrow_lists_are_exact(heads: tuple[int, int], device: torch.device, choose: Any) -> None:
    """Requests of 2 to 16 rows in as few tiles as hold them, all of one height but the last."""
    step = make_step(
        StepCase("narrow", NARROW, padding_rows=2, padding_requests=1, topk_blocks=8), seed=79, device=device
    )
    selection = choose(step)
    height = tile_height(heads[0] // heads[1], 16)
    lists = union_lists(_tokens(step, selection), step.plan, 16, height, narrow=2)
    assert lists is not None
    ids, counts = selection.block_ids.cpu(), selection.block_counts.cpu()
    seen = []
    for number, rows in enumerate(lists.row_counts.tolist()):
        first = int(lists.first_rows[number])
        seen += list(range(first, first + rows))
        union = sorted({int(block) for row in range(first, first + rows) for block in ids[row, : counts[row]]})
        if not rows:
            continue
        found = int(lists.block_counts[number])
        request = int(step.plan.request_ids[first])
        expected = step.plan.token_slots(request, torch.tensor(union, dtype=torch.int64, device=device) * 4)
        assert lists.slot_ids[number, :found].tolist() == expected.tolist()
        for row in range(first, first + rows):
            has = (lists.row_bits[number, :found].cpu() >> (row - first)) & 1
            assert [b for b, bit in zip(union, has.tolist(), strict=True) if bit] == ids[row, : counts[row]].tolist()
    assert sorted(seen) == _narrow_rows(step).nonzero().flatten().tolist()
    tiles = sum(-(-new // height) for _, new in NARROW if 2 <= new < LEAST_ROWS)
    assert int((lists.row_counts > 0).sum()) == tiles
    assert lists.served[: step.num_rows - 2].cpu().bool()[_narrow_rows(step)[:-2]].all()


@pytest.mark.parametrize(("heads", "head_dim"), [((4, 2), 32), ((6, 1), 96)], ids=str)
def test_narrow_tiles_within_the_error_budget(
    heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device, choose: Any, row_lists: Any,
    assert_attends: Any,
) -> None:  # fmt: skip
    """Tiles of several heights, and again on the same plan."""
    case = StepCase(
        "narrow", NARROW, padding_rows=2, padding_requests=1, topk_blocks=8, dtype=dtype, q_heads=heads[0],
        kv_heads=heads[1], head_dim=head_dim, rotary_dim=8, page_tokens=80,
    )  # fmt: skip
    step = make_step(case, seed=80, device=device)
    selection = choose(step)
    narrow = _narrow_rows(step).to(device)
    got, lists = _attend(step, selection, narrow=2)
    assert lists is not None
    assert len(set(lists.row_counts.tolist())) >= 3
    assert bool(got[0][~narrow].isnan().all()), "rows of other requests are not written"
    alone = [tokens if narrow[row] else [] for row, tokens in enumerate(row_lists(step, selection))]
    filled = (got[0].masked_fill(~narrow[:, None, None], 0), got[1].masked_fill(~narrow[:, None], -torch.inf))
    assert_attends(step, alone, filled)
    again, _ = _attend(step, selection, narrow=2)
    assert_bitwise_equal(again[0][narrow], got[0][narrow], "output")
    assert_bitwise_equal(again[1][narrow], got[1][narrow], "lse")


def test_fault_12_narrow_tiles_alone_have_the_same_bits(device: torch.device, choose: Any, alone: Any) -> None:
    case = StepCase("narrow", NARROW, topk_blocks=8, head_dim=32, request_seeds=tuple(range(30, 38)))
    step = make_step(case, seed=81, device=device)
    together, _ = _attend(step, choose(step), narrow=2)
    for request_id in (1, 4, 7):
        single = make_step(alone(case, request_id, page_tokens=48), seed=81, device=device)
        got, _ = _attend(single, choose(single), narrow=2)
        first, rows = step.requests[request_id].first_row, NARROW[request_id][1]
        assert_bitwise_equal(got[0], together[0][first : first + rows], "output")
        assert_bitwise_equal(got[1], together[1][first : first + rows], "lse")
