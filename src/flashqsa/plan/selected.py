"""Whether a selection fits a step: shapes, layer, and what its rows name."""

from __future__ import annotations

import torch

from flashqsa.checks import expect, expect_type, values_are_checked
from flashqsa.errors import SelectionError
from flashqsa.plan.step import StepPlan
from flashqsa.results import Selection


def check_selection(
    where: str, selection: Selection, plan: StepPlan, *, layer_id: int | None = None, topk_blocks: int | None = None
) -> None:
    """Check a selection that the rows of a step are to use.

    Args:
        where: Name of the calling function.
        selection: The selection, row for row of the plan.
        plan: The step.
        layer_id: Layer of the caches that it is used with, or None when they were not told.
        topk_blocks: Width that it must have, or None for any.

    Raises:
        ArgumentError: It is no `Selection`.
        ShapeError, DTypeError, DeviceError: Its tensors do not fit the plan.
        SelectionError: It is of another layer, or (read on the CPU, or with FLASHQSA_DEBUG=1) its counts do not fit,
            its ids do not ascend or are not among the blocks that the row could see.
    """
    expect_type(where, "selection", selection, Selection, hint="Pass what select_blocks returned.")
    dims = {"T": plan.num_rows} if topk_blocks is None else {"T": plan.num_rows, "K": topk_blocks}
    expect(where, "selection.block_ids", selection.block_ids, "T K", dims, dtypes=(torch.int32,), device=plan.device,
           hint="Select with this plan, or take() the rows that remain.")  # fmt: skip
    for name in ("block_counts", "visible_blocks"):
        expect(where, f"selection.{name}", getattr(selection, name), "T", dims, dtypes=(torch.int32,),
               device=plan.device)  # fmt: skip
    if None not in (selection.layer_id, layer_id) and selection.layer_id != layer_id:
        raise SelectionError(
            f"{where}: selection must be of layer {layer_id}, like the cache, got layer {selection.layer_id}. "
            "Select with this layer's index keys."
        )
    if not torch.compiler.is_compiling() and values_are_checked(plan.device):
        _check_values(where, selection, plan)


def _check_values(where: str, selection: Selection, plan: StepPlan) -> None:
    """Counts within K, ids ascending and among the blocks that the row could see."""
    live = plan.request_ids >= 0
    ids, counts, visible = selection.block_ids, selection.block_counts, selection.visible_blocks
    topk = ids.shape[1]
    seen = (plan.positions + 1) // plan.block_tokens
    valid = live[:, None] & (torch.arange(topk, device=ids.device)[None] < counts[:, None])
    later = live & ((visible < 0) | (visible > seen))
    miscounted = live & ((counts < 0) | (counts > topk))
    outside = (valid & ((ids < 0) | (ids >= visible[:, None]))).any(dim=1)
    falling = (valid[:, 1:] & (ids[:, 1:] <= ids[:, :-1])).any(dim=1)
    if not bool((later | miscounted | outside | falling).any()):
        return
    _refuse(where, later, "visible_blocks", "at most the complete blocks of the row", visible)
    _refuse(where, miscounted, "block_counts", f"in [0, {topk}]", counts)
    _refuse(where, outside, "block_ids", "in [0, visible_blocks) up to the count", ids)
    _refuse(where, falling, "block_ids", "ascending and unique in a row", ids)


def _refuse(where: str, bad: torch.Tensor, name: str, rule: str, values: torch.Tensor) -> None:
    if bool(bad.any()):
        row = int(bad.nonzero()[0, 0])
        got = values[row].tolist()
        shown = f"{got[:8]}..." if isinstance(got, list) else got
        raise SelectionError(
            f"{where}: selection.{name} must be {rule}, got {shown} in row {row}. "
            "Use the selection of these rows, in their order."
        )
