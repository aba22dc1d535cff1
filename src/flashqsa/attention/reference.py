"""The definition of sparse attention: one row, one head at a time. float64 inputs are computed in float64."""

from __future__ import annotations

import torch

from flashqsa.attention.tokens import RowTokens
from flashqsa.cache.state import LayerCache, read_slots
from flashqsa.plan import StepPlan


def attend_row_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row over its own tokens.

    Args:
        q: [Hq, D] queries.
        k: [n, Hkv, D] keys of the row's tokens, n may be 0.
        v: [n, Hkv, D] values.
        softmax_scale: Multiplies the scores.

    Returns:
        Output [Hq, D] and natural-log lse [Hq], in float64 for float64 queries, else fp32. No token: 0 and -inf.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[0],), -torch.inf, dtype=dtype, device=q.device)
    group = q.shape[0] // k.shape[1]
    for head in range(q.shape[0] if k.shape[0] else 0):
        keys, values = k[:, head // group].to(dtype), v[:, head // group].to(dtype)
        scores = (keys * q[head].to(dtype)).sum(-1) * softmax_scale
        weights = torch.exp(scores - scores.max())
        out[head] = (weights[:, None] * values).sum(0) / weights.sum()
        lse[head] = scores.max() + torch.log(weights.sum())
    return out, lse


def attend_rows_reference(
    q: torch.Tensor, cache: LayerCache, plan: StepPlan, tokens: RowTokens, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a step, each over its own tokens, in the order in which they are listed.

    Returns:
        Output [T, Hq, D] and lse [T, Hq], wide dtype, not gated; rows of padding are 0 and -inf.
    """
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=dtype, device=q.device)
    for row, request in enumerate(plan.request_ids.tolist()):
        if request < 0:
            continue
        slots = plan.token_slots(request, tokens.token_ids(row))
        k = read_slots(cache.k_pages, slots).to(dtype)
        v = read_slots(cache.v_pages, slots).to(dtype)
        k = k if cache.k_scale is None else k * cache.k_scale
        v = v if cache.v_scale is None else v * cache.v_scale
        out[row], lse[row] = attend_row_reference(q[row], k, v, softmax_scale)
    return out, lse
