"""Preparation in plain torch: the whole step at once, on any device."""

from __future__ import annotations

import torch

from flashqsa.cache.state import LayerCache, read_slots, write_slots
from flashqsa.checks import FP8, FP8_MAX
from flashqsa.plan import StepPlan
from flashqsa.preparation.weights import NormWeights
from flashqsa.results import Prepared
from flashqsa.rope import RopeTable


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * (1 + weight)`` over the last dimension in fp32, cast once to the dtype of x."""
    wide = x.to(_wide(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * (1 + weight.to(wide.dtype))
    return normed.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the leading dimensions of each head, NeoX pairing, products in fp32.

    Args:
        x: [N, H, d] normed heads in the model dtype.
        cos: [N, rotary_dim / 2] cosines as stored.
        sin: [N, rotary_dim / 2] sines as stored.

    Returns:
        [N, H, d] fp32 (float64 for float64), for the caller's one cast.
    """
    wide = x.to(_wide(x.dtype))
    half = cos.shape[-1]
    c, s = cos[:, None].to(wide.dtype), sin[:, None].to(wide.dtype)
    a, b = wide[..., :half], wide[..., half : 2 * half]
    return torch.cat([a * c - b * s, b * c + a * s, wide[..., 2 * half :]], dim=-1)


def cast_saturating(x: torch.Tensor, dtype: torch.dtype, scale: float | torch.Tensor | None = None) -> torch.Tensor:
    """Divide by the scale, then cast; float8 saturates at 448 instead of becoming NaN."""
    if isinstance(scale, float | int):
        # By a number CUDA multiplies with the reciprocal, which rounds twice; by a tensor it divides, as a CPU does.
        scale = torch.full((), scale, dtype=x.dtype, device=x.device)
    if scale is not None:
        x = x / scale
    return x.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == FP8 else x.to(dtype)


def pool_block_keys(
    raw_keys: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Block keys of complete blocks: mean of raw keys, normed, rotated at the block's first token.

    Args:
        raw_keys: [M, r, Di] raw index keys in the model dtype.
        weight: [Di] of `k_layernorm`.
        eps: Epsilon of the norm.
        cos: [M, rotary_dim / 2] at each block's first token.
        sin: [M, rotary_dim / 2] at each block's first token.

    Returns:
        [M, Di] fp32 (float64 for float64), for the caller's one cast.
    """
    return rotate(rms_norm(mean_of_blocks(raw_keys)[:, None], weight, eps), cos, sin)[:, 0]


def mean_of_blocks(raw_keys: torch.Tensor) -> torch.Tensor:
    """Mean of the raw keys [M, r, Di] of each block in fp32, rounded to their dtype: [M, Di]."""
    total = raw_keys[:, 0].to(_wide(raw_keys.dtype))
    for member in range(1, raw_keys.shape[1]):
        total = total + raw_keys[:, member].to(total.dtype)
    return (total / raw_keys.shape[1]).to(raw_keys.dtype)


def prepare_torch(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index_qk: torch.Tensor,
    rope_positions: torch.Tensor,
    rope: RopeTable,
    norms: NormWeights,
    cache: LayerCache,
    plan: StepPlan,
    out: Prepared | None,
) -> Prepared:
    """Arguments as in `prepare`, with `rope_positions` [3, T]. Without `out`, gradients flow to q, gate, K and V."""
    dim = k.shape[2]
    padding = plan.request_ids < 0
    cos, sin = rope.lookup(rope_positions.masked_fill(padding, 0))
    q = rotate(rms_norm(q_gate[..., :dim], norms.q, norms.eps), cos, sin)
    q = q.masked_fill(padding[:, None, None], 0)
    slot_ids = plan.slot_ids.masked_fill(padding, -1)  # an engine's padding rows may hold leftovers
    keys = rotate(rms_norm(k, norms.k, norms.eps), cos, sin)
    write_slots(cache.k_pages, slot_ids, cast_saturating(keys, cache.k_pages.dtype, cache.k_scale))
    values = v if cache.v_scale is None and cache.v_pages.dtype != FP8 else v.to(keys.dtype)
    write_slots(cache.v_pages, slot_ids, cast_saturating(values, cache.v_pages.dtype, cache.v_scale))
    with torch.no_grad():
        index_q = rotate(rms_norm(index_qk[:, :-1], norms.index_q, norms.eps), cos, sin)
        index_q = index_q.masked_fill(padding[:, None, None], 0)
        _close_blocks(index_qk[:, -1], rope_positions, rope, norms, cache, plan)
        _keep_in_ring(index_qk[:, -1], rope_positions, cache, plan)
    if out is None:
        return Prepared(index_q.to(index_qk.dtype), q.to(q_gate.dtype), q_gate[..., dim:])
    out.q.copy_(q)
    out.index_q.copy_(cast_saturating(index_q, out.index_q.dtype))
    return out


def _close_blocks(
    raw_keys: torch.Tensor,
    rope_positions: torch.Tensor,
    rope: RopeTable,
    norms: NormWeights,
    cache: LayerCache,
    plan: StepPlan,
) -> None:
    """Pool every block that a row of this step closes; members older than the step come from the ring."""
    if cache.block_keys is None:
        return
    rows = ((plan.closed_block_slot_ids >= 0) & (plan.request_ids >= 0)).nonzero()[:, 0]
    if not rows.numel():
        return
    back = torch.arange(plan.block_tokens - 1, -1, -1, device=rows.device)
    member_rows = rows[:, None] - back  # [C, r]
    requests = plan.request_ids[rows].to(torch.int64)
    in_step = member_rows >= plan.query_starts[requests].to(torch.int64)[:, None]
    member_rows = member_rows.clamp(min=0)
    members, firsts = raw_keys[member_rows], rope_positions[:, member_rows[:, 0]]
    if cache.ring is not None and cache.ring_positions is not None and plan.ring_ids is not None:
        ring_ids = plan.ring_ids[requests].to(torch.int64).clamp(min=0)[:, None]
        ring_tokens = cache.ring.shape[1]
        ring_slots = ring_ids * ring_tokens + (plan.positions[rows][:, None] - back) % ring_tokens
        older = read_slots(cache.ring, ring_slots.flatten()).view(members.shape)
        members = torch.where(in_step[..., None], members, older)
        firsts = torch.where(in_step[:, 0], firsts, read_slots(cache.ring_positions, ring_slots[:, 0]).t())
    cos, sin = rope.lookup(firsts)
    pooled = pool_block_keys(members, norms.index_k, norms.eps, cos, sin)
    write_slots(cache.block_keys, plan.closed_block_slot_ids[rows], cast_saturating(pooled, cache.block_keys.dtype))


def _keep_in_ring(raw_keys: torch.Tensor, rope_positions: torch.Tensor, cache: LayerCache, plan: StepPlan) -> None:
    """Write the raw keys that a later block may still need."""
    if cache.ring is None or cache.ring_positions is None:
        return
    slot_ids = plan.ring_slot_ids.masked_fill(plan.request_ids < 0, -1)
    write_slots(cache.ring, slot_ids, raw_keys)
    write_slots(cache.ring_positions, slot_ids, rope_positions.t().contiguous())
