"""The tensors of a pool: one set for all layers, seen layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashqsa.cache.layout import CacheLayout
from flashqsa.cache.state import LayerCache
from flashqsa.checks import FP8
from flashqsa.errors import ArgumentError

Scale = float | torch.Tensor | None
FP8_NAN = 0x7F
NO_POSITION = -1


@dataclass(frozen=True)
class PoolTensor:
    """One tensor of a pool, for whoever moves, offloads or accounts for it.

    Attributes:
        name: ``layer.3.k_pages``, ``...v_pages``, ``...block_keys``, ``...ring`` or ``...ring_positions``.
        tensor: The tensor, [pages or rings, rows, ...].
        row_tokens: Tokens that one row of its second dimension stands for.
        shareable: Whether requests with a common prefix may share it: by page. What is not is private to a request.
    """

    name: str
    tensor: torch.Tensor
    row_tokens: int
    shareable: bool

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        return self.tensor.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of its second dimension."""
        return self.tensor[0, 0].numel() * self.tensor.element_size()

    @property
    def token_bytes(self) -> float:
        """Bytes of one token."""
        return self.row_bytes / self.row_tokens


class PoolMemory:
    """[layers, pages, ...] tensors, so that one copy serves all layers; `caches` are views of them.

    Attributes:
        layout: Shapes and dtypes of one layer.
        caches: The caches of each layer.
    """

    def __init__(
        self,
        layout: CacheLayout,
        *,
        layer_ids: Sequence[int],
        num_pages: int,
        num_rings: int,
        k_scales: Sequence[Scale],
        v_scales: Sequence[Scale],
        device: torch.device,
    ) -> None:
        self.layout = layout
        layers = len(layer_ids)

        def zeros(count: int, *shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(layers, count, *shape, dtype=dtype, device=device)

        kv = (layout.page_tokens, layout.kv_heads, layout.head_dim)
        with torch.inference_mode(mode=False):  # what is made in that mode cannot be written outside it
            self.k = zeros(num_pages, *kv, dtype=layout.kv_dtype)
            self.v = zeros(num_pages, *kv, dtype=layout.kv_dtype)
            self.block_keys = zeros(num_pages, layout.page_blocks, layout.index_head_dim, dtype=layout.index_dtype)
            self.ring = zeros(num_rings, layout.ring_tokens, layout.index_head_dim, dtype=layout.ring_dtype)
            self.ring_positions = zeros(num_rings, layout.ring_tokens, 3, dtype=torch.int64).fill_(NO_POSITION)
            self.caches = self._layers(layer_ids, k_scales, v_scales)

    def _layers(
        self, layer_ids: Sequence[int], k_scales: Sequence[Scale], v_scales: Sequence[Scale]
    ) -> tuple[LayerCache, ...]:
        return tuple(
            LayerCache(
                self.k[i].detach(), self.v[i].detach(), self.block_keys[i].detach(), self.ring[i].detach(),
                self.ring_positions[i].detach(),  # no views to autograd: what a layer writes concerns no other one
                k_scale=k_scales[i], v_scale=v_scales[i], layer_id=layer_id,
            )
            for i, layer_id in enumerate(layer_ids)
        )  # fmt: skip

    @property
    def paged(self) -> tuple[torch.Tensor, ...]:
        """[layers, pages, rows, ...] tensors that live on the page table."""
        return self.k, self.v, self.block_keys

    def list(self) -> list[PoolTensor]:
        """Every tensor, layer by layer."""
        block_tokens = self.layout.block_tokens
        listed = []
        for cache in self.caches:
            for name, row_tokens, shareable in (
                ("k_pages", 1, True),
                ("v_pages", 1, True),
                ("block_keys", block_tokens, True),
                ("ring", 1, False),
                ("ring_positions", 1, False),
            ):
                tensor = getattr(cache, name)
                listed.append(PoolTensor(f"layer.{cache.layer_id}.{name}", tensor, row_tokens, shareable))
        return listed

    def drop_graphs(self) -> None:
        """Let go of what layers that ran with gradients have put into the caches, or it would grow step by step."""
        for cache in self.caches:
            for tensor in (cache.k_pages, cache.v_pages, cache.block_keys, cache.ring):
                if tensor is not None and tensor.requires_grad:
                    tensor.detach_()

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page in every layer. Plain numbers and views: nothing is uploaded."""
        for tensor in self.paged:
            tensor[:, target].copy_(tensor[:, source])

    def copy_ring(self, source: int, target: int) -> None:
        """Copy a ring in every layer."""
        for tensor in (self.ring, self.ring_positions):
            tensor[:, target].copy_(tensor[:, source])

    def forget_ring(self, ring_id: int) -> None:
        """Mark every place of a ring as empty, so that preparation refuses to read it."""
        self.ring_positions[:, ring_id].fill_(NO_POSITION)

    def poison_rows(self, page_id: int, first_token: int = 0) -> None:
        """Fill a page with NaN from one of its tokens on, in every layer: also the key of a block still open there."""
        first_block = first_token // self.layout.block_tokens
        for tensor, first in ((self.k, first_token), (self.v, first_token), (self.block_keys, first_block)):
            _poison(tensor[:, page_id, first:])

    def poison_ring(self, ring_id: int, tokens: range | None = None) -> None:
        """Fill a ring, or the places of some tokens in it, with NaN and no position, in every layer."""
        places = slice(None) if tokens is None else [token % self.layout.ring_tokens for token in tokens]
        for place in [places] if isinstance(places, slice) else places:
            _poison(self.ring[:, ring_id, place])
            self.ring_positions[:, ring_id, place] = NO_POSITION


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, float8 as bytes: moving it needs no kernel for its dtype."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _poison(tensor: torch.Tensor) -> None:
    raw(tensor).fill_(FP8_NAN if tensor.dtype == FP8 else float("nan"))


def scales_of_layers(where: str, name: str, scale: Scale | Sequence[Scale], layers: int) -> list[Scale]:
    """One scale a layer, from one for all or a sequence.

    Raises:
        ArgumentError: The sequence has another length.
    """
    if not isinstance(scale, Sequence):
        return [scale] * layers
    if len(scale) != layers:
        raise ArgumentError(
            f"{where}: {name} must have one scale for each of the {layers} layers, got {len(scale)}. "
            "Pass one scale for all of them, or a sequence."
        )
    return list(scale)
