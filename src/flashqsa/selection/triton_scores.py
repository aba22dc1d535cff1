# mypy: ignore-errors
"""Scores on the GPU: block keys on the M side of the product, heads times rows on the N side.

Every phase runs this product: K order and the order of heads are fixed and accumulation is fp32, so a row's scores are
the same whether 1 or 16 rows share the tile. Keys are read once for all rows and heads of a request's tile.

Bytes: M * Di keys a request (256 B a block in bf16), M * 4 scores a row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashqsa.checks import FP8

MOST_COLUMNS = 64
"""Heads times rows of a tile at most: more of them leave the registers."""


@triton.jit
def _score_blocks_kernel(
    q_ptr, keys_ptr, scores_ptr, query_starts_ptr, seq_lens_ptr, visible_ptr, page_table_ptr, first_blocks_ptr,
    num_pages, num_rows, first_row, least_blocks, stride_qt, stride_qh, stride_kp, stride_kb, stride_pr, stride_st,
    chunks,
    HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    PAGE_BLOCKS: tl.constexpr, PAGED: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, ROW_TILES: tl.constexpr,
    ONE_ROW: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    chunk = pid % chunks
    tile = (pid // chunks) % ROW_TILES
    request = (pid // (chunks * ROW_TILES)).to(tl.int64)
    start = tl.load(query_starts_ptr + request)
    end = tl.minimum(tl.load(query_starts_ptr + request + 1), num_rows)
    rows = start + tile * ROWS + tl.arange(0, ROWS)
    in_row = (rows < end) & (rows >= first_row)
    visible = tl.load(visible_ptr + rows, mask=in_row, other=0)
    live = tl.load(seq_lens_ptr + request) > 0
    d = tl.arange(0, BLOCK_D)
    in_d = d < DIM
    n = tl.arange(0, PADDED_HEADS * ROWS)  # columns lie head by head: a thread holds all heads of its rows
    head = n // ROWS
    column_rows = start + tile * ROWS + n % ROWS
    in_column = (head < HEADS) & (column_rows < end) & (column_rows >= first_row)
    at = q_ptr + column_rows.to(tl.int64)[:, None] * stride_qt + head[:, None] * stride_qh + d[None, :]
    q = tl.load(at, mask=in_column[:, None] & in_d[None, :], other=0.0).to(DTYPE)
    # rows within the budget select everything: not scored
    visible = tl.where(live & (visible > least_blocks), visible, 0)
    most = tl.max(visible, 0)
    table_ptr = page_table_ptr + request * stride_pr
    first_block = tl.load(first_blocks_ptr + request) if not PAGED else request
    out_rows = (rows - first_row).to(tl.int64) * stride_st
    if ONE_ROW:
        scores_ptr += (start - first_row).to(tl.int64) * stride_st
    m = tl.arange(0, BLOCK_M)
    for block_start in tl.range(chunk * BLOCK_M, most, chunks * BLOCK_M, num_stages=STAGES):
        blocks = block_start + m
        seen = blocks < most
        if PAGED:
            page = tl.load(table_ptr + blocks // PAGE_BLOCKS, mask=seen, other=0).to(tl.int64)
            place = blocks % PAGE_BLOCKS
        else:
            page = (first_block + blocks) // PAGE_BLOCKS
            place = (first_block + blocks) % PAGE_BLOCKS
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        base = page * stride_kp + place * stride_kb
        keys = tl.load(keys_ptr + base[:, None] + d[None, :], mask=seen[:, None] & in_d[None, :], other=0.0).to(DTYPE)
        products = tl.dot(keys, tl.trans(q), input_precision=PRECISION)  # [BLOCK_M, heads * ROWS]
        products = tl.maximum(products, 0.0, propagate_nan=tl.PropagateNan.ALL)
        total = tl.sum(tl.reshape(products, (BLOCK_M, PADDED_HEADS, ROWS)), 1)
        if ONE_ROW:  # decode: one column of the tile is live
            score = tl.sum(tl.where(tl.arange(0, ROWS)[None, :] == 0, total, 0.0), 1)
            tl.store(scores_ptr + blocks, score, mask=blocks < most)
        else:
            to = scores_ptr + out_rows[None, :] + blocks[:, None]
            tl.store(to, total, mask=blocks[:, None] < visible[None, :])


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
        stages: Depth of the load pipeline.
        warps: Warps of a program.
        waves: Programs a multiprocessor that the keys of all requests are cut into.
    """

    block_m: int = 64
    stages: int = 4
    warps: int = 4
    waves: int = 8


def score_blocks_triton(index_q, cache, plan, scores, first_row, least_blocks, *, multiprocessors, config=None):
    """Scores of rows `first_row` .. `first_row + len(scores)` into a [rows, blocks] fp32 buffer.

    Only visible blocks of rows that see more than `least_blocks` blocks are written.
    """
    keys = cache.block_keys
    dtype = product_dtype(index_q.dtype, keys.dtype)
    wide = dtype == tl.float32
    heads = triton.next_power_of_2(index_q.shape[1])
    columns = 16 if wide and heads > 4 else MOST_COLUMNS
    rows_a_tile = max(1, min(16, columns // heads))
    row_tiles = max(1, -(-plan.max_query_len // rows_a_tile))
    work = plan.num_requests * row_tiles
    if work == 0 or scores.shape[0] == 0:
        return
    config = config or (ScoreKernelConfig(block_m=64, stages=1) if wide else ScoreKernelConfig())
    most_tiles = -(-scores.shape[1] // config.block_m)
    chunks = max(1, min(most_tiles, -(-config.waves * multiprocessors // work)))
    paged = plan.page_table is not None
    _score_blocks_kernel[(work * chunks,)](
        index_q, keys, scores, plan.query_starts, plan.seq_lens, plan.visible_blocks,
        plan.page_table if paged else plan.request_ids, plan.request_ids if paged else plan.first_block_slots,
        keys.shape[0], min(plan.num_rows, first_row + scores.shape[0]), first_row, least_blocks,
        index_q.stride(0), index_q.stride(1), keys.stride(0), keys.stride(1),
        plan.page_table.stride(0) if paged else 0, scores.stride(0), chunks,
        HEADS=index_q.shape[1], PADDED_HEADS=heads, DIM=index_q.shape[2],
        BLOCK_D=max(16, triton.next_power_of_2(index_q.shape[2])), PAGE_BLOCKS=keys.shape[1], PAGED=paged,
        ROWS=rows_a_tile, BLOCK_M=config.block_m, ROW_TILES=row_tiles, ONE_ROW=plan.max_query_len == 1,
        DTYPE=dtype,
        PRECISION="ieee", STAGES=config.stages, num_warps=config.warps, enable_fp_fusion=False,
    )  # fmt: skip
