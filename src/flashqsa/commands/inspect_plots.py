"""The pictures of `flashqsa inspect`. Importing this imports matplotlib."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from flashqsa.commands.inspect_figures import LINES, UNSEEN, color_map, new_figure, style
from flashqsa.commands.inspect_study import LayerStudy, Study

FAINTEST = 1e-4
"""Shares below it have one colour."""

MOST_LAYERS_WITH_NUMBERS = 16


def draw_layer(layer: LayerStudy, block_tokens: int) -> Any:
    """One layer: blocks by query, dense attention beside it where it was weighed, and four curves.

    Args:
        layer: The layer.
        block_tokens: Tokens of a block.
    """
    with style():
        figure = new_figure(10.5, 6.6)
        figure.suptitle(f"QSA layer {layer.layer_id}", x=0.01, ha="left", fontsize=12)
        weighed = layer.mass is not None
        top, bottom = figure.subfigures(2, 1, height_ratios=(1.45, 1))
        maps = top.subplots(1, 2 if weighed else 1, squeeze=False)[0]
        _draw_heat(top, maps[0], layer, block_tokens)
        if weighed:
            _draw_mass(top, maps[1], layer, block_tokens)
        curves = bottom.subplots(1, 4 if weighed else 3)
        _draw_share(curves[0], layer)
        _draw_overlap(curves[1], layer)
        _draw_distances(curves[2], layer)
        if weighed:
            _draw_kept(curves[3], layer)
    return figure


def draw_overlap(study: Study) -> Any:
    """The overlap between layers, as a map with numbers.

    Args:
        study: All layers.
    """
    layer_ids = [str(layer.layer_id) for layer in study.layers]
    side = 1.6 + 0.42 * len(layer_ids)
    with style():
        figure = new_figure(max(3.6, side + 1), max(2.8, side))
        ax = figure.subplots()
        shares = study.overlap.numpy()
        image = ax.imshow(shares, vmin=0, vmax=1, cmap=color_map())
        ax.set_xticks(range(len(layer_ids)), layer_ids)
        ax.set_yticks(range(len(layer_ids)), layer_ids)
        ax.set_xlabel("are also selected by layer")
        ax.set_ylabel("blocks of layer")
        ax.spines[:].set_visible(False)
        ax.tick_params(length=0)
        if len(layer_ids) <= MOST_LAYERS_WITH_NUMBERS:
            for (line, column), share in np.ndenumerate(shares):
                if not math.isnan(share):
                    color = "white" if share < 0.6 else "black"
                    ax.text(column, line, f"{share:.0%}", ha="center", va="center", color=color, fontsize=7)
        bar = figure.colorbar(image, ax=ax, shrink=0.8)
        bar.outline.set_visible(False)
    return figure


def _draw_heat(figure: Any, ax: Any, layer: LayerStudy, block_tokens: int) -> None:
    heat = layer.heat
    shares = np.ma.masked_invalid(heat.share.numpy())
    image = _draw_map(ax, shares.clip(FAINTEST), heat.position_edges, heat.block_edges * block_tokens)
    ax.set_title("selected: share of the pairs in a cell", loc="left")
    _color_bar(figure, image, ax)


def _draw_mass(figure: Any, ax: Any, layer: LayerStudy, block_tokens: int) -> None:
    mass = layer.mass
    assert mass is not None
    edges = mass.block_edges
    seen = edges[:-1][None] * block_tokens < mass.positions[:, None] + 1
    shares = np.ma.masked_where(~seen.numpy(), mass.by_bin.numpy())
    first, end = int(mass.positions[0]), int(mass.positions[-1]) + 1
    image = _draw_map(ax, shares.clip(FAINTEST), np.array([first, end]), edges * block_tokens)
    ax.set_ylim(int(layer.heat.position_edges[-1]), int(layer.heat.position_edges[0]))  # as the map beside it
    ax.set_facecolor(UNSEEN)
    ax.set_title(f"dense attention: share of a row's mass, {len(mass.positions)} rows", loc="left")
    _color_bar(figure, image, ax)


def _draw_map(ax: Any, shares: Any, positions: Any, tokens: Any) -> Any:
    extent = (int(tokens[0]), int(tokens[-1]), int(positions[-1]), int(positions[0]))
    norm = LogNorm(FAINTEST, 1)
    image = ax.imshow(shares, norm=norm, cmap=color_map(), aspect="auto", interpolation="nearest", extent=extent)
    ax.set_xlabel("attended token")
    ax.set_ylabel("position of the row")
    _count_tokens(ax.xaxis, steps=7)
    _count_tokens(ax.yaxis, steps=7)
    return image


def _color_bar(figure: Any, image: Any, ax: Any) -> None:
    bar = figure.colorbar(image, ax=ax, extend="min", aspect=30, pad=0.01)
    bar.outline.set_visible(False)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda share, place: f"{share:.2%}".rstrip("0%").rstrip(".") + "%"))


def _draw_share(ax: Any, layer: LayerStudy) -> None:
    positions, shares = layer.share_line.numpy()
    ax.plot(positions, shares, color=LINES[0])
    ax.set_title("context attended", loc="left")
    _finish_curve(ax)


def _draw_overlap(ax: Any, layer: LayerStudy) -> None:
    for line, color, label in ((layer.overlap_line, LINES[0], "measured"), (layer.chance_line, LINES[5], "by chance")):
        if line.shape[1]:
            ax.plot(*line.numpy(), color=color, label=label, linestyle="-" if label == "measured" else ":")
    ax.set_title("overlap with the row before", loc="left")
    if layer.overlap_line.shape[1]:
        ax.legend(fontsize=8, framealpha=0.8, edgecolor="none")
    else:
        ax.text(0.5, 0.5, "no neighbours left blocks out", ha="center", transform=ax.transAxes, fontsize=8)
    _finish_curve(ax)


def _draw_distances(ax: Any, layer: LayerStudy) -> None:
    edges, shares = layer.distances.edges.numpy(), layer.distances.share.nan_to_num().numpy()
    ax.bar(range(len(shares)), shares, width=0.92, color=LINES[0])
    places = range(0, len(shares), -(-len(shares) // 4))
    ax.set_xticks([place - 0.5 for place in places], [_short(int(edges[place])) for place in places])
    ax.set_xlabel("distance in tokens")
    ax.set_title("visible blocks selected", loc="left")
    ax.set_ylim(0, shares.max() * 1.05 or 1)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))


def _draw_kept(ax: Any, layer: LayerStudy) -> None:
    mass = layer.mass
    assert mass is not None
    kinds = (
        ("best", mass.best, LINES[2], "--"),
        ("selected", mass.kept, LINES[0], "-"),
        ("newest", mass.recent, LINES[1], ":"),
    )
    for label, shares, color, line in kinds:
        ax.plot(mass.positions.numpy(), shares.numpy(), color=color, label=label, linestyle=line)
    ax.set_title("dense mass kept", loc="left")
    ax.legend(fontsize=8, framealpha=0.8, edgecolor="none")
    _finish_curve(ax)


def _finish_curve(ax: Any) -> None:
    ax.set_ylim(0, 1.02)
    ax.set_xlabel("position of the row")
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    _count_tokens(ax.xaxis, steps=4)


def _count_tokens(axis: Any, steps: int) -> None:
    axis.set_major_locator(MaxNLocator(nbins=steps, integer=True))
    axis.set_major_formatter(FuncFormatter(lambda tokens, place: _short(int(tokens))))


def _short(tokens: int) -> str:
    return f"{tokens / 1000:g}k" if tokens >= 10_000 else f"{tokens:,}"
