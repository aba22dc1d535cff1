"""The residual streams between vLLM's layers in plain torch: its own form exists as Triton kernels alone.

A hidden state is `hc_count` streams side by side, [T, hc_count * hidden]. Everything is computed in fp32 and rounded
once, where vLLM's kernels round. Source: vLLM 0.32.0, models/qwen4_exp/nvidia/ops/hc.py.
"""

from __future__ import annotations

import torch


def grouped_gemma_rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float, num_groups: int) -> torch.Tensor:
    """RMS norm of each of `num_groups` parts of x [T, width], times 1 + weight ([width], or one part's)."""
    parts = x.float().view(x.shape[0], num_groups, -1)
    normed = parts * torch.rsqrt(parts.square().mean(dim=-1, keepdim=True) + eps)
    scale = 1 + weight.float().view(-1, parts.shape[2])
    return (normed * scale).flatten(1).to(x.dtype)


def hc_silu(x: torch.Tensor, hc_count: int) -> torch.Tensor:
    """SiLU of x / hc_count."""
    return torch.nn.functional.silu(x.float() / hc_count).to(x.dtype)


def hc_gate_mix(x: torch.Tensor, gate: torch.Tensor, hc_count: int) -> torch.Tensor:
    """Mean over the streams of x [T, hc_count * hidden], each element times the sigmoid of its gate: [T, hidden]."""
    gated = x.float() * gate.float().sigmoid()
    return gated.view(x.shape[0], hc_count, -1).mean(dim=1).to(x.dtype)


def hc_combine(
    residual: torch.Tensor, block_output: torch.Tensor, injection_logits: torch.Tensor | None, hc_count: int
) -> torch.Tensor:
    """Add a block's output [T, hidden] to every stream, with a weight a stream, or 1 without logits [T, hc_count]."""
    added = block_output.float()[:, None]
    if injection_logits is not None:
        added = added * (2 * (injection_logits.float() / hc_count).sigmoid())[..., None]
    return (residual.float().view(residual.shape[0], hc_count, -1) + added).flatten(1).to(residual.dtype)


def hc_combine_norm(
    residual: torch.Tensor,
    block_output: torch.Tensor,
    injection_logits: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    hc_count: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`hc_combine`, and the norm of its rounded result."""
    streams = hc_combine(residual, block_output, injection_logits, hc_count)
    return streams, grouped_gemma_rmsnorm(streams, norm_weight, eps, hc_count)
