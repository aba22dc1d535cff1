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


def carve(device, **numbers):
    """Tensors of one allocation, each from a multiple of 16 bytes on; not filled.

    Args:
        device: Where.
        numbers: By name, how many numbers of which dtype.
    """
    words, places = 0, {}
    for name, (count, dtype) in numbers.items():
        places[name] = words
        words += -(-count * dtype.itemsize // 16) * 2
    whole = torch.empty(words, dtype=torch.int64, device=device)
    return {name: whole[places[name] :].view(dtype)[:count] for name, (count, dtype) in numbers.items()}


@triton.jit(do_not_specialize=[
    "starts_ptr", "visible_ptr", "request_ids_ptr", "positions_ptr", "nowhere_ptr", "to_starts_ptr", "seq_lens_ptr",
    "num_rows", "num_requests", "query_len", "stride_vt",
])  # fmt: skip
def _plan_select_kernel(
    starts_ptr, visible_ptr, request_ids_ptr, positions_ptr, nowhere_ptr, to_starts_ptr, seq_lens_ptr, num_rows,
    num_requests, query_len, stride_vt,
    HAS_STARTS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A request a program: where its first row lies, from what its rows see; then its rows."""
    wait_for_previous(OVERLAP)
    request = tl.program_id(0)
    if HAS_STARTS:
        zero = tl.load(starts_ptr)
        start = tl.load(starts_ptr + request) - zero
        end = tl.load(starts_ptr + request + 1) - zero
    else:
        start = request * query_len
        end = start + query_len
    # rows past the end count as the last request's
    stop = tl.where(request == num_requests - 1, num_rows, tl.minimum(end, num_rows))
    begin, most = tl.zeros([ROWS], tl.int64), tl.zeros([ROWS], tl.int32)
    for at in tl.range(start, stop, ROWS):
        row = at + tl.arange(0, ROWS)
        visible = tl.load(visible_ptr + row.to(tl.int64) * stride_vt, mask=row < stop, other=0)
        least = visible.to(tl.int64) * BLOCK_TOKENS - 1 - (row - start)
        begin = tl.maximum(begin, tl.where(row < stop, least, 0))
        most = tl.maximum(most, visible)
    first = tl.max(begin, 0)
    live = tl.max(most, 0) > 0
    for at in tl.range(start, stop, ROWS):
        row = at + tl.arange(0, ROWS)
        position = tl.where(live, first + (row - start), -1)
        tl.store(request_ids_ptr + row, tl.zeros([ROWS], tl.int32) + tl.where(live, request, -1), mask=row < stop)
        tl.store(positions_ptr + row, position, mask=row < stop)
        tl.store(nowhere_ptr + row, tl.full([ROWS], -1, tl.int64), mask=row < stop)
    tl.store(seq_lens_ptr + request, tl.where(live, first + (end - start), 0).to(tl.int32))
    tl.store(to_starts_ptr + request, start)
    tl.store(to_starts_ptr + num_requests, end, mask=request == num_requests - 1)


@launched_where(lambda visible_blocks: visible_blocks.device)
def plan_select_triton(visible_blocks, query_starts, *, requests, query_len, block_tokens):
    """Tensors of a selection's plan, by name; `nowhere` holds -1 for every row.

    Args:
        visible_blocks: [T] int32.
        query_starts: [R + 1] int32 from any number on, or None where every request has `query_len` rows.
        requests: R, at least 1.
        query_len: Bound on the rows of a request.
        block_tokens: Tokens of a block.
    """
    rows, device = visible_blocks.shape[0], visible_blocks.device
    plan = carve(
        device, positions=(rows, torch.int64), nowhere=(rows, torch.int64), request_ids=(rows, torch.int32),
        query_starts=(requests + 1, torch.int32), seq_lens=(requests, torch.int32),
    )  # fmt: skip
    few = query_len <= 32
    _plan_select_kernel[(requests,)](
        visible_blocks if query_starts is None else query_starts, visible_blocks, plan["request_ids"],
        plan["positions"], plan["nowhere"], plan["query_starts"], plan["seq_lens"], rows, requests, query_len,
        visible_blocks.stride(0),
        HAS_STARTS=query_starts is not None, BLOCK_TOKENS=block_tokens, ROWS=32 if few else 1024,
        num_warps=1 if few else 4, enable_fp_fusion=False, **overlapping(device),
    )  # fmt: skip
    return plan


@triton.jit(do_not_specialize=[
    "positions_ptr", "visible_ptr", "request_ids_ptr", "nowhere_ptr", "starts_ptr", "seq_lens_ptr", "to_visible_ptr",
    "counts_ptr", "num_rows", "topk", "stride_pt", "stride_vt",
])  # fmt: skip
def _plan_expand_kernel(
    positions_ptr, visible_ptr, request_ids_ptr, nowhere_ptr, starts_ptr, seq_lens_ptr, to_visible_ptr, counts_ptr,
    num_rows, topk, stride_pt, stride_vt,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Every row a request of its own."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    position = tl.load(positions_ptr + row.to(tl.int64) * stride_pt, mask=there, other=-1)
    visible = tl.load(visible_ptr + row.to(tl.int64) * stride_vt, mask=there, other=0)
    visible = tl.where(position >= 0, visible, 0)
    tl.store(request_ids_ptr + row, tl.where(position >= 0, row, -1), mask=there)
    tl.store(to_visible_ptr + row, visible, mask=there)
    tl.store(counts_ptr + row, tl.minimum(visible, topk), mask=there)
    tl.store(seq_lens_ptr + row, (position + 1).to(tl.int32), mask=there)
    tl.store(nowhere_ptr + row, tl.full([ROWS], -1, tl.int64), mask=there)
    tl.store(starts_ptr + row, row, mask=row <= num_rows)


@launched_where(lambda visible_blocks: visible_blocks.device)
def plan_expand_triton(visible_blocks, positions, *, topk):
    """Tensors of an expansion's plan and of its selection, by name.

    Args:
        visible_blocks: [T] int32.
        positions: [T] int64, -1 for padding.
        topk: Blocks that a row selects at most.
    """
    rows, device = visible_blocks.shape[0], visible_blocks.device
    names = ("request_ids", "seq_lens", "visible_blocks", "block_counts")
    plan = carve(
        device, nowhere=(rows, torch.int64), query_starts=(rows + 1, torch.int32),
        **{name: (rows, torch.int32) for name in names},
    )  # fmt: skip
    _plan_expand_kernel[(triton.cdiv(rows + 1, 256),)](
        positions, visible_blocks, plan["request_ids"], plan["nowhere"], plan["query_starts"], plan["seq_lens"],
        plan["visible_blocks"], plan["block_counts"], rows, topk, positions.stride(0), visible_blocks.stride(0),
        ROWS=256, enable_fp_fusion=False, **overlapping(device),
    )  # fmt: skip
    return plan


@triton.jit(do_not_specialize=[
    "ids_ptr", "requests_ptr", "request_ids_ptr", "last_ptr", "positions_ptr", "nowhere_ptr", "visible_ptr",
    "num_requests", "width", "stride_it", "stride_rt",
])  # fmt: skip
def _last_tokens_kernel(
    ids_ptr, requests_ptr, request_ids_ptr, last_ptr, positions_ptr, nowhere_ptr, visible_ptr, num_requests, width,
    stride_it, stride_rt,
    COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A row a program: whether it attends anything, and the last token that it attends."""
    wait_for_previous(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    list_ptr = ids_ptr + row * stride_it
    count = tl.load(list_ptr + width)
    request = tl.load(requests_ptr + row * stride_rt)
    live = (count > 0) & (request >= 0) & (request < num_requests)
    last = tl.full([COLUMNS], -1, tl.int32)
    for first in tl.range(0, tl.where(live, tl.minimum(count, width), 0), COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        last = tl.maximum(last, tl.load(list_ptr + column, mask=(column < count) & (column < width), other=-1))
    tl.store(last_ptr + row, tl.max(last, 0))
    tl.store(request_ids_ptr + row, tl.where(live, request, -1))
    tl.store(positions_ptr + row, -1)  # a live row's comes from its request, in the next launch
    tl.store(nowhere_ptr + row, -1)
    tl.store(visible_ptr + row, 0)


@triton.jit(do_not_specialize=[
    "request_ids_ptr", "last_ptr", "positions_ptr", "starts_ptr", "seq_lens_ptr", "num_rows",
])  # fmt: skip
def _place_rows_kernel(
    request_ids_ptr, last_ptr, positions_ptr, starts_ptr, seq_lens_ptr, num_rows,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A request a program: the least positions at which no row comes before a token that it attends."""
    wait_for_previous(OVERLAP)
    own = tl.program_id(0)
    before = tl.zeros([ROWS], tl.int32)
    first, end = tl.full([ROWS], 2147483647, tl.int32), tl.zeros([ROWS], tl.int32)
    ahead = tl.full([ROWS], -(1 << 40), tl.int64)
    for at in tl.range(0, num_rows, ROWS):
        row = at + tl.arange(0, ROWS)
        request = tl.load(request_ids_ptr + row, mask=row < num_rows, other=-1)
        last = tl.load(last_ptr + row, mask=row < num_rows, other=-1).to(tl.int64)
        mine = request == own
        before += ((request >= 0) & (request <= own)).to(tl.int32)
        first = tl.minimum(first, tl.where(mine, row, 2147483647))
        end = tl.maximum(end, tl.where(mine, row + 1, 0))
        ahead = tl.maximum(ahead, tl.where(mine, last - row, -(1 << 40)))
    first_row, end_row = tl.min(first, 0), tl.max(end, 0)
    begin = tl.maximum(tl.max(ahead, 0) + first_row, 0)
    for at in tl.range(first_row, end_row, ROWS):
        row = at + tl.arange(0, ROWS)
        mine = (row < end_row) & (tl.load(request_ids_ptr + row, mask=row < end_row, other=-1) == own)
        tl.store(positions_ptr + row, begin + (row - first_row), mask=mine)
    tl.store(seq_lens_ptr + own, tl.where(end_row > 0, begin + (end_row - first_row), 0).to(tl.int32))
    tl.store(starts_ptr + own + 1, tl.sum(before, 0))
    tl.store(starts_ptr, 0, mask=own == 0)


@launched_where(lambda token_ids: token_ids.device)
def plan_attend_triton(token_ids, token_to_req, *, requests):
    """Tensors of the plan of an attention over token lists, by name, in two launches: rows, then requests.

    Args:
        token_ids: [T, W + 1] int32, W at least 1, counts in the last column.
        token_to_req: [T] int32.
        requests: R, at least 1.
    """
    rows, width = token_ids.shape[0], token_ids.shape[1] - 1
    device = token_ids.device
    plan = carve(
        device, positions=(rows, torch.int64), nowhere=(rows, torch.int64), request_ids=(rows, torch.int32),
        visible_blocks=(rows, torch.int32), last=(rows, torch.int32), query_starts=(requests + 1, torch.int32),
        seq_lens=(requests, torch.int32),
    )  # fmt: skip
    options = {"enable_fp_fusion": False, **overlapping(device)}
    _last_tokens_kernel[(rows,)](
        token_ids, token_to_req, plan["request_ids"], plan["last"], plan["positions"], plan["nowhere"],
        plan["visible_blocks"], requests, width, token_ids.stride(0), token_to_req.stride(0), COLUMNS=1024, **options,
    )  # fmt: skip
    _place_rows_kernel[(requests,)](
        plan["request_ids"], plan["last"], plan["positions"], plan["query_starts"], plan["seq_lens"], rows,
        ROWS=256 if rows <= 256 else 1024, **options,
    )  # fmt: skip
    return plan
