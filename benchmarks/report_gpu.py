"""Tables of the GPU's result files: decode, long chunks, heads of a rank, preparation, and a transformers layer."""

from __future__ import annotations

from benchmarks.tables import Row, markdown_table, rows_of

MISSING = "not measured"
SHORT = ("1 x 131072", "32 x 131072", "128 x 131072", "32 x 131072 x 4 rows")
"""Steps of gpu-decode in the README's table."""


def sections(decode: list[Row], prefill: list[Row], prepare: list[Row], layer: list[Row]) -> dict[str, str]:
    """Text of each section by the name in its markers.

    Args:
        decode: Rows of gpu-decode, like the others of the benchmark of their name.
        prefill: Rows of gpu-prefill.
        prepare: Rows of gpu-prepare.
        layer: Rows of hf-layer-gpu.
    """
    return {
        "gpu-short": "\n".join(
            [short_table(decode, rows_of(prefill, "gpu prefill")), origin(decode[:1]), origin(prefill[:1])]
        ),
        "gpu-decode": decode_table(decode),
        "gpu-origin": origin(decode),
        "gpu-prefill": prefill_table(rows_of(prefill, "gpu prefill")),
        "gpu-heads": attend_table(rows_of(prefill, "gpu heads")),
        "gpu-curve": attend_table(rows_of(prefill, "gpu curve")),
        "gpu-prefill-origin": origin(prefill),
        "gpu-prepare": prepare_table(prepare),
        "gpu-prepare-origin": origin(prepare),
        "gpu-layer": layer_table(layer),
        "gpu-layer-origin": origin(layer),
    }


def short_table(decode: list[Row], prefill: list[Row]) -> str:
    """Selection and attention together: some steps of decode, and the first long chunk at 131,072 tokens."""
    found = {row["name"]: row for row in decode}
    lines = []
    for row in (found[name] for name in SHORT if name in found):
        theirs = None if row["vllm"] is None else row["vllm"]["all"]["median_us"] / 1e3
        label = f"{row['requests']} x {row['rows']} rows at {row['context']:,}"
        lines.append(_short_line(label, theirs, row["flashqsa"]["all"]["median_us"] / 1e3, row["floor_us"] / 1e3))
    for row in [row for row in prefill if row["context"] == 131_072][:1]:
        times = {name: spread["median_us"] / 1e3 for name, spread in row["times"].items()}
        theirs = [times.get(f"vllm {stage}") for stage in ("select", "expand", "attend")]
        ours = times["flashqsa select"] + times["flashqsa attend"]
        floor = sum(row["floors_us"].values()) / 1e3
        label = f"{row['requests']} x {row['rows']:,} rows at {row['context']:,}"
        lines.append(_short_line(label, None if None in theirs else sum(theirs), ours, floor))
    return markdown_table(("step", "vLLM 0.33, ms", "FlashQSA, ms", "ratio", "floor, ms"), lines)


def _short_line(label: str, theirs: float | None, ours: float, floor: float) -> tuple[str, ...]:
    vllm, ratio = (MISSING, MISSING) if theirs is None else (f"{theirs:.3f}", f"{ours / theirs:.2f}")
    return label, vllm, f"{ours:.3f}", ratio, f"{floor:.3f}"


def decode_table(rows: list[Row]) -> str:
    """Medians of both engines, stage by stage, beside the floor."""
    lines = []
    for row in rows:
        ours = {stage: spread["median_us"] for stage, spread in row["flashqsa"].items()}
        theirs = None if row["vllm"] is None else {stage: spread["median_us"] for stage, spread in row["vllm"].items()}
        wide = f" ({row['wide_over_tight']:.2f} of a tight one)" if "wide_over_tight" in row else ""
        lines.append(
            (
                row["name"] + wide,
                MISSING
                if theirs is None
                else f"{theirs['all']:.1f} ({theirs['select']:.1f} / {theirs['expand']:.1f} / {theirs['attend']:.1f})",
                f"{ours['all']:.1f} ({ours['select']:.1f} / {ours['attend']:.1f})",
                MISSING if theirs is None else f"{ours['all'] / theirs['all']:.2f}",
                f"{row['floor_us']:.1f}",
                f"{100 * row['floor_us'] / ours['all']:.0f} %",
            )
        )
    head = (
        "requests x context",
        "vLLM 0.33, us (select / expand / attend)",
        "FlashQSA, us (select / attend)",
        "ratio",
        "floor, us",
        "share of floor",
    )
    return markdown_table(head, lines)


def prefill_table(rows: list[Row]) -> str:
    """Selection and attention of long chunks, milliseconds."""
    lines = []
    for row in rows:
        times, floors = row["times"], row["floors_us"]
        cells = [
            f"{row['requests']} x {row['rows']:,} at {row['context']:,}",
            MISSING if row["overlap"] is None else f"{row['overlap']:.2f}",
        ]
        for stage in ("select", "attend"):
            cells += [
                _ms(times, f"vllm {stage}"),
                _ms(times, f"flashqsa {stage}"),
                _ratio(times, stage),
                f"{floors[stage] / 1e3:.2f}",
            ]
        cells[0] += ", fp8 index" if row["fp8_index"] else ""
        lines.append(cells)
    each = ("vLLM", "FlashQSA", "ratio", "floor")
    head = (
        "rows at context",
        "neighbour overlap",
        *(f"{stage}, {name}" for stage in ("select", "attend") for name in each),
    )
    return markdown_table(head, lines)


def attend_table(rows: list[Row]) -> str:
    """Attention alone by heads and by how much neighbours differ, microseconds."""
    lines = []
    for row in rows:
        times = row["times"]
        ours = times["flashqsa attend"]["median_us"]
        lines.append(
            (
                "{}/{}".format(*row["heads"]),
                f"{row['requests']} x {row['rows']:,} at {row['context']:,}",
                f"{row['churn']:g}",
                _us(times, "vllm attend"),
                f"{ours:,.1f}",
                _ratio(times, "attend"),
                _us(times, "flashqsa row_exact"),
                f"{row['floors_us']['attend']:,.1f}",
                f"{row['useful_tflops']:.0f}",
            )
        )
    head = (
        "heads", "rows at context", "exchanged blocks", "vLLM, us", "FlashQSA, us", "ratio", "row by row, us",
        "floor, us", "useful TFLOP/s",
    )  # fmt: skip
    return markdown_table(head, lines)


def prepare_table(rows: list[Row]) -> str:
    """Preparation, microseconds."""
    lines = []
    for row in rows:
        times = row["times"]
        ours = times["flashqsa"]["median_us"]
        theirs = times.get("vllm", {}).get("median_us")
        lines.append(
            (
                row["name"],
                _us(times, "vllm"),
                f"{ours:.1f}",
                MISSING if theirs is None else f"{ours / theirs:.2f}",
                _us(times, "flashqsa, gates copied"),
                f"{row['floor_us']:.1f}",
            )
        )
    return markdown_table(("step", "vLLM, us", "FlashQSA, us", "ratio", "with gates copied, us", "floor, us"), lines)


def layer_table(rows: list[Row]) -> str:
    """A transformers layer, milliseconds of the host."""
    lines = [
        (
            row["measure"],
            f"{row['tokens']:,}",
            *(f"{row[e]['median_ms']:,.3f}" if row[e] else MISSING for e in ("transformers", "flashqsa")),
            f"{row['transformers']['median_ms'] / row['flashqsa']['median_ms']:,.1f}"
            if row["transformers"]
            else MISSING,
        )
        for row in rows
    ]
    return markdown_table(("", "tokens", "transformers, ms", "with FlashQSA, ms", "times as fast"), lines)


def origin(rows: list[Row]) -> str:
    """Command, commit, device and ceilings of the GPU's rows."""
    if not rows:
        return ""
    where = rows[0]["environment"]
    text = (
        f"`{rows[0]['command']}` at commit `{where['commit']}`, {where['date']}: {where['device']}, CUDA "
        f"{where['cuda']}; Python {where['python']}, torch {where['torch']}, triton {where['triton']}"
    )
    text += f", transformers {where['transformers']}.\n" if "transformers" in where else "."
    if "copy_bytes_per_us" in rows[0]:
        text += (
            f" In the same run the card copied {rows[0]['copy_bytes_per_us'] / 1e6:.2f} TB/s and multiplied bf16 "
            f"matrices at {rows[0]['matmul_flop_per_us'] / 1e6:.0f} TFLOP/s.\n"
        )
    return text


def _us(times: Row, name: str) -> str:
    return f"{times[name]['median_us']:,.1f}" if name in times else MISSING


def _ms(times: Row, name: str) -> str:
    return f"{times[name]['median_us'] / 1e3:.2f} ms" if name in times else MISSING


def _ratio(times: Row, stage: str) -> str:
    if f"vllm {stage}" not in times:
        return MISSING
    return f"{times[f'flashqsa {stage}']['median_us'] / times[f'vllm {stage}']['median_us']:.2f}"
