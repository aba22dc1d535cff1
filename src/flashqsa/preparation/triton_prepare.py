# mypy: ignore-errors
"""Preparation on the GPU, one launch: every program does one kind of work, told apart by its number.

- *request* programs, one a request: pool the block that began before the step, then write the request's ring;
- *block* programs, some rows each: pool the blocks whose members are all rows of the step;
- *key* programs, some key heads of a row each: norm, rotate and write K, copy V;
- *index* programs and *query* programs, some heads of a row each: norm and rotate queries (and copy gates if asked to).

Old ring rows are read while new ones are written, in one launch. There is no race, because both belong to the request:
only its own program reads its ring (a step closes at most one block that began before it) and only that program writes
it, after a barrier. Blocks of the step's own rows read no ring. No other memory is read by one program and written by
another.

Bytes: a row reads and writes Hq * D queries, Hkv * D keys and values, Hi * Di index queries; 26 KiB at released shapes.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashqsa.checks import FP8
from flashqsa.launching import launched_where, overlapping, wait_for_previous
from flashqsa.preparation.triton_heads import (
    divided,
    load_angles,
    load_heads,
    load_positions,
    norm_heads,
    rotate,
    store_heads,
)

FEW_ROWS = 1024
TILE_ELEMENTS = (256, 512)
"""Elements of the heads that a program prepares at once at most, up to FEW_ROWS rows and above.

A program is one warp in which every head lies alike: its sum has the same bits in every tile.
"""

MOST_PROGRAMS = (2048, 8192)
"""Query programs up to which a row's heads are shared among several, up to FEW_ROWS rows and above."""

UNROLLED_MEMBERS = 8
"""Members of a block up to which pooling asks for all of them at once."""

BLOCK_ROWS = (1, 4)
"""Rows that one program looks at for blocks to pool, up to FEW_ROWS rows and above."""

MOST_RING_ROWS = 4
"""Ring rows that a request's program writes at once."""


@triton.jit
def _live_rows(request_ids_ptr, rows, there, num_requests):
    """Which rows belong to a request: padding has none, and an id out of range counts as none."""
    request = tl.load(request_ids_ptr + rows, mask=there, other=-1)
    return request, (request >= 0) & (request < num_requests)


@triton.jit
def _page_offsets(slot, num_pages, stride_p, stride_s, PAGE_ROWS: tl.constexpr):
    """Offset of each slot in a paged tensor, and whether it is one to write."""
    page = slot // PAGE_ROWS
    return page * stride_p + (slot % PAGE_ROWS) * stride_s, (slot >= 0) & (page < num_pages)


@triton.jit
def _member(
    member, first_row, start, index_ptr, stride_it, ring_ptr, ring_at, began, stride_rs, live,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    RING_TOKENS: tl.constexpr, FROM_RING: tl.constexpr,
):  # fmt: skip
    """One raw key of each block, fp32: from the step's rows, or from the ring where it is older than the step."""
    row = first_row + member
    in_step = live & (row >= start)
    x, partner = load_heads(index_ptr, row * stride_it, in_step, DIM, HALF, BLOCK_D)
    if FROM_RING:
        at = ring_at + (began + member) % RING_TOKENS * stride_rs
        old, old_partner = load_heads(ring_ptr, at, live & (row < start), DIM, HALF, BLOCK_D)
        x = tl.where(in_step[:, None], x, old)
        partner = tl.where(in_step[:, None], partner, old_partner)
    return x.to(tl.float32), partner.to(tl.float32)


@triton.jit
def _mean_of_members(
    first_row, start, index_ptr, stride_it, ring_ptr, ring_at, began, stride_rs, live,
    BLOCK_TOKENS: tl.constexpr, UNROLLED: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
    RING_TOKENS: tl.constexpr, FROM_RING: tl.constexpr,
):  # fmt: skip
    """Mean of the raw keys of blocks, summed in the order of their tokens in fp32, rounded to the model dtype."""
    dtype: tl.constexpr = index_ptr.dtype.element_ty
    x, partner = _member(0, first_row, start, index_ptr, stride_it, ring_ptr, ring_at, began, stride_rs, live, DIM,
    HALF,
                         BLOCK_D, RING_TOKENS, FROM_RING)  # fmt: skip
    if UNROLLED:
        for member in tl.static_range(1, BLOCK_TOKENS):
            a, b = _member(member, first_row, start, index_ptr, stride_it, ring_ptr, ring_at, began, stride_rs, live,
                           DIM, HALF, BLOCK_D, RING_TOKENS, FROM_RING)  # fmt: skip
            x, partner = x + a, partner + b
    else:
        for member in tl.range(1, BLOCK_TOKENS):
            a, b = _member(member, first_row, start, index_ptr, stride_it, ring_ptr, ring_at, began, stride_rs, live,
                           DIM, HALF, BLOCK_D, RING_TOKENS, FROM_RING)  # fmt: skip
            x, partner = x + a, partner + b
    return divided(x, BLOCK_TOKENS).to(dtype), divided(partner, BLOCK_TOKENS).to(dtype)


@triton.jit
def _store_block_keys(
    x, partner, cos, sin, keys_at, live, weight_ptr, eps, keys_ptr,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the means of blocks, by the angles of their first tokens, and store them."""
    x, partner = norm_heads(x, partner, weight_ptr, eps, True, DIM, HALF, BLOCK_D)
    store_heads(keys_ptr, keys_at, live, rotate(x, partner, cos, sin), DIM, BLOCK_D)


@triton.jit
def _close_blocks(
    tile, num_rows, num_requests, request_ids_ptr, closed_ptr, query_starts_ptr, index_ptr, stride_it, keys_ptr,
    num_block_pages, stride_bp, stride_bs, positions_ptr, stride_pa, stride_pt, weight_ptr, eps, table_ptr,
    stride_table, last_position,
    ROWS: tl.constexpr, PAGE_BLOCKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, UNROLLED: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, AXES: tl.constexpr,
    HEIGHTS: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Pool the blocks that some rows close and whose members are all rows of the step."""
    rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = rows < num_rows
    request, live = _live_rows(request_ids_ptr, rows, there, num_requests)
    slot = tl.load(closed_ptr + rows, mask=there, other=-1)
    start = tl.load(query_starts_ptr + request, mask=live, other=0)
    at, placed = _page_offsets(slot, num_block_pages, stride_bp, stride_bs, PAGE_BLOCKS)
    first_row = rows - (BLOCK_TOKENS - 1)
    closes = live & placed & (first_row >= tl.maximum(start, 0))
    if tl.max(closes.to(tl.int32), 0) > 0:
        x, partner = _mean_of_members(
            first_row, start, index_ptr, stride_it, index_ptr, at, at, 0, closes, BLOCK_TOKENS, UNROLLED, DIM, HALF,
            BLOCK_D, 1, False,
        )  # fmt: skip
        time, height, width = load_positions(positions_ptr, first_row * stride_pt, stride_pa, closes, AXES)
        cos, sin = load_angles(table_ptr, stride_table, last_position, time, height, width, closes, HALF, BLOCK_D,
                               HEIGHTS, WIDTHS)  # fmt: skip
        _store_block_keys(x, partner, cos, sin, at, closes, weight_ptr, eps, keys_ptr, DIM, HALF, BLOCK_D)


@triton.jit
def _close_open_block(
    start, end, position, row_time, row_height, row_width, own, ring_id, closed_ptr, index_ptr, stride_it, ring_ptr,
    stride_rr, stride_rs, num_rings, ring_positions_ptr, stride_sr, stride_ss, keys_ptr, num_block_pages, stride_bp,
    stride_bs, weight_ptr, eps, table_ptr, stride_table, last_position,
    PAGE_BLOCKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, UNROLLED: tl.constexpr, RING_TOKENS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, AXES: tl.constexpr,
    HEIGHTS: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Pool the block of a request that began before the step, if the step closes it.

    Its rotary positions lie in the ring, a load before their angles. Text counts on: angles of the positions so many
    before those of the request's first row are asked for at once, and others only where the ring says otherwise.
    """
    older = position % BLOCK_TOKENS
    row = start + BLOCK_TOKENS - 1 - older
    if (position >= 0) & (older > 0) & (row < end) & (ring_id >= 0) & (ring_id < num_rings):
        one = tl.arange(0, 1)
        slot = tl.where(own, tl.load(closed_ptr + row + one), -1)
        at, placed = _page_offsets(slot, num_block_pages, stride_bp, stride_bs, PAGE_BLOCKS)
        began = position - older + one  # token of the first member; the ring holds it at began % RING_TOKENS
        ring = ring_id.to(tl.int64) + one
        there = one >= 0  # the ring is read before it is known whether the block has a slot
        x, partner = _mean_of_members(
            start - older + one, start, index_ptr, stride_it, ring_ptr, ring * stride_rr, began, stride_rs, there,
            BLOCK_TOKENS, UNROLLED, DIM, HALF, BLOCK_D, RING_TOKENS, True,
        )  # fmt: skip
        place = ring * stride_sr + began % RING_TOKENS * stride_ss
        time, height, width = load_positions(ring_positions_ptr, place, 1, there, AXES)
        likely_time, likely_height, likely_width = row_time - older, row_height - older, row_width - older
        cos, sin = load_angles(table_ptr, stride_table, last_position, likely_time, likely_height, likely_width, there,
                               HALF, BLOCK_D, HEIGHTS, WIDTHS)  # fmt: skip
        other = (time != likely_time) | (height != likely_height) | (width != likely_width)
        if tl.max(other.to(tl.int32), 0) > 0:
            cos, sin = load_angles(table_ptr, stride_table, last_position, time, height, width, there, HALF, BLOCK_D,
                                   HEIGHTS, WIDTHS)  # fmt: skip
        _store_block_keys(x, partner, cos, sin, at, placed, weight_ptr, eps, keys_ptr, DIM, HALF, BLOCK_D)


@triton.jit
def _load_ring_rows(
    first_row, end, num_requests, request_ids_ptr, ring_slots_ptr, index_ptr, stride_it, positions_ptr, stride_pa,
    stride_pt,
    ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Ring slot (-1 for none), raw key and rotary positions of some of a request's rows."""
    rows = first_row + tl.arange(0, ROWS)
    there = rows < end
    _, live = _live_rows(request_ids_ptr, rows, there, num_requests)
    slot = tl.load(ring_slots_ptr + rows, mask=there, other=-1)
    d = tl.arange(0, BLOCK_D)
    keys = tl.load(index_ptr + (rows * stride_it)[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :])
    time, height, width = load_positions(positions_ptr, rows * stride_pt, stride_pa, there, 3)
    return tl.where(live, slot, -1), keys, time, height, width


@triton.jit
def _store_ring_rows(
    slot, keys, time, height, width, ring_ptr, stride_rr, stride_rs, num_rings, ring_positions_ptr, stride_sr,
    stride_ss,
    RING_TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Write what `_load_ring_rows` loaded."""
    at, kept = _page_offsets(slot, num_rings, stride_rr, stride_rs, RING_TOKENS)
    d = tl.arange(0, BLOCK_D)
    tl.store(ring_ptr + at[:, None] + d[None, :], keys, mask=kept[:, None] & (d < DIM)[None, :])
    at, _ = _page_offsets(slot, num_rings, stride_sr, stride_ss, RING_TOKENS)
    tl.store(ring_positions_ptr + at, time, mask=kept)
    tl.store(ring_positions_ptr + at + 1, height, mask=kept)
    tl.store(ring_positions_ptr + at + 2, width, mask=kept)


@triton.jit
def _heads_of_tile(tile, num_requests, request_ids_ptr, HEADS: tl.constexpr, TILE_HEADS: tl.constexpr):
    """Row [1] and heads [N] of a tile, which of these exist [N], and whether the row is live [1].

    Heads of one row share its positions and angles.
    """
    TILES: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    row = (tile // TILES).to(tl.int64) + tl.arange(0, 1)
    head = (tile % TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    _, live = _live_rows(request_ids_ptr, row, row >= 0, num_requests)
    return row, head, head < HEADS, live


@triton.jit
def _scaled(x, scale_ptr, scale, MODE: tl.constexpr):
    """Divided by a scale that is a number (1) or a tensor on the device (2); 0 is none."""
    if MODE == 0:
        return x
    else:
        if MODE == 2:
            scale = tl.load(scale_ptr)
        return tl.math.div_rn(x, tl.zeros(x.shape, tl.float32) + scale)


@triton.jit
def _write_keys(
    tile, num_requests, request_ids_ptr, slot_ids_ptr, k_ptr, stride_kt, stride_kh, v_ptr, stride_vt,
    stride_vh, k_pages_ptr, stride_kp, stride_ks, stride_kg, v_pages_ptr, stride_vp, stride_vs, stride_vg, num_pages,
    weight_ptr, eps, k_scale_ptr, k_scale, v_scale_ptr, v_scale, positions_ptr, stride_pa, stride_pt, table_ptr,
    stride_table, last_position,
    HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, PAGE_TOKENS: tl.constexpr, K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, AXES: tl.constexpr,
    HEIGHTS: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Norm and rotate some heads of K and store them in their pages, V beside them."""
    row, head, there, live = _heads_of_tile(tile, num_requests, request_ids_ptr, HEADS, TILE_HEADS)
    slot = tl.load(slot_ids_ptr + row)
    k_at, placed = _page_offsets(slot, num_pages, stride_kp, stride_ks, PAGE_TOKENS)
    v_at, _ = _page_offsets(slot, num_pages, stride_vp, stride_vs, PAGE_TOKENS)
    live = live & placed & there
    v, _ = load_heads(v_ptr, row * stride_vt + head * stride_vh, there, DIM, HALF, BLOCK_D)
    v = _scaled(v.to(tl.float32), v_scale_ptr, v_scale, V_SCALED)
    store_heads(v_pages_ptr, v_at + head * stride_vg, live, v, DIM, BLOCK_D)
    # rows of padding too, so that no load waits to learn which rows those are; they may hold anything
    x, partner = load_heads(k_ptr, row * stride_kt + head * stride_kh, there, DIM, HALF, BLOCK_D)
    known = row >= 0
    time, height, width = load_positions(positions_ptr, row * stride_pt, stride_pa, known, AXES)
    cos, sin = load_angles(table_ptr, stride_table, last_position, time, height, width, known, HALF, BLOCK_D, HEIGHTS,
                           WIDTHS)  # fmt: skip
    x, partner = norm_heads(x, partner, weight_ptr, eps, False, DIM, HALF, BLOCK_D)
    x = _scaled(rotate(x, partner, cos, sin), k_scale_ptr, k_scale, K_SCALED)
    store_heads(k_pages_ptr, k_at + head * stride_kg, live, x, DIM, BLOCK_D)


@triton.jit
def _prepare_queries(
    number, splits, num_requests, request_ids_ptr, x_ptr, stride_xt, stride_xh, out_ptr, stride_ot, stride_oh,
    gate_ptr, out_gate_ptr, stride_gt, stride_gh, weight_ptr, eps, positions_ptr, stride_pa, stride_pt, table_ptr,
    stride_table, last_position,
    HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, COPY_GATE: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, AXES: tl.constexpr,
    HEIGHTS: tl.constexpr, WIDTHS: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the query heads of a row, zeros in a row of padding; copy its gates if asked to.

    `splits` programs share a row, each taking every `splits`-th tile of its heads. The next tile is asked for before
    the one at hand is worked on.
    """
    row = (number // splits).to(tl.int64) + tl.arange(0, 1)
    _, live = _live_rows(request_ids_ptr, row, row >= 0, num_requests)
    known = row >= 0
    heads = tl.arange(0, TILE_HEADS)
    first_head = (number % splits) * TILE_HEADS
    head = first_head + heads
    x, partner = load_heads(x_ptr, row * stride_xt + head * stride_xh, head < HEADS, DIM, HALF, BLOCK_D)
    time, height, width = load_positions(positions_ptr, row * stride_pt, stride_pa, known, AXES)
    cos, sin = load_angles(table_ptr, stride_table, last_position, time, height, width, known, HALF, BLOCK_D, HEIGHTS,
                           WIDTHS)  # fmt: skip
    for at in tl.range(first_head, HEADS, splits * TILE_HEADS):
        head = at + heads
        after = head + splits * TILE_HEADS
        next_x, next_partner = load_heads(x_ptr, row * stride_xt + after * stride_xh, after < HEADS, DIM, HALF, BLOCK_D)
        there = head < HEADS
        if COPY_GATE:
            gate, _gate_partner = load_heads(gate_ptr, row * stride_xt + head * stride_xh, there, DIM, HALF, BLOCK_D)
            store_heads(out_gate_ptr, row * stride_gt + head * stride_gh, there, gate, DIM, BLOCK_D)
        x, partner = norm_heads(x, partner, weight_ptr, eps, False, DIM, HALF, BLOCK_D)
        x = tl.where(live[:, None], rotate(x, partner, cos, sin), 0.0)
        store_heads(out_ptr, row * stride_ot + head * stride_oh, there, x, DIM, BLOCK_D)
        x, partner = next_x, next_partner


@triton.jit(do_not_specialize=[
    "positions_ptr", "k_scale_ptr", "v_scale_ptr", "request_ids_ptr", "seq_lens_ptr", "slot_ids_ptr",
    "closed_ptr", "ring_slots_ptr", "query_starts_ptr", "ring_ids_ptr", "stride_pa",
    "num_rows", "num_requests", "last_position", "num_pages", "num_block_pages", "num_rings", "end_requests",
    "end_blocks", "end_keys", "end_index", "splits", "index_splits", "request_rows",
])  # fmt: skip
def _prepare_kernel(
    q_gate_ptr, k_ptr, v_ptr, index_ptr, raw_ptr, positions_ptr, table_ptr, q_weight_ptr, k_weight_ptr,
    index_q_weight_ptr, index_k_weight_ptr, gate_ptr, out_q_ptr, out_gate_ptr, out_index_ptr, k_pages_ptr, v_pages_ptr,
    keys_ptr, ring_ptr, ring_positions_ptr, k_scale_ptr, v_scale_ptr, request_ids_ptr, seq_lens_ptr,
    slot_ids_ptr, closed_ptr, ring_slots_ptr, query_starts_ptr, ring_ids_ptr, eps, k_scale, v_scale, num_rows,
    num_requests, last_position, num_pages, num_block_pages, num_rings, end_requests, end_blocks, end_keys, end_index,
    splits, index_splits, request_rows, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_it,
    stride_ih, stride_pa, stride_pt,
    stride_table, stride_ot, stride_oh, stride_gt, stride_gh, stride_nt, stride_nh, stride_kp, stride_ks, stride_kg,
    stride_vp, stride_vs, stride_vg, stride_bp, stride_bs, stride_rr, stride_rs, stride_sr, stride_ss,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, INDEX_HEADS: tl.constexpr, DIM: tl.constexpr,
    INDEX_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_INDEX_DIM: tl.constexpr,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr,
    INDEX_TILE: tl.constexpr, AXES: tl.constexpr, HEIGHTS: tl.constexpr, WIDTHS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, PAGE_BLOCKS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, RING_TOKENS: tl.constexpr,
    HAS_RING: tl.constexpr, HAS_BLOCKS: tl.constexpr, POOLS_OPEN: tl.constexpr, COPY_GATE: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, BLOCK_ROWS: tl.constexpr, RING_ROWS: tl.constexpr,
    UNROLLED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    pid = tl.program_id(0)
    if pid < end_requests:
        if HAS_RING:
            start = tl.maximum(tl.load(query_starts_ptr + pid), 0).to(tl.int64)
            if POOLS_OPEN:  # asked for before it is known which row is the request's first
                likely = tl.minimum(pid * request_rows, num_rows - 1).to(tl.int64) + tl.arange(0, 1)
                row_time, row_height, row_width = load_positions(positions_ptr, likely * stride_pt, stride_pa,
                                                                 likely >= 0, AXES)  # fmt: skip
            last = tl.load(query_starts_ptr + pid + 1).to(tl.int64)
            end = tl.minimum(last, num_rows)
            first_row = tl.maximum(start, end - RING_TOKENS)
            slot, raw_keys, time, height, width = _load_ring_rows(
                first_row, end, num_requests, request_ids_ptr, ring_slots_ptr, raw_ptr, stride_it, positions_ptr,
                stride_pa, stride_pt, RING_ROWS, INDEX_DIM, BLOCK_INDEX_DIM,
            )  # fmt: skip
            if POOLS_OPEN:
                ring_id = tl.load(ring_ids_ptr + pid)
                _, own = _live_rows(request_ids_ptr, start, start < end, num_requests)
                position = tl.load(seq_lens_ptr + pid) - (last - start)  # of the first row, told without reading it
                if (start != pid * request_rows) & (start < end):
                    first = start + tl.arange(0, 1)
                    row_time, row_height, row_width = load_positions(positions_ptr, first * stride_pt, stride_pa,
                                                                     first >= 0, AXES)  # fmt: skip
                _close_open_block(
                    start, end, position, row_time, row_height, row_width, own, ring_id, closed_ptr, raw_ptr, stride_it,
                    ring_ptr, stride_rr, stride_rs, num_rings, ring_positions_ptr, stride_sr, stride_ss, keys_ptr,
                    num_block_pages, stride_bp, stride_bs, index_k_weight_ptr, eps, table_ptr, stride_table,
                    last_position, PAGE_BLOCKS, BLOCK_TOKENS, UNROLLED, RING_TOKENS, INDEX_DIM, HALF, BLOCK_INDEX_DIM,
                    AXES, HEIGHTS, WIDTHS,
                )  # fmt: skip
                tl.debug_barrier()  # all threads have read the old ring before one of them writes it
            _store_ring_rows(slot, raw_keys, time, height, width, ring_ptr, stride_rr, stride_rs, num_rings,
                             ring_positions_ptr, stride_sr, stride_ss, RING_TOKENS, INDEX_DIM,
                             BLOCK_INDEX_DIM)  # fmt: skip
            for row in tl.range(first_row + RING_ROWS, end, RING_ROWS):
                slot, raw_keys, time, height, width = _load_ring_rows(
                    row, end, num_requests, request_ids_ptr, ring_slots_ptr, raw_ptr, stride_it, positions_ptr,
                    stride_pa, stride_pt, RING_ROWS, INDEX_DIM, BLOCK_INDEX_DIM,
                )  # fmt: skip
                _store_ring_rows(slot, raw_keys, time, height, width, ring_ptr, stride_rr, stride_rs, num_rings,
                                 ring_positions_ptr, stride_sr, stride_ss, RING_TOKENS, INDEX_DIM,
                                 BLOCK_INDEX_DIM)  # fmt: skip
    elif pid < end_blocks:
        if HAS_BLOCKS:
            _close_blocks(
                pid - end_requests, num_rows, num_requests, request_ids_ptr, closed_ptr, query_starts_ptr, raw_ptr,
                stride_it, keys_ptr, num_block_pages, stride_bp, stride_bs, positions_ptr, stride_pa, stride_pt,
                index_k_weight_ptr, eps, table_ptr, stride_table, last_position, BLOCK_ROWS, PAGE_BLOCKS, BLOCK_TOKENS,
                UNROLLED, INDEX_DIM, HALF, BLOCK_INDEX_DIM, AXES, HEIGHTS, WIDTHS,
            )  # fmt: skip
    elif pid < end_keys:
        _write_keys(
            pid - end_blocks, num_requests, request_ids_ptr, slot_ids_ptr, k_ptr, stride_kt, stride_kh, v_ptr,
            stride_vt, stride_vh, k_pages_ptr, stride_kp, stride_ks, stride_kg, v_pages_ptr, stride_vp, stride_vs,
            stride_vg, num_pages, k_weight_ptr, eps, k_scale_ptr, k_scale, v_scale_ptr, v_scale, positions_ptr,
            stride_pa, stride_pt, table_ptr, stride_table, last_position, KV_HEADS, KV_TILE, PAGE_TOKENS, K_SCALED,
            V_SCALED, DIM, HALF, BLOCK_D, AXES, HEIGHTS, WIDTHS,
        )  # fmt: skip
    elif pid < end_index:
        _prepare_queries(
            pid - end_keys, index_splits, num_requests, request_ids_ptr, index_ptr, stride_it, stride_ih, out_index_ptr,
            stride_nt, stride_nh, index_ptr, out_index_ptr, 0, 0, index_q_weight_ptr, eps, positions_ptr, stride_pa,
            stride_pt, table_ptr, stride_table, last_position, INDEX_HEADS, INDEX_TILE, False, INDEX_DIM, HALF,
            BLOCK_INDEX_DIM, AXES, HEIGHTS, WIDTHS,
        )  # fmt: skip
    else:
        _prepare_queries(
            pid - end_index, splits, num_requests, request_ids_ptr, q_gate_ptr, stride_qt, stride_qh, out_q_ptr,
            stride_ot, stride_oh, gate_ptr, out_gate_ptr, stride_gt, stride_gh, q_weight_ptr, eps, positions_ptr,
            stride_pa, stride_pt, table_ptr, stride_table, last_position, Q_HEADS, Q_TILE, COPY_GATE, DIM, HALF,
            BLOCK_D, AXES, HEIGHTS, WIDTHS,
        )  # fmt: skip


@dataclass(frozen=True)
class PrepareWork:
    """How the work of some rows is shared among programs; decides nothing but speed.

    Attributes:
        q_tile: Query heads of a row that a program prepares at once.
        kv_tile: The same for key heads.
        index_tile: The same for index heads.
        block_rows: Rows that a program looks at for blocks to pool.
        splits: Programs that share the query heads of a row.
        index_splits: Programs that share its index heads.
    """

    q_tile: int
    kv_tile: int
    index_tile: int
    block_rows: int
    splits: int
    index_splits: int

    @classmethod
    def of(cls, rows, heads, dim, index_dim):
        """The work of so many rows.

        Args:
            rows: Rows.
            heads: Query heads, key heads and index heads.
            dim: Head dimension.
            index_dim: Dimension of index heads.
        """
        sizes = (TILE_ELEMENTS, BLOCK_ROWS, MOST_PROGRAMS)
        elements, block_rows, most_programs = (size[rows > FEW_ROWS] for size in sizes)
        tiles = [_tile(n, d, elements) for n, d in zip(heads, (dim, dim, index_dim), strict=True)]
        most_splits = -(-most_programs // max(rows, 1))
        splits, index_splits = (min(-(-heads[i] // tiles[i]), most_splits) for i in (0, 2))
        return cls(*tiles, block_rows, splits, index_splits)


@launched_where(lambda tensor: tensor.device)
def prepare_triton(q_gate, k, v, index_qk, rope_positions, rope, norms, cache, plan, out):
    """Fill `out` and the caches. Arguments as in `prepare`, checked already, with `rope_positions` [3, T].

    Where `out.gate` is not the projected gate itself, gates are copied there.
    """
    rows, q_heads = q_gate.shape[:2]
    kv_heads, dim = k.shape[1:]
    index_heads, index_dim = index_qk.shape[1] - 1, index_qk.shape[2]
    half = rope.rotary_dim // 2
    section = rope.mrope_section or (0, 0, 0)
    gate = q_gate[..., dim:]
    keys, ring, ring_positions = cache.block_keys, cache.ring, cache.ring_positions
    pools_open = keys is not None and ring is not None and plan.ring_ids is not None
    work = PrepareWork.of(rows, (q_heads, kv_heads, index_heads), dim, index_dim)
    end_requests = plan.num_requests if ring is not None and rows else 0
    end_blocks = end_requests + (-(-rows // work.block_rows) if keys is not None else 0)
    end_keys = end_blocks + rows * -(-kv_heads // work.kv_tile)
    end_index = end_keys + rows * work.index_splits
    grid = end_index + rows * work.splits
    if grid == 0:
        return
    k_pages, v_pages, out_index_q = (_writable(x) for x in (cache.k_pages, cache.v_pages, out.index_q))
    block_keys = _writable(keys) if keys is not None else index_qk  # what is not there needs an address still
    if ring is None:
        ring, ring_positions = index_qk, plan.positions[None]
    k_mode, v_mode = _scale_mode(cache.k_scale), _scale_mode(cache.v_scale)
    _prepare_kernel[(grid,)](
        q_gate, k, v, index_qk, index_qk[:, -1], rope_positions, rope.cos_sin, norms.q, norms.k, norms.index_q,
        norms.index_k, gate, out.q, out.gate, out_index_q, k_pages, v_pages, block_keys, ring, ring_positions,
        cache.k_scale if k_mode == 2 else norms.k, cache.v_scale if v_mode == 2 else norms.k, plan.request_ids,
        plan.seq_lens, plan.slot_ids, plan.closed_block_slot_ids, plan.ring_slot_ids, plan.query_starts,
        plan.ring_ids if pools_open else plan.query_starts, norms.eps, float(cache.k_scale) if k_mode == 1 else 1.0,
        float(cache.v_scale) if v_mode == 1 else 1.0, rows, plan.num_requests, rope.cos_sin.shape[0] - 1,
        k_pages.shape[0], block_keys.shape[0], ring.shape[0], end_requests, end_blocks, end_keys, end_index,
        work.splits, work.index_splits, -(-rows // max(plan.num_requests, 1)),
        *q_gate.stride()[:2], *k.stride()[:2], *v.stride()[:2], *index_qk.stride()[:2], *rope_positions.stride(),
        rope.cos_sin.stride(0), *out.q.stride()[:2], *out.gate.stride()[:2], *out.index_q.stride()[:2],
        *k_pages.stride()[:3], *v_pages.stride()[:3], *block_keys.stride()[:2], *ring.stride()[:2],
        *ring_positions.stride()[:2],
        Q_HEADS=q_heads, KV_HEADS=kv_heads, INDEX_HEADS=index_heads, DIM=dim, INDEX_DIM=index_dim, HALF=half,
        BLOCK_D=_padded(dim), BLOCK_INDEX_DIM=_padded(index_dim), Q_TILE=work.q_tile, KV_TILE=work.kv_tile,
        INDEX_TILE=work.index_tile, AXES=3 if max(section[1:]) > 0 else 1, HEIGHTS=section[1], WIDTHS=section[2],
        PAGE_TOKENS=k_pages.shape[1],
        PAGE_BLOCKS=block_keys.shape[1], BLOCK_TOKENS=plan.block_tokens, RING_TOKENS=ring.shape[1],
        HAS_RING=cache.ring is not None, HAS_BLOCKS=keys is not None, POOLS_OPEN=pools_open,
        COPY_GATE=out.gate.data_ptr() != gate.data_ptr(), K_SCALED=k_mode, V_SCALED=v_mode, BLOCK_ROWS=work.block_rows,
        RING_ROWS=min(MOST_RING_ROWS, _padded(ring.shape[1])), UNROLLED=plan.block_tokens <= UNROLLED_MEMBERS,
        enable_fp_fusion=False, num_warps=1, **overlapping(q_gate.device),
    )  # fmt: skip


def _padded(size):
    return triton.next_power_of_2(max(size, 1))


def _tile(heads, dim, elements):
    """Heads of one row that a program prepares at once."""
    return min(_padded(heads), max(1, elements // _padded(dim)))


def _scale_mode(scale):
    """How the kernel gets a scale: 0 there is none, 1 as a number, 2 as a tensor that stays on its device."""
    if scale is None:
        return 0
    return 2 if isinstance(scale, torch.Tensor) else 1


def _writable(x):
    """Float8 as the device can write it: as it is where the architecture converts, else as bytes."""
    if x.dtype != FP8:
        return x
    native = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (8, 9)
    return x if native else x.view(torch.uint8)
