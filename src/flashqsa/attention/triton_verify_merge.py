# mypy: ignore-errors
"""The merge of verification: what programs left of the spans of a tile becomes the output of its rows.

Spans lie in scratch as [tile, KV head, span, row x head, column], with states [tile, KV head, span, (top, weight),
row x head]. One program a row and query head folds them in their order.
"""

import triton
import triton.language as tl

from flashqsa.attention.triton_row_merge import _finish_row, _load_gate, _merge_state
from flashqsa.attention.triton_rows import _TORCH_TO_TRITON
from flashqsa.attention.triton_verify_lists import MOST_SPANS, TILE_FIELDS
from flashqsa.launching import overlapping, wait_for_previous


@triton.jit(do_not_specialize=["request_ids_ptr", "first_number"])
def _merge_spans_kernel(
    gate_ptr, out_ptr, lse_ptr, partial_ptr, state_ptr, tiles_ptr, request_ids_ptr, first_number,
    stride_gt, stride_gh, stride_ot, stride_oh,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEIGHT: tl.constexpr,
    MOST_SPANS: tl.constexpr, TILE_FIELDS: tl.constexpr, HAS_GATE: tl.constexpr, HAS_LSE: tl.constexpr,
    MODEL_DTYPE: tl.constexpr, BLOCK_D: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    head = tl.program_id(0) % Q_HEADS
    j = tl.program_id(0) // Q_HEADS % HEIGHT
    number = tl.program_id(0) // (Q_HEADS * HEIGHT)
    tiles_ptr += (first_number + number) * TILE_FIELDS
    first_row = tl.load(tiles_ptr)
    count = tl.load(tiles_ptr + 1)
    spans = tl.load(tiles_ptr + 5)
    if j >= count:
        return
    row = (first_row + j).to(tl.int64)
    one = tl.arange(0, 1)
    heads = head + one
    d = tl.arange(0, BLOCK_D)
    in_d = d < HEAD_DIM
    gate = _load_gate(gate_ptr + row * stride_gt, heads, one == 0, d, in_d, stride_gh, HAS_GATE)
    request = tl.load(request_ids_ptr + row + one)
    m = j * GROUP + head % GROUP
    M: tl.constexpr = HEIGHT * GROUP
    piece = (number * KV_HEADS + head // GROUP).to(tl.int64) * MOST_SPANS
    tops, weights, totals = (), (), ()
    for s in tl.static_range(MOST_SPANS):
        there = one + s < spans
        at = state_ptr + (piece + s) * (2 * M) + m + one
        tops = tops + (tl.load(at, mask=there, other=float("-inf")),)  # noqa: RUF005
        weights = weights + (tl.load(at + M, mask=there, other=0.0),)  # noqa: RUF005
        at = partial_ptr + ((piece + s) * M + m) * HEAD_DIM + d[None, :]
        totals = totals + (tl.load(at, mask=there[:, None] & in_d[None, :], other=0.0),)  # noqa: RUF005
    top = tl.full((1,), float("-inf"), tl.float32)
    weight = tl.zeros((1,), tl.float32)
    total = tl.zeros((1, BLOCK_D), tl.float32)
    for s in tl.static_range(MOST_SPANS):
        top, weight, total = _merge_state(top, weight, total, tops[s], weights[s], totals[s])
    _finish_row(
        top, weight, total, gate, out_ptr + row * stride_ot, lse_ptr + row * Q_HEADS, request >= 0, d,
        in_d, stride_oh, 1.0, heads, MODEL_DTYPE, HAS_GATE, HAS_LSE,
    )  # fmt: skip


def merge_spans(partial, state, lists, plan, kv_heads, first_number, numbers, dtype, *, gate, out, lse):
    """Fill the rows of `out` and `lse` that lie in some tiles.

    Args:
        partial: [numbers, Hkv, MOST_SPANS, M, D] fp32 sums of values, M = height x heads of a KV head.
        state: [numbers, Hkv, MOST_SPANS, 2, M] fp32: largest score times log2(e), and the weights' sum.
        lists: The step's `VerifyLists`.
        plan: The step.
        kv_heads: KV heads.
        first_number: Number of the first tile.
        numbers: Tile numbers.
        dtype: Dtype of the queries, to which the output is rounded before the gate.
        gate: [T, Hq, D] or None.
        out: [T, Hq, D] output buffer.
        lse: [T, Hq] fp32 buffer, or None.
    """
    q_heads, dim = out.shape[1:]
    _merge_spans_kernel[(numbers * lists.height * q_heads,)](
        gate if gate is not None else out, out, lse if lse is not None else out, partial, state, lists.tiles,
        plan.request_ids, first_number,
        *(gate.stride()[:2] if gate is not None else (0, 0)), out.stride(0), out.stride(1),
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=dim, HEIGHT=lists.height, MOST_SPANS=MOST_SPANS,
        TILE_FIELDS=TILE_FIELDS, HAS_GATE=gate is not None, HAS_LSE=lse is not None,
        MODEL_DTYPE=_TORCH_TO_TRITON[dtype],
        BLOCK_D=triton.next_power_of_2(dim), num_warps=2, enable_fp_fusion=False, **overlapping(out.device),
    )  # fmt: skip
