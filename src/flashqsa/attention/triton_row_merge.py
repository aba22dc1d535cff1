# mypy: ignore-errors
"""The merge of rows whose segments were attended by several programs, and what it shares with rows of one program.

Pieces of a row (segments, or groups of them) lie in scratch as [row, KV head, piece, head, column] with states
[row, KV head, piece, (top, weight), head]. One program a row and query head folds them in their order: segments into
groups, groups into the row.
"""

import triton
import triton.language as tl

from flashqsa.launching import ask_for, wait_for_previous


@triton.jit
def _merge_state(top, weight, total, seg_top, seg_weight, seg_total):
    """Fold one piece into the running state. Explicit fma: all forms must round alike."""
    new_top = tl.maximum(top, seg_top, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep = tl.math.exp2(top - base)
    take = tl.math.exp2(seg_top - base)
    weight = tl.fma(weight, keep, seg_weight * take)
    total = tl.fma(total, tl.broadcast_to(keep[:, None], total.shape), seg_total * take[:, None])
    return new_top, weight, total


@triton.jit
def _row_list(request, position, visible, count, BLOCK_TOKENS: tl.constexpr, INCLUDE_TAIL: tl.constexpr):
    """Tokens of a row's list; units that its ids name; what to add to later units; the last unit it may see."""
    length = count * BLOCK_TOKENS
    listed = count
    shift = count * 0
    if INCLUDE_TAIL:
        length += tl.maximum(position + 1 - visible * BLOCK_TOKENS, 0)
        listed = tl.where(count >= visible, 0, count)  # a row that attends all it sees needs no ids: units are blocks
        shift = visible - count
    length = tl.where(request < 0, 0, length)
    return length, listed, shift, tl.maximum(position, 0) // BLOCK_TOKENS


@triton.jit
def _segments(length, SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr):
    """Segments of a list: its length over SEGMENT, rounded; the last takes what is left."""
    used = tl.minimum((length + SEGMENT // 2 - 1) // SEGMENT, SEGMENTS)
    return tl.where(length > 0, tl.maximum(used, 1), 0)


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


@triton.jit(do_not_specialize=["block_counts_ptr", "visible_ptr", "request_ids_ptr", "positions_ptr", "v_scale_ptr"])
def _merge_rows_kernel(
    gate_ptr, out_ptr, lse_ptr, partial_ptr, state_ptr, block_counts_ptr, visible_ptr, request_ids_ptr, positions_ptr,
    v_scale_ptr, v_scale, stride_gt, stride_gh, stride_ot, stride_oh, stride_ct,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    SEGMENT: tl.constexpr, SEGMENTS: tl.constexpr, HELD: tl.constexpr, GROUP_PIECES: tl.constexpr,
    INCLUDE_TAIL: tl.constexpr, HAS_GATE: tl.constexpr, HAS_LSE: tl.constexpr, SCALE_TENSORS: tl.constexpr,
    MODEL_DTYPE: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BATCH: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program a row and query head; BATCH pieces are asked for at once, before it is known how many there are."""
    head = tl.program_id(0) % Q_HEADS
    row = (tl.program_id(0) // Q_HEADS).to(tl.int64)
    if OVERLAP and HAS_GATE:
        ask_for(gate_ptr + row * stride_gt + head * stride_gh + tl.arange(0, BLOCK_D))
    wait_for_previous(OVERLAP)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    pair = row * KV_HEADS + head // GROUP
    one = tl.arange(0, 1)
    heads = head + one
    d = tl.arange(0, BLOCK_D)
    in_d = d < HEAD_DIM
    partial_ptr += pair * (SEGMENTS * GROUP * BLOCK_D) + head % GROUP * BLOCK_D
    state_ptr += pair * (SEGMENTS * 2 * BLOCK_G) + head % GROUP
    gate_ptr += row * stride_gt
    gate = _load_gate(gate_ptr, heads, one == 0, d, in_d, stride_gh, HAS_GATE)
    request = tl.load(request_ids_ptr + row + one)
    position = tl.load(positions_ptr + row + one).to(tl.int32)
    visible = tl.load(visible_ptr + row + one)
    count = tl.load(block_counts_ptr + row * stride_ct + one)
    length, _, _, _ = _row_list(request, position, visible, count, BLOCK_TOKENS, INCLUDE_TAIL)
    pieces = (_segments(length, SEGMENT, SEGMENTS) + HELD - 1) // HELD
    top = tl.full((1,), float("-inf"), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    total = tl.zeros((1, BLOCK_D), tl.float32)
    MOST: tl.constexpr = (SEGMENTS + HELD - 1) // HELD
    for first in tl.range(0, MOST, BATCH, num_stages=1):
        tops, weights, totals = (), (), ()
        for i in tl.static_range(BATCH):
            there = (first + i < MOST) & (one == 0)
            at = state_ptr + (first + i) * (2 * BLOCK_G) + one
            tops = tops + (tl.load(at, mask=there, other=float("-inf")),)  # noqa: RUF005
            weights = weights + (tl.load(at + BLOCK_G, mask=there, other=0.0),)  # noqa: RUF005
            at = partial_ptr + (first + i) * (GROUP * BLOCK_D) + d[None, :]
            totals = totals + (tl.load(at, mask=there[:, None] & in_d[None, :], other=0.0),)  # noqa: RUF005
        for group in tl.static_range(0, BATCH, GROUP_PIECES):
            group_top = tl.full((1,), float("-inf"), tl.float32)
            group_weight = tl.zeros((1,), tl.float32)
            group_total = tl.zeros((1, BLOCK_D), tl.float32)
            for i in tl.static_range(GROUP_PIECES):
                there = first + group + i < pieces  # memory past them holds another step's
                group_top, group_weight, group_total = _merge_state(
                    group_top, group_weight, group_total,
                    tl.where(there, tops[group + i], float("-inf")), tl.where(there, weights[group + i], 0.0),
                    tl.where(there[:, None], totals[group + i], 0.0),
                )  # fmt: skip
            top, weight, total = _merge_state(top, weight, total, group_top, group_weight, group_total)
    if SCALE_TENSORS:
        v_scale = tl.load(v_scale_ptr)
    _finish_row(top, weight, total, gate, out_ptr + row * stride_ot, lse_ptr + row * Q_HEADS, one == 0, d, in_d,
                stride_oh, v_scale, heads, MODEL_DTYPE, HAS_GATE, HAS_LSE)  # fmt: skip
