"""vLLM's compressor state as the ring of a `LayerCache`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.backends import takes_kernels

INT64_AS_BF16 = 4
AXES = 3


@dataclass(frozen=True)
class Ring:
    """Where preparation keeps raw keys and their rotary positions.

    Attributes:
        keys: [rings, ring_tokens, Di] raw keys.
        positions: [rings, ring_tokens, 3] int64 rotary positions.
        ring_ids: [R] int32 ring of each request, -1 for none.
        copied_from: [R] for a copy of the step's rings alone, which blocks of vLLM's cache they are; None for a view.
    """

    keys: torch.Tensor
    positions: torch.Tensor
    ring_ids: torch.Tensor
    copied_from: torch.Tensor | None = None

    @classmethod
    def within(cls, state_cache: torch.Tensor, key_dim: int, rope_offset: int, ring_ids: torch.Tensor) -> Ring:
        """Views of vLLM's cache, where positions lie behind the keys."""
        positions = state_cache[:, :, 0, rope_offset : rope_offset + AXES * INT64_AS_BF16].view(torch.int64)
        return cls(state_cache[:, :, 0, :key_dim], positions, ring_ids)


def open_ring(
    state_cache: torch.Tensor,
    state_block_table: torch.Tensor,
    seq_starts: torch.Tensor,
    key_dim: int,
    rope_offset: int | None,
) -> Ring:
    """The rings of a step's requests.

    Models with three position axes keep positions behind the keys, in the same rows: both are views. Text models keep
    none, a token's rotary position is its place: the step's few rings are copied, and positions filled in.

    Args:
        state_cache: [blocks, ring_tokens, 1, width] vLLM's cache; block 0 belongs to nobody.
        state_block_table: [>= R, >= 1] int32, block of each request in the first column.
        seq_starts: [R] int64 tokens of each request before this step.
        key_dim: Dimension of a raw key.
        rope_offset: Where positions begin in a row, or None.
    """
    block_ids = state_block_table[: seq_starts.shape[0], 0]
    if rope_offset is not None:
        return Ring.within(state_cache, key_dim, rope_offset, torch.where(block_ids > 0, block_ids, -1))
    ring_tokens = state_cache.shape[1]
    block_ids = block_ids.to(torch.int64).clamp(min=0)
    slots = torch.arange(ring_tokens, device=state_cache.device)[None]
    last = seq_starts[:, None] - 1
    stored = (last - (last - slots) % ring_tokens).clamp(min=0)
    requests = torch.arange(seq_starts.shape[0], dtype=torch.int32, device=state_cache.device)
    ring_ids = torch.where(block_ids > 0, requests, -1)
    keys = state_cache[block_ids][:, :, 0, :key_dim].contiguous()
    return Ring(keys, stored[..., None].repeat(1, 1, AXES), ring_ids, block_ids)


def close_ring(ring: Ring, state_cache: torch.Tensor) -> None:
    """Write a copy back. Requests without a ring share block 0, to which they bring what it held."""
    if ring.copied_from is None:
        return
    if takes_kernels(state_cache.device) and ring.keys.numel():
        from flashqsa.integrations.vllm_plugin.triton_ops import close_rings_triton

        close_rings_triton(ring.keys, ring.copied_from, state_cache)
    else:
        state_cache[:, :, 0, : ring.keys.shape[2]].index_copy_(0, ring.copied_from, ring.keys)
