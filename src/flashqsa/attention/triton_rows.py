# mypy: ignore-errors
"""Attention of single rows on the GPU: decode, narrow verification, and every row with `row_exact`.

A row's token list (its blocks in order, then its tail) is cut into segments of SEGMENT_TOKENS, the last up to half a
segment longer or shorter. Each is attended from a fresh softmax state; GROUP_SEGMENTS consecutive ones merge left to
right into a group, and groups merge left to right into the row. A program attends one segment, whole groups or the
whole row, whatever fills the device; what several programs leave of a row is merged by a second kernel. All forms do
the same arithmetic in the same order, so a row's bits depend on neither the batch nor the form.

Bytes: a row reads 2 * n * D keys and values a KV head, 4 MiB at n = 2048, two heads of 256 in bf16. Small batches are
bound by latency: three loads that wait for each other (ids, pages, keys) and the instructions around them, which are
as few as could be made. So places are resolved by one thread a token, and only then handed to all that load its row.
"""

import dataclasses
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashqsa.attention.triton_row_merge import (
    _finish_row,
    _load_gate,
    _merge_rows_kernel,
    _merge_state,
    _row_list,
    _segments,
)
from flashqsa.attention.triton_row_prefetch import _ask_early
from flashqsa.backends import multiprocessors
from flashqsa.launching import let_next_start, overlapping, wait_for_writes

SEGMENT_TOKENS = 128
GROUP_SEGMENTS = 4
"""Segments of a group. Both are part of the arithmetic, and so are the tokens of a tile and the warps."""

LOG2_E = 1.4426950408889634

MERGE_PIECES = 16
"""Pieces that a merge has in flight at once."""


@triton.jit
def _load_rows(pages_ptr, base, d, in_row, in_d, EVEN_D: tl.constexpr, dtype: tl.constexpr):
    """[N, D] rows of a cache in the dtype that the product takes; float8 comes as bits where the arch has no cvt."""
    mask = in_row[:, None] if EVEN_D else in_row[:, None] & in_d[None, :]
    return tl.load(pages_ptr + base[:, None] + d[None, :], mask=mask, other=0.0).to(dtype)


@triton.jit
def _attend_loaded(q, k, v, allowed, top, weight, total, scale_log2, PRECISION: tl.constexpr):
    """Add N tokens to a softmax state of M rows; `allowed` [M, N] or [1, N] says who attends what."""
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
def _attend_piece(
    q, slot, live, allowed, top, weight, total, end_slot, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp, stride_vs,
    scale_log2, d, in_d, PAGE_TOKENS: tl.constexpr, EVEN_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add N tokens at given slots to a softmax state of M rows."""
    slot = tl.minimum(slot, end_slot - 1)  # whatever the ids say, nothing outside the caches is read
    page = (slot // PAGE_TOKENS).to(tl.int64)
    slot = slot % PAGE_TOKENS
    k = _load_rows(k_ptr, page * stride_kp + slot * stride_ks, d, live, in_d, EVEN_D, q.dtype)
    v = _load_rows(v_ptr, page * stride_vp + slot * stride_vs, d, live, in_d, EVEN_D, q.dtype)
    return _attend_loaded(q, k, v, allowed, top, weight, total, scale_log2, PRECISION)


@triton.jit
def _load_ids(ids_ptr, j, list_units, BLOCK_TOKENS: tl.constexpr):
    """What the list holds at places `j`, asked for before its count is known; past the count it is not used."""
    unit = j // BLOCK_TOKENS
    return tl.load(ids_ptr + unit, mask=unit < list_units, other=0)


@triton.jit
def _token(ids, j, listed, shift, last_unit, BLOCK_TOKENS: tl.constexpr):
    """Token of the request at list places `j`: of a listed unit, or of the tail after them."""
    unit = j // BLOCK_TOKENS
    unit = tl.where(unit < listed, ids, unit + shift)
    unit = tl.minimum(tl.maximum(unit, 0), last_unit)  # never outside the request
    return unit * BLOCK_TOKENS + j % BLOCK_TOKENS


@triton.jit
def _load_pages(table_ptr, token, live, PAGE_TOKENS: tl.constexpr, PAGED: tl.constexpr):
    """Page of each token; caches without pages have no use for it."""
    return tl.load(table_ptr + token // PAGE_TOKENS, mask=live, other=0) if PAGED else token


@triton.jit
def _slot(token, page, first_slot, num_pages, PAGE_TOKENS: tl.constexpr, PAGED: tl.constexpr):
    """Slots of tokens, whatever table and ids say never outside the caches."""
    if PAGED:
        slot = tl.minimum(tl.maximum(page, 0), num_pages - 1) * PAGE_TOKENS + token % PAGE_TOKENS
    else:
        slot = tl.minimum(tl.maximum(first_slot + token, 0), num_pages * PAGE_TOKENS - 1).to(tl.int32)
    return slot


@triton.jit
def _load_tile(
    slot, live, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp, stride_vs, d, in_d,
    PAGE_TOKENS: tl.constexpr, SAME_STRIDES: tl.constexpr, EVEN_D: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """K and V [N, D] at slots [1, N]."""
    slot = tl.sum(slot, 0)  # a sum of one: what one thread each resolved goes to all that load the row
    page, place = (slot // PAGE_TOKENS).to(tl.int64), slot % PAGE_TOKENS
    at_k = page * stride_kp + place * stride_ks
    at_v = at_k if SAME_STRIDES else page * stride_vp + place * stride_vs
    return _load_rows(k_ptr, at_k, d, live, in_d, EVEN_D, dtype), _load_rows(v_ptr, at_v, d, live, in_d, EVEN_D, dtype)


@triton.jit
def _store_piece(
    piece, top, weight, total, partial_ptr, state_ptr, g, in_g, d,
    BLOCK_G: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Leave a piece to the merge: [piece, head, column] and [piece, 2, head]."""
    tl.store(partial_ptr + piece * (GROUP * BLOCK_D) + g[:, None] * BLOCK_D + d[None, :], total, mask=in_g[:, None])
    tl.store(state_ptr + piece * (2 * BLOCK_G) + g, top)
    tl.store(state_ptr + piece * (2 * BLOCK_G) + BLOCK_G + g, weight)


@triton.jit
def _attend_part(
    pair, part,
    q_ptr, k_ptr, v_ptr, gate_ptr, out_ptr, lse_ptr, partial_ptr, state_ptr,
    block_ids_ptr, block_counts_ptr, visible_ptr, request_ids_ptr, positions_ptr, page_table_ptr, first_slots_ptr,
    k_scale_ptr, v_scale_ptr, scale_log2, k_scale, v_scale, num_pages, list_units, pairs,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_gt, stride_gh, stride_ot, stride_oh, stride_bt, stride_ct, stride_pr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, PAGED: tl.constexpr, SAME_STRIDES: tl.constexpr, SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr, GROUP_SEGMENTS: tl.constexpr, SHARE: tl.constexpr, INCLUDE_TAIL: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_LSE: tl.constexpr, SCALE_TENSORS: tl.constexpr, MODEL_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Attend one part of a row and KV head."""
    head = pair % KV_HEADS
    row = (pair // KV_HEADS).to(tl.int64)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    EVEN_D: tl.constexpr = BLOCK_D == HEAD_DIM
    WHOLE: tl.constexpr = SHARE >= SEGMENTS  # a row is one program's
    ALONE: tl.constexpr = SHARE == 1 and not WHOLE  # a segment is one program's
    TILES: tl.constexpr = SEGMENT // BLOCK_N
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    in_g, in_d = g < GROUP, d < HEAD_DIM
    heads = head * GROUP + g

    # All loads that depend on nothing go out together.
    first_segment = part * SHARE
    begin = first_segment * SEGMENT
    n = tl.arange(0, BLOCK_N)
    column = n[None, :]  # places are resolved by one thread each, then handed to all that load the row
    ids_ptr = block_ids_ptr + row * stride_bt
    ids = ()
    for t in tl.static_range(TILES if ALONE else 2):
        ids = ids + (_load_ids(ids_ptr, begin + t * BLOCK_N + column, list_units, BLOCK_TOKENS),)  # noqa: RUF005
    request = tl.load(request_ids_ptr + row)
    position = tl.load(positions_ptr + row).to(tl.int32)
    visible = tl.load(visible_ptr + row)  # of token lists (no tail) it is not used
    count = tl.load(block_counts_ptr + row * stride_ct)
    q = tl.load(q_ptr + row * stride_qt + heads[:, None] * stride_qh + d[None, :], mask=in_g[:, None] & in_d[None, :],
                other=0.0)  # fmt: skip
    if SCALE_TENSORS:
        k_scale = tl.load(k_scale_ptr)
        v_scale = tl.load(v_scale_ptr)
    length, listed, shift, last_unit = _row_list(request, position, visible, count, BLOCK_TOKENS, INCLUDE_TAIL)
    used = _segments(length, SEGMENT, SEGMENTS)
    if not WHOLE:  # noqa: SIM102  (a constant; a whole row has no return, so that it may stand in a loop)
        if first_segment >= used:
            return
    request = tl.maximum(request, 0).to(tl.int64)
    table_ptr = page_table_ptr + request * stride_pr
    first_slot = tl.load(first_slots_ptr + request) if not PAGED else request
    scale = scale_log2 * k_scale
    k_ptr += head.to(tl.int64) * stride_kh
    v_ptr += head.to(tl.int64) * stride_vh
    end_segment = first_segment + SHARE
    stop = tl.where(end_segment >= used, length, end_segment * SEGMENT)  # the last segment takes all that is left
    partial_ptr += pair.to(tl.int64) * (SEGMENTS * GROUP * BLOCK_D)
    state_ptr += pair.to(tl.int64) * (SEGMENTS * 2 * BLOCK_G)

    nothing = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    no_weight = tl.zeros((BLOCK_G,), tl.float32)
    no_total = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    seg_top, seg_weight, seg_total = nothing, no_weight, no_total
    if not ALONE:
        group_top, group_weight, group_total = nothing, no_weight, no_total
    if WHOLE:
        top, weight, total = nothing, no_weight, no_total

    if ALONE:  # places of all tiles at once: no tile waits for the one before
        slots = ()
        for t in tl.static_range(TILES):
            j = begin + t * BLOCK_N + column
            token = _token(ids[t], j, listed, shift, last_unit, BLOCK_TOKENS)
            page = _load_pages(table_ptr, token, j < stop, PAGE_TOKENS, PAGED)
            slots = slots + (_slot(token, page, first_slot, num_pages, PAGE_TOKENS, PAGED),)  # noqa: RUF005
        for at in tl.range(begin, tl.minimum(stop, begin + SEGMENT), BLOCK_N, num_stages=STAGES):
            slot = slots[0]
            for t in tl.static_range(1, TILES):
                slot = tl.where(at == begin + t * BLOCK_N, slots[t], slot)
            k, v = _load_tile(
                slot, at + n < stop, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp, stride_vs, d, in_d, PAGE_TOKENS,
                SAME_STRIDES, EVEN_D, q.dtype,
            )  # fmt: skip
            seg_top, seg_weight, seg_total = _attend_loaded(
                q, k, v, (at + n < stop)[None, :], seg_top, seg_weight, seg_total, scale, PRECISION
            )
        for at in tl.range(begin + SEGMENT, stop, BLOCK_N, num_stages=1):  # a tail that is longer than half a segment
            j = at + column
            far = _load_ids(ids_ptr, j, list_units, BLOCK_TOKENS)
            token = _token(far, j, listed, shift, last_unit, BLOCK_TOKENS)
            page = _load_pages(table_ptr, token, j < stop, PAGE_TOKENS, PAGED)
            k, v = _load_tile(
                _slot(token, page, first_slot, num_pages, PAGE_TOKENS, PAGED), at + n < stop, k_ptr, v_ptr, stride_kp,
                stride_ks, stride_vp, stride_vs, d, in_d, PAGE_TOKENS, SAME_STRIDES, EVEN_D, q.dtype,
            )  # fmt: skip
            seg_top, seg_weight, seg_total = _attend_loaded(
                q, k, v, (at + n < stop)[None, :], seg_top, seg_weight, seg_total, scale, PRECISION
            )
        _store_piece(first_segment, seg_top, seg_weight, seg_total, partial_ptr, state_ptr, g, in_g, d, BLOCK_G, GROUP,
                     BLOCK_D)  # fmt: skip
    else:
        token = _token(ids[0], begin + column, listed, shift, last_unit, BLOCK_TOKENS)
        page = _load_pages(table_ptr, token, begin + column < stop, PAGE_TOKENS, PAGED)
        later_ids = ids[1]
        for at in tl.range(begin, stop, BLOCK_N, num_stages=STAGES):
            k, v = _load_tile(
                _slot(token, page, first_slot, num_pages, PAGE_TOKENS, PAGED), at + n < stop, k_ptr, v_ptr, stride_kp,
                stride_ks, stride_vp, stride_vs, d, in_d, PAGE_TOKENS, SAME_STRIDES, EVEN_D, q.dtype,
            )  # fmt: skip
            # Ids are two tiles ahead and pages one, so that K and V wait for neither.
            j = at + BLOCK_N + column
            token = _token(later_ids, j, listed, shift, last_unit, BLOCK_TOKENS)
            page = _load_pages(table_ptr, token, j < stop, PAGE_TOKENS, PAGED)
            later_ids = _load_ids(ids_ptr, j + BLOCK_N, list_units, BLOCK_TOKENS)
            seg_top, seg_weight, seg_total = _attend_loaded(
                q, k, v, (at + n < stop)[None, :], seg_top, seg_weight, seg_total, scale, PRECISION
            )
            done = at + BLOCK_N
            if (done >= stop) | ((done % SEGMENT == 0) & (done < used * SEGMENT)):  # a segment is complete
                group_top, group_weight, group_total = _merge_state(
                    group_top, group_weight, group_total, seg_top, seg_weight, seg_total
                )
                seg_top, seg_weight, seg_total = nothing, no_weight, no_total
                s = tl.minimum(at // SEGMENT, used - 1)
                if (done >= stop) | ((s + 1) % GROUP_SEGMENTS == 0):  # and a group
                    if WHOLE:
                        top, weight, total = _merge_state(top, weight, total, group_top, group_weight, group_total)
                    else:
                        _store_piece(s // GROUP_SEGMENTS, group_top, group_weight, group_total, partial_ptr, state_ptr,
                                     g, in_g, d, BLOCK_G, GROUP, BLOCK_D)  # fmt: skip
                    group_top, group_weight, group_total = nothing, no_weight, no_total
    if WHOLE:
        gate = _load_gate(gate_ptr + row * stride_gt, heads, in_g, d, in_d, stride_gh, HAS_GATE)
        _finish_row(top, weight, total, gate, out_ptr + row * stride_ot, lse_ptr + row * Q_HEADS, in_g, d, in_d,
                    stride_oh, v_scale, heads, MODEL_DTYPE, HAS_GATE, HAS_LSE)  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "block_counts_ptr",
        "visible_ptr",
        "request_ids_ptr",
        "positions_ptr",
        "page_table_ptr",
        "first_slots_ptr",
        "k_scale_ptr",
        "v_scale_ptr",
        "num_pages",
        "pairs",
        "stride_pr",
        "requests",
        "table_pages",
    ]
)
def _attend_rows_kernel(
    served_ptr, q_ptr, k_ptr, v_ptr, gate_ptr, out_ptr, lse_ptr, partial_ptr, state_ptr,
    block_ids_ptr, block_counts_ptr, visible_ptr, request_ids_ptr, positions_ptr, page_table_ptr, first_slots_ptr,
    k_scale_ptr, v_scale_ptr, scale_log2, k_scale, v_scale, num_pages, list_units, pairs,
    stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_gt, stride_gh, stride_ot, stride_oh, stride_bt, stride_ct, stride_pr, requests, table_pages,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, PAGED: tl.constexpr, SAME_STRIDES: tl.constexpr, SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr, GROUP_SEGMENTS: tl.constexpr, SHARE: tl.constexpr, INCLUDE_TAIL: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_LSE: tl.constexpr, SCALE_TENSORS: tl.constexpr, MODEL_DTYPE: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, LEFT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    let_next_start(OVERLAP)
    pid = tl.program_id(0)
    if OVERLAP and SHARE == 1 and PAGED:
        _ask_early(
            pid % pairs, pid // pairs, q_ptr, page_table_ptr, positions_ptr, visible_ptr, request_ids_ptr, requests,
            table_pages, stride_qt, stride_qh, stride_pr, Q_HEADS, KV_HEADS, HEAD_DIM, SEGMENTS, BLOCK_G,
        )  # fmt: skip
    wait_for_writes(OVERLAP)
    if LEFT:
        programs = tl.num_programs(0)
        for ahead in tl.range(0, pairs - pid, LEFT * programs):  # all flags at once: mostly nothing is left
            first_pair = pid + ahead
            some_pairs = first_pair + tl.arange(0, LEFT) * programs
            here = some_pairs < pairs
            served = tl.load(served_ptr + some_pairs // KV_HEADS, mask=here, other=1)
            request = tl.load(request_ids_ptr + some_pairs // KV_HEADS, mask=here, other=0)
            if tl.sum((here & ((served == 0) | (request < 0))).to(tl.int32), 0) > 0:
                for i in tl.range(0, LEFT):
                    pair = first_pair + i * programs
                    if pair < pairs:
                        row = pair // KV_HEADS
                        if (tl.load(served_ptr + row) == 0) | (tl.load(request_ids_ptr + row) < 0):
                            _attend_part(
                                pair, 0,
                                q_ptr, k_ptr, v_ptr, gate_ptr, out_ptr, lse_ptr, partial_ptr, state_ptr, block_ids_ptr,
                                block_counts_ptr, visible_ptr, request_ids_ptr, positions_ptr, page_table_ptr,
                                first_slots_ptr, k_scale_ptr, v_scale_ptr, scale_log2, k_scale, v_scale, num_pages,
                                list_units, pairs, stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp,
                                stride_vs, stride_vh, stride_gt, stride_gh, stride_ot, stride_oh, stride_bt, stride_ct,
                                stride_pr, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, PAGE_TOKENS, PAGED, SAME_STRIDES,
                                SEGMENT, SEGMENTS, GROUP_SEGMENTS, SHARE, INCLUDE_TAIL, HAS_GATE, HAS_LSE,
                                SCALE_TENSORS, MODEL_DTYPE, PRECISION, BLOCK_G, BLOCK_D, BLOCK_N, STAGES,
                            )  # fmt: skip
    else:
        _attend_part(
            pid % pairs, pid // pairs,  # the last parts of rows last: most have nothing to do
            q_ptr, k_ptr, v_ptr, gate_ptr, out_ptr, lse_ptr, partial_ptr, state_ptr, block_ids_ptr, block_counts_ptr,
            visible_ptr, request_ids_ptr, positions_ptr, page_table_ptr, first_slots_ptr, k_scale_ptr, v_scale_ptr,
            scale_log2, k_scale, v_scale, num_pages, list_units, pairs, stride_qt, stride_qh, stride_kp, stride_ks,
            stride_kh, stride_vp, stride_vs, stride_vh, stride_gt, stride_gh, stride_ot, stride_oh, stride_bt,
            stride_ct, stride_pr, Q_HEADS, KV_HEADS, HEAD_DIM, BLOCK_TOKENS, PAGE_TOKENS, PAGED, SAME_STRIDES, SEGMENT,
            SEGMENTS, GROUP_SEGMENTS, SHARE, INCLUDE_TAIL, HAS_GATE, HAS_LSE, SCALE_TENSORS, MODEL_DTYPE, PRECISION,
            BLOCK_G, BLOCK_D, BLOCK_N, STAGES,
        )  # fmt: skip


_TORCH_TO_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class RowsKernelConfig:
    """Form and tiles of `_attend_rows_kernel`.

    Only `share` and `stages` may differ between calls: the others are part of the arithmetic.

    Attributes:
        share: Segments that one program attends: 1, a multiple of GROUP_SEGMENTS, or all of a row's.
        block_n: Tokens of a tile.
        warps: Warps of a program.
        stages: Depth of the load pipeline.
    """

    share: int
    block_n: int = 32
    warps: int = 4
    stages: int = 3

    @classmethod
    def choose(cls, pairs, segments, multiprocessors, wide, block_d=256):
        """A segment a program where rows are few, else groups: two programs a multiprocessor at most, while rows allow.

        Args:
            pairs: Rows times KV heads.
            segments: Segments of a row at most.
            multiprocessors: Of the device.
            wide: Whether K, V or queries are fp32.
            block_d: Head dim, up to a power of two.
        """
        share = 1
        if pairs * segments > 2 * multiprocessors:
            share = GROUP_SEGMENTS
            while share < segments and pairs * -(-segments // share) > 2 * multiprocessors:
                share *= 2
        return cls(share, block_n=16 if block_d > 128 else 32, stages=1) if wide else cls(share)


def row_segments(list_tokens: int) -> int:
    """Segments of a row whose list holds up to `list_tokens` tokens; its tail goes into the last."""
    return max(1, -(-list_tokens // SEGMENT_TOKENS))


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
        config: Form and tiles; chosen by shapes when None. `share` and `stages` decide nothing but speed.
    """
    block_ids, block_counts, block_tokens = tokens.unit_ids, tokens.unit_counts, tokens.unit_tokens
    include_tail = tokens.visible_units is not None
    visible_blocks = tokens.visible_units if include_tail else plan.visible_blocks
    rows, q_heads, dim = q.shape
    kv_heads = cache.kv_heads
    segments = row_segments(block_ids.shape[1] * block_tokens)
    pairs = rows * kv_heads
    if pairs == 0:
        return
    wide = cache.k_pages.dtype == torch.float32 or q.dtype == torch.float32
    block_g = max(16, triton.next_power_of_2(q_heads // kv_heads))
    block_d = max(16, triton.next_power_of_2(dim))  # products are at least so deep
    config = config or RowsKernelConfig.choose(pairs, segments, multiprocessors(q.device), wide, block_d)
    if served is not None:  # how many are left is not known here: programs loop over whole rows
        config = dataclasses.replace(config, share=segments)
    share = min(config.share, segments)
    parts = -(-segments // share)
    if parts > 1:
        partial = plan.scratch("attend.partial", (pairs * segments * (q_heads // kv_heads) * block_d,), torch.float32)
        state = plan.scratch("attend.state", (pairs * segments * 2 * block_g,), torch.float32)
    else:
        partial = state = lse if lse is not None else out
    paged = plan.page_table is not None
    scale_tensors = isinstance(cache.k_scale, torch.Tensor) or isinstance(cache.v_scale, torch.Tensor)
    k_scale, v_scale = _scales(cache, q.device) if scale_tensors else (q, q)
    programs = pairs * parts if served is None else min(pairs, 2 * multiprocessors(q.device))
    _attend_rows_kernel[(programs,)](
        q if served is None else served, q, cache.k_pages, cache.v_pages,
        gate if gate is not None else q, out, lse if lse is not None else out,
        partial, state, block_ids, block_counts, visible_blocks, plan.request_ids, plan.positions,
        plan.page_table if paged else plan.request_ids, plan.request_ids if paged else plan.first_slots,
        k_scale, v_scale, softmax_scale * LOG2_E,
        1.0 if scale_tensors or cache.k_scale is None else cache.k_scale,
        1.0 if scale_tensors or cache.v_scale is None else cache.v_scale,
        cache.k_pages.shape[0], block_ids.shape[1], pairs,
        q.stride(0), q.stride(1), *cache.k_pages.stride()[:3], *cache.v_pages.stride()[:3],
        *(gate.stride()[:2] if gate is not None else (0, 0)), out.stride(0), out.stride(1),
        block_ids.stride(0), block_counts.stride(0), plan.page_table.stride(0) if paged else 0,
        plan.num_requests, plan.page_table.shape[1] if paged else 0,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_TOKENS=block_tokens,
        PAGE_TOKENS=cache.k_pages.shape[1], PAGED=paged,
        SAME_STRIDES=cache.k_pages.stride()[:3] == cache.v_pages.stride()[:3], SEGMENT=SEGMENT_TOKENS,
        SEGMENTS=segments, GROUP_SEGMENTS=GROUP_SEGMENTS, SHARE=share, INCLUDE_TAIL=include_tail,
        HAS_GATE=gate is not None, HAS_LSE=lse is not None, SCALE_TENSORS=scale_tensors,
        MODEL_DTYPE=_TORCH_TO_TRITON[q.dtype], PRECISION="ieee", BLOCK_G=block_g, BLOCK_D=block_d,
        BLOCK_N=config.block_n, STAGES=config.stages, LEFT=0 if served is None else 128,
        num_warps=config.warps, enable_fp_fusion=False, **overlapping(q.device),
    )  # fmt: skip
    if parts > 1:
        held = 1 if share == 1 else GROUP_SEGMENTS
        pieces = -(-segments // held)
        group_pieces = GROUP_SEGMENTS // held
        _merge_rows_kernel[(rows * q_heads,)](
            gate if gate is not None else q, out, lse if lse is not None else out, partial, state, block_counts,
            visible_blocks, plan.request_ids, plan.positions, v_scale,
            1.0 if scale_tensors or cache.v_scale is None else cache.v_scale,
            *(gate.stride()[:2] if gate is not None else (0, 0)), out.stride(0), out.stride(1), block_counts.stride(0),
            Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_TOKENS=block_tokens, SEGMENT=SEGMENT_TOKENS,
            SEGMENTS=segments, HELD=held, GROUP_PIECES=group_pieces, INCLUDE_TAIL=include_tail,
            HAS_GATE=gate is not None, HAS_LSE=lse is not None, SCALE_TENSORS=scale_tensors,
            MODEL_DTYPE=_TORCH_TO_TRITON[q.dtype], BLOCK_G=block_g, BLOCK_D=block_d,
            BATCH=max(group_pieces, min(MERGE_PIECES, triton.next_power_of_2(pieces))), num_warps=2,
            enable_fp_fusion=False, **overlapping(q.device),
        )  # fmt: skip


def _scales(cache, device):
    """Both scales as fp32 tensors on the device; a float beside a tensor is copied there."""
    both = (cache.k_scale, cache.v_scale)
    return tuple(
        scale if isinstance(scale, torch.Tensor) else torch.full((1,), 1.0 if scale is None else scale, device=device)
        for scale in both
    )
