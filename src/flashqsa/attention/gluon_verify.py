# mypy: ignore-errors
"""Attention of verification in Gluon, for compute capability 9.0: the union of a request's few rows, read once.

The work of a step is spans of union lists (`triton_verify_lists`), for each KV head. A program attends many of them,
one after another. One warpgroup copies keys and values of their tokens into a ring in shared memory, through the ends
of spans; another attends the rows x heads of the tile, 64 at most, both products on wgmma, and leaves what it finds to
the merge (`triton_verify_merge`).

Bytes: 4 * D a token of a union and KV head, which is the bound, and 8 * D a row and query head for each span.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashqsa.attention.gluon_tiles import _by_token, _copy_tokens, _softmax, gluon_tiles_refusal
from flashqsa.attention.triton_rows import LOG2_E
from flashqsa.attention.triton_union import LEAST_ROWS
from flashqsa.attention.triton_verify_lists import (
    FEWEST_ROWS,
    MOST_SPANS,
    STEP_TOKENS,
    TILE_FIELDS,
    holds_verify_lists,
    verify_lists,
)
from flashqsa.attention.triton_verify_merge import merge_spans
from flashqsa.backends import multiprocessors
from flashqsa.errors import UnsupportedError
from flashqsa.launching import overlapping

_barrier = getattr(gl, "barrier", None)
if _barrier is None:  # the name before Triton 3.7
    _barrier = gl.thread_barrier

PARTIAL_BYTES = 256 << 20
"""What spans may leave to the merge at once; larger steps are attended in several launches."""

SHARED_BYTES = 231_400
"""Shared memory of queries and ring; the rest of what a program can have is the compiler's."""
MOST_STAGES = 8


def most_verify_rows(query_group):
    """Rows of a request up to which it goes by its union: whose heads one warpgroup attends.

    Args:
        query_group: Query heads that share a KV head.
    """
    return min(64 // query_group, LEAST_ROWS - 1)


@gluon.jit
def _span(
    tiles_ptr, item, numbers, first_number,
    KV_HEADS: gl.constexpr, TILE_FIELDS: gl.constexpr, TILE_TOKENS: gl.constexpr,
):  # fmt: skip
    """Of an item: its tile's fields in memory, its first step, and its steps: none where the tile has no such span.

    Spans of one number lie far apart, and the last ones, of which many are empty, come last.
    """
    at = tiles_ptr + (first_number + item // KV_HEADS % numbers) * TILE_FIELDS
    span = item // (KV_HEADS * numbers)
    end, each, spans = gl.load(at + 3), gl.load(at + 4), gl.load(at + 5)
    begin = span * each
    steps = gl.where(
        span == spans - 1,
        gl.maximum((end + TILE_TOKENS - 1) // TILE_TOKENS - begin, 1),
        gl.where(span < spans, each, 0),
    )
    return at, begin, steps


@gluon.jit
def _list_places(
    item, begin, steps, blocks, block, numbers, first_number, stride_lists,
    KV_HEADS: gl.constexpr,
):  # fmt: skip
    """Where the blocks of an item's first step lie in the lists, and which of them there are."""
    number = first_number + item // KV_HEADS % numbers
    at = begin * block.shape[0] + block
    return number.to(gl.int64) * stride_lists + at, (at < blocks) & (steps > 0)


@gluon.jit
def _copy_spans(
    items, numbers, first_number, tiles_ptr, slots_ptr, bits_ptr, visible_ptr, page_table_ptr, end_slot, k_ptr, v_ptr,
    stride_lists, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, stride_pr,
    keys, values, bits_at, full_k, empty_k, full_v, empty_v,
    KV_HEADS: gl.constexpr, TILE_FIELDS: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    PAGE_TOKENS: gl.constexpr, INCLUDE_TAIL: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup that copies: of each span steps of whole blocks, then those with the list's end and the tail."""
    BLOCKS: gl.constexpr = TILE_TOKENS // BLOCK_TOKENS
    LANES: gl.constexpr = HEAD_DIM // 8  # of 16 bytes, that make a row
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([BLOCK_TOKENS, 8], [32 // LANES, LANES], [4, 1], [1, 0]))
    MEMBERS: gl.constexpr = gl.SliceLayout(
        2, gl.BlockedLayout([1, BLOCK_TOKENS, 8], [32 // LANES, 1, LANES], [4, 1, 1], [2, 1, 0])
    )
    block = gl.arange(0, BLOCKS, layout=gl.SliceLayout(1, MEMBERS))
    members = gl.arange(0, BLOCK_TOKENS, layout=gl.SliceLayout(0, MEMBERS))
    done = items * 0  # steps of all spans before
    next_tile, next_begin, next_steps = _span(
        tiles_ptr, gl.program_id(0), numbers, first_number, KV_HEADS, TILE_FIELDS, TILE_TOKENS
    )
    next_blocks = gl.load(next_tile + 2)
    place, live = _list_places(
        gl.program_id(0), next_begin, next_steps, next_blocks, block, numbers, first_number, stride_lists, KV_HEADS
    )
    next_slot = gl.load(slots_ptr + place, mask=live, other=0)
    next_bits = gl.load(bits_ptr + place, mask=live, other=0)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        at_tile, begin, steps, blocks = next_tile, next_begin, next_steps, next_blocks
        # What the next span needs to begin is asked for before this one is copied.
        later = gl.minimum(item + gl.num_programs(0), items - 1)
        next_tile, next_begin, next_steps = _span(
            tiles_ptr, later, numbers, first_number, KV_HEADS, TILE_FIELDS, TILE_TOKENS
        )
        next_blocks = gl.load(next_tile + 2)
        number = first_number + item // KV_HEADS % numbers
        head = item % KV_HEADS
        at_slots = slots_ptr + number.to(gl.int64) * stride_lists
        at_bits = bits_ptr + number.to(gl.int64) * stride_lists
        k_head_ptr = k_ptr + head * stride_kh
        v_head_ptr = v_ptr + head * stride_vh
        tokens = blocks * BLOCK_TOKENS
        whole = gl.minimum(tokens // TILE_TOKENS, begin + steps)
        for step in range(begin, whole):
            slot, bits = next_slot, next_bits
            at = (step + 1) * BLOCKS + block
            next_slot = gl.load(at_slots + at, mask=at < blocks, other=0)
            next_bits = gl.load(at_bits + at, mask=at < blocks, other=0)
            _copy_tokens(
                done + step - begin, slot, _by_token(bits, members * 0, ROWS), members, None, end_slot, k_head_ptr,
                v_head_ptr, stride_kp, stride_ks, stride_vp, stride_vs, keys, values, bits_at, full_k, empty_k, full_v,
                empty_v, PAGE_TOKENS, STAGES, ROWS,
            )  # fmt: skip
        end_slots, end_bits = next_slot, next_bits
        place, live = _list_places(
            later, next_begin, next_steps, next_blocks, block, numbers, first_number, stride_lists, KV_HEADS
        )
        next_slot = gl.load(slots_ptr + place, mask=live, other=0)
        next_bits = gl.load(bits_ptr + place, mask=live, other=0)
        for step in range(gl.maximum(whole, begin), begin + steps):
            slot = end_slots
            bits = _by_token(end_bits, members * 0, ROWS)
            end_slots = end_slots * 0
            end_bits = end_bits * 0
            if INCLUDE_TAIL:
                first_row, count, end = gl.load(at_tile), gl.load(at_tile + 1), gl.load(at_tile + 3)
                first_token, first_position = gl.load(at_tile + 6), gl.load(at_tile + 7)
                n = step * TILE_TOKENS + _by_token(block * BLOCK_TOKENS, members, ROWS)
                token = first_token + n - tokens
                for j in range(count):
                    start = gl.load(visible_ptr + first_row + j) * BLOCK_TOKENS
                    attends = (n >= tokens) & (token >= start) & (token <= first_position + j)
                    bits |= gl.where(attends, 1, 0) << j
                n = (step * BLOCKS + block) * BLOCK_TOKENS
                late = (n >= tokens) & (n < end)
                token = first_token + n - tokens
                table_ptr = page_table_ptr + number.to(gl.int64) * stride_pr
                page = gl.load(table_ptr + token // PAGE_TOKENS, mask=late, other=0)
                slot = gl.where(late, gl.maximum(page * PAGE_TOKENS + token % PAGE_TOKENS, 0), slot)
            # A token that is nobody's is not read: its V may be NaN.
            _copy_tokens(
                done + step - begin, slot, bits, members, bits != 0, end_slot, k_head_ptr, v_head_ptr, stride_kp,
                stride_ks, stride_vp, stride_vs, keys, values, bits_at, full_k, empty_k, full_v, empty_v, PAGE_TOKENS,
                STAGES, ROWS,
            )  # fmt: skip
        done += steps


@gluon.jit
def _attend_spans(
    items, numbers, first_number, tiles_ptr, q_ptr, partial_ptr, state_ptr, scale, stride_qt, stride_qh,
    queries, keys, values, bits_at, full_k, empty_k, full_v, empty_v,
    GROUP: gl.constexpr, HEIGHT: gl.constexpr, KV_HEADS: gl.constexpr,
    TILE_FIELDS: gl.constexpr, MOST_SPANS: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The warpgroup that attends each span."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_TOKENS, 16])
    TOTAL: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, TOTAL, 2)
    LANES: gl.constexpr = HEAD_DIM // 8
    LOAD: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    M: gl.constexpr = HEIGHT * GROUP
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    nothing = gl.zeros([64, TILE_TOKENS], gl.float32, layout=SCORES)
    done = items * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        at_tile, _begin, steps = _span(tiles_ptr, item, numbers, first_number, KV_HEADS, TILE_FIELDS, TILE_TOKENS)
        if steps > 0:
            first_row, count = gl.load(at_tile), gl.load(at_tile + 1)
            head = item % KV_HEADS
            m = gl.arange(0, 64, layout=gl.SliceLayout(1, LOAD))
            d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LOAD))
            row = first_row.to(gl.int64) + gl.minimum(m // GROUP, count - 1)
            at = q_ptr + (row * stride_qt + (head * GROUP + m % GROUP) * stride_qh)[:, None] + d[None, :]
            loaded = gl.load(at, mask=(m // GROUP < count)[:, None], other=0.0)
            _barrier()  # the products of the span before have read theirs
            queries.store(loaded)
            fence_async_shared()
            _barrier()

            m = gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
            j = m // GROUP
            own = gl.where(j < count, gl.full_like(j, 1) << gl.minimum(j, 31), 0)
            top = gl.full([64], float("-inf"), gl.float32, layout=gl.SliceLayout(1, SCORES))
            weight = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SCORES))
            total = gl.zeros([64, HEAD_DIM], gl.float32, layout=TOTAL)

            stage = done % STAGES
            mbarrier.wait(full_k.index(stage), done // STAGES & 1)
            fence_async_shared()
            scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
            scores = warpgroup_mma_wait(0, deps=[scores])
            bits = bits_at.index(stage).load(gl.SliceLayout(0, SCORES))
            mbarrier.arrive(empty_k.index(stage), count=1)
            top, keep, weight, p = _softmax(scores, bits, own, top, weight, scale)
            p = gl.convert_layout(p.to(dtype), WEIGHTS)
            for step in range(done + 1, done + steps):
                stage = step % STAGES
                before = (step - 1) % STAGES
                mbarrier.wait(full_k.index(stage), step // STAGES & 1)
                mbarrier.wait(full_v.index(before), (step - 1) // STAGES & 1)
                fence_async_shared()
                scores = warpgroup_mma(
                    queries, keys.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True
                )
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
            done += steps
            last = (done - 1) % STAGES
            mbarrier.wait(full_v.index(last), (done - 1) // STAGES & 1)
            fence_async_shared()
            total = warpgroup_mma(p, values.index(last), total, is_async=True)
            total = warpgroup_mma_wait(0, deps=[total])
            mbarrier.arrive(empty_v.index(last), count=1)

            pair = item % (KV_HEADS * numbers)
            piece = pair.to(gl.int64) * MOST_SPANS + item // (KV_HEADS * numbers)
            live = j < count
            gl.store(state_ptr + piece * (2 * M) + m, top, mask=live)
            gl.store(state_ptr + piece * (2 * M) + M + m, weight, mask=live)
            m = gl.arange(0, 64, layout=gl.SliceLayout(1, TOTAL))
            d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, TOTAL))
            at = partial_ptr + (piece * M + m)[:, None] * HEAD_DIM + d[None, :]
            gl.store(at, total, mask=(m // GROUP < count)[:, None])


@gluon.jit(do_not_specialize=[
    "visible_ptr", "page_table_ptr", "end_slot", "items", "numbers", "first_number", "stride_lists", "stride_pr",
])  # fmt: skip
def _attend_spans_kernel(
    q_ptr, k_ptr, v_ptr, partial_ptr, state_ptr, tiles_ptr, slots_ptr, bits_ptr, visible_ptr, page_table_ptr, scale,
    end_slot, items, numbers, first_number, stride_lists, stride_qt, stride_qh,
    stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh, stride_pr,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_TOKENS: gl.constexpr,
    PAGE_TOKENS: gl.constexpr, INCLUDE_TAIL: gl.constexpr, HEIGHT: gl.constexpr,
    TILE_FIELDS: gl.constexpr, MOST_SPANS: gl.constexpr, TILE_TOKENS: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = k_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    queries = gl.allocate_shared_memory(dtype, [64, HEAD_DIM], SHARED)
    keys = gl.allocate_shared_memory(dtype, [STAGES, TILE_TOKENS, HEAD_DIM], SHARED)
    values = gl.allocate_shared_memory(dtype, [STAGES, TILE_TOKENS, HEAD_DIM], SHARED)
    bits_at = gl.allocate_shared_memory(gl.int32, [STAGES, TILE_TOKENS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_k.index(i), count=129)  # 128 threads whose copies are complete, and who attends
        mbarrier.init(full_v.index(i), count=128)
        mbarrier.init(empty_k.index(i), count=1)
        mbarrier.init(empty_v.index(i), count=1)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    gl.warp_specialize(
        [
            (_attend_spans, (
                items, numbers, first_number, tiles_ptr, q_ptr, partial_ptr, state_ptr, scale, stride_qt,
                stride_qh, queries, keys, values, bits_at, full_k, empty_k, full_v, empty_v, GROUP,
                HEIGHT, KV_HEADS, TILE_FIELDS, MOST_SPANS, HEAD_DIM, TILE_TOKENS, STAGES,
            )),
            (_copy_spans, (
                items, numbers, first_number, tiles_ptr, slots_ptr, bits_ptr, visible_ptr, page_table_ptr,
                end_slot, k_ptr, v_ptr, stride_lists, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs,
                stride_vh, stride_pr, keys, values, bits_at, full_k, empty_k, full_v, empty_v, KV_HEADS,
                TILE_FIELDS, BLOCK_TOKENS, PAGE_TOKENS, INCLUDE_TAIL, HEAD_DIM, TILE_TOKENS, STAGES,
            )),
        ],
        [4], [104],
    )  # fmt: skip


def _stages(dim):
    """Steps that the ring holds."""
    step_bytes = STEP_TOKENS * (4 * dim + 4) + 32
    return min(MOST_STAGES, (SHARED_BYTES - 128 * dim) // step_bytes)


def gluon_verify_refusal(q, cache, plan, tokens, softmax_scale):
    """Why `attend_verify_gluon` does not serve a call, None where it does, however many rows requests have.

    Args:
        q: [T, Hq, D] queries.
        cache: Caches of the layer.
        plan: The step.
        tokens: `RowTokens` of all T rows.
        softmax_scale: Multiplies the scores.
    """
    refusal = gluon_tiles_refusal(q, cache, plan, tokens, softmax_scale, parts=1)
    if refusal is not None:
        return refusal
    rows, topk = most_verify_rows(q.shape[1] // cache.kv_heads), tokens.unit_ids.shape[1]
    if rows < FEWEST_ROWS:
        return f"{FEWEST_ROWS} rows with their heads must fit 64, got {q.shape[1] // cache.kv_heads} heads"
    if not holds_verify_lists(topk, rows):
        return f"the lists of {rows} rows must fit one program, got {topk} units a row"
    return None


def attend_verify_gluon(q, cache, plan, tokens, softmax_scale, *, gate, out, lse, mark_below=LEAST_ROWS):
    """Fill the rows of `out` and `lse` of requests of `FEWEST_ROWS` to `most_verify_rows` rows.

    Args:
        q: [T, Hq, D] queries.
        cache: Caches of the layer.
        plan: The step, with rows and requests; owns the scratch.
        tokens: `RowTokens` of all T rows.
        softmax_scale: Multiplies the scores, above 0.
        gate: [T, Hq, D] or None.
        out: [T, Hq, D] output buffer.
        lse: [T, Hq] fp32 buffer, or None.
        mark_below: As in `verify_lists`; 0 where other lists of the step were built before.

    Returns:
        The `VerifyLists` of the step.

    Raises:
        UnsupportedError: `gluon_verify_refusal` says why.
    """
    refusal = gluon_verify_refusal(q, cache, plan, tokens, softmax_scale)
    if refusal is not None:
        raise UnsupportedError(f"attend_verify_gluon: the call must be one that it serves: {refusal}. Attend rows.")
    q_heads, dim = q.shape[1:]
    kv_heads = cache.kv_heads
    group = q_heads // kv_heads
    page_tokens = cache.k_pages.shape[1]
    lists = verify_lists(tokens, plan, page_tokens, FEWEST_ROWS, most_verify_rows(group), mark_below=mark_below)
    include_tail = tokens.visible_units is not None
    numbers = lists.tiles.shape[0]
    pieces = kv_heads * MOST_SPANS * lists.height * group  # rows x heads that spans of a number leave
    at_once = min(numbers, max(1, PARTIAL_BYTES // (4 * pieces * (dim + 2))))
    partial = plan.scratch("attend.verify.partial", (at_once * pieces * dim,), torch.float32)
    state = plan.scratch("attend.verify.state", (at_once * pieces * 2,), torch.float32)
    for first_number in range(0, numbers, at_once):
        here = min(at_once, numbers - first_number)
        items = here * kv_heads * MOST_SPANS
        _attend_spans_kernel[(min(items, multiprocessors(q.device)),)](
            q, cache.k_pages, cache.v_pages, partial, state, lists.tiles, lists.slot_ids, lists.row_bits,
            tokens.visible_units if include_tail else plan.visible_blocks, plan.page_table, softmax_scale * LOG2_E,
            cache.k_pages.shape[0] * page_tokens, items, here, first_number, lists.slot_ids.shape[1],
            q.stride(0), q.stride(1), *cache.k_pages.stride()[:3], *cache.v_pages.stride()[:3],
            plan.page_table.stride(0),
            GROUP=group, KV_HEADS=kv_heads, HEAD_DIM=dim, BLOCK_TOKENS=tokens.unit_tokens, PAGE_TOKENS=page_tokens,
            INCLUDE_TAIL=include_tail, HEIGHT=lists.height, TILE_FIELDS=TILE_FIELDS,
            MOST_SPANS=MOST_SPANS, TILE_TOKENS=STEP_TOKENS, STAGES=_stages(dim),
            num_warps=4, enable_fp_fusion=False, **overlapping(q.device),
        )  # fmt: skip
        merge_spans(partial, state, lists, plan, kv_heads, first_number, here, q.dtype, gate=gate, out=out, lse=lse)
    return lists
