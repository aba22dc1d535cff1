"""Union tiles: neighbouring rows of one request share the tokens that any of them attends.

Neighbours select mostly the same blocks, so their union is gathered once and each row masks what it did not select.
Tiles sit at absolute multiples of `TILE_ROWS` in their request: rows cut at those places have the same neighbours, hence
the same bits, in every chunk. How far a tile is split further follows from its own selections alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

TILE_ROWS = 64
"""Rows of a tile. Chunks that are cut at multiples of it give the same bits as one long prefill."""

SPLITS = (64, 16, 4)
GATHER_COST = 32
"""Gathering a token costs about as much as attending it with this many query heads."""


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


@dataclass(frozen=True)
class RowTokens:
    """What the rows of one request attend, before it is cut into tiles.

    Attributes:
        unit_ids: [n, W] integer ids of units (blocks or tokens), valid up to the row's count.
        unit_counts: [n] integer.
        unit_tokens: Tokens of a unit.
        tail_starts: [n] int64 first tail token, or None without a tail.
        positions: [n] int64 position of each row, the last token of its tail.
    """

    unit_ids: torch.Tensor
    unit_counts: torch.Tensor
    unit_tokens: int
    tail_starts: torch.Tensor | None
    positions: torch.Tensor


def row_tile(tokens: RowTokens, row: int, packed_row: int) -> Tile:
    """The tile of one row alone: its units in their own order, then its tail."""
    count, r = int(tokens.unit_counts[row]), tokens.unit_tokens
    device = tokens.unit_ids.device
    units = tokens.unit_ids[row, :count].to(torch.int64)
    token_ids = (units[:, None] * r + torch.arange(r, device=device)).flatten()
    if tokens.tail_starts is not None:
        tail = torch.arange(int(tokens.tail_starts[row]), int(tokens.positions[row]) + 1, device=device)
        token_ids = torch.cat([token_ids, tail])
    return Tile(slice(packed_row, packed_row + 1), token_ids, None)


def union_tiles(tokens: RowTokens, first_row: int, first_position: int, query_group: int) -> Iterator[Tile]:
    """Cut the rows of one request into tiles.

    Args:
        tokens: What the rows attend.
        first_row: Packed row of the first of them.
        first_position: Position of the first of them.
        query_group: Query heads a KV head, which decides how far splitting pays.
    """
    count = tokens.positions.shape[0]
    start = 0
    while start < count:
        end = min((first_position + start) // TILE_ROWS * TILE_ROWS + TILE_ROWS - first_position, count)
        marks = _mark_units(tokens, start, end)
        offset = (first_position + start) % TILE_ROWS
        height = _cheapest_height(marks, offset, query_group)
        low = start
        while low < end:
            high = min((first_position + low) // height * height + height - first_position, end)
            yield _tile(tokens, marks[low - start : high - start], low, high, first_row)
            low = high
        start = end


def _mark_units(tokens: RowTokens, start: int, end: int) -> torch.Tensor:
    """[rows, units up to the last position] bool: which units each row attends, wholly or as part of its tail."""
    r, rows = tokens.unit_tokens, slice(start, end)
    width = int(tokens.positions[rows].max()) // r + 1
    ids, counts = tokens.unit_ids[rows].to(torch.int64), tokens.unit_counts[rows]
    valid = torch.arange(ids.shape[1], device=ids.device)[None] < counts[:, None]
    marks = torch.zeros(end - start, width + 1, dtype=torch.bool, device=ids.device)
    marks.scatter_(1, torch.where(valid, ids, width), True)  # what is not valid lands in a last column, cut off here
    return marks[:, :width]


def _cheapest_height(marks: torch.Tensor, offset: int, query_group: int) -> int:
    """Rows a tile, such that gathering unions and attending them costs least."""
    padded = torch.zeros(TILE_ROWS, marks.shape[1], dtype=torch.bool, device=marks.device)
    padded[offset : offset + marks.shape[0]] = marks
    best, least = SPLITS[-1], float("inf")
    union, rows = padded, 1
    for height in reversed(SPLITS):
        union = union.view(-1, height // rows, union.shape[1]).any(dim=1)
        rows = height
        cost = float(union.sum()) * (GATHER_COST + min(height, marks.shape[0]) * query_group)
        if cost <= least:
            best, least = height, cost
    return best


def _tile(tokens: RowTokens, marks: torch.Tensor, low: int, high: int, first_row: int) -> Tile:
    r, rows = tokens.unit_tokens, slice(low, high)
    packed = slice(first_row + low, first_row + high)
    positions = tokens.positions[rows]
    last = int(positions.max())
    wanted = marks.any(dim=0)
    if tokens.tail_starts is not None:
        wanted[int(tokens.tail_starts[rows].min()) // r : last // r + 1] = True
    units = wanted.nonzero()[:, 0]
    token_ids = (units[:, None] * r + torch.arange(r, device=units.device)).flatten()
    mask = marks[:, units].repeat_interleave(r, dim=1)
    if tokens.tail_starts is not None:
        in_tail = (token_ids[None] >= tokens.tail_starts[rows, None]) & (token_ids[None] <= positions[:, None])
        mask = mask | in_tail
    used = mask.any(dim=0)
    if not bool(used.all()):
        token_ids, mask = token_ids[used], mask[:, used]
    return Tile(packed, token_ids, None if bool(mask.all()) else mask)
