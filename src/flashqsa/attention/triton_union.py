# mypy: ignore-errors
"""Union lists on the GPU: which blocks neighbouring rows of a request attend, each once, with a bit a row.

Tiles sit at absolute multiples of their height in the request, cut by where its rows begin and end. The lists of a
tile's rows are merged into one list of (block, row) keys; a block's entries then lie together, and the last of them
writes the block's physical place and the bits of all rows that have it. One program a tile, no host reads.

Numbers of a step need no list of tiles either: with tiles of `h` rows, tile `j` of request `q` is tile number
``query_starts[q] // h + 2 * q + j``. Numbers of two requests never meet, since ``n`` rows lie in at most ``n // h + 2``
tiles, and a program finds its request by searching `query_starts`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

ROW_BITS = 5
MOST_TILE_ROWS = 1 << ROW_BITS
"""Rows of a tile at most: a bit each in 32."""

MOST_BLOCKS = 1 << (31 - ROW_BITS)
"""Block ids lie below it: a key is a block id and a row of the tile in 31 bits."""

LEAST_ROWS = 17
"""Rows of a request that tiles begin to serve; up to 16 a request are decode and verification."""


@dataclass(frozen=True)
class UnionLists:
    """The union lists of a step.

    Attributes:
        first_rows: [N] int32 packed row that each tile begins with.
        row_counts: [N] int32 rows of each tile, 0 where a number has no tile.
        block_counts: [N] int32 blocks of its union.
        slot_ids: [N, W] int32 slot of the first token of each block, ascending by block id.
        row_bits: [N, W] int32, bit j for row j of the tile.
        tile_rows: Height of a tile.
    """

    first_rows: torch.Tensor
    row_counts: torch.Tensor
    block_counts: torch.Tensor
    slot_ids: torch.Tensor
    row_bits: torch.Tensor
    tile_rows: int


@triton.jit
def _find_request(query_starts_ptr, number, num_requests, TILE_ROWS: tl.constexpr):
    """The last request whose tile numbers begin at or before `number`."""
    low = number * 0
    high = low + num_requests - 1
    while low < high:
        middle = (low + high + 1) // 2
        first = tl.load(query_starts_ptr + middle) // TILE_ROWS + 2 * middle
        low = tl.where(first <= number, middle, low)
        high = tl.where(first <= number, high, middle - 1)
    return low


@triton.jit
def _merged(keys, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROUNDS: tl.constexpr):
    """[ROWS * COLUMNS] keys in order, from [ROWS, COLUMNS] whose even rows rise and whose odd rows fall.

    A rising half and a falling one are a bitonic row, which merges in place. Rows that must fall rise as complements.
    """
    for i in tl.static_range(0, ROUNDS):
        keys = tl.reshape(keys, (ROWS >> (i + 1), COLUMNS << (i + 1)))
        falls = -(tl.arange(0, ROWS >> (i + 1)) & 1)[:, None]
        keys = tl.bitonic_merge(keys ^ falls) ^ falls
    return tl.reshape(keys, (ROWS * COLUMNS,))


@triton.jit
def _union_lists_kernel(
    block_ids_ptr, block_counts_ptr, query_starts_ptr, seq_lens_ptr, page_table_ptr, first_slots_ptr,
    first_rows_ptr, row_counts_ptr, union_counts_ptr, slots_ptr, bits_ptr, keys_ptr,
    num_requests, num_rows, stride_bt, stride_pr,
    BLOCK_TOKENS: tl.constexpr, PAGE_TOKENS: tl.constexpr, PAGED: tl.constexpr, TILE_ROWS: tl.constexpr,
    LEAST_ROWS: tl.constexpr, ROW_BITS: tl.constexpr, TOPK: tl.constexpr, ROWS_P2: tl.constexpr, ROUNDS: tl.constexpr,
    TOPK_P2: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0)
    request = _find_request(query_starts_ptr, number, num_requests, TILE_ROWS)
    begin = tl.load(query_starts_ptr + request)
    rows = tl.minimum(tl.load(query_starts_ptr + request + 1), num_rows) - begin
    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - rows
    j = number - begin // TILE_ROWS - 2 * request
    tile_start = (first_position // TILE_ROWS + j) * TILE_ROWS
    first = tl.maximum(tile_start, first_position)
    count = tl.minimum(tile_start + TILE_ROWS, seq_len) - first
    served = (rows >= LEAST_ROWS) & (seq_len >= rows)
    count = tl.where(served, tl.maximum(count, 0), 0)
    first_row = begin + first - first_position
    tl.store(first_rows_ptr + number, tl.where(count > 0, first_row, 0))
    tl.store(row_counts_ptr + number, count)
    if count == 0:
        tl.store(union_counts_ptr + number, 0)
        return

    SIZE: tl.constexpr = ROWS_P2 * TOPK_P2
    NOTHING: tl.constexpr = 0x7FFFFFFF
    row = tl.arange(0, ROWS_P2)[:, None]
    column = tl.arange(0, TOPK_P2)[None, :]
    column = tl.where((row & 1) != 0, TOPK_P2 - 1 - column, column)  # odd rows fall, as merging wants them
    at_row = (first_row + row).to(tl.int64)
    counts = tl.load(block_counts_ptr + at_row, mask=row < count, other=0)
    live = (row < count) & (column < tl.minimum(counts, TOPK))
    ids = tl.load(block_ids_ptr + at_row * stride_bt + column, mask=live, other=0)
    ids = tl.minimum(tl.maximum(ids, 0), (seq_len - 1) // BLOCK_TOKENS)  # never outside the request
    keys = tl.where(live, (ids << ROW_BITS) | row, NOTHING)
    keys = _merged(keys, ROWS_P2, TOPK_P2, ROUNDS)
    keys_ptr += number.to(tl.int64) * SIZE
    tl.store(keys_ptr + tl.arange(0, SIZE), keys)
    tl.debug_barrier()  # neighbours of a key are read back from all threads

    slots_ptr += number.to(tl.int64) * (TILE_ROWS * TOPK)
    bits_ptr += number.to(tl.int64) * (TILE_ROWS * TOPK)
    table_ptr = page_table_ptr + request.to(tl.int64) * stride_pr
    base = tl.load(first_slots_ptr + request) if not PAGED else request
    found = count * 0
    for chunk in tl.range(0, SIZE, CHUNK):
        at = chunk + tl.arange(0, CHUNK)
        key = tl.load(keys_ptr + at)
        after = tl.load(keys_ptr + at + 1, mask=at + 1 < SIZE, other=NOTHING)
        block = key >> ROW_BITS
        last = (key != NOTHING) & ((block != after >> ROW_BITS) | (after == NOTHING))
        bits = tl.full((CHUNK,), 1, tl.int32) << (key & ((1 << ROW_BITS) - 1))
        for back in tl.static_range(1, TILE_ROWS):
            before = tl.load(keys_ptr + at - back, mask=at >= back, other=NOTHING)
            same = (before >> ROW_BITS == block) & (before != NOTHING)
            bits |= tl.where(same, tl.full((CHUNK,), 1, tl.int32) << (before & ((1 << ROW_BITS) - 1)), 0)
        place = found + tl.cumsum(last.to(tl.int32), 0) - 1
        token = block * BLOCK_TOKENS
        if PAGED:
            page = tl.load(table_ptr + token // PAGE_TOKENS, mask=last, other=0)
            slot = page * PAGE_TOKENS + token % PAGE_TOKENS
        else:
            slot = (base + token).to(tl.int32)
        tl.store(slots_ptr + place, tl.maximum(slot, 0), mask=last)
        tl.store(bits_ptr + place, bits, mask=last)
        found += tl.sum(last.to(tl.int32), 0)
    tl.store(union_counts_ptr + number, found)


def most_tiles(plan, tile_rows):
    """Tile numbers that a step of this shape can have."""
    return plan.num_rows // tile_rows + 2 * plan.num_requests


def union_lists(tokens, plan, page_tokens, tile_rows):
    """Build the union lists of the rows of all requests that have at least `LEAST_ROWS` of them.

    Args:
        tokens: `RowTokens` of all T rows, units ascending in a row.
        plan: The step; owns the lists' memory.
        page_tokens: Tokens of a page of K and V.
        tile_rows: Height of a tile, at most `MOST_TILE_ROWS`.

    Returns:
        `UnionLists`, None where the step has no row or no request.
    """
    numbers = most_tiles(plan, tile_rows)
    if plan.num_rows == 0 or plan.num_requests == 0:
        return None
    topk = tokens.unit_ids.shape[1]
    rows_p2, topk_p2 = triton.next_power_of_2(tile_rows), triton.next_power_of_2(max(topk, 1))
    size = rows_p2 * topk_p2
    first_rows, row_counts, counts = (
        plan.scratch(f"attend.union.{name}", (numbers,), torch.int32) for name in ("first", "rows", "blocks")
    )
    slots, bits = (
        plan.scratch(f"attend.union.{name}", (numbers, tile_rows * topk), torch.int32) for name in ("slots", "bits")
    )
    keys = plan.scratch("attend.union.keys", (numbers, size), torch.int32)
    paged = plan.page_table is not None
    _union_lists_kernel[(numbers,)](
        tokens.unit_ids, tokens.unit_counts, plan.query_starts, plan.seq_lens,
        plan.page_table if paged else plan.seq_lens, plan.seq_lens if paged else plan.first_slots,
        first_rows, row_counts, counts, slots, bits, keys,
        plan.num_requests, plan.num_rows, tokens.unit_ids.stride(0), plan.page_table.stride(0) if paged else 0,
        BLOCK_TOKENS=tokens.unit_tokens, PAGE_TOKENS=page_tokens, PAGED=paged, TILE_ROWS=tile_rows,
        LEAST_ROWS=LEAST_ROWS, ROW_BITS=ROW_BITS, TOPK=topk, ROWS_P2=rows_p2, TOPK_P2=topk_p2,
        ROUNDS=rows_p2.bit_length() - 1, CHUNK=min(size, 2048),
        num_warps=16 if size > 8192 else 8 if size > 2048 else 4, enable_fp_fusion=False,
    )  # fmt: skip
    return UnionLists(first_rows, row_counts, counts, slots, bits, tile_rows)
