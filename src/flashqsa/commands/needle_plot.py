"""The picture of `flashqsa needle`: layers by depths, a map for each context. Importing this imports matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from flashqsa.commands.inspect_figures import color_map, new_figure, style
from flashqsa.commands.needle_search import Search

MOST_COLUMNS = 4
MOST_NUMBERS = 400
"""Cells of a map up to which each has its number written in."""


def draw_needle(searches: Sequence[Search]) -> Any:
    """A figure of the share of pairs of a final row and a needle's block that are selected.

    Args:
        searches: All contexts and depths, at least one.
    """
    contexts = sorted({search.context for search in searches})
    depths = sorted({search.depth for search in searches})
    layer_ids = [layer.layer_id for layer in searches[0].layers]
    columns = min(MOST_COLUMNS, len(contexts))
    lines = -(-len(contexts) // columns)
    map_width, map_height = 1.4 + 0.52 * len(depths), 1.1 + 0.30 * len(layer_ids)
    with style():
        figure = new_figure(max(5.5, columns * map_width + 1.2), max(2.6, lines * map_height + 0.8))
        axes = figure.subplots(lines, columns, squeeze=False)
        for place, ax in enumerate(axes.flat):
            if place >= len(contexts):
                ax.set_axis_off()
                continue
            shares = _shares(searches, contexts[place], depths, layer_ids)
            image = ax.imshow(shares, vmin=0, vmax=1, cmap=color_map(), aspect="auto", interpolation="nearest")
            ax.set_title(f"{contexts[place]:,} tokens")
            ax.set_xticks(range(len(depths)), [f"{depth:g}" for depth in depths])
            ax.set_yticks(range(len(layer_ids)), [str(layer_id) for layer_id in layer_ids])
            ax.spines[:].set_visible(False)
            ax.tick_params(length=0)
            ax.set_xticks(np.arange(1, len(depths)) - 0.5, minor=True)
            ax.set_yticks(np.arange(1, len(layer_ids)) - 0.5, minor=True)
            ax.grid(which="minor", color="white", linewidth=1)
            ax.tick_params(which="minor", length=0)
            if place // columns == lines - 1 or place + columns >= len(contexts):
                ax.set_xlabel("depth of the needle, %")
            if place % columns == 0:
                ax.set_ylabel("QSA layer")
            if shares.size <= MOST_NUMBERS:
                _write_numbers(ax, shares)
        bar = figure.colorbar(image, ax=axes, shrink=0.9, aspect=18)
        bar.outline.set_visible(False)
        bar.set_label("needle's blocks selected by\nthe final rows, share", fontsize=8)
    return figure


def _shares(searches: Sequence[Search], context: int, depths: list[float], layer_ids: list[int]) -> Any:
    shares = np.full((len(layer_ids), len(depths)), math.nan)
    for search in searches:
        if search.context == context:
            for layer in search.layers:
                shares[layer_ids.index(layer.layer_id), depths.index(search.depth)] = layer.selected_share
    return shares


def _write_numbers(ax: Any, shares: Any) -> None:
    for (line, column), share in np.ndenumerate(shares):
        if not math.isnan(share):
            color = "white" if share < 0.6 else "black"
            ax.text(column, line, f"{share:.0%}", ha="center", va="center", color=color, fontsize=7)
