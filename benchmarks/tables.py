"""Rows of result files, and tables of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

NOT_MEASURED = "Not measured.\n"

Row = dict[str, Any]


def rows_of(rows: Iterable[Row], measure: str) -> list[Row]:
    """The rows of one measure."""
    return [row for row in rows if row["measure"] == measure]


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of these rows; without any, that nothing was measured."""
    if not rows:
        return NOT_MEASURED
    aligned = ["--:"] * len(head)
    lines = [head, aligned, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
