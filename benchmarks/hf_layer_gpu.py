"""`python -m benchmarks hf-layer-gpu`: one transformers layer at the released shape on a CUDA GPU, stock and enabled.

Times are those of the host from call to synchronisation, as a caller without graphs of his own has them; decode steps
run back to back, as the layers of a model do, and their time is that of some of them over their number. transformers
takes seconds for a prompt, so it gets one call a length, and none where the seconds that it may take are used up.
Decode steps go on from a cache of random tokens. Both engines' first step in bf16 is compared with transformers in
fp32: FlashQSA may be at most twice as far from it.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache
from transformers.masking_utils import causal_mask_function
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRotaryEmbedding

from benchmarks.environment import ROOT, command, installed
from benchmarks.gates import GateError, stable_topk
from benchmarks.gpu_timing import gpu_environment
from benchmarks.single_layer import SHAPES, SingleLayer
from flashqsa.integrations import hf
from flashqsa.integrations.hf.acceptance import CACHE_NAMES
from flashqsa.integrations.hf.masks import step_mask
from flashqsa.integrations.hf.replacing import own_attribute

NAME = "hf-layer-gpu"
RESULTS = ROOT / "benchmarks" / "results" / "hf_layer_gpu.jsonl"
ENGINES = ("transformers", "flashqsa")
LARGEST_ERROR = 0.05
"""Norm of the difference of both engines' bf16 prompts over the norm of one: bf16 scores select a few other blocks."""
LAYER = 3
REPEATS, WARMUPS = 7, 8
"""Timed prompts, and prompts or steps before the first timed one: kernels are compiled, a step is captured."""
TOGETHER = 10
"""Steps that are timed together."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192], help="prompt lengths")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072], help="tokens before a step")
    parser.add_argument("--steps", type=int, default=60, help="decode steps of FlashQSA")
    parser.add_argument("--stock-seconds", type=float, default=40, help="what prompts of transformers may take in all")
    parser.add_argument("--out", type=Path, default=None, help=f"JSON lines; the committed file is {RESULTS.name}")
    parser.add_argument("--commit", default=None, help="commit to record where the checkout has no git")


def run(options: argparse.Namespace) -> int:
    """Measure; a line each on the terminal as soon as it is known, all figures in the file."""
    if not torch.cuda.is_available():
        print("hf-layer-gpu: needs a CUDA GPU, found none.", file=sys.stderr)
        return 2
    environment = gpu_environment(options.commit) | {"transformers": installed("transformers")}
    facts = {"environment": environment, "command": command(), "dtype": "bfloat16"}
    lines: list[str] = []
    failed = False
    stock = _StockTime(options.stock_seconds)
    layer = SingleLayer(SHAPES["released"], 1).to("cuda", torch.bfloat16)
    measures: list[Callable[[], dict[str, Any]]] = [
        *(lambda n=n: decode(layer, n, options.steps) for n in options.contexts),
        *(lambda n=n: prefill(n, stock) for n in options.tokens),
    ]
    with torch.no_grad():
        for measure in measures:
            try:
                row = measure()
            except GateError as error:
                failed = True
                print(f"hf-layer-gpu: {error}", file=sys.stderr, flush=True)
                continue
            lines.append(json.dumps({**facts, **row}))
            told = ", ".join(f"{e} {row[e]['median_ms']:.3f} ms" if row[e] else f"{e} left out" for e in ENGINES)
            print(f"{row['measure']} {row['tokens']}: {told}, difference {row['difference']}", flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(failed)


class _StockTime:
    """Seconds that prompts of transformers may still take; it needs them row by row."""

    def __init__(self, seconds: float) -> None:
        self.left, self.per_token = seconds, 0.0

    def reaches(self, tokens: int) -> bool:
        return self.per_token * tokens <= self.left

    def took(self, tokens: int, seconds: float) -> None:
        self.left, self.per_token = self.left - seconds, seconds / tokens


def prefill(tokens: int, stock: _StockTime) -> dict[str, Any]:
    """A prompt through the layer, without a cache."""
    layer = SingleLayer(SHAPES["released"], tokens, "drifting").to("cuda", torch.bfloat16)
    row: dict[str, Any] = {"measure": "prefill", "tokens": tokens, "transformers": None, "difference": None}
    with layer.flashqsa_layer() as call:
        results = [_timed(call) for _ in range(WARMUPS + REPEATS)]
    ours, _, peak = results[-1]
    row["flashqsa"] = _spread([elapsed for _, elapsed, _ in results[WARMUPS:]]) | {"peak_gb": round(peak / 1e9, 3)}
    if stock.reaches(tokens):
        with layer.transformers_layer() as call:
            theirs, elapsed, peak = _timed(call)
        stock.took(tokens, elapsed / 1e3)
        row["transformers"] = _spread([elapsed]) | {"peak_gb": round(peak / 1e9, 3)}
        row["difference"] = _distance(ours, theirs)
        if not row["difference"] < LARGEST_ERROR:
            raise GateError(f"prefill of {tokens} tokens: outputs differ by {row['difference']:.3g}")
    return row


def decode(layer: SingleLayer, context: int, steps: int) -> dict[str, Any]:
    """Steps of one row after a context of random tokens."""
    row: dict[str, Any] = {"measure": "decode step", "tokens": context}
    outputs = {}
    for engine in ENGINES:
        rounds = max(2, -(-steps // TOGETHER)) if engine == "flashqsa" else 2
        count = WARMUPS + rounds * TOGETHER
        with _steps(layer, context, count, torch.bfloat16, enabled=engine == "flashqsa") as lazily:
            calls = list(lazily)
            with stable_topk():
                outputs[engine], *_ = [call() for call in calls[:WARMUPS]]
            windows = [calls[first : first + TOGETHER] for first in range(WARMUPS, count, TOGETHER)]
            row[engine] = _spread([_timed(lambda w=w: [call() for call in w][-1])[1] / TOGETHER for w in windows])
    wide = copy.copy(layer)
    wide.attention = copy.deepcopy(layer.attention).float()
    with _steps(wide, context, 1, torch.float32, enabled=False) as lazily, stable_topk():
        exact = next(lazily)()
    errors = {engine: _distance(outputs[engine], exact) for engine in ENGINES}
    if not errors["flashqsa"] <= 2 * errors["transformers"]:
        raise GateError(f"a step after {context} tokens: errors against fp32 are {errors}")
    return row | {"difference": _distance(outputs["flashqsa"], outputs["transformers"]), "errors": errors}


@contextmanager
def _steps(
    layer: SingleLayer, context: int, steps: int, dtype: torch.dtype, *, enabled: bool
) -> Iterator[Iterator[Callable[[], torch.Tensor]]]:
    """Calls of consecutive steps; what a model makes once a forward for all its layers is made between them."""
    shape, attention = layer.shape, layer.attention
    config, device = attention.config, torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator("cuda").manual_seed(context)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device, dtype=torch.bfloat16, generator=generator).to(dtype)

    cache = DynamicCache(config=config)
    cache.update(*(randn(1, shape.kv_heads, context, shape.head_dim) for _ in range(2)), LAYER)
    cache.update_indexer(randn(1, context, shape.index_head_dim), LAYER)
    hidden = randn(steps, 1, 1, shape.hidden)
    positions = torch.arange(context + steps, device=device)[None].expand(3, 1, -1)
    rotary = Qwen4ExpTextRotaryEmbedding(config).to(device)
    cos, sin = (table.to(torch.bfloat16).to(dtype) for table in rotary(hidden[0], positions))
    parameters = inspect.signature(own_attribute(type(attention), "forward")).parameters
    cache_name = next(name for name in CACHE_NAMES if name in parameters)

    def calls() -> Iterator[Callable[[], torch.Tensor]]:
        for number in range(steps):
            known = context + number + 1
            if enabled:
                mask: Any = step_mask(1, 1, known, known - 1, mask_function=causal_mask_function, config=config,
                                      device=device)  # fmt: skip
            else:
                mask = torch.ones(1, 1, 1, known, dtype=torch.bool, device=device)
            tables = cos[:, :known], sin[:, :known]

            def call(token: Any = hidden[number], tables: Any = tables, mask: Any = mask) -> torch.Tensor:
                return attention(token, tables, mask, **{cache_name: cache})[0]

            yield call

    if enabled:
        with hf.enabled(attention):
            yield calls()
    else:
        yield calls()


def _timed(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float, int]:
    """Result, milliseconds of the host, and bytes at the peak beyond what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with stable_topk():
        begin = time.perf_counter()
        result = call()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - begin
    return result, elapsed * 1e3, torch.cuda.max_memory_allocated() - before


def _spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median_ms": statistics.median(ordered),
        "p20_ms": ordered[int(0.2 * len(ordered))],
        "p80_ms": ordered[int(0.8 * len(ordered))],
    }


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of the second."""
    return float((a.float() - b.float()).norm() / b.float().norm())
