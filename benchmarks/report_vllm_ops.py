"""Tables of the vLLM plugin's operators beside vLLM's own, and of mode shadow."""

from __future__ import annotations

import statistics

from benchmarks.report_gpu import MISSING, origin
from benchmarks.tables import Row, markdown_table, rows_of

AGREES = "yes"


def sections(rows: list[Row]) -> dict[str, str]:
    """Text of each section by the name in its markers.

    Args:
        rows: Rows of gpu-vllm-ops.
    """
    return {
        "gpu-vllm-ops": ops_table(rows_of(rows, "gpu vllm ops")),
        "gpu-vllm-shadow": shadow_table(rows_of(rows, "gpu vllm shadow")),
        "gpu-vllm-ops-origin": origin(rows),
    }


def ops_table(rows: list[Row]) -> str:
    """Each call: times of both, and how far their numbers or sets of ids are apart."""
    lines = []
    for row in rows:
        times = {engine: spread["median_us"] for engine, spread in row["times"].items()}
        ours, theirs = times.get("flashqsa"), times.get("vllm")
        lines.append(
            (
                row["case"],
                f"{row['operator']}, {row['part']}" if row["part"] else row["operator"],
                MISSING if theirs is None else f"{theirs:,.1f}",
                MISSING if ours is None else f"{ours:,.1f}",
                MISSING if None in (ours, theirs) else f"{ours / theirs:.2f}",
                _agreement(row),
            )
        )
    return markdown_table(("step", "operator", "vLLM 0.33, us", "FlashQSA, us", "ratio", "against vLLM's"), lines)


def _agreement(row: Row) -> str:
    figures = row["figures"]
    if row["failed"]:
        return _failure(row)
    if "rows with other ids" in figures:
        return f"{figures['rows with other ids']:.0f} of {figures['rows']:.0f} rows with other ids"
    if "equal share" in figures:
        return f"{100 * figures['equal share']:.1f} % equal or more, at most {figures['places apart']:.2f} places apart"
    if "largest difference" in figures:
        return f"rows differ by at most {figures['largest difference']:.1e}"
    return "not compared" if "vllm" not in row["times"] else "equal"


def _failure(row: Row) -> str:
    """What failed, the first line of each reason."""
    return "FAILED: " + "; ".join(reason.partition("\n")[0] for reason in row["failed"])


def shadow_table(rows: list[Row]) -> str:
    """What mode shadow told of each operator; steps that failed before it told anything have a line too."""
    lines = []
    for row in rows:
        told: tuple[str, ...] = ("-",) * 5
        if "calls" in row:
            counted, times = f"{row['calls']} / {row['rows']:,}", (row["vllm_us"], row["flashqsa_us"])
            medians = (f"{statistics.median(each):,.1f}" for each in times)
            told = (counted, f"{row['differing_rows']}", f"{row['largest_error']:.3g}", *medians)
        elif not row["failed"]:
            continue
        steps = row["case"].removeprefix("shadow of ")
        lines.append((steps, row["operator"], *told, _failure(row) if row["failed"] else AGREES))
    head = ("recorded steps", "operator", "calls / rows", "rows with other ids", "largest error", "vLLM 0.33, us",
            "FlashQSA, us", "served and compared")  # fmt: skip
    return markdown_table(head, lines)
