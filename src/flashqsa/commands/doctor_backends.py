"""Which backend each stage takes for a checkpoint's shapes and dtypes, and why the others are not taken."""

from __future__ import annotations

import torch

from flashqsa.attention.support import attend_refusal
from flashqsa.backends import explain, triton_refusal
from flashqsa.cache import CacheLayout, LayerCache
from flashqsa.commands.doctor_findings import Finding
from flashqsa.config import QSAConfig
from flashqsa.preparation import NormWeights
from flashqsa.preparation.support import prepare_refusal
from flashqsa.rope import RopeTable
from flashqsa.selection.support import select_refusal


def explain_stages(
    config: QSAConfig, layout: CacheLayout, dtype: torch.dtype, device: torch.device
) -> dict[str, dict[str, str]]:
    """Stage to backend to one line, as `flashqsa.explain`, for one checkpoint.

    Args:
        config: Its constants.
        layout: Dtypes of its caches.
        dtype: The model dtype.
        device: Where it would run.
    """
    lines = explain(device)
    if triton_refusal(device) is not None:
        return lines
    for stage, refusal in _refusals(config, layout, dtype, device).items():
        if refusal is not None:
            lines[stage]["triton"] = f"refused: {refusal}"
            lines[stage]["torch"] = "taken: plain torch serves every device"
    return lines


def taken_backend(lines: dict[str, str]) -> str:
    """The backend that a stage takes."""
    return next(backend for backend, line in lines.items() if line.startswith("taken"))


def backend_findings(stages: dict[str, dict[str, str]], device: torch.device) -> list[Finding]:
    """What to do about stages whose kernels are not used on a GPU; a remark where there is none."""
    if device.type == "cpu":
        return [
            Finding(
                problem=False,
                about="cpu",
                told="plain torch serves every stage",
                remedy="kernels run on CUDA devices of compute capability 8.0 and later",
            )
        ]
    refusals = {stage: lines["triton"] for stage, lines in stages.items() if taken_backend(lines) == "torch"}
    missing = "triton is not installed"
    return [
        Finding(
            problem=device.type == "cuda",
            about=f"{stage} on {device}",
            told=f"plain torch serves it, the kernel is {refusal}",
            remedy="pip install triton" if missing in refusal else "it works, more slowly; nothing has to be done",
        )
        for stage, refusal in refusals.items()
    ]


def empty_cache(config: QSAConfig, layout: CacheLayout, device: torch.device, *, pages: int = 1) -> LayerCache:
    """Caches of one layer, with one ring. What they hold is zero."""

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype)

    kv_shape = (pages, layout.page_tokens, layout.kv_heads, layout.head_dim)
    return LayerCache(
        zeros(*kv_shape, dtype=layout.kv_dtype),
        zeros(*kv_shape, dtype=layout.kv_dtype),
        zeros(pages, layout.page_blocks, layout.index_head_dim, dtype=layout.index_dtype),
        zeros(1, layout.ring_tokens, layout.index_head_dim, dtype=layout.ring_dtype),
        zeros(1, layout.ring_tokens, 3, dtype=torch.int64),
        k_scale=1.0 if layout.kv_dtype.itemsize == 1 else None,
        v_scale=1.0 if layout.kv_dtype.itemsize == 1 else None,
    )


def _refusals(
    config: QSAConfig, layout: CacheLayout, dtype: torch.dtype, device: torch.device
) -> dict[str, str | None]:
    """Why the kernels refuse one row of the checkpoint's shapes; None where they take it."""

    def row(heads: int, dim: int) -> torch.Tensor:
        return torch.zeros(1, heads, dim, dtype=dtype, device=device)

    cache = empty_cache(config, layout, device)
    dim, index_dim = config.head_dim, config.index_head_dim
    norm, index_norm = (torch.zeros(n, dtype=dtype, device=device) for n in (dim, index_dim))
    norms = NormWeights(q=norm, k=norm, index_q=index_norm, index_k=index_norm)
    rope = RopeTable(torch.zeros(1, config.rotary_dim, device=device), config.mrope_section)
    q_gate, kv = row(config.q_heads, 2 * dim), row(config.kv_heads, dim)
    assert cache.block_keys is not None
    return {
        "prepare": prepare_refusal(q_gate, kv, kv, row(config.index_heads + 1, index_dim), rope, norms, cache, None),
        "select_blocks": select_refusal(row(config.index_heads, index_dim), cache.block_keys, config.topk_blocks),
        "attend": attend_refusal(row(config.q_heads, dim), cache, q_gate[..., dim:], needs_gradients=False),
    }
