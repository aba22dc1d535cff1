"""What the selection kernels serve, and why they refuse the rest."""

from __future__ import annotations

import torch

from flashqsa.backends import triton_refusal
from flashqsa.checks import FP8

MAX_TOPK_BLOCKS = 4096
MAX_INDEX_HEADS = 16
MAX_INDEX_HEAD_DIM = 256


def select_refusal(index_q: torch.Tensor, block_keys: torch.Tensor, topk_blocks: int) -> str | None:
    """Why Triton does not serve this call, or None when it does."""
    refusal = triton_refusal(index_q.device)
    if refusal is not None:
        return refusal
    if torch.float64 in (index_q.dtype, block_keys.dtype):
        return "index_q or block_keys are float64"
    if topk_blocks > MAX_TOPK_BLOCKS:
        return f"topk_blocks is {topk_blocks}, above {MAX_TOPK_BLOCKS}"
    if index_q.shape[1] > MAX_INDEX_HEADS:
        return f"index_q has {index_q.shape[1]} heads, more than {MAX_INDEX_HEADS}"
    if index_q.shape[2] > MAX_INDEX_HEAD_DIM:
        return f"index_head_dim is {index_q.shape[2]}, above {MAX_INDEX_HEAD_DIM}"
    has_fp8 = FP8 in (index_q.dtype, block_keys.dtype)
    if has_fp8 and index_q.device.type == "cuda" and torch.cuda.get_device_capability(index_q.device) < (8, 9):
        return "float8 index keys need compute capability 8.9"
    return None
