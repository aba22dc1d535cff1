"""What the attention kernels serve, and why they refuse the rest."""

from __future__ import annotations

import torch

from flashqsa.backends import triton_refusal
from flashqsa.cache.state import LayerCache
from flashqsa.checks import FP8

MAX_HEAD_DIM = 256
MAX_QUERY_GROUP = 64
HALVES = (torch.bfloat16, torch.float16)


def attend_refusal(q: torch.Tensor, cache: LayerCache, gate: torch.Tensor | None, needs_gradients: bool) -> str | None:
    """Why Triton does not serve this call, or None when it does."""
    refusal = triton_refusal(q.device)
    if refusal is not None:
        return refusal
    if needs_gradients:
        return "the kernels have no backward"
    for name, dtype in (
        ("q", q.dtype),
        ("k_pages", cache.k_pages.dtype),
        ("gate", None if gate is None else gate.dtype),
    ):
        if dtype == torch.float64:
            return f"{name} is float64"
    if q.shape[2] > MAX_HEAD_DIM:
        return f"head_dim is {q.shape[2]}, above {MAX_HEAD_DIM}"
    if q.shape[1] // cache.kv_heads > MAX_QUERY_GROUP:
        return f"{q.shape[1] // cache.kv_heads} query heads share a KV head, more than {MAX_QUERY_GROUP}"
    if cache.k_pages.dtype not in (q.dtype, FP8) and q.dtype in HALVES:
        return f"q is {q.dtype} over {cache.k_pages.dtype} caches"
    if cache.k_pages.dtype == FP8 and q.device.type == "cuda" and torch.cuda.get_device_capability(q.device) < (8, 9):
        return "float8 caches need compute capability 8.9"
    return None
