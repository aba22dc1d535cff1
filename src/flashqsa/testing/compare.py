"""Comparers: error budgets instead of hand-made tolerances, selections by their contract."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from flashqsa.results import Selection
from flashqsa.testing.hostile import as_bytes

F64 = torch.float64


def error_budget(low_precision: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error that a kernel may have: twice what the reference run in the same low precision has.

    Args:
        low_precision: The reference's result in the dtype under test.
        exact: The same computed in float64. Elements that are not finite there are left out.

    Returns:
        2 x (max |low_precision - exact| + eps x max |exact|), eps being that of `low_precision`'s dtype.
    """
    finite = torch.isfinite(exact)
    if not bool(finite.any()):
        return 0.0
    error = (low_precision.to(F64) - exact.to(F64)).abs()[finite].max()
    return 2.0 * (float(error) + torch.finfo(low_precision.dtype).eps * float(exact.abs()[finite].max()))


def assert_within_budget(
    actual: torch.Tensor, low_precision: torch.Tensor, exact: torch.Tensor, label: str = ""
) -> None:
    """Raise AssertionError when a result is further from float64 than `error_budget` allows.

    Where `exact` is infinite or NaN, `actual` must be the same.
    """
    assert actual.shape == exact.shape, f"{label}: shape {list(actual.shape)} instead of {list(exact.shape)}"
    finite = torch.isfinite(exact)
    special = torch.equal(
        torch.nan_to_num(actual.to(F64)[~finite], nan=7.0, posinf=8.0, neginf=9.0),
        torch.nan_to_num(exact.to(F64)[~finite], nan=7.0, posinf=8.0, neginf=9.0),
    )
    assert special, f"{label}: infinities or NaN differ"
    error = torch.where(finite, (actual.to(F64) - exact.to(F64)).abs(), 0.0)
    assert bool(torch.isfinite(error).all()), f"{label}: {int((~torch.isfinite(error)).sum())} elements are not finite"
    budget = error_budget(low_precision, exact)
    worst = float(error.max()) if error.numel() else 0.0
    assert worst <= budget, (
        f"{label}: error {worst:.3e} at {_place(error, int(error.argmax()))} exceeds the budget {budget:.3e}"
    )


def ulp_distance(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Representable values between two finite tensors of one float dtype, int64; +0 and -0 are 0 apart."""
    assert actual.dtype == expected.dtype, f"dtypes differ: {actual.dtype} and {expected.dtype}"
    return (_ordered(actual) - _ordered(expected)).abs()


def assert_ulp_close(actual: torch.Tensor, expected: torch.Tensor, *, share: float = 1e-4, label: str = "") -> None:
    """Raise AssertionError unless all elements are within 1 ulp, and all but a share of them (or one) equal."""
    assert actual.shape == expected.shape, f"{label}: shape {list(actual.shape)} instead of {list(expected.shape)}"
    distance = ulp_distance(actual, expected)
    if not distance.numel():
        return
    worst, differing = int(distance.max()), int((distance > 0).sum())
    assert worst <= 1, f"{label}: {worst} ulp apart at {_place(distance, int(distance.argmax()))}"
    allowed = max(1, int(share * distance.numel()))
    assert differing <= allowed, f"{label}: {differing} of {distance.numel()} elements differ, {allowed} may"


def assert_bitwise_equal(actual: torch.Tensor, expected: torch.Tensor, label: str = "") -> None:
    """Raise AssertionError unless two tensors have the same shape, dtype and bytes (NaN equals the same NaN)."""
    assert actual.shape == expected.shape, f"{label}: shape {list(actual.shape)} instead of {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{label}: dtype {actual.dtype} instead of {expected.dtype}"
    differs = (as_bytes(actual) != as_bytes(expected)).any(dim=1)
    assert not bool(differs.any()), (
        f"{label}: {int(differs.sum())} of {differs.numel()} elements differ, the first at "
        f"{_place(actual, int(differs.nonzero()[0]))}"
    )


def score_bounds(index_q: torch.Tensor, block_keys: torch.Tensor) -> torch.Tensor:
    """How far scores of one row may be from float64: (Di + 8) * 2^-24 * sum |q| |k|.

    Args:
        index_q: [Hi, Di] index query of the row.
        block_keys: [M, Di].

    Returns:
        [M] float64.
    """
    magnitude = (block_keys.to(F64).abs() @ index_q.to(F64).abs().transpose(0, 1)).sum(dim=1)
    return (index_q.shape[1] + 8) * 2.0**-24 * magnitude


def assert_scores_within(actual: torch.Tensor, exact: torch.Tensor, bounds: torch.Tensor, label: str = "") -> None:
    """Raise AssertionError when fp32 scores leave their bound around the float64 ones. All [M]."""
    error = (actual.to(F64) - exact).abs()
    beyond = ~(error <= bounds)
    assert not bool(beyond.any()), (
        f"{label}: {int(beyond.sum())} scores out of bounds, block {int(beyond.nonzero()[0])}: "
        f"{float(actual[beyond][0])} for {float(exact[beyond][0])}, bound {float(bounds[beyond][0]):.3e}"
    )


def assert_selection_form(selection: Selection, topk_blocks: int) -> None:
    """Raise AssertionError unless ids are ascending, unique, visible, min(K, visible) many, and -1 past the count."""
    ids, counts, visible = (
        selection.block_ids.tolist(),
        selection.block_counts.tolist(),
        selection.visible_blocks.tolist(),
    )
    assert selection.block_ids.dtype == selection.block_counts.dtype == torch.int32, "ids and counts must be int32"
    for row, (row_ids, count, seen) in enumerate(zip(ids, counts, visible, strict=True)):
        assert count == min(topk_blocks, seen), f"row {row}: {count} blocks selected of {seen} visible"
        live, rest = row_ids[:count], row_ids[count:]
        assert all(a < b for a, b in itertools.pairwise(live)), f"row {row}: ids do not rise: {live}"
        assert all(0 <= g < seen for g in live), f"row {row}: ids out of [0, {seen}): {live}"
        assert all(g == -1 for g in rest), f"row {row}: ids past the count must be -1, got {rest}"


def assert_same_selection(selection: Selection, expected: Sequence[Sequence[int]]) -> None:
    """Raise AssertionError unless each row selected exactly the ids expected (ascending lists)."""
    ids, counts = selection.block_ids.tolist(), selection.block_counts.tolist()
    assert len(ids) == len(expected), f"{len(ids)} rows instead of {len(expected)}"
    for row, wanted in enumerate(expected):
        got = ids[row][: counts[row]]
        assert got == list(wanted), (
            f"row {row}: missing {sorted(set(wanted) - set(got))}, unexpected {sorted(set(got) - set(wanted))}, "
            f"got {len(got)} of {len(wanted)} ids"
        )
        assert all(g == -1 for g in ids[row][counts[row] :]), f"row {row}: ids past the count must be -1"


def assert_best_selection(
    block_ids: Sequence[int], exact: torch.Tensor, bounds: torch.Tensor, topk_blocks: int, label: str = ""
) -> None:
    """Raise AssertionError unless a row's ids are the best ones, up to what the score bounds leave open.

    Args:
        block_ids: Valid ids of the row.
        exact: [M] float64 scores of its visible blocks.
        bounds: [M] float64 from `score_bounds`.
        topk_blocks: Blocks that a row selects at most.
        label: First in the message.
    """
    chosen = torch.zeros(exact.shape[0], dtype=torch.bool, device=exact.device)
    chosen[torch.as_tensor(list(block_ids), dtype=torch.int64, device=exact.device)] = True
    wanted = min(topk_blocks, exact.shape[0])
    assert int(chosen.sum()) == wanted, f"{label}: {int(chosen.sum())} distinct blocks instead of {wanted}"
    if bool(chosen.all()):
        return
    low, high = (exact + bounds)[chosen].min(), (exact - bounds)[~chosen].max()
    assert float(low) >= float(high), (
        f"{label}: a block left out scores at least {float(high)}, one selected at most {float(low)}"
    )


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats."""
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.contiguous().view(signed).to(torch.int64)
    magnitude = bits & torch.iinfo(signed).max
    return torch.where(bits < 0, -magnitude, magnitude)


def _place(tensor: torch.Tensor, flat: int) -> list[int]:
    """Index of a flat element."""
    place: list[int] = []
    for size in reversed(tensor.shape):
        place.append(flat % size)
        flat //= size
    return place[::-1]
