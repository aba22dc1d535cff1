"""Parts of the torch backend: union tiles, rows read by slot, the gate's sigmoid."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.attention.gating import sigmoid
from flashqsa.attention.slots import SlotReader
from flashqsa.attention.tiles import SPLITS, TILE_ROWS, row_tile, union_tiles
from flashqsa.attention.tokens import RowTokens
from flashqsa.cache.state import read_slots
from flashqsa.testing import StepCase, assert_bitwise_equal, make_step, stream

E4M3 = torch.float8_e4m3fn


def _tokens(step: Any, selection: Any, include_tail: bool = True) -> RowTokens:
    visible = selection.visible_blocks if include_tail else None
    return RowTokens(selection.block_ids, selection.block_counts, step.plan.block_tokens, visible, step.plan.positions)


@pytest.mark.parametrize("noise", [0.0, 0.2, 10.0], ids=["same blocks", "neighbours", "unrelated"])
@pytest.mark.parametrize("request_rows", [(0, 200), (37, 150), (64, 64), (63, 2), (190, 1), (500, 130)], ids=str)
@pytest.mark.parametrize("include_tail", [True, False])
def test_tiles_hold_exactly_what_their_rows_attend(
    request_rows: tuple[int, int], noise: float, include_tail: bool, choose: Any, row_lists: Any
) -> None:
    step = make_step(StepCase("tiles", (request_rows,), head_dim=8, q_heads=2), seed=80)
    counts = [min(8, int(seen), 3 + row % 6) for row, seen in enumerate(step.plan.visible_blocks)]
    selection = choose(step, noise=noise, counts=counts)
    lists = row_lists(step, selection, include_tail)
    first_position, rows = request_rows
    row = 0
    for tile in union_tiles(_tokens(step, selection, include_tail), 0, first_position, 1):
        height = tile.rows.stop - tile.rows.start
        first, last = first_position + row, first_position + tile.rows.stop - 1
        assert tile.rows.start == row
        assert height in SPLITS or first == first_position or tile.rows.stop == rows
        assert first // TILE_ROWS == last // TILE_ROWS, "tiles end at multiples of TILE_ROWS"
        token_ids = tile.token_ids.tolist()
        assert token_ids == sorted(set(token_ids))
        mask = torch.ones(height, len(token_ids), dtype=torch.bool) if tile.mask is None else tile.mask
        assert not len(token_ids) or bool(mask.any(dim=0).all()), "a token that nobody attends"
        for i in range(height):
            assert tile.token_ids[mask[i]].tolist() == sorted(lists[row + i])
        row = tile.rows.stop
    assert row == rows


def test_heights_follow_what_neighbours_share(choose: Any) -> None:
    """The same blocks: the highest tiles. Unrelated ones of a long past: lower tiles, down to single rows."""
    step = make_step(StepCase("heights", ((8192, 64),), head_dim=8, q_heads=2, topk_blocks=256), seed=81)
    heights = {}
    for noise in (0.0, 10.0):
        tiles = list(union_tiles(_tokens(step, choose(step, noise=noise)), 0, 8192, 12))
        heights[noise] = max(tile.rows.stop - tile.rows.start for tile in tiles)
    assert heights[0.0] == TILE_ROWS
    assert heights[10.0] == 1


def test_tiles_of_a_chunk_are_those_of_the_whole(choose: Any) -> None:
    whole = make_step(StepCase("whole", ((0, 4 * TILE_ROWS + 9),), head_dim=8, q_heads=2), seed=82)
    chunk = make_step(StepCase("chunk", ((2 * TILE_ROWS, 2 * TILE_ROWS + 9),), head_dim=8, q_heads=2), seed=82)
    first = 2 * TILE_ROWS
    for noise in (0.0, 0.3, 10.0):
        later = [t for t in union_tiles(_tokens(whole, choose(whole, noise=noise)), 0, 0, 3) if t.rows.start >= first]
        own = list(union_tiles(_tokens(chunk, choose(chunk, noise=noise)), 0, first, 3))
        assert len(later) == len(own)
        for a, b in zip(later, own, strict=True):
            assert (a.rows.start - first, a.rows.stop - first) == (b.rows.start, b.rows.stop)
            assert torch.equal(a.token_ids, b.token_ids)
            assert (a.mask is None) == (b.mask is None)
            assert a.mask is None or torch.equal(a.mask, b.mask)  # type: ignore[arg-type]


def test_a_row_alone_attends_its_tokens_in_their_order(choose: Any, row_lists: Any) -> None:
    step = make_step(StepCase("row", ((90, 5), (3, 1))), seed=83)
    selection = choose(step)
    for row, tokens in enumerate(row_lists(step, selection)):
        tile = row_tile(_tokens(step, selection), row, 10)
        assert (tile.rows.start, tile.rows.stop) == (10 + row, 11 + row)
        assert tile.token_ids.tolist() == sorted(tokens)
        assert tile.mask is None


POOLS = {
    "dense": lambda x: x.clone(),
    "padded": lambda x: torch.nn.functional.pad(x, (0, 5, 1, 2, 3, 0, 1, 1))[1:-1, 3:, 1:-2, :-5],
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "pages inside tokens": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "one head for all": lambda x: x[:, :, :1].expand_as(x),
    "one page for all": lambda x: x[:1].expand_as(x),
    "one row for all": lambda x: x[:1, :1, :1].expand_as(x),
}


@pytest.mark.parametrize("shape", [(5, 8, 3, 7), (1, 16, 2, 8), (6, 1, 1, 9), (3, 4, 1, 1)], ids=str)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3], ids=["fp32", "bf16", "e4m3"])
def test_slots_are_read_whatever_the_strides(dtype: torch.dtype, pool: str, shape: tuple[int, ...]) -> None:
    generator = stream(84)
    numbers = torch.randn(shape, generator=generator).to(dtype)
    pages = POOLS[pool](numbers.view(torch.uint8)).view(E4M3) if dtype == E4M3 else POOLS[pool](numbers)
    slots = torch.randint(shape[0] * shape[1], (50,), generator=generator)
    reader = SlotReader(pages, torch.float32)
    got = reader.read(reader.places(slots))
    wanted = pages.float()[slots // shape[1], slots % shape[1]].transpose(0, 1)
    assert_bitwise_equal(got, wanted.contiguous(), pool)
    assert got.is_contiguous()
    assert_bitwise_equal(got.transpose(0, 1), read_slots(pages, slots).float(), "as the caches read them")


def test_no_slots_and_no_pages_read_nothing() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    for pages in (3, 0):
        reader = SlotReader(torch.randn(pages, 4, 2, 8), torch.float32)
        assert reader.read(reader.places(none)).shape == (2, 0, 8)


def test_sigmoid_is_the_same_wherever_an_element_lies() -> None:
    """Every length, offset and stride gives the bits of the whole: torch.sigmoid does not on the CPU."""
    x = 4 * torch.randn(4099, generator=stream(85))
    whole = sigmoid(x)
    for offset in (0, 1, 5, 16, 33):
        for count in (1, 2, 7, 15, 16, 17, 31, 33, 99, 1000):
            part = slice(offset, offset + count)
            assert_bitwise_equal(sigmoid(x[part]), whole[part], f"{count} from {offset}")
            assert_bitwise_equal(sigmoid(x[part].clone()), whole[part], f"a copy of {count} from {offset}")
    spread = torch.empty(4099, 3)[:, 1].copy_(x)
    assert_bitwise_equal(sigmoid(spread), whole, "every third element")


def test_sigmoid_is_as_good_as_torch() -> None:
    x = torch.cat([torch.linspace(-120, 120, 20001), torch.tensor([0.0, -0.0, 1e-30, torch.inf, -torch.inf])])
    exact = torch.sigmoid(x.double())
    error = (sigmoid(x).double() - exact).abs()
    assert bool((error <= 3e-7 * exact + 1e-45).all())
    assert bool(sigmoid(torch.tensor(float("nan"))).isnan())
    assert torch.equal(sigmoid(torch.tensor([torch.inf, -torch.inf, 0.0])), torch.tensor([1.0, 0.0, 0.5]))
    wide = torch.linspace(-800, 800, 20001, dtype=torch.float64)
    torch.testing.assert_close(sigmoid(wide), torch.sigmoid(wide), rtol=1e-14, atol=1e-300)
    assert torch.autograd.gradcheck(sigmoid, torch.tensor([-3.0, 0.0, 2.0, 40.0], dtype=torch.float64).requires_grad_())
