# mypy: ignore-errors
"""Attention of union tiles on the GPU: neighbouring rows of a request share the loads of every block that one attends.

A tile is the rows x heads of one KV head, on the M side of both products. It walks the union list of its rows, masking
by the rows' bits, then the tokens from the first tail on, masking by position. A row's bits depend on its tile alone:
the rows of the request that lie between two multiples of the tile height, and what they selected.

Work: a union of `u` tokens costs 4 * BLOCK_M * D * u flop a KV head; rows alone would load 2 * D numbers a token each.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from flashqsa.attention.triton_rows import _TORCH_TO_TRITON, LOG2_E, _attend_piece, _scales
from flashqsa.attention.triton_union import MOST_TILE_ROWS, union_lists
from flashqsa.launching import overlapping, wait_for_previous


@triton.jit(do_not_specialize=[
    "visible_ptr", "request_ids_ptr", "positions_ptr", "page_table_ptr", "first_slots_ptr", "k_scale_ptr",
    "v_scale_ptr", "end_slot", "stride_pr",
])  # fmt: skip
def _attend_tiles_kernel(
    q_ptr, k_ptr, v_ptr, gate_ptr, out_ptr, lse_ptr,
    first_rows_ptr, row_counts_ptr, union_counts_ptr, slots_ptr, bits_ptr,
    visible_ptr, request_ids_ptr, positions_ptr, page_table_ptr, first_slots_ptr,
    k_scale_ptr, v_scale_ptr, scale_log2, k_scale, v_scale, end_slot,
    stride_lists, stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_gt, stride_gh, stride_ot, stride_oh, stride_pr,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PAGE_TOKENS: tl.constexpr, PAGED: tl.constexpr, INCLUDE_TAIL: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_LSE: tl.constexpr, SCALE_TENSORS: tl.constexpr, MODEL_DTYPE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    pid = tl.program_id(0)
    head = pid % KV_HEADS
    number = pid // KV_HEADS
    count = tl.load(row_counts_ptr + number)
    blocks = tl.load(union_counts_ptr + number)
    if count == 0:
        return
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    EVEN_D: tl.constexpr = BLOCK_D == HEAD_DIM
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_d = d < HEAD_DIM
    j = m // GROUP  # row of the tile
    in_m = j < count
    first_row = tl.load(first_rows_ptr + number).to(tl.int64)
    row = first_row + tl.minimum(j, count - 1)
    heads = head * GROUP + m % GROUP
    position = tl.load(positions_ptr + row).to(tl.int32)
    request = tl.load(request_ids_ptr + row)
    in_m &= request >= 0
    first_position = tl.load(positions_ptr + first_row).to(tl.int32)
    if SCALE_TENSORS:
        k_scale = tl.load(k_scale_ptr)
        v_scale = tl.load(v_scale_ptr)
    scale = scale_log2 * k_scale
    k_ptr += head * stride_kh
    v_ptr += head * stride_vh
    in_q = in_m[:, None] & in_d[None, :]
    q = tl.load(q_ptr + row[:, None] * stride_qt + heads[:, None] * stride_qh + d[None, :], mask=in_q, other=0.0)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    slots_ptr += number.to(tl.int64) * stride_lists
    bits_ptr += number.to(tl.int64) * stride_lists
    tokens = blocks * BLOCK_TOKENS
    for at in tl.range(0, tokens, BLOCK_N, num_stages=STAGES):
        n = at + tl.arange(0, BLOCK_N)
        live = n < tokens
        slot = tl.load(slots_ptr + n // BLOCK_TOKENS, mask=live, other=0) + n % BLOCK_TOKENS
        bits = tl.load(bits_ptr + n // BLOCK_TOKENS, mask=live, other=0)
        allowed = (((bits[None, :] >> j[:, None]) & 1) != 0) & in_m[:, None]
        top, weight, total = _attend_piece(
            q, slot, live, allowed, top, weight, total, end_slot, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp,
            stride_vs, scale, d, in_d, PAGE_TOKENS, EVEN_D, PRECISION,
        )  # fmt: skip
    if INCLUDE_TAIL:
        tail_start = tl.load(visible_ptr + row) * BLOCK_TOKENS
        request_id = tl.maximum(tl.load(request_ids_ptr + first_row), 0).to(tl.int64)
        table_ptr = page_table_ptr + request_id * stride_pr
        base = tl.load(first_slots_ptr + request_id) if not PAGED else request_id
        first_token = tl.maximum(tl.min(tl.where(in_m, tail_start, first_position + count), 0), 0)
        for at in tl.range(first_token, first_position + count, BLOCK_N, num_stages=1):
            token = at + tl.arange(0, BLOCK_N)
            live = token < first_position + count
            if PAGED:
                page = tl.load(table_ptr + token // PAGE_TOKENS, mask=live, other=0)
                slot = tl.maximum(page * PAGE_TOKENS + token % PAGE_TOKENS, 0)
            else:
                slot = tl.maximum(base + token, 0).to(tl.int32)
            allowed = (token[None, :] >= tail_start[:, None]) & (token[None, :] <= position[:, None]) & in_m[:, None]
            # A token that is nobody's tail is not read: its V may be NaN.
            live &= tl.max(allowed.to(tl.int32), 0) != 0
            top, weight, total = _attend_piece(
                q, slot, live, allowed, top, weight, total, end_slot, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp,
                stride_vs, scale, d, in_d, PAGE_TOKENS, EVEN_D, PRECISION,
            )  # fmt: skip

    empty = weight == 0.0
    out = total / tl.where(empty, 1.0, weight)[:, None] * v_scale
    if HAS_GATE:
        at = gate_ptr + row[:, None] * stride_gt + heads[:, None] * stride_gh + d[None, :]
        gate = tl.load(at, mask=in_q, other=0.0).to(tl.float32)
        out = out.to(MODEL_DTYPE).to(tl.float32) * tl.sigmoid(gate)
    out = tl.where(empty[:, None], 0.0, out)  # last, because the gate of an empty row may be NaN
    at = out_ptr + row[:, None] * stride_ot + heads[:, None] * stride_oh + d[None, :]
    tl.store(at, out.to(out_ptr.dtype.element_ty), mask=in_q)
    if HAS_LSE:
        lse = (top + tl.math.log2(tl.where(empty, 1.0, weight))) * 0.6931471805599453
        tl.store(lse_ptr + row * Q_HEADS + heads, tl.where(empty, float("-inf"), lse), mask=in_m)


@dataclass(frozen=True)
class TilesKernelConfig:
    """Tiles of `_attend_tiles_kernel`; all of them are part of the arithmetic.

    Attributes:
        block_m: Rows x heads of a program.
        block_n: Tokens of a tile.
        warps: Warps of a program.
        stages: Depth of the load pipeline.
        most_share: As in `union_lists`: where unions are larger, rows one by one are faster.
    """

    block_m: int = 64
    block_n: int = 32
    warps: int = 4
    stages: int = 3
    most_share: float = 0.6

    @classmethod
    def choose(cls, query_group, wide):
        """Tiles of 64 rows x heads, which fit every device.

        Args:
            query_group: Query heads that share a KV head.
            wide: Whether K, V or queries are fp32.
        """
        if wide:
            return cls(block_m=max(16, triton.next_power_of_2(query_group)), block_n=16, warps=8, stages=1)
        return cls(block_m=max(64, triton.next_power_of_2(query_group)))


def tile_height(query_group, block_m):
    """Rows of a tile: as many as fill `block_m` with their heads."""
    return max(1, min(MOST_TILE_ROWS, block_m // query_group))


def attend_tiles_triton(q, cache, plan, tokens, softmax_scale, *, gate, out, lse, narrow=0, config=None):
    """Fill the rows of `out` and `lse` that lie in tiles: those of requests with at least `LEAST_ROWS` rows, or fewer.

    Args:
        q: [T, Hq, D] queries.
        cache: Caches of the layer.
        plan: The step; owns the scratch.
        tokens: `RowTokens` of all T rows.
        softmax_scale: Multiplies the scores.
        gate: [T, Hq, D] or None.
        out: [T, Hq, D] output buffer.
        lse: [T, Hq] fp32 buffer, or None.
        narrow: As in `union_lists`.
        config: Tiles; chosen by shapes when None.

    Returns:
        The `UnionLists` of the step, None where it has no rows.
    """
    q_heads, dim = q.shape[1:]
    kv_heads = cache.kv_heads
    group = q_heads // kv_heads
    wide = cache.k_pages.dtype == torch.float32 or q.dtype == torch.float32
    block_d = max(16, triton.next_power_of_2(dim))  # products are at least so deep
    config = config or TilesKernelConfig.choose(group, wide)
    page_tokens = cache.k_pages.shape[1]
    lists = union_lists(
        tokens, plan, page_tokens, tile_height(group, config.block_m), narrow=narrow, most_share=config.most_share
    )
    if lists is None:
        return None
    include_tail = tokens.visible_units is not None
    visible = tokens.visible_units if include_tail else plan.visible_blocks
    paged = plan.page_table is not None
    scale_tensors = isinstance(cache.k_scale, torch.Tensor) or isinstance(cache.v_scale, torch.Tensor)
    k_scale, v_scale = _scales(cache, q.device) if scale_tensors else (q, q)
    _attend_tiles_kernel[(lists.row_counts.shape[0] * kv_heads,)](
        q, cache.k_pages, cache.v_pages, gate if gate is not None else q, out, lse if lse is not None else out,
        lists.first_rows, lists.row_counts, lists.block_counts, lists.slot_ids, lists.row_bits,
        visible, plan.request_ids, plan.positions,
        plan.page_table if paged else plan.request_ids, plan.request_ids if paged else plan.first_slots,
        k_scale, v_scale, softmax_scale * LOG2_E,
        1.0 if scale_tensors or cache.k_scale is None else cache.k_scale,
        1.0 if scale_tensors or cache.v_scale is None else cache.v_scale,
        cache.k_pages.shape[0] * page_tokens, lists.slot_ids.shape[1],
        q.stride(0), q.stride(1), *cache.k_pages.stride()[:3], *cache.v_pages.stride()[:3],
        *(gate.stride()[:2] if gate is not None else (0, 0)), out.stride(0), out.stride(1),
        plan.page_table.stride(0) if paged else 0,
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_TOKENS=tokens.unit_tokens, PAGE_TOKENS=page_tokens,
        PAGED=paged, INCLUDE_TAIL=include_tail, HAS_GATE=gate is not None, HAS_LSE=lse is not None,
        SCALE_TENSORS=scale_tensors, MODEL_DTYPE=_TORCH_TO_TRITON[q.dtype], PRECISION="ieee",
        BLOCK_M=config.block_m, BLOCK_D=block_d, BLOCK_N=config.block_n, STAGES=config.stages,
        num_warps=config.warps, enable_fp_fusion=False, **overlapping(q.device),
    )  # fmt: skip
    return lists
