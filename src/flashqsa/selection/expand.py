"""`expand_tokens`: a selection as token ids, the form that token-level operators take."""

from __future__ import annotations

import torch

from flashqsa.backends import takes_kernels
from flashqsa.checks import expect, expect_int, expect_type, values_are_checked
from flashqsa.errors import ArgumentError
from flashqsa.plan import StepPlan
from flashqsa.plan.selected import check_selection
from flashqsa.results import Selection


def expand_tokens(
    selection: Selection, plan: StepPlan, *, tail_tokens: int | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Token ids of each row's blocks, then its tail, then -1; the last column holds the number of valid ids.

    Args:
        selection: The selection, row for row of the plan.
        plan: The step.
        tail_tokens: Columns kept for the tail, block_tokens - 1 by default. A reused selection has a longer tail.
        out: [T, K * block_tokens + tail_tokens + 1] int32 to fill.

    Returns:
        [T, K * block_tokens + tail_tokens + 1] int32.

    Raises:
        ShapeError, DTypeError, DeviceError: `out` or the selection does not fit the plan.
        ArgumentError: A row's tail is longer than `tail_tokens` (read on the CPU, or with FLASHQSA_DEBUG=1).
        SelectionError: A row's selection saw blocks that the row does not see, or its counts or ids break their rules
            (read there too).
    """
    where = "expand_tokens"
    expect_type(where, "plan", plan, StepPlan)
    r, topk = plan.block_tokens, plan.topk_blocks
    check_selection(where, selection, plan, topk_blocks=topk)
    dims = {"T": plan.num_rows}
    tail_tokens = r - 1 if tail_tokens is None else tail_tokens
    expect_int(where, "tail_tokens", tail_tokens, hint="Count the tail's columns.")
    if values_are_checked(plan.device) and plan.num_rows:
        _check_tails(where, _tail_counts(selection, plan), tail_tokens)
    width = topk * r + tail_tokens
    if out is None:
        out = torch.empty(plan.num_rows, width + 1, dtype=torch.int32, device=plan.device)
    expect(where, "out", out, f"T {width + 1}", dims, dtypes=(torch.int32,), device=plan.device)
    if takes_kernels(plan.device):
        from flashqsa.selection.triton_expand import expand_tokens_triton

        expand_tokens_triton(selection, plan, out, tail_tokens=tail_tokens)
    else:
        _expand_tokens_torch(selection, plan, out, tail_tokens)
    return out


def _tail_counts(selection: Selection, plan: StepPlan) -> torch.Tensor:
    """Tokens of each row from the end of the blocks that its selection saw, [T] int64."""
    tail_starts = selection.visible_blocks.to(torch.int64) * plan.block_tokens
    return torch.where(plan.request_ids >= 0, plan.positions + 1 - tail_starts, 0)


def _expand_tokens_torch(selection: Selection, plan: StepPlan, out: torch.Tensor, tail_tokens: int) -> None:
    r, topk = plan.block_tokens, plan.topk_blocks
    width = topk * r + tail_tokens
    tail_counts = _tail_counts(selection, plan).clamp(min=0, max=tail_tokens)
    tail_starts = selection.visible_blocks.to(torch.int64) * r
    from_blocks = torch.where(plan.request_ids >= 0, selection.block_counts, 0).to(torch.int64) * r
    counts = from_blocks + tail_counts
    column = torch.arange(width, device=plan.device)[None]
    block = selection.block_ids.to(torch.int64)[:, (column[0] // r).clamp(max=topk - 1)]
    tokens = torch.where(
        column < from_blocks[:, None], block * r + column % r, tail_starts[:, None] + column - from_blocks[:, None]
    )
    out[:, :width] = torch.where(column < counts[:, None], tokens, -1).to(torch.int32)
    out[:, width] = counts.to(torch.int32)


def _check_tails(where: str, tail_counts: torch.Tensor, tail_tokens: int) -> None:
    if int(tail_counts.max()) > tail_tokens:
        raise ArgumentError(
            f"{where}: tail_tokens must hold the longest tail, {int(tail_counts.max())} tokens, got {tail_tokens}. "
            "Give more columns, as a reused selection needs."
        )
