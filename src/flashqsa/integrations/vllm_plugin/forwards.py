"""The two forwards of mode `full`: one plan a step, block ids handed from selection to attention as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashqsa.attention import attend
from flashqsa.cache import LayerCache
from flashqsa.checks import FP8
from flashqsa.integrations.vllm_plugin.counts import count
from flashqsa.integrations.vllm_plugin.ops import index_cache, mrope_of, qsa_prepare
from flashqsa.integrations.vllm_plugin.plans import check_page_sizes, step_plan
from flashqsa.selection import expand_tokens, select_blocks

SELECTED = "flashqsa_selected"
"""On an attention layer between its indexer and its attention: the selection, and the plan of K and V."""


def indexer_forward(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`QSAIndexer.forward` on FlashQSA; vLLM's own where the layer's parts are not prepared together.

    Without metadata (a profiling run) vLLM's own answers too: rows that attend nothing, or the buffer as it is.
    """

    def forward(
        self: Any,
        projected_qk: torch.Tensor,
        positions: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        attn: Any,
        qkv: torch.Tensor | None = None,
        slot_mapping: torch.Tensor | None = None,
    ) -> Any:
        metadata = self._metadata()
        if metadata is None or out is None or qkv is None or not attn.use_fused_qsa_prepare or self.skip_topk:
            return stock(self, projected_qk, positions, out, attn=attn, qkv=qkv, slot_mapping=slot_mapping)
        raw, compressed = metadata
        plan, index_plan = _plans(self, attn, raw, compressed)
        index_q, outputs = _prepare(self, attn, projected_qk, positions, qkv, slot_mapping, raw, compressed)
        count("select_blocks")
        cache = index_cache(self.compressed_key_cache.kv_cache, self.compress_ratio)
        selection = select_blocks(index_q, cache, index_plan)
        if attn._max_decode_query_len > 1:  # draft steps read the expanded rows again
            expand_tokens(selection, plan, out=out)
        setattr(attn, SELECTED, (selection, plan))
        return out, outputs

    return forward


def _plans(indexer: Any, attn: Any, raw: Any, compressed: Any) -> Any:
    from vllm.forward_context import get_forward_context

    every = get_forward_context().attn_metadata
    main = (every[0] if isinstance(every, list) else every)[attn.layer_name]
    page_tokens = attn.kv_cache.shape[2]
    check_page_sizes(page_tokens, indexer.compressed_key_cache.kv_cache.shape[1], indexer.compress_ratio)
    return step_plan(
        raw, compressed, main, page_tokens=page_tokens, topk_blocks=indexer.token_topk // indexer.compress_ratio,
        ring_tokens=indexer.raw_key_cache.kv_cache.shape[1],
    )  # fmt: skip


def _prepare(
    indexer: Any,
    attn: Any,
    projected_qk: torch.Tensor,
    positions: torch.Tensor,
    qkv: torch.Tensor,
    slot_mapping: torch.Tensor | None,
    raw: Any,
    compressed: Any,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Index queries, and queries with gates; all caches written."""
    assert slot_mapping is not None
    rows, heads, dim = raw.num_actual_tokens, indexer.index_n_heads, indexer.index_head_dim
    projected_qk = projected_qk[:rows]
    index_q = projected_qk.new_empty(rows, heads, dim, dtype=indexer.indexer_dtype)
    main_kv_cache = attn.kv_cache.transpose(1, 2)
    if attn.kv_cache_dtype in ("fp8", "fp8_e4m3"):
        main_kv_cache = main_kv_cache.view(FP8)
    state = indexer.raw_key_cache
    outputs = qsa_prepare(
        projected_qk[:, : heads * dim], projected_qk[:, heads * dim :], positions[..., :rows],
        indexer.rotary_emb.cos_sin_cache, indexer.q_layernorm.weight, indexer.k_layernorm.weight,
        indexer.q_layernorm.variance_epsilon, index_q, state.kv_cache, raw.slot_mapping, raw.block_table,
        raw.query_start_loc, raw.logical_positions, indexer.compressed_key_cache.kv_cache, compressed.slot_mapping,
        compressed.k_work_metadata,
        compress_ratio=indexer.compress_ratio,
        mrope_section=mrope_of(getattr(indexer.rotary_emb, "mrope_section", None)),
        rope_pos_offset=state.rope_position_offset if state.rope_position_cache is not None else None,
        main_qkv=qkv[:rows], main_q_norm_weight=attn.q_norm.weight, main_k_norm_weight=attn.k_norm.weight,
        main_eps=attn.q_norm.variance_epsilon, main_kv_cache=main_kv_cache, main_slot_mapping=slot_mapping[:rows],
        main_k_scale=attn._k_scale_float, main_v_scale=attn._v_scale_float,
    )  # fmt: skip
    return index_q, outputs


def impl_forward(stock: Callable[..., Any]) -> Callable[..., Any]:
    """`forward_qsa` on the selection that the layer's indexer just made; on its token lists where there is none."""

    def forward_qsa(
        self: Any,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        token_to_req: torch.Tensor,
        use_prefill_config: bool,
        output_gate: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        selected = layer.__dict__.pop(SELECTED, None)
        if selected is None or output_scale is not None or output_block_scale is not None:
            output = stock(
                self, layer, query, key, value, kv_cache, attn_metadata, output, token_to_req, use_prefill_config,
                output_gate, output_scale, output_block_scale,
            )  # fmt: skip
            return output
        selection, plan = selected
        rows = attn_metadata.num_actual_tokens
        main = kv_cache.transpose(1, 2)
        keys, values = main[..., : self.head_size], main[..., self.head_size :]
        is_fp8 = self.kv_cache_dtype in ("fp8", "fp8_e4m3")
        if is_fp8:
            keys, values = keys.view(FP8), values.view(FP8)
        cache = LayerCache(
            keys, values, None, None, None, k_scale=layer._k_scale_float if is_fp8 else None,
            v_scale=layer._v_scale_float if is_fp8 else None,
        )  # fmt: skip
        count("attend")
        attend(query[:rows], cache, selection, plan, gate=output_gate[:rows], out=output[:rows])
        output[rows:] = 0
        return output

    return forward_qsa
