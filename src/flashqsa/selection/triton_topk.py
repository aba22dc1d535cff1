# mypy: ignore-errors
"""Exact top-K on the GPU: a search for the K-th largest score, then one ordered compaction.

Scores are sums of relu, so they are not negative and their bits order like integers; NaN ranks as -1, below all of
them. A program holds scores in registers and narrows a bracket of the integer line until exactly K scores, or only
equal ones, are left above its lower end. Equal scores at the threshold are taken from the lowest block id on.

A row that is longer than a program holds is cut into groups (row_levels.py). The best K blocks lie in the K groups of
the best largest scores, if groups tie like blocks do: each of those K holds a block that beats whatever another group
holds. The score kernel wrote down the largest score of each group, so K groups are searched for, then K blocks in them;
with groups of groups where a row is longer still. Where a program holds more groups than K, a search for groups ends as
soon as no more than those are left, since a few more do no harm. Every search is among as many as a program holds, on
any distribution, few of the scores are read, and nothing overflows.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from flashqsa.launching import overlapping, wait_for_previous
from flashqsa.selection.row_levels import level_numbers


@triton.jit
def _search_by_bins(ranks, low, high, at_least, most, TOPK: tl.constexpr):
    """Largest t with at least `topk` ranks >= t, or one that `most` reach at most; how many are >= t and above it.

    `low` is such a t, `high` is above all; how many reach `low` may be a guess above `most`, which is topk or more.

    32 bins of the integer line a turn, counted downwards from the top: few turns, always less than ten, each of many
    instructions. The first spends its bins where the threshold mostly is: on the two octaves below the largest score,
    or, in a level whose groups are all known to reach `low`, on the sixteenth above it.
    """
    above = tl.full((), 0, tl.int32)
    most_shift = tl.full((), 19, tl.int32)
    j = tl.arange(0, 32)
    top = tl.where(low >= 0, low + ((high - low) >> 4) + 1, high)
    while (high - low > 1) & (at_least > most):
        bits = ((top - low - 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126  # of the distance to the top
        shift = tl.minimum(tl.maximum(bits - 5, 0), most_shift)
        most_shift = tl.full((), 30, tl.int32)
        bins = tl.minimum(tl.maximum(top - 1 - ranks, 0) >> shift, 31)  # what is above goes into the first bin
        reached = tl.cumsum(tl.histogram(bins, 32), 0)
        enough = reached >= TOPK  # of the last bin always: it holds all that are left
        short = tl.max(tl.where(enough, 0, reached * 32 + j + 1), 0)  # the last bin that is not enough, and its count
        missed = short & 31
        above = tl.maximum(above, short >> 5)
        at_least = tl.minimum(at_least, tl.min(tl.where(enough & (j < 31), reached, 2147483647), 0))
        low = tl.where(missed < 31, tl.maximum(low, top - ((missed + 1) << shift)), low)  # bin 31 reaches down to low
        high = tl.where(missed > 0, top - (missed << shift), high)
        top = high
    return low, at_least, above


@triton.jit
def _search_by_guesses(ranks, low, high, at_least, most, TOPK: tl.constexpr):
    """As `_search_by_bins`, one threshold a turn: more turns, far fewer instructions.

    A guess interpolates between the scores of the ends of the bracket, by rough logarithms of count / topk; an end that
    stays twice has its logarithm halved, and every fourth guess halves the bracket of bits, so plateaus and odd
    distributions end soon too.
    """
    above = tl.full((), 0, tl.int32)
    wanted = tl.full((), TOPK, tl.float32).to(tl.int32, bitcast=True)  # float bits: a rough logarithm
    over = (at_least.to(tl.float32).to(tl.int32, bitcast=True) - wanted).to(tl.float32)
    under = (tl.full((), 0.5, tl.float32).to(tl.int32, bitcast=True) - wanted).to(tl.float32)
    side = tl.full((), 0, tl.int32)
    turn = tl.full((), 0, tl.int32)
    while (high - low > 1) & (at_least > most):
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
def _places(ranks, low, high, at_least, most, TOPK: tl.constexpr, BINS: tl.constexpr):
    """Places in their list of the best `topk` ranks or a few more, but no more than `most`; -1 for the others.

    Then a rank that at least topk reach, one above all, and how many have a place. `at_least` ranks, or an unknown
    number above `most`, are no lower than `low`; `high` is -1 if it is not known.
    """
    above = tl.full((), 0, tl.int32)
    if at_least > most:
        if high < 0:
            high = tl.max(ranks, 0) + 1
        if BINS:
            low, at_least, above = _search_by_bins(ranks, low, high, at_least, most, TOPK)
        else:
            low, at_least, above = _search_by_guesses(ranks, low, high, at_least, most, TOPK)
    if at_least <= most:  # no tie to break: everything from the threshold on is taken
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
        at_least = tl.full((), TOPK, tl.int32)
    return places, low, high, at_least


@triton.jit
def _columns(numbers, GROUPS: tl.constexpr, GROUP: tl.constexpr):
    """The GROUP columns of [GROUPS * GROUP] numbers, rows first. No number moves to another thread."""
    tl.static_assert(GROUP == 2 or GROUP == 4)
    halves = tl.split(tl.reshape(numbers, (GROUPS, GROUP // 2, 2)))  # columns 0, 2 and 1, 3
    if GROUP == 2:
        columns = tl.reshape(halves[0], (GROUPS,)), tl.reshape(halves[1], (GROUPS,))
    else:
        even, odd = tl.split(halves[0]), tl.split(halves[1])
        columns = even[0], odd[0], even[1], odd[1]
    return columns


@triton.jit
def _level_lines(span, shift):
    """Lines of 16 numbers of a level whose groups hold 1 << shift blocks: `level_numbers` without a division."""
    return (span + (16 << shift) - 1) >> (4 + shift)


@triton.jit
def _begin_row(
    row, out_ids_ptr, out_scores_ptr, counts_ptr, seen_ptr, requests_ptr, visible_ptr, request_ids_ptr,
    SCORED_ALL: tl.constexpr, TOPK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Write a row's numbers, and its ids where they need no scores. Returns its visible blocks, 0 if it is done."""
    request = tl.load(request_ids_ptr + row)
    visible = tl.load(visible_ptr + row)
    visible = tl.where(request < 0, 0, visible)  # an engine's padding rows may hold leftovers
    k = tl.arange(0, BLOCK_K)
    tl.store(counts_ptr, tl.minimum(visible, TOPK))
    tl.store(seen_ptr, visible)
    tl.store(requests_ptr, request)
    everything = tl.where(k < visible, k, -1)  # what a row within the budget selects
    if SCORED_ALL:
        tl.store(out_ids_ptr + k, everything, mask=(k < TOPK) & (k >= visible))
        tl.store(out_scores_ptr + k, float("-inf"), mask=(k < TOPK) & (k >= visible))
    elif visible <= TOPK:
        tl.store(out_ids_ptr + k, everything, mask=(k < TOPK))
    return tl.where(visible <= (0 if SCORED_ALL else TOPK), 0, visible)


@triton.jit
def _write_upper_levels(largest_ptr, visible, span, LEVELS: tl.constexpr, GIVEN: tl.constexpr, GROUP: tl.constexpr,
                        BLOCK: tl.constexpr):  # fmt: skip
    """Largest scores of the levels above GIVEN, up to LEVELS - 1, from those of level GIVEN."""
    i = tl.arange(0, BLOCK)
    from_ptr = largest_ptr
    for depth in tl.static_range(1, GIVEN):
        from_ptr += level_numbers(span, GROUP**depth)
    number = tl.cdiv(visible, GROUP**GIVEN)
    for start in tl.range(0, number, BLOCK):
        best = tl.load(from_ptr + start + i, mask=start + i < number, other=float("nan"))  # NaN beside numbers: ignored
        to_ptr = from_ptr + level_numbers(span, GROUP**GIVEN)
        for depth in tl.static_range(1, LEVELS - GIVEN):
            best = tl.max(tl.reshape(best, (BLOCK // GROUP**depth, GROUP)), 1)
            at = start // GROUP**depth + tl.arange(0, BLOCK // GROUP**depth)
            tl.store(to_ptr + at, best, mask=at < level_numbers(span, GROUP ** (GIVEN + depth)))
            to_ptr += level_numbers(span, GROUP ** (GIVEN + depth))
    tl.debug_barrier()  # every thread's part is written before another reads it


@triton.jit(
    do_not_specialize=[
        "counts_ptr",
        "seen_ptr",
        "requests_ptr",
        "visible_ptr",
        "request_ids_ptr",
        "first_row",
        "span",
        "stride_l",
    ]
)
def _top_blocks_kernel(
    scores_ptr, largest_ptr, out_ids_ptr, out_scores_ptr, counts_ptr, seen_ptr, requests_ptr, visible_ptr,
    request_ids_ptr, group_ids_ptr, first_row, span, stride_s, stride_l, stride_o, stride_os,
    LEVELS: tl.constexpr, GIVEN: tl.constexpr, GROUP: tl.constexpr, WITH_SCORES: tl.constexpr,
    SCORED_ALL: tl.constexpr, TOPK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BINS: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One row a program. Of LEVELS levels, the largest scores of levels 1 to GIVEN are there already."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    out_ids_ptr += row * stride_o
    out_scores_ptr += row * stride_os
    scores_ptr += row * stride_s
    largest_ptr += row * stride_l
    group_ids_ptr += row * (BLOCK // GROUP)
    i = tl.arange(0, BLOCK)
    visible = _begin_row(
        first_row + row, out_ids_ptr, out_scores_ptr, counts_ptr + row, seen_ptr + row, requests_ptr + row,
        visible_ptr, request_ids_ptr, SCORED_ALL, TOPK, BLOCK_K,
    )  # fmt: skip
    if visible <= 0:
        return
    low = visible * 0 - 1
    high = visible * 0 - 1
    if LEVELS == 1:
        row_scores = tl.load(scores_ptr + i, mask=i < tl.cdiv(visible, 16) * 16, other=0.0)
        places, _, _, _ = _places(_ranks(row_scores, i < visible), low, high, visible, visible * 0 + TOPK, TOPK, BINS)
        tl.store(out_ids_ptr + places, i, mask=places >= 0)
        if WITH_SCORES:
            tl.store(out_scores_ptr + places, row_scores, mask=places >= 0)
        return
    if LEVELS - 1 > GIVEN:  # noqa: SIM102  (a constant)
        if visible > BLOCK * GROUP**GIVEN:
            _write_upper_levels(largest_ptr, visible, span, LEVELS, GIVEN, GROUP, BLOCK)
    SHIFT: tl.constexpr = 2 if GROUP == 4 else 1
    PARENTS: tl.constexpr = BLOCK // GROUP
    MORE: tl.constexpr = PARENTS + 1
    level = visible * 0
    lines = visible * 0  # of 16 numbers, in the levels below this one and above blocks
    at_least = visible  # numbers of the level that is searched
    while at_least > BLOCK:
        lines += tl.where(level > 0, _level_lines(span, level * SHIFT), 0)
        at_least = tl.cdiv(at_least, GROUP)
        level += 1
    parent = tl.arange(0, PARENTS)
    largest_ptr = tl.multiple_of(largest_ptr, 16)
    first = at_least > 0
    parents = visible * 0 + PARENTS
    while level >= 0:
        shift = level * SHIFT
        number = (visible + (1 << shift) - 1) >> shift
        # a group's numbers lie together and belong to one thread: one address, one load, and short scans
        group = tl.load(group_ids_ptr + parent, mask=parent < tl.where(first, 0, parents), other=0)
        group = tl.where(first, parent, group)
        there = (parent < parents) & (group * GROUP < number)
        numbers = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        from_ptr = tl.where(level == 0, scores_ptr, largest_ptr + lines * 16)
        scores = tl.load(from_ptr + numbers, mask=there[:, None], other=0.0, cache_modifier=".cg")
        ranks = tl.reshape(_ranks(scores, there[:, None] & (numbers < number)), (BLOCK,))
        most = tl.where(level == 0, TOPK, PARENTS)
        if PARENTS > TOPK:  # noqa: SIM102  (a constant)
            if not first:  # mostly a few more than the budget: all of them go on, without a search
                at_least = tl.sum((ranks >= low).to(tl.int32), 0)
        places, low, high, parents = _places(ranks, low, high, at_least, most, TOPK, BINS)
        at_least = visible * 0 + MORE  # each group holds one that reaches `low`, some of them more
        tl.debug_barrier()  # the groups are read before others take their places
        to_ptr = tl.where(level == 0, out_ids_ptr, group_ids_ptr)
        columns = _columns(places, PARENTS, GROUP)
        for column in tl.static_range(GROUP):
            place, number = columns[column], group * GROUP + column
            tl.store(to_ptr + place, number, mask=place >= 0)
            if WITH_SCORES:  # read again: they would stay in registers through the whole search
                taken = place >= tl.where(level == 0, 0, BLOCK)
                tl.store(out_scores_ptr + place, tl.load(scores_ptr + number, mask=taken, other=0.0), mask=taken)
        tl.debug_barrier()
        first = level < 0
        level -= 1
        lines -= tl.where(level > 0, _level_lines(span, level * SHIFT), 0)


@dataclass(frozen=True)
class TopKernelConfig:
    """Form of the top-K kernel; decides nothing but speed.

    Attributes:
        bins: Whether a search counts bins; else it counts above one threshold a turn.
        warps: Warps of a program.
        registers: A thread's at most.
    """

    bins: bool
    warps: int
    registers: int | None = None

    @classmethod
    def choose(cls, rows, levels, multiprocessors):
        """Few rows, or several levels: the shortest way to the end. Many: the fewest instructions.

        Args:
            rows: Rows of the launch.
            levels: `RowLevels` of the rows.
            multiprocessors: Of the device.
        """
        if rows <= multiprocessors:
            return cls(True, max(4, min(16, levels.block // 128)))
        if levels.levels > 1:
            return cls(True, max(4, min(16, levels.block // 256)))
        return cls(False, max(2, min(16, levels.block // 1024)), 128)


def top_blocks_triton(
    scores, largest, group_ids, levels, plan, first_row, out, *, scored_all, multiprocessors, config=None
):
    """Select the best blocks of some rows: ids ascending, -1 past the count; counts, visible blocks and requests too.

    Args:
        scores: [rows, blocks] fp32, valid up to each row's visible count; rows lie a multiple of 16 numbers apart.
        largest: [rows, numbers] fp32, with the levels that the score kernel wrote; None where there is one level.
        group_ids: [rows, `levels.parents`] int32 scratch; None where there is one level.
        levels: `RowLevels` of the rows.
        plan: The step; owns the scratch.
        first_row: Plan row of the first score row.
        out: A Selection of these rows to fill.
        scored_all: Whether rows within the budget were scored too, because scores are asked for.
        multiprocessors: Of the device.
        config: Form of the kernel; chosen by rows and levels when None.
    """
    rows, topk = scores.shape[0], out.block_ids.shape[1]
    config = config or TopKernelConfig.choose(rows, levels, multiprocessors)
    if levels.levels == 1:  # neither is touched
        largest, group_ids = scores, out.block_ids
    limit = {} if config.registers is None else {"maxnreg": config.registers}
    _top_blocks_kernel[(rows,)](
        scores, largest, out.block_ids, scores if out.scores is None else out.scores, out.block_counts,
        out.visible_blocks, out.request_ids, plan.visible_blocks, plan.request_ids, group_ids,
        first_row, levels.span, scores.stride(0), largest.stride(0), out.block_ids.stride(0),
        0 if out.scores is None else out.scores.stride(0),
        LEVELS=levels.levels, GIVEN=levels.given, GROUP=levels.group, WITH_SCORES=out.scores is not None,
        SCORED_ALL=scored_all, TOPK=topk, BLOCK=levels.block, BLOCK_K=triton.next_power_of_2(topk), BINS=config.bins,
        num_warps=config.warps, enable_fp_fusion=False, **limit, **overlapping(scores.device),
    )  # fmt: skip
