"""`python -m benchmarks sweep`: what kernels could be configured to instead of what is chosen, timed on one CUDA GPU.

For each kernel that takes a configuration from its caller: the one that is chosen today, and others that differ from
it in one number. A candidate whose results are not those of the chosen one, or that does not fit the device, is left
out and named. The rest is timed in turn, by graph replay with a cold L2. Where another one is best, the tables of
`choose` in the kernel's file are what to change.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import ROOT, command
from benchmarks.gpu_timing import Ceilings, Timer, gpu_environment
from benchmarks.sweep_kernels import Config, Subject, subjects

NAME = "sweep"
RESULTS = ROOT / "benchmarks" / "results" / "sweep.jsonl"


def measure(subject: Subject, timer: Timer) -> dict[str, Any]:
    """All configurations of a kernel at one shape; those that are timed, the fastest first."""
    from triton.errors import TritonError

    _poison(subject.run(subject.chosen))
    wanted = subject.results(subject.run(subject.chosen))
    fitting, left_out = [subject.chosen], []
    for config in subject.candidates:
        try:
            _poison(subject.run(config))
            found = subject.results(subject.run(config))
        except (TritonError, RuntimeError) as error:  # too large for the device, or for a pass of the compiler
            left_out.append({"config": config, "why": f"does not compile or fit: {error}"})
            continue
        if subject.same(wanted, found):
            fitting.append(config)
        else:
            left_out.append({"config": config, "why": "gives other results"})
    times = timer.interleaved({str(place): partial(subject.run, config) for place, config in enumerate(fitting)})
    timed = [{"config": config, **times[str(place)]} for place, config in enumerate(fitting)]
    timed.sort(key=lambda one: one["median_us"])
    return {
        "measure": "sweep", "kernel": subject.kernel, "name": subject.shape, "chosen": subject.chosen, "timed": timed,
        "left_out": left_out,
    }  # fmt: skip


def _poison(written: list[torch.Tensor]) -> None:
    """What a kernel writes, made wrong, so that nothing of an earlier launch passes for its results."""
    for numbers in written:
        numbers.fill_(float("nan") if numbers.is_floating_point() else -7)


def chosen_time(row: dict[str, Any]) -> float:
    """Median of the chosen configuration, microseconds."""
    return next(float(one["median_us"]) for one in row["timed"] if one["config"] == row["chosen"])


def difference(row: dict[str, Any], config: Config) -> str:
    """What a configuration has other than the chosen one."""
    return ", ".join(f"{name} {value}" for name, value in config.items() if value != row["chosen"][name]) or "chosen"


def told(row: dict[str, Any]) -> str:
    """A row in one line."""
    best, chosen = row["timed"][0], chosen_time(row)
    text = f"{row['kernel']:28s} {row['name']:36s} chosen {chosen:.1f} us; best of {len(row['timed'])}: "
    text += f"{difference(row, best['config'])}, {best['median_us']:.1f} us, {best['median_us'] / chosen:.3f} of it"
    left = "; ".join(f"{difference(row, one['config'])} {one['why']}" for one in row["left_out"])
    return text + (f". Left out: {left}" if left else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument(
        "--out", type=Path, default=None, help="JSON lines to write; the committed file is " + RESULTS.name
    )
    parser.add_argument("--kernels", default="", help="only kernels whose name holds this, e.g. 'score'")
    parser.add_argument("--shapes", default="", help="only shapes whose name holds this")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds")
    parser.add_argument("--commit", default=None, help="commit to record where the checkout has no git")


def run(options: argparse.Namespace) -> int:
    """Sweep every kernel at every shape; a line each on the terminal, all figures in the file."""
    if not torch.cuda.is_available():
        print("sweep: needs a CUDA GPU, found none.", file=sys.stderr)
        return 2
    timer, generator = Timer(options.repeats), torch.Generator("cuda").manual_seed(0)
    environment = gpu_environment(options.commit) | {"capability": list(torch.cuda.get_device_capability())}
    facts = {"environment": environment, "command": command(), **asdict(Ceilings.measure(timer))}
    lines = []
    for build in subjects(options.kernels, options.shapes):
        gc.collect()
        torch.cuda.empty_cache()
        subject = build(generator)
        if subject is None:
            continue
        row = measure(subject, timer)
        del subject
        lines.append(json.dumps({**facts, **row}))
        print(told(row), flush=True)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0
