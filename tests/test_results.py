from __future__ import annotations

import pytest
import torch

from flashqsa.errors import ArgumentError, DeviceError, DTypeError, ShapeError
from flashqsa.results import Selection


def selection_of_rows(rows: int, *, scores: bool = True, layer_id: int | None = 7) -> Selection:
    """A selection in which every number of row i shows that it is row i's."""
    numbers = torch.arange(rows, dtype=torch.int32)
    return Selection(
        block_ids=numbers[:, None] * 100 + torch.arange(5, dtype=torch.int32),
        block_counts=numbers % 6,
        scores=numbers[:, None] + torch.arange(5) / 8 if scores else None,
        visible_blocks=numbers * 1000,
        request_ids=numbers // 2,
        layer_id=layer_id,
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("scores", [True, False])
def test_take_carries_every_lane_of_the_rows_in_the_order_given(dtype: torch.dtype, scores: bool) -> None:
    whole = selection_of_rows(8, scores=scores)
    order = [6, 0, 3, 3, 7]
    taken = whole.take(torch.tensor(order, dtype=dtype))
    assert taken.layer_id == 7
    assert (taken.scores is None) == (not scores)
    for name in ("block_ids", "block_counts", "visible_blocks", "request_ids", *(["scores"] if scores else [])):
        lane, source = getattr(taken, name), getattr(whole, name)
        assert lane.dtype == source.dtype
        assert lane.tolist() == [source[row].tolist() for row in order], name


def test_take_fault_35_follows_filters_and_merges() -> None:
    whole = selection_of_rows(8)
    kept = whole.take(torch.tensor([0, 2, 3, 5])).take(torch.tensor([3, 1]))
    assert kept.visible_blocks.tolist() == [5000, 2000]
    assert kept.request_ids.tolist() == [2, 1]


def test_take_copies() -> None:
    whole = selection_of_rows(4)
    taken = whole.take(torch.arange(4))
    whole.block_ids.fill_(-9)
    assert taken.block_ids.min() >= 0


def test_take_of_nothing_is_an_empty_selection() -> None:
    taken = selection_of_rows(4).take(torch.zeros(0, dtype=torch.int64))
    assert taken.block_ids.tolist() == []
    assert taken.layer_id == 7


@pytest.mark.parametrize("rows", [[0, 4], [-1, 2]])
def test_take_refuses_rows_out_of_range(refuses, rows: list[int]) -> None:
    with refuses(ArgumentError, "Selection.take", "rows must be in [0, 4)", f"got {rows[0]} to {rows[1]}"):
        selection_of_rows(4).take(torch.tensor(rows))


def test_take_refuses_a_mask_instead_of_reading_it_as_row_numbers(refuses) -> None:
    with refuses(DTypeError, "Selection.take", "rows", "bool", "nonzero"):
        selection_of_rows(4).take(torch.tensor([True, False, True, True]))


def test_take_refuses_nested_rows_and_other_devices(refuses) -> None:
    with refuses(ShapeError, "Selection.take", "rows must be [N]"):
        selection_of_rows(4).take(torch.tensor([[0, 1]]))
    with refuses(DeviceError, "Selection.take", "rows", "meta"):
        selection_of_rows(4).take(torch.zeros(2, dtype=torch.int64, device="meta"))
