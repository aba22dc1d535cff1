# mypy: ignore-errors
"""Attention of single rows on the GPU: decode, narrow verification, and every row with `row_exact`.

A row's token list (its blocks in order, then its tail) is cut into segments of SEGMENT_TOKENS. Each segment is attended
from a fresh softmax state, and segments are merged left to right by one function. With few rows every segment is a
program and the last one to arrive merges; with many, one program walks all segments of its row. Both do the same
arithmetic in the same order, so a row's bits depend on neither the batch nor the form.

Bytes: a row reads 2 * n * D keys and values a KV head, 4 MiB at n = 2048, two heads of 256 in bf16.
"""

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashqsa.backends import multiprocessors
from flashqsa.launching import overlapping, wait_for_previous

SEGMENT_TOKENS = 128
TAIL_RESERVE = 128
"""Tokens beyond the budget that get segments of their own; a longer (reused) tail extends the last segment."""

CHUNK_TOKENS = 4096
"""Tokens whose slots are resolved ahead at once, where one program walks a whole row."""

LOG2_E = 1.4426950408889634


@triton.jit
def _load_rows(pages_ptr, base, d, in_row, in_d, EVEN_D: tl.constexpr, dtype: tl.constexpr):
    """[N, D] rows of a cache in the dtype that the product takes; float8 comes as bits where the arch has no cvt."""
    mask = in_row[:, None] if EVEN_D else in_row[:, None] & in_d[None, :]
    return tl.load(pages_ptr + base[:, None] + d[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def _merge_state(top, weight, total, seg_top, seg_weight, seg_total):
    """Fold one segment into the running state. Explicit fma: both forms must round alike."""
    new_top = tl.maximum(top, seg_top, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.math.exp2(top - base)
    take = tl.math.exp2(seg_top - base)
    weight = tl.fma(weight, keep, seg_weight * take)
    total = tl.fma(total, tl.broadcast_to(keep[:, None], total.shape), seg_total * take[:, None])
    return new_top, weight, total


@triton.jit
def _resolve_units(
    slots_ptr, first_unit, last_unit, count, visible, position, ids_ptr, table_ptr, first_slot,
    BLOCK_TOKENS: tl.constexpr, PAGE_TOKENS: tl.constexpr, PAGED: tl.constexpr, RESOLVE: tl.constexpr,
):  # fmt: skip
    """Physical slot of the first token of list units [first_unit, last_unit): a block a unit, the tail's after them.

    Done once, ahead of the loop, so that the loop waits for one load, not for block id, page and row in turn.
    """
    looked_up = tl.where(count >= visible, 0, count)  # a row that attends all it sees needs no ids: units are blocks
    for at in tl.range(first_unit, last_unit, RESOLVE):
        unit = at + tl.arange(0, RESOLVE)
        live = unit < last_unit
        block = tl.load(ids_ptr + unit, mask=live & (unit < looked_up), other=0)
        block = tl.where(unit < looked_up, block, visible + unit - count)
        token = tl.minimum(tl.maximum(block, 0) * BLOCK_TOKENS, position)  # never outside the request
        if PAGED:
            page = tl.load(table_ptr + token // PAGE_TOKENS, mask=live, other=0)
            slot = page * PAGE_TOKENS + token % PAGE_TOKENS
        else:
            slot = first_slot + token
        tl.store(slots_ptr + unit, tl.maximum(slot, 0).to(tl.int32), mask=live)


@triton.jit
def _attend_piece(
    q, slot, live, allowed, top, weight, total, end_slot, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp, stride_vs,
    scale_log2, d, in_d, PAGE_TOKENS: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add N tokens at given slots to a softmax state of M rows; `allowed` [M, N] or [1, N] says who attends what."""
    slot = tl.minimum(slot, end_slot - 1)  # whatever the ids say, nothing outside the caches is read
    page = (slot // PAGE_TOKENS).to(tl.int64)
    slot = slot % PAGE_TOKENS
    k = _load_rows(k_ptr, page * stride_kp + slot * stride_ks, d, live, in_d, EVEN_D, q.dtype)
    v = _load_rows(v_ptr, page * stride_vp + slot * stride_vs, d, live, in_d, EVEN_D, q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores = tl.where(allowed, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.math.exp2(tl.fma(scores, scale_log2, tl.broadcast_to(-base[:, None], scores.shape)))
    p = tl.where(allowed, p, 0.0)
    keep = tl.math.exp2(top - base)
    weight = tl.fma(weight, keep, tl.sum(p, 1))
    total = tl.dot(p.to(v.dtype), v, total * keep[:, None], input_precision=PRECISION)
    return new_top, weight, total


@triton.jit
def _attend_tile(
    q, at, stop, top, weight, total, slots_ptr, end_slot, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp, stride_vs,
    scale_log2, d, in_d,
    BLOCK_TOKENS: tl.constexpr, PAGE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, EVEN_D: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add list places [at, at + BLOCK_N), up to stop, to a softmax state: top (log2), weight, total."""
    j = at + tl.arange(0, BLOCK_N)
    live = j < stop
    slot = tl.load(slots_ptr + j // BLOCK_TOKENS, mask=live, other=0) + j % BLOCK_TOKENS
    return _attend_piece(
        q, slot, live, live[None, :], top, weight, total, end_slot, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp,
        stride_vs, scale_log2, d, in_d, PAGE_TOKENS, EVEN_D, PRECISION,
    )  # fmt: skip


@triton.jit
def _load_gate(gate_ptr, heads, in_g, d, in_d, stride_gh, HAS_GATE: tl.constexpr):
    """Gate logits [G, D], asked for before they are needed; zeros without a gate."""
    if HAS_GATE:
        at = gate_ptr + heads[:, None] * stride_gh + d[None, :]
        gate = tl.load(at, mask=in_g[:, None] & in_d[None, :], other=0.0).to(tl.float32)
    else:
        gate = tl.zeros((heads.shape[0], d.shape[0]), tl.float32)
    return gate


@triton.jit
def _finish_row(
    top, weight, total, gate, out_ptr, lse_ptr, in_g, d, in_d, stride_oh, v_scale, heads,
    MODEL_DTYPE: tl.constexpr, HAS_GATE: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    """Divide, round to the model dtype, gate in fp32, store."""
    empty = weight == 0.0
    out = total / tl.where(empty, 1.0, weight)[:, None] * v_scale
    if HAS_GATE:
        out = out.to(MODEL_DTYPE).to(tl.float32) * tl.sigmoid(gate)
    out = tl.where(empty[:, None], 0.0, out)  # last, because the gate of a padding row may be NaN
    at = out_ptr + heads[:, None] * stride_oh + d[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=in_g[:, None] & in_d[None, :])
    if HAS_LSE:
        lse = (top + tl.math.log2(tl.where(empty, 1.0, weight))) * 0.6931471805599453
        tl.store(lse_ptr + heads, tl.where(empty, float("-inf"), lse), mask=in_g)


@triton.jit
def _merge_segments(
    partial_ptr, state_ptr, used, out_ptr, lse_ptr, gate_ptr, in_g, g, stride_oh, stride_gh, v_scale, heads,
    HEAD_DIM: tl.constexpr, MODEL_DTYPE: tl.constexpr, HAS_GATE: tl.constexpr, HAS_LSE: tl.constexpr,
    SEGMENTS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, MERGE_D: tl.constexpr,
):  # fmt: skip
    """Merge all segments of a row and finish it, MERGE_D columns at a time: narrow loads, many of them in flight."""
    for column in tl.static_range(0, BLOCK_D, MERGE_D):
        d = column + tl.arange(0, MERGE_D)
        gate = _load_gate(gate_ptr, heads, in_g, d, d < HEAD_DIM, stride_gh, HAS_GATE)
        top = tl.full((BLOCK_G,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_G,), tl.float32)
        total = tl.zeros((BLOCK_G, MERGE_D), tl.float32)
        for s in tl.static_range(0, SEGMENTS):
            there = in_g & (g * 0 + s < used)
            at = state_ptr + s * (2 * BLOCK_G) + g
            seg_top = tl.load(at, mask=there, other=float("-inf"), cache_modifier=".cg")
            seg_weight = tl.load(at + BLOCK_G, mask=there, other=0.0, cache_modifier=".cg")
            at = partial_ptr + s * (BLOCK_G * BLOCK_D) + g[:, None] * BLOCK_D + d[None, :]
            seg_total = tl.load(at, mask=there[:, None], other=0.0, cache_modifier=".cg")
            top, weight, total = _merge_state(top, weight, total, seg_top, seg_weight, seg_total)
        _finish_row(top, weight, total, gate, out_ptr, lse_ptr, in_g, d, d < HEAD_DIM, stride_oh, v_scale, heads,
                    MODEL_DTYPE, HAS_GATE, HAS_LSE and column == 0)  # fmt: skip


@triton.jit
def _attend_part(
    pair, part,
    q_ptr, k_ptr, v_ptr, gate_ptr, out_ptr, lse_ptr, partial_ptr, state_ptr, arrived_ptr,
    block_ids_ptr, block_counts_ptr, visible_ptr, request_ids_ptr, positions_ptr, page_table_ptr, first_slots_ptr,
    slots_ptr, k_scale_ptr, v_scale_ptr, scale_log2, k_scale, v_scale, end_slot, stride_slots,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_gt, stride_gh, stride_ot, stride_oh, stride_bt, stride_ct, stride_pr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, PAGED: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr, SHARE: tl.constexpr, INCLUDE_TAIL: tl.constexpr, HAS_GATE: tl.constexpr, HAS_LSE: tl.constexpr,
    SCALE_TENSORS: tl.constexpr, MODEL_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MERGE_D: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr, RESOLVE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Attend one of PARTS parts of a row and KV head; without a return where it is the only one."""
    head = (pair % KV_HEADS).to(tl.int32)
    row = pair // KV_HEADS
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    EVEN_D: tl.constexpr = BLOCK_D == HEAD_DIM
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    in_g, in_d = g < GROUP, d < HEAD_DIM
    heads = head * GROUP + g

    request = tl.load(request_ids_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int32)
    visible = tl.load(visible_ptr + row)  # of token lists (no tail) it is not used
    count = tl.load(block_counts_ptr + row * stride_ct)
    tail_start = visible * BLOCK_TOKENS
    count_tokens = count * BLOCK_TOKENS
    n = count_tokens
    if not INCLUDE_TAIL:
        visible = 1 << 30  # the ids are the whole list
    else:
        n += tl.maximum(position + 1 - tail_start, 0)
    n = tl.where(request < 0, 0, n)
    used = tl.minimum((n + SEGMENT - 1) // SEGMENT, SEGMENTS)
    if PARTS > 1:  # noqa: SIM102  (a constant and a value of the device)
        if part * SHARE >= tl.maximum(used, 1):
            return
    request = tl.maximum(request, 0)
    table_ptr = page_table_ptr + request * stride_pr
    ids_ptr = block_ids_ptr + row * stride_bt
    first_slot = tl.load(first_slots_ptr + request) if not PAGED else request
    if SCALE_TENSORS:
        k_scale = tl.load(k_scale_ptr)
        v_scale = tl.load(v_scale_ptr)
    scale = scale_log2 * k_scale
    k_ptr += head * stride_kh
    v_ptr += head * stride_vh
    q_ptr += row * stride_qt
    q = tl.load(q_ptr + heads[:, None] * stride_qh + d[None, :], mask=in_g[:, None] & in_d[None, :], other=0.0)

    out_ptr += row * stride_ot
    gate_ptr += row * stride_gt
    lse_ptr += row * Q_HEADS
    begin = part * (SHARE * SEGMENT)
    stop = tl.where(part == PARTS - 1, n, tl.minimum(begin + SHARE * SEGMENT, n))
    slots_ptr += tl.program_id(0).to(tl.int64) * stride_slots
    partial_ptr += pair * (SEGMENTS * BLOCK_G * BLOCK_D)  # partials lie as [row, KV head, segment]
    state_ptr += pair * (SEGMENTS * 2 * BLOCK_G)
    column = g[:, None] * BLOCK_D + d[None, :]
    nothing = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    no_weight = tl.zeros((BLOCK_G,), tl.float32)
    no_total = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    seg_top, seg_weight, seg_total = nothing, no_weight, no_total
    top, weight, total = nothing, no_weight, no_total
    for chunk in tl.range(begin, stop, CHUNK_TOKENS):
        chunk_stop = tl.minimum(chunk + CHUNK_TOKENS, stop)
        first_unit = chunk // BLOCK_TOKENS
        tl.debug_barrier()  # the chunk before has been read by all threads
        _resolve_units(
            slots_ptr - first_unit, first_unit, (chunk_stop + BLOCK_TOKENS - 1) // BLOCK_TOKENS, count, visible,
            position, ids_ptr, table_ptr, first_slot, BLOCK_TOKENS, PAGE_TOKENS, PAGED, RESOLVE,
        )  # fmt: skip
        tl.debug_barrier()  # all slots are written before any thread reads one
        for at in tl.range(chunk, chunk_stop, BLOCK_N, num_stages=STAGES):
            seg_top, seg_weight, seg_total = _attend_tile(
                q, at, chunk_stop, seg_top, seg_weight, seg_total, slots_ptr - first_unit, end_slot, k_ptr, v_ptr,
                stride_kp, stride_ks, stride_vp, stride_vs, scale, d, in_d, BLOCK_TOKENS, PAGE_TOKENS, BLOCK_N,
                EVEN_D, PRECISION,
            )  # fmt: skip
            done = at + BLOCK_N
            if ((done % SEGMENT == 0) & (done < SEGMENT * SEGMENTS)) | (done >= stop):  # a segment is complete
                if PARTS == 1:
                    top, weight, total = _merge_state(top, weight, total, seg_top, seg_weight, seg_total)
                else:
                    s = tl.minimum(at // SEGMENT, SEGMENTS - 1)
                    tl.store(partial_ptr + s * (BLOCK_G * BLOCK_D) + column, seg_total, mask=in_g[:, None])
                    tl.store(state_ptr + s * (2 * BLOCK_G) + g, seg_top)
                    tl.store(state_ptr + s * (2 * BLOCK_G) + BLOCK_G + g, seg_weight)
                seg_top, seg_weight, seg_total = nothing, no_weight, no_total
    if PARTS == 1:
        gate = _load_gate(gate_ptr, heads, in_g, d, in_d, stride_gh, HAS_GATE)
        _finish_row(top, weight, total, gate, out_ptr, lse_ptr, in_g, d, in_d, stride_oh, v_scale, heads, MODEL_DTYPE,
                    HAS_GATE, HAS_LSE)  # fmt: skip
    else:
        tl.debug_barrier()  # every thread's part is written before this program counts as arrived
        arrived = tl.atomic_add(arrived_ptr + pair, 1, sem="acq_rel", scope="gpu")
        if arrived == tl.maximum((used + SHARE - 1) // SHARE, 1) - 1:
            tl.store(arrived_ptr + pair, 0)  # ready for the next launch
            _merge_segments(
                partial_ptr, state_ptr, used, out_ptr, lse_ptr, gate_ptr, in_g, g, stride_oh, stride_gh, v_scale, heads,
                HEAD_DIM, MODEL_DTYPE, HAS_GATE, HAS_LSE, SEGMENTS, BLOCK_G, BLOCK_D, MERGE_D,
            )  # fmt: skip


@triton.jit
def _attend_rows_kernel(
    served_ptr, pairs, q_ptr, k_ptr, v_ptr, gate_ptr, out_ptr, lse_ptr, partial_ptr, state_ptr, arrived_ptr,
    block_ids_ptr, block_counts_ptr, visible_ptr, request_ids_ptr, positions_ptr, page_table_ptr, first_slots_ptr,
    slots_ptr, k_scale_ptr, v_scale_ptr, scale_log2, k_scale, v_scale, end_slot, stride_slots,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_gt, stride_gh, stride_ot, stride_oh, stride_bt, stride_ct, stride_pr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, PAGED: tl.constexpr, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr,
    PARTS: tl.constexpr, SHARE: tl.constexpr, INCLUDE_TAIL: tl.constexpr, HAS_GATE: tl.constexpr, HAS_LSE: tl.constexpr,
    SCALE_TENSORS: tl.constexpr, MODEL_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, MERGE_D: tl.constexpr,
    CHUNK_TOKENS: tl.constexpr, RESOLVE: tl.constexpr, STAGES: tl.constexpr, LEFT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    pid = tl.program_id(0).to(tl.int64)
    if LEFT:
        lane = tl.arange(0, LEFT)
        programs = tl.num_programs(0)
        for ahead in tl.range(0, pairs - pid, LEFT * programs):  # all flags at once: mostly nothing is left
            ahead_pair = pid + ahead
            ahead_pairs = ahead_pair + lane * programs
            here = ahead_pairs < pairs
            served = tl.load(served_ptr + ahead_pairs // KV_HEADS, mask=here, other=1)
            request = tl.load(request_ids_ptr + ahead_pairs // KV_HEADS, mask=here, other=0)
            left = here & ((served == 0) | (request < 0))
            if tl.sum(left.to(tl.int32), 0) > 0:
                for i in tl.range(0, LEFT):
                    pair = ahead_pair + i * programs
                    if pair < pairs:
                        row = pair // KV_HEADS
                        if (tl.load(served_ptr + row) == 0) | (tl.load(request_ids_ptr + row) < 0):
                            _attend_part(
                                pair, 0,
                                q_ptr, k_ptr, v_ptr, gate_ptr, out_ptr, lse_ptr, partial_ptr, state_ptr, arrived_ptr,
                                block_ids_ptr, block_counts_ptr, visible_ptr, request_ids_ptr, positions_ptr,
                                page_table_ptr, first_slots_ptr, slots_ptr, k_scale_ptr, v_scale_ptr, scale_log2,
                                k_scale, v_scale, end_slot, stride_slots, stride_qt, stride_qh, stride_kp, stride_ks,
                                stride_kh, stride_vp, stride_vs, stride_vh, stride_gt, stride_gh, stride_ot, stride_oh,
                                stride_bt, stride_ct, stride_pr, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS,
                                PAGE_TOKENS, PAGED, SEGMENT, SEGMENTS, PARTS, SHARE, INCLUDE_TAIL, HAS_GATE, HAS_LSE,
                                SCALE_TENSORS, MODEL_DTYPE, PRECISION, BLOCK_G, BLOCK_D, BLOCK_N, MERGE_D,
                                CHUNK_TOKENS, RESOLVE, STAGES,
                            )  # fmt: skip
    else:
        _attend_part(
            pid // PARTS, (pid % PARTS).to(tl.int32),  # PARTS programs share a row and KV head, each SHARE segments
            q_ptr, k_ptr, v_ptr, gate_ptr, out_ptr, lse_ptr, partial_ptr, state_ptr, arrived_ptr, block_ids_ptr,
            block_counts_ptr, visible_ptr, request_ids_ptr, positions_ptr, page_table_ptr, first_slots_ptr, slots_ptr,
            k_scale_ptr, v_scale_ptr, scale_log2, k_scale, v_scale, end_slot, stride_slots, stride_qt, stride_qh,
            stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, stride_gt, stride_gh, stride_ot,
            stride_oh, stride_bt, stride_ct, stride_pr, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, PAGE_TOKENS, PAGED,
            SEGMENT, SEGMENTS, PARTS, SHARE, INCLUDE_TAIL, HAS_GATE, HAS_LSE, SCALE_TENSORS, MODEL_DTYPE, PRECISION,
            BLOCK_G, BLOCK_D, BLOCK_N, MERGE_D, CHUNK_TOKENS, RESOLVE, STAGES,
        )  # fmt: skip


_TORCH_TO_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class RowsKernelConfig:
    """Form and tiles of `_attend_rows_kernel`.

    Only `share`, `stages` and `merge_d` may differ between calls: the others are part of the arithmetic.

    Attributes:
        share: Segments that one program attends; all of a row's when it is at least their number.
        block_n: Tokens of a tile.
        warps: Warps of a program.
        stages: Depth of the load pipeline.
        merge_d: Columns that the last program merges at once.
    """

    share: int
    block_n: int = 64
    warps: int = 8
    stages: int = 2
    merge_d: int = 256

    @classmethod
    def choose(cls, programs, segments, multiprocessors, wide, block_d=256):
        """As many programs as fill the device a few times, as few as keep each one streaming."""
        share = 1
        while share < segments and programs * -(-segments // share) > 3 * multiprocessors:
            share *= 2
        return cls(share, block_n=16 if block_d > 128 else 32, stages=1) if wide else cls(share)


def row_segments(list_tokens: int) -> int:
    """Segments of a row whose list holds up to `list_tokens` tokens, the reserve for its tail included."""
    return -(-(list_tokens + TAIL_RESERVE) // SEGMENT_TOKENS)


def attend_rows_triton(q, cache, plan, tokens, softmax_scale, *, gate, out, lse, served=None, config=None):
    """Fill `out` [T, Hq, D] and `lse` [T, Hq] (or None) with every row attended alone.

    Args:
        q: [T, Hq, D] queries.
        cache: Caches of the layer.
        plan: The step; owns the scratch.
        tokens: `RowTokens` of all T rows.
        softmax_scale: Multiplies the scores.
        gate: [T, Hq, D] or None.
        out: Output buffer.
        lse: fp32 buffer, or None.
        served: [T] int32: rows where it is not 0 are left alone. None where every row is to be filled.
        config: Form and tiles; chosen by shapes when None. `share`, `stages` and `merge_d` decide nothing but speed.
    """
    block_ids, block_counts, block_tokens = tokens.unit_ids, tokens.unit_counts, tokens.unit_tokens
    include_tail = tokens.visible_units is not None
    visible_blocks = tokens.visible_units if include_tail else plan.visible_blocks
    rows, q_heads, dim = q.shape
    kv_heads = cache.kv_heads
    segments = row_segments(block_ids.shape[1] * block_tokens)
    programs = rows * kv_heads
    if programs == 0:
        return
    wide = cache.k_pages.dtype == torch.float32 or q.dtype == torch.float32
    block_g = max(16, triton.next_power_of_2(q_heads // kv_heads))
    block_d = max(16, triton.next_power_of_2(dim))  # products are at least so deep
    config = config or RowsKernelConfig.choose(programs, segments, multiprocessors(q.device), wide, block_d)
    if served is not None:  # how many are left is not known here: programs loop over whole rows
        config = dataclasses.replace(config, share=segments)
    share = min(config.share, segments)
    parts = -(-segments // share)
    if parts > 1:
        partial = plan.scratch("attend.partial", (programs * segments * block_g * block_d,), torch.float32)
        state = plan.scratch("attend.state", (programs * segments * 2 * block_g,), torch.float32)
        arrived = plan.scratch("attend.arrived", (programs,), torch.int32, zeroed=True)
    else:
        partial = state = lse if lse is not None else out
        arrived = block_counts
    chunk_tokens = min(share * SEGMENT_TOKENS, CHUNK_TOKENS)
    units = chunk_tokens // block_tokens + 2
    grid = programs * parts if served is None else min(programs, 2 * multiprocessors(q.device))
    slots = plan.scratch("attend.slots", (grid * units,), torch.int32)
    paged = plan.page_table is not None
    scale_tensors = isinstance(cache.k_scale, torch.Tensor) or isinstance(cache.v_scale, torch.Tensor)
    k_scale, v_scale = _scales(cache, q.device) if scale_tensors else (q, q)
    _attend_rows_kernel[(grid,)](
        q if served is None else served, programs, q, cache.k_pages, cache.v_pages,
        gate if gate is not None else q, out, lse if lse is not None else out,
        partial, state, arrived, block_ids, block_counts, visible_blocks, plan.request_ids, plan.positions,
        plan.page_table if paged else plan.request_ids, plan.request_ids if paged else plan.first_slots,
        slots, k_scale, v_scale, softmax_scale * LOG2_E,
        1.0 if scale_tensors or cache.k_scale is None else cache.k_scale,
        1.0 if scale_tensors or cache.v_scale is None else cache.v_scale,
        cache.k_pages.shape[0] * cache.k_pages.shape[1], units,
        q.stride(0), q.stride(1), *cache.k_pages.stride()[:3], *cache.v_pages.stride()[:3],
        *(gate.stride()[:2] if gate is not None else (0, 0)), out.stride(0), out.stride(1),
        block_ids.stride(0), block_counts.stride(0), plan.page_table.stride(0) if paged else 0,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_TOKENS=block_tokens,
        PAGE_TOKENS=cache.k_pages.shape[1], PAGED=paged, SEGMENT=SEGMENT_TOKENS, SEGMENTS=segments,
        PARTS=parts, SHARE=share, INCLUDE_TAIL=include_tail, HAS_GATE=gate is not None, HAS_LSE=lse is not None,
        SCALE_TENSORS=scale_tensors, MODEL_DTYPE=_TORCH_TO_TRITON[q.dtype],
        PRECISION="ieee", BLOCK_G=block_g, BLOCK_D=block_d,
        BLOCK_N=config.block_n, MERGE_D=min(block_d, config.merge_d), CHUNK_TOKENS=chunk_tokens,
        RESOLVE=min(512, triton.next_power_of_2(units)), STAGES=config.stages, LEFT=0 if served is None else 128,
        num_warps=config.warps, enable_fp_fusion=False, **overlapping(q.device),
    )  # fmt: skip


def _scales(cache, device):
    """Both scales as fp32 tensors on the device; a float beside a tensor is copied there."""
    both = (cache.k_scale, cache.v_scale)
    return tuple(
        scale if isinstance(scale, torch.Tensor) else torch.full((1,), 1.0 if scale is None else scale, device=device)
        for scale in both
    )
