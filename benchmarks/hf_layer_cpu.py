"""`python -m benchmarks hf-layer-cpu`: one layer of transformers, as it is and with FlashQSA enabled, fp32 on a CPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import ROOT, command, environment
from benchmarks.gates import check_layer
from benchmarks.machine import calmest
from benchmarks.memory import in_child, peak_of
from benchmarks.progress import progress
from benchmarks.single_layer import SHAPES, STEP_CORRELATION, SingleLayer, Work, neighbour_overlap
from benchmarks.timing import Ceilings, Prepared, Timing, interleave, measure_ceilings

NAME = "hf-layer-cpu"
RESULTS = ROOT / "benchmarks" / "results" / "hf_layer_cpu.jsonl"
ENGINES = ("transformers", "flashqsa")
LEAST_SPEEDUP = {"layer": (1.3, 0), "preparation + selection": (8.0, 4096)}
"""Target speed-up by measure, and the tokens from which it is asked for."""
MOST_LONG_PREFILL_GB = 6.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096], help="lengths of the prompt")
    parser.add_argument("--workloads", nargs="+", choices=STEP_CORRELATION, default=list(STEP_CORRELATION))
    parser.add_argument("--repeats", type=int, default=7, help="timed calls an engine")
    parser.add_argument(
        "--patience", type=float, default=0, help="seconds to wait for calm and to repeat what others disturbed, a row"
    )
    parser.add_argument("--threads", type=int, default=2, help="threads of torch")
    parser.add_argument("--shape", choices=SHAPES, default="released")
    parser.add_argument("--long-tokens", type=int, default=32_768, help="prompt of the long prefill; 0 leaves it out")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON lines, overwritten")
    parser.add_argument("--child", choices=ENGINES, help=argparse.SUPPRESS)


def run(options: argparse.Namespace) -> int:
    """Measure, and write one JSON line a row."""
    torch.set_num_threads(options.threads)
    if options.child:
        print(json.dumps(_in_this_process(options)))
        return 0
    memory_runs = 0 if options.no_memory else len(options.tokens) * len(ENGINES) + bool(options.long_tokens)
    common = {"benchmark": NAME, "shape": options.shape, "dtype": "float32"}
    origin = {"command": command(), "environment": environment()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        progress(1 + 3 * len(options.tokens) * len(options.workloads) + memory_runs) as begin,
        options.out.open("w", encoding="utf-8") as file,
    ):
        begin("what the machine can do")
        ceilings, _ = calmest(measure_ceilings, options.patience)
        first = {"measure": "ceilings", **asdict(ceilings)}
        for row in chain([first], _timed(options, ceilings, begin), _peaks(options, begin)):
            file.write(json.dumps({**common, **row, **origin}) + "\n")
            file.flush()
    return 0


def _timed(options: argparse.Namespace, ceilings: Ceilings, begin: Any) -> Iterator[dict[str, Any]]:
    """Rows of time, by workload and length. The gate comes first."""
    for workload in options.workloads:
        for tokens in options.tokens:
            layer = SingleLayer(SHAPES[options.shape], tokens, workload)
            begin(f"{workload}, {tokens} tokens: correctness")
            gate = check_layer(layer)
            with torch.no_grad(), layer.flashqsa_indexer() as call:
                overlap = neighbour_overlap(call())
            about = {"workload": workload, "tokens": tokens, "neighbour_overlap": overlap, "gate": gate}
            for measure, theirs, ours, work in (
                ("preparation + selection", layer.transformers_indexer, layer.flashqsa_indexer, layer.indexer_work()),
                ("layer", layer.transformers_layer, layer.flashqsa_layer, layer.layer_work()),
            ):
                begin(f"{workload}, {tokens} tokens: {measure}")
                engines = {"transformers": theirs, "flashqsa": ours}
                timings, others = calmest(partial(_interleave, engines, options.repeats), options.patience)
                least, since = LEAST_SPEEDUP[measure]
                target = least if options.shape == "released" and tokens >= since else None
                yield {"measure": measure, **about, **_compared(timings, work, ceilings), "target_speedup": target,
                       "cores_used_by_others": others}  # fmt: skip


def _interleave(engines: Mapping[str, Prepared], repeats: int) -> dict[str, Timing]:
    with torch.no_grad():
        return interleave(engines, repeats=repeats)


def _compared(timings: Any, work: Work, ceilings: Ceilings) -> dict[str, Any]:
    floor = ceilings.floor_ms(work.flop, work.moved_bytes)
    speedup = timings["transformers"].median_ms / timings["flashqsa"].median_ms
    return {
        **{name: asdict(timing) for name, timing in timings.items()},
        "speedup": round(speedup, 2),
        **asdict(work),
        "floor_ms": round(floor, 3),
        "share_of_floor": {name: round(floor / timing.median_ms, 3) for name, timing in timings.items()},
    }


def _peaks(options: argparse.Namespace, begin: Any) -> Iterator[dict[str, Any]]:
    """Rows of memory, each engine and length in a process of its own."""
    if options.no_memory:
        return
    for tokens in options.tokens:
        row: dict[str, Any] = {"measure": "peak memory", "tokens": tokens}
        for engine in ENGINES:
            begin(f"peak memory of {engine}, {tokens} tokens")
            row[engine] = _child(options, engine, tokens)
        yield row
    if options.long_tokens:
        begin(f"long prefill, {options.long_tokens} tokens")
        found = _child(options, "flashqsa", options.long_tokens)
        target = MOST_LONG_PREFILL_GB if options.long_tokens == 32_768 else None
        yield {"measure": "long prefill", "tokens": options.long_tokens, "flashqsa": found, "target_gb": target}


def _child(options: argparse.Namespace, engine: str, tokens: int) -> dict[str, Any]:
    words = ["--child", engine, "--tokens", str(tokens), "--threads", str(options.threads), "--shape", options.shape]
    return in_child(NAME, *words)


def _in_this_process(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory and time of one first call, after a short one has loaded what any call needs."""
    layers = [SingleLayer(SHAPES[options.shape], tokens, "independent") for tokens in (64, options.tokens[0])]
    peaks, times = [], []
    for layer in layers:
        prepared = {"transformers": layer.transformers_layer, "flashqsa": layer.flashqsa_layer}[options.child]
        with torch.no_grad():
            peaks.append(peak_of(lambda prepared=prepared: times.append(_timed_once(prepared))))
    peak = peaks[-1]
    return {
        "peak_gb": round(peak.peak_mib * 2**20 / 1e9, 3),
        "growth_gb": round(peak.growth_mib * 2**20 / 1e9, 3),
        "seconds": round(times[-1], 2),
    }


def _timed_once(prepared: Any) -> float:
    return interleave({"": prepared}, repeats=1, warmups=0)[""].median_ms / 1e3
