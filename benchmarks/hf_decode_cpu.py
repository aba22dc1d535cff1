"""`python -m benchmarks hf-decode-cpu`: decode steps of a whole small transformers model by context, fp32 on a CPU."""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import ROOT, command, environment
from benchmarks.gates import GateError, stable_topk
from benchmarks.machine import calmest
from benchmarks.progress import progress
from benchmarks.timing import Timing
from flashqsa.integrations import hf

NAME = "hf-decode-cpu"
RESULTS = ROOT / "benchmarks" / "results" / "hf_decode_cpu.jsonl"
ENGINES = ("transformers", "flashqsa")
MOST_GROWTH = 1.3
"""Target: how many times longer a step may take at the longest context than at the shortest, cache copies aside."""
LARGEST_ERROR = 1e-3
"""Logits of both engines differ by less after one step from the same cache; sums of another order, no other tokens."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192, 16384, 32768], help="tokens before")
    parser.add_argument("--layers", type=int, default=8, help="decoder layers, every fourth is QSA")
    parser.add_argument("--repeats", type=int, default=31, help="timed steps an engine and context")
    parser.add_argument("--patience", type=float, default=0, help="seconds to wait for calm and to repeat")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens that enter at once")
    parser.add_argument("--out", type=Path, default=RESULTS, help="JSON lines, overwritten")


def run(options: argparse.Namespace) -> int:
    """Measure, and write one JSON line a context."""
    torch.set_num_threads(options.threads)
    common = {"benchmark": NAME, "layers": options.layers, "dtype": "float32"}
    origin = {"command": command(), "environment": environment()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with torch.no_grad(), progress(len(options.contexts) + 2) as begin:
        begin("the model")
        model = small_model(options.layers)
        filled = {}
        for context in sorted(options.contexts):
            begin(f"a prompt of {context} tokens, and correctness")
            cache, token = prefill(model, context, options.chunk)
            check_step(model, cache, token)
            filled[context] = {engine: (copy.deepcopy(cache), token) for engine in ENGINES}
        begin("steps")
        rows, others = calmest(lambda: time_steps(model, filled, options.repeats), options.patience)
    with options.out.open("w", encoding="utf-8") as file:
        for row in rows:
            about = {"cores_used_by_others": others, "target_growth": MOST_GROWTH}
            file.write(json.dumps({**common, **row, **about, **origin}) + "\n")
    return 0


def small_model(layers: int) -> Any:
    """The model of `flashqsa tiny`, whose weights make it decide something."""
    from transformers import AutoModelForCausalLM

    from flashqsa.commands.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        write_tiny_checkpoint(Path(folder) / "model", TinyOptions(layers=layers))
        return AutoModelForCausalLM.from_pretrained(Path(folder) / "model").eval()


def prefill(model: Any, context: int, chunk: int) -> tuple[Any, torch.Tensor]:
    """A cache with that many random tokens, and the token that follows."""
    from transformers import DynamicCache

    tokens = torch.randint(2, 256, (1, context), generator=torch.Generator().manual_seed(context))
    cache = DynamicCache(config=model.config)
    with hf.enabled(model):
        for piece in tokens.split(chunk, dim=1):
            logits = model(piece, cache=cache, use_cache=True, logits_to_keep=1).logits
    return cache, logits[:, -1:].argmax(-1)


def check_step(model: Any, cache: Any, token: torch.Tensor) -> None:
    """One step of both engines from copies of the same cache.

    Raises:
        GateError: Their logits differ by more than the order of sums explains.
    """
    found = {}
    for engine in ENGINES:
        with engine_on(model, engine), stable_topk():
            found[engine] = model(token, cache=copy.deepcopy(cache), use_cache=True).logits
    error = float((found["flashqsa"] - found["transformers"]).abs().max())
    if not error < LARGEST_ERROR:
        raise GateError(f"logits of a step at {cache.get_seq_length()} tokens differ by {error:.3g}")


def engine_on(model: Any, engine: str) -> AbstractContextManager[Any]:
    """The model on that engine inside the block."""
    return hf.enabled(model) if engine == "flashqsa" else nullcontext()


@contextmanager
def timed_copies(cache: Any) -> Iterator[list[float]]:
    """Seconds that each call which appends to the cache takes: concatenation copies all that is there."""
    seconds: list[float] = []
    originals = {name: getattr(cache, name) for name in ("update", "update_indexer")}

    def timed(call: Any) -> Any:
        def appending(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                seconds.append(time.perf_counter() - start)

        return appending

    for name, call in originals.items():
        setattr(cache, name, timed(call))
    try:
        yield seconds
    finally:
        for name in originals:
            delattr(cache, name)


def time_steps(model: Any, filled: dict[int, dict[str, Any]], repeats: int, warmups: int = 3) -> list[dict[str, Any]]:
    """Steps of every engine at every context in turn, each going on from where it was."""
    whole: dict[tuple[int, str], list[float]] = {}
    copies: dict[tuple[int, str], list[float]] = {}
    for turn in range(warmups + repeats):
        for engine in ENGINES:
            with engine_on(model, engine):
                for context, engines in filled.items():
                    cache, token = engines[engine]
                    with timed_copies(cache) as appending:
                        start = time.perf_counter()
                        logits = model(token, cache=cache, use_cache=True).logits
                        elapsed = time.perf_counter() - start
                    engines[engine] = cache, logits[:, -1:].argmax(-1)
                    if turn >= warmups:
                        whole.setdefault((context, engine), []).append(elapsed)
                        copies.setdefault((context, engine), []).append(sum(appending))
    rows = []
    for context in filled:
        row: dict[str, Any] = {"measure": "decode step", "tokens": context}
        for engine in ENGINES:
            steps, appended = whole[context, engine], copies[context, engine]
            rest = [step - part for step, part in zip(steps, appended, strict=True)]
            row[engine] = {
                "step": asdict(Timing.of(steps)),
                "copies": asdict(Timing.of(appended)),
                "rest": asdict(Timing.of(rest)),
            }
        rows.append(row)
    shortest = rows[0]
    for row in rows:
        for engine in ENGINES:
            rest = row[engine]["rest"]["median_ms"]
            row[engine]["growth"] = round(rest / shortest[engine]["rest"]["median_ms"], 3)
    return rows
