"""Tables of the GPU's result files beside those of the stages: cuDNN's selection, growth, a stack, tuning."""

from __future__ import annotations

from benchmarks.report_gpu import MISSING, decode_table, origin
from benchmarks.sweep import chosen_time, difference
from benchmarks.tables import NOT_MEASURED, Row, markdown_table


def sections(decode: list[Row], curves: list[Row], stack: list[Row], sweeps: list[Row]) -> dict[str, str]:
    """Text of each section by the name in its markers.

    Args:
        decode: Rows of gpu-decode, like the others of the benchmark of their name.
        curves: Rows of gpu-curves.
        stack: Rows of gpu-stack.
        sweeps: Rows of sweep.
    """
    return {
        "gpu-cudnn": cudnn_table(decode),
        "gpu-curves": curves_section(curves),
        "gpu-curves-origin": origin(curves),
        "gpu-stack": stack_table(stack),
        "gpu-stack-origin": origin(stack),
        "sweep": sweep_table(sweeps),
        "sweep-origin": origin(sweeps),
    }


def cudnn_table(decode: list[Row]) -> str:
    """Selection alone, where cuDNN's was measured."""
    lines = []
    for row in decode:
        if not row.get("cudnn"):
            continue
        ours, theirs = (row[engine]["select"]["median_us"] for engine in ("flashqsa", "cudnn"))
        vllm = f"{row['vllm']['select']['median_us']:.1f}" if row["vllm"] else MISSING
        floor = f"{row['select_floor_us']:.1f}"
        lines.append((row["name"], f"{theirs:.1f}", vllm, f"{ours:.1f}", f"{ours / theirs:.2f}", floor))
    head = ("requests x context", "cuDNN, us", "vLLM 0.33, us", "FlashQSA, us", "FlashQSA / cuDNN", "floor, us")
    return markdown_table(head, lines)


def curves_section(rows: list[Row]) -> str:
    """The picture and its figures."""
    if not rows:
        return NOT_MEASURED
    picture = "![Time of selection and attention by context, requests and rows, with the floor](img/growth.svg)"
    return f"{picture}\n\n{decode_table(rows)}"


def stack_table(rows: list[Row]) -> str:
    """A step of all layers, milliseconds."""
    lines = []
    for row in rows:
        times = {name: spread["median_us"] / 1e3 for name, spread in row["times"].items()}
        ours, floor = times["flashqsa"], row["floor_us"] / 1e3
        lines.append(
            (
                "{}/{}".format(*row["heads"]),
                f"{row['requests']} x {row['rows']:,} at {row['context']:,}",
                f"{times['vllm']:.3f}" if "vllm" in times else MISSING,
                f"{ours:.3f}",
                f"{ours / times['vllm']:.2f}" if "vllm" in times else MISSING,
                f"{times['projections']:.3f}",
                f"{floor:.3f}",
                f"{100 * floor / ours:.0f} %",
            )
        )
    head = (
        "heads", "rows at context", "vLLM 0.33, ms", "FlashQSA, ms", "ratio", "projections alone, ms", "floor, ms",
        "share of floor",
    )  # fmt: skip
    return markdown_table(head, lines)


def sweep_table(rows: list[Row]) -> str:
    """What is chosen for each kernel and shape beside the fastest of what was tried."""
    lines = []
    for row in rows:
        best, chosen = row["timed"][0], chosen_time(row)
        taken = ", ".join(f"{name} {value}" for name, value in row["chosen"].items())
        lines.append(
            (
                f"`{row['kernel']}`",
                row["name"],
                taken,
                f"{chosen:.1f}",
                str(len(row["timed"])),
                difference(row, best["config"]),
                f"{best['median_us']:.1f}",
                f"{best['median_us'] / chosen:.3f}",
            )
        )
    head = ("kernel", "shape", "chosen", "us", "timed", "fastest", "us", "ratio")
    return markdown_table(head, lines)
