"""The definition of preparation: one row, one head, one block at a time."""

from __future__ import annotations

import torch

from flashqsa.cache.state import LayerCache
from flashqsa.checks import FP8, FP8_MAX
from flashqsa.plan import StepPlan
from flashqsa.preparation.weights import NormWeights
from flashqsa.results import Prepared
from flashqsa.rope import RopeTable


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * (1 + weight)`` of one vector in fp32, cast once to the dtype of x."""
    wide = x.to(_wide(x.dtype))
    normed = wide * torch.rsqrt((wide * wide).mean() + eps) * (1 + weight.to(wide.dtype))
    return normed.to(x.dtype)


def rotate_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first 2 * len(cos) entries of one vector, NeoX pairing (j with j + half). fp32, not yet cast."""
    half = cos.shape[0]
    out = x.to(_wide(x.dtype)).clone()
    for j in range(half):
        a, b = out[j].clone(), out[j + half].clone()
        c, s = cos[j].to(out.dtype), sin[j].to(out.dtype)
        out[j] = a * c - b * s
        out[j + half] = b * c + a * s
    return out


def cast_reference(x: torch.Tensor, dtype: torch.dtype, scale: float | torch.Tensor | None = None) -> torch.Tensor:
    """The one cast at the end: divided by the scale and saturated for float8, plain otherwise."""
    if scale is not None:
        x = x / scale
    return x.clamp(-FP8_MAX, FP8_MAX).to(dtype) if dtype == FP8 else x.to(dtype)


def pool_block_reference(
    raw_keys: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """Block key of r raw keys [r, Di]: mean in fp32, rounded, normed, rotated at the block's first token. [Di] fp32."""
    mean = raw_keys[0].to(_wide(raw_keys.dtype))
    for key in raw_keys[1:]:
        mean = mean + key.to(mean.dtype)
    mean = (mean / raw_keys.shape[0]).to(raw_keys.dtype)
    return rotate_reference(rms_norm_reference(mean, weight, eps), cos, sin)


def prepare_reference(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index_qk: torch.Tensor,
    rope_positions: torch.Tensor,
    rope: RopeTable,
    norms: NormWeights,
    cache: LayerCache,
    plan: StepPlan,
    out: Prepared,
) -> None:
    """Fill `out` and the caches. Arguments as in `prepare`, with `rope_positions` [3, T]."""
    dim, index_heads = k.shape[2], index_qk.shape[1] - 1
    closed = []  # block keys are pooled before the ring is written: older members are read from it
    for row in range(plan.num_rows):
        if int(plan.request_ids[row]) < 0:
            out.q[row], out.index_q[row] = 0, 0
            continue
        cos, sin = (table[0] for table in rope.lookup(rope_positions[:, row : row + 1]))
        for head in range(q_gate.shape[1]):
            normed = rms_norm_reference(q_gate[row, head, :dim], norms.q, norms.eps)
            out.q[row, head] = cast_reference(rotate_reference(normed, cos, sin), out.q.dtype)
        for head in range(index_heads):
            normed = rms_norm_reference(index_qk[row, head], norms.index_q, norms.eps)
            out.index_q[row, head] = cast_reference(rotate_reference(normed, cos, sin), out.index_q.dtype)
        if int(plan.slot_ids[row]) >= 0:
            page, offset = divmod(int(plan.slot_ids[row]), cache.k_pages.shape[1])
            for head in range(k.shape[1]):
                rotated = rotate_reference(rms_norm_reference(k[row, head], norms.k, norms.eps), cos, sin)
                cache.k_pages[page, offset, head] = cast_reference(rotated, cache.k_pages.dtype, cache.k_scale)
                cache.v_pages[page, offset, head] = cast_reference(
                    v[row, head].to(rotated.dtype), cache.v_pages.dtype, cache.v_scale
                )
        if cache.block_keys is not None and int(plan.closed_block_slot_ids[row]) >= 0:
            raw_keys, first = _members(row, index_qk[:, -1], rope_positions, cache, plan)
            cos, sin = (table[0] for table in rope.lookup(first[:, None]))
            pooled = pool_block_reference(raw_keys, norms.index_k, norms.eps, cos, sin)
            slot = divmod(int(plan.closed_block_slot_ids[row]), cache.block_keys.shape[1])
            closed.append((slot, cast_reference(pooled, cache.block_keys.dtype)))
    for slot, block_key in closed:
        assert cache.block_keys is not None
        cache.block_keys[slot] = block_key
    for row in range(plan.num_rows):
        kept = int(plan.request_ids[row]) >= 0 and int(plan.ring_slot_ids[row]) >= 0
        if cache.ring is not None and cache.ring_positions is not None and kept:
            ring_slot = divmod(int(plan.ring_slot_ids[row]), cache.ring.shape[1])
            cache.ring[ring_slot] = index_qk[row, -1]
            cache.ring_positions[ring_slot] = rope_positions[:, row]


def _members(
    row: int, raw_keys: torch.Tensor, rope_positions: torch.Tensor, cache: LayerCache, plan: StepPlan
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw keys [r, Di] of the block that a row closes, and the rotary position [3] of its first token."""
    request, position = int(plan.request_ids[row]), int(plan.positions[row])
    members, first = [], None
    for member in range(position - plan.block_tokens + 1, position + 1):
        member_row = row - (position - member)
        if member_row >= int(plan.query_starts[request]):
            key, rotary = raw_keys[member_row], rope_positions[:, member_row]
        else:
            assert cache.ring is not None
            assert cache.ring_positions is not None
            assert plan.ring_ids is not None
            place = (int(plan.ring_ids[request]), member % cache.ring.shape[1])
            key, rotary = cache.ring[place], cache.ring_positions[place]
        members.append(key)
        first = rotary if first is None else first
    assert first is not None
    return torch.stack(members), first
