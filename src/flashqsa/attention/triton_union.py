# mypy: ignore-errors
"""Union lists on the GPU: which blocks neighbouring rows of a request attend, each once, with a bit a row.

Tiles sit at absolute multiples of their height in the request, cut by where its rows begin and end. One program a
tile sets a bit a block, counts the bits before every word of 32 blocks, and so knows the place of every id in the
union: nothing is sorted, and the work is that of reading the ids twice. No host reads.

Numbers of a step need no list of tiles either: with tiles of `h` rows, tile `j` of request `q` is tile number
``query_starts[q] // h + 2 * q + j``. Numbers of two requests never meet, since ``n`` rows lie in at most ``n // h + 2``
tiles, and a program finds its request by searching `query_starts`. Narrow tiles, of verification, sit at no absolute
places: a request has as many numbers as its most rows need, and its rows share as few tiles as hold them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashqsa.launching import overlapping, wait_for_previous

MOST_TILE_ROWS = 32
"""Rows of a tile at most: a bit each."""

LEAST_ROWS = 17
"""Rows of a request that make it a prefill, whose tiles sit at absolute places. Up to 16 are verification."""


@dataclass(frozen=True)
class UnionLists:
    """The union lists of a step.

    Attributes:
        first_rows: [N] int32 packed row that each tile begins with.
        row_counts: [N] int32 rows of each tile, 0 where a number has no tile or its rows are left to others.
        block_counts: [N] int32 blocks of its union.
        slot_ids: [N, W] int32 slot of the first token of each block, ascending by block id.
        row_bits: [N, W] int32, bit j for row j of the tile.
        tile_rows: Height of a tile.
        served: [T] int32, 1 for rows that lie in a tile, 0 for rows that are left; rows of no request are not written.
    """

    first_rows: torch.Tensor
    row_counts: torch.Tensor
    block_counts: torch.Tensor
    slot_ids: torch.Tensor
    row_bits: torch.Tensor
    tile_rows: int
    served: torch.Tensor


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
def _count_bits(word):
    """Ones of each int32."""
    word = word.to(tl.uint32, bitcast=True)
    word -= (word >> 1) & 0x55555555
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _ids_of_rows(
    ids_ptr, counts_ptr, at, count, last_block, stride_bt, stride_ct, TOPK: tl.constexpr, IDS: tl.constexpr
):
    """Rows, block ids and validity of places [at, at + IDS) of a tile's lists, laid end to end."""
    place = at + tl.arange(0, IDS)
    row = place // TOPK
    column = place % TOPK
    live = column < tl.load(counts_ptr + row * stride_ct, mask=row < count, other=0)
    ids = tl.load(ids_ptr + row.to(tl.int64) * stride_bt + column, mask=live, other=0)
    return row, tl.minimum(tl.maximum(ids, 0), last_block), live  # never outside the request


@triton.jit(do_not_specialize=[
    "block_counts_ptr", "query_starts_ptr", "seq_lens_ptr", "page_table_ptr", "first_slots_ptr", "num_requests",
    "num_rows", "num_words", "stride_pr",
])  # fmt: skip
def _union_lists_kernel(
    block_ids_ptr, block_counts_ptr, query_starts_ptr, seq_lens_ptr, page_table_ptr, first_slots_ptr,
    first_rows_ptr, row_counts_ptr, union_counts_ptr, slots_ptr, bits_ptr, served_ptr, words_ptr, ranks_ptr,
    num_requests, num_rows, num_words, most_share, stride_bt, stride_ct, stride_pr,
    BLOCK_TOKENS: tl.constexpr, PAGE_TOKENS: tl.constexpr, PAGED: tl.constexpr, TILE_ROWS: tl.constexpr,
    NARROW: tl.constexpr, NARROW_ROWS: tl.constexpr, LEAST_ROWS: tl.constexpr, ROWS_P2: tl.constexpr,
    TOPK: tl.constexpr, IDS: tl.constexpr, WORDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    number = tl.program_id(0)
    request = number // NARROW if NARROW else _find_request(query_starts_ptr, number, num_requests, TILE_ROWS)
    begin = tl.load(query_starts_ptr + request)
    rows = tl.minimum(tl.load(query_starts_ptr + request + 1), num_rows) - begin
    seq_len = tl.load(seq_lens_ptr + request)
    first_position = seq_len - rows
    if NARROW:  # as few tiles as hold the rows, all of one height
        j = number % NARROW
        tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
        height = (rows + tl.maximum(tiles, 1) - 1) // tl.maximum(tiles, 1)
        first = first_position + tl.minimum(j * height, rows)
        count = tl.minimum(height, seq_len - first)
        wanted = (rows >= NARROW_ROWS) & (rows < LEAST_ROWS)
    else:
        j = number - begin // TILE_ROWS - 2 * request
        tile_start = (first_position // TILE_ROWS + j) * TILE_ROWS
        first = tl.maximum(tile_start, first_position)
        count = tl.minimum(tile_start + TILE_ROWS, seq_len) - first
        wanted = rows >= LEAST_ROWS
    count = tl.where(seq_len >= rows, tl.maximum(count, 0), 0)
    first_row = begin + first - first_position
    tl.store(first_rows_ptr + number, tl.where(count > 0, first_row, 0))
    member = tl.arange(0, ROWS_P2)
    served_ptr += first_row + member
    if (count == 0) | (not wanted):
        tl.store(row_counts_ptr + number, 0)
        tl.store(union_counts_ptr + number, 0)
        others = (not NARROW) | (rows < LEAST_ROWS)  # narrow lists come second
        tl.store(served_ptr, tl.zeros((ROWS_P2,), tl.int32), mask=(member < count) & others)
        return

    last_block = (seq_len - 1) // BLOCK_TOKENS
    ids_ptr = block_ids_ptr + first_row.to(tl.int64) * stride_bt
    counts_ptr = block_counts_ptr + first_row.to(tl.int64) * stride_ct
    words_ptr += number.to(tl.int64) * num_words
    ranks_ptr += number.to(tl.int64) * num_words
    used_words = tl.minimum(last_block // 32 + 1, num_words)
    last_block = tl.minimum(last_block, used_words * 32 - 1)
    lane = tl.arange(0, WORDS)
    for chunk in tl.range(0, used_words, WORDS):
        tl.store(words_ptr + chunk + lane, tl.zeros((WORDS,), tl.int32), mask=chunk + lane < used_words)
    tl.debug_barrier()

    # 1. A bit a block: who is in the union.
    for at in tl.range(0, count * TOPK, IDS):
        _, ids, live = _ids_of_rows(ids_ptr, counts_ptr, at, count, last_block, stride_bt, stride_ct, TOPK, IDS)
        tl.atomic_or(words_ptr + ids // 32, tl.full((IDS,), 1, tl.int32) << (ids & 31), mask=live, sem="relaxed")
    tl.debug_barrier()

    # 2. How many blocks of the union lie before each word.
    found = count * 0
    for chunk in tl.range(0, used_words, WORDS):
        here = chunk + lane < used_words
        ones = _count_bits(tl.load(words_ptr + chunk + lane, mask=here, other=0, cache_modifier=".cg"))
        tl.store(ranks_ptr + chunk + lane, found + tl.cumsum(ones, 0) - ones, mask=here)
        found += tl.sum(ones, 0)
    slots_ptr += number.to(tl.int64) * (TILE_ROWS * TOPK)
    bits_ptr += number.to(tl.int64) * (TILE_ROWS * TOPK)
    tl.store(union_counts_ptr + number, found)
    row_blocks = tl.load(counts_ptr + member * stride_ct, mask=member < count, other=0)
    listed = tl.sum(tl.minimum(tl.maximum(row_blocks, 0), TOPK), 0)
    fits = found.to(tl.float32) <= most_share * listed.to(tl.float32)
    tl.store(row_counts_ptr + number, tl.where(fits, count, 0))
    tl.store(served_ptr, (member * 0 + fits).to(tl.int32), mask=member < count)
    if not fits:
        return
    for chunk in tl.range(0, found, WORDS):
        tl.store(bits_ptr + chunk + lane, tl.zeros((WORDS,), tl.int32), mask=chunk + lane < found)
    tl.debug_barrier()

    # 3. Every row's entries to their places; rows that share a block write the same slot.
    table_ptr = page_table_ptr + request.to(tl.int64) * stride_pr
    base = tl.load(first_slots_ptr + request) if not PAGED else request
    for at in tl.range(0, count * TOPK, IDS):
        row, ids, live = _ids_of_rows(ids_ptr, counts_ptr, at, count, last_block, stride_bt, stride_ct, TOPK, IDS)
        word = tl.load(words_ptr + ids // 32, mask=live, other=0)
        place = tl.load(ranks_ptr + ids // 32, mask=live, other=0)
        place += _count_bits(word & ((tl.full((IDS,), 1, tl.int32) << (ids & 31)) - 1))
        token = ids * BLOCK_TOKENS
        if PAGED:
            page = tl.load(table_ptr + token // PAGE_TOKENS, mask=live, other=0)
            slot = page * PAGE_TOKENS + token % PAGE_TOKENS
        else:
            slot = (base + token).to(tl.int32)
        tl.store(slots_ptr + place, tl.maximum(slot, 0), mask=live)
        tl.atomic_or(bits_ptr + place, tl.full((IDS,), 1, tl.int32) << row, mask=live, sem="relaxed")


def most_tiles(plan, tile_rows, narrow=False):
    """Tile numbers that a step of this shape can have; of narrow tiles, as many for each request."""
    if narrow:
        return plan.num_requests * _narrow_tiles(plan, tile_rows)
    return plan.num_rows // tile_rows + 2 * plan.num_requests


def _narrow_tiles(plan, tile_rows):
    return -(-min(plan.max_query_len, LEAST_ROWS - 1) // tile_rows)


def union_lists(tokens, plan, page_tokens, tile_rows, *, narrow=0, most_share=1.0, warps=4, per_warp=256):
    """Build the union lists of the rows of all requests that have at least `LEAST_ROWS` of them, or of the others.

    Args:
        tokens: `RowTokens` of all T rows, units ascending in a row.
        plan: The step; owns the lists' memory.
        page_tokens: Tokens of a page of K and V.
        tile_rows: Height of a tile, at most `MOST_TILE_ROWS`.
        narrow: Serve the requests of `narrow` to ``LEAST_ROWS - 1`` rows instead, if it is not 0. Their tiles sit at no
            absolute places.
        most_share: Rows are left where their tile's union is larger than this share of their lists laid end to end:
            1 where they have nothing in common, 1 / rows where they attend the same blocks.
        warps: Warps of a program.
        per_warp: Ids that a warp looks at in one go.

    Returns:
        `UnionLists`, None where the step has no row or no request.
    """
    numbers = most_tiles(plan, tile_rows, narrow)
    if plan.num_rows == 0 or plan.num_requests == 0:
        return None
    topk = tokens.unit_ids.shape[1]
    num_words = -(-plan.max_seq_len // (32 * tokens.unit_tokens)) + 1
    first_rows, row_counts, counts = (
        plan.scratch(f"attend.union.{name}", (numbers,), torch.int32) for name in ("first", "rows", "blocks")
    )
    slots, bits = (
        plan.scratch(f"attend.union.{name}", (numbers, tile_rows * topk), torch.int32) for name in ("slots", "bits")
    )
    words, ranks = (
        plan.scratch(f"attend.union.{name}", (numbers, num_words), torch.int32) for name in ("words", "ranks")
    )
    served = plan.scratch("attend.union.served", (plan.num_rows,), torch.int32)
    paged = plan.page_table is not None
    _union_lists_kernel[(numbers,)](
        tokens.unit_ids, tokens.unit_counts, plan.query_starts, plan.seq_lens,
        plan.page_table if paged else plan.seq_lens, plan.seq_lens if paged else plan.first_slots,
        first_rows, row_counts, counts, slots, bits, served, words, ranks,
        plan.num_requests, plan.num_rows, num_words, float(most_share),
        tokens.unit_ids.stride(0), tokens.unit_counts.stride(0),
        plan.page_table.stride(0) if paged else 0,
        BLOCK_TOKENS=tokens.unit_tokens, PAGE_TOKENS=page_tokens, PAGED=paged, TILE_ROWS=tile_rows,
        NARROW=_narrow_tiles(plan, tile_rows) if narrow else 0, NARROW_ROWS=narrow, LEAST_ROWS=LEAST_ROWS,
        ROWS_P2=triton.next_power_of_2(tile_rows), TOPK=topk, IDS=per_warp * warps, WORDS=128 * warps,
        num_warps=warps, enable_fp_fusion=False, **overlapping(plan.device),
    )  # fmt: skip
    return UnionLists(first_rows, row_counts, counts, slots, bits, tile_rows, served)
