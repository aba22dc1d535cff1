# mypy: ignore-errors
"""Exact top-K on the GPU: a search for the K-th largest score, then one ordered compaction.

Scores are sums of relu, so they are not negative and their bits order like integers; NaN ranks as -1, below all of
them. A program holds up to CHUNK scores in registers and bisects the integer line until exactly K scores, or only equal
ones, are left above the threshold. Equal scores at the threshold are taken from the lowest block id on. There is no
candidate buffer that could overflow. Longer rows are cut into chunks, and the survivors of all chunks searched again:
the order is total, so the best of the bests are the best.
"""

import torch
import triton
import triton.language as tl

CHUNK = 16384
"""Scores that one program holds at most."""

FIRST_CHUNK = 4096
"""Scores of a program in the first of several passes: many short searches instead of few long ones."""


@triton.jit
def _search_threshold(ranks, valid, TOPK: tl.constexpr, count):
    """Largest t with at least `topk` ranks >= t (found early when exactly topk are), and how many ranks are >= t.

    The bracket always holds at least topk ranks >= low and fewer >= high. A guess interpolates between the scores of
    its ends, by the logarithms of count / topk; an end that stays twice has its logarithm halved, and every fourth
    guess halves the bracket of bits, so plateaus and odd distributions end soon too.
    """
    low = tl.min(tl.where(valid, ranks, 2147483647), 0)
    high = tl.max(ranks, 0) + 1
    at_least = count
    over = tl.math.log2(count.to(tl.float32) / TOPK)
    under = tl.math.log2(tl.full((), 0.5, tl.float32) / TOPK)
    side = tl.full((), 0, tl.int32)
    turn = tl.full((), 0, tl.int32)
    while (high - low > 1) & (at_least != TOPK):
        a = tl.maximum(low, 0).to(tl.float32, bitcast=True)
        b = tl.maximum(high, 0).to(tl.float32, bitcast=True)
        guess = (a + (b - a) * (over / (over - under))).to(tl.int32, bitcast=True)
        guess = tl.where((turn & 3) == 3, low + (high - low) // 2, guess)
        guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        found = tl.sum((ranks >= guess).to(tl.int32), 0)
        distance = tl.math.log2(tl.maximum(found.to(tl.float32), 0.5) / TOPK)
        enough = found >= TOPK
        under = tl.where(enough, tl.where(side == 1, under * 0.5, under), distance)
        over = tl.where(enough, distance, tl.where(side == -1, over * 0.5, over))
        side = tl.where(enough, 1, -1)
        low = tl.where(enough, guess, low)
        at_least = tl.where(enough, found, at_least)
        high = tl.where(enough, high, guess)
        turn += 1
    return low, at_least


@triton.jit
def _top_blocks_kernel(
    scores_ptr, ids_ptr, out_ids_ptr, out_scores_ptr, counts_ptr, seen_ptr, requests_ptr, visible_ptr, request_ids_ptr,
    first_row, stride_s, stride_o, stride_os, stride_oc,
    CHUNKS: tl.constexpr, CHUNK_BLOCKS: tl.constexpr, PARTS: tl.constexpr, PART_BLOCKS: tl.constexpr,
    WITH_SCORES: tl.constexpr, SCORED_ALL: tl.constexpr, LAST: tl.constexpr, TOPK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One chunk of one row: CHUNK_BLOCKS scores, or PARTS candidate lists that stand for PART_BLOCKS blocks each."""
    pid = tl.program_id(0).to(tl.int64)
    chunk = (pid % CHUNKS).to(tl.int32)
    row = pid // CHUNKS
    request = tl.load(request_ids_ptr + first_row + row)
    visible = tl.load(visible_ptr + first_row + row)
    visible = tl.where(request < 0, 0, visible)  # an engine's padding rows may hold leftovers
    k = tl.arange(0, BLOCK_K)
    out = row * stride_o + chunk * stride_oc
    out_scores = row * stride_os + chunk * stride_oc
    if LAST:
        tl.store(counts_ptr + row, tl.minimum(visible, TOPK))
        tl.store(seen_ptr + row, visible)
        tl.store(requests_ptr + row, request)
        everything = tl.where(k < visible, k, -1)  # what a row within the budget selects
        if SCORED_ALL:
            tl.store(out_ids_ptr + out + k, everything, mask=(k < TOPK) & (k >= visible))
            tl.store(out_scores_ptr + out_scores + k, float("-inf"), mask=(k < TOPK) & (k >= visible))
        else:
            tl.store(out_ids_ptr + out + k, everything, mask=k < tl.where(visible <= TOPK, TOPK, 0))
    if not SCORED_ALL:  # noqa: SIM102 (a constexpr branch, then one at run time)
        if visible <= TOPK:
            return
    i = tl.arange(0, BLOCK)
    if PARTS > 0:
        part = chunk * PARTS + i // TOPK
        kept = tl.minimum(tl.maximum(visible - part * PART_BLOCKS, 0), PART_BLOCKS)
        valid = (i < PARTS * TOPK) & (i % TOPK < kept)
        count = tl.sum(valid.to(tl.int32), 0)
        scores_ptr += row * stride_s + chunk * (PARTS * TOPK)
        ids_ptr += row * stride_s + chunk * (PARTS * TOPK)
    else:
        count = tl.minimum(visible - chunk * CHUNK_BLOCKS, CHUNK_BLOCKS)
        valid = i < count
        scores_ptr += row * stride_s + chunk * CHUNK_BLOCKS
    if count <= 0:
        return
    scores = tl.load(scores_ptr + i, mask=valid, other=0.0)
    bits = scores.to(tl.int32, bitcast=True)
    ranks = tl.where(scores == scores, bits, -1)
    ranks = tl.where(valid, ranks, -2)
    low = tl.full((), -1, tl.int32)
    at_least = count
    if count > TOPK:
        low, at_least = _search_threshold(ranks, valid, TOPK, count)
    above = ranks > low
    equal = valid & (ranks == low)
    if at_least <= TOPK:  # no tie to break: everything from the threshold on is taken
        chosen = valid & (ranks >= low)
    else:
        num_above = tl.sum(above.to(tl.int32), 0)
        before = tl.cumsum(equal.to(tl.int32), 0) - equal.to(tl.int32)
        chosen = above | (equal & (before < TOPK - num_above))
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    block = tl.load(ids_ptr + i, mask=chosen, other=0) if PARTS > 0 else chunk * CHUNK_BLOCKS + i
    tl.store(out_ids_ptr + out + place, block, mask=chosen)
    if WITH_SCORES:
        tl.store(out_scores_ptr + out_scores + place, scores, mask=chosen)


def top_blocks_triton(scores, plan, first_row, out, *, scored_all):
    """Select the best blocks of some rows: ids ascending, -1 past the count; counts, visible blocks and requests too.

    Args:
        scores: [rows, blocks] fp32, valid up to each row's visible count.
        plan: The step; owns the scratch.
        first_row: Plan row of the first score row.
        out: A Selection of these rows to fill.
        scored_all: Whether rows within the budget were scored too, because scores are asked for.
    """
    rows, topk, width = scores.shape[0], out.block_ids.shape[1], scores.shape[1]
    chunk_blocks = first_chunk(width, topk)
    ids, parts, part_blocks, lists = scores, 0, 0, -(-width // chunk_blocks)
    level = 0
    while True:  # each pass leaves one list of at most K a chunk; a single list is the selection
        last = lists == 1
        if last:
            to_ids, to_scores = out.block_ids, out.scores
        else:
            to_ids = plan.scratch(f"select.ids{level}", (rows, lists * topk), torch.int32)
            to_scores = plan.scratch(f"select.scores{level}", (rows, lists * topk), torch.float32)
        block = triton.next_power_of_2(parts * topk) if parts else chunk_blocks
        _top_blocks_kernel[(rows * lists,)](
            scores, ids, to_ids, scores if to_scores is None else to_scores, out.block_counts, out.visible_blocks,
            out.request_ids, plan.visible_blocks, plan.request_ids, first_row, scores.stride(0), to_ids.stride(0),
            0 if to_scores is None else to_scores.stride(0), topk, CHUNKS=lists, CHUNK_BLOCKS=chunk_blocks, PARTS=parts,
            PART_BLOCKS=part_blocks, WITH_SCORES=to_scores is not None, SCORED_ALL=scored_all, LAST=last, TOPK=topk,
            BLOCK=block, BLOCK_K=triton.next_power_of_2(topk), num_warps=max(4, min(16, block // 512)),
            enable_fp_fusion=False,
        )  # fmt: skip
        if last:
            return
        scores, ids, part_blocks = to_scores, to_ids, part_blocks * parts if parts else chunk_blocks
        parts = min(CHUNK // topk, lists)
        lists = -(-lists // parts)
        level += 1


def first_chunk(width, topk):
    """Scores of a program in the first pass over rows of `width` scores."""
    one = triton.next_power_of_2(max(width, 64))
    if one <= FIRST_CHUNK:
        return one
    chunk = FIRST_CHUNK
    while chunk < CHUNK and (chunk < 2 * topk or -(-width // chunk) * topk > CHUNK):
        chunk *= 2
    return min(chunk, CHUNK)
