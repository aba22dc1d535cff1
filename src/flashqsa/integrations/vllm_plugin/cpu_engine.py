"""What vLLM's CPU build lacks around QSA: its checks ask for kernels of a GPU that FlashQSA does not need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flashqsa.integrations.vllm_plugin.plans import row_requests


def attention_available(stock: Callable[[], bool]) -> Callable[[], bool]:
    """The constructor's question for FlashAttention: QSA layers never call it, FlashQSA attends for them."""

    def is_flash_attn_varlen_func_available() -> bool:
        return True

    return is_flash_attn_varlen_func_available


def fused_init(stock: Callable[..., None]) -> Callable[..., None]:
    """Let the layer hand its whole projection to the indexer, as on CUDA: preparation norms, rotates and writes it.

    vLLM's separate path needs CUDA; its condition for the joint one (Di 128, 64 rotating dimensions) is one of its
    kernel, not of FlashQSA.
    """

    def __init__(self: Any, *, vllm_config: Any, config: Any, layer_id: int, **kwargs: Any) -> None:
        stock(self, vllm_config=vllm_config, config=config, layer_id=layer_id, **kwargs)
        self.use_fused_qsa_prepare = True

    return __init__


def token_requests(stock: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Request of each row, for tensors that no Triton kernel reads."""

    def compute_token_to_req_indices(
        query_start_loc: torch.Tensor, out: torch.Tensor, num_mapped_tokens: int, num_tokens: int
    ) -> torch.Tensor:
        if query_start_loc.device.type != "cpu":
            return stock(query_start_loc, out, num_mapped_tokens, num_tokens)
        requests = row_requests(query_start_loc, num_tokens)
        requests[num_mapped_tokens:] = 0
        out[:num_tokens] = requests
        return out[:num_tokens]

    return compute_token_to_req_indices
