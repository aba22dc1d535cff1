# mypy: ignore-errors
"""The plan on the GPU: all rows of a step in one launch, and the copies that refill a captured plan.

Some programs compute rows, others copy what the caller handed in to the tensors that a captured plan points at. Rows
are computed from the caller's tensors, never from the copies; a tensor that is the plan's own is copied onto itself.
"""

import torch
import triton
import triton.language as tl

ROWS = 64
"""Rows that one program plans."""

COPIED = 2048
"""Numbers that one program copies."""

NAMES = ("query_starts", "seq_lens", "ring_ids", "first_slots", "first_block_slots")
"""Per-request tensors that a refill copies; the page table is the sixth."""


@triton.jit
def _find_requests(query_starts_ptr, rows, num_requests, STARTS: tl.constexpr):
    """Request of each row: how many requests end at or before it."""
    found = tl.zeros(rows.shape, tl.int32)
    for first in tl.range(0, num_requests, STARTS):
        r = first + tl.arange(0, STARTS)
        ends = tl.load(query_starts_ptr + 1 + r, mask=r < num_requests, other=2147483647)
        found += tl.sum((ends[None, :] <= rows[:, None]).to(tl.int32), 1)
    return found


@triton.jit
def _plan_rows(
    rows, num_rows, num_requests, last_page, table_columns, query_starts_ptr, seq_lens_ptr, page_table_ptr,
    first_slots_ptr, first_block_slots_ptr, ring_ids_ptr, request_ids_ptr, positions_ptr, visible_ptr, slot_ids_ptr,
    closed_ptr, ring_slots_ptr, stride_pr,
    ADDRESSING: tl.constexpr, DERIVED: tl.constexpr, HAS_RINGS: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, RING_TOKENS: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    request = _find_requests(query_starts_ptr, rows, num_requests, STARTS).to(tl.int64)
    inside = (rows < num_rows) & (request < num_requests)
    seq_len = tl.load(seq_lens_ptr + request, mask=inside, other=0).to(tl.int64)
    end = tl.load(query_starts_ptr + 1 + request, mask=inside, other=0).to(tl.int64)
    position = seq_len - end + rows
    live = inside & (seq_len > 0) & (position >= 0)
    position = tl.where(live, position, -1)
    block = position // BLOCK_TOKENS
    closes = live & ((position + 1) % BLOCK_TOKENS == 0)
    slot = tl.full(rows.shape, -1, tl.int64)
    block_slot = slot
    if ADDRESSING == "pages":
        PAGE_BLOCKS: tl.constexpr = PAGE_TOKENS // BLOCK_TOKENS
        column = tl.minimum(position // PAGE_TOKENS, table_columns - 1)
        page = tl.load(page_table_ptr + request * stride_pr + column, mask=live, other=-1)
        placed = live & (page >= 0) & (page <= last_page)
        page = page.to(tl.int64)
        slot = tl.where(placed, page * PAGE_TOKENS + position % PAGE_TOKENS, -1)
        block_slot = tl.where(placed & closes, page * PAGE_BLOCKS + block % PAGE_BLOCKS, -1)
    elif ADDRESSING == "slots":
        first = tl.load(first_slots_ptr + request, mask=live, other=0)
        if DERIVED:
            first_block = _first_block(first, BLOCK_TOKENS)
        else:
            first_block = tl.load(first_block_slots_ptr + request, mask=live, other=0)
        slot = tl.where(live, first + position, -1)
        block_slot = tl.where(closes, first_block + block, -1)
    ring_slot = tl.full(rows.shape, -1, tl.int64)
    if HAS_RINGS:
        ring = tl.load(ring_ids_ptr + request, mask=live, other=-1).to(tl.int64)
        kept = live & (ring >= 0) & (seq_len - position <= RING_TOKENS)
        ring_slot = tl.where(kept, ring * RING_TOKENS + position % RING_TOKENS, -1)
    there = rows < num_rows
    tl.store(request_ids_ptr + rows, tl.where(live, request, -1).to(tl.int32), mask=there)
    tl.store(positions_ptr + rows, position, mask=there)
    tl.store(visible_ptr + rows, tl.where(live, (position + 1) // BLOCK_TOKENS, 0).to(tl.int32), mask=there)
    tl.store(slot_ids_ptr + rows, slot, mask=there)
    tl.store(closed_ptr + rows, block_slot, mask=there)
    tl.store(ring_slots_ptr + rows, ring_slot, mask=there)


@triton.jit
def _first_block(first_slot, BLOCK_TOKENS: tl.constexpr):
    """Block slot of block 0 where only the slot of token 0 is told; rounds down, as torch divides."""
    block = first_slot // BLOCK_TOKENS
    return tl.where(block * BLOCK_TOKENS > first_slot, block - 1, block)


@triton.jit
def _copy(from_ptr, to_ptr, first, count, COPIED: tl.constexpr):
    i = first + tl.arange(0, COPIED)
    tl.store(to_ptr + i, tl.load(from_ptr + i, mask=i < count), mask=i < count)


@triton.jit(do_not_specialize=[
    "query_starts_ptr", "seq_lens_ptr", "page_table_ptr", "first_slots_ptr", "first_block_slots_ptr", "ring_ids_ptr",
    "to_query_starts_ptr", "to_seq_lens_ptr", "to_page_table_ptr", "to_first_slots_ptr", "to_first_block_slots_ptr",
    "to_ring_ids_ptr", "num_rows", "num_requests", "row_programs", "request_programs", "last_page", "table_columns",
    "stride_pr", "stride_tr",
])  # fmt: skip
def _plan_step_kernel(
    query_starts_ptr, seq_lens_ptr, page_table_ptr, first_slots_ptr, first_block_slots_ptr, ring_ids_ptr,
    to_query_starts_ptr, to_seq_lens_ptr, to_page_table_ptr, to_first_slots_ptr, to_first_block_slots_ptr,
    to_ring_ids_ptr, request_ids_ptr, positions_ptr, visible_ptr, slot_ids_ptr, closed_ptr, ring_slots_ptr,
    num_rows, num_requests, row_programs, request_programs, last_page, table_columns, stride_pr, stride_tr,
    ADDRESSING: tl.constexpr, DERIVED: tl.constexpr, HAS_RINGS: tl.constexpr, PAGE_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, RING_TOKENS: tl.constexpr, ROWS: tl.constexpr, STARTS: tl.constexpr,
    COPIED: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    if pid < row_programs:
        _plan_rows(
            pid * ROWS + tl.arange(0, ROWS), num_rows, num_requests, last_page, table_columns, query_starts_ptr,
            seq_lens_ptr, page_table_ptr, first_slots_ptr, first_block_slots_ptr, ring_ids_ptr, request_ids_ptr,
            positions_ptr, visible_ptr, slot_ids_ptr, closed_ptr, ring_slots_ptr, stride_pr, ADDRESSING, DERIVED,
            HAS_RINGS, PAGE_TOKENS, BLOCK_TOKENS, RING_TOKENS, STARTS,
        )  # fmt: skip
    elif pid < row_programs + request_programs:
        first = (pid - row_programs) * COPIED
        _copy(query_starts_ptr, to_query_starts_ptr, first, num_requests + 1, COPIED)
        _copy(seq_lens_ptr, to_seq_lens_ptr, first, num_requests, COPIED)
        if HAS_RINGS:
            _copy(ring_ids_ptr, to_ring_ids_ptr, first, num_requests, COPIED)
        if ADDRESSING == "slots":
            _copy(first_slots_ptr, to_first_slots_ptr, first, num_requests, COPIED)
            if DERIVED:
                r = first + tl.arange(0, COPIED)
                slot = tl.load(first_slots_ptr + r, mask=r < num_requests, other=0)
                tl.store(to_first_block_slots_ptr + r, _first_block(slot, BLOCK_TOKENS), mask=r < num_requests)
            else:
                _copy(first_block_slots_ptr, to_first_block_slots_ptr, first, num_requests, COPIED)
    else:
        tiles = (table_columns + COPIED - 1) // COPIED
        tile = pid - row_programs - request_programs
        request = (tile // tiles).to(tl.int64)
        _copy(page_table_ptr + request * stride_pr, to_page_table_ptr + request * stride_tr, (tile % tiles) * COPIED,
              table_columns, COPIED)  # fmt: skip


def plan_step_triton(query_starts, seq_lens, page_table, out, *, num_pages, first_slots, first_block_slots, ring_ids):
    """Fill a plan's tensors from a step's, checked already: per-row ones, and copies of those that are not its own.

    Args:
        query_starts: As in `plan_step`, like all others; shapes are those of the plan.
        seq_lens: [R].
        page_table: [R, pages] or None.
        out: The plan to fill; its page size, block size and ring size hold.
        num_pages: Pages of the pool, or None.
        first_slots: [R] or None.
        first_block_slots: [R], or None for ``first_slots // block_tokens``.
        ring_ids: [R] or None.
    """
    given = {
        "query_starts": query_starts, "seq_lens": seq_lens, "ring_ids": ring_ids, "first_slots": first_slots,
        "first_block_slots": first_block_slots,
    }  # fmt: skip
    derived = first_slots is not None and first_block_slots is None
    requests, columns = out.num_requests, 0 if page_table is None else page_table.shape[1]
    copies = derived or any(given[name] is not getattr(out, name) for name in NAMES)
    row_programs = -(-out.num_rows // ROWS)
    request_programs = -(-(requests + 1) // COPIED) if copies else 0
    table_programs = 0 if page_table is None or page_table is out.page_table else requests * -(-columns // COPIED)
    grid = row_programs + request_programs + table_programs
    if grid == 0:
        return
    if requests == 0 or (page_table is not None and columns == 0):
        addressing = "nowhere"
    else:
        addressing = "slots" if page_table is None else "pages"
    unused = query_starts  # an address for what is not there
    sources = [given[name] if given[name] is not None else unused for name in NAMES]
    targets = [getattr(out, name) if getattr(out, name) is not None else unused for name in NAMES]
    starts, lens, rings, slots, block_slots = sources
    to_starts, to_lens, to_rings, to_slots, to_block_slots = targets
    _plan_step_kernel[(grid,)](
        starts, lens, page_table if columns else unused, slots, block_slots, rings,
        to_starts, to_lens, out.page_table if columns else unused, to_slots, to_block_slots, to_rings,
        out.request_ids, out.positions, out.visible_blocks, out.slot_ids, out.closed_block_slot_ids, out.ring_slot_ids,
        out.num_rows, requests, row_programs, request_programs, torch.iinfo(torch.int32).max if num_pages is None
        else num_pages - 1, columns, page_table.stride(0) if columns else 0, out.page_table.stride(0) if columns else 0,
        ADDRESSING=addressing, DERIVED=derived, HAS_RINGS=ring_ids is not None, PAGE_TOKENS=out.page_tokens or 1,
        BLOCK_TOKENS=out.block_tokens, RING_TOKENS=out.ring_tokens or 1, ROWS=ROWS,
        STARTS=16 if requests <= 16 else 256, COPIED=COPIED, enable_fp_fusion=False,
    )  # fmt: skip
