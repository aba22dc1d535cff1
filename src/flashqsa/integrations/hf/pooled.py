"""Pooled block keys beside the raw index keys that transformers caches: each block is pooled once.

The cache layer's `indexer_keys` stay the source of truth. What is pooled is believed only as long as they are the
tensor that it was pooled from (or the beginning of it, after a crop), not written to since; `following` lets it follow
what transformers does to a cache. Otherwise blocks are pooled again from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashqsa.integrations.hf.angles import Angles
from flashqsa.integrations.hf.masks import HFStep
from flashqsa.preparation.plain import mean_of_blocks, rotate

ATTRIBUTE = "flashqsa_pooled"


@dataclass
class _Unwatched:
    """How often cache layers have been left unwatched: torch counts no writes into tensors of inference mode."""

    times: int = 0


UNWATCHED = _Unwatched()


@dataclass
class PooledKeys:
    """Block keys of one layer and batch.

    Attributes:
        keys: [B, capacity, Di] pooled keys, in the model dtype.
        counts: Blocks pooled so far, by batch row.
        starts: Token that each batch row's blocks are counted from.
        source: The raw keys that they were pooled from, as the cache layer holds them.
        version: How often `source` had been written to then.
        unwatched: How often cache layers had been left unwatched then.
        tokens: Tokens that the cache layer held then.
    """

    keys: torch.Tensor
    counts: list[int]
    starts: tuple[int, ...]
    source: torch.Tensor | None = None
    version: int = 0
    unwatched: int = 0
    tokens: int = 0

    def belongs_to(self, raw_keys: torch.Tensor | None) -> bool:
        """Whether it was pooled from these raw keys, or from longer ones that they are the beginning of."""
        source = self.source
        if source is None or raw_keys is None or self.keys.device != raw_keys.device:
            return False
        if raw_keys is not source and not _is_beginning(raw_keys, source):
            return False
        if source.is_inference() and self.unwatched != UNWATCHED.times:
            return False
        return self.version == _version(raw_keys)

    def bind(self, raw_keys: torch.Tensor) -> None:
        """Belong to these raw keys from now on."""
        self.source, self.version, self.unwatched = raw_keys, _version(raw_keys), UNWATCHED.times


def _is_beginning(raw_keys: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether [B, tokens, Di] is a view of the first tokens of another."""
    same_place = (
        raw_keys.untyped_storage().data_ptr() == source.untyped_storage().data_ptr()
        and raw_keys.storage_offset() == source.storage_offset()
        and raw_keys.stride() == source.stride()
        and raw_keys.dtype == source.dtype
    )
    (batch, tokens, dim), (source_batch, source_tokens, source_dim) = raw_keys.shape, source.shape
    return same_place and (batch, dim) == (source_batch, source_dim) and tokens <= source_tokens


def _version(tensor: torch.Tensor) -> int:
    """Counts writes into a tensor and its views; torch does not count those made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def pool_new_blocks(
    state: PooledKeys | None, raw_keys: torch.Tensor, angles: Angles, norm: Any, step: HFStep
) -> PooledKeys:
    """Pool the blocks that are complete and not pooled yet.

    Args:
        state: What the layer pooled so far, or None to start over.
        raw_keys: [B, KV, Di] raw index keys of the whole context.
        angles: Rotary angles by column of the context.
        norm: The `k_layernorm` module.
        step: The forward.
    """
    state = _with_room(state, raw_keys, step)
    r = step.plan.block_tokens
    batch_rows: dict[tuple[int, int, int], list[int]] = {}
    for batch_row, (start, end) in enumerate(zip(step.starts, step.ends, strict=True)):
        done, complete = state.counts[batch_row], max(end - start, 0) // r
        if complete > done:
            batch_rows.setdefault((start, done, complete), []).append(batch_row)
    for (start, done, complete), together in batch_rows.items():
        tokens = slice(start + done * r, start + complete * r)
        firsts = slice(start + done * r, start + complete * r, r)
        everyone = len(together) == raw_keys.shape[0]
        members = raw_keys[:, tokens] if everyone else raw_keys[together, tokens]
        mean = mean_of_blocks(members.reshape(len(together) * (complete - done), r, -1))
        cos, sin = (table.flatten(0, 1) for table in angles.of_columns(tuple(together), firsts))
        pooled = rotate(norm(mean)[:, None], cos, sin)[:, 0].to(state.keys.dtype)
        rows = slice(None) if everyone else together
        state.keys[rows, done:complete] = pooled.view(len(together), complete - done, -1)
    state.counts = [max(end - start, 0) // r for start, end in zip(step.starts, step.ends, strict=True)]
    return state


def _with_room(state: PooledKeys | None, raw_keys: torch.Tensor, step: HFStep) -> PooledKeys:
    """The state with room for the forward's blocks, and keys that may be written to."""
    batch, _, dim = raw_keys.shape
    if state is None:
        return PooledKeys(raw_keys.new_zeros(batch, step.block_capacity, dim), [0] * batch, step.starts)
    if state.keys.shape[1] < step.block_capacity:
        grown = raw_keys.new_zeros(batch, step.block_capacity, dim)
        grown[:, : state.keys.shape[1]] = state.keys
        state.keys = grown
    elif state.keys.is_inference() and not torch.is_inference_mode_enabled():
        state.keys = state.keys.clone()  # a tensor of inference mode takes no writes outside it
    return state


def known_state(cache_layer: Any, step: HFStep, past: int) -> PooledKeys | None:
    """What the cache layer's blocks were pooled to, as far as its tokens are still those; else None."""
    state: PooledKeys | None = getattr(cache_layer, ATTRIBUTE, None)
    if state is None or not state.belongs_to(cache_layer.indexer_keys):
        return None
    if past > state.tokens or state.starts != step.starts:
        return None
    kept = [max(past - start, 0) // step.plan.block_tokens for start in state.starts]
    state.counts = [min(count, most) for count, most in zip(state.counts, kept, strict=True)]
    return state


def remember(cache_layer: Any, state: PooledKeys, tokens: int) -> None:
    """Keep the pooled keys on the cache layer, tied to the raw keys that it holds now."""
    state.bind(cache_layer.indexer_keys)
    state.tokens = tokens
    setattr(cache_layer, ATTRIBUTE, state)
