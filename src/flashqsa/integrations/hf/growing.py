"""Room to grow behind a dynamic cache layer: kernels write new tokens where they belong, nothing else is copied.

transformers' dynamic layers make longer tensors in every step, which copies the whole context. Here the layer's `keys`,
`values` and `indexer_keys` become views of larger buffers, of the shapes that transformers gives them. Whatever else is
done to the layer replaces these views; then the next step begins new buffers from what the layer holds. A buffer is
only written past its last token, so that tensors taken from a cache, and copies of it, keep what they show.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flashqsa.cache import LayerCache
from flashqsa.integrations.hf.masks import PAGE_BLOCKS

METHODS = ("update", "update_indexer")

_behind = WeakTensorKeyDictionary()
"""Buffers by the `keys` of a layer: who drops these drops the buffers, and a copy of them has none."""


@dataclass
class Buffers:
    """Buffers of one layer and batch, columns first.

    Attributes:
        k: [B, C, Hkv, D] keys.
        v: [B, C, Hkv, D] values.
        raw_keys: [B, C, Di] raw index keys.
        tokens: Columns written so far.
        layer_cache: What the kernels read, made when first asked for.
        cache_type: Class of the transformers cache that they are behind.
        steps: Decode steps that they served.
        captured: The graph of such a step, once there is one.
    """

    k: torch.Tensor
    v: torch.Tensor
    raw_keys: torch.Tensor
    tokens: int = 0
    layer_cache: LayerCache | None = None
    cache_type: type | None = None
    steps: int = 0
    captured: Any = None

    @property
    def all(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys, values and raw index keys."""
        return self.k, self.v, self.raw_keys

    @classmethod
    def empty(cls, k: torch.Tensor, v: torch.Tensor, raw_keys: torch.Tensor, batch: int, columns: int) -> Buffers:
        """Buffers for rows such as these.

        Args:
            k: [B * Q, Hkv, D].
            v: [B * Q, Hkv, D].
            raw_keys: [B * Q, ..., Di].
            batch: `B`.
            columns: `C`.
        """
        return cls(
            k.new_empty((batch, columns, *k.shape[1:])),
            v.new_empty((batch, columns, *v.shape[1:])),
            raw_keys.new_empty((batch, columns, raw_keys.shape[-1])),
        )

    def pages(self, block_keys: torch.Tensor, layer_id: int) -> LayerCache:
        """The buffers, and block keys [B, C / block_tokens, Di] beside them, as pages of one size whatever C is."""
        known = self.layer_cache
        if known is None or known.block_keys is None or known.block_keys.data_ptr() != block_keys.data_ptr():
            batch, blocks, _ = block_keys.shape
            count = batch * blocks // PAGE_BLOCKS
            known = self.layer_cache = LayerCache(
                self.k.view(count, -1, *self.k.shape[2:]),
                self.v.view(count, -1, *self.v.shape[2:]),
                block_keys.view(count, PAGE_BLOCKS, -1),
                None,
                None,
                layer_id=layer_id,
            )
        return known

    def shown(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Keys and values [B, Hkv, tokens, D] and raw index keys [B, tokens, Di], as transformers has them."""
        k, v = (x.narrow(1, 0, tokens).transpose(1, 2) for x in (self.k, self.v))
        return k, v, self.raw_keys.narrow(1, 0, tokens)

    def is_shown_by(self, layer: Any) -> bool:
        """Whether a cache layer still holds exactly what was written last."""
        pairs = ((layer.keys, self.k, 2), (layer.values, self.v, 2), (layer.indexer_keys, self.raw_keys, 1))
        return all(
            held is not None
            and held.data_ptr() == own.data_ptr()
            and held.shape[axis] == self.tokens
            and held.stride(0) == own.stride(0)
            and held.shape[0] == own.shape[0]
            and held.stride(axis) == own.stride(1)
            for held, own, axis in pairs
        )


def growing_layer(cache: Any, layer_id: int, k: torch.Tensor) -> Any:
    """The layer of a cache that may have room behind it, or None where its own methods have to be called.

    Args:
        cache: A transformers cache.
        layer_id: Index of the layer.
        k: New keys, which the layer's own must resemble.
    """
    from transformers.cache_utils import Cache, DynamicIndexedLayer

    if getattr(cache, "offloading", False) or any(getattr(type(cache), m) is not vars(Cache)[m] for m in METHODS):
        return None
    if layer_id >= len(cache.layers) or type(cache.layers[layer_id]) is not DynamicIndexedLayer:
        return None
    layer = cache.layers[layer_id]
    if any(method in layer.__dict__ for method in METHODS):
        return None
    if not layer.is_initialized or layer.keys.numel() == 0:
        return layer if not layer.is_indexer_initialized or layer.indexer_keys.numel() == 0 else None
    if not layer.is_indexer_initialized or layer.indexer_keys.shape[1] != layer.keys.shape[2]:
        return None
    alike = layer.keys.dtype == layer.values.dtype == k.dtype and layer.keys.device == k.device
    return layer if alike and layer.indexer_keys.dtype == k.dtype and layer.indexer_keys.device == k.device else None


def room_behind(
    layer: Any, k: torch.Tensor, v: torch.Tensor, raw_keys: torch.Tensor, batch: int, past: int, columns: int
) -> Buffers:
    """The layer's buffers, holding the tokens so far, with room for `columns`.

    Args:
        layer: What `growing_layer` returned.
        k: [B * Q, Hkv, D] new keys, like the other rows for their shapes alone.
        v: [B * Q, Hkv, D].
        raw_keys: [B * Q, ..., Di].
        batch: `B`.
        past: Tokens that the layer holds, at least one.
        columns: Columns of the buffers.
    """
    known: Buffers | None = _behind.get(layer.keys)  # type: ignore[no-untyped-call]
    if known is not None and known.k.shape[1] == columns and known.tokens == past and known.is_shown_by(layer):
        return known
    buffers = Buffers.empty(k, v, raw_keys, batch, columns)
    held = (layer.keys, layer.values, layer.indexer_keys)
    for target, source in zip(buffers.shown(past), held, strict=True):
        target.copy_(source)
    return buffers


def buffers_behind(layer: Any, cache_type: type) -> Buffers | None:
    """The buffers that a layer still shows all of, if they were put behind it in a cache of that class."""
    keys = getattr(layer, "keys", None)
    buffers: Buffers | None = None if keys is None else _behind.get(keys)  # type: ignore[no-untyped-call]
    return buffers if buffers is not None and buffers.cache_type is cache_type and buffers.is_shown_by(layer) else None


def show(layer: Any, buffers: Buffers, tokens: int, cache_type: type) -> None:
    """Let a cache layer hold the first columns of its buffers."""
    k, v, raw_keys = buffers.shown(tokens)
    if not layer.is_initialized:
        layer.lazy_initialization(k, v)
    if not layer.is_indexer_initialized:
        layer.lazy_initialization_indexer(raw_keys)
    layer.keys, layer.values, layer.indexer_keys = k, v, raw_keys
    buffers.tokens, buffers.cache_type = tokens, cache_type
    _behind[k] = buffers
