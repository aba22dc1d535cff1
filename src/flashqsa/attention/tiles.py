"""Union tiles: neighbouring rows of one request share the tokens that any of them attends.

Neighbours select mostly the same blocks, so their union is gathered once and each row masks what it did not select.
Tiles sit at absolute multiples of `TILE_ROWS` in their request: rows cut at those places have the same neighbours,
hence the same bits, in every chunk. How far a tile is split further follows from its own selections alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashqsa.attention.tokens import RowTokens

TILE_ROWS = 64
"""Rows of a tile. Chunks that are cut at multiples of it give the same bits as one long prefill."""

SPLITS = (64, 16, 4, 1)
GATHER_COST = 16
"""Gathering a token costs about as much as attending it with this many query heads."""
TILE_COST = 16384
"""What a tile costs however small it is, in tokens attended with one query head."""


@dataclass(frozen=True)
class Tile:
    """Some neighbouring rows and the tokens that at least one of them attends.

    Attributes:
        rows: Packed rows.
        token_ids: [U] int64 logical tokens, ascending.
        mask: [rows, U] bool, or None when every row attends every token.
    """

    rows: slice
    token_ids: torch.Tensor
    mask: torch.Tensor | None


def row_tile(tokens: RowTokens, row: int, first_row: int) -> Tile:
    """The tile of one row alone. In whatever order its tokens were listed, they are attended from the first on."""
    return Tile(slice(first_row + row, first_row + row + 1), tokens.token_ids(row).sort().values, None)


def union_tiles(tokens: RowTokens, first_row: int, first_position: int, query_group: int) -> Iterator[Tile]:
    """Cut the rows of one request into tiles.

    Args:
        tokens: What the rows attend.
        first_row: Packed row of the first of them.
        first_position: Position of the first of them.
        query_group: Query heads a KV head, which decides how far splitting pays.
    """
    count = tokens.positions.shape[0]
    for start, end in _cuts(first_position, 0, count, TILE_ROWS):
        part = tokens.rows(start, end)
        unit_ids, marks = _mark_units(part)
        height = _cheapest_height(marks, (first_position + start) % TILE_ROWS, tokens.unit_tokens, query_group)
        for low, high in _cuts(first_position, start, end, height):
            if height == 1:
                yield row_tile(part, low - start, first_row + start)
                continue
            rows = slice(low - start, high - start)
            yield _tile(part.rows(rows.start, rows.stop), unit_ids, marks[rows], first_row + low)


def _cuts(first_position: int, start: int, end: int, height: int) -> Iterator[tuple[int, int]]:
    """Rows start .. end of a request, cut where their positions are multiples of a height."""
    while start < end:
        position = first_position + start
        cut = min(end, start + height - position % height)
        yield start, cut
        start = cut


def _mark_units(tokens: RowTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Units that any of the rows attends, wholly or in its tail: [U] ids, ascending, and [rows, U] bool who does."""
    ids, device = tokens.unit_ids, tokens.unit_ids.device
    valid = torch.arange(ids.shape[1], device=device)[None] < tokens.unit_counts[:, None]
    named = torch.where(valid, ids, -1).to(torch.int64).flatten()
    tail_units = torch.empty(0, dtype=torch.int64, device=device)
    tail_starts = tokens.tail_starts
    if tail_starts is not None:
        first, last = int(tail_starts.min()), int(tokens.positions.max())
        tail_units = torch.arange(first // tokens.unit_tokens, last // tokens.unit_tokens + 1, device=device)
    unit_ids, places = torch.unique(torch.cat([named, tail_units]), return_inverse=True)
    marks = torch.zeros(ids.shape[0], unit_ids.shape[0], dtype=torch.bool, device=device)
    marks.scatter_(1, places[: named.shape[0]].view(ids.shape), True)
    if tail_starts is not None:
        first_unit = (tail_starts // tokens.unit_tokens)[:, None]
        last_unit = torch.where(tail_starts <= tokens.positions, tokens.positions // tokens.unit_tokens, -1)
        marks |= (unit_ids >= first_unit) & (unit_ids <= last_unit[:, None])
    invalid = int(unit_ids[0] == -1) if unit_ids.shape[0] else 0  # where ids past the counts landed
    return unit_ids[invalid:], marks[:, invalid:]


def _cheapest_height(marks: torch.Tensor, offset: int, unit_tokens: int, query_group: int) -> int:
    """Rows a tile, such that gathering unions and attending them costs least."""
    count, units = marks.shape
    union = torch.zeros(TILE_ROWS, units, dtype=torch.bool, device=marks.device)
    union[offset : offset + count] = marks
    best, least = SPLITS[-1], float("inf")
    for height in reversed(SPLITS):
        union = union.view(TILE_ROWS // height, union.shape[0] * height // TILE_ROWS, units).any(dim=1)
        tiles = (offset + count - 1) // height - offset // height + 1
        token_cost = GATHER_COST + min(height, count) * query_group
        cost = tiles * TILE_COST + int(union.sum()) * unit_tokens * token_cost
        if cost <= least:
            best, least = height, cost
    return best


def _tile(tokens: RowTokens, unit_ids: torch.Tensor, marks: torch.Tensor, first_row: int) -> Tile:
    """The tile of some rows, from the units that they attend at least in part."""
    r, device = tokens.unit_tokens, unit_ids.device
    used_units = marks.any(dim=0)
    token_ids = (unit_ids[used_units][:, None] * r + torch.arange(r, device=device)).flatten()
    mask = marks[:, used_units].repeat_interleave(r, dim=1)
    if tokens.tail_starts is not None:  # a tail ends within its last unit
        mask &= token_ids <= tokens.positions[:, None]
    used = mask.any(dim=0)
    if not bool(used.all()):
        token_ids, mask = token_ids[used], mask[:, used]
    packed = slice(first_row, first_row + marks.shape[0])
    return Tile(packed, token_ids, None if bool(mask.all()) else mask)
