"""The picture of `flashqsa bench`: time against context. Importing this imports matplotlib."""

from __future__ import annotations

from typing import Any

from matplotlib.ticker import FuncFormatter, NullFormatter

from flashqsa.commands.bench_result import DENSE, SPARSE, BenchOutcome, break_even, device_name
from flashqsa.commands.inspect_figures import LINES, new_figure, style

CURVES = (
    (SPARSE, LINES[0], "-", 2.2),
    ("select", LINES[3], "-", 1.0),
    ("attend", LINES[2], "-", 1.0),
    (DENSE, LINES[1], "-", 2.2),
)


def draw_bench(outcome: BenchOutcome) -> Any:
    """A figure of the times of selection and attention, dense attention and the floor, both axes logarithmic.

    Args:
        outcome: At least one context.
    """
    contexts = [measured.context for measured in outcome.contexts]
    setting = outcome.setting
    with style():
        figure = new_figure(7.2, 3.8)
        ax = figure.subplots()
        for name, color, line, width in CURVES:
            spreads = [measured.times[name] for measured in outcome.contexts if name in measured.times]
            if spreads:
                label = "dense attention" if name == DENSE else name
                medians = [spread.median_us / 1e3 for spread in spreads]
                ax.plot(contexts, medians, line, color=color, linewidth=width, marker="o", markersize=3, label=label)
                low, high = ([getattr(spread, cut) / 1e3 for spread in spreads] for cut in ("p20_us", "p80_us"))
                ax.fill_between(contexts, low, high, color=color, alpha=0.2, linewidth=0)
        floors = [measured.floor_us / 1e3 for measured in outcome.contexts]
        ax.plot(contexts, floors, ":", color=LINES[5], linewidth=1.4, label="floor of select + attend")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(contexts, [f"{context:,}" for context in contexts])
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, place: f"{value:g}"))
        ax.set_xlabel("context, tokens")
        ax.set_ylabel("milliseconds")
        tokens, told = break_even(outcome.contexts)
        if tokens is not None:
            ax.axvline(tokens, color=LINES[5], linewidth=0.8, linestyle="--")
            ax.annotate(
                f" break-even\n {float(f'{tokens:.2g}'):,.0f}", (tokens, 0.02), xycoords=("data", "axes fraction")
            )
        rows = f"{setting.requests} x {setting.rows} row{'' if setting.rows == 1 else 's'}"
        subject = f"one layer, {rows}, {str(setting.dtype).removeprefix('torch.')}, {device_name(setting.device)}"
        ax.set_title(f"{subject}\n{told}" if DENSE in outcome.contexts[0].times else subject, loc="left", fontsize=9)
        ax.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
