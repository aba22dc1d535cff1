# mypy: ignore-errors
"""Attention of union tiles in Gluon, for compute capability 9.0: `triton_tiles` in two thirds of its time.

A tile is the rows x heads of one KV head. One warpgroup copies keys and values of its tokens into a ring in shared
memory, row by row and without registers; one or two others attend 64 rows x heads each, both products on wgmma. The
scores of the next tokens are issued before the values of the last ones are added, so that the softmax between them
runs beside the tensor cores.

The list of a tile's tokens is its union list and then the tokens from its first tail on. Whoever copies a token also
works out which rows attend it, a bit a row; those who attend know no positions.
"""

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashqsa.attention.triton_rows import LOG2_E
from flashqsa.attention.triton_tiles import tile_height
from flashqsa.attention.triton_union import union_lists
from flashqsa.errors import UnsupportedError
from flashqsa.launching import overlapping

_async_load = getattr(async_copy, "async_load", None)
if _async_load is None:  # the name before Triton 3.7
    _async_load = async_copy.async_copy_global_to_shared

TILE_TOKENS = 64
STAGES = 2
HEAD_DIMS = (64, 128, 256)
UNIT_TOKENS = (1, 2, 4, 8, 16)


@gluon.jit
def _by_token(blocks, steps, ROWS: gl.constexpr):
    """[N / b * b] from a number a block, [N / b], and one a token of a block, [b]."""
    numbers = blocks[:, None] + steps[None, :]
    return gl.convert_layout(numbers.reshape([numbers.shape[0] * numbers.shape[1]]), ROWS)


@gluon.jit
def _copy_rows(pages_ptr, pages, stage, page, slot, members, live, stride_p, stride_s, ROWS: gl.constexpr):
    """Begin to copy the tokens of some blocks into a stage; rows that are not `live` become zeros."""
    d = gl.arange(0, pages.shape[2], layout=gl.SliceLayout(0, ROWS.parent))
    at = _by_token(page * stride_p + slot * stride_s, members * stride_s.to(gl.int64), ROWS)
    at = at[:, None] + d[None, :]
    at = pages_ptr + gl.max_contiguous(gl.multiple_of(at, [1, 8]), [1, 8])  # the launcher refuses other strides
    if live is None:
        _async_load(pages.index(stage), at)
    else:
        _async_load(pages.index(stage), at, mask=live[:, None])


@gluon.jit
def _copy_tokens(
    step, slot, bits, members, live, end_slot, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp, stride_vs,
    keys, values, bits_at, full_k, empty_k, full_v, empty_v,
    PAGE_TOKENS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr,
):  # fmt: skip
    """Copy the blocks that begin at `slot` into the stage of a step, and who attends each of their tokens."""
    slot = gl.minimum(slot, end_slot - members.shape[0])  # whatever the ids say, nothing outside the caches is read
    page = (slot // PAGE_TOKENS).to(gl.int64)
    slot = slot % PAGE_TOKENS
    stage = step % STAGES
    phase = (step // STAGES & 1) ^ 1
    mbarrier.wait(empty_k.index(stage), phase)
    _copy_rows(k_ptr, keys, stage, page, slot, members, live, stride_kp, stride_ks, ROWS)
    async_copy.mbarrier_arrive(full_k.index(stage), increment_count=False)
    bits_at.index(stage).store(bits)
    mbarrier.arrive(full_k.index(stage), count=1)
    mbarrier.wait(empty_v.index(stage), phase)
    _copy_rows(v_ptr, values, stage, page, slot, members, live, stride_vp, stride_vs, ROWS)
    async_copy.mbarrier_arrive(full_v.index(stage), increment_count=False)


@gluon.jit
def _copy_all(
    steps, tokens, end, first_token, first_row, first_position, count, slots_ptr, bits_ptr, visible_ptr, table_ptr,
    end_slot, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp, stride_vs, keys, values, bits_at,
    full_k, empty_k, full_v, empty_v,
    BLOCK_TOKENS: gl.constexpr, PAGE_TOKENS: gl.constexpr, INCLUDE_TAIL: gl.constexpr,
    HEAD_DIM: gl.constexpr, TILE_TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup that copies: first steps of whole blocks of the list, then those with its end and the tail."""
    BLOCKS: gl.constexpr = TILE_TOKENS // BLOCK_TOKENS
    LANES: gl.constexpr = HEAD_DIM // 8  # of 16 bytes, that make a row
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([BLOCK_TOKENS, 8], [32 // LANES, LANES], [4, 1], [1, 0]))
    MEMBERS: gl.constexpr = gl.SliceLayout(
        2, gl.BlockedLayout([1, BLOCK_TOKENS, 8], [32 // LANES, 1, LANES], [4, 1, 1], [2, 1, 0])
    )
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, MEMBERS))
    members = gl.arange(0, BLOCK_TOKENS, layout=gl.SliceLayout(0, MEMBERS))
    blocks = tokens // BLOCK_TOKENS
    whole = tokens // TILE_TOKENS
    next_slot = gl.load(slots_ptr + block, mask=block < blocks, other=0)
    next_bits = gl.load(bits_ptr + block, mask=block < blocks, other=0)
    for step in range(whole):
        slot, bits = next_slot, next_bits
        at = (step + 1) * BLOCKS + block
        next_slot = gl.load(slots_ptr + at, mask=at < blocks, other=0)
        next_bits = gl.load(bits_ptr + at, mask=at < blocks, other=0)
        _copy_tokens(
            step, slot, _by_token(bits, members * 0, ROWS), members, None, end_slot, k_ptr, v_ptr, stride_kp,
            stride_ks, stride_vp, stride_vs, keys, values, bits_at, full_k, empty_k, full_v, empty_v,
            PAGE_TOKENS, STAGES, ROWS,
        )  # fmt: skip
    for step in range(whole, steps):
        slot = next_slot
        bits = _by_token(next_bits, members * 0, ROWS)
        next_slot = next_slot * 0
        next_bits = next_bits * 0
        if INCLUDE_TAIL:
            n = step * TILE_TOKENS + _by_token(block * BLOCK_TOKENS, members, ROWS)
            token = first_token + n - tokens
            for j in range(count):
                start = gl.load(visible_ptr + first_row + j) * BLOCK_TOKENS
                attends = (n >= tokens) & (token >= start) & (token <= first_position + j)
                bits |= gl.where(attends, 1, 0) << j
            n = (step * BLOCKS + block) * BLOCK_TOKENS
            late = (n >= tokens) & (n < end)
            token = first_token + n - tokens
            page = gl.load(table_ptr + token // PAGE_TOKENS, mask=late, other=0)
            slot = gl.where(late, gl.maximum(page * PAGE_TOKENS + token % PAGE_TOKENS, 0), slot)
        # A token that is nobody's is not read: its V may be NaN.
        _copy_tokens(
            step, slot, bits, members, bits != 0, end_slot, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp, stride_vs,
            keys, values, bits_at, full_k, empty_k, full_v, empty_v, PAGE_TOKENS, STAGES, ROWS,
        )  # fmt: skip


@gluon.jit
def _softmax(scores, bits, own, top, weight, scale):
    """Scores of TILE_TOKENS more tokens into weights: (new top, what earlier weights keep, new weight, weights)."""
    scores = gl.where((bits[None, :] & own[:, None]) != 0, scores, float("-inf"))
    new_top = gl.maximum(top, gl.max(scores, 1) * scale, propagate_nan=tl.PropagateNan.ALL)
    base = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(gl.fma(scores, gl.full_like(scores, 0.0) + scale, gl.full_like(scores, 0.0) - base[:, None]))
    keep = gl.exp2(top - base)
    weight = gl.fma(weight, keep, gl.sum(p, 1))
    return new_top, keep, weight, p


@gluon.jit
def _attend_half(
    steps, first_row, count, head, q_ptr, gate_ptr, out_ptr, lse_ptr, request_ids_ptr, scale,
    stride_qt, stride_qh, stride_gt, stride_gh, stride_ot, stride_oh,
    queries, keys, values, bits_at, full_k, empty_k, full_v, empty_v,
    PART: gl.constexpr, GROUP: gl.constexpr, Q_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr,
    HAS_GATE: gl.constexpr, HAS_LSE: gl.constexpr, TILE_TOKENS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A warpgroup that attends 64 rows x heads."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_TOKENS, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    LANES: gl.constexpr = HEAD_DIM // 8
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    dtype: gl.constexpr = q_ptr.dtype.element_ty

    m = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
    d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOAD))
    row = first_row.to(gl.int64) + gl.minimum(m // GROUP, count - 1)
    at = q_ptr + (row * stride_qt + (head * GROUP + m % GROUP) * stride_qh)[:, None] + d[None, :]
    queries.store(gl.load(at, mask=(m // GROUP < count)[:, None], other=0.0))
    fence_async_shared()

    m = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    j = m // GROUP
    own = gl.where(j < count, gl.full_like(j, 1) << gl.minimum(j, 31), 0)
    top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
    weight = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES))
    total = gl.zeros([64, HEAD_DIM], gl.float32, layout=TOTAL)
    nothing = gl.zeros([64, TILE_TOKENS], gl.float32, layout=SCORES)

    mbarrier.wait(full_k.index(0), 0)
    fence_async_shared()
    scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    bits = bits_at.index(0).load(gl.SliceLayout(0, SCORES))
    mbarrier.arrive(empty_k.index(0), count=1)
    top, keep, weight, p = _softmax(scores, bits, own, top, weight, scale)
    p = gl.convert_layout(p.to(dtype), WEIGHTS)
    for step in range(1, steps):
        stage = step % STAGES
        before = (step - 1) % STAGES
        mbarrier.wait(full_k.index(stage), step // STAGES & 1)
        mbarrier.wait(full_v.index(before), (step - 1) // STAGES & 1)
        fence_async_shared()
        scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        total = warpgroup_mma(p, values.index(before), total, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        bits = bits_at.index(stage).load(gl.SliceLayout(0, SCORES))
        mbarrier.arrive(empty_k.index(stage), count=1)
        top, keep, weight, weights = _softmax(scores, bits, own, top, weight, scale)
        weights = weights.to(dtype)
        total, p = warpgroup_mma_wait(0, deps=[total, p])
        mbarrier.arrive(empty_v.index(before), count=1)
        total = total * gl.convert_layout(keep, gl.SliceLayout(1, TOTAL))[:, None]
        p = gl.convert_layout(weights, WEIGHTS)
    last = (steps - 1) % STAGES
    mbarrier.wait(full_v.index(last), (steps - 1) // STAGES & 1)
    fence_async_shared()
    total = warpgroup_mma(p, values.index(last), total, is_async=True)
    total = warpgroup_mma_wait(0, deps=[total])

    live = j < count
    row = first_row.to(gl.int64) + gl.minimum(j, count - 1)
    live &= gl.load(request_ids_ptr + row) >= 0
    if HAS_LSE:
        empty = weight == 0.0
        lse = (top + gl.log2(gl.where(empty, 1.0, weight))) * 0.6931471805599453
        gl.store(lse_ptr + row * Q_HEADS + head * GROUP + m % GROUP, gl.where(empty, float("-inf"), lse), mask=live)
    m = PART * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, TOTAL))
    d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, TOTAL))
    j = m // GROUP
    row = first_row.to(gl.int64) + gl.minimum(j, count - 1)
    live = (j < count) & (gl.load(request_ids_ptr + row) >= 0)
    heads = head * GROUP + m % GROUP
    weight = gl.convert_layout(weight, gl.SliceLayout(1, TOTAL))
    empty = weight == 0.0
    out = total / gl.where(empty, 1.0, weight)[:, None]
    if HAS_GATE:
        at = gate_ptr + (row * stride_gt + heads * stride_gh)[:, None] + d[None, :]
        gate = gl.load(at, mask=live[:, None], other=0.0).to(gl.float32)
        out = out.to(dtype).to(gl.float32) / (1.0 + gl.exp(-gate))
    out = gl.where(empty[:, None], 0.0, out)  # last, because the gate of an empty row may be NaN
    at = out_ptr + (row * stride_ot + heads * stride_oh)[:, None] + d[None, :]
    gl.store(at, out.to(out_ptr.dtype.element_ty), mask=live[:, None])


@gluon.jit(
    do_not_specialize=["visible_ptr", "request_ids_ptr", "positions_ptr", "page_table_ptr", "end_slot", "stride_pr"]
)
def _attend_tiles_gluon_kernel(
    q_ptr, k_ptr, v_ptr, gate_ptr, out_ptr, lse_ptr,
    first_rows_ptr, row_counts_ptr, union_counts_ptr, slots_ptr, bits_ptr,
    visible_ptr, request_ids_ptr, positions_ptr, page_table_ptr, scale, end_slot,
    stride_lists, stride_qt, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_gt, stride_gh, stride_ot, stride_oh, stride_pr,
    Q_HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    PAGE_TOKENS: gl.constexpr, INCLUDE_TAIL: gl.constexpr, HAS_GATE: gl.constexpr,
    HAS_LSE: gl.constexpr, PARTS: gl.constexpr, TILE_TOKENS: gl.constexpr, STAGES: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    pid = gl.program_id(0)
    head = pid % KV_HEADS
    number = pid // KV_HEADS
    count = gl.load(row_counts_ptr + number)
    blocks = gl.load(union_counts_ptr + number)
    if count > 0:
        GROUP: gl.constexpr = Q_HEADS // KV_HEADS
        first_row = gl.load(first_rows_ptr + number)
        first_position = gl.load(positions_ptr + first_row).to(gl.int32)
        tokens = blocks * BLOCK_TOKENS
        end = tokens
        first_token = tokens * 0
        table_ptr = page_table_ptr
        if INCLUDE_TAIL:
            after = first_position + count
            FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            j = gl.arange(0, 32, layout=FLAT)
            live = j < count
            starts = gl.load(visible_ptr + first_row + j, mask=live, other=0) * BLOCK_TOKENS
            first_token = gl.maximum(gl.min(gl.where(live, starts, after), 0), 0)
            end = tokens + gl.maximum(after - first_token, 0)
            request = gl.maximum(gl.load(request_ids_ptr + first_row), 0).to(gl.int64)
            table_ptr = page_table_ptr + request * stride_pr
        steps = gl.maximum((end + TILE_TOKENS - 1) // TILE_TOKENS, 1)

        dtype: gl.constexpr = k_ptr.dtype.element_ty
        SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
        FLAT_SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        queries = gl.allocate_shared_memory(dtype, [PARTS, 64, HEAD_DIM], SHARED)
        keys = gl.allocate_shared_memory(dtype, [STAGES, TILE_TOKENS, HEAD_DIM], SHARED)
        values = gl.allocate_shared_memory(dtype, [STAGES, TILE_TOKENS, HEAD_DIM], SHARED)
        bits_at = gl.allocate_shared_memory(gl.int32, [STAGES, TILE_TOKENS], FLAT_SHARED)
        full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full_k.index(i), count=129)  # 128 threads whose copies are complete, and who attends
            mbarrier.init(full_v.index(i), count=128)
            mbarrier.init(empty_k.index(i), count=PARTS)
            mbarrier.init(empty_v.index(i), count=PARTS)

        k_ptr += head * stride_kh
        v_ptr += head * stride_vh
        slots_ptr += number.to(gl.int64) * stride_lists
        bits_ptr += number.to(gl.int64) * stride_lists
        if PARTS == 2:
            gl.warp_specialize(
                [
                    (_attend_half, (
                        steps, first_row, count, head, q_ptr, gate_ptr, out_ptr, lse_ptr, request_ids_ptr, scale,
                        stride_qt, stride_qh, stride_gt, stride_gh, stride_ot, stride_oh, queries.index(0),
                        keys, values, bits_at, full_k, empty_k, full_v, empty_v, 0, GROUP, Q_HEADS, HEAD_DIM, HAS_GATE,
                        HAS_LSE, TILE_TOKENS, STAGES,
                    )),
                    (_attend_half, (
                        steps, first_row, count, head, q_ptr, gate_ptr, out_ptr, lse_ptr, request_ids_ptr, scale,
                        stride_qt, stride_qh, stride_gt, stride_gh, stride_ot, stride_oh, queries.index(1),
                        keys, values, bits_at, full_k, empty_k, full_v, empty_v, 1, GROUP, Q_HEADS, HEAD_DIM, HAS_GATE,
                        HAS_LSE, TILE_TOKENS, STAGES,
                    )),
                    (_copy_all, (
                        steps, tokens, end, first_token, first_row, first_position, count, slots_ptr, bits_ptr,
                        visible_ptr,
                        table_ptr, end_slot, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp, stride_vs, keys, values,
                        bits_at,
                        full_k, empty_k, full_v, empty_v, BLOCK_TOKENS, PAGE_TOKENS, INCLUDE_TAIL, HEAD_DIM,
                        TILE_TOKENS,
                        STAGES,
                    )),
                ],
                [4, 4], [216, 72],
            )  # fmt: skip
        else:
            gl.warp_specialize(
                [
                    (_attend_half, (
                        steps, first_row, count, head, q_ptr, gate_ptr, out_ptr, lse_ptr, request_ids_ptr, scale,
                        stride_qt, stride_qh, stride_gt, stride_gh, stride_ot, stride_oh, queries.index(0),
                        keys, values, bits_at, full_k, empty_k, full_v, empty_v, 0, GROUP, Q_HEADS, HEAD_DIM, HAS_GATE,
                        HAS_LSE, TILE_TOKENS, STAGES,
                    )),
                    (_copy_all, (
                        steps, tokens, end, first_token, first_row, first_position, count, slots_ptr, bits_ptr,
                        visible_ptr, table_ptr, end_slot, k_ptr, v_ptr, stride_kp, stride_ks, stride_vp,
                        stride_vs, keys, values, bits_at, full_k, empty_k, full_v, empty_v, BLOCK_TOKENS, PAGE_TOKENS,
                        INCLUDE_TAIL, HEAD_DIM, TILE_TOKENS, STAGES,
                    )),
                ],
                [4], [72],
            )  # fmt: skip


def gluon_tiles_refusal(q, cache, plan, tokens, softmax_scale, parts):
    """Why `attend_tiles_gluon` does not serve a call, None where it does. The plain form serves them all.

    Args:
        q: [T, Hq, D] queries.
        cache: Caches of the layer.
        plan: The step.
        tokens: `RowTokens` of all T rows.
        softmax_scale: Multiplies the scores.
        parts: As in `attend_tiles_gluon`.
    """
    q_heads, dim = q.shape[1:]
    pages = (cache.k_pages, cache.v_pages)
    if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device)[0] != 9:
        return "its products are those of compute capability 9.0"
    if q.dtype not in (torch.bfloat16, torch.float16) or any(x.dtype != q.dtype for x in pages):
        return f"queries, keys and values must be bf16 or fp16, all the same, got {q.dtype} and {pages[0].dtype}"
    if dim not in HEAD_DIMS:
        return f"the head dim must be one of {HEAD_DIMS}, got {dim}"
    if tokens.unit_tokens not in UNIT_TOKENS:
        return f"a unit must have one of {UNIT_TOKENS} tokens, got {tokens.unit_tokens}"
    if plan.page_table is None:
        return "requests must lie in pages"
    if cache.k_scale is not None or cache.v_scale is not None:
        return "keys and values must have no scales"
    rows = (*pages, q)
    if any(x.stride(-1) != 1 or x.data_ptr() % 16 or any(n % 8 for n in x.stride()[:-1]) for x in rows):
        return "rows of queries, keys and values must begin at multiples of 16 bytes"
    if not softmax_scale > 0:
        return f"the softmax scale must be above 0, got {softmax_scale}"
    if q_heads // cache.kv_heads > 64 * parts:
        return f"at most {64 * parts} heads may share keys at {parts} parts, got {q_heads // cache.kv_heads}"
    return None


def attend_tiles_gluon(q, cache, plan, tokens, softmax_scale, *, gate, out, lse, narrow=0, most_share=1.0, parts=2):
    """Fill the rows of `out` and `lse` that lie in tiles: those of requests with at least `LEAST_ROWS` rows.

    Args:
        q: [T, Hq, D] queries.
        cache: Caches of the layer.
        plan: The step; owns the scratch.
        tokens: `RowTokens` of all T rows.
        softmax_scale: Multiplies the scores, above 0.
        gate: [T, Hq, D] or None.
        out: [T, Hq, D] output buffer.
        lse: [T, Hq] fp32 buffer, or None.
        narrow: As in `union_lists`.
        most_share: As in `union_lists`.
        parts: Warpgroups that attend, 64 rows x heads each: 1 or 2.

    Returns:
        The `UnionLists` of the step, None where it has no rows.

    Raises:
        UnsupportedError: `gluon_tiles_refusal` says why.
    """
    refusal = gluon_tiles_refusal(q, cache, plan, tokens, softmax_scale, parts)
    if refusal is not None:
        raise UnsupportedError(f"attend_tiles_gluon: the call must be one that it serves: {refusal}. Use plain tiles.")
    q_heads, dim = q.shape[1:]
    kv_heads = cache.kv_heads
    group = q_heads // kv_heads
    page_tokens = cache.k_pages.shape[1]
    lists = union_lists(tokens, plan, page_tokens, tile_height(group, 64 * parts), narrow=narrow, most_share=most_share)
    if lists is None:
        return None
    include_tail = tokens.visible_units is not None
    width = lists.slot_ids.shape[1]
    _attend_tiles_gluon_kernel[(lists.row_counts.shape[0] * kv_heads,)](
        q, cache.k_pages, cache.v_pages, gate if gate is not None else q, out, lse if lse is not None else out,
        lists.first_rows, lists.row_counts, lists.block_counts, lists.slot_ids, lists.row_bits,
        tokens.visible_units if include_tail else plan.visible_blocks, plan.request_ids, plan.positions,
        plan.page_table, softmax_scale * LOG2_E, cache.k_pages.shape[0] * page_tokens,
        width, q.stride(0), q.stride(1), *cache.k_pages.stride()[:3], *cache.v_pages.stride()[:3],
        *(gate.stride()[:2] if gate is not None else (0, 0)), out.stride(0), out.stride(1), plan.page_table.stride(0),
        Q_HEADS=q_heads, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_TOKENS=tokens.unit_tokens, PAGE_TOKENS=page_tokens,
        INCLUDE_TAIL=include_tail, HAS_GATE=gate is not None, HAS_LSE=lse is not None, PARTS=parts,
        TILE_TOKENS=TILE_TOKENS, STAGES=STAGES,
        num_warps=4, enable_fp_fusion=False, **overlapping(q.device),
    )  # fmt: skip
    return lists
