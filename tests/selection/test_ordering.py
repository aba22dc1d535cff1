"""The order of blocks as 64-bit keys, and the tie rule end to end."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flashqsa.selection.ordering import UNSEEN, best_keys, order_keys, unpack_keys
from flashqsa.selection.reference import top_blocks_reference
from flashqsa.testing import assert_best_selection, assert_bitwise_equal, assert_same_selection, oracles, stream

SPECIAL = (0.0, -0.0, 1.0, 1.5, 2.0**-149, -(2.0**-149), 3.4028234663852886e38, -1.0, math.inf, -math.inf, math.nan)

any_scores = st.lists(
    st.one_of(st.sampled_from(SPECIAL), st.floats(width=32), st.integers(0, 3).map(float)), min_size=1, max_size=40
)


@example(scores=[-0.0, 0.0, -0.0, 0.0], topk=3, first=0)
@example(scores=[math.nan, -math.inf, math.nan], topk=2, first=0)
@given(scores=any_scores, topk=st.integers(1, 45), first=st.sampled_from([0, 1, 2**20, 2**31 - 64]))
def test_order_keys_rank_as_the_definition_does(scores: list[float], topk: int, first: int) -> None:
    wanted = oracles.select_best(scores, topk)
    assert top_blocks_reference(scores, topk) == wanted
    keys = order_keys(torch.tensor([scores]), torch.arange(first, first + len(scores))[None])
    assert bool((keys > UNSEEN).all())
    ids, best = unpack_keys(best_keys(keys, topk))
    assert (ids[0] - first).tolist() == wanted
    for got, block in zip(best[0].tolist(), wanted, strict=True):
        score = scores[block]
        assert got == score or (math.isnan(got) and math.isnan(score))
        assert math.copysign(1, got) == math.copysign(1, score) or score == 0 or math.isnan(score)


@given(scores=any_scores)
def test_order_keys_of_different_blocks_differ_so_that_any_top_k_is_one_set(scores: list[float]) -> None:
    keys = order_keys(torch.tensor(scores), torch.arange(len(scores)))
    assert len(set(keys.tolist())) == len(scores)


def test_order_keys_rank_nan_of_either_sign_and_payload_below_everything() -> None:
    patterns = torch.tensor([0x7FC00000, 0x7F800001, -0x400000, -1, 0x7FFFFFFF], dtype=torch.int32)
    nan_keys = order_keys(patterns.view(torch.float32), torch.arange(5))
    assert nan_keys.sort(descending=True).values.tolist() == nan_keys.tolist(), "among NaN the lower id comes first"
    assert int(nan_keys.max()) < int(order_keys(torch.tensor([-math.inf]), torch.tensor([2**31 - 1])))


def test_order_keys_leave_the_scores_as_they_were() -> None:
    scores = torch.tensor([-0.0, math.nan, 2.0, -3.0])
    before = scores.clone()
    order_keys(scores, torch.arange(4))
    assert_bitwise_equal(scores, before)


def test_unpack_keys_puts_unseen_blocks_last() -> None:
    keys = order_keys(torch.tensor([3.0, 1.0, math.nan]), torch.tensor([9, 4, 6]))
    ids, scores = unpack_keys(torch.stack([torch.tensor(UNSEEN), keys[0], torch.tensor(UNSEEN), *keys[1:]])[None])
    assert ids.tolist() == [[4, 6, 9, -1, -1]]
    assert scores[0, [0, 2, 3, 4]].tolist() == [1.0, 3.0, -math.inf, -math.inf]
    assert math.isnan(scores[0, 1])


def equal_scores() -> tuple[list[float], list[int]]:
    return [1.5] * 1024, list(range(512))


def equal_zeros_of_both_signs() -> tuple[list[float], list[int]]:
    return [0.0, -0.0] * 512, list(range(512))


def two_levels() -> tuple[list[float], list[int]]:
    """300 blocks at 2.0 and 724 at 1.0: all of the 300, and the lowest 212 of the others."""
    high = set(torch.randperm(1024, generator=stream(20))[:300].tolist())
    low = [g for g in range(1024) if g not in high]
    return [2.0 if g in high else 1.0 for g in range(1024)], sorted([*high, *low[:212]])


def plateau_of_zeros() -> tuple[list[float], list[int]]:
    """2,000 blocks of which 100 are positive: those, and the lowest 412 zeros."""
    positive = set(torch.randperm(2000, generator=stream(21))[:100].tolist())
    zeros = [g for g in range(2000) if g not in positive]
    return [1.0 + g if g in positive else 0.0 for g in range(2000)], sorted([*positive, *zeros[:412]])


TIES = (equal_scores, equal_zeros_of_both_signs, two_levels, plateau_of_zeros)


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("tie", TIES, ids=lambda tie: tie.__name__)
def test_fault_02_ties_go_to_the_lower_block_id(
    scored_rows: Any, select: Any, backend: str, tie: Any, rows: int
) -> None:
    scores, wanted = tie()
    inputs = scored_rows(scores, rows=rows, seed=22)
    selection = select(inputs, backend=backend)
    assert selection.block_ids[-1].tolist() == wanted
    for row in range(rows):
        visible = int(inputs.plan.visible_blocks[row])
        assert selection.block_ids[row].tolist() == oracles.select_best(scores[:visible], 512)


def test_fault_02_relu_makes_zeros_of_negative_products_and_ties_them(key_rows: Any, select: Any, backend: str) -> None:
    keys = -torch.rand(700, 8, generator=stream(23))
    keys[650] = 1.0
    keys[::7] = -0.0
    queries = torch.rand(1, 4, 8, generator=stream(24)) + 0.5
    selection = select(key_rows([keys], [queries], seed=23), backend=backend, return_scores=True)
    assert selection.block_ids[0].tolist() == [*range(511), 650]
    assert selection.scores[0, :511].tolist() == [0.0] * 511
    assert not bool(torch.signbit(selection.scores[0, :511]).any())


def test_nan_scores_rank_last_and_still_fill_a_row_that_has_nothing_else(
    scored_rows: Any, select: Any, backend: str
) -> None:
    scores = [math.nan, 0.0, 5.0, math.nan, math.inf, 2.0, math.nan]
    for topk, wanted in ((1, [4]), (3, [2, 4, 5]), (4, [1, 2, 4, 5]), (5, [0, 1, 2, 4, 5]), (6, [0, 1, 2, 3, 4, 5])):
        inputs = scored_rows(scores, seed=25, topk_blocks=topk)
        selection = select(inputs, backend=backend, return_scores=True)
        assert selection.block_ids[0].tolist() == wanted
        assert selection.scores[0].isnan().tolist() == [math.isnan(scores[g]) for g in wanted]


def test_a_nan_in_one_query_head_or_one_row_stays_there(key_rows: Any, select: Any, backend: str) -> None:
    generator = stream(26)
    keys = torch.randint(-3, 4, (60, 8), generator=generator).float()
    queries = torch.randint(-3, 4, (8, 4, 8), generator=generator).float()
    clean = select(key_rows([keys], [queries], seed=26, topk_blocks=5), backend=backend)
    queries[3, 1, 0] = math.nan
    inputs = key_rows([keys], [queries], seed=26, topk_blocks=5)
    selection = select(inputs, backend=backend, return_scores=True)
    others = [row for row in range(8) if row != 3]
    assert_bitwise_equal(selection.block_ids[others], clean.block_ids[others])
    assert selection.block_ids[3].tolist() == [0, 1, 2, 3, 4], "all scores are NaN: the lowest ids"
    assert bool(selection.scores[3].isnan().all())


def noise_in_one_bin(count: int, row: int) -> torch.Tensor:
    return 1.0 + 1e-3 * torch.rand(count, generator=stream(27, count, row))


def last_bits_in_one_bin(count: int, row: int) -> torch.Tensor:
    return 1.0 + torch.randint(2**12, (count,), generator=stream(28, count, row)) * 2.0**-23


@pytest.mark.parametrize("count", [16_383, 16_384, 16_385, 30_938, 65_504, 70_000])
@pytest.mark.parametrize("crowd", [noise_in_one_bin, last_bits_in_one_bin], ids=lambda crowd: crowd.__name__)
def test_fault_03_many_scores_in_one_coarse_bin(scored_rows: Any, select: Any, crowd: Any, count: int) -> None:
    scores = crowd(count, 0)
    inputs = scored_rows(scores, rows=1, seed=29)
    selection = select(inputs, backend="torch", return_scores=True)
    assert selection.block_ids[0].tolist() == oracles.select_best(scores, 512)
    top = torch.topk(scores * inputs.index_q[0, 0, 0], 512).values
    assert selection.scores[0].sort(descending=True).values.tolist() == top.tolist()


def test_fault_03_many_rows_of_many_scores_in_one_coarse_bin(scored_rows: Any, select: Any, backend: str) -> None:
    count, rows = (16_385, 64) if backend == "torch" else (2_000, 9)
    scores = last_bits_in_one_bin(count, 1)
    inputs = scored_rows(scores, rows=rows, seed=30)
    selection = select(inputs, backend=backend, return_scores=True)
    for row in range(rows):
        seen = scores[: int(inputs.plan.visible_blocks[row])]
        top = torch.topk(seen * inputs.index_q[row, 0, 0], 512).values
        assert selection.scores[row].sort(descending=True).values.tolist() == top.tolist(), f"row {row}"
        ids = selection.block_ids[row]
        assert_best_selection(ids.tolist(), seen.double(), torch.zeros(len(seen)), 512, f"row {row}")
    assert_same_selection(selection.take(torch.tensor([rows - 1])), [oracles.select_best(scores, 512)])
