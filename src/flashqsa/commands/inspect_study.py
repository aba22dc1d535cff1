"""The numbers of `flashqsa inspect`: what is told of each layer, and of the layers together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from flashqsa.analysis import (
    DistanceHistogram,
    HeatMap,
    LayerRows,
    block_heat_map,
    context_share,
    distance_histogram,
    layer_overlap,
    neighbour_overlap,
)
from flashqsa.commands.inspect_source import MassRows, recorded_rows
from flashqsa.recording import Recording

OVERLAP_ROWS = 4096
"""Sparse rows, evenly spread, that layers are compared on at most."""

LINE_POINTS = 128
"""Points of a line over positions at most; each is the mean of the rows around it."""


@dataclass(frozen=True, kw_only=True)
class LayerStudy:
    """One layer. Means are over its sparse rows, which saw more blocks than they selected; None where there are none.

    Attributes:
        layer_id: Index of the layer.
        rows: Its rows.
        sparse_rows: Those of them that are sparse.
        context_share: Mean share of the tokens in sight that a row attends, over all rows.
        block_share: Mean share of the visible blocks that is selected: also the overlap that chance would give.
        neighbour_overlap: Mean share of a row's blocks that the row before it selected too.
        median_distance: Median distance of selected blocks in tokens, over all rows.
        median_visible_distance: The same of visible blocks.
        kept_mass: Mean share of dense attention that the selection keeps; None also where no row was weighed.
        best_mass: What the heaviest blocks would keep, as many as selected.
        recent_mass: What the newest blocks would keep, as many as selected.
        heat: Which blocks are selected from where.
        distances: How far back rows reach.
        share_line: [2, n] positions and mean share of the context attended.
        overlap_line: [2, n] positions and mean overlap with the row before.
        chance_line: [2, n] positions and mean share of visible blocks selected.
        mass: Rows weighed against dense attention, or None.
    """

    layer_id: int
    rows: int
    sparse_rows: int
    context_share: float
    block_share: float | None
    neighbour_overlap: float | None
    median_distance: int | None
    median_visible_distance: int | None
    kept_mass: float | None
    best_mass: float | None
    recent_mass: float | None
    heat: HeatMap
    distances: DistanceHistogram
    share_line: torch.Tensor
    overlap_line: torch.Tensor
    chance_line: torch.Tensor
    mass: MassRows | None


@dataclass(frozen=True, kw_only=True)
class Study:
    """All layers.

    Attributes:
        block_tokens: Tokens of a block.
        layers: By layer.
        overlap: [L, L] mean share of a layer's blocks that another layer selected for the same row; NaN where no row
            is sparse in all layers.
        overlap_rows: Sparse rows that it was taken from.
    """

    block_tokens: int
    layers: tuple[LayerStudy, ...]
    overlap: torch.Tensor
    overlap_rows: int


def study_recording(
    recording: Recording,
    masses: Mapping[int, MassRows],
    *,
    layer_ids: Sequence[int],
    request_id: int = 0,
    steps: range | None = None,
) -> Study:
    """Everything that is told of a recording, one layer at a time.

    Args:
        recording: What a model selected.
        masses: Rows that were weighed, by layer.
        layer_ids: Layers to study.
        request_id: Which request.
        steps: Which steps; all where None.

    Raises:
        ArgumentError, SelectionError: As `recorded_rows`.
    """
    layers, samples = [], []
    for layer_id in layer_ids:
        rows = recorded_rows(recording, layer_id, request_id, steps)
        layers.append(_study_layer(rows, masses.get(layer_id)))
        samples.append(rows.take(_spread(len(rows))))
    counted = torch.stack([sample.sparse for sample in samples]).all(dim=0)
    return Study(
        block_tokens=recording.block_tokens,
        layers=tuple(layers),
        overlap=layer_overlap(samples),
        overlap_rows=int(counted.sum()),
    )


def _study_layer(rows: LayerRows, mass: MassRows | None) -> LayerStudy:
    share, overlap = context_share(rows), neighbour_overlap(rows)
    sparse = rows.sparse
    fine = distance_histogram(rows, edges=_every_block(rows))
    return LayerStudy(
        layer_id=rows.layer_id,
        rows=len(rows),
        sparse_rows=int(sparse.sum()),
        context_share=float(share.double().mean()),
        block_share=_mean(rows.block_share[sparse]),
        neighbour_overlap=_mean(overlap[sparse]),
        median_distance=_median(fine.edges, fine.selected),
        median_visible_distance=_median(fine.edges, fine.visible),
        kept_mass=None if mass is None else _mean(mass.kept),
        best_mass=None if mass is None else _mean(mass.best),
        recent_mass=None if mass is None else _mean(mass.recent),
        heat=block_heat_map(rows),
        distances=distance_histogram(rows),
        share_line=_line(rows.positions, share),
        overlap_line=_line(rows.positions[sparse], overlap[sparse]),
        chance_line=_line(rows.positions[sparse], rows.block_share[sparse]),
        mass=mass,
    )


def _spread(rows: int) -> torch.Tensor:
    """Up to `OVERLAP_ROWS` row numbers, evenly spread."""
    count = min(rows, OVERLAP_ROWS)
    return torch.arange(count) * rows // max(1, count)


def _every_block(rows: LayerRows) -> list[int]:
    furthest = int(rows.positions.max())
    return list(range(0, furthest + 2 * rows.block_tokens, rows.block_tokens))


def _mean(values: torch.Tensor) -> float | None:
    known = values[~values.isnan()]
    return float(known.double().mean()) if known.numel() else None


def _median(edges: torch.Tensor, counts: torch.Tensor) -> int | None:
    """Lower edge of the bin in which half of the pairs are reached."""
    total = counts.cumsum(0)
    if not int(total[-1]):
        return None
    return int(edges[int(torch.searchsorted(total, (total[-1] + 1) // 2))])


def _line(positions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[2, n] mean positions and mean values of consecutive groups of rows, those without a value left out."""
    known = ~values.isnan()
    positions, values = positions[known].double(), values[known].double()
    if not values.numel():
        return torch.zeros(2, 0, dtype=torch.float64)
    groups = min(LINE_POINTS, values.shape[0])
    group = torch.arange(values.shape[0]) * groups // values.shape[0]
    sums = torch.zeros(3, groups, dtype=torch.float64)
    sums.index_add_(1, group, torch.stack([positions, values, torch.ones_like(values)]))
    return sums[:2] / sums[2]
