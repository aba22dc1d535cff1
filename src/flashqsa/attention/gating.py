"""The last step of attention: round to the model dtype, then gate in fp32."""

from __future__ import annotations

import torch

from flashqsa.checks import FLOAT_DTYPES
from flashqsa.errors import DTypeError


def check_out_dtype(where: str, out_dtype: torch.dtype) -> None:
    """Raise unless results can be asked for in a dtype.

    Raises:
        DTypeError: It is no float dtype, or a float8, which would need a scale.
    """
    if out_dtype not in FLOAT_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
        raise DTypeError(
            f"{where}: out_dtype must be one of {allowed}, got {str(out_dtype).removeprefix('torch.')}. "
            "Ask for float32 where partial outputs are merged."
        )


def gate_output(
    out: torch.Tensor,
    lse: torch.Tensor,
    gate: torch.Tensor | None,
    model_dtype: torch.dtype,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``round(out) * sigmoid(gate)``, or `out` cast once when there is no gate.

    Args:
        out: [T, Hq, D] fp32 or float64, 0 in rows without a token.
        lse: [T, Hq], -inf in rows without a token: their gates are not looked at.
        gate: [T, Hq, D] gate logits, or None.
        model_dtype: Dtype that the output is rounded to before it is gated.
        out_dtype: Dtype of the result.
    """
    if gate is None:
        return out.to(out_dtype)
    logits = gate.to(out.dtype).masked_fill(lse.detach()[..., None] == -torch.inf, 0)
    return (out.to(model_dtype).to(out.dtype) * sigmoid(logits)).to(out_dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """The logistic function, a function of each element alone.

    On the CPU, torch.sigmoid takes another path for the last elements of a buffer than for the others, so its bits
    depend on where an element lies; torch.exp has one path. Nothing overflows, as no exponent is positive, and the two
    cases meet at 0 with the right derivative.
    """
    positive = x >= 0
    decay = torch.exp(torch.where(positive, -x, x))
    return torch.where(positive, 1, decay) / (1 + decay)
