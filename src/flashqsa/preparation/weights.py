"""`NormWeights`: the four RMS norms of a QSA layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.checks import expect_number


@dataclass(frozen=True)
class NormWeights:
    """Weights of the Gemma-form RMS norms (``x / rms(x) * (1 + weight)``) of one layer.

    Attributes:
        q: [D] of the attention queries (`q_norm`).
        k: [D] of the attention keys (`k_norm`).
        index_q: [Di] of the index queries (`indexer.q_layernorm`).
        index_k: [Di] of the pooled index keys (`indexer.k_layernorm`).
        eps: Added to the mean square.
    """

    q: torch.Tensor
    k: torch.Tensor
    index_q: torch.Tensor
    index_k: torch.Tensor
    eps: float = 1e-6

    def __post_init__(self) -> None:
        expect_number("NormWeights", "eps", self.eps, least=0.0, hint="Use rms_norm_eps of the checkpoint.")
