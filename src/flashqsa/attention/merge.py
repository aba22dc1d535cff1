"""`merge_partials`: one output from outputs over disjoint shards of the tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashqsa.attention.gating import check_out_dtype, gate_output
from flashqsa.checks import FLOAT_DTYPES, expect
from flashqsa.errors import ArgumentError


def merge_partials(
    outputs: Sequence[torch.Tensor],
    lses: Sequence[torch.Tensor],
    *,
    gate: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Merge partial outputs over disjoint shards of the tokens into the output over all of them.

    Args:
        outputs: [T, Hq, D] fp32 partial outputs, not gated (`attend` with ``out_dtype=torch.float32``).
        lses: [T, Hq] fp32 natural-log sums of the same shards; -inf where a shard has no token of a row.
        gate: [T, Hq, D] gate logits in the model dtype, applied once to the merged output; or None.
        out_dtype: Dtype of the result; the dtype of `gate`, or of the outputs without one.

    Returns:
        [T, Hq, D]; rows without any token are 0.

    Raises:
        ShapeError, DTypeError, DeviceError: The shards do not fit each other.
        ArgumentError: No shard, or as many lses as there are not outputs.
    """
    where = "merge_partials"
    if not outputs or len(outputs) != len(lses):
        raise ArgumentError(
            f"{where}: outputs and lses must be as many and not empty, got {len(outputs)} and {len(lses)}. "
            "Pass one output and one lse a shard."
        )
    dims: dict[str, int] = {}
    wide = (torch.float32, torch.float64)
    for shard, (out, lse) in enumerate(zip(outputs, lses, strict=True)):
        expect(where, f"outputs[{shard}]", out, "T Hq D", dims, dtypes=wide, device=outputs[0].device,
               hint="Ask attend for out_dtype=torch.float32.")  # fmt: skip
        expect(where, f"lses[{shard}]", lse, "T Hq", dims, dtypes=wide, device=outputs[0].device)
    if gate is not None:
        expect(where, "gate", gate, "T Hq D", dims, dtypes=FLOAT_DTYPES, device=outputs[0].device)
    model_dtype = outputs[0].dtype if gate is None else gate.dtype
    out_dtype = model_dtype if out_dtype is None else out_dtype
    check_out_dtype(where, out_dtype)
    stacked = torch.stack(list(lses))
    top = stacked.amax(dim=0)
    weights = torch.exp(stacked - top.masked_fill(top == -torch.inf, 0))
    total = weights.sum(dim=0)
    merged = torch.zeros_like(outputs[0])
    for out, weight in zip(outputs, weights, strict=True):
        share = weight / total.masked_fill(total == 0, 1)
        merged = merged + torch.where(weight[..., None] == 0, 0, out * share[..., None])
    return gate_output(merged, top, gate, model_dtype, out_dtype)
