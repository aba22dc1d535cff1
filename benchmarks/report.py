"""`python -m benchmarks report`: write tables and pictures of the documentation from the result files."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from benchmarks import (
    gpu_curves,
    gpu_decode,
    gpu_prefill,
    gpu_prepare,
    gpu_stack,
    gpu_vllm_ops,
    hf_decode_cpu,
    hf_layer_gpu,
    report_gpu,
    report_pictures,
    report_steps,
    report_vllm_ops,
    sweep,
)
from benchmarks.environment import ROOT
from benchmarks.hf_layer_cpu import RESULTS
from benchmarks.report_reported import reported_table
from benchmarks.tables import Row, markdown_table, rows_of

PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a page differs")


def run(options: argparse.Namespace) -> int:
    """Put every table between its markers, and every picture into its file."""
    sections = all_sections(read_rows(RESULTS)) | decode_sections(read_rows(hf_decode_cpu.RESULTS))
    on_gpu = [read_rows(benchmark.RESULTS) for benchmark in (gpu_decode, gpu_prefill, gpu_prepare, hf_layer_gpu)]
    sections |= report_gpu.sections(*on_gpu) | {"reported": reported_table()}
    steps = [read_rows(benchmark.RESULTS) for benchmark in (gpu_curves, gpu_stack, sweep)]
    sections |= report_steps.sections(on_gpu[0], *steps) | report_vllm_ops.sections(read_rows(gpu_vllm_ops.RESULTS))
    texts = {page: with_sections(page.read_text(encoding="utf-8"), sections) for page in PAGES}
    drawn = report_pictures.pictures(*on_gpu[:2], steps[0])
    texts |= {ROOT / "docs" / "img" / name: text for name, text in drawn.items()}
    stale = []
    for page, text in texts.items():
        if not page.exists() or page.read_text(encoding="utf-8") != text:
            stale.append(page.relative_to(ROOT))
            if not options.check:
                page.parent.mkdir(parents=True, exist_ok=True)
                page.write_text(text, encoding="utf-8")
    for page in stale:
        print(f"{page}: {'differs from the results' if options.check else 'written'}", file=sys.stderr)
    return 1 if stale and options.check else 0


def read_rows(path: Path) -> list[Row]:
    """Rows of a result file; none when it does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def with_sections(page: str, sections: dict[str, str]) -> str:
    """A page with every ``<!-- begin: NAME -->`` to ``<!-- end: NAME -->`` filled.

    Raises:
        KeyError: The page asks for a table that nothing makes.
    """
    marked = re.compile(r"(<!-- begin: (\S+) -->\n).*?(<!-- end: \2 -->)", re.DOTALL)
    return marked.sub(lambda found: f"{found[1]}\n{sections[found[2]].strip()}\n\n{found[3]}", page)


def all_sections(rows: list[Row]) -> dict[str, str]:
    """Text of each section by the name in its markers."""
    return {
        "layer-short": short_table(rows_of(rows, "layer")) + "\n" + origin(rows),
        "layer": time_table(rows_of(rows, "layer")),
        "selection": time_table(rows_of(rows, "preparation + selection")),
        "memory": memory_table(rows),
        "origin": origin(rows) + "\n" + ceilings(rows),
    }


def decode_sections(rows: list[Row]) -> dict[str, str]:
    """Text of the decode step's sections by the name in their markers."""
    return {"decode": decode_table(rows), "decode-origin": origin(rows)}


def decode_table(rows: list[Row]) -> str:
    """A step of both engines by context, cache copies apart, and how it grows."""
    last = rows[-1]["tokens"] if rows else None
    return markdown_table(
        (
            "tokens",
            "transformers, ms",
            "FlashQSA, ms",
            "of which cache copies, theirs / ours, ms",
            "rest against the shortest, theirs / ours",
            "target",
        ),
        [
            (
                f"{row['tokens']:,}",
                *(_spread(row[engine]["step"]) for engine in ("transformers", "flashqsa")),
                " / ".join(_ms(row[engine]["copies"]["median_ms"]) for engine in ("transformers", "flashqsa")),
                " / ".join(f"{row[engine]['growth']:.2f}" for engine in ("transformers", "flashqsa")),
                _most(row["flashqsa"]["growth"], row["target_growth"] if row["tokens"] == last else None),
            )
            for row in rows
        ],
    )


def short_table(rows: list[Row]) -> str:
    """Medians of both engines by workload and length."""
    return markdown_table(
        ("workload", "tokens", "transformers, ms", "with FlashQSA, ms", "times as fast"),
        [
            (
                row["workload"],
                f"{row['tokens']:,}",
                *(_ms(row[engine]["median_ms"]) for engine in ("transformers", "flashqsa")),
                f"{row['speedup']:.2f}",
            )
            for row in rows
        ],
    )


def time_table(rows: list[Row]) -> str:
    """Everything about the times of both engines by workload and length."""
    return markdown_table(
        (
            "workload",
            "tokens",
            "neighbour overlap",
            "transformers, ms",
            "FlashQSA, ms",
            "times as fast",
            "target",
            "share of floor, theirs / ours",
        ),
        [
            (
                row["workload"],
                f"{row['tokens']:,}",
                "all blocks" if row["neighbour_overlap"] is None else f"{row['neighbour_overlap']:.2f}",
                _spread(row["transformers"]),
                _spread(row["flashqsa"]),
                f"{row['speedup']:.2f}",
                _target(row["speedup"], row["target_speedup"]),
                " / ".join(_share(row, engine) for engine in ("transformers", "flashqsa")),
            )
            for row in rows
        ],
    )


def memory_table(rows: list[Row]) -> str:
    """Peak memory of both engines, and of the long prefill."""
    table = [
        (f"{row['tokens']:,}", *(f"{row[engine]['growth_gb']:.2f}" for engine in ("transformers", "flashqsa")))
        for row in rows_of(rows, "peak memory")
    ]
    text = markdown_table(("tokens", "transformers, GB", "FlashQSA, GB"), table)
    for row in rows_of(rows, "long prefill"):
        ours = row["flashqsa"]
        text += (
            f"\nA prefill of {row['tokens']:,} tokens with FlashQSA: process peak {ours['peak_gb']:.2f} GB"
            + ("" if row["target_gb"] is None else f" (target: at most {row['target_gb']:g})")
            + f", of which the call {ours['growth_gb']:.2f} GB; {ours['seconds']:.1f} s, a first call.\n"
        )
    return text


def origin(rows: list[Row]) -> str:
    """Command, commit and machine of the rows."""
    if not rows:
        return ""
    where = rows[0]["environment"]
    return (
        f"`{rows[0]['command']}` at commit `{where['commit']}`, {where['date']}: {where['cpu']}, "
        f"{where['threads']} threads, {where['instruction_set']}, {where['system']}; Python {where['python']}, torch "
        f"{where['torch']}, transformers {where['transformers']}.{disturbance(rows)}\n"
    )


def disturbance(rows: list[Row]) -> str:
    """What other processes took of the machine in the row that suffered most."""
    cores = [row["cores_used_by_others"] for row in rows if row.get("cores_used_by_others") is not None]
    return f" Other processes used at most {max(cores):.2f} cores during a measurement." if cores else ""


def ceilings(rows: list[Row]) -> str:
    """What the machine did at best in the same run."""
    return "".join(
        f"In the same run the machine reached {row['gflop_per_s']:,.0f} GFLOP/s in an fp32 matrix product and "
        f"{row['gbyte_per_s']:.1f} GB/s in a copy.\n"
        for row in rows_of(rows, "ceilings")
    )


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _spread(timing: Row) -> str:
    return f"{_ms(timing['median_ms'])} ({_ms(timing['p20_ms'])} to {_ms(timing['p80_ms'])})"


def _share(row: Row, engine: str) -> str:
    return f"{100 * row['share_of_floor'][engine]:.2g} %"


def _target(speedup: float, target: float | None) -> str:
    if target is None:
        return "none"
    return f"≥ {target:g}, {'met' if speedup >= target else 'missed'}"


def _most(found: float, most: float | None) -> str:
    if most is None:
        return "none"
    return f"≤ {most:g}, {'met' if found <= most else 'missed'}"
