"""How far back rows reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashqsa.analysis.rows import LayerRows
from flashqsa.errors import ArgumentError


@dataclass(frozen=True)
class DistanceHistogram:
    """Selected and visible blocks by their distance from the row.

    Attributes:
        edges: [n + 1] int64 distances in tokens; bin i holds those from edges[i] to edges[i + 1] - 1.
        selected: [n] int64 selected pairs of a row and a block.
        visible: [n] int64 visible pairs.
    """

    edges: torch.Tensor
    selected: torch.Tensor
    visible: torch.Tensor

    @property
    def share(self) -> torch.Tensor:
        """[n] fp32 share of the visible blocks at each distance that was selected, NaN where there was none."""
        return self.selected / self.visible  # 0 / 0 is NaN


def distance_histogram(rows: LayerRows, *, edges: Sequence[int] | None = None) -> DistanceHistogram:
    """Count selected and visible blocks by distance: tokens from the block's last token to the row.

    Args:
        rows: Rows of one layer.
        edges: Ascending distances in tokens; 0, r, 2r, 4r, 8r and so on over the whole context by default.

    Raises:
        ArgumentError: There are fewer than two edges, or they do not ascend from 0 or more.
    """
    bounds = torch.tensor(_default_edges(rows) if edges is None else list(edges), dtype=torch.int64)
    if bounds.shape[0] < 2 or int(bounds[0]) < 0 or bool((bounds.diff() <= 0).any()):
        raise ArgumentError(
            f"distance_histogram: edges must be two or more ascending distances from 0 on, got {bounds.tolist()}. "
            "Leave them out for powers of two."
        )
    bins, r = bounds.shape[0] - 1, rows.block_tokens
    selected, visible = torch.zeros(2, bins, dtype=torch.int64)
    for chunk in rows.chunks(bins + 1):
        last_tokens = chunk.block_ids.to(torch.int64) * r + (r - 1)
        distances = (chunk.positions[:, None] - last_tokens)[chunk.valid]
        inside = distances[(distances >= bounds[0]) & (distances < bounds[-1])]
        selected += torch.bincount(torch.bucketize(inside, bounds[1:-1], right=True), minlength=bins)
        seen = chunk.visible_blocks.to(torch.int64)[:, None]
        nearest = chunk.positions[:, None] + 1 - seen * r  # of the newest block; the others follow r tokens apart
        nearer = (bounds[None] - nearest + r - 1).div_(r, rounding_mode="floor").clamp_(min=0)
        visible += torch.minimum(nearer, seen).diff(dim=1).sum(dim=0)
    return DistanceHistogram(bounds, selected, visible)


def _default_edges(rows: LayerRows) -> list[int]:
    edges = [0, rows.block_tokens]
    furthest = int(rows.positions.max()) if len(rows) else 0
    while edges[-1] <= furthest:
        edges.append(2 * edges[-1])
    return edges
