"""What the caches of all QSA layers cost, and how long a context the device's memory holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.cache import CacheLayout
from flashqsa.checks import FP8
from flashqsa.commands.doctor_findings import Finding
from flashqsa.config import QSAConfig

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class CacheCost:
    """Caches in one choice of dtypes. QSA layers alone: other layers and activations come on top.

    Attributes:
        kv_dtype: Dtype of K and V.
        index_dtype: Dtype of block keys.
        token_bytes: Bytes of a token, in all QSA layers.
        request_bytes: Bytes of a request besides its tokens, in all QSA layers.
        tokens_that_fit: Tokens of one request that the memory left by the weights holds, in whole pages; None where
            that memory is not known.
        longest_context: The same, at most the positions of the checkpoint.
    """

    kv_dtype: torch.dtype
    index_dtype: torch.dtype
    token_bytes: float
    request_bytes: int
    tokens_that_fit: int | None
    longest_context: int | None


def layouts(config: QSAConfig, dtype: torch.dtype, page_tokens: int) -> tuple[CacheLayout, ...]:
    """The choices to compare: everything in the model dtype, block keys in float8, K, V and block keys in float8."""
    kinds = ((dtype, dtype), (dtype, FP8), (FP8, FP8))
    return tuple(
        CacheLayout.from_config(config, page_tokens=page_tokens, dtype=dtype, kv_dtype=kv, index_dtype=index)
        for kv, index in kinds
    )


def cache_costs(config: QSAConfig, choices: tuple[CacheLayout, ...], free_bytes: int | None) -> tuple[CacheCost, ...]:
    """What each choice costs.

    Args:
        config: The checkpoint's constants.
        choices: Layouts of one layer.
        free_bytes: Memory for the caches, or None where it is not known.
    """
    layers = len(config.qsa_layer_ids)
    costs = []
    for layout in choices:
        request_bytes = layers * layout.request_bytes
        fit = None
        if free_bytes is not None and layers:
            fit = max(0, free_bytes - request_bytes) // (layers * layout.page_bytes) * layout.page_tokens
        costs.append(
            CacheCost(
                kv_dtype=layout.kv_dtype,
                index_dtype=layout.index_dtype,
                token_bytes=layers * layout.token_bytes,
                request_bytes=request_bytes,
                tokens_that_fit=fit,
                longest_context=None if fit is None else min(fit, config.max_positions),
            )
        )
    return tuple(costs)


def memory_findings(memory_bytes: int, weight_bytes: int | None) -> list[Finding]:
    """What to do about weights that do not fit."""
    if weight_bytes is None or weight_bytes <= memory_bytes:
        return []
    return [
        Finding(
            problem=True,
            about="memory",
            told=f"{memory_bytes / GIB:.1f} GiB are free, the weights take {weight_bytes / GIB:.1f} GiB",
            remedy="choose a larger device, a narrower --dtype, or spread the model over several",
        )
    ]
