"""Rows go by tiles or one by one as their own request and tile say, and have the bits of that form everywhere."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.attention.tokens import RowTokens
from flashqsa.attention.triton_attend import takes_tiles, tile_rows
from flashqsa.attention.triton_tiles import attend_tiles_triton
from flashqsa.attention.triton_union import UnionLists
from flashqsa.testing import Step, StepCase, assert_bitwise_equal, make_step

MIXED = ((300, 1), (0, 40), (61, 3), (400, 44), (90, 1), (2, 16))
CASE = StepCase(
    "mixed", MIXED, topk_blocks=10, q_heads=12, kv_heads=1, head_dim=32, dtype=torch.float16, padding_rows=3,
    padding_requests=1, request_seeds=tuple(range(20, 27)),
)  # fmt: skip

Result = tuple[torch.Tensor, torch.Tensor]


def _tokens(step: Step, selection: Any) -> RowTokens:
    plan = step.plan
    return RowTokens(
        selection.block_ids, selection.block_counts, plan.block_tokens, selection.visible_blocks, plan.positions
    )


def _tiles(step: Step, selection: Any) -> tuple[Result, UnionLists]:
    """Tiles alone, with the bound that attend takes."""
    out, lse = torch.full_like(step.q, torch.nan), torch.full(step.q.shape[:2], torch.nan, device=step.q.device)
    lists = attend_tiles_triton(
        step.q, step.cache, step.plan, _tokens(step, selection), step.q.shape[2] ** -0.5, gate=step.gate, out=out,
        lse=lse,
    )  # fmt: skip
    assert lists is not None
    return (out, lse), lists


def _strangers(step: Step, selection: Any, rows: range) -> Any:
    """The selection with rows that have no block in common with their neighbours."""
    ids = selection.block_ids.clone()
    for row in rows:
        ids[row] = torch.arange(10, device=ids.device) * 10 + row % 10
    return dataclasses.replace(selection, block_ids=ids)


def test_rows_have_the_bits_of_their_form(
    device: torch.device, choose: Any, attend_hostile: Any, row_lists: Any, assert_attends: Any
) -> None:
    """Tiles where they pay; decode, verification and rows without common blocks equal row_exact."""
    step = make_step(CASE, seed=60, device=device)
    long = range(44, 88)
    selection = _strangers(step, choose(step), range(64, 88))
    got = attend_hostile(step, selection)
    exact = attend_hostile(step, selection, row_exact=True)
    tiles, lists = _tiles(step, selection)
    served = lists.served.bool()
    served[88:] = False
    assert bool(served[1:41].all()), "a prefill from the start"
    assert bool(served[long].any()), "neighbours in a long context"
    assert not bool(served[[0, 41, 42, 43, *range(64, 105)]].any())
    for name, mine, by_tiles, by_rows in zip(("output", "lse"), got, tiles, exact, strict=True):
        assert_bitwise_equal(mine[served], by_tiles[served], f"{name} of tiles")
        assert_bitwise_equal(mine[~served], by_rows[~served], f"{name} of rows")
    assert_attends(step, row_lists(step, selection), got)


@pytest.mark.parametrize("request_id", [0, 2, 3, 4])
def test_fault_12_rows_alone_have_the_same_bits(
    request_id: int, device: torch.device, choose: Any, attend_hostile: Any, alone: Any
) -> None:
    """Whatever else is in the step, whether others go by tiles or not."""
    step = make_step(CASE, seed=61, device=device)
    together = attend_hostile(step, choose(step))
    single = make_step(alone(CASE, request_id, page_tokens=48), seed=61, device=device)
    got = attend_hostile(single, choose(single))
    first, rows = step.requests[request_id].first_row, MIXED[request_id][1]
    for name, mine, wanted in zip(("output", "lse"), got, together, strict=True):
        assert_bitwise_equal(mine, wanted[first : first + rows], name)


def test_row_exact_and_token_lists_never_go_by_tiles(device: torch.device, choose: Any) -> None:
    step = make_step(CASE, seed=62, device=device)
    tokens = _tokens(step, choose(step))
    assert takes_tiles(step.q, step.cache, step.plan, tokens)
    assert not takes_tiles(step.q, step.cache, step.plan, dataclasses.replace(tokens, unit_tokens=1))
    assert not takes_tiles(step.q.float(), step.cache, step.plan, tokens)
    decode = make_step(
        dataclasses.replace(CASE, requests=((300, 1), (9, 3)), request_seeds=None), seed=62, device=device
    )
    assert not takes_tiles(decode.q, decode.cache, decode.plan, tokens)


def test_fault_12_chunks_cut_at_tile_rows_have_the_same_bits(
    device: torch.device, choose: Any, attend_hostile: Any
) -> None:
    """A long prefill in chunks that are cut at multiples of the public height."""
    height = tile_rows(12)
    whole = dataclasses.replace(CASE, requests=((0, 75),), request_seeds=(3,), padding_rows=0, padding_requests=0)
    step = make_step(whole, seed=63, device=device)
    wanted = attend_hostile(step, choose(step))
    cut = 8 * height
    for start, end in ((0, cut), (cut, 75)):
        part = make_step(dataclasses.replace(whole, requests=((start, end - start),)), seed=63, device=device)
        got = attend_hostile(part, choose(part))
        for name, mine, theirs in zip(("output", "lse"), got, wanted, strict=True):
            assert_bitwise_equal(mine, theirs[start:end], f"{name} of {start} to {end}")


def test_heights_fill_the_product() -> None:
    assert [tile_rows(group) for group in (12, 6, 3, 1, 64)] == [5, 10, 21, 32, 1]


@pytest.mark.gpu
def test_fault_12_verification_by_tiles_alone_has_the_same_bits(
    device: torch.device, choose: Any, attend_hostile: Any, alone: Any, row_lists: Any, assert_attends: Any
) -> None:
    """On compute capability 9.0 a request of 8 to 16 rows goes by tiles, beside others and alone."""
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("needs compute capability 9.0")
    case = dataclasses.replace(CASE, head_dim=64)
    step = make_step(case, seed=64, device=device)
    selection = choose(step)
    got = attend_hostile(step, selection)
    assert_attends(step, row_lists(step, selection), got)
    exact = attend_hostile(step, selection, row_exact=True)
    single_rows = [0, 41, 42, 43, 88, 105, 106, 107]
    for name, mine, by_rows in zip(("output", "lse"), got, exact, strict=True):
        assert_bitwise_equal(mine[single_rows], by_rows[single_rows], f"{name} of rows")
    for request_id in (1, 3, 5):
        single = make_step(alone(case, request_id, page_tokens=48), seed=64, device=device)
        first, rows = step.requests[request_id].first_row, MIXED[request_id][1]
        for name, mine, wanted in zip(("output", "lse"), attend_hostile(single, choose(single)), got, strict=True):
            assert_bitwise_equal(mine, wanted[first : first + rows], f"{name} of request {request_id}")
