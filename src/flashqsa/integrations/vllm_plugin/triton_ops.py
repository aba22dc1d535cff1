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


@triton.jit
def _floor_divided(x, DIVISOR: tl.constexpr):
    """Rounded down, as torch divides; Triton rounds to zero."""
    quotient = x // DIVISOR
    return tl.where(quotient * DIVISOR > x, quotient - 1, quotient)


@triton.jit
def _ring_tile(
    state_ptr, block, num_blocks, stride_bp, stride_bs,
    RING_TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK_RING: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Addresses of a block's raw keys in vLLM's cache, their places in a ring of their own, and which of them exist."""
    slot, d = tl.arange(0, BLOCK_RING)[:, None], tl.arange(0, BLOCK_D)[None, :]
    block = block + tl.zeros([1, 1], tl.int64)
    there = (slot < RING_TOKENS) & (d < DIM) & (block >= 0) & (block < num_blocks)
    return state_ptr + block * stride_bp + slot.to(tl.int64) * stride_bs + d, slot * DIM + d, there


@triton.jit
def _plan_prepare_rows(
    row, num_rows, num_requests, starts_ptr, logical_ptr, slots_ptr, table_ptr, request_ids_ptr, visible_ptr,
    ring_slots_ptr, stride_lt, stride_st, stride_tr,
    BLOCK_TOKENS: tl.constexpr, COPIES: tl.constexpr, RING_TOKENS: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    there = row < num_rows
    request = tl.zeros(row.shape, tl.int32)
    for first in tl.range(0, num_requests, STARTS):
        r = first + tl.arange(0, STARTS)
        ends = tl.load(starts_ptr + 1 + r, mask=r < num_requests, other=2147483647)
        request += tl.sum((ends[None, :] <= row[:, None]).to(tl.int32), 1)
    request = tl.minimum(request, num_requests - 1)
    logical = tl.load(logical_ptr + row.to(tl.int64) * stride_lt, mask=there, other=-1)
    tl.store(request_ids_ptr + row, tl.where(logical < 0, -1, request), mask=there)
    tl.store(visible_ptr + row, _floor_divided(logical + 1, BLOCK_TOKENS).to(tl.int32), mask=there)
    if COPIES:
        slot = tl.load(slots_ptr + row.to(tl.int64) * stride_st, mask=there, other=-1)
        block = tl.load(table_ptr + request.to(tl.int64) * stride_tr, mask=there, other=-1)
        inside = request.to(tl.int64) * RING_TOKENS + logical - _floor_divided(logical, RING_TOKENS) * RING_TOKENS
        tl.store(ring_slots_ptr + row, tl.where((slot >= 0) & (block > 0), inside, -1), mask=there)


@triton.jit
def _plan_prepare_request(
    request, num_rows, num_blocks, starts_ptr, logical_ptr, table_ptr, state_ptr, seq_lens_ptr, ring_ids_ptr,
    ring_keys_ptr, ring_positions_ptr, stride_lt, stride_tr, stride_bp, stride_bs,
    COPIES: tl.constexpr, RING_TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK_RING: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Its tokens and its ring; of a copied ring the raw keys and their positions, the last ones before the step."""
    start = tl.load(starts_ptr + request).to(tl.int64)
    rows = tl.load(starts_ptr + request + 1).to(tl.int64) - start
    last_row = tl.minimum(tl.maximum(start + rows - 1, 0), num_rows - 1)
    end = tl.where(rows > 0, tl.load(logical_ptr + last_row * stride_lt) + 1, 0)
    block = tl.load(table_ptr + request.to(tl.int64) * stride_tr).to(tl.int64)
    tl.store(seq_lens_ptr + request, end.to(tl.int32))
    if COPIES:
        tl.store(ring_ids_ptr + request, tl.where(block > 0, request, -1))
        from_ptr, at, there = _ring_tile(state_ptr, tl.maximum(block, 0), num_blocks, stride_bp, stride_bs,
                                         RING_TOKENS, DIM, BLOCK_RING, BLOCK_D)  # fmt: skip
        ring = request.to(tl.int64) * RING_TOKENS
        tl.store(ring_keys_ptr + ring * DIM + at, tl.load(from_ptr, mask=there), mask=there)
        slot = tl.arange(0, BLOCK_RING)
        last = tl.maximum(end - rows, 0) - 1
        behind = last - slot
        position = tl.maximum(last - (behind - _floor_divided(behind, RING_TOKENS) * RING_TOKENS), 0)
        for axis in tl.static_range(3):
            tl.store(ring_positions_ptr + (ring + slot) * 3 + axis, position, mask=slot < RING_TOKENS)
    else:
        tl.store(ring_ids_ptr + request, tl.where(block > 0, block, -1).to(tl.int32))


@triton.jit(do_not_specialize=[
    "starts_ptr", "logical_ptr", "slots_ptr", "table_ptr", "state_ptr", "request_ids_ptr", "visible_ptr",
    "ring_slots_ptr", "seq_lens_ptr", "ring_ids_ptr", "ring_keys_ptr", "ring_positions_ptr", "num_rows",
    "num_requests", "row_programs", "num_blocks", "stride_lt", "stride_st", "stride_tr",
])  # fmt: skip
def _plan_prepare_kernel(
    starts_ptr, logical_ptr, slots_ptr, table_ptr, state_ptr, request_ids_ptr, visible_ptr, ring_slots_ptr,
    seq_lens_ptr, ring_ids_ptr, ring_keys_ptr, ring_positions_ptr, num_rows, num_requests, row_programs, num_blocks,
    stride_lt, stride_st, stride_tr, stride_bp, stride_bs,
    BLOCK_TOKENS: tl.constexpr, COPIES: tl.constexpr, RING_TOKENS: tl.constexpr, DIM: tl.constexpr,
    BLOCK_RING: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STARTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Some programs plan rows, the others a request each."""
    wait_for_previous(OVERLAP)
    pid = tl.program_id(0)
    if pid < row_programs:
        _plan_prepare_rows(
            pid * ROWS + tl.arange(0, ROWS), num_rows, num_requests, starts_ptr, logical_ptr, slots_ptr, table_ptr,
            request_ids_ptr, visible_ptr, ring_slots_ptr, stride_lt, stride_st, stride_tr, BLOCK_TOKENS, COPIES,
            RING_TOKENS, STARTS,
        )  # fmt: skip
    else:
        _plan_prepare_request(
            pid - row_programs, num_rows, num_blocks, starts_ptr, logical_ptr, table_ptr, state_ptr, seq_lens_ptr,
            ring_ids_ptr, ring_keys_ptr, ring_positions_ptr, stride_lt, stride_tr, stride_bp, stride_bs, COPIES,
            RING_TOKENS, DIM, BLOCK_RING, BLOCK_D,
        )  # fmt: skip


@triton.jit(do_not_specialize=["table_ptr", "state_ptr", "ring_keys_ptr", "num_blocks", "stride_tr"])
def _close_rings_kernel(
    table_ptr, state_ptr, ring_keys_ptr, num_blocks, stride_tr, stride_bp, stride_bs,
    RING_TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK_RING: tl.constexpr, BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A request a program; block 0 belongs to nobody."""
    wait_for_previous(OVERLAP)
    request = tl.program_id(0).to(tl.int64)
    block = tl.load(table_ptr + request * stride_tr).to(tl.int64)
    to_ptr, at, there = _ring_tile(state_ptr, block, num_blocks, stride_bp, stride_bs, RING_TOKENS, DIM, BLOCK_RING,
                                   BLOCK_D)  # fmt: skip
    there = there & (block + tl.zeros([1, 1], tl.int64) > 0)
    tl.store(to_ptr, tl.load(ring_keys_ptr + request * (RING_TOKENS * DIM) + at, mask=there), mask=there)


def _ring_options(state_cache, key_dim):
    ring_tokens = state_cache.shape[1]
    return {
        "RING_TOKENS": ring_tokens, "DIM": key_dim, "BLOCK_RING": triton.next_power_of_2(ring_tokens),
        "BLOCK_D": triton.next_power_of_2(key_dim), "enable_fp_fusion": False, **overlapping(state_cache.device),
    }  # fmt: skip


@launched_where(lambda logical_positions: logical_positions.device)
def plan_prepare_triton(
    logical_positions, query_starts, state_slots, state_block_table, state_cache, *, key_dim, block_tokens, copies
):
    """Tensors of a preparation's plan, by name; with them `ring_keys` and `ring_positions` where rings are copied.

    Args:
        logical_positions: [T] int64, -1 for padding; T at least 1.
        query_starts: [R + 1] int32 from 0; R at least 1.
        state_slots: [T] int64, -1 where no raw key is kept.
        state_block_table: [>= R, >= 1] int32.
        state_cache: [blocks, ring_tokens, 1, width].
        key_dim: Dimension of a raw key.
        block_tokens: Tokens of a block.
        copies: Whether the requests' rings are copied and told their positions; else they are vLLM's blocks.
    """
    rows, requests, device = logical_positions.shape[0], query_starts.shape[0] - 1, logical_positions.device
    ring = (requests if copies else 0, state_cache.shape[1])
    plan = carve(
        device, ring_slot_ids=(rows if copies else 0, torch.int64), request_ids=(rows, torch.int32),
        visible_blocks=(rows, torch.int32), seq_lens=(requests, torch.int32), ring_ids=(requests, torch.int32),
        ring_positions=(ring[0] * ring[1] * 3, torch.int64), ring_keys=(ring[0] * ring[1] * key_dim, state_cache.dtype),
    )  # fmt: skip
    row_programs = triton.cdiv(rows, 64)
    state, keys = (x.view(INTEGERS[x.element_size()]) for x in (state_cache, plan["ring_keys"]))
    _plan_prepare_kernel[(row_programs + requests,)](
        query_starts, logical_positions, state_slots, state_block_table, state, plan["request_ids"],
        plan["visible_blocks"], plan["ring_slot_ids"], plan["seq_lens"], plan["ring_ids"], keys,
        plan["ring_positions"], rows, requests, row_programs, state.shape[0], logical_positions.stride(0),
        state_slots.stride(0), state_block_table.stride(0), *state.stride()[:2],
        BLOCK_TOKENS=block_tokens, COPIES=copies, ROWS=64, STARTS=16 if requests <= 16 else 256,
        **_ring_options(state_cache, key_dim),
    )  # fmt: skip
    plan["ring_positions"] = plan["ring_positions"].view(*ring, 3)
    plan["ring_keys"] = plan["ring_keys"].view(*ring, key_dim)
    if not copies:
        plan["ring_slot_ids"] = state_slots
    return plan


@launched_where(lambda ring_keys: ring_keys.device)
def close_rings_triton(ring_keys, state_block_table, state_cache):
    """Write copied rings back into vLLM's cache.

    Args:
        ring_keys: [R, ring_tokens, Di] contiguous.
        state_block_table: [>= R, >= 1] int32, 0 and less for requests without a ring.
        state_cache: [blocks, ring_tokens, 1, width].
    """
    state, keys = (x.view(INTEGERS[x.element_size()]) for x in (state_cache, ring_keys))
    _close_rings_kernel[(keys.shape[0],)](
        state_block_table, state, keys, state.shape[0], state_block_table.stride(0), *state.stride()[:2],
        **_ring_options(state_cache, keys.shape[2]),
    )  # fmt: skip
