"""vLLM's QSA operators, under its names and with its arguments, for CPU and CUDA tensors alike.

vLLM says block table, block and page where this library says page table, page and block: the arguments keep its names.
An operator knows of the step what its arguments tell, so it makes a plan of its own; `forwards.py` makes one a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from flashqsa.attention import attend_tokens
from flashqsa.backends import takes_kernels
from flashqsa.cache import LayerCache
from flashqsa.cache.state import write_slots
from flashqsa.checks import FP8
from flashqsa.errors import ShapeError, UnsupportedError
from flashqsa.integrations.vllm_plugin.call_plans import attend_plan, expand_plan, fits, prepare_plan, select_plan
from flashqsa.integrations.vllm_plugin.counts import count
from flashqsa.integrations.vllm_plugin.plans import check_page_sizes
from flashqsa.integrations.vllm_plugin.rings import close_ring
from flashqsa.preparation import NormWeights, prepare
from flashqsa.preparation.plain import mean_of_blocks
from flashqsa.results import Prepared, Selection
from flashqsa.rope import RopeTable
from flashqsa.selection import expand_tokens, select_blocks


def qsa_prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    q_norm_weight: torch.Tensor,
    k_norm_weight: torch.Tensor,
    eps: float,
    q_out: torch.Tensor,
    state_cache: torch.Tensor,
    state_slots: torch.Tensor,
    state_block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    logical_positions: torch.Tensor,
    compressed_cache: torch.Tensor,
    compressed_slots: torch.Tensor,
    k_work_metadata: torch.Tensor,
    *,
    compress_ratio: int,
    mrope_section: tuple[int, int, int] | None,
    rope_pos_offset: int | None,
    main_qkv: torch.Tensor,
    main_q_norm_weight: torch.Tensor,
    main_k_norm_weight: torch.Tensor,
    main_eps: float,
    main_kv_cache: torch.Tensor,
    main_slot_mapping: torch.Tensor,
    main_k_scale: float,
    main_v_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and rotate index queries into `q_out` and queries, write K, V, pooled keys and raw keys.

    Args:
        q: [T, Hi * Di] projected index queries.
        k: [T, Di] projected raw index keys.
        positions: [T] or [3, T] int64 rotary positions.
        cos_sin_cache: [positions, rotary] table.
        q_norm_weight: [Di] of the index queries' norm.
        k_norm_weight: [Di] of the pooled keys' norm.
        eps: Epsilon of both.
        q_out: [T, Hi, Di] filled with index queries, the model dtype or float8_e4m3fn.
        state_cache: [blocks, ring_tokens, 1, width] raw keys, and behind them rotary positions.
        state_slots: [T] int64 where raw keys go, -1 for none.
        state_block_table: [R, 1] int32 ring of each request.
        query_start_loc: [R + 1] int32.
        logical_positions: [T] int64, -1 for padding.
        compressed_cache: [blocks, page / r, 1, Di] pooled keys.
        compressed_slots: [T] int64 where the pooled key of the block goes that the row closes, -1 for none.
        k_work_metadata: Work list of vLLM's kernel, not needed here.
        compress_ratio: Tokens of a block.
        mrope_section: Sections of the three axes, or None.
        rope_pos_offset: Where rotary positions begin in a row of `state_cache`, or None where it holds none.
        main_qkv: [T, 2 * Hq * D + 2 * Hkv * D] per head [q | gate], then keys, then values.
        main_q_norm_weight: [D].
        main_k_norm_weight: [D].
        main_eps: Epsilon of the main norms, equal to `eps`.
        main_kv_cache: [blocks, page, Hkv, 2 * D] keys and values side by side.
        main_slot_mapping: [T] int64, -1 for none.
        main_k_scale: What stored float8 keys are multiplied by.
        main_v_scale: The same for values.

    Returns:
        Queries and gate logits, [T, Hq, D] each, contiguous.

    Raises:
        UnsupportedError: The two epsilons, or the two page sizes, differ.
        FlashQSAError: As `prepare`.

    Source: vLLM 0.32.0, models/qwen4_exp/nvidia/ops/qsa_prepare.py.
    """
    count("qsa_prepare")
    if eps != main_eps:
        raise UnsupportedError(
            f"qsa_prepare: main_eps must equal eps = {eps}, got {main_eps}. Both are rms_norm_eps of the checkpoint."
        )
    rows, dim, kv_heads = q.shape[0], main_kv_cache.shape[3] // 2, main_kv_cache.shape[2]
    check_page_sizes(main_kv_cache.shape[1], compressed_cache.shape[1], compress_ratio)
    gate_heads = main_qkv.shape[1] // (2 * dim) - kv_heads
    q_gate, keys, values = main_qkv.split([2 * gate_heads * dim, kv_heads * dim, kv_heads * dim], dim=1)  # type: ignore[no-untyped-call]
    plan, ring = prepare_plan(
        logical_positions[:rows], query_start_loc, state_slots[:rows], state_block_table, state_cache,
        key_dim=k.shape[1], rope_offset=rope_pos_offset, slot_ids=main_slot_mapping[:rows],
        closed_block_slot_ids=compressed_slots[:rows], page_tokens=main_kv_cache.shape[1],
        block_tokens=compress_ratio, max_seq_len=cos_sin_cache.shape[0],
    )  # fmt: skip
    is_fp8 = main_kv_cache.dtype == FP8
    cache = LayerCache(
        main_kv_cache[..., :dim], main_kv_cache[..., dim:], compressed_cache[:, :, 0], ring.keys, ring.positions,
        k_scale=main_k_scale if is_fp8 else None, v_scale=main_v_scale if is_fp8 else None,
    )  # fmt: skip
    q_gate = heads_of(q_gate, 2 * dim)
    out = Prepared(q_out, q_gate.new_empty(rows, gate_heads, dim), q_gate.new_empty(rows, gate_heads, dim))
    prepare(
        q_gate, heads_of(keys, dim), heads_of(values, dim),
        heads_of(side_by_side(q, k), k.shape[1]), positions,
        RopeTable(cos_sin_cache, mrope_of(mrope_section)),
        NormWeights(main_q_norm_weight, main_k_norm_weight, q_norm_weight, k_norm_weight, eps), cache, plan, out=out,
    )  # fmt: skip
    close_ring(ring, state_cache)
    return out.q, out.gate


def heads_of(projected: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[T, heads * head_dim] as [T, heads, head_dim], a view."""
    return projected.view(projected.shape[0], -1, head_dim)


def side_by_side(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[T, Hi * Di + Di] index queries and keys: a view where one projection made both, as vLLM's does; else a copy."""
    begins = q.data_ptr() + q.shape[1] * q.element_size()
    one_storage = q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
    if one_storage and k.data_ptr() == begins and q.dtype == k.dtype and q.stride() == k.stride() and q.stride(1) == 1:
        return q.as_strided((q.shape[0], q.shape[1] + k.shape[1]), q.stride())
    return torch.cat([q, k], dim=1)


def mrope_of(section: Sequence[int] | None) -> tuple[int, int, int] | None:
    """VLLM's sections, a list, a tuple or nothing, as a `RopeTable` has them."""
    return cast("tuple[int, int, int]", tuple(section)) if section else None


def index_cache(k_cache: torch.Tensor, compress_ratio: int) -> LayerCache:
    """Pooled keys alone, beside K and V that nobody reads."""
    nothing = torch.empty(1, 1, 1, 1, device=k_cache.device)
    pages = nothing.expand(k_cache.shape[0], k_cache.shape[1] * compress_ratio, 1, 1)
    return LayerCache(pages, pages, k_cache[:, :, 0], None, None)


def _select(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_starts: torch.Tensor | None,
    visible_blocks: torch.Tensor,
    token_topk: int,
    compress_ratio: int,
    query_len: int,
    block_indices: torch.Tensor,
    max_seq_len: int,
) -> None:
    """Both selecting operators."""
    rows, topk = q.shape[0], token_topk // compress_ratio
    plan = select_plan(
        visible_blocks, query_starts, page_table, rows=rows, query_len=query_len,
        page_tokens=k_cache.shape[1] * compress_ratio, block_tokens=compress_ratio, topk_blocks=topk,
        max_seq_len=max_seq_len,
    )  # fmt: skip
    out = None
    if fits(block_indices, torch.int32, rows, topk) and block_indices.stride(1) == 1:
        numbers = torch.empty(3, rows, dtype=torch.int32, device=q.device)
        out = Selection(block_indices, numbers[0], None, numbers[1], numbers[2])
    chosen = select_blocks(q, index_cache(k_cache, compress_ratio), plan, out=out)
    if out is None:
        block_indices.copy_(chosen.block_ids)


def qsa_select_paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    visible_blocks: torch.Tensor,
    token_topk: int,
    compress_ratio: int,
    decode_query_len: int,
    block_indices: torch.Tensor,
) -> None:
    """Select blocks for requests of `decode_query_len` rows each.

    Args:
        q: [R * decode_query_len, Hi, Di] index queries.
        k_cache: [blocks, page / r, 1, Di] pooled keys.
        page_table: [R, pages] int32.
        visible_blocks: [T] int32; 0 throughout for a padding request.
        token_topk: Budget in tokens.
        compress_ratio: Tokens of a block.
        decode_query_len: Rows of each request.
        block_indices: [T, K] int32 filled with ascending block ids, then -1.

    Raises:
        FlashQSAError: As `select_blocks`.
    """
    count("qsa_select_paged_decode")
    longest = page_table.shape[1] * k_cache.shape[1] * compress_ratio
    _select(
        q, k_cache, page_table, None, visible_blocks, token_topk, compress_ratio, decode_query_len, block_indices,
        longest,
    )  # fmt: skip


def qsa_select_paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    page_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    visible_blocks: torch.Tensor,
    token_topk: int,
    compress_ratio: int,
    max_query_len: int,
    block_indices: torch.Tensor,
    max_seq_len: int,
) -> None:
    """Select blocks for requests of any number of rows.

    Args:
        q: [T, Hi, Di] index queries.
        k_cache: [blocks, page / r, 1, Di] pooled keys.
        page_table: [R, pages] int32.
        query_start_loc: [R + 1] int32, from any number on.
        visible_blocks: [T] int32.
        token_topk: Budget in tokens.
        compress_ratio: Tokens of a block.
        max_query_len: Bound on the rows of a request.
        block_indices: [T, K] int32 filled with ascending block ids, then -1.
        max_seq_len: Bound on the tokens of a request.

    Raises:
        FlashQSAError: As `select_blocks`.
    """
    count("qsa_select_paged_prefill")
    _select(
        q, k_cache, page_table, query_start_loc, visible_blocks, token_topk, compress_ratio, max_query_len,
        block_indices, max_seq_len,
    )  # fmt: skip


def expand_qsa_block_indices(
    block_indices: torch.Tensor,
    query_positions: torch.Tensor,
    visible_blocks: torch.Tensor,
    compress_ratio: int,
    token_topk: int,
    out: torch.Tensor,
) -> None:
    """Token ids of each row's blocks, then its tail, then -1, and the row's count in the last column.

    Args:
        block_indices: [T, K] int32, ascending up to min(K, visible_blocks).
        query_positions: [T] int64, -1 for padding.
        visible_blocks: [T] int32.
        compress_ratio: Tokens of a block.
        token_topk: Budget in tokens.
        out: [T, budget + r] int32 to fill.

    Raises:
        FlashQSAError: As `expand_tokens`.
    """
    count("expand_qsa_block_indices")
    plan, selection = expand_plan(
        block_indices, query_positions, visible_blocks, block_tokens=compress_ratio,
        topk_blocks=token_topk // compress_ratio,
    )  # fmt: skip
    expand_tokens(selection, plan, out=out)


def qsa_sparse_paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    logical_indices: torch.Tensor,
    block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    use_prefill_config: bool,
    out: torch.Tensor | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *,
    output_gate: torch.Tensor,
) -> torch.Tensor:
    """Attend each row's listed tokens, round, then gate.

    Args:
        q: [T, Hq, D] queries.
        k_cache: [blocks, page, Hkv, D] keys.
        v_cache: The same for values.
        logical_indices: [T, W + 1] int32 token ids, and in the last column how many of them count; 0 for padding.
        block_table: [R, pages] int32.
        token_to_req: [T] int32 request of each row; rows of one request are consecutive.
        use_prefill_config: A hint for vLLM's kernel, not needed here.
        out: [T, Hq, D] to fill, or None.
        k_scale: What stored float8 keys are multiplied by.
        v_scale: The same for values.
        output_gate: [T, Hq, D] gate logits.

    Returns:
        [T, Hq, D], `out` where it is given.

    Raises:
        FlashQSAError: As `attend_tokens`.
    """
    count("qsa_sparse_paged_attention")
    plan = attend_plan(logical_indices, token_to_req, block_table, page_tokens=k_cache.shape[1])
    is_fp8 = k_cache.dtype == FP8
    cache = LayerCache(
        k_cache, v_cache, None, None, None, k_scale=k_scale if is_fp8 else None, v_scale=v_scale if is_fp8 else None
    )
    return cast(torch.Tensor, attend_tokens(q, cache, logical_indices, plan, gate=output_gate, out=out))


def qsa_store_cache_rows(cache: torch.Tensor, slot_mapping: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows at slots; -1 and slots beyond the cache mean "do not write".

    Args:
        cache: [blocks, page, 1, width].
        slot_mapping: [T] int64.
        rows: [T, width] or [T, 1, width], cast to the dtype of the cache.

    Raises:
        ShapeError: The shapes do not fit.
    """
    count("qsa_store_cache_rows")
    rows = rows[:, 0] if rows.dim() == 3 and rows.shape[1] == 1 else rows
    if cache.dim() != 4 or cache.shape[2] != 1 or rows.shape != (slot_mapping.numel(), cache.shape[3]):
        raise ShapeError(
            f"qsa_store_cache_rows: rows must be [{slot_mapping.numel()}, width] for a cache [blocks, page, 1, width], "
            f"got {list(rows.shape)} and {list(cache.shape)}. Pass one row a slot."
        )
    rows = rows.to(cache.dtype)
    if takes_kernels(cache.device):
        from flashqsa.integrations.vllm_plugin.triton_ops import store_cache_rows_triton

        store_cache_rows_triton(cache[:, :, 0], slot_mapping.reshape(-1), rows)
        return
    slots = torch.where(slot_mapping < cache.shape[0] * cache.shape[1], slot_mapping, -1)
    write_slots(cache[:, :, 0], slots, rows)


def qsa_compress_groups_with_ratio(
    raw_keys: torch.Tensor,
    raw_positions: torch.Tensor,
    compressor_state_cache: torch.Tensor,
    compressor_state_block_table: torch.Tensor,
    token_to_req: torch.Tensor,
    query_start_loc: torch.Tensor,
    logical_positions: torch.Tensor,
    compressed_slots: torch.Tensor,
    compress_ratio: int,
    rope_cache: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of the raw keys of each block that a row closes, and the rotary position of the block's first token.

    Args:
        raw_keys: [T, 1, Di] raw keys of this step.
        raw_positions: [T, 1, 3] int64 their rotary positions.
        compressor_state_cache: [blocks, ring_tokens, 1, Di] raw keys of earlier steps.
        compressor_state_block_table: [R, >= 1] int32.
        token_to_req: [T] int32.
        query_start_loc: [R + 1] int32.
        logical_positions: [T] int64, -1 for padding.
        compressed_slots: [T] int64; a row without a slot closes nothing.
        compress_ratio: Tokens of a block.
        rope_cache: [blocks, ring_tokens, 1, 3] int64, or None where a rotary position is the token's place.

    Returns:
        Pooled keys [T, 1, Di] and first positions [T, 3] int64; zeros in rows that close nothing.
    """
    count("qsa_compress_groups_with_ratio")
    rows = raw_keys.shape[0]
    back = torch.arange(compress_ratio - 1, -1, -1, device=raw_keys.device)
    requests = token_to_req.to(torch.int64)
    closes = (compressed_slots >= 0) & (logical_positions >= compress_ratio - 1) & (requests >= 0)
    safe = requests.clamp(0, max(query_start_loc.shape[0] - 2, 0))
    members = torch.arange(rows, device=raw_keys.device)[:, None] - back
    in_step = members >= query_start_loc.to(torch.int64)[safe][:, None]
    members = members.clamp(min=0)
    blocks = compressor_state_block_table[safe, 0].to(torch.int64).clamp(min=0)[:, None]
    places = (logical_positions[:, None] - back).clamp(min=0) % compressor_state_cache.shape[1]
    older = compressor_state_cache[:, :, 0][blocks, places]
    pooled = mean_of_blocks(torch.where(in_step[..., None], raw_keys[:, 0][members], older))
    if rope_cache is None:
        first = (logical_positions - (compress_ratio - 1))[:, None].expand(-1, 3)
    else:
        stored = rope_cache[:, :, 0][blocks[:, 0], places[:, 0]]
        first = torch.where(in_step[:, :1], raw_positions[:, 0][members[:, 0]], stored)
    return pooled.masked_fill(~closes[:, None], 0)[:, None], first.masked_fill(~closes[:, None], 0)
