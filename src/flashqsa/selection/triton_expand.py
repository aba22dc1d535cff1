# mypy: ignore-errors
"""Token lists on the GPU: block ids, tail and count of every row in one launch.

Bytes: a row reads K ids and writes K * r + tail + 1 of them.
"""

import triton
import triton.language as tl

from flashqsa.launching import launched_where

COLUMNS = 1024
"""Columns that one program writes."""


@triton.jit(do_not_specialize=["block_counts_ptr", "visible_ptr", "request_ids_ptr", "positions_ptr"])
def _expand_tokens_kernel(
    block_ids_ptr, block_counts_ptr, visible_ptr, request_ids_ptr, positions_ptr, out_ptr, stride_bt, stride_ot,
    TOPK: tl.constexpr, BLOCK_TOKENS: tl.constexpr, TAIL_TOKENS: tl.constexpr, TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    row = (pid // TILES).to(tl.int64)
    column = (pid % TILES) * COLUMNS + tl.arange(0, COLUMNS)
    WIDTH: tl.constexpr = TOPK * BLOCK_TOKENS + TAIL_TOKENS
    live = tl.load(request_ids_ptr + row) >= 0
    count = tl.load(block_counts_ptr + row).to(tl.int64)
    # in 64 bits: without checks nothing bounds the numbers that a selection holds
    tail_start = tl.load(visible_ptr + row).to(tl.int64) * BLOCK_TOKENS
    tail_count = tl.load(positions_ptr + row) + 1 - tail_start
    tail_count = tl.where(live, tl.minimum(tl.maximum(tail_count, 0), TAIL_TOKENS), 0)
    from_blocks = tl.where(live, count * BLOCK_TOKENS, 0)
    counted = from_blocks + tail_count
    unit = tl.minimum(column // BLOCK_TOKENS, TOPK - 1)
    of_block = (column < from_blocks) & (column < WIDTH)
    block = tl.load(block_ids_ptr + row * stride_bt + unit, mask=of_block, other=0)
    token = tl.where(of_block, (block * BLOCK_TOKENS + column % BLOCK_TOKENS).to(tl.int64),
                     tail_start + column - from_blocks)  # fmt: skip
    token = tl.where(column < counted, token, -1).to(tl.int32)
    token = tl.where(column == WIDTH, counted.to(tl.int32), token)
    tl.store(out_ptr + row * stride_ot + column, token, mask=column <= WIDTH)


@launched_where(lambda selection: selection.block_ids.device)
def expand_tokens_triton(selection, plan, out, *, tail_tokens):
    """Fill `out` [T, K * r + tail_tokens + 1] with the token list of every row, checked already.

    Args:
        selection: The selection, row for row of the plan.
        plan: The step.
        out: int32 buffer.
        tail_tokens: Columns of the tail.
    """
    rows, topk = selection.block_ids.shape
    if rows == 0:
        return
    columns = min(COLUMNS, triton.next_power_of_2(out.shape[1]))
    tiles = -(-out.shape[1] // columns)
    _expand_tokens_kernel[(rows * tiles,)](
        selection.block_ids, selection.block_counts, selection.visible_blocks, plan.request_ids, plan.positions, out,
        selection.block_ids.stride(0), out.stride(0), TOPK=topk, BLOCK_TOKENS=plan.block_tokens,
        TAIL_TOKENS=tail_tokens, TILES=tiles, COLUMNS=columns,
        enable_fp_fusion=False,
    )  # fmt: skip
