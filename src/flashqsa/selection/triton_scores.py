# mypy: ignore-errors
"""Scores on the GPU: block keys on the M side of the product, heads times rows on the N side.

Every phase runs this product: K order and the order of heads are fixed and accumulation is fp32, so a row's scores are
the same whether 1 or 64 rows share the tile. Keys are read once for all rows and heads of a request's tile.

The largest score of each group of blocks (row_levels.py) is written beside the scores, so that the search for the best
reads few of them.

Bytes: M * Di keys a request (256 B a block in bf16), M * 4 scores a row and a seventh of that for the largest ones.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from flashqsa.checks import FP8
from flashqsa.launching import overlapping, wait_for_previous
from flashqsa.selection.row_levels import level_numbers


@triton.jit
def _add_neighbours(total, BLOCK_M: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCK_M, HEADS * ROWS] to half as many columns: heads 0 and 1, 2 and 3, ... added."""
    pairs = tl.permute(tl.reshape(total, (BLOCK_M, HEADS // 2, 2, ROWS)), (0, 1, 3, 2))
    even, odd = tl.split(pairs)
    return tl.reshape(even + odd, (BLOCK_M, HEADS // 2 * ROWS))


@triton.jit
def _sum_heads(total, BLOCK_M: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr):
    """[BLOCK_M, HEADS * ROWS] to [BLOCK_M, ROWS]. In an order of its own: that of a reduction follows the layout."""
    if HEADS > 1:
        total = _add_neighbours(total, BLOCK_M, HEADS, ROWS)
    if HEADS > 2:
        total = _add_neighbours(total, BLOCK_M, HEADS // 2, ROWS)
    if HEADS > 4:
        total = _add_neighbours(total, BLOCK_M, HEADS // 4, ROWS)
    if HEADS > 8:
        total = _add_neighbours(total, BLOCK_M, HEADS // 8, ROWS)
    if HEADS > 16:
        total = _add_neighbours(total, BLOCK_M, HEADS // 16, ROWS)
    if HEADS > 32:
        total = _add_neighbours(total, BLOCK_M, HEADS // 32, ROWS)
    if HEADS > 64:
        total = _add_neighbours(total, BLOCK_M, HEADS // 64, ROWS)
    tl.static_assert(HEADS <= 128)
    return total


@triton.jit
def _first_pairs(words):
    """Of each two words, four e4m3 numbers, the first two numbers as fp16. A thread holds both words."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, low; }", "=r,r", [words],
        dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _second_pairs(words):
    """Of each two words the last two numbers."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.rn.f16x2.e4m3x2 $0, high; }", "=r,r", [words],
        dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def _widen(words, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """[ROWS, BLOCK_D // 2] words of two e4m3 numbers to [ROWS, BLOCK_D] fp16: all first pairs, then all second ones."""
    halves = tl.permute(tl.join(_first_pairs(words), _second_pairs(words)), (0, 2, 1))
    return tl.reshape(halves, (ROWS, BLOCK_D))


@triton.jit
def _key_of_row(m):
    """Block of a tile that row m of the product stands for.

    Rows r and r + 8, which one thread holds of an accumulator, are blocks 2 r and 2 r + 1.
    """
    return m // 16 * 16 + m % 8 * 2 + m // 8 % 2


@triton.jit
def _in_block_order(total, BLOCK_M: tl.constexpr, ROWS: tl.constexpr):
    """Rows of the product back in the order of blocks: no number moves to another thread."""
    parts = tl.permute(tl.reshape(total, (BLOCK_M // 16, 2, 8, ROWS)), (0, 2, 1, 3))
    return tl.reshape(parts, (BLOCK_M, ROWS))


@triton.jit
def _store_largest(
    total, to_largest, block_start, span, scored,
    GIVEN: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the levels of a tile of scores [BLOCK_M, ROWS]; NaN beside numbers is ignored."""
    best = total
    for depth in tl.static_range(1, GIVEN + 1):
        best = tl.max(tl.reshape(best, (BLOCK_M // GROUP**depth, GROUP, ROWS)), 1)
        at = block_start // GROUP**depth + tl.arange(0, BLOCK_M // GROUP**depth)
        tl.store(to_largest + at[:, None], best, mask=scored[None, :])
        to_largest += level_numbers(span, GROUP**depth)


@triton.jit
def _load_page_ids(table_ptr, block_start, m, end, PAGE_BLOCKS: tl.constexpr, WHOLE_PAGES: tl.constexpr):
    column = block_start // PAGE_BLOCKS + m // PAGE_BLOCKS if WHOLE_PAGES else (block_start + m) // PAGE_BLOCKS
    return tl.load(table_ptr + column, mask=block_start + m < end, other=0)


@triton.jit(
    do_not_specialize=[
        "query_starts_ptr",
        "seq_lens_ptr",
        "visible_ptr",
        "page_table_ptr",
        "first_blocks_ptr",
        "num_pages",
        "num_rows",
        "first_row",
        "least_blocks",
        "stride_pr",
        "row_tiles",
        "table_blocks",
        "span",
        "stride_l",
    ]
)
def _score_blocks_kernel(
    q_ptr, keys_ptr, scores_ptr, largest_ptr, query_starts_ptr, seq_lens_ptr, visible_ptr, page_table_ptr,
    first_blocks_ptr, num_pages, num_rows, first_row, least_blocks, stride_qt, stride_qh, stride_kp, stride_kb,
    stride_pr, stride_st, row_tiles, table_blocks, span, stride_l,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr, PAGED: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, ONE_ROW: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr, WORDS: tl.constexpr, Q_WORDS: tl.constexpr,
    STAGES: tl.constexpr, GIVEN: tl.constexpr, GROUP: tl.constexpr, PAIRED: tl.constexpr, PAGES_AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    if ONE_ROW:
        request = tl.program_id(0)
        tile = request * 0
    else:
        tile = tl.program_id(0) % row_tiles  # row tiles next to each other read the same keys at the same time
        request = tl.program_id(0) // row_tiles
    first, step = tl.program_id(1) * BLOCK_M, tl.num_programs(1) * BLOCK_M
    m = tl.arange(0, BLOCK_M)
    key = _key_of_row(m) if PAIRED else m
    WHOLE_PAGES: tl.constexpr = BLOCK_M % PAGE_BLOCKS == 0
    # what needs no other load comes first: every further trip to memory delays a program that has few tiles
    if PAGED:
        table_ptr = page_table_ptr + request.to(tl.int64) * stride_pr
        page_0 = _load_page_ids(table_ptr, first, key, table_blocks, PAGE_BLOCKS, WHOLE_PAGES)
        if PAGES_AHEAD > 1:
            page_1 = _load_page_ids(table_ptr, first + step, key, table_blocks, PAGE_BLOCKS, WHOLE_PAGES)
            page_2 = _load_page_ids(table_ptr, first + 2 * step, key, table_blocks, PAGE_BLOCKS, WHOLE_PAGES)
    else:
        first_block = tl.load(first_blocks_ptr + request).to(tl.int64)
    start = tl.load(query_starts_ptr + request)
    end = tl.minimum(tl.load(query_starts_ptr + request + 1), num_rows)
    live = tl.load(seq_lens_ptr + request) > 0
    k = tl.arange(0, BLOCK_D)
    # K order: as stored; of e4m3 keys numbers 0 1 4 5 8 9 .., then 2 3 6 7 10 11 .., the halves of pairs of words
    d = 2 * (k % (BLOCK_D // 2)) - k % 2 + k // (BLOCK_D // 2) * 2 if PAIRS else k
    in_d = (d < DIM)[None, :]
    WIDTH: tl.constexpr = BLOCK_D // 2 if WORDS else BLOCK_D
    key_columns = tl.arange(0, WIDTH) if WORDS else d
    q_columns = tl.arange(0, BLOCK_D // 2) if Q_WORDS else d
    in_q = (2 * q_columns < DIM if Q_WORDS else q_columns < DIM)[None, :]
    n = tl.arange(0, PADDED_HEADS * ROWS)  # columns lie head by head: a thread holds all heads of its rows
    head, column_row = n // ROWS, n % ROWS
    of_q = column_row.to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + q_columns[None, :]
    if ONE_ROW:
        # the usual row of a request, read before it is known to be that row
        in_column = (head < HEADS) & (column_row == 0)
        usual = in_column & (request + column_row < num_rows) & (request + column_row >= first_row)
        at = q_ptr + request.to(tl.int64) * stride_qt + of_q
        q = tl.load(at, mask=usual[:, None] & in_q, other=0.0)
        visible = tl.load(visible_ptr + request, mask=request < num_rows, other=0)
    start = tl.maximum(start, first_row) + tile * ROWS
    at = q_ptr + start.to(tl.int64) * stride_qt + of_q
    if ONE_ROW:
        here = live & (start < end)
        moved = in_column & (start + column_row < end) & (start + column_row != request)
        q = tl.load(at, mask=moved[:, None] & in_q, other=q)
        visible = tl.load(visible_ptr + start, mask=here & (start != request), other=visible)
        most = tl.where(here & (visible > least_blocks), visible, 0)
    else:
        in_column = (head < HEADS) & (start + column_row < end)
        q = tl.load(at, mask=in_column[:, None] & in_q, other=0.0)
        rows = start + tl.arange(0, ROWS)
        visible = tl.load(visible_ptr + rows, mask=rows < end, other=0)
        # rows within the budget select everything: not scored
        visible = tl.where(live & (visible > least_blocks), visible, 0)
        most = tl.max(visible, 0)
        scored = visible > 0
        least = tl.min(tl.where(scored, visible, most), 0)
    if first >= most:
        return
    q = tl.trans(_widen(q, PADDED_HEADS * ROWS, BLOCK_D) if Q_WORDS else q.to(DTYPE))
    scores_ptr += (start - first_row).to(tl.int64) * stride_st
    to_rows = scores_ptr + tl.arange(0, ROWS).to(tl.int64)[None, :] * stride_st
    largest_ptr += (start - first_row).to(tl.int64) * stride_l
    to_largest = largest_ptr + tl.arange(0, ROWS).to(tl.int64)[None, :] * stride_l
    for block_start in tl.range(first, most, step, num_stages=STAGES):
        if PAGED:  # page ids are carried: the loads of keys, some tiles ahead, never wait for them
            page = page_0
            if PAGES_AHEAD > 1:
                # the clamp below in two steps: Triton pipelines no loop that hands a value on unchanged
                page_0 = tl.minimum(page_1, 2147483646)
                page_1 = tl.maximum(page_2, -1)
                page_2 = _load_page_ids(table_ptr, block_start + 3 * step, key, most, PAGE_BLOCKS, WHOLE_PAGES)
            else:
                page_0 = _load_page_ids(table_ptr, block_start + step, key, most, PAGE_BLOCKS, WHOLE_PAGES)
            place = key % PAGE_BLOCKS if WHOLE_PAGES else (block_start + key) % PAGE_BLOCKS
        else:
            slot = first_block + tl.minimum(block_start + key, most - 1)
            page = (slot // PAGE_BLOCKS).to(tl.int32)
            place = (slot % PAGE_BLOCKS).to(tl.int32)
        page = tl.minimum(page.to(tl.uint32), num_pages - 1).to(tl.int64)  # ids below 0 are large ones
        # keys from `most` on are any keys of the cache: each makes one row of the product, which is not stored
        keys_at = keys_ptr + ((page * stride_kp)[:, None] + ((place * stride_kb)[:, None] + key_columns[None, :]))
        if DIM == BLOCK_D:
            keys = tl.load(keys_at)
        else:
            keys = tl.load(keys_at, mask=(2 * key_columns < DIM)[None, :] if WORDS else in_d, other=0.0)
        keys = _widen(keys, BLOCK_M, BLOCK_D) if WORDS else keys.to(DTYPE)
        products = tl.dot(keys, q, input_precision=PRECISION)  # [BLOCK_M, heads * ROWS]
        products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        total = _sum_heads(products, BLOCK_M, PADDED_HEADS, ROWS)
        if PAIRED:
            total = _in_block_order(total, BLOCK_M, ROWS)
        blocks = block_start + m
        if ONE_ROW:  # decode: one column of the tile is live
            score = tl.sum(tl.where(tl.arange(0, ROWS)[None, :] == 0, total, 0.0), 1)
            tl.store(scores_ptr + blocks, score, mask=blocks < most)
            if GIVEN > 0:
                score = tl.where(blocks < most, score, float("nan"))[:, None]
                _store_largest(score, largest_ptr, block_start, span, tl.arange(0, 1) == 0, GIVEN, GROUP, BLOCK_M, 1)
        elif block_start + BLOCK_M <= least:  # seen by every scored row: no mask along the blocks, wide stores
            tl.store(to_rows + blocks[:, None], total, mask=scored[None, :])
            if GIVEN > 0:
                _store_largest(total, to_largest, block_start, span, scored, GIVEN, GROUP, BLOCK_M, ROWS)
        else:
            seen = blocks[:, None] < visible[None, :]
            tl.store(to_rows + blocks[:, None], total, mask=seen)
            if GIVEN > 0:
                total = tl.where(seen, total, float("nan"))
                _store_largest(total, to_largest, block_start, span, scored, GIVEN, GROUP, BLOCK_M, ROWS)


def product_dtype(q_dtype, keys_dtype):
    """Dtype in which queries and keys meet: exact for both. float8 widens, since its own accumulation is short."""
    if keys_dtype == FP8:
        return tl.float16 if q_dtype == FP8 else _NAMES[q_dtype]
    if q_dtype == FP8:
        return _NAMES[keys_dtype]
    return _NAMES[q_dtype] if q_dtype == keys_dtype else tl.float32


_NAMES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class ScoreKernelConfig:
    """Tiles of `_score_blocks_kernel`; decides nothing but speed.

    Attributes:
        block_m: Keys of a tile.
        rows: Rows of a request that share a tile.
        stages: Depth of the load pipeline.
        warps: Warps of a program, a multiple of 4: fewer would be another instruction family on compute capability 9.0.
        programs: Programs a multiprocessor that the keys of all requests are cut into.
        paired: Whether a thread holds blocks 2 r and 2 r + 1 instead of r and r + 8: fewer steps to the largest of a
            group. Only for products whose accumulators are known to lie so: Triton 3.6 reduces wrongly over lanes that
            are not neighbours.
        pages_ahead: Tiles by which page ids are loaded before the keys are, 1 or 3: a program with little to do a tile
            is done with it before they are there.
    """

    block_m: int = 64
    rows: int = 8
    stages: int = 4
    warps: int = 4
    programs: int = 4
    paired: bool = False
    pages_ahead: int = 1

    @classmethod
    def choose(cls, *, wide, heads, dim, key_bytes, rows, hopper):
        """Tiles for a step: measured on compute capability 9.0, small ones elsewhere.

        Args:
            wide: Whether products are of fp32.
            heads: Index heads, padded to a power of two.
            dim: Index dim, padded to a power of two.
            key_bytes: Bytes of a number of the block keys.
            rows: Most rows of a request.
            hopper: Whether the device has compute capability 9.0.
        """
        if wide:  # no tensor cores: what a thread holds grows with keys times columns
            together = min(triton.next_power_of_2(max(rows, 1)), max(1, 32 // heads), 16)
            return cls(block_m=32, rows=together, stages=1, programs=8)
        # more columns read the keys fewer times; those of one byte are widened in registers, which leaves fewer of them
        most_columns = max(64, min(256 if key_bytes > 1 else 128, (1 << 15) // dim)) if hopper else 64
        together = max(1, min(8, most_columns // heads))
        while together < min(rows, 64) and 2 * together * heads <= most_columns:
            together *= 2
        if not hopper:
            return cls(rows=together)
        if together * heads > 64:
            return cls(rows=together, stages=2, programs=4, paired=True)
        stages, programs = (2, 5) if key_bytes > 1 else (3, 6)
        return cls(rows=together, stages=stages, programs=programs, paired=True, pages_ahead=3)

    def fitting(self, *, columns, dim, key_bytes, shared_bytes):
        """These tiles with no more stages than there is shared memory for."""
        left = shared_bytes - 2 * columns * dim - 4 * self.rows * self.block_m
        return replace(self, stages=max(1, min(self.stages, left // (self.block_m * dim * key_bytes))))


def score_kernel_config(index_q, cache, plan, rows):
    """Tiles of the score kernel for a launch of so many rows of the step."""
    heads, dim, dtype, _ = _products(index_q, cache)
    hopper = _is_hopper(cache.device)
    key_bytes = cache.block_keys.element_size()
    config = ScoreKernelConfig.choose(
        wide=dtype == tl.float32, heads=heads, dim=dim, key_bytes=key_bytes, rows=min(plan.max_query_len, rows),
        hopper=hopper,
    )  # fmt: skip
    shared_bytes = (220 if hopper else 96) << 10
    return config.fitting(columns=heads * config.rows, dim=dim, key_bytes=key_bytes, shared_bytes=shared_bytes)


def score_blocks_triton(
    index_q, cache, plan, scores, first_row, least_blocks, *, config, multiprocessors, largest=None, levels=None
):
    """Scores of rows `first_row` .. `first_row + len(scores)` into a [rows, blocks] fp32 buffer.

    Only visible blocks of rows that see more than `least_blocks` blocks are written.

    Args:
        index_q: [T, Hi, Di] index queries.
        cache: Caches of the layer.
        plan: The step.
        scores: [rows, blocks] fp32 to fill.
        first_row: Plan row of the first score row.
        least_blocks: Rows that see no more than these are not scored.
        config: Tiles, as `score_kernel_config` chooses them.
        multiprocessors: Of the device.
        largest: [rows, numbers] fp32 for the largest scores of groups; None where none are asked for.
        levels: `RowLevels` of the rows, if `largest` is given.
    """
    keys = cache.block_keys
    heads, block_d, dtype, pairs = _products(index_q, cache)
    num_heads, dim = index_q.shape[1:]
    rows = min(plan.max_query_len, scores.shape[0])
    row_tiles = -(-rows // config.rows)
    work = plan.num_requests * row_tiles
    if work == 0:
        return
    most_tiles = -(-scores.shape[1] // config.block_m)
    chunks = max(1, min(most_tiles, config.programs * multiprocessors // work))
    paged = plan.page_table is not None
    words = pairs and _in_words(keys)
    q_words = words and _in_words(index_q)
    if words:
        keys = keys.view(torch.float16)
    if q_words:
        index_q = index_q.view(torch.float16)
    _score_blocks_kernel[(work, chunks)](
        index_q, keys, scores, scores if largest is None else largest, plan.query_starts, plan.seq_lens,
        plan.visible_blocks, plan.page_table if paged else plan.request_ids,
        plan.request_ids if paged else plan.first_block_slots, keys.shape[0],
        min(plan.num_rows, first_row + scores.shape[0]), first_row, least_blocks,
        index_q.stride(0), index_q.stride(1), keys.stride(0), keys.stride(1),
        plan.page_table.stride(0) if paged else 0, scores.stride(0), row_tiles,
        plan.page_table.shape[1] * keys.shape[1] if paged else 0, 0 if largest is None else levels.span,
        0 if largest is None else largest.stride(0),
        HEADS=num_heads, PADDED_HEADS=heads, DIM=dim, BLOCK_D=block_d, PAGE_BLOCKS=keys.shape[1], PAGED=paged,
        ROWS=config.rows, BLOCK_M=config.block_m, ONE_ROW=plan.max_query_len == 1, DTYPE=dtype, PRECISION="ieee",
        PAIRS=pairs, WORDS=words, Q_WORDS=q_words, STAGES=config.stages, GIVEN=0 if largest is None else levels.given,
        GROUP=1 if largest is None else levels.group, PAIRED=config.paired, PAGES_AHEAD=config.pages_ahead,
        num_warps=config.warps, enable_fp_fusion=False, **overlapping(cache.device),
    )  # fmt: skip


def _products(index_q, cache):
    """Padded heads, padded dim, dtype of products, and whether e4m3 meets e4m3."""
    dtype = product_dtype(index_q.dtype, cache.block_keys.dtype)
    pairs = cache.block_keys.dtype == FP8 and dtype == tl.float16
    dim = max(32 if pairs else 16, triton.next_power_of_2(index_q.shape[2]))
    return triton.next_power_of_2(index_q.shape[1]), dim, dtype, pairs


def _in_words(numbers):
    """Whether e4m3 rows can be loaded two numbers by two, 16 bytes at a time: a thread then holds pairs of whole words.

    Others are loaded number by number, in the same K order.
    """
    rows = [stride % 32 for stride in (numbers.stride(0), numbers.stride(1))]
    return numbers.dtype == FP8 and numbers.shape[2] % 16 == 0 and rows == [0, 0] and numbers.data_ptr() % 16 == 0


def _is_hopper(device):
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
