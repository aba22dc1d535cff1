"""`python -m benchmarks gpu-curves`: how decode and verification cost more as the work grows, on one CUDA GPU.

By context at 1 and at 32 requests, by requests, and by rows of a request; what it costs when neighbouring rows of a
prefill have less in common is gpu-prefill's curve. Tensors, gate, contenders and floor of a point are gpu-decode's; a
shape that lies on several curves is measured once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.environment import ROOT, command
from benchmarks.gpu_decode import Shape, measure, peer_vllm, told
from benchmarks.gpu_timing import Ceilings, Timer, gpu_environment

NAME = "gpu-curves"
RESULTS = ROOT / "benchmarks" / "results" / "gpu_curves.jsonl"


@dataclass(frozen=True)
class Curve:
    """Shapes of which one number grows.

    Attributes:
        name: Under which its rows are found in the result file.
        axis: Field of `Shape` that grows.
        shapes: Its points.
    """

    name: str
    axis: str
    shapes: tuple[Shape, ...]


CONTEXTS = tuple(4096 << n for n in range(9))
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
CURVES = (
    Curve("context, 1 request", "context", tuple(Shape(1, context) for context in CONTEXTS)),
    Curve("context, 32 requests", "context", tuple(Shape(32, context) for context in CONTEXTS)),
    Curve("requests at 32,768", "requests", tuple(Shape(1 << n, 32768) for n in range(10))),
    Curve("rows of 32 requests at 131,072", "rows", tuple(Shape(32, 131072, rows=rows) for rows in ROWS)),
)


def points_of(curves: Sequence[Curve]) -> dict[Shape, dict[str, str]]:
    """Each shape once, with name and axis of the curves that it lies on."""
    found: dict[Shape, dict[str, str]] = {}
    for curve in curves:
        for shape in curve.shapes:
            found.setdefault(shape, {})[curve.name] = curve.axis
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument(
        "--out", type=Path, default=None, help="JSON lines to write; the committed file is " + RESULTS.name
    )
    parser.add_argument("--curves", default="", help="only curves whose name holds this, e.g. 'context'")
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds")
    parser.add_argument("--commit", default=None, help="commit to record where the checkout has no git")


def run(options: argparse.Namespace) -> int:
    """Measure every point; a line each on the terminal, all figures in the file."""
    if not torch.cuda.is_available():
        print("gpu-curves: needs a CUDA GPU, found none.", file=sys.stderr)
        return 2
    vllm, timer = peer_vllm(), Timer(options.repeats)
    generator = torch.Generator("cuda").manual_seed(0)
    ceilings = Ceilings.measure(timer)
    facts = {"environment": gpu_environment(options.commit), "command": command(), **asdict(ceilings)}
    lines = []
    for shape, axes in points_of([curve for curve in CURVES if options.curves in curve.name]).items():
        row = measure(shape, vllm, timer, ceilings, generator) | {"measure": "gpu curves", "curves": axes}
        lines.append(json.dumps({**facts, **row}))
        print(told(row), flush=True)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0
