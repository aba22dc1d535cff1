"""The table of results that others have reported with `flashqsa bench --json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT
from benchmarks.tables import markdown_table
from flashqsa.commands.bench_compare import read_earlier

FOLDER = ROOT / "benchmarks" / "reported"


def reported_table(folder: Path = FOLDER) -> str:
    """A line for each file, in the order of their names; a sentence where there is none.

    Raises:
        ArgumentError: A file is no such result.
    """
    lines = []
    for path in sorted(folder.glob("*.json")):
        read_earlier(path)
        lines.append(_line(json.loads(path.read_text(encoding="utf-8"))))
    if not lines:
        return "None so far.\n"
    times = ("select + attend, ms", "dense, ms")
    head = ("device", "dtype", "requests x rows", "contexts", *times, "break-even", "versions")
    return markdown_table(head, lines)


def _line(result: dict[str, Any]) -> tuple[str, ...]:
    def medians(name: str) -> str:
        found = (context["times"].get(name) for context in result["contexts"])
        return " / ".join("-" if spread is None else f"{spread['median_us'] / 1e3:.3g}" for spread in found)

    return (
        result["device_name"].replace("|", "/"),
        result["dtype"],
        f"{result['requests']} x {result['rows']:,}",
        " / ".join(f"{context['context']:,}" for context in result["contexts"]),
        medians("select + attend"),
        medians("dense"),
        result["break_even"]["told"].replace("|", "/"),
        ", ".join(f"{name} {result['versions'][name]}" for name in ("flashqsa", "torch", "triton")),
    )
