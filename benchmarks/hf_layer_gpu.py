"""`python -m benchmarks hf-layer-gpu`: one transformers layer at the released shape on a CUDA GPU, stock and enabled.

Times are those of the host from call to synchronisation, as a caller without graphs has them. Prefill is timed once for
transformers, which takes seconds, and several times for FlashQSA; decode steps go on from a cache of random tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
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
from flashqsa.integrations.hf.masks import step_mask

NAME = "hf-layer-gpu"
RESULTS = ROOT / "benchmarks" / "results" / "hf_layer_gpu.jsonl"
ENGINES = ("transformers", "flashqsa")
LARGEST_ERROR = 0.02
"""Norm of the difference of both engines' bf16 outputs over the norm of one: bf16 scores select a few other blocks."""
LAYER = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192], help="prompt lengths")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 32768, 131072], help="tokens before a step")
    parser.add_argument("--steps", type=int, default=30, help="decode steps of each engine")
    parser.add_argument("--out", type=Path, default=None, help=f"JSON lines; the committed file is {RESULTS.name}")
    parser.add_argument("--commit", default=None, help="commit to record where the checkout has no git")


def run(options: argparse.Namespace) -> int:
    """Measure; a line each on the terminal, all figures in the file."""
    if not torch.cuda.is_available():
        print("hf-layer-gpu: needs a CUDA GPU, found none.", file=sys.stderr)
        return 2
    environment = gpu_environment(options.commit) | {"transformers": installed("transformers")}
    facts = {"environment": environment, "command": command(), "dtype": "bfloat16"}
    lines = []
    with torch.no_grad():
        rows = [prefill(tokens) for tokens in options.tokens]
        layer = SingleLayer(SHAPES["released"], 1).to("cuda", torch.bfloat16)
        rows += [decode(layer, context, options.steps) for context in options.contexts]
    for row in rows:
        lines.append(json.dumps({**facts, **row}))
        print(f"{row['measure']} {row['tokens']}: " + ", ".join(f"{e} {row[e]['median_ms']:.3f} ms" for e in ENGINES))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def prefill(tokens: int, repeats: int = 7) -> dict[str, Any]:
    """A prompt through the layer, without a cache."""
    layer = SingleLayer(SHAPES["released"], tokens, "drifting").to("cuda", torch.bfloat16)
    row: dict[str, Any] = {"measure": "prefill", "tokens": tokens}
    outputs = {}
    for engine, enter in (("transformers", layer.transformers_layer), ("flashqsa", layer.flashqsa_layer)):
        times = []
        for _ in range(1 if engine == "transformers" else 3 + repeats):
            with enter() as call:
                outputs[engine], elapsed, peak = _timed(call)
                times.append(elapsed)
        row[engine] = _spread(times[-repeats:]) | {"peak_gb": round(peak / 1e9, 3)}
    error = _error(outputs)
    if not error < LARGEST_ERROR:
        raise GateError(f"prefill of {tokens} tokens: outputs differ by {error:.3g}")
    return row | {"difference": error}


def decode(layer: SingleLayer, context: int, steps: int, warmups: int = 5) -> dict[str, Any]:
    """Steps of one row after a context of random tokens."""
    generator = torch.Generator("cuda").manual_seed(context)
    shape, config = layer.shape, layer.attention.config

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator)

    kv = [randn(1, shape.kv_heads, context, shape.head_dim) for _ in range(2)]
    raw = randn(1, context, shape.index_head_dim)
    hidden = [randn(1, 1, shape.hidden) for _ in range(warmups + steps)]
    positions = torch.arange(context + len(hidden), device="cuda")[None].expand(3, 1, -1)
    cos, sin = Qwen4ExpTextRotaryEmbedding(config).to("cuda")(hidden[0], positions)
    row: dict[str, Any] = {"measure": "decode step", "tokens": context}
    outputs = {}
    for engine in ENGINES:
        cache = DynamicCache(config=config)
        cache.update(*kv, LAYER)
        cache.update_indexer(raw, LAYER)
        times = []
        for number, token in enumerate(hidden):
            known = context + number + 1
            tables = (cos[:, :known], sin[:, :known])
            if engine == "transformers":
                mask: Any = torch.ones(1, 1, 1, known, dtype=torch.bool, device="cuda")
                result, elapsed, _ = _timed(lambda: layer.attention(token, tables, mask, cache)[0])  # noqa: B023
            else:
                with hf.enabled(layer.attention):
                    step = step_mask(1, 1, known, known - 1, mask_function=causal_mask_function, config=config,
                                     device=token.device)  # fmt: skip
                    result, elapsed, _ = _timed(lambda: layer.attention(token, tables, step, cache)[0])  # noqa: B023
            times.append(elapsed)
            if number == 0:
                outputs[engine] = result
        row[engine] = _spread(times[warmups:])
    error = _error(outputs)
    if not error < 5 * LARGEST_ERROR:  # random keys tell blocks apart by little
        raise GateError(f"a step after {context} tokens: outputs differ by {error:.3g}")
    return row | {"difference": error}


def _timed(call: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float, int]:
    """Result, milliseconds of the host, and bytes at the peak beyond what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin = time.perf_counter()
    with stable_topk():
        result = call()
    torch.cuda.synchronize()
    return result, (time.perf_counter() - begin) * 1e3, torch.cuda.max_memory_allocated() - before


def _spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "median_ms": statistics.median(ordered),
        "p20_ms": ordered[int(0.2 * len(ordered))],
        "p80_ms": ordered[int(0.8 * len(ordered))],
    }


def _error(outputs: dict[str, torch.Tensor]) -> float:
    theirs, ours = (outputs[engine].float() for engine in ENGINES)
    return float((theirs - ours).norm() / theirs.norm())
