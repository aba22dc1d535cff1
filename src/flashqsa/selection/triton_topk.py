# mypy: ignore-errors
"""Exact top-K on the GPU: a search for the K-th largest score, then one ordered compaction.

Scores are sums of relu, so they are not negative and their bits order like integers; NaN ranks as -1, below all of
them. A program holds scores in registers and narrows a bracket of the integer line until exactly K scores, or only
equal ones, are left above its lower end. Equal scores at the threshold are taken from the lowest block id on.

A row that is longer than a program holds is cut into groups. The best K blocks lie in the K groups of the best largest
scores, if groups tie like blocks do: each of those K holds a block that beats whatever another group holds. So the
largest score of each group is written down, K groups are searched for, then K blocks in them; with groups of groups
where a row is longer still. Every search is among as many as a program holds, on any distribution; nothing overflows.

Where rows are few, several programs write down the largest scores of a row, and the last to arrive goes on alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashqsa.launching import overlapping, wait_for_previous

BLOCK = 2048
"""Scores that a program holds at least of a row that is so long."""

MOST_BLOCK = 16384
"""Scores that a program holds at most, if that is two budgets."""


@triton.jit
def _search_by_bins(ranks, low, at_least, TOPK: tl.constexpr):
    """Largest t with at least `topk` ranks >= t (found early when exactly topk are), how many are >= t and above it.

    `low` is such a t; how many reach it may be a guess above topk.

    32 bins of the integer line a turn, counted downwards from the top: few turns, always less than ten, each of many
    instructions. The first spends its bins on the two octaves below the largest score, where the threshold mostly is.
    """
    high = tl.max(ranks, 0) + 1
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
def _search_by_guesses(ranks, low, at_least, TOPK: tl.constexpr):
    """As `_search_by_bins`, one threshold a turn: more turns, far fewer instructions.

    A guess interpolates between the scores of the ends of the bracket, by rough logarithms of count / topk; an end that
    stays twice has its logarithm halved, and every fourth guess halves the bracket of bits, so plateaus and odd
    distributions end soon too.
    """
    high = tl.max(ranks, 0) + 1
    above = tl.full((), 0, tl.int32)
    wanted = tl.full((), TOPK, tl.float32).to(tl.int32, bitcast=True)  # float bits: a rough logarithm
    over = (at_least.to(tl.float32).to(tl.int32, bitcast=True) - wanted).to(tl.float32)
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
def _places(ranks, low, at_least, TOPK: tl.constexpr, BINS: tl.constexpr):
    """Places of the best `topk` ranks in their list, -1 for the others; and a rank that at least topk reach.

    `at_least` ranks, or topk and an unknown number more, are no lower than `low`.
    """
    above = tl.full((), 0, tl.int32)
    if at_least > TOPK:
        if BINS:
            low, at_least, above = _search_by_bins(ranks, low, at_least, TOPK)
        else:
            low, at_least, above = _search_by_guesses(ranks, low, at_least, TOPK)
    if at_least <= TOPK:  # no tie to break: everything from the threshold on is taken
        chosen = ranks >= low
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


@triton.jit(do_not_specialize=["first_row", "chunks", "tiles"])
def _top_blocks_kernel(
    scores_ptr, out_ids_ptr, out_scores_ptr, counts_ptr, seen_ptr, requests_ptr, visible_ptr, request_ids_ptr,
    largest_ptr, group_ids_ptr, arrived_ptr, first_row, chunks, tiles, stride_s, stride_o, stride_os, stride_l,
    LEVELS: tl.constexpr, GROUP: tl.constexpr, WITH_SCORES: tl.constexpr, SCORED_ALL: tl.constexpr, TOPK: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BINS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row, shared by `chunks` programs; LEVELS - 1 levels of groups, GROUP of one level in one of the next."""
    wait_for_previous(OVERLAP)
    pid = tl.program_id(0)
    chunk = pid % chunks
    row = (pid // chunks).to(tl.int64)
    out_ids_ptr += row * stride_o
    out_scores_ptr += row * stride_os
    visible = _begin_row(
        first_row + row, chunk == 0, out_ids_ptr, out_scores_ptr, counts_ptr + row, seen_ptr + row, requests_ptr + row,
        visible_ptr, request_ids_ptr, SCORED_ALL, TOPK, BLOCK_K,
    )  # fmt: skip
    live = tl.where(visible <= BLOCK, 1, tl.minimum(tl.cdiv(visible, BLOCK), chunks))  # programs with work
    if (visible <= 0) | (chunk >= live):
        return
    scores_ptr += row * stride_s
    i = tl.arange(0, BLOCK)
    if LEVELS == 1:
        scores = tl.load(scores_ptr + i, mask=i < tl.cdiv(visible, 16) * 16, other=0.0)
        places, _ = _places(_ranks(scores, i < visible), chunk * 0 - 1, visible, TOPK, BINS)
        tl.store(out_ids_ptr + places, i, mask=places >= 0)
        if WITH_SCORES:
            tl.store(out_scores_ptr + places, scores, mask=places >= 0)
        return
    largest_ptr += row * stride_l
    group_ids_ptr += row * TOPK
    level = chunk * 0
    groups = visible
    if visible > BLOCK:
        for start in tl.range(chunk * BLOCK, visible, chunks * BLOCK):
            left = visible - start
            best = tl.load(scores_ptr + start + i, mask=i < tl.cdiv(left, 16) * 16, other=0.0)
            if left < BLOCK:
                best = tl.where(i < left, best, float("nan"))  # the largest of a group ignores NaN beside numbers
            to = largest_ptr
            at = start
            wide = tiles * BLOCK
            for depth in tl.static_range(1, LEVELS):
                best = tl.max(tl.reshape(best, (BLOCK // GROUP**depth, GROUP)), 1)
                at = at // GROUP
                wide = wide // GROUP
                tl.store(to + at + tl.arange(0, BLOCK // GROUP**depth), best)
                to += wide
        tl.debug_barrier()  # every thread's part is written before it is read or this program counts as arrived
        if live > 1:
            arrived = tl.atomic_add(arrived_ptr + row, 1, sem="acq_rel", scope="gpu")
            if arrived == live - 1:
                tl.store(arrived_ptr + row, 0)  # ready for the next launch
            else:
                groups = chunk * 0
        while groups > BLOCK:
            groups = tl.cdiv(groups, GROUP)
            level += 1
    if groups == 0:
        return
    MORE: tl.constexpr = TOPK + TOPK // 8 + 1
    first = groups > 0
    low = chunk * 0 - 1
    at_least = groups
    while level >= 0:
        size = tl.full((), 1, tl.int32)
        offset = chunk * 0
        wide = tiles * BLOCK
        for depth in tl.static_range(1, LEVELS):
            size = tl.where(depth <= level, size * GROUP, size)
            wide = wide // GROUP
            offset += tl.where(depth < level, wide, 0)
        number = tl.cdiv(visible, size)  # of groups of this level
        group = tl.load(group_ids_ptr + i // GROUP, mask=i < tl.where(first, 0, TOPK * GROUP), other=0)
        group = tl.where(first, i, group * GROUP + i % GROUP)
        valid = (i < tl.where(first, number, TOPK * GROUP)) & (group < number)
        from_ptr = tl.where(level == 0, scores_ptr, largest_ptr + offset)
        scores = tl.load(from_ptr + group, mask=valid, other=0.0, cache_modifier=".cg")
        places, low = _places(_ranks(scores, valid), low, at_least, TOPK, BINS)
        at_least = chunk * 0 + MORE  # each group holds one that reaches it, some of them more
        tl.debug_barrier()  # the groups are read before others take their places
        tl.store(tl.where(level == 0, out_ids_ptr, group_ids_ptr) + places, group, mask=places >= 0)
        if WITH_SCORES:  # read again: they would stay in registers through the whole search
            taken = places >= tl.where(level == 0, 0, BLOCK)
            tl.store(out_scores_ptr + places, tl.load(scores_ptr + group, mask=taken, other=0.0), mask=taken)
        tl.debug_barrier()
        first = level < 0
        level -= 1


@dataclass(frozen=True)
class TopKernelConfig:
    """Form of the top-K kernel; decides nothing but speed.

    Attributes:
        block: Scores that a program holds: a power of two, at least 2 K where a row is longer.
        chunks: Programs that share a row at most.
        bins: Whether a search counts bins; else it counts above one threshold a turn.
        warps: Warps of a program.
        registers: A thread's at most.
    """

    block: int
    chunks: int
    bins: bool
    warps: int
    registers: int | None = None

    @classmethod
    def choose(cls, rows, width, topk, multiprocessors):
        """Few rows: the shortest way to the end, shared by programs. Many: the fewest instructions."""
        block = block_scores(width, topk, 4)
        if rows <= multiprocessors:
            chunks = max(1, min(-(-width // block), 2 * multiprocessors // max(rows, 1)))
            return cls(block, chunks, True, max(4, min(16, block // 128)))
        if row_groups(width, topk, block)[2] > 3:  # many levels cost more than long searches
            block = block_scores(width, topk, 16)
        return cls(block, 1, False, max(2, min(16, block // 1024)), 128)


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
    tiles, group, levels, numbers = row_groups(width, topk, config.block)
    largest, group_ids, arrived = scores, out.block_ids, out.block_counts  # not touched where there are no groups
    if levels > 1:
        largest = plan.scratch("select.largest", (rows, numbers), torch.float32)
        group_ids = plan.scratch("select.group_ids", (rows, topk), torch.int32)
        arrived = plan.scratch("select.arrived", (rows,), torch.int32, zeroed=True)
    limit = {} if config.registers is None else {"maxnreg": config.registers}
    _top_blocks_kernel[(rows * config.chunks,)](
        scores, out.block_ids, scores if out.scores is None else out.scores, out.block_counts, out.visible_blocks,
        out.request_ids, plan.visible_blocks, plan.request_ids, largest, group_ids, arrived,
        first_row, config.chunks, tiles, scores.stride(0), out.block_ids.stride(0),
        0 if out.scores is None else out.scores.stride(0), numbers,
        LEVELS=levels, GROUP=group, WITH_SCORES=out.scores is not None, SCORED_ALL=scored_all, TOPK=topk,
        BLOCK=config.block, BLOCK_K=triton.next_power_of_2(topk), BINS=config.bins,
        num_warps=config.warps, enable_fp_fusion=False, **limit, **overlapping(scores.device),
    )  # fmt: skip


def group_bytes(width, topk):
    """Bytes of workspace that a row of `width` scores needs beside them."""
    numbers = max(row_groups(width, topk, block_scores(width, topk, budgets))[3] for budgets in (4, 16))
    return 4 * (numbers + topk) if numbers else 0


def block_scores(width, topk, budgets):
    """Scores that a program holds: the row, or so many budgets."""
    budget = triton.next_power_of_2(topk)
    wanted = max(BLOCK, 2 * budget, min(MOST_BLOCK, budgets * budget))
    return min(triton.next_power_of_2(max(width, 64)), wanted)


def row_groups(width, topk, block):
    """Tiles of a row, groups in a group, levels (one if there are no groups), numbers that a row writes down."""
    tiles = -(-width // block)
    group = max(2, block // triton.next_power_of_2(topk))
    levels, numbers, reach = 1, 0, block
    while reach < width:
        numbers += tiles * block // group**levels
        levels, reach = levels + 1, reach * group
    return tiles, group, levels, -(-numbers // 16) * 16
