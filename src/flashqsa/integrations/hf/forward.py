"""The forward that replaces the one of `Qwen4ExpTextAttention`."""

from __future__ import annotations

from typing import Any, cast

import torch

from flashqsa.attention import attend
from flashqsa.cache import LayerCache
from flashqsa.errors import UnsupportedError
from flashqsa.integrations.hf.angles import Angles, NeededAngles, WholeTables
from flashqsa.integrations.hf.captured import decode_by_graph
from flashqsa.integrations.hf.following import follow_caches
from flashqsa.integrations.hf.kernels import (
    Norms,
    Projected,
    Ready,
    in_whole_pages,
    norms_for_kernel,
    prepare_apart,
    prepare_growing,
    prepare_without_cache,
)
from flashqsa.integrations.hf.masks import MASK_NAME, HFStep, PlaceError
from flashqsa.integrations.hf.pooled import known_state, pool_new_blocks, remember
from flashqsa.integrations.hf.report import count_rows
from flashqsa.integrations.hf.selector import SelectorContext, checked_selection
from flashqsa.integrations.hf.settings import OBSERVERS, Observer, settings_of
from flashqsa.preparation.plain import rotate
from flashqsa.results import Selection
from flashqsa.selection import select_blocks


def attention_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: NeededAngles | tuple[torch.Tensor, torch.Tensor],
    attention_mask: HFStep | torch.Tensor | None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """One QSA layer of transformers on FlashQSA.

    Args:
        self: A `Qwen4ExpTextAttention`.
        hidden_states: [B, Q, hidden].
        position_embeddings: What the enabled model's rotary module made; for a layer that is called alone also cos and
            sin over the whole key history, each [B, KV, rotary_dim].
        attention_mask: The `HFStep` that the mask interface made.
        cache: A transformers cache, or None.
        kwargs: What transformers passes along; `past_key_values` is the older name of `cache`.

    Returns:
        Output [B, Q, hidden], and None for attention weights, which are never built.
    """
    runs = _attend_outside_graphs if torch.compiler.is_compiling() else _attend
    device = hidden_states.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():  # kernels are launched on the current one
        with torch.cuda.device(device):
            return runs(self, hidden_states, position_embeddings, attention_mask, cache, **kwargs)
    return runs(self, hidden_states, position_embeddings, attention_mask, cache, **kwargs)


def _attend(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: NeededAngles | tuple[torch.Tensor, torch.Tensor],
    attention_mask: HFStep | torch.Tensor | None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    _check_call(self, attention_mask, kwargs)
    assert isinstance(attention_mask, HFStep)
    step = attention_mask.to(hidden_states.device)
    step = step.with_budget(_topk_blocks(self, step))
    cache = kwargs.get("past_key_values") if cache is None else cache
    batch, q_length, _ = hidden_states.shape
    if cache is None and step.kv_tokens != q_length:
        raise UnsupportedError(
            f"flashqsa: attention_mask must be [B, tokens] = [{batch}, {q_length}] without a cache, got "
            f"{step.kv_tokens} columns. Pass the cache whose tokens the mask counts, or a mask of these tokens."
        )
    rows, dim, index_dim = batch * q_length, self.head_dim, self.indexer.index_head_dim
    projected = Projected(
        self.q_proj(hidden_states).view(rows, -1, 2 * dim),
        self.k_proj(hidden_states).view(rows, -1, dim),
        self.v_proj(hidden_states).view(rows, -1, dim),
        self.indexer.index_qk_proj(hidden_states).view(rows, -1, index_dim),
        batch,
    )
    angles = _angles(position_embeddings, hidden_states.device, batch)
    norms = norms_for_kernel(self, projected, angles, step)
    if norms is not None and cache is not None and not _is_studied(self):
        follow_caches(self)
        if settings_of(self).capture_steps:
            replayed = decode_by_graph(self, projected, norms, angles, step, cache)
            if replayed is not None:
                return self.o_proj(replayed.view(batch, q_length, -1)), None
    ready = _prepare(self, projected, norms, angles, step, cache)
    selection = _select(self, ready.q, ready.index_q, ready.cache, ready.step)
    count_rows(self, selection)
    gate = projected.q_gate[..., dim:]
    attended = attend(ready.q, ready.cache, selection, ready.step.plan, gate=gate, softmax_scale=self.scaling)
    return self.o_proj(cast(torch.Tensor, attended).view(batch, q_length, -1)), None


_attend_outside_graphs = torch.compiler.disable(_attend)  # type: ignore[no-untyped-call]
"""Its plan and loops are no graph; the rest of a model stays one. Where nothing is compiled this costs host time."""


def _is_studied(self: Any) -> bool:
    """Whether someone selects in place of the model, or is told what it selected."""
    return settings_of(self).selector is not None or bool(self.__dict__.get(OBSERVERS, ()))


def _prepare(self: Any, rows: Projected, norms: Norms | None, angles: Angles, step: HFStep, cache: Any) -> Ready:
    """Norms, rotation and caches: by one kernel where that serves, and as transformers' modules do it elsewhere."""
    if norms is not None and cache is None:
        return prepare_without_cache(self, rows, norms, angles, step)
    if norms is not None:
        ready = prepare_growing(self, rows, norms, angles, step, cache)
        if ready is not None:
            return ready
        q, index_q, k = prepare_apart(rows, norms, angles, step)
    else:
        row_cos, row_sin = angles.of_rows(rows.query_tokens)
        q = rows.q_gate[..., : self.head_dim]
        q = rotate(self.q_norm(q), row_cos, row_sin).to(q.dtype)
        k = rotate(self.k_norm(rows.k), row_cos, row_sin).to(rows.k.dtype)
        with torch.no_grad():
            index_q = self.indexer.q_layernorm(rows.index_qk[:, :-1])
            index_q = rotate(index_q, row_cos, row_sin).to(index_q.dtype)
    past = 0 if cache is None else int(cache.get_seq_length(self.layer_idx))
    with torch.no_grad():
        block_keys = _block_keys(self, rows.by_batch_row(rows.index_qk[:, -1]), angles, cache, step, past)
    k_states, v_states = rows.by_batch_row(k).transpose(1, 2), rows.by_batch_row(rows.v).transpose(1, 2)
    if cache is not None:
        k_states, v_states = cache.update(k_states, v_states, self.layer_idx)
    k_states, v_states = k_states.transpose(1, 2), v_states.transpose(1, 2)
    if norms is not None and not getattr(cache.layers[self.layer_idx], "is_compileable", False):
        columns = step.block_capacity * step.plan.block_tokens
        k_states, v_states = in_whole_pages(k_states, columns), in_whole_pages(v_states, columns)
        step = step.with_columns(columns)
    return Ready(q, index_q, LayerCache(k_states, v_states, block_keys, None, None, layer_id=self.layer_idx), step)


def _topk_blocks(self: Any, step: HFStep) -> int:
    """A budget beyond the context takes no more memory than one that reaches over it."""
    models = step.plan.topk_blocks
    wanted = settings_of(self).topk_blocks(models, step.plan.block_tokens)
    return min(wanted, max(models, step.kv_tokens // step.plan.block_tokens))


def _angles(given: NeededAngles | tuple[torch.Tensor, torch.Tensor], device: torch.device, batch: int) -> Angles:
    angles = given.to(device) if isinstance(given, NeededAngles) else WholeTables(*given)
    if angles.batch_rows == 1 != batch:
        raise PlaceError(
            f"flashqsa: position_ids must be [{batch}, tokens], one row a batch row, got one row for all. Expand them."
        )
    return angles


def _select(self: Any, q: torch.Tensor, index_q: torch.Tensor, cache: LayerCache, step: HFStep) -> Selection:
    """The blocks to attend: the model's, or those of the caller's selector; whoever observes is told."""
    selector, observers = settings_of(self).selector, self.__dict__.get(OBSERVERS, ())
    if selector is None and not observers:
        return select_blocks(index_q, cache, step.plan)
    context = SelectorContext(self.layer_idx, step.forward_id, step.plan, cache, q.detach(), index_q, self.scaling)
    with torch.no_grad():
        if selector is not None:
            selection = checked_selection(context, selector(context))
        else:
            wants_scores = any(observer.wants_scores for observer in observers)
            selection = select_blocks(index_q, cache, step.plan, return_scores=wants_scores)
        observer: Observer
        for observer in observers:
            observer.tell(context, selection)
    return selection


def _block_keys(
    self: Any,
    raw_keys: torch.Tensor,
    angles: Angles,
    cache: Any,
    step: HFStep,
    past: int,
) -> torch.Tensor:
    """Pooled keys [B, capacity, Di] of the whole context, after adding this forward's raw keys to the cache."""
    norm = self.indexer.k_layernorm
    if cache is None:
        return pool_new_blocks(None, raw_keys, angles, norm, step).keys
    follow_caches(self)
    cache_layer = cache.layers[self.layer_idx]
    state = known_state(cache_layer, step, past)
    raw_keys = cache.update_indexer(raw_keys, self.layer_idx)
    state = pool_new_blocks(state, raw_keys, angles, norm, step)
    remember(cache_layer, state, past + step.plan.num_rows // len(step.starts))
    return state.keys[:, : step.block_capacity]


def _check_call(self: Any, step: Any, kwargs: dict[str, Any]) -> None:
    if not isinstance(step, HFStep):
        if self.config._attn_implementation != MASK_NAME:
            raise UnsupportedError(
                f"flashqsa: the attention implementation of an enabled model must stay {MASK_NAME!r}, which makes no "
                f"mask, got {self.config._attn_implementation!r}: set_attn_implementation was called since, or hooks "
                "keep the forward that the model had before its class was enabled. Call enable on this model, or "
                "disable to run it with that implementation."
            )
        got = "None" if step is None else f"{type(step).__name__} {list(getattr(step, 'shape', []))}"
        raise UnsupportedError(
            f"flashqsa: attention_mask must be None or [B, tokens] when the model is called, got {got}. "
            "Pass a 2-D padding mask; 4-D masks are not served."
        )
    if kwargs.get("output_attentions") or getattr(self.config, "output_attentions", False):
        raise UnsupportedError(
            "flashqsa: output_attentions must be off, got True. Attention weights are never built; disable FlashQSA to "
            "read them."
        )
    if self.training and self.attention_dropout:
        raise UnsupportedError(
            f"flashqsa: attention_dropout must be 0 in training, got {self.attention_dropout}. "
            "Set it to 0 in the config."
        )
