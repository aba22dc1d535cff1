# mypy: ignore-errors
"""Preparation on the GPU for engines that keep every raw index key: the rows of whole columns of a batch, one launch.

A row is a column of a batch row: token `past + q` of all caches, padding included. Its angles are told by column too,
as cosines and sines that the engine computed. There is no ring: what a block lacks of its members lies in the cache of
raw keys. Every program does one kind of work, told apart by its number, as in `triton_prepare`:

- *block* programs, some rows each: copy raw keys to their columns, pool the blocks that close;
- *key* programs, some key heads of a row each: norm, rotate and write K, copy V;
- *index* programs and *query* programs, some heads of a row each: norm and rotate queries.

Columns before `past` are only read, all others only written, so that no two programs meet.
"""

import triton
import triton.language as tl

from flashqsa.launching import launched_where, overlapping, wait_for_previous
from flashqsa.preparation.triton_heads import load_heads, norm_heads, rotate, store_heads
from flashqsa.preparation.triton_prepare import (
    UNROLLED_MEMBERS,
    PrepareWork,
    _mean_of_members,
    _padded,
)

FAR = tl.constexpr(1 << 30)
"""More tokens than a cache has: the ring of raw keys never turns."""


@triton.jit
def _load_angles(
    cos_ptr, sin_ptr, at, live, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Cosines and signed sines [N, D] in fp32 of the angles that lie at some offsets."""
    d = tl.arange(0, BLOCK_D)[None, :]
    at = at[:, None] + tl.where(d < HALF, d, d - HALF)
    mask = live[:, None] & (d < 2 * HALF)
    cos = tl.load(cos_ptr + at, mask=mask, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return cos, sin * tl.where((d >= HALF) & (d < 2 * HALF), 1.0, -1.0)


@triton.jit
def _write_raw_keys_and_blocks(
    tile, num_rows, query_tokens, past, row_angle, raw_ptr, stride_it, raw_keys_ptr, stride_rb, stride_rc,
    closed_ptr, keys_ptr, stride_bb, stride_bs, row_blocks, weight_ptr, eps, cos_ptr, sin_ptr, stride_ab, stride_ac,
    ROWS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, UNROLLED: tl.constexpr, WITH_BLOCKS: tl.constexpr,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    rows = tile.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = rows < num_rows
    batch_row = rows // query_tokens
    column = past + rows % query_tokens
    d = tl.arange(0, BLOCK_D)
    mask = there[:, None] & (d < DIM)[None, :]
    raw = tl.load(raw_ptr + (rows * stride_it)[:, None] + d[None, :], mask=mask)
    at = batch_row * stride_rb + column * stride_rc
    tl.store(raw_keys_ptr + at[:, None] + d[None, :], raw, mask=mask)
    if WITH_BLOCKS:
        slot = tl.load(closed_ptr + rows, mask=there, other=-1)
        closes = there & (slot >= 0) & (slot // row_blocks == batch_row)
        if tl.max(closes.to(tl.int32), 0) > 0:
            began = column - (BLOCK_TOKENS - 1)
            x, partner = _mean_of_members(
                rows - (BLOCK_TOKENS - 1), batch_row * query_tokens, raw_ptr, stride_it, raw_keys_ptr,
                batch_row * stride_rb, began, stride_rc, closes, BLOCK_TOKENS, UNROLLED, DIM, HALF, BLOCK_D, FAR, True,
            )  # fmt: skip
            x, partner = norm_heads(x, partner, weight_ptr, eps, True, DIM, HALF, BLOCK_D)
            angle = batch_row * stride_ab + (row_angle + rows % query_tokens - (BLOCK_TOKENS - 1)) * stride_ac
            cos, sin = _load_angles(cos_ptr, sin_ptr, angle, closes, HALF, BLOCK_D)
            to = batch_row * stride_bb + slot % row_blocks * stride_bs
            store_heads(keys_ptr, to, closes, rotate(x, partner, cos, sin), DIM, BLOCK_D)


@triton.jit
def _write_keys(
    tile, query_tokens, past, row_angle, k_ptr, stride_kt, stride_kh, v_ptr, stride_vt, stride_vh,
    k_cache_ptr, stride_cb, stride_cc, stride_ch, v_cache_ptr, stride_wb, stride_wc, stride_wh, weight_ptr, eps,
    cos_ptr, sin_ptr, stride_ab, stride_ac,
    HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    TILES: tl.constexpr = (HEADS + TILE_HEADS - 1) // TILE_HEADS
    row = (tile // TILES).to(tl.int64) + tl.arange(0, 1)
    head = (tile % TILES) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    there = head < HEADS
    batch_row = row // query_tokens
    column = past + row % query_tokens
    v, _ = load_heads(v_ptr, row * stride_vt + head * stride_vh, there, DIM, HALF, BLOCK_D)
    v_at = batch_row * stride_wb + column * stride_wc + head * stride_wh
    store_heads(v_cache_ptr, v_at, there, v, DIM, BLOCK_D)
    x, partner = load_heads(k_ptr, row * stride_kt + head * stride_kh, there, DIM, HALF, BLOCK_D)
    angle = batch_row * stride_ab + (row_angle + row % query_tokens) * stride_ac
    cos, sin = _load_angles(cos_ptr, sin_ptr, angle, row >= 0, HALF, BLOCK_D)
    x, partner = norm_heads(x, partner, weight_ptr, eps, False, DIM, HALF, BLOCK_D)
    at = batch_row * stride_cb + column * stride_cc + head * stride_ch
    store_heads(k_cache_ptr, at, there, rotate(x, partner, cos, sin), DIM, BLOCK_D)


@triton.jit
def _prepare_queries(
    number, splits, query_tokens, row_angle, x_ptr, stride_xt, stride_xh, out_ptr, stride_ot, stride_oh,
    weight_ptr, eps, cos_ptr, sin_ptr, stride_ab, stride_ac,
    HEADS: tl.constexpr, TILE_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`splits` programs share a row, each taking every `splits`-th tile of its heads."""
    row = (number // splits).to(tl.int64) + tl.arange(0, 1)
    heads = tl.arange(0, TILE_HEADS)
    first_head = (number % splits) * TILE_HEADS
    head = first_head + heads
    x, partner = load_heads(x_ptr, row * stride_xt + head * stride_xh, head < HEADS, DIM, HALF, BLOCK_D)
    angle = row // query_tokens * stride_ab + (row_angle + row % query_tokens) * stride_ac
    cos, sin = _load_angles(cos_ptr, sin_ptr, angle, row >= 0, HALF, BLOCK_D)
    for at in tl.range(first_head, HEADS, splits * TILE_HEADS):
        head = at + heads
        after = head + splits * TILE_HEADS  # asked for before the one at hand is worked on
        next_x, next_partner = load_heads(x_ptr, row * stride_xt + after * stride_xh, after < HEADS, DIM, HALF, BLOCK_D)
        x, partner = norm_heads(x, partner, weight_ptr, eps, False, DIM, HALF, BLOCK_D)
        x = rotate(x, partner, cos, sin)
        store_heads(out_ptr, row * stride_ot + head * stride_oh, head < HEADS, x, DIM, BLOCK_D)
        x, partner = next_x, next_partner


@triton.jit(do_not_specialize=[
    "num_rows", "query_tokens", "past", "row_angle", "row_blocks", "end_blocks", "end_keys", "end_index", "splits",
    "index_splits",
])  # fmt: skip
def _prepare_context_kernel(
    q_gate_ptr, k_ptr, v_ptr, index_ptr, raw_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, index_q_weight_ptr,
    index_k_weight_ptr, out_q_ptr, out_index_ptr, k_cache_ptr, v_cache_ptr, raw_keys_ptr, keys_ptr, closed_ptr,
    q_eps, k_eps, index_q_eps, index_k_eps, num_rows, query_tokens, past, row_angle, row_blocks, end_blocks, end_keys,
    end_index, splits, index_splits, stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_it,
    stride_ih, stride_ab, stride_ac, stride_ot, stride_oh, stride_nt, stride_nh, stride_cb, stride_cc, stride_ch,
    stride_wb, stride_wc, stride_wh, stride_rb, stride_rc, stride_bb, stride_bs,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, INDEX_HEADS: tl.constexpr, DIM: tl.constexpr,
    INDEX_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_INDEX_DIM: tl.constexpr,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, INDEX_TILE: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    WITH_BLOCKS: tl.constexpr, BLOCK_ROWS: tl.constexpr, UNROLLED: tl.constexpr, PAST_ON_DEVICE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    wait_for_previous(OVERLAP)
    first = tl.load(past) if PAST_ON_DEVICE else past
    pid = tl.program_id(0)
    if pid < end_blocks:
        _write_raw_keys_and_blocks(
            pid, num_rows, query_tokens, first, row_angle, raw_ptr, stride_it, raw_keys_ptr, stride_rb, stride_rc,
            closed_ptr, keys_ptr, stride_bb, stride_bs, row_blocks, index_k_weight_ptr, index_k_eps, cos_ptr, sin_ptr,
            stride_ab, stride_ac, BLOCK_ROWS, BLOCK_TOKENS, UNROLLED, WITH_BLOCKS, INDEX_DIM, HALF, BLOCK_INDEX_DIM,
        )  # fmt: skip
    elif pid < end_keys:
        _write_keys(
            pid - end_blocks, query_tokens, first, row_angle, k_ptr, stride_kt, stride_kh, v_ptr, stride_vt, stride_vh,
            k_cache_ptr, stride_cb, stride_cc, stride_ch, v_cache_ptr, stride_wb, stride_wc, stride_wh, k_weight_ptr,
            k_eps, cos_ptr, sin_ptr, stride_ab, stride_ac, KV_HEADS, KV_TILE, DIM, HALF, BLOCK_D,
        )  # fmt: skip
    elif pid < end_index:
        _prepare_queries(
            pid - end_keys, index_splits, query_tokens, row_angle, index_ptr, stride_it, stride_ih,
            out_index_ptr, stride_nt, stride_nh, index_q_weight_ptr, index_q_eps, cos_ptr, sin_ptr, stride_ab,
            stride_ac, INDEX_HEADS, INDEX_TILE, INDEX_DIM, HALF, BLOCK_INDEX_DIM,
        )  # fmt: skip
    else:
        _prepare_queries(
            pid - end_index, splits, query_tokens, row_angle, q_gate_ptr, stride_qt, stride_qh, out_q_ptr,
            stride_ot, stride_oh, q_weight_ptr, q_eps, cos_ptr, sin_ptr, stride_ab, stride_ac, Q_HEADS, Q_TILE, DIM,
            HALF, BLOCK_D,
        )  # fmt: skip


@launched_where(lambda rows: rows[0].device)
def prepare_context_triton(
    rows, cos, sin, norms, caches, *, query_tokens, past, row_angle, closed_block_slot_ids, block_tokens
):
    """Norm and rotate the rows of a batch, write K, V, raw and pooled index keys at their columns.

    Args:
        rows: Projected queries and gates [B * Q, Hq, 2 * D], per head ``[q | gate]``, keys [B * Q, Hkv, D], values
            [B * Q, Hkv, D], and index queries with, last, the raw index key [B * Q, Hi + 1, Di].
        cos: [B, columns, rotary_dim / 2] cosines of the rows' columns and, where blocks close, of enough before them.
        sin: The sines, with the strides of `cos`.
        norms: Weight ([D] or [Di]) and epsilon of the norms of q, k, index queries and block keys.
        caches: K [B, C, Hkv, D], V, raw keys [B, C, Di] and pooled keys [B, blocks, Di] (None where none are pooled).
        query_tokens: `Q`.
        past: Column of the first row, where those before it hold earlier tokens; or an integer tensor [1] of it.
        row_angle: Which of the angles are those of the first row.
        closed_block_slot_ids: [B * Q] int64, batch row * blocks + block that the row closes, -1 for none.
        block_tokens: Tokens of a block.

    Returns:
        q [B * Q, Hq, D] and index queries [B * Q, Hi, Di].
    """
    q_gate, k, v, index_qk = rows
    num_rows, q_heads, _ = q_gate.shape
    kv_heads, dim = k.shape[1:]
    index_heads, index_dim = index_qk.shape[1] - 1, index_qk.shape[2]
    k_cache, v_cache, raw_keys, block_keys = caches
    out_q = q_gate.new_empty((num_rows, q_heads, dim))
    out_index_q = q_gate.new_empty((num_rows, index_heads, index_dim))
    if num_rows == 0:
        return out_q, out_index_q
    work = PrepareWork.of(num_rows, (q_heads, kv_heads, index_heads), dim, index_dim)
    end_blocks = -(-num_rows // work.block_rows)
    end_keys = end_blocks + num_rows * -(-kv_heads // work.kv_tile)
    end_index = end_keys + num_rows * work.index_splits
    with_blocks = block_keys is not None
    keys = block_keys if with_blocks else raw_keys
    (q_weight, q_eps), (k_weight, k_eps), (index_q_weight, index_q_eps), (index_k_weight, index_k_eps) = norms
    _prepare_context_kernel[(end_index + num_rows * work.splits,)](
        q_gate, k, v, index_qk, index_qk[:, -1], cos, sin, q_weight, k_weight, index_q_weight, index_k_weight, out_q,
        out_index_q, k_cache, v_cache, raw_keys, keys, closed_block_slot_ids, q_eps, k_eps, index_q_eps, index_k_eps,
        num_rows, query_tokens, past, row_angle, keys.shape[1], end_blocks, end_keys, end_index, work.splits,
        work.index_splits,
        *q_gate.stride()[:2], *k.stride()[:2], *v.stride()[:2], *index_qk.stride()[:2], *cos.stride()[:2],
        *out_q.stride()[:2], *out_index_q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        *raw_keys.stride()[:2], *keys.stride()[:2],
        Q_HEADS=q_heads, KV_HEADS=kv_heads, INDEX_HEADS=index_heads, DIM=dim, INDEX_DIM=index_dim, HALF=cos.shape[-1],
        BLOCK_D=_padded(dim), BLOCK_INDEX_DIM=_padded(index_dim), Q_TILE=work.q_tile, KV_TILE=work.kv_tile,
        INDEX_TILE=work.index_tile,
        BLOCK_TOKENS=block_tokens, WITH_BLOCKS=with_blocks, BLOCK_ROWS=work.block_rows,
        UNROLLED=block_tokens <= UNROLLED_MEMBERS, PAST_ON_DEVICE=not isinstance(past, int), enable_fp_fusion=False,
        num_warps=1, **overlapping(q_gate.device),
    )  # fmt: skip
    return out_q, out_index_q
