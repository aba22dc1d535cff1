# mypy: ignore-errors
"""Union lists of verification: of the few rows of a request, all in one tile, in one look at the ids.

Requests are tiles, so there is no list of tiles and no search. A program keeps all ids of its tile in registers, sets
a bit a block, counts the bits before every word of 32 blocks, and so knows the place of every id in the union; pages
are looked up while the bits are set. No host reads.

A list is attended in spans of about SPAN_STEPS * STEP_TOKENS tokens, by several programs: how many spans and how long
is a function of the list's length alone, so that bits depend neither on the batch nor on the device.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashqsa.attention.triton_union import _count_bits
from flashqsa.launching import overlapping, wait_for_previous

STEP_TOKENS = 64
SPAN_STEPS = 8
MOST_SPANS = 8
"""Tokens of a step, steps of a span, spans of a list at most: all of them are part of the arithmetic."""

FEWEST_ROWS = 4
"""Rows of a request from which on its verification goes by spans of its union."""

TILE_FIELDS = 8
MOST_IDS = 8192
"""Ids that a program can hold."""


@dataclass(frozen=True)
class VerifyLists:
    """The union lists of a step's narrow requests, numbered as the requests are.

    Attributes:
        tiles: [N, 8] int32, of each tile: first packed row, rows (0 where a request has no tile), blocks of its union,
            tokens of union and tail, steps of a span, spans (0 where there is no tile), first token of the tail,
            position of the first row.
        slot_ids: [N, W] int32 slot of the first token of each block, ascending by block id.
        row_bits: [N, W] int32, bit j for row j of the tile.
        height: Rows of a tile at most.
        served: [T] int32, 1 for rows that lie in a tile; as `verify_lists` was told for others.
    """

    tiles: torch.Tensor
    slot_ids: torch.Tensor
    row_bits: torch.Tensor
    height: int
    served: torch.Tensor


@triton.jit(do_not_specialize=[
    "block_counts_ptr", "visible_ptr", "query_starts_ptr", "seq_lens_ptr", "page_table_ptr", "first_slots_ptr",
    "num_rows", "num_words", "mark_below", "stride_pr",
])  # fmt: skip
def _verify_lists_kernel(
    block_ids_ptr, block_counts_ptr, visible_ptr, query_starts_ptr, seq_lens_ptr, page_table_ptr, first_slots_ptr,
    tiles_ptr, slots_ptr, bits_ptr, served_ptr, words_ptr, ranks_ptr,
    num_rows, num_words, mark_below, stride_bt, stride_ct, stride_pr,
    BLOCK_TOKENS: tl.constexpr, PAGE_TOKENS: tl.constexpr, PAGED: tl.constexpr, INCLUDE_TAIL: tl.constexpr,
    FEWEST_ROWS: tl.constexpr, MOST_ROWS: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    HEIGHT_P2: tl.constexpr, TOPK: tl.constexpr, TOPK_P2: tl.constexpr, WORDS: tl.constexpr,
    ONE_LOOK: tl.constexpr, STEP_TOKENS: tl.constexpr, SPAN_STEPS: tl.constexpr, MOST_SPANS: tl.constexpr,
    TILE_FIELDS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    request = tl.program_id(0)
    begin = tl.load(query_starts_ptr + request)
    rows = tl.minimum(tl.load(query_starts_ptr + request + 1), num_rows) - begin
    seq_len = tl.load(seq_lens_ptr + request)

    # Meanwhile the memory of the lists becomes zeros.
    words_ptr += request.to(tl.int64) * num_words
    ranks_ptr += request.to(tl.int64) * num_words
    slots_ptr += request.to(tl.int64) * WIDTH
    bits_ptr += request.to(tl.int64) * WIDTH
    lane = tl.arange(0, WORDS)
    for chunk in tl.range(0, num_words, WORDS):
        tl.store(words_ptr + chunk + lane, tl.zeros((WORDS,), tl.int32), mask=chunk + lane < num_words)
    member = tl.arange(0, HEIGHT_P2)
    column = tl.arange(0, TOPK_P2)[None, :]
    some = (member[:, None] < HEIGHT) & (column < TOPK)
    tl.store(bits_ptr + member[:, None] * TOPK + column, tl.zeros((HEIGHT_P2, TOPK_P2), tl.int32), mask=some)

    first = seq_len - rows
    tiles_ptr += request * TILE_FIELDS
    if (first < 0) | (rows < FEWEST_ROWS) | (rows > MOST_ROWS):
        tl.store(tiles_ptr + 1, 0)
        tl.store(tiles_ptr + 5, 0)
        for row in tl.range(0, tl.where((first >= 0) & (rows < mark_below), rows, 0)):
            tl.store(served_ptr + begin + row, 0)
        return
    count = rows
    first_row = begin

    # All loads that depend on nothing more go out together.
    in_rows = member < count
    row = (first_row + member).to(tl.int64)
    in_list = in_rows[:, None] & (column < TOPK)
    ids = tl.load(block_ids_ptr + row[:, None] * stride_bt + column, mask=in_list, other=0)
    row_blocks = tl.load(block_counts_ptr + row * stride_ct, mask=in_rows, other=0)
    if INCLUDE_TAIL:
        visible = tl.load(visible_ptr + row, mask=in_rows, other=0)
    last_block = tl.minimum((seq_len - 1) // BLOCK_TOKENS, num_words * 32 - 1)
    live = in_list & (column < row_blocks[:, None])
    ids = tl.minimum(tl.maximum(ids, 0), last_block)  # never outside the request
    token = ids * BLOCK_TOKENS
    bit = tl.full((HEIGHT_P2, TOPK_P2), 1, tl.int32) << (ids & 31)
    if PAGED:
        table_ptr = page_table_ptr + request.to(tl.int64) * stride_pr
        page = tl.load(table_ptr + token // PAGE_TOKENS, mask=live, other=0)
    tl.debug_barrier()

    # 1. A bit a block: who is in the union.
    tl.atomic_or(words_ptr + ids // 32, bit, mask=live, sem="relaxed")
    tl.debug_barrier()

    # 2. How many blocks of the union lie before each word; from there to every id of the word.
    found = count * 0
    if ONE_LOOK:  # the words fit one look: ids take theirs through shared memory
        words = tl.load(words_ptr + lane, mask=lane < num_words, other=0, cache_modifier=".cg")
        ones = _count_bits(words)
        at = tl.reshape(ids // 32, (HEIGHT_P2 * TOPK_P2,))
        word = tl.reshape(tl.gather(words, at, 0), (HEIGHT_P2, TOPK_P2))
        place = tl.reshape(tl.gather(tl.cumsum(ones, 0) - ones, at, 0), (HEIGHT_P2, TOPK_P2))
        found += tl.sum(ones, 0)
    else:
        for chunk in tl.range(0, last_block // 32 + 1, WORDS):
            here = chunk + lane < num_words
            ones = _count_bits(tl.load(words_ptr + chunk + lane, mask=here, other=0, cache_modifier=".cg"))
            tl.store(ranks_ptr + chunk + lane, found + tl.cumsum(ones, 0) - ones, mask=here)
            found += tl.sum(ones, 0)
        tl.debug_barrier()
        word = tl.load(words_ptr + ids // 32, mask=live, other=0)
        place = tl.load(ranks_ptr + ids // 32, mask=live, other=0)
    place += _count_bits(word & (bit - 1))

    # 3. Every row's entries to their places; rows that share a block write the same slot.
    if PAGED:
        slot = page * PAGE_TOKENS + token % PAGE_TOKENS
    else:
        slot = (tl.load(first_slots_ptr + request) + token).to(tl.int32)
    tl.store(slots_ptr + place, tl.maximum(slot, 0), mask=live)
    mine = tl.broadcast_to(tl.full((HEIGHT_P2, 1), 1, tl.int32) << member[:, None], (HEIGHT_P2, TOPK_P2))
    tl.atomic_or(bits_ptr + place, mine, mask=live, sem="relaxed")

    end = found * BLOCK_TOKENS
    first_token = count * 0
    if INCLUDE_TAIL:
        first_token = tl.maximum(tl.min(tl.where(in_rows, visible * BLOCK_TOKENS, first + count), 0), 0)
        end += tl.maximum(first + count - first_token, 0)
    steps = tl.maximum((found * BLOCK_TOKENS + STEP_TOKENS - 1) // STEP_TOKENS, 1)
    spans = tl.minimum(tl.maximum((steps + SPAN_STEPS // 2) // SPAN_STEPS, 1), MOST_SPANS)
    span_steps = (steps + spans - 1) // spans
    tl.store(tiles_ptr, first_row)
    tl.store(tiles_ptr + 1, count)
    tl.store(tiles_ptr + 2, found)
    tl.store(tiles_ptr + 3, end)
    tl.store(tiles_ptr + 4, span_steps)
    tl.store(tiles_ptr + 5, (steps + span_steps - 1) // span_steps)
    tl.store(tiles_ptr + 6, first_token)
    tl.store(tiles_ptr + 7, first)
    tl.store(served_ptr + first_row + member, tl.full((HEIGHT_P2,), 1, tl.int32), mask=in_rows)


def holds_verify_lists(topk, most_rows):
    """Whether a program can hold the ids of a tile: a matter of the budget and the heads, not of the step."""
    return triton.next_power_of_2(most_rows) * triton.next_power_of_2(topk) <= MOST_IDS


def verify_lists(tokens, plan, page_tokens, fewest_rows, most_rows, *, mark_below=0, warps=None, look_words=1024):
    """Build the union lists of all requests of `fewest_rows` to `most_rows` rows.

    Args:
        tokens: `RowTokens` of all T rows, units ascending in a row, for which `holds_verify_lists`.
        plan: The step, with rows and requests; owns the lists' memory.
        page_tokens: Tokens of a page of K and V.
        fewest_rows: Rows of a request from which on it is served.
        most_rows: Rows of a request up to which it is served, at most `MOST_TILE_ROWS`.
        mark_below: Rows of other requests, if they have fewer than this, are marked as not served.
        warps: Warps of a program; chosen by the ids of a tile when None.
        look_words: Words of 32 blocks that a program looks at in one go.

    Returns:
        `VerifyLists`.
    """
    numbers = plan.num_requests
    height = min(most_rows, max(4, triton.next_power_of_2(max(1, plan.max_query_len))))  # few: each is compiled
    topk = tokens.unit_ids.shape[1]
    width = -(-height * topk // 4) * 4
    num_words = -(-plan.max_seq_len // (32 * tokens.unit_tokens)) + 1
    tiles = plan.scratch("attend.verify.tiles", (numbers, TILE_FIELDS), torch.int32)
    slots, bits = (plan.scratch(f"attend.verify.{name}", (numbers, width), torch.int32) for name in ("slots", "bits"))
    words, ranks = (
        plan.scratch(f"attend.verify.{name}", (numbers, num_words), torch.int32) for name in ("words", "ranks")
    )
    served = plan.scratch("attend.union.served", (plan.num_rows,), torch.int32)
    paged = plan.page_table is not None
    include_tail = tokens.visible_units is not None
    height_p2, topk_p2 = triton.next_power_of_2(height), triton.next_power_of_2(topk)
    _verify_lists_kernel[(numbers,)](
        tokens.unit_ids, tokens.unit_counts, tokens.visible_units if include_tail else plan.visible_blocks,
        plan.query_starts, plan.seq_lens,
        plan.page_table if paged else plan.seq_lens, plan.seq_lens if paged else plan.first_slots,
        tiles, slots, bits, served, words, ranks, plan.num_rows, num_words, mark_below,
        tokens.unit_ids.stride(0), tokens.unit_counts.stride(0), plan.page_table.stride(0) if paged else 0,
        BLOCK_TOKENS=tokens.unit_tokens, PAGE_TOKENS=page_tokens, PAGED=paged, INCLUDE_TAIL=include_tail,
        FEWEST_ROWS=fewest_rows, MOST_ROWS=most_rows, HEIGHT=height, WIDTH=width,
        HEIGHT_P2=height_p2, TOPK=topk, TOPK_P2=topk_p2, WORDS=look_words, ONE_LOOK=num_words <= look_words,
        STEP_TOKENS=STEP_TOKENS, SPAN_STEPS=SPAN_STEPS, MOST_SPANS=MOST_SPANS, TILE_FIELDS=TILE_FIELDS,
        num_warps=warps or min(16, max(4, height_p2 * topk_p2 // 256)), enable_fp_fusion=False,
        **overlapping(plan.device),
    )  # fmt: skip
    return VerifyLists(tiles, slots, bits, height, served)
