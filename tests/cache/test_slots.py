"""`read_slots` and `write_slots`: whatever the strides, the dtype and the slots, only the rows named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashqsa.cache.state import read_slots, without_gaps, write_slots
from flashqsa.testing import Guarded, assert_bitwise_equal, guarded, poison, randn, stream

PAGES, PAGE_ROWS, HEADS, DIM = 5, 8, 3, 16
Layout = Callable[[torch.dtype], tuple[Guarded, torch.Tensor]]


def padded(padding: tuple[int, ...]) -> Layout:
    def make(dtype: torch.dtype) -> tuple[Guarded, torch.Tensor]:
        guard = guarded((PAGES, PAGE_ROWS, HEADS, DIM), dtype, padding=padding)
        return guard, guard.view

    return make


def packed_values(dtype: torch.dtype) -> tuple[Guarded, torch.Tensor]:
    """The second half of K | V side by side."""
    guard = guarded((PAGES, PAGE_ROWS, HEADS, 2 * DIM), dtype, padding=0)
    guard.views[0] = guard.view[..., DIM:]
    return guard, guard.view


def heads_first(dtype: torch.dtype) -> tuple[Guarded, torch.Tensor]:
    guard = guarded((PAGES, HEADS, PAGE_ROWS, DIM), dtype, padding=(1, 0, 1, 0))
    return guard, guard.view.transpose(1, 2)


LAYOUTS: dict[str, Layout] = {
    "dense": padded((0, 0, 0, 0)),
    "pages_apart": padded((1, 0, 0, 0)),
    "twice_the_page": padded((0, PAGE_ROWS // 2, 0, 0)),
    "rows_apart": padded((1, 1, 0, 0)),
    "heads_apart": padded((0, 0, 1, 0)),
    "unaligned": padded((1, 1, 1, 3)),
    "packed": packed_values,
    "heads_first": heads_first,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]


def values(dtype: torch.dtype, rows: int, seed: int) -> torch.Tensor:
    return randn(stream(seed), dtype, rows, HEADS, DIM, std=3.0)


def row_at(pages: torch.Tensor, slot: int) -> torch.Tensor:
    return pages[slot // PAGE_ROWS, slot % PAGE_ROWS].clone()


def slots(count: int, seed: int) -> torch.Tensor:
    return torch.randperm(PAGES * PAGE_ROWS, generator=stream(seed))[:count]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_slots_fault_15_writes_the_rows_named_and_nothing_else(layout: str, dtype: torch.dtype) -> None:
    guard, pages = LAYOUTS[layout](dtype)
    poison(pages)
    untouched = row_at(pages, 0)
    slot_ids, rows = slots(13, seed=1), values(dtype, 13, seed=2)
    write_slots(pages, slot_ids, rows)
    guard.assert_intact()
    written = dict(zip(slot_ids.tolist(), rows.view(torch.uint8).view(dtype), strict=True))
    for slot in range(PAGES * PAGE_ROWS):
        assert_bitwise_equal(row_at(pages, slot), written.get(slot, untouched), f"slot {slot}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_read_slots_reads_the_rows_named_in_order(layout: str, dtype: torch.dtype) -> None:
    guard, pages = LAYOUTS[layout](dtype)
    poison(pages)
    slot_ids, rows = slots(13, seed=3), values(dtype, 13, seed=4)
    write_slots(pages, slot_ids, rows)
    again = torch.cat([slot_ids.flip(0), slot_ids[:2]])
    expected = torch.cat([rows.view(torch.uint8).flip(0), rows.view(torch.uint8)[:2]]).view(dtype)
    assert_bitwise_equal(read_slots(pages, again), expected)
    guard.assert_intact()


def test_read_slots_copies() -> None:
    pages = padded((0, 0, 0, 0))(torch.float32)[1]
    pages.fill_(1.0)
    rows = read_slots(pages, torch.arange(PAGES * PAGE_ROWS))
    pages.fill_(2.0)
    assert rows.unique().tolist() == [1.0]


@pytest.mark.parametrize("layout", ["dense", "unaligned"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_slots_of_one_row_pages(layout: str, dtype: torch.dtype) -> None:
    """Block keys of pages that hold one block: strides of pages and of rows may be anything."""
    padding = (0, 0, 0) if layout == "dense" else (1, 1, 3)
    guard = guarded((9, 1, DIM), dtype, padding=padding)
    slot_ids, rows = torch.tensor([8, 0, 5]), randn(stream(5), dtype, 3, DIM)
    write_slots(guard.view, slot_ids, rows)
    assert_bitwise_equal(read_slots(guard.view, slot_ids), rows)
    guard.assert_intact()


@pytest.mark.parametrize("layout", ["dense", "rows_apart"])
def test_slots_of_a_single_page(layout: str) -> None:
    """A request-contiguous cache of one request is one long page."""
    padding = (0, 0, 0) if layout == "dense" else (1, 2, 3)
    guard = guarded((1, 50, DIM), torch.float32, padding=padding)
    slot_ids, rows = torch.tensor([49, 0, 17]), randn(stream(6), torch.float32, 3, DIM)
    write_slots(guard.view, slot_ids, rows)
    assert_bitwise_equal(read_slots(guard.view, slot_ids), rows)
    guard.assert_intact()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_slots_skips_negative_slots(dtype: torch.dtype) -> None:
    guard, pages = LAYOUTS["unaligned"](dtype)
    poison(pages)
    untouched = row_at(pages, PAGES * PAGE_ROWS - 1)
    rows = values(dtype, 4, seed=7)
    write_slots(pages, torch.tensor([-1, 6, -1, 2]), rows)
    guard.assert_intact()
    assert_bitwise_equal(row_at(pages, 6), rows[1])
    assert_bitwise_equal(row_at(pages, 2), rows[3])
    assert_bitwise_equal(row_at(pages, PAGES * PAGE_ROWS - 1), untouched, "slot -1 is not the last row")
    write_slots(pages, torch.tensor([-1, -1, -1, -1]), rows)
    assert_bitwise_equal(row_at(pages, PAGES * PAGE_ROWS - 1), untouched, "slot -1 is not the last row")


@pytest.mark.parametrize(
    "slot_ids", [[-1, 6, -1, 2], [-1, -1, -1, -1], [0, -1, 5, 7], [3, 1, 4, 8], [-1, 0, -5, -1], []]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_gaps_writing_does_the_same(slot_ids: list[int], dtype: torch.dtype) -> None:
    """How CUDA tensors are written, from which nothing is read on the host."""
    wanted = LAYOUTS["unaligned"](dtype)[1]
    guard, pages = LAYOUTS["unaligned"](dtype)
    for each in (wanted, pages):
        poison(each)
    slots, rows = torch.tensor(slot_ids, dtype=torch.int64), values(dtype, len(slot_ids), seed=8)
    write_slots(wanted, slots, rows)
    numbers = pages.view(torch.uint8) if dtype == torch.float8_e4m3fn else pages
    where, written = without_gaps(numbers, slots, rows.view(torch.uint8) if numbers is not pages else rows)
    assert bool((where >= 0).all())
    numbers.index_put_((where // PAGE_ROWS, where % PAGE_ROWS), written)
    guard.assert_intact()
    assert_bitwise_equal(pages, wanted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_write_slots_in_a_cuda_graph(dtype: torch.dtype) -> None:
    """Slots are edited in place between replays; no replay asks the device."""
    pages = torch.zeros(PAGES, PAGE_ROWS, HEADS, DIM, device="cuda").to(dtype)
    slots = torch.tensor([-1, 6, -1, 2], device="cuda")
    rows = values(dtype, 4, seed=9).cuda()
    write_slots(pages.clone(), slots, rows)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_slots(pages, slots, rows)
    for edited in ([-1, 6, -1, 2], [0, -1, 5, 7], [-1, -1, -1, -1]):
        wanted = pages.cpu()
        write_slots(wanted, torch.tensor(edited), rows.cpu())
        slots.copy_(torch.tensor(edited))
        graph.replay()
        assert_bitwise_equal(pages.cpu(), wanted, str(edited))


def test_write_slots_of_no_rows_changes_nothing() -> None:
    _, pages = LAYOUTS["dense"](torch.float32)
    poison(pages)
    write_slots(pages, torch.zeros(0, dtype=torch.int64), torch.zeros(0, HEADS, DIM))
    assert bool(pages.isnan().all())


def test_write_slots_takes_strided_rows() -> None:
    """Keys and values are slices of one projection."""
    _, pages = LAYOUTS["rows_apart"](torch.float32)
    both = randn(stream(8), torch.float32, 3, HEADS, 2 * DIM)
    write_slots(pages, torch.tensor([1, 9, 30]), both[..., DIM:])
    assert_bitwise_equal(read_slots(pages, torch.tensor([1, 9, 30])), both[..., DIM:])


def test_slots_of_ring_positions() -> None:
    """Rings are paged by ring: int64 positions take the same path."""
    ring_positions = torch.full((4, 8, 3), -1)
    write_slots(ring_positions, torch.tensor([9, 31]), torch.tensor([[1, 2, 3], [4, 5, 6]]))
    assert ring_positions[1, 1].tolist() == [1, 2, 3]
    assert read_slots(ring_positions, torch.tensor([31, 9])).tolist() == [[4, 5, 6], [1, 2, 3]]
