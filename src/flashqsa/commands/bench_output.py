"""What `flashqsa bench` prints for people: a table that grows while it measures, and what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from flashqsa.commands.bench_result import DENSE, SPARSE, BenchOutcome, Measured, break_even, device_name
from flashqsa.commands.bench_workload import Setting

COLUMNS = ("prepare", "select", "attend", SPARSE, "floor", DENSE, "layer")
WAITING = "..."
UNSTEADY = 1.5
"""From which ratio of the 80th to the 20th percentile on a median says little."""


def headline(setting: Setting, checkpoint: str | None, threads: int) -> str:
    """One line about what is measured."""
    where = device_name(setting.device)
    where += f", {threads} thread{'' if threads == 1 else 's'}" if setting.device.type == "cpu" else ""
    rows = f"{setting.requests} x {setting.rows} row{'' if setting.rows == 1 else 's'}"
    dtype = str(setting.dtype).removeprefix("torch.")
    return f"one layer of {checkpoint or 'the released shapes'}, {rows}, {dtype}, {setting.device} ({where})"


def make_table(contexts: Sequence[int], measured: Sequence[Measured], earlier: dict[int, float] | None) -> Table:
    """Times so far, medians in milliseconds.

    Args:
        contexts: All contexts, those to come too.
        measured: What is done, in the same order.
        earlier: Ratio of new to old by context, or None without an earlier result.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, collapse_padding=earlier is not None)
    heads = ("both" if name == SPARSE else name for name in COLUMNS)
    for name in ("context", *heads, "faster", *([] if earlier is None else ["change"])):
        table.add_column(name, justify="right", no_wrap=True)
    for place, context in enumerate(contexts):
        if place >= len(measured):
            table.add_row(f"{context:,}", WAITING)
            continue
        found = measured[place]
        cells = [_ms(found.times[name].median_us) if name in found.times else "-" for name in COLUMNS]
        cells[COLUMNS.index("floor")] = _ms(found.floor_us)
        cells.append("-" if found.speedup is None else f"{found.speedup:.2f}")
        if earlier is not None:
            cells.append(f"{earlier[context]:.2f}" if context in earlier else "-")
        table.add_row(f"{context:,}", *cells)
    return table


def closing_lines(outcome: BenchOutcome, comparison: dict[str, Any] | None) -> Iterator[str]:
    """What the table means, and what came out."""
    yield f"milliseconds, medians of {outcome.repeats} calls; both: select + attend;"
    yield (
        f"faster: dense over both; floor: of both, at a copy of {outcome.ceilings.copy_gb_per_s:,.0f} GB/s and "
        f"{outcome.ceilings.matmul_tflops:,.3g} TFLOP/s measured in this run"
    )
    yield f"backends: {', '.join(f'{stage} {backend}' for stage, backend in outcome.backends.items())}"
    yield f"break-even: {break_even(outcome.contexts)[1]}"
    yield from unsteady_lines(outcome.contexts)
    if comparison is None:
        return
    yield f"change: both over that of {comparison['file']}, below 1 is faster now"
    if comparison["differences"]:
        yield f"not comparable as it stands: {', '.join(comparison['differences'])} differ"


def unsteady_lines(measured: Sequence[Measured]) -> Iterator[str]:
    """A line about contexts where calls of selection and attention, or of dense attention, vary much in time."""
    contexts = [
        f"{found.context:,}"
        for found in measured
        if any(found.times[name].p80_us > UNSTEADY * found.times[name].p20_us for name in (SPARSE, DENSE)
               if name in found.times)
    ]  # fmt: skip
    if contexts:
        yield (
            f"unsteady: at {', '.join(contexts)} tokens calls took very different times, which medians do not show; "
            "leave nothing else running"
        )


def _ms(microseconds: float) -> str:
    value = microseconds / 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3f}"
