"""What the preparation kernel serves, and why it refuses the rest."""

from __future__ import annotations

import torch

from flashqsa.backends import triton_refusal
from flashqsa.cache.state import LayerCache
from flashqsa.preparation.weights import NormWeights
from flashqsa.results import Prepared
from flashqsa.rope import RopeTable

MAX_HEAD_DIM = 256


def prepare_refusal(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index_qk: torch.Tensor,
    rope: RopeTable,
    norms: NormWeights,
    cache: LayerCache,
    out: Prepared | None,
) -> str | None:
    """Why Triton does not serve this call, or None when it does. Float8 is served everywhere: bytes where it must."""
    refusal = triton_refusal(cache.device)
    if refusal is not None:
        return refusal
    differentiable = (q_gate, k, v, norms.q, norms.k, cache.k_pages, cache.v_pages)
    if out is None and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in differentiable):
        return "the kernel has no backward"
    for name, tensor in (
        ("q_gate", q_gate),
        ("rope.cos_sin", rope.cos_sin),
        ("norms.q", norms.q),
        ("norms.k", norms.k),
        ("norms.index_q", norms.index_q),
        ("norms.index_k", norms.index_k),
        ("k_pages", cache.k_pages),
        ("block_keys", cache.block_keys),
        ("out.index_q", None if out is None else out.index_q),
    ):
        if tensor is not None and tensor.dtype == torch.float64:
            return f"{name} is float64"
    for name, dim in (("head_dim", cache.head_dim), ("index_head_dim", index_qk.shape[2])):
        if dim > MAX_HEAD_DIM:
            return f"{name} is {dim}, above {MAX_HEAD_DIM}"
    return None
