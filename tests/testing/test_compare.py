"""Comparers accept what the contracts allow and nothing more."""

from __future__ import annotations

import math

import pytest
import torch

from flashqsa.results import Selection
from flashqsa.testing import (
    assert_best_selection,
    assert_bitwise_equal,
    assert_same_selection,
    assert_scores_within,
    assert_selection_form,
    assert_ulp_close,
    assert_within_budget,
    error_budget,
    score_bounds,
    stream,
    ulp_distance,
)

F64 = torch.float64


def test_error_budget_is_twice_the_low_precision_error_and_one_eps() -> None:
    exact = torch.tensor([1.0, -4.0, 0.5], dtype=F64)
    low = torch.tensor([1.0, -4.0, 0.25], dtype=torch.bfloat16)
    assert error_budget(low, exact) == 2 * (0.25 + 2**-7 * 4.0)


def test_assert_within_budget_compares_infinities_exactly() -> None:
    exact = torch.tensor([1.0, -math.inf, 2.0], dtype=F64)
    low = exact.float()
    assert_within_budget(torch.tensor([1.0, -math.inf, 2.0 + 2**-22]), low, exact)
    for wrong in ([1.0, 0.0, 2.0], [1.0, math.inf, 2.0], [1.0, math.nan, 2.0]):
        with pytest.raises(AssertionError, match="lse: infinities or NaN differ"):
            assert_within_budget(torch.tensor(wrong), low, exact, "lse")


@pytest.mark.parametrize("wrong", [1.001, math.nan, math.inf])
def test_assert_within_budget_refuses(wrong: float) -> None:
    exact = torch.linspace(-1, 1, 9, dtype=F64)
    actual = exact.float()
    assert_within_budget(actual, exact.float(), exact)
    actual[8] = wrong
    with pytest.raises(AssertionError, match="out: "):
        assert_within_budget(actual, exact.float(), exact, "out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_ulp_distance_counts_representable_values(dtype: torch.dtype) -> None:
    eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    pairs = [
        (1.0, 1.0, 0),
        (1.0, 1.0 + eps, 1),
        (-1.0, -1.0 - eps, 1),
        (0.0, -0.0, 0),
        (tiny, -tiny, 2),
        (2.0, 1.0, round(1 / eps)),
    ]
    for a, b, distance in pairs:
        x, y = (torch.tensor([v], dtype=dtype) for v in (a, b))
        assert ulp_distance(x, y).tolist() == ulp_distance(y, x).tolist() == [distance]


def test_assert_ulp_close_allows_one_element_in_ten_thousand() -> None:
    expected = torch.full((20_000,), 1.5)
    actual = expected.clone()
    step = 2.0**-23
    actual[[3, 7]] += step
    assert_ulp_close(actual, expected)
    actual[9] += step
    with pytest.raises(AssertionError, match="3 of 20000 elements differ, 2 may"):
        assert_ulp_close(actual, expected)
    actual[9] += step
    with pytest.raises(AssertionError, match=r"2 ulp apart at \[9\]"):
        assert_ulp_close(actual, expected)


def test_assert_bitwise_equal_tells_zeros_and_nan_apart() -> None:
    nan = torch.tensor([math.nan, 0.0])
    assert_bitwise_equal(nan, nan.clone())
    with pytest.raises(AssertionError, match=r"1 of 2 elements differ, the first at \[1\]"):
        assert_bitwise_equal(nan, torch.tensor([math.nan, -0.0]))
    with pytest.raises(AssertionError, match="dtype"):
        assert_bitwise_equal(nan, nan.double())


def test_score_bounds_hold_for_fp32_sums() -> None:
    q, keys = torch.randn(4, 128, generator=stream(1)), torch.randn(300, 128, generator=stream(2))
    exact = torch.relu(keys.double() @ q.double().T).sum(dim=1)
    bounds = score_bounds(q, keys)
    assert_scores_within(torch.relu(keys @ q.T).sum(dim=1), exact, bounds)
    rough = torch.relu(keys.bfloat16().float() @ q.T).sum(dim=1)
    with pytest.raises(AssertionError, match="scores out of bounds"):
        assert_scores_within(rough, exact, bounds)
    rough = exact.float()
    rough[5] = math.nan
    with pytest.raises(AssertionError, match="1 scores out of bounds, block 5"):
        assert_scores_within(rough, exact, bounds)


def selection(ids: list[list[int]], counts: list[int], visible: list[int]) -> Selection:
    block_ids, block_counts, seen = (torch.tensor(x, dtype=torch.int32) for x in (ids, counts, visible))
    return Selection(block_ids, block_counts, None, seen, torch.zeros_like(seen))


def test_selection_comparers_accept_a_selection_in_form() -> None:
    good = selection([[0, 3, 9], [0, 1, -1], [-1, -1, -1]], [3, 2, 0], [10, 2, 0])
    assert_selection_form(good, 3)
    assert_same_selection(good, [[0, 3, 9], [0, 1], []])


@pytest.mark.parametrize(
    ("ids", "count", "visible"),
    [
        ([3, 0, 9], 3, 10),
        ([0, 3, 3], 3, 10),
        ([0, 3, 10], 3, 10),
        ([-1, 3, 9], 3, 10),
        ([0, 3, -1], 2, 10),
        ([0, 1, 7], 2, 2),
    ],
    ids=["unsorted", "duplicate", "invisible", "negative", "too_few", "garbage_past_the_count"],
)
def test_assert_selection_form_refuses(ids: list[int], count: int, visible: int) -> None:
    with pytest.raises(AssertionError, match="row 0"):
        assert_selection_form(selection([ids], [count], [visible]), 3)


def test_assert_same_selection_names_the_difference() -> None:
    with pytest.raises(AssertionError, match=r"row 0: missing \[3\], unexpected \[4\]"):
        assert_same_selection(selection([[0, 4, 9]], [3], [10]), [[0, 3, 9]])
    with pytest.raises(AssertionError, match="past the count"):
        assert_same_selection(selection([[0, 4, 9]], [2], [10]), [[0, 4]])


def test_assert_best_selection_leaves_open_only_what_rounding_leaves_open() -> None:
    exact = torch.tensor([5.0, 1.0, 1.0 + 1e-9, 0.0], dtype=F64)
    bounds = torch.full((4,), 1e-8, dtype=F64)
    assert_best_selection([0, 1], exact, bounds, 2)
    assert_best_selection([0, 2], exact, bounds, 2)
    with pytest.raises(AssertionError, match="left out"):
        assert_best_selection([0, 3], exact, bounds, 2)
    with pytest.raises(AssertionError, match="1 distinct blocks instead of 2"):
        assert_best_selection([0, 0], exact, bounds, 2)
    assert_best_selection([0, 1, 2, 3], exact, bounds, 9)
