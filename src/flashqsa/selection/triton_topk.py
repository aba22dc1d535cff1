# mypy: ignore-errors
"""Exact top-K on the GPU: a search for the K-th largest score, then one ordered compaction.

Scores are sums of relu, so they are not negative and their bits order like integers; NaN ranks as -1, below all of
them. A program holds a tile of scores in registers and narrows a bracket of the integer line until exactly K scores,
or only equal ones, are left above its lower end. Equal scores at the threshold are taken from the lowest block id on.
The order is total, so the best of the bests are the best. That is used in two ways:

- few rows: a row is cut into chunks, one a program. Each leaves a list of at most K, and the last of a group of
  programs to arrive goes on with the lists of the group, until one list, the selection, is left. One launch;
- many rows: a program walks along a row. What it has seen tells a rank that later blocks have to exceed, so most of
  them cost one comparison; the others go into a buffer, which shrinks to its best K before it could overflow.

Nothing overflows on any distribution: lists hold K, and a buffer takes half a tile at most beside the best K so far.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashqsa.launching import overlapping, wait_for_previous

FIRST_CHUNK = 4096
"""Scores that a program holds, where K leaves the choice: many short searches instead of few long ones."""

ROW_TILE = 2048
"""The same for a program that walks along a row."""


@triton.jit
def _search_by_bins(ranks, TOPK: tl.constexpr, count):
    """Largest t with at least `topk` ranks >= t (found early when exactly topk are), how many are >= t and above it.

    32 bins of the integer line a turn, counted downwards from the top: few turns, always less than ten, each of many
    instructions. The first spends its bins on the two octaves below the largest score, where the threshold mostly is.
    """
    low = tl.full((), -1, tl.int32)
    high = tl.max(ranks, 0) + 1
    at_least = count
    above = tl.full((), 0, tl.int32)
    most_shift = tl.full((), 19, tl.int32)
    j = tl.arange(0, 32)
    while (high - low > 1) & (at_least != TOPK):
        bits = ((high - low - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126  # of the distance to the top
        shift = tl.minimum(tl.maximum(bits - 5, 0), most_shift)
        most_shift = tl.full((), 30, tl.int32)
        bins = tl.minimum(tl.maximum(high - 1 - ranks, 0) >> shift, 31)  # what is above goes into the first bin
        reached = tl.cumsum(tl.histogram(bins, 32), 0)
        missed = tl.minimum(tl.sum((reached < TOPK).to(tl.int32), 0), 31)
        above = tl.maximum(above, tl.max(tl.where((j < missed), reached, 0), 0))
        at_least = tl.minimum(at_least, tl.min(tl.where((j < 31) & (j >= missed), reached, 2147483647), 0))
        low = tl.where(missed < 31, tl.maximum(low, high - ((missed + 1) << shift)), low)  # bin 31 reaches down to low
        high -= missed << shift
    return low, at_least, above


@triton.jit
def _search_by_guesses(ranks, TOPK: tl.constexpr, count):
    """As `_search_by_bins`, one threshold a turn: more turns, far fewer instructions.

    A guess interpolates between the scores of the ends of the bracket, by rough logarithms of count / topk; an end that
    stays twice has its logarithm halved, and every fourth guess halves the bracket of bits, so plateaus and odd
    distributions end soon too.
    """
    low = tl.full((), -1, tl.int32)
    high = tl.max(ranks, 0) + 1
    at_least = count
    above = tl.full((), 0, tl.int32)
    wanted = tl.full((), TOPK, tl.float32).to(tl.int32, bitcast=True)  # float bits: a rough logarithm
    over = (count.to(tl.float32).to(tl.int32, bitcast=True) - wanted).to(tl.float32)
    under = (tl.full((), 0.5, tl.float32).to(tl.int32, bitcast=True) - wanted).to(tl.float32)
    side = tl.full((), 0, tl.int32)
    turn = tl.full((), 0, tl.int32)
    while (high - low > 1) & (at_least != TOPK):
        a = tl.maximum(low, 0).to(tl.float32, bitcast=True)
        b = tl.maximum(high, 0).to(tl.float32, bitcast=True)
        guess = (a + (b - a) * (over / (over - under))).to(tl.int32, bitcast=True)
        guess = tl.where((turn & 3) == 3, low + (high - low) // 2, guess)
        guess = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        found = tl.sum((ranks >= guess).to(tl.int32), 0)
        distance = (tl.maximum(found.to(tl.float32), 0.5).to(tl.int32, bitcast=True) - wanted).to(tl.float32)
        enough = found >= TOPK
        under = tl.where(enough, tl.where(side == 1, under * 0.5, under), distance)
        over = tl.where(enough, distance, tl.where(side == -1, over * 0.5, over))
        side = tl.where(enough, 1, -1)
        low = tl.where(enough, guess, low)
        at_least = tl.where(enough, found, at_least)
        above = tl.where(enough, above, found)
        high = tl.where(enough, high, guess)
        turn += 1
    return low, at_least, above


@triton.jit
def _ranks(scores, valid):
    """Integers in the order of the scores: NaN below all of them, what is not valid below NaN."""
    return tl.where(valid, tl.where(scores == scores, scores.to(tl.int32, bitcast=True), -1), -2)


@triton.jit
def _places(ranks, count, most, TOPK: tl.constexpr, BINS: tl.constexpr):
    """Places of the best `topk` of `count` ranks, of all where there are `most` at most; -1 for the others.

    Also a rank: what comes later and does not exceed it is none of the best.
    """
    low = tl.full((), -2, tl.int32)
    at_least = tl.full((), 0, tl.int32)
    above = tl.full((), 0, tl.int32)
    if count > most:
        if BINS:
            low, at_least, above = _search_by_bins(ranks, TOPK, count)
        else:
            low, at_least, above = _search_by_guesses(ranks, TOPK, count)
    if at_least <= TOPK:  # no tie to break: everything from the threshold on is taken
        chosen = ranks >= tl.maximum(low, -1)
        places = tl.where(chosen, tl.cumsum(chosen.to(tl.int32), 0) - 1, -1)
    else:  # one scan counts both, those above the threshold and its equals, in halves of an integer
        better = ranks > low
        equal = ranks == low
        both = better.to(tl.int32) + (equal.to(tl.int32) << 16)
        before = tl.cumsum(both, 0) - both
        room = TOPK - above
        chosen = better | (equal & ((before >> 16) < room))
        places = tl.where(chosen, (before & 65535) + tl.minimum(before >> 16, room), -1)
    return places, low


@triton.jit
def _begin_row(
    row, first, out_ids_ptr, out_scores_ptr, counts_ptr, seen_ptr, requests_ptr, visible_ptr, request_ids_ptr,
    SCORED_ALL: tl.constexpr, TOPK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Visible blocks of a row. Its `first` program writes its numbers, and its ids where they need no scores."""
    request = tl.load(request_ids_ptr + row)
    visible = tl.load(visible_ptr + row)
    visible = tl.where(request < 0, 0, visible)  # an engine's padding rows may hold leftovers
    if first:
        k = tl.arange(0, BLOCK_K)
        tl.store(counts_ptr, tl.minimum(visible, TOPK))
        tl.store(seen_ptr, visible)
        tl.store(requests_ptr, request)
        everything = tl.where(k < visible, k, -1)  # what a row within the budget selects
        if SCORED_ALL:
            tl.store(out_ids_ptr + k, everything, mask=(k < TOPK) & (k >= visible))
            tl.store(out_scores_ptr + k, float("-inf"), mask=(k < TOPK) & (k >= visible))
        elif visible <= TOPK:
            tl.store(out_ids_ptr + k, everything, mask=k < TOPK)
    return tl.where(visible <= (0 if SCORED_ALL else TOPK), 0, visible)


@triton.jit(do_not_specialize=["first_row", "chunks", "lists"])
def _top_lists_kernel(
    scores_ptr, out_ids_ptr, out_scores_ptr, counts_ptr, seen_ptr, requests_ptr, visible_ptr, request_ids_ptr,
    list_ids_ptr, list_scores_ptr, arrived_ptr, first_row, chunks, lists, stride_s, stride_o, stride_os,
    ALONE: tl.constexpr, PARTS: tl.constexpr, WITH_SCORES: tl.constexpr, SCORED_ALL: tl.constexpr, TOPK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BINS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One chunk of one row, then perhaps PARTS lists of it, and so on. ALONE: a row is one chunk."""
    wait_for_previous(OVERLAP)
    pid = tl.program_id(0)
    unit = pid % chunks
    row = (pid // chunks).to(tl.int64)
    out_ids_ptr += row * stride_o
    out_scores_ptr += row * stride_os
    visible = _begin_row(
        first_row + row, unit == 0, out_ids_ptr, out_scores_ptr, counts_ptr + row, seen_ptr + row, requests_ptr + row,
        visible_ptr, request_ids_ptr, SCORED_ALL, TOPK, BLOCK_K,
    )  # fmt: skip
    count = tl.minimum(visible - unit * BLOCK, BLOCK)
    if count <= 0:
        return
    i = tl.arange(0, BLOCK)
    block = unit * BLOCK + i
    scores = tl.load(scores_ptr + row * stride_s + block, mask=i < tl.cdiv(count, 16) * 16, other=0.0)
    if ALONE:
        places, _ = _places(_ranks(scores, i < count), count, TOPK, TOPK, BINS)
        tl.store(out_ids_ptr + places, block, mask=places >= 0)
        if WITH_SCORES:
            tl.store(out_scores_ptr + places, scores, mask=places >= 0)
        return
    list_ids_ptr += row * lists * TOPK
    list_scores_ptr += row * lists * TOPK
    arrived_ptr += row * lists
    base = unit * 0  # lists of this row in the levels before
    level_lists = chunks
    live = tl.cdiv(visible, BLOCK)  # of them those that hold anything
    span = base + BLOCK  # blocks that a list stands for
    going = unit >= 0
    while going:
        places, _ = _places(_ranks(scores, i < count), count, TOPK, TOPK, BINS)
        last = live == 1
        to = (base + unit) * TOPK
        tl.store(tl.where(last, out_ids_ptr, list_ids_ptr + to) + places, block, mask=places >= 0)
        kept = (places >= 0) & (WITH_SCORES | (live > 1))
        tl.store(tl.where(last, out_scores_ptr, list_scores_ptr + to) + places, scores, mask=kept)
        going = live < 0
        if live > 1:
            tl.debug_barrier()  # every thread's part is written before this program counts as arrived
            unit = unit // PARTS
            parts = tl.minimum(live - unit * PARTS, PARTS)
            arrived = tl.atomic_add(arrived_ptr + base + unit, 1, sem="acq_rel", scope="gpu")
            if arrived == parts - 1:
                tl.store(arrived_ptr + base + unit, 0)  # ready for the next launch
                begin = unit * PARTS
                count = (parts - 1) * TOPK + tl.minimum(visible - (begin + parts - 1) * span, TOPK)
                at = (base + begin) * TOPK + i
                there = i < tl.cdiv(count, 16) * 16
                block = tl.load(list_ids_ptr + at, mask=there, other=0, cache_modifier=".cg")
                scores = tl.load(list_scores_ptr + at, mask=there, other=0.0, cache_modifier=".cg")
                base += level_lists
                level_lists = tl.cdiv(level_lists, PARTS)
                live = tl.cdiv(live, PARTS)
                span *= PARTS
                going = live >= 0


@triton.jit(do_not_specialize=["first_row"])
def _top_rows_kernel(
    scores_ptr, out_ids_ptr, out_scores_ptr, counts_ptr, seen_ptr, requests_ptr, visible_ptr, request_ids_ptr,
    list_ids_ptr, list_scores_ptr, first_row, stride_s, stride_o, stride_os,
    WITH_SCORES: tl.constexpr, SCORED_ALL: tl.constexpr, TOPK: tl.constexpr, MOST: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A whole row, BLOCK scores after BLOCK scores. The buffer holds BLOCK too, MOST of them from one turn."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    out_ids_ptr += row * stride_o
    out_scores_ptr += row * stride_os
    visible = _begin_row(
        first_row + row, True, out_ids_ptr, out_scores_ptr, counts_ptr + row, seen_ptr + row, requests_ptr + row,
        visible_ptr, request_ids_ptr, SCORED_ALL, TOPK, BLOCK_K,
    )  # fmt: skip
    scores_ptr += row * stride_s
    list_ids_ptr += row * BLOCK
    list_scores_ptr += row * BLOCK
    i = tl.arange(0, BLOCK)
    start = visible * 0
    filled = visible * 0
    bound = filled - 2  # later blocks have to exceed it
    going = visible > 0
    while going:
        ended = start >= visible
        again = ended | (filled > BLOCK - MOST)  # the turn of the buffer, not of the next scores
        here = tl.where(again, filled, visible - start)
        near = tl.cdiv(here, 16) * 16
        scores = tl.load(tl.where(again, list_scores_ptr, scores_ptr + start) + i, mask=i < near, other=0.0)
        block = tl.load(list_ids_ptr + i, mask=i < tl.where(again, near, 0), other=0)
        block = tl.where(again, block, start + i)
        ranks = _ranks(scores, i < here)
        ranks = tl.where(ranks > tl.where(again, -2, bound), ranks, -2)
        count = tl.sum((ranks > -2).to(tl.int32), 0)
        most = tl.where(again, TOPK, MOST)
        places, low = _places(ranks, count, most, TOPK, False)
        tl.debug_barrier()  # the buffer is read before any of it is overwritten
        to = tl.where(again, 0, filled)
        tl.store(tl.where(ended, out_ids_ptr, list_ids_ptr + to) + places, block, mask=places >= 0)
        kept = (places >= 0) & (WITH_SCORES | (start < visible))
        tl.store(tl.where(ended, out_scores_ptr, list_scores_ptr + to) + places, scores, mask=kept)
        tl.debug_barrier()  # and written before it is read
        bound = tl.maximum(bound, low)
        filled = to + tl.where(count > most, TOPK, count)
        start += tl.where(again, 0, BLOCK)
        going = ended == 0


@dataclass(frozen=True)
class TopKernelConfig:
    """Form of the top-K kernels; decides nothing but speed.

    Attributes:
        walk: Whether one program walks along each row.
        block: Scores that a program holds: a power of two, at least 2 K where a row is longer.
        bins: Whether a search counts bins; else it counts above one threshold a turn.
        warps: Warps of a program.
    """

    walk: bool
    block: int
    bins: bool
    warps: int

    @classmethod
    def choose(cls, rows, width, topk, multiprocessors):
        """Few rows: the shortest way to the end. Many: the fewest instructions."""
        block = _block(width, topk, FIRST_CHUNK)
        if width > ROW_TILE and rows >= 2 * multiprocessors:
            block = _block(width, topk, ROW_TILE)
            return cls(True, block, False, max(4, min(16, block // 512)))
        few = rows * -(-width // block) <= multiprocessors
        return cls(False, block, few, max(4, min(16, block // (256 if few else 512))))


def top_blocks_triton(scores, plan, first_row, out, *, scored_all, multiprocessors):
    """Select the best blocks of some rows: ids ascending, -1 past the count; counts, visible blocks and requests too.

    Args:
        scores: [rows, blocks] fp32, valid up to each row's visible count; rows lie a multiple of 16 numbers apart.
        plan: The step; owns the scratch.
        first_row: Plan row of the first score row.
        out: A Selection of these rows to fill.
        scored_all: Whether rows within the budget were scored too, because scores are asked for.
        multiprocessors: Of the device.
    """
    rows, width, topk = scores.shape[0], scores.shape[1], out.block_ids.shape[1]
    config = TopKernelConfig.choose(rows, width, topk, multiprocessors)
    chunks = 1 if config.walk else -(-width // config.block)
    parts = max(2, config.block // topk)
    lists = row_lists(chunks, parts)
    candidates = rows * (config.block if config.walk else lists * topk)
    ids, kept, arrived = out.block_ids, scores, out.block_counts  # never touched where a row is one chunk
    if candidates:
        ids = plan.scratch("select.list_ids", (candidates + 16,), torch.int32)
        kept = plan.scratch("select.list_scores", (candidates + 16,), torch.float32)
    if lists:
        arrived = plan.scratch("select.arrived", (rows * lists,), torch.int32, zeroed=True)
    common = (
        scores, out.block_ids, scores if out.scores is None else out.scores, out.block_counts, out.visible_blocks,
        out.request_ids, plan.visible_blocks, plan.request_ids, ids, kept,
    )  # fmt: skip
    strides = (scores.stride(0), out.block_ids.stride(0), 0 if out.scores is None else out.scores.stride(0))
    options = {
        "WITH_SCORES": out.scores is not None, "SCORED_ALL": scored_all, "TOPK": topk, "BLOCK": config.block,
        "BLOCK_K": triton.next_power_of_2(topk), "num_warps": config.warps, "enable_fp_fusion": False,
        **overlapping(scores.device),
    }  # fmt: skip
    if config.walk:
        most = max(topk, config.block * 3 // 8)  # more would mean a search among few, less many among all
        _top_rows_kernel[(rows,)](*common, first_row, *strides, MOST=most, **options)
    else:
        _top_lists_kernel[(rows * chunks,)](
            *common, arrived, first_row, chunks, lists, *strides,
            ALONE=chunks == 1, PARTS=parts, BINS=config.bins, **options,
        )  # fmt: skip


def candidate_bytes(width, topk):
    """Bytes of workspace that a row of `width` scores needs beside them, whatever its form."""
    chunk, walked = _block(width, topk, FIRST_CHUNK), _block(width, topk, ROW_TILE)
    lists = row_lists(-(-width // chunk), max(2, chunk // topk))
    return max(8 * lists * topk, 8 * walked if width > ROW_TILE else 0)


def row_lists(chunks, parts):
    """Lists that a row leaves on its way: one a chunk, one for `parts` of those, and so on; the last is the result."""
    lists = 0
    while chunks > 1:
        lists += chunks
        chunks = -(-chunks // parts)
    return lists


def _block(width, topk, wanted):
    """Scores that a program holds of rows of `width`: `wanted`, twice the budget, or the row."""
    return min(triton.next_power_of_2(max(width, 64)), max(wanted, triton.next_power_of_2(2 * topk)))
