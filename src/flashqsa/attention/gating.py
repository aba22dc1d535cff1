"""The last step of attention: round to the model dtype, then gate in fp32."""

from __future__ import annotations

import torch


def gate_output(
    out: torch.Tensor, gate: torch.Tensor | None, model_dtype: torch.dtype, out_dtype: torch.dtype
) -> torch.Tensor:
    """``round(out) * sigmoid(gate)``, or `out` cast once when there is no gate.

    Args:
        out: [T, Hq, D] fp32 or float64.
        gate: [T, Hq, D] gate logits, or None.
        model_dtype: Dtype that the output is rounded to before it is gated.
        out_dtype: Dtype of the result.
    """
    if gate is None:
        return out.to(out_dtype)
    return (out.to(model_dtype).to(out.dtype) * torch.sigmoid(gate.to(out.dtype))).to(out_dtype)
