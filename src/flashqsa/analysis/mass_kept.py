"""How much of the dense attention mass a selection keeps, beside what other choices of as many blocks would keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.analysis.mass import DEFAULT_WORKSPACE_BYTES, BlockMass, iterate_block_mass
from flashqsa.cache.state import LayerCache
from flashqsa.checks import expect, expect_type
from flashqsa.errors import SelectionError
from flashqsa.plan import StepPlan
from flashqsa.results import Selection


@dataclass(frozen=True)
class KeptMass:
    """Shares of the dense attention mass, in [0, 1], NaN in padding rows. The tail is kept in all of them.

    Attributes:
        rows: [n] int64 row numbers of the step.
        kept: [n] what the selection keeps.
        best: [n] what the heaviest blocks keep, as many as the row selected: no choice keeps more.
        recent: [n] what the newest blocks keep, as many as the row selected: a sliding window.
    """

    rows: torch.Tensor
    kept: torch.Tensor
    best: torch.Tensor
    recent: torch.Tensor


def kept_mass(
    q: torch.Tensor,
    cache: LayerCache,
    plan: StepPlan,
    selection: Selection,
    *,
    rows: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> KeptMass:
    """How much of the dense attention mass of each row falls on what it attends.

    Args:
        q: As in `block_mass`.
        cache: As in `block_mass`.
        plan: The step.
        selection: What the step's rows selected. Where its rows saw fewer blocks than the plan says, as on reuse, all
            tokens behind those blocks count as attended.
        rows: As in `block_mass`.
        softmax_scale: As in `block_mass`.
        workspace_bytes: As in `block_mass`.

    Raises:
        ShapeError, DTypeError, DeviceError, ArgumentError: As `block_mass`, or the selection does not fit the plan.
        SelectionError: The selection is of another layer than the cache, or its rows are of other requests.
    """
    where = "kept_mass"
    expect_type(where, "selection", selection, Selection)
    expect_type(where, "plan", plan, StepPlan)
    expect_type(where, "cache", cache, LayerCache)
    dims = {"T": plan.num_rows}
    expect(where, "block_ids", selection.block_ids, "T K", dims, dtypes=(torch.int32,), device=plan.device)
    _check_owner(where, selection, cache, plan)
    parts = iterate_block_mass(q, cache, plan, rows=rows, softmax_scale=softmax_scale, workspace_bytes=workspace_bytes)
    wanted = torch.arange(plan.num_rows, device=plan.device) if rows is None else rows
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    by_row = torch.full((3, plan.num_rows), torch.nan, dtype=dtype, device=plan.device)
    for part in parts:
        by_row[:, part.rows] = _shares(part, selection)
    kept, best, recent = by_row[:, wanted]
    return KeptMass(wanted, kept, best, recent)


def _shares(mass: BlockMass, selection: Selection) -> torch.Tensor:
    """[3, n] kept, best and recent."""
    ids = selection.block_ids[mass.rows].to(torch.int64)
    counts = selection.block_counts[mass.rows].to(torch.int64)[:, None]
    seen = selection.visible_blocks[mass.rows].to(torch.int64)[:, None]
    if not mass.blocks.shape[1]:
        return mass.tail.expand(3, -1)
    block = torch.arange(mass.blocks.shape[1], device=ids.device)[None]
    behind = mass.tail + mass.blocks.masked_fill(block < seen, 0).sum(dim=1)
    chosen = torch.arange(ids.shape[1], device=ids.device)[None] < counts
    kept = mass.blocks.gather(1, ids.clamp(0, mass.blocks.shape[1] - 1)).masked_fill(~chosen, 0).sum(dim=1)
    old = mass.blocks.masked_fill(block >= seen, 0)
    heaviest = old.topk(min(int(counts.max()), old.shape[1]), dim=1).values
    column = torch.arange(heaviest.shape[1], device=ids.device)[None]
    best = heaviest.masked_fill(column >= counts, 0).sum(dim=1)
    recent = old.masked_fill(block < seen - counts, 0).sum(dim=1)
    return torch.stack([kept, best, recent]) + behind


def _check_owner(where: str, selection: Selection, cache: LayerCache, plan: StepPlan) -> None:
    if selection.layer_id is not None and cache.layer_id is not None and selection.layer_id != cache.layer_id:
        raise SelectionError(
            f"{where}: selection must be of layer {cache.layer_id}, like the cache, got one of layer "
            f"{selection.layer_id}. Pass the layer's own selection."
        )
    if not torch.equal(selection.request_ids, plan.request_ids):
        raise SelectionError(
            f"{where}: selection must have the rows of the plan, got other requests. Pass the step's own selection."
        )
