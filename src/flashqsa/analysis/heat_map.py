"""Which blocks are selected from where: a picture of rows by blocks at any resolution."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.analysis.rows import LayerRows
from flashqsa.checks import expect_int
from flashqsa.errors import ArgumentError


@dataclass(frozen=True)
class HeatMap:
    """Selected pairs of a row and a block, counted in bins.

    Attributes:
        selected: [H, W] int64 selected pairs of each bin.
        visible: [H, W] int64 pairs of each bin in which the row saw the block.
        position_edges: [H + 1] int64, bin i holds the rows at positions edges[i] to edges[i + 1] - 1.
        block_edges: [W + 1] int64, the same for block ids.
    """

    selected: torch.Tensor
    visible: torch.Tensor
    position_edges: torch.Tensor
    block_edges: torch.Tensor

    @property
    def share(self) -> torch.Tensor:
        """[H, W] fp32 share of the visible pairs that was selected, NaN where none was visible."""
        return self.selected / self.visible  # 0 / 0 is NaN


def block_heat_map(rows: LayerRows, *, row_bins: int = 256, block_bins: int = 256) -> HeatMap:
    """Count selected and visible pairs of a row and a block in bins of positions by block ids.

    Memory is that of the bins and of a fixed number of pairs, whatever the context.

    Args:
        rows: Rows of one layer, at least one.
        row_bins: Bins of positions at most (`H`); one for each position where there are fewer.
        block_bins: Bins of block ids at most (`W`).

    Raises:
        ArgumentError: There is no row, or no bin.
    """
    where = "block_heat_map"
    expect_int(where, "row_bins", row_bins, least=1)
    expect_int(where, "block_bins", block_bins, least=1)
    if not len(rows):
        raise ArgumentError(f"{where}: rows must hold at least one row, got none. Choose steps that have some.")
    position_edges = _edges(int(rows.positions.min()), int(rows.positions.max()) + 1, row_bins)
    block_edges = _edges(0, max(1, int(rows.visible_blocks.max())), block_bins)
    height, width = position_edges.shape[0] - 1, block_edges.shape[0] - 1
    selected = torch.zeros(height * width, dtype=torch.int64)
    visible = torch.zeros(height, width, dtype=torch.int64)
    for chunk in rows.chunks(width):
        row_bin = torch.bucketize(chunk.positions, position_edges[1:-1], right=True)
        block_bin = torch.bucketize(chunk.block_ids.to(torch.int64), block_edges[1:-1], right=True)
        pairs = (row_bin[:, None] * width + block_bin)[chunk.valid]
        selected += torch.bincount(pairs, minlength=height * width)
        seen = chunk.visible_blocks.to(torch.int64)[:, None]
        visible.index_add_(0, row_bin, torch.minimum(seen, block_edges[1:]).sub_(block_edges[:-1]).clamp_(min=0))
    return HeatMap(selected.view(height, width), visible, position_edges, block_edges)


def _edges(first: int, end: int, bins: int) -> torch.Tensor:
    """Edges [bins + 1] of bins of nearly equal width over whole numbers, none of them empty."""
    bins = min(bins, end - first)
    return first + torch.arange(bins + 1) * (end - first) // bins
