# mypy: ignore-errors
"""Scores on the GPU: block keys on the M side of the product, heads times rows on the N side.

Every phase runs this product: K order and the order of heads are fixed and accumulation is fp32, so a row's scores are
the same whether 1 or 64 rows share the tile. Keys are read once for all rows and heads of a request's tile.

Bytes: M * Di keys a request (256 B a block in bf16), M * 4 scores a row.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from flashqsa.checks import FP8
from flashqsa.launching import overlapping, wait_for_previous


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
def _load_columns(at, columns, width, WHOLE: tl.constexpr):
    """Load [BLOCK_M, columns], zero from `width` on; without a mask where there is nothing to mask."""
    if WHOLE:
        return tl.load(at)
    else:
        return tl.load(at, mask=(columns < width)[None, :], other=0.0)


@triton.jit
def _load_page_ids(table_ptr, block_start, m, last, PAGE_BLOCKS: tl.constexpr, WHOLE_PAGES: tl.constexpr):
    column = block_start // PAGE_BLOCKS + m // PAGE_BLOCKS if WHOLE_PAGES else (block_start + m) // PAGE_BLOCKS
    return tl.load(table_ptr + column, mask=block_start + m < last, other=0)


@triton.jit(do_not_specialize=["num_pages", "num_rows", "first_row", "least_blocks"])
def _score_blocks_kernel(
    q_ptr, keys_ptr, scores_ptr, query_starts_ptr, seq_lens_ptr, visible_ptr, page_table_ptr, first_blocks_ptr,
    num_pages, num_rows, first_row, least_blocks, stride_qt, stride_qh, stride_kp, stride_kb, stride_pr, stride_st,
    row_tiles,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr, PAGED: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, ONE_ROW: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr, PAIRS: tl.constexpr, WORDS: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    tile = tl.program_id(0) % row_tiles  # row tiles next to each other read the same keys at the same time
    request = tl.program_id(0) // row_tiles
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    start = tl.load(query_starts_ptr + request)
    end = tl.minimum(tl.load(query_starts_ptr + request + 1), num_rows)
    live = tl.load(seq_lens_ptr + request) > 0
    start = tl.maximum(start, first_row) + tile * ROWS
    # rows within the budget select everything: not scored
    if ONE_ROW:
        # the usual row of a request is at hand one trip to memory earlier
        guess = tl.load(visible_ptr + request, mask=request < num_rows, other=0)
        here = live & (start < end)
        visible = tl.load(visible_ptr + start, mask=here & (start != request), other=guess)
        most = tl.where(here & (visible > least_blocks), visible, 0)
    else:
        rows = start + tl.arange(0, ROWS)
        visible = tl.load(visible_ptr + rows, mask=rows < end, other=0)
        visible = tl.where(live & (visible > least_blocks), visible, 0)
        most = tl.max(visible, 0)
        scored = visible > 0
        least = tl.min(tl.where(scored, visible, most), 0)
    tiles = tl.cdiv(most, BLOCK_M)
    first = (chunk * tiles) // chunks * BLOCK_M
    last = tl.minimum((chunk * tiles + tiles) // chunks * BLOCK_M, most)
    if first >= last:
        return
    n = tl.arange(0, PADDED_HEADS * ROWS)  # columns lie head by head: a thread holds all heads of its rows
    head = n // ROWS
    column_rows = start + n % ROWS
    in_column = ((head < HEADS) & (column_rows < end))[:, None]
    # K order: as stored, or of e4m3 in two halves, numbers 0 1 4 5 8 9 .. and 2 3 6 7 10 11 ..
    columns = tl.arange(0, BLOCK_D // 2 if PAIRS else BLOCK_D)
    d = 2 * columns - columns % 2 if PAIRS else columns
    at = q_ptr + column_rows.to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :]
    q = tl.trans(tl.load(at, mask=in_column & (d < DIM)[None, :], other=0.0).to(DTYPE))
    if PAIRS:
        second_q = tl.trans(tl.load(at + 2, mask=in_column & (d + 2 < DIM)[None, :], other=0.0).to(DTYPE))
    scores_ptr += (start - first_row).to(tl.int64) * stride_st
    to_rows = scores_ptr + tl.arange(0, ROWS).to(tl.int64)[None, :] * stride_st
    m = tl.arange(0, BLOCK_M)
    WHOLE_PAGES: tl.constexpr = BLOCK_M % PAGE_BLOCKS == 0
    WHOLE: tl.constexpr = DIM == BLOCK_D
    if PAGED:
        table_ptr = page_table_ptr + request.to(tl.int64) * stride_pr
        next_page = _load_page_ids(table_ptr, first, m, last, PAGE_BLOCKS, WHOLE_PAGES)
    else:
        first_block = tl.load(first_blocks_ptr + request).to(tl.int64)
    for block_start in tl.range(first, last, BLOCK_M, num_stages=STAGES):
        blocks = block_start + m
        if PAGED:  # page ids are carried: the loads of keys, some tiles ahead, never wait for them
            page = next_page
            next_page = _load_page_ids(table_ptr, block_start + BLOCK_M, m, last, PAGE_BLOCKS, WHOLE_PAGES)
            place = m % PAGE_BLOCKS if WHOLE_PAGES else blocks % PAGE_BLOCKS
        else:
            slot = first_block + tl.minimum(blocks, last - 1)
            page = (slot // PAGE_BLOCKS).to(tl.int32)
            place = (slot % PAGE_BLOCKS).to(tl.int32)
        page = tl.minimum(page.to(tl.uint32), num_pages - 1).to(tl.int64)  # ids below 0 are large ones
        # keys from `last` on are any keys of the cache: each makes one row of the product, which is not stored
        base = (page * stride_kp)[:, None] + (place * stride_kb)[:, None]
        if WORDS:
            words = _load_columns(keys_ptr + (base + columns[None, :]), 2 * columns, DIM, WHOLE)
            products = tl.dot(_first_pairs(words), q)
            products = tl.dot(_second_pairs(words), second_q, products)
        elif PAIRS:
            products = tl.dot(_load_columns(keys_ptr + (base + d[None, :]), d, DIM, WHOLE).to(DTYPE), q)
            keys = _load_columns(keys_ptr + (base + (d + 2)[None, :]), d + 2, DIM, WHOLE).to(DTYPE)
            products = tl.dot(keys, second_q, products)
        else:
            keys = _load_columns(keys_ptr + (base + d[None, :]), d, DIM, WHOLE).to(DTYPE)
            products = tl.dot(keys, q, input_precision=PRECISION)  # [BLOCK_M, heads * ROWS]
        products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        total = _sum_heads(products, BLOCK_M, PADDED_HEADS, ROWS)
        if ONE_ROW:  # decode: one column of the tile is live
            score = tl.sum(tl.where(tl.arange(0, ROWS)[None, :] == 0, total, 0.0), 1)
            tl.store(scores_ptr + blocks, score, mask=blocks < last)
        elif block_start + BLOCK_M <= least:  # seen by every scored row: no mask along the blocks, wide stores
            tl.store(to_rows + blocks[:, None], total, mask=scored[None, :])
        else:
            tl.store(to_rows + blocks[:, None], total, mask=blocks[:, None] < tl.minimum(visible, last)[None, :])


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
    """

    block_m: int = 64
    rows: int = 8
    stages: int = 4
    warps: int = 4
    programs: int = 4

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
            return cls(rows=together, stages=2, programs=4)
        return cls(rows=together, stages=2, programs=5) if key_bytes > 1 else cls(rows=together, stages=4, programs=6)

    def fitting(self, *, columns, dim, key_bytes, shared_bytes):
        """These tiles with no more stages than there is shared memory for."""
        left = shared_bytes - 2 * columns * dim - 4 * self.rows * self.block_m
        return replace(self, stages=max(1, min(self.stages, left // (self.block_m * dim * key_bytes))))


def score_blocks_triton(index_q, cache, plan, scores, first_row, least_blocks, *, multiprocessors, config=None):
    """Scores of rows `first_row` .. `first_row + len(scores)` into a [rows, blocks] fp32 buffer.

    Only visible blocks of rows that see more than `least_blocks` blocks are written.
    """
    keys = cache.block_keys
    dtype = product_dtype(index_q.dtype, keys.dtype)
    pairs = keys.dtype == FP8 and dtype == tl.float16
    dim, block_d = index_q.shape[2], max(32 if pairs else 16, triton.next_power_of_2(index_q.shape[2]))
    heads, rows = triton.next_power_of_2(index_q.shape[1]), min(plan.max_query_len, scores.shape[0])
    hopper = _is_hopper(cache.device)
    config = config or ScoreKernelConfig.choose(
        wide=dtype == tl.float32, heads=heads, dim=block_d, key_bytes=keys.element_size(), rows=rows, hopper=hopper
    )
    config = config.fitting(
        columns=heads * config.rows, dim=block_d, key_bytes=keys.element_size(),
        shared_bytes=(220 if hopper else 96) << 10,
    )  # fmt: skip
    row_tiles = -(-rows // config.rows)
    work = plan.num_requests * row_tiles
    if work == 0:
        return
    most_tiles = -(-scores.shape[1] // config.block_m)
    chunks = max(1, min(most_tiles, config.programs * multiprocessors // work))
    paged = plan.page_table is not None
    words = pairs and _in_words(keys)
    if words:
        keys = keys.view(torch.float16)
    _score_blocks_kernel[(work, chunks)](
        index_q, keys, scores, plan.query_starts, plan.seq_lens, plan.visible_blocks,
        plan.page_table if paged else plan.request_ids, plan.request_ids if paged else plan.first_block_slots,
        keys.shape[0], min(plan.num_rows, first_row + scores.shape[0]), first_row, least_blocks,
        index_q.stride(0), index_q.stride(1), keys.stride(0), keys.stride(1),
        plan.page_table.stride(0) if paged else 0, scores.stride(0), row_tiles,
        HEADS=index_q.shape[1], PADDED_HEADS=heads, DIM=dim, BLOCK_D=block_d, PAGE_BLOCKS=keys.shape[1], PAGED=paged,
        ROWS=config.rows, BLOCK_M=config.block_m, ONE_ROW=plan.max_query_len == 1, DTYPE=dtype, PRECISION="ieee",
        PAIRS=pairs, WORDS=words, STAGES=config.stages, num_warps=config.warps, enable_fp_fusion=False,
        **overlapping(cache.device),
    )  # fmt: skip


def _in_words(keys):
    """Whether e4m3 keys can be loaded two by two, 16 bytes at a time: a thread then always holds whole words in pairs.

    Keys that cannot are loaded one by one, in the same K order.
    """
    strides = [stride % 32 for stride in (keys.stride(0), keys.stride(1))]
    return keys.shape[2] % 16 == 0 and strides == [0, 0] and keys.data_ptr() % 16 == 0


def _is_hopper(device):
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
