"""What `flashqsa inspect` prints: a table for people, or one JSON object for programs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashqsa import __version__
from flashqsa.commands.inspect_study import LayerStudy, Study

NUMBERS = (
    "layer_id", "rows", "sparse_rows", "context_share", "block_share", "neighbour_overlap", "median_distance",
    "median_visible_distance", "kept_mass", "best_mass", "recent_mass",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class InspectOutcome:
    """Everything there is to tell.

    Attributes:
        source: The checkpoint's folder or the recording, as given.
        kind: `checkpoint` or `recording`.
        about: One line on what ran.
        run: Device, dtype and so on of a checkpoint; empty for a recording.
        request_id: Which request.
        steps: Forwards looked at.
        study: The numbers.
    """

    source: str
    kind: str
    about: str
    run: dict[str, Any]
    request_id: int
    steps: int
    study: Study


def as_json(outcome: InspectOutcome) -> dict[str, Any]:
    """The outcome as plain values, under the names that the documentation lists."""
    study = outcome.study
    return {
        "source": outcome.source,
        "kind": outcome.kind,
        "versions": {"flashqsa": __version__},
        "run": outcome.run or None,
        "request_id": outcome.request_id,
        "steps": outcome.steps,
        "block_tokens": study.block_tokens,
        "layers": [_layer_as_json(layer) for layer in study.layers],
        "layer_overlap": [[None if math.isnan(share) else share for share in line] for line in study.overlap.tolist()],
        "layer_overlap_rows": study.overlap_rows,
    }


def _layer_as_json(layer: LayerStudy) -> dict[str, Any]:
    distances, mass = layer.distances, layer.mass
    weighed = None
    if mass is not None:
        names = ("positions", "kept", "best", "recent")
        weighed = {name: getattr(mass, name).tolist() for name in names}
    return {name: getattr(layer, name) for name in NUMBERS} | {
        "distances": {
            "edges": distances.edges.tolist(),
            "selected": distances.selected.tolist(),
            "visible": distances.visible.tolist(),
        },
        "mass": weighed,
    }


def print_outcome(outcome: InspectOutcome, console: Console) -> None:
    """Prints the outcome for people."""
    console.out(outcome.about, highlight=False)
    console.print()
    console.print(_table(outcome.study))
    console.print()
    for line in _closing_lines(outcome):
        console.out(line, highlight=False)


COLUMNS = {
    "QSA layer": "layer_id",
    "sparse rows": "sparse_rows",
    "context attended": "context_share",
    "neighbour overlap": "neighbour_overlap",
    "by chance": "block_share",
    "median distance": "median_distance",
    "mass kept": "kept_mass",
    "best": "best_mass",
    "newest": "recent_mass",
}
"""Headings of the table, here and in the report, and what stands below them."""


def cell(layer: LayerStudy, name: str) -> str:
    """One number as it is shown."""
    value = getattr(layer, name)
    if value is None:
        return "-"
    return f"{value:.1%}" if isinstance(value, float) else f"{value:,}"


def _table(study: Study) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=True)
    for heading in COLUMNS:
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    for layer in study.layers:
        table.add_row(*(cell(layer, name) for name in COLUMNS.values()))
    return table


def _closing_lines(outcome: InspectOutcome) -> Iterator[str]:
    study = outcome.study
    if not any(layer.sparse_rows for layer in study.layers):
        yield "no row saw more blocks than it selected: attention was dense"
    if len(study.layers) > 1 and study.overlap_rows:
        others = [
            share
            for i, line in enumerate(study.overlap.tolist())
            for j, share in enumerate(line)
            if i != j and not math.isnan(share)
        ]
        yield f"overlap between layers: {sum(others) / len(others):.1%} on average, {max(others):.1%} at most"
    if outcome.kind == "recording":
        yield "dense attention mass: not in a recording; inspect the checkpoint for it"
