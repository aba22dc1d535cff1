"""The rows of a layer by one kernel: where that serves, and where what it writes goes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules import module as modules

from flashqsa.backends import takes_kernels
from flashqsa.cache import LayerCache
from flashqsa.checks import FLOAT_DTYPES
from flashqsa.integrations.hf.angles import Angles
from flashqsa.integrations.hf.following import follow_caches
from flashqsa.integrations.hf.growing import Buffers, growing_layer, room_behind, show
from flashqsa.integrations.hf.masks import HFStep
from flashqsa.integrations.hf.pooled import PooledKeys, known_state, pool_new_blocks, remember

MAX_HEAD_DIM = 256
NORM = "Qwen4ExpTextRMSNorm"


@dataclass(frozen=True)
class Projected:
    """What the projections of one layer returned.

    Attributes:
        q_gate: [B * Q, Hq, 2 * D], per head ``[q | gate]``.
        k: [B * Q, Hkv, D].
        v: [B * Q, Hkv, D].
        index_qk: [B * Q, Hi + 1, Di], the raw index key last.
        batch: `B`.
    """

    q_gate: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index_qk: torch.Tensor
    batch: int

    @property
    def query_tokens(self) -> int:
        """`Q`."""
        return self.k.shape[0] // self.batch

    def by_batch_row(self, x: torch.Tensor) -> torch.Tensor:
        """[B, Q, ...] of [B * Q, ...]."""
        return x.view(self.batch, self.query_tokens, *x.shape[1:])


Norms = tuple[tuple[torch.Tensor, float], ...]
"""Weight and epsilon of the norms of q, k, index queries and block keys."""


def norms_for_kernel(attention: Any, rows: Projected, angles: Angles, step: HFStep) -> Norms | None:
    """The layer's norms where one kernel may compute them in place of their modules, else None.

    It does for inference on a device of the kernels, with norms as transformers has them and nothing hooked to them.
    """
    k = rows.k
    if angles.columns != step.plan.max_seq_len:  # a history that did not follow its cache
        return None
    if not takes_kernels(k.device) or k.dtype not in FLOAT_DTYPES[:3] or k.shape[2] > MAX_HEAD_DIM:
        return None
    if not rows.q_gate.dtype == rows.v.dtype == rows.index_qk.dtype == k.dtype:
        return None
    if rows.index_qk.shape[2] > MAX_HEAD_DIM or modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return None
    indexer, plain = attention.indexer, getattr(sys.modules[type(attention).__module__], NORM, None)
    norms = []
    for norm in (attention.q_norm, attention.k_norm, indexer.q_layernorm, indexer.k_layernorm):
        weight = norm._parameters.get("weight")
        if type(norm) is not plain or weight is None or norm._forward_hooks or norm._forward_pre_hooks:
            return None
        own = norm.__dict__
        if "forward" in own or own.get("group_size") is not None or weight.device != k.device:
            return None
        norms.append((weight, norm.eps))
    if torch.is_grad_enabled():
        tensors = (rows.q_gate, k, rows.v, *(weight for weight, _ in norms[:2]))
        if any(tensor.requires_grad for tensor in tensors):
            return None
    return tuple(norms)


@dataclass(frozen=True)
class Ready:
    """What selection and attention of one layer start from.

    Attributes:
        q: [B * Q, Hq, D] normed and rotated queries.
        index_q: [B * Q, Hi, Di] normed and rotated index queries.
        cache: The layer's caches.
        step: The step over them.
    """

    q: torch.Tensor
    index_q: torch.Tensor
    cache: LayerCache
    step: HFStep


def prepare_without_cache(attention: Any, rows: Projected, norms: Norms, angles: Angles, step: HFStep) -> Ready:
    """Rows of a forward that keeps nothing."""
    buffers, state = _fresh(rows, step)
    q, index_q = _launch(rows, norms, angles, step, (*buffers.all, state.keys), past=0)
    return _ready(attention, q, index_q, buffers, state, step)


def prepare_growing(
    attention: Any, rows: Projected, norms: Norms, angles: Angles, step: HFStep, cache: Any
) -> Ready | None:
    """Rows behind those of a dynamic cache, which grows in place; None where its own methods have to be called."""
    layer = growing_layer(cache, attention.layer_idx, rows.k)
    if layer is None:
        return None
    past = layer.keys.shape[2] if layer.is_initialized and layer.keys.numel() else 0
    total = past + rows.query_tokens
    if total != step.kv_tokens or (past and layer.keys.shape[0] != rows.batch):
        return None
    follow_caches(attention)
    r = step.plan.block_tokens
    if past:
        state = _all_pooled(known_state(layer, step, past), step, past)
        columns = step.block_capacity * r
        buffers = room_behind(layer, rows.k, rows.v, rows.index_qk, rows.batch, past, columns)
    else:
        buffers, state = _fresh(rows, step)
    q, index_q = _launch(rows, norms, angles, step, (*buffers.all, None if state is None else state.keys), past=past)
    show(layer, buffers, total, type(cache))
    if state is None:  # begun by transformers, or changed behind our back
        state = pool_new_blocks(None, layer.indexer_keys, angles, attention.indexer.k_layernorm, step)
    state.counts = [max(end - start, 0) // r for start, end in zip(step.starts, step.ends, strict=True)]
    remember(layer, state, total)
    return _ready(attention, q, index_q, buffers, state, step)


def prepare_apart(
    rows: Projected, norms: Norms, angles: Angles, step: HFStep
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, index queries, and keys [B * Q, Hkv, D] for a cache whose own methods take them."""
    k = torch.empty_like(rows.k)
    caches = tuple(rows.by_batch_row(x) for x in (k, rows.v, rows.index_qk[:, -1]))  # two written onto themselves
    q, index_q = _launch(rows, norms, angles, step, (*caches, None), past=0)
    return q, index_q, k


def in_whole_pages(x: torch.Tensor, columns: int) -> torch.Tensor:
    """[B, columns, Hkv, D] that begins with [B, N, Hkv, D]: kernels are compiled for the columns of a batch row."""
    whole = x.new_empty((x.shape[0], columns, *x.shape[2:]))
    whole[:, : x.shape[1]] = x
    return whole


def _fresh(rows: Projected, step: HFStep) -> tuple[Buffers, PooledKeys]:
    blocks = step.block_capacity
    buffers = Buffers.empty(rows.k, rows.v, rows.index_qk, rows.batch, blocks * step.plan.block_tokens)
    keys = rows.index_qk.new_empty((rows.batch, blocks, rows.index_qk.shape[2]))
    return buffers, PooledKeys(keys, [0] * rows.batch, step.starts)


def _ready(
    attention: Any, q: torch.Tensor, index_q: torch.Tensor, buffers: Buffers, state: PooledKeys, step: HFStep
) -> Ready:
    cache = buffers.pages(state.keys, attention.layer_idx)
    return Ready(q, index_q, cache, step.with_columns(buffers.k.shape[1]))


def _all_pooled(state: PooledKeys | None, step: HFStep, past: int) -> PooledKeys | None:
    """The state, with exactly the step's room, if no block of earlier tokens is missing."""
    if state is None:
        return None
    r = step.plan.block_tokens
    needed = [max(min(past, end) - start, 0) // r for start, end in zip(step.starts, step.ends, strict=True)]
    if any(count < need for count, need in zip(state.counts, needed, strict=True)):
        return None
    if state.keys.shape[1] != step.block_capacity:
        kept = min(step.block_capacity, state.keys.shape[1])
        keys = state.keys.new_empty((state.keys.shape[0], step.block_capacity, state.keys.shape[2]))
        keys[:, :kept] = state.keys[:, :kept]
        state.keys = keys
    return state


def _launch(
    rows: Projected,
    norms: Norms,
    angles: Angles,
    step: HFStep,
    caches: tuple[torch.Tensor | None, ...],
    *,
    past: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel: rows are columns `past` and later of the caches, the last ones of the context."""
    from flashqsa.preparation.triton_context import prepare_context_triton

    first_row = angles.columns - rows.query_tokens
    first_angle = first_row if caches[3] is None else max(0, first_row - step.plan.block_tokens + 1)
    cos, sin = angles.of_span(first_angle, angles.columns)
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    prepared: tuple[torch.Tensor, torch.Tensor] = prepare_context_triton(
        (rows.q_gate, rows.k, rows.v, rows.index_qk), cos, sin, norms, caches, query_tokens=rows.query_tokens,
        past=past, row_angle=first_row - first_angle,
        closed_block_slot_ids=step.plan.closed_block_slot_ids, block_tokens=step.plan.block_tokens,
    )  # fmt: skip
    return prepared
