"""How much selections have in common: of neighbouring rows, and of layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashqsa.analysis.rows import LayerRows
from flashqsa.checks import expect_int
from flashqsa.errors import ArgumentError

_PAST_EVERY_ID = torch.iinfo(torch.int32).max


def neighbour_overlap(rows: LayerRows, *, distance: int = 1) -> torch.Tensor:
    """Share of each row's blocks that the row `distance` tokens before it selected too.

    Rows are neighbours where they follow each other in `rows` and their positions differ by exactly `distance`.

    Args:
        rows: Rows of one layer.
        distance: Tokens between neighbours, 1 or more.

    Returns:
        [N] fp32 in [0, 1], NaN for rows without that neighbour or without blocks.

    Raises:
        ArgumentError: The distance is no whole number of at least 1.
    """
    expect_int("neighbour_overlap", "distance", distance, least=1)
    overlap = torch.full((len(rows),), torch.nan)
    if len(rows) <= distance:
        return overlap
    start = distance
    for chunk in rows.take(slice(distance, None)).chunks(1):
        before = rows.take(slice(start - distance, start - distance + len(chunk)))
        share = shared_blocks(chunk, before) / chunk.block_counts  # 0 / 0 is NaN
        are_neighbours = chunk.positions - before.positions == distance
        overlap[start : start + len(chunk)] = torch.where(are_neighbours, share, torch.nan)
        start += len(chunk)
    return overlap


def layer_overlap(layers: Sequence[LayerRows], *, sparse_only: bool = True) -> torch.Tensor:
    """Mean share of one layer's blocks that another layer selected for the same row.

    Args:
        layers: The same rows of each layer.
        sparse_only: Whether to leave out rows that select all that they see in some layer: they overlap trivially.

    Returns:
        [L, L] fp32, entry [i, j] the share of layer i's blocks that layer j has too; NaN when no row is left.

    Raises:
        ArgumentError: There is no layer, or layers have other rows.
    """
    where = "layer_overlap"
    if not layers:
        raise ArgumentError(f"{where}: layers must hold at least one layer, got none. Pass layer_rows of each.")
    for other in layers[1:]:
        if not torch.equal(other.positions, layers[0].positions):
            raise ArgumentError(
                f"{where}: layers must have the same rows, got layers {layers[0].layer_id} and {other.layer_id} that "
                "differ in positions. Take the same steps and request of each."
            )
    counted = torch.ones(len(layers[0]), dtype=torch.bool)
    for layer in layers:
        counted &= layer.block_counts > 0
        if sparse_only:
            counted &= layer.sparse
    kept = [layer.take(counted) for layer in layers]
    overlap = torch.full((len(layers), len(layers)), torch.nan)
    for i, one in enumerate(kept):
        for j, other in enumerate(kept):
            shares = [
                shared_blocks(chunk, others) / chunk.block_counts
                for chunk, others in zip(one.chunks(other.block_ids.shape[1]), _like(one, other), strict=True)
            ]
            if shares:
                overlap[i, j] = torch.cat(shares).mean()
    return overlap


def _like(one: LayerRows, other: LayerRows) -> Sequence[LayerRows]:
    """The chunks of another layer that hold the rows of this one's chunks."""
    parts, start = [], 0
    for chunk in one.chunks(other.block_ids.shape[1]):
        parts.append(other.take(slice(start, start + len(chunk))))
        start += len(chunk)
    return parts


def shared_blocks(one: LayerRows, other: LayerRows) -> torch.Tensor:
    """[N] int64, blocks that row n of both selected."""
    wanted = one.block_ids
    among = torch.where(other.valid, other.block_ids, _PAST_EVERY_ID)
    if not among.shape[1]:
        return torch.zeros(len(one), dtype=torch.int64)
    places = torch.searchsorted(among, wanted).clamp_(max=among.shape[1] - 1)
    return (one.valid & (among.gather(1, places) == wanted)).sum(dim=1)
