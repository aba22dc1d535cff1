"""How pictures of `flashqsa inspect` and `flashqsa needle` look. Importing this imports matplotlib."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOR_MAP = "viridis"
UNSEEN = "#e8e8e8"
"""Where there is nothing that could be selected."""

LINES = ("#2a6f97", "#c8553d", "#5a8f3c", "#8a5fa8", "#b38600", "#4f5d75")
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "flashqsa",  # the same picture gives the same file
}
PNG_DPI = 130


def new_figure(width: float, height: float) -> Any:
    """An empty figure, drawn without a display.

    Args:
        width: Inches.
        height: Inches.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style() -> Any:
    """A context inside which figures are made and saved."""
    return matplotlib.rc_context(STYLE)


def color_map() -> Any:
    """Colours of shares from 0 to 1."""
    return matplotlib.colormaps[COLOR_MAP].with_extremes(bad=UNSEEN)


def save_figure(figure: Any, path: Path) -> None:
    """Writes a PNG or an SVG file, by its name."""
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, dpi=PNG_DPI, metadata=_metadata(path.suffix))


def figure_bytes(figure: Any, kind: str) -> bytes:
    """The same as bytes.

    Args:
        figure: The figure.
        kind: `png` or `svg`.
    """
    buffer = io.BytesIO()
    with matplotlib.rc_context(STYLE):
        figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=_metadata(f".{kind}"))
    return buffer.getvalue()


def _metadata(suffix: str) -> dict[str, str | None]:
    return {"Date": None, "Creator": "flashqsa"} if suffix == ".svg" else {"Software": "flashqsa"}
