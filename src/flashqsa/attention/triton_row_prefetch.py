# mypy: ignore-errors
"""What a program of row attention asks the L2 for while the selection still runs: all that needs no ids."""

import triton
import triton.language as tl

from flashqsa.launching import ask_for


@triton.jit
def _ask_early(
    pair, part, q_ptr, page_table_ptr, positions_ptr, visible_ptr, request_ids_ptr, requests, table_pages, stride_qt,
    stride_qh, stride_pr, Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    SEGMENTS: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Queries of a row, its numbers, and its share of the page table.

    A row is usually of the request of the same number; if it is not, other pages have been asked for.
    """
    LINE: tl.constexpr = 32
    row = (pair // KV_HEADS).to(tl.int64)
    i = tl.arange(0, 128)
    request = tl.minimum(row, requests - 1)
    for first in tl.range(part * 128 * LINE, table_pages, SEGMENTS * 128 * LINE):
        ask_for(page_table_ptr + request * stride_pr + tl.minimum(first + i * LINE, table_pages - 1))
    g = tl.minimum(tl.arange(0, BLOCK_G), Q_HEADS // KV_HEADS - 1) + pair % KV_HEADS * (Q_HEADS // KV_HEADS)
    line = tl.minimum(tl.arange(0, 8) * LINE, HEAD_DIM - 1)
    ask_for(q_ptr + row * stride_qt + g[:, None] * stride_qh + line[None, :])
    one = row + tl.arange(0, 1)
    ask_for(positions_ptr + one)
    ask_for(visible_ptr + one)
    ask_for(request_ids_ptr + one)
