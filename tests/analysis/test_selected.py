"""Heat maps, shares, overlaps and distances against plain Python over sets."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.analysis import (
    LayerRows,
    block_heat_map,
    context_share,
    distance_histogram,
    layer_overlap,
    layer_rows,
    neighbour_overlap,
)
from flashqsa.analysis import rows as rows_module
from flashqsa.errors import ArgumentError, DeviceError, DTypeError, SelectionError, ShapeError
from flashqsa.recording import Recording

R = 4
MakeRecording = Callable[..., Recording]
MakeRows = Callable[..., LayerRows]


def _sets(rows: LayerRows) -> list[set[int]]:
    pairs = zip(rows.block_ids.tolist(), rows.block_counts.tolist(), strict=True)
    return [set(ids[:count]) for ids, count in pairs]


@pytest.fixture(params=[rows_module.CHUNK_PAIRS, 50], ids=["whole", "chunks"])
def rows(request: Any, make_recording: MakeRecording, monkeypatch: pytest.MonkeyPatch) -> LayerRows:
    """The rows of one request, looked at all at once or a few at a time."""
    monkeypatch.setattr(rows_module, "CHUNK_PAIRS", request.param)
    return layer_rows(make_recording(), 7, request_id=1)


def test_layer_rows_are_those_of_the_request_in_order(make_recording: MakeRecording) -> None:
    recording = make_recording(tokens=(20, 9), decode=3)
    rows = layer_rows(recording, 7, request_id=1)
    assert rows.positions.tolist() == list(range(12))
    assert (rows.layer_id, rows.block_tokens, len(rows)) == (7, R, 12)
    assert rows.visible_blocks.tolist() == [(p + 1) // R for p in range(12)]
    assert torch.equal(rows.block_ids[:9], recording.steps[0].layers[7].block_ids[20:29])
    assert torch.equal(rows.block_ids[10], recording.steps[2].layers[7].block_ids[1])
    last = layer_rows(recording, 7, request_id=1, steps=[3, 1])
    assert last.positions.tolist() == [11, 9]


def test_layer_rows_of_steps_with_other_budgets(make_recording: MakeRecording) -> None:
    wide, narrow = make_recording(topk=6), make_recording(topk=2)
    wide.steps.extend(narrow.steps)
    rows = layer_rows(wide, 3)
    assert rows.block_ids.shape == (150, 6)
    assert bool((rows.block_ids[75:, 2:] == -1).all())
    assert torch.equal(rows.block_ids[75:, :2], layer_rows(narrow, 3).block_ids)


def test_sparse_rows_and_shares(rows: LayerRows) -> None:
    for row, chosen in enumerate(_sets(rows)):
        visible, position = int(rows.visible_blocks[row]), int(rows.positions[row])
        assert bool(rows.sparse[row]) == (len(chosen) < visible)
        attended = {g * R + i for g in chosen for i in range(R)} | set(range(visible * R, position + 1))
        assert float(context_share(rows)[row]) == pytest.approx(len(attended) / (position + 1), rel=1e-6)
        share = float(rows.block_share[row])
        assert math.isnan(share) if not visible else share == pytest.approx(len(chosen) / visible, rel=1e-6)


@pytest.mark.parametrize(("row_bins", "block_bins"), [(1, 1), (7, 5), (16, 3), (1000, 1000)])
def test_block_heat_map_counts_every_pair_once(rows: LayerRows, row_bins: int, block_bins: int) -> None:
    heat = block_heat_map(rows, row_bins=row_bins, block_bins=block_bins)
    assert heat.selected.shape == (min(row_bins, len(rows)), min(block_bins, int(rows.visible_blocks.max())))
    assert heat.position_edges.diff().min() >= 1
    assert heat.block_edges.diff().min() >= 1
    for i, (low, high) in enumerate(zip(heat.position_edges[:-1], heat.position_edges[1:], strict=True)):
        for j, (first, end) in enumerate(zip(heat.block_edges[:-1], heat.block_edges[1:], strict=True)):
            inside = [row for row, p in enumerate(rows.positions.tolist()) if low <= p < high]
            chosen = [g for row in inside for g in _sets(rows)[row] if first <= g < end]
            seen = [g for row in inside for g in range(int(rows.visible_blocks[row])) if first <= g < end]
            assert int(heat.selected[i, j]) == len(chosen)
            assert int(heat.visible[i, j]) == len(seen)
    share = heat.share
    assert torch.equal(share.isnan(), heat.visible == 0)
    assert float(share.nan_to_num().max()) <= 1


def test_block_heat_map_of_one_row_each(make_rows: MakeRows) -> None:
    heat = block_heat_map(make_rows([[0, 2], [1]], [11, 12]))
    assert heat.selected.tolist() == [[1, 0, 1], [0, 1, 0]]
    assert heat.position_edges.tolist() == [11, 12, 13]
    early = block_heat_map(make_rows([[], []], [0, 1]))
    assert early.visible.tolist() == [[0], [0]]
    assert bool(early.share.isnan().all())


@pytest.mark.parametrize("distance", [1, 3])
def test_neighbour_overlap(rows: LayerRows, distance: int) -> None:
    overlap = neighbour_overlap(rows, distance=distance).tolist()
    sets = _sets(rows)
    for row, chosen in enumerate(sets):
        if row < distance or not chosen:
            assert math.isnan(overlap[row])
        else:
            assert overlap[row] == pytest.approx(len(chosen & sets[row - distance]) / len(chosen), rel=1e-6)


def test_neighbour_overlap_only_of_neighbours(make_rows: MakeRows) -> None:
    rows = make_rows([[0, 1], [0, 1], [1, 2], [], [0, 1, 2]], [10, 11, 15, 2, 16])
    overlap = neighbour_overlap(rows).tolist()
    assert overlap[1] == 1.0
    assert [math.isnan(overlap[row]) for row in (0, 2, 3, 4)] == [True] * 4
    assert len(neighbour_overlap(make_rows([], []))) == 0


@pytest.mark.parametrize("sparse_only", [True, False])
@pytest.mark.parametrize("chunk_pairs", [rows_module.CHUNK_PAIRS, 40])
def test_layer_overlap(
    make_recording: MakeRecording, monkeypatch: pytest.MonkeyPatch, sparse_only: bool, chunk_pairs: int
) -> None:
    monkeypatch.setattr(rows_module, "CHUNK_PAIRS", chunk_pairs)
    recording = make_recording()
    layers = [layer_rows(recording, layer_id) for layer_id in recording.layer_ids]
    overlap = layer_overlap(layers, sparse_only=sparse_only)
    sets = [_sets(layer) for layer in layers]
    for i in range(3):
        for j in range(3):
            shares = [
                len(mine & theirs) / len(mine)
                for row, (mine, theirs) in enumerate(zip(sets[i], sets[j], strict=True))
                if mine and (not sparse_only or layers[i].sparse[row])
            ]
            assert float(overlap[i, j]) == pytest.approx(sum(shares) / len(shares), rel=1e-5)
    assert torch.equal(overlap.diagonal(), torch.ones(3))


def test_layer_overlap_without_a_sparse_row(make_rows: MakeRows) -> None:
    assert bool(layer_overlap([make_rows([[0], [0]], [5, 6])] * 2).isnan().all())


@pytest.mark.parametrize("edges", [None, [0, 1, 2, 50], [3, 9, 10, 31], [0, 1000]])
def test_distance_histogram(rows: LayerRows, edges: list[int] | None) -> None:
    histogram = distance_histogram(rows, edges=edges)
    bounds = histogram.edges.tolist()
    if edges is None:
        assert bounds == [0, 4, 8, 16, 32, 64]
        assert int(histogram.selected.sum()) == int(rows.block_counts.sum())
    for i, (low, high) in enumerate(itertools.pairwise(bounds)):
        chosen = seen = 0
        for position, visible, mine in zip(
            rows.positions.tolist(), rows.visible_blocks.tolist(), _sets(rows), strict=True
        ):
            inside = {g for g in range(visible) if low <= position - (g * R + R - 1) < high}
            chosen, seen = chosen + len(inside & mine), seen + len(inside)
        assert (int(histogram.selected[i]), int(histogram.visible[i])) == (chosen, seen)
    assert torch.equal(histogram.share.isnan(), histogram.visible == 0)


def test_what_is_refused(make_recording: MakeRecording, make_rows: MakeRows, refuses: Any) -> None:
    recording = make_recording()
    rows = layer_rows(recording, 3)
    with refuses(ArgumentError, "layer_rows", "layer_id", "[3, 7, 11]", "4"):
        layer_rows(recording, 4)
    with refuses(ArgumentError, "layer_rows", "request_id", "[0, 1]", "2"):
        layer_rows(recording, 3, request_id=2)
    with refuses(ArgumentError, "layer_rows", "steps", "6"):
        layer_rows(recording, 3, steps=[0, 6])
    with refuses(ArgumentError, "layer_rows", "recording", "dict"):
        layer_rows({}, 3)  # type: ignore[arg-type]
    del recording.steps[2].layers[3]
    with refuses(SelectionError, "Recording", "layer_id", "3"):
        layer_rows(recording, 3)
    with refuses(ArgumentError, "block_heat_map", "row_bins"):
        block_heat_map(rows, row_bins=0)
    with refuses(ArgumentError, "block_heat_map", "at least one row"):
        block_heat_map(make_rows([], []))
    with refuses(ArgumentError, "neighbour_overlap", "distance"):
        neighbour_overlap(rows, distance=0)
    with refuses(ArgumentError, "layer_overlap", "at least one layer"):
        layer_overlap([])
    with refuses(ArgumentError, "layer_overlap", "layers 3 and 3"):
        layer_overlap([rows, rows.take(slice(1, None))])
    for edges in ([4], [4, 4], [-1, 4], [5, 2]):
        with refuses(ArgumentError, "distance_histogram", "edges"):
            distance_histogram(rows, edges=edges)
    with refuses(ArgumentError, "LayerRows", "block_tokens", "0"):
        LayerRows(3, 0, rows.positions, rows.block_ids, rows.block_counts, rows.visible_blocks)
    with refuses(DTypeError, "LayerRows", "positions", "int32"):
        LayerRows(3, R, rows.positions.to(torch.int32), rows.block_ids, rows.block_counts, rows.visible_blocks)
    with refuses(DeviceError, "LayerRows", "block_ids", "meta"):
        LayerRows(3, R, rows.positions, rows.block_ids.to("meta"), rows.block_counts, rows.visible_blocks)
    with refuses(ShapeError, "LayerRows", "block_counts"):
        LayerRows(3, R, rows.positions, rows.block_ids, rows.block_counts[1:], rows.visible_blocks)


def test_a_selector_that_selects_nothing(make_rows: MakeRows) -> None:
    rows = make_rows([[], [], []], [30, 31, 32])
    assert rows.block_ids.shape == (3, 0)
    assert int(block_heat_map(rows).selected.sum()) == int(distance_histogram(rows).selected.sum()) == 0
    assert bool(neighbour_overlap(rows).isnan().all())
    assert bool(layer_overlap([rows, rows]).isnan().all())
    assert float(context_share(rows)[0]) == pytest.approx(3 / 31)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, flashqsa.analysis as a; "
        "print([n for n in ('matplotlib', 'transformers', 'triton', 'rich') if n in sys.modules], len(a.__all__))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.split("]")[0] == "["


def test_fault_43_memory_does_not_grow_with_rows_times_blocks() -> None:
    """60,000 rows that see up to 15,000 blocks: pairs would be 900 million."""
    import resource

    tokens, topk = 60_000, 16
    positions = torch.arange(tokens)
    visible = ((positions + 1) // R).to(torch.int32)
    newest = visible[:, None] - torch.arange(topk, 0, -1, dtype=torch.int32)[None]
    first = torch.arange(topk, dtype=torch.int32)[None]
    ids = torch.where(visible[:, None] >= topk, newest, torch.where(first < visible[:, None], first, -1))
    rows = LayerRows(3, R, positions, ids, visible.clamp(max=topk), visible)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    heat = block_heat_map(rows)
    histogram = distance_histogram(rows)
    overlap = neighbour_overlap(rows)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert int(heat.selected.sum()) == int(rows.block_counts.sum()) == int(histogram.selected.sum())
    assert int(heat.visible.sum()) == int(visible.to(torch.int64).sum()) == int(histogram.visible.sum())
    assert float(overlap[10_001]) in (1.0, 15 / 16)
    assert grown_kib < 400 * 1024
