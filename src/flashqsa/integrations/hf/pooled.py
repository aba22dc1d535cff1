"""Pooled block keys beside the raw index keys that transformers caches: each block is pooled once.

The cache layer's `indexer_keys` stay the source of truth. Whatever replaces them (crop, reorder, select, offload, a
forward of the stock layer) is seen by their identity, whatever writes into them by their version, and the blocks are
then pooled again from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashqsa.integrations.hf.masks import HFStep
from flashqsa.preparation.plain import mean_of_blocks, rotate

ATTRIBUTE = "flashqsa_pooled"


@dataclass
class PooledKeys:
    """Block keys of one layer and batch.

    Attributes:
        keys: [B, capacity, Di] pooled keys, in the model dtype.
        counts: Blocks pooled so far, by batch row.
        starts: Token that each batch row's blocks are counted from.
        source: The raw keys that they were pooled from, as the cache layer holds them; compared by identity.
        version: How often `source` had been written to then.
        tokens: Tokens that the cache layer held then.
    """

    keys: torch.Tensor
    counts: list[int]
    starts: tuple[int, ...]
    source: torch.Tensor | None = None
    version: int = 0
    tokens: int = 0


def pool_new_blocks(
    state: PooledKeys | None,
    raw_keys: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norm: Any,
    step: HFStep,
) -> PooledKeys:
    """Pool the blocks that are complete and not pooled yet.

    Args:
        state: What the layer pooled so far, or None to start over.
        raw_keys: [B, KV, Di] raw index keys of the whole context.
        cos: [B, KV, rotary_dim / 2] cosines of the whole context.
        sin: [B, KV, rotary_dim / 2] sines.
        norm: The `k_layernorm` module.
        step: The forward.
    """
    batch, _, dim = raw_keys.shape
    r = step.plan.block_tokens
    if state is None:
        keys = raw_keys.new_zeros(batch, step.block_capacity, dim)
        state = PooledKeys(keys, [0] * batch, step.starts)
    elif state.keys.shape[1] < step.block_capacity:
        grown = raw_keys.new_zeros(batch, step.block_capacity, dim)
        grown[:, : state.keys.shape[1]] = state.keys
        state.keys = grown
    for batch_row, (start, end) in enumerate(zip(step.starts, step.ends, strict=True)):
        done, complete = state.counts[batch_row], max(end - start, 0) // r
        if complete > done:
            tokens = slice(start + done * r, start + complete * r)
            firsts = slice(start + done * r, start + complete * r, r)
            mean = mean_of_blocks(raw_keys[batch_row, tokens].view(complete - done, r, dim))
            pooled = rotate(norm(mean)[:, None], cos[batch_row, firsts], sin[batch_row, firsts])[:, 0]
            state.keys[batch_row, done:complete] = pooled.to(state.keys.dtype)
        state.counts[batch_row] = complete
    return state


def known_state(cache_layer: Any, step: HFStep, past: int) -> PooledKeys | None:
    """What the cache layer's blocks were pooled to, if its raw keys are still those; else None."""
    state: PooledKeys | None = getattr(cache_layer, ATTRIBUTE, None)
    if state is None or state.source is None or state.source is not cache_layer.indexer_keys:
        return None
    if state.tokens != past or state.starts != step.starts or state.keys.device != state.source.device:
        return None
    return state if state.version == _version(state.source) else None


def _version(tensor: torch.Tensor) -> int:
    """Counts writes into a tensor; torch does not count them for those made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def remember(cache_layer: Any, state: PooledKeys, tokens: int) -> None:
    """Keep the pooled keys on the cache layer, tied to the raw keys that it holds now."""
    source = cache_layer.indexer_keys
    state.source, state.version, state.tokens = source, _version(source), tokens
    setattr(cache_layer, ATTRIBUTE, state)
