# mypy: ignore-errors
"""What vLLM's operators do beside the stages, on the GPU: one launch each, nothing read on the host.

A graph is replayed with other values in the same tensors, so every kernel takes values from the device and sizes alone
from the host. The torch forms in `ops.py` are the definition; every kernel gives their bits.
"""

import torch
import triton
import triton.language as tl

from flashqsa.launching import launched_where, overlapping, wait_for_previous

STORED = 1024
"""Numbers that one program stores at most."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers of as many bytes: what is only moved is moved as bits."""


@triton.jit(do_not_specialize=["slots_ptr", "rows_ptr", "cache_ptr", "num_rows", "num_slots", "stride_st"])
def _store_cache_rows_kernel(
    cache_ptr, slots_ptr, rows_ptr, num_rows, num_slots, stride_cp, stride_cs, stride_cw, stride_st, stride_rt,
    stride_rw,
    WIDTH: tl.constexpr, PAGE_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    pid = tl.program_id(0)
    row = (pid // TILES).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = ((pid % TILES) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    slot = tl.load(slots_ptr + row * stride_st, mask=row < num_rows, other=-1).to(tl.int64)
    written = ((slot >= 0) & (slot < num_slots))[:, None] & (column < WIDTH)[None, :]
    x = tl.load(rows_ptr + (row * stride_rt)[:, None] + (column * stride_rw)[None, :], mask=written)
    at = slot // PAGE_ROWS * stride_cp + slot % PAGE_ROWS * stride_cs
    tl.store(cache_ptr + at[:, None] + (column * stride_cw)[None, :], x, mask=written)


@launched_where(lambda pages: pages.device)
def store_cache_rows_triton(pages, slot_ids, rows):
    """Write rows at slots; negative ones and those beyond the pages write nothing.

    Args:
        pages: [P, page_rows, width] of any strides.
        slot_ids: [T] integer; of rows with the same slot any may stay, in part.
        rows: [T, width] in the dtype of `pages`, of any strides.
    """
    num_rows, width = rows.shape
    if rows.numel() == 0 or pages.numel() == 0:
        return
    integers = INTEGERS[pages.element_size()]
    pages, rows = pages.view(integers), rows.view(integers)
    columns = min(STORED, triton.next_power_of_2(width))
    tile = STORED // columns
    _store_cache_rows_kernel[(-(-num_rows // tile) * -(-width // columns),)](
        pages, slot_ids, rows, num_rows, pages.shape[0] * pages.shape[1], *pages.stride(), slot_ids.stride(0),
        *rows.stride(),
        WIDTH=width, PAGE_ROWS=pages.shape[1], ROWS=tile, COLUMNS=columns, enable_fp_fusion=False,
        **overlapping(pages.device),
    )  # fmt: skip
