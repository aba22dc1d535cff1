"""`python -m benchmarks gpu-stack`: a step of twelve QSA layers, projections included, on one CUDA GPU.

The layers of the released checkpoint one after another, each with caches and weights of its own: the projection of
queries, gates, keys and values, that of the indexer, preparation, selection, attention, the output projection, and the
residual. Once with our kernels and once with vLLM's, in the same harness: the same products of the same tensors, the
same K, V and block keys; only rings are each engine's own. What lies between these layers in the model, and the sum
over tensor-parallel ranks, is not part of it. Decode is one CUDA graph, as engines run it; prefill is launched call by
call. Before that sampled rows of the first and the last layer pass the gate of gpu-decode, and what both engines
attend in the first layer is compared.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

from benchmarks.environment import ROOT, command
from benchmarks.gates import GateError
from benchmarks.gpu_gates import check_attention, check_selection, sampled_rows
from benchmarks.gpu_prepare import RING_TOKENS, PeerStep
from benchmarks.gpu_timing import Ceilings, Timer, gpu_environment
from benchmarks.gpu_workload import (
    BLOCK,
    BUDGET,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    MROPE,
    PAGE,
    ROTARY,
    TOPK,
    drifting_rows,
    normed,
    packed_pool,
    randn,
    shuffled_pages,
)
from flashqsa import LayerCache, Selection, attend, plan_step, prepare, select_blocks
from flashqsa.preparation import NormWeights
from flashqsa.results import Prepared
from flashqsa.rope import RopeTable

NAME = "gpu-stack"
RESULTS = ROOT / "benchmarks" / "results" / "gpu_stack.jsonl"
LAYERS, HIDDEN = 12, 2560
KEEP = 0.95
"""What a row of a prefill keeps of the one before it."""
MOST_DECODE_ROWS = 16
WORKSPACE_BYTES = 256 << 20
LARGEST_DIFFERENCE = 0.4
"""Of what both engines attend in the first layer, over its norm: index queries of bf16 select some other blocks."""


@dataclass(frozen=True)
class Shape:
    """One row of the table."""

    requests: int
    rows: int
    context: int
    heads: tuple[int, int]

    def __str__(self) -> str:
        return "{}/{} heads, {} x {} rows at {}".format(*self.heads, self.requests, self.rows, self.context)

    @property
    def decode(self) -> bool:
        """Whether engines capture the step and select by its decode form."""
        return self.rows <= MOST_DECODE_ROWS


SHAPES = [
    Shape(requests, rows, 131072, heads)
    for heads in ((24, 2), (6, 1))
    for requests, rows in ((1, 1), (32, 1), (1, 8192))
]


def weight_numbers(heads: tuple[int, int]) -> int:
    """Weights of a layer's projections."""
    q_heads, kv_heads = heads
    widths = (2 * q_heads + 2 * kv_heads) * HEAD_DIM + (INDEX_HEADS + 1) * INDEX_DIM
    return HIDDEN * (widths + q_heads * HEAD_DIM)


def cache_bytes(shape: Shape) -> int:
    """K, V and block keys of a layer."""
    return shape.requests * (shape.context * shape.heads[1] * 4 * HEAD_DIM + shape.context // BLOCK * 2 * INDEX_DIM)


@dataclass(frozen=True)
class Layer:
    """Weights and caches of a layer; `pool` is what `cache` has its K and V in."""

    qkv: torch.Tensor
    index: torch.Tensor
    output: torch.Tensor
    norms: NormWeights
    cache: LayerCache
    pool: torch.Tensor

    @classmethod
    def random(cls, shape: Shape, pages: int, generator: torch.Generator) -> Layer:
        """A layer whose caches hold random tokens, the ring the last of them."""
        q_heads, kv_heads = shape.heads
        pool = packed_pool(pages, kv_heads, generator)
        k, v = pool.split(HEAD_DIM, dim=-1)
        positions = torch.arange(shape.context - RING_TOKENS, shape.context, device=generator.device) - shape.rows
        ring_positions = positions.new_empty(shape.requests, RING_TOKENS, 3)
        ring_positions[:, positions % RING_TOKENS] = positions[:, None]
        cache = LayerCache(
            k, v, normed(randn(generator, pages, PAGE // BLOCK, INDEX_DIM)),
            randn(generator, shape.requests, RING_TOKENS, INDEX_DIM), ring_positions,
        )  # fmt: skip
        widths = (2 * q_heads + 2 * kv_heads) * HEAD_DIM, (INDEX_HEADS + 1) * INDEX_DIM
        qkv, index = (randn(generator, width, HIDDEN) * HIDDEN**-0.5 for width in widths)
        output = randn(generator, HIDDEN, q_heads * HEAD_DIM) * (q_heads * HEAD_DIM) ** -0.5
        norms = NormWeights(*(0.1 * randn(generator, dim) for dim in (HEAD_DIM, HEAD_DIM, INDEX_DIM, INDEX_DIM)))
        return cls(qkv, index, output, norms, cache, pool)


class Stack:
    """Layers, hidden states of a step, and the plan."""

    def __init__(self, shape: Shape, generator: torch.Generator, layers: int = LAYERS) -> None:
        self.shape, device = shape, generator.device
        table, pages = shuffled_pages(shape.requests, shape.context, generator)
        self.layers = [Layer.random(shape, pages, generator) for _ in range(layers)]
        keep = 0.0 if shape.decode else KEEP
        requests = [drifting_rows(shape.rows, HIDDEN, keep, generator) for _ in range(shape.requests)]
        self.hidden = torch.cat(requests).to(torch.bfloat16)
        own = torch.arange(shape.rows, device=device).repeat(shape.requests) + shape.context - shape.rows
        self.positions = own.expand(3, -1).contiguous()
        self.rope = RopeTable.build(
            {"rope_theta": 1e7}, rotary_dim=ROTARY, num_positions=shape.context, mrope_section=MROPE, device=device,
            dtype=torch.bfloat16,
        )  # fmt: skip
        starts = torch.arange(shape.requests + 1, device=device) * shape.rows
        self.plan = plan_step(
            starts.to(torch.int32), torch.full((shape.requests,), shape.context, dtype=torch.int32, device=device),
            table, page_tokens=PAGE, block_tokens=BLOCK, topk_blocks=TOPK, max_query_len=shape.rows,
            max_seq_len=shape.context, num_pages=pages, num_rows=own.shape[0], ring_tokens=RING_TOKENS,
            ring_ids=torch.arange(shape.requests, dtype=torch.int32, device=device),
        )  # fmt: skip
        self.attended = torch.zeros(own.shape[0], shape.heads[0], HEAD_DIM, device=device, dtype=torch.bfloat16)

    def run(self, attended: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """A step: [T, hidden] after the last layer.

        Args:
            attended: Of a layer's number and its two projections, [T, Hq, D] what it attends.
        """
        hidden = self.hidden
        for number, layer in enumerate(self.layers):
            heads = attended(number, linear(hidden, layer.qkv), linear(hidden, layer.index))
            hidden = hidden + linear(heads.flatten(1), layer.output)
        return hidden

    def flashqsa(self) -> torch.Tensor:
        """A step with our kernels."""
        return self.run(lambda *projected: self.flashqsa_layer(*projected)[-1])

    def projections(self) -> torch.Tensor:
        """What both engines have in common."""
        return self.run(lambda *_: self.attended)

    def flashqsa_layer(
        self, number: int, qkv: torch.Tensor, index_qk: torch.Tensor
    ) -> tuple[Prepared, Selection, torch.Tensor]:
        """Preparation, selection and attention of a layer, as a caller runs them."""
        (q_heads, kv_heads), layer, count = self.shape.heads, self.layers[number], qkv.shape[0]
        heads = qkv.view(count, -1, HEAD_DIM)
        k, v = heads[:, 2 * q_heads :].split(kv_heads, dim=1)
        prepared = prepare(
            heads[:, : 2 * q_heads].view(count, q_heads, 2 * HEAD_DIM), k, v,
            index_qk.view(count, INDEX_HEADS + 1, INDEX_DIM), self.positions, self.rope, layer.norms, layer.cache,
            self.plan,
        )  # fmt: skip
        selection = select_blocks(prepared.index_q, layer.cache, self.plan, workspace_bytes=WORKSPACE_BYTES)
        return prepared, selection, attend(prepared.q, layer.cache, selection, self.plan, gate=prepared.gate)

    def gate_correctness(self) -> tuple[dict[str, float], Selection]:
        """Sampled rows of the first and the last layer beside float64 and fp32, and the last layer's selection."""
        rows, found = sampled_rows(self.hidden.shape[0]), {"selection": 0.0, "output": 0.0}
        last: list[Selection] = []

        def checked(number: int, *projected: torch.Tensor) -> torch.Tensor:
            prepared, selection, out = self.flashqsa_layer(number, *projected)
            if number in (0, len(self.layers) - 1):
                cache = self.layers[number].cache
                bound = check_selection(prepared.index_q, cache, self.plan, selection, rows)
                error = check_attention(prepared.q, prepared.gate, cache, self.plan, selection, out, rows)
                found.update(selection=max(bound, found["selection"]), output=max(error, found["output"]))
                last[:] = [selection]
            return out

        self.run(checked)
        return found, last[0]

    def floor_us(self, selection: Selection, ceilings: Ceilings) -> float:
        """Decode: weights, keys and selected K and V once, at the copy rate. Prefill: operations at the product's."""
        shape, layers = self.shape, len(self.layers)
        if shape.decode:
            requests = selection.block_ids.view(shape.requests, -1)
            attended = sum(request.unique().numel() for request in requests) * BLOCK
            keys = shape.requests * (shape.context // BLOCK) * INDEX_DIM
            numbers = weight_numbers(shape.heads) + keys + attended * shape.heads[1] * 2 * HEAD_DIM
            return layers * 2 * numbers / ceilings.copy_bytes_per_us
        count = self.hidden.shape[0]
        scored = int(self.plan.visible_blocks.to(torch.int64).sum())
        tail = self.plan.positions + 1 - self.plan.visible_blocks * BLOCK
        attended = int((selection.block_counts * BLOCK + tail).sum())
        flop = 2 * count * weight_numbers(shape.heads) + 2 * scored * INDEX_HEADS * INDEX_DIM
        return layers * (flop + 4 * attended * shape.heads[0] * HEAD_DIM) / ceilings.matmul_flop_per_us


class Peer:
    """vLLM's operators on the tensors of a stack, with rings of their own that hold the same."""

    def __init__(self, vllm: Any, stack: Stack) -> None:
        shape, count = stack.shape, stack.hidden.shape[0]
        self.vllm, self.stack = vllm, stack
        self.step = PeerStep(shape.requests, shape.rows, shape.context, stack.plan)
        self.rings = [self._ring(layer.cache) for layer in stack.layers]
        device = stack.hidden.device
        self.index_q = torch.empty(count, INDEX_HEADS, INDEX_DIM, dtype=torch.bfloat16, device=device)
        self.chosen = torch.empty(count, TOPK, dtype=torch.int32, device=device)
        self.packed = torch.empty(count, BUDGET + BLOCK, dtype=torch.int32, device=device)
        self.out = torch.empty_like(stack.attended)

    def _ring(self, cache: LayerCache) -> torch.Tensor:
        ring = self.step.ring()
        assert cache.ring is not None
        assert cache.ring_positions is not None
        ring[1:, :, 0, :INDEX_DIM] = cache.ring
        ring[1:, :, 0, INDEX_DIM:] = cache.ring_positions.view(torch.bfloat16)
        return ring

    def layer(self, number: int, qkv: torch.Tensor, index_qk: torch.Tensor) -> torch.Tensor:
        """Preparation, selection, expansion and attention of a layer."""
        stack, ops, plan = self.stack, self.vllm.qsa_indexer, self.stack.plan
        layer, shape = stack.layers[number], stack.shape
        assert layer.cache.block_keys is not None
        keys = layer.cache.block_keys.unsqueeze(2)
        width = INDEX_HEADS * INDEX_DIM
        q, gate = self.step.prepare(
            self.vllm, index_qk[:, :width], index_qk[:, width:], qkv, (stack.positions, stack.rope), layer.norms,
            self.index_q, self.rings[number], (keys, layer.pool),
        )  # fmt: skip
        if shape.decode:
            ops.qsa_select_paged_decode(
                self.index_q, keys, plan.page_table, plan.visible_blocks, BUDGET, BLOCK, shape.rows, self.chosen
            )
        else:
            ops.qsa_select_paged_prefill(
                self.index_q, keys, plan.page_table, plan.query_starts, plan.visible_blocks, BUDGET, BLOCK, shape.rows,
                self.chosen, shape.context,
            )  # fmt: skip
        ops.expand_qsa_block_indices(self.chosen, plan.positions, plan.visible_blocks, BLOCK, BUDGET, self.packed)
        self.vllm.qsa.qsa_sparse_paged_attention(
            q, layer.cache.k_pages, layer.cache.v_pages, self.packed, plan.page_table, plan.request_ids,
            not shape.decode, self.out, output_gate=gate,
        )  # fmt: skip
        return self.out

    def all(self) -> torch.Tensor:
        """A step with vLLM's kernels."""
        return self.stack.run(self.layer)

    def difference(self) -> float:
        """Norm of what both engines attend differently in the first layer, over its norm.

        Raises:
            GateError: They attend other things.
        """
        stack, first = self.stack, self.stack.layers[0]
        projected = linear(stack.hidden, first.qkv), linear(stack.hidden, first.index)
        theirs = self.layer(0, *projected).float()
        ours = stack.flashqsa_layer(0, *projected)[-1].float()
        found = float((ours - theirs).norm() / theirs.norm())
        if not found < LARGEST_DIFFERENCE:
            raise GateError(f"vLLM's operators attend other things, {found:.3g} of their norm")
        return found


def measure(
    shape: Shape, vllm: Any, timer: Timer, ceilings: Ceilings, generator: torch.Generator, layers: int = LAYERS
) -> dict[str, Any]:
    """One row of the table.

    Raises:
        GateError: A gate does not hold.
    """
    gc.collect()
    torch.cuda.empty_cache()
    stack = Stack(shape, generator, layers)
    errors, selection = stack.gate_correctness()
    row: dict[str, Any] = {"measure": "gpu stack", "name": str(shape), **asdict(shape), "layers": layers}
    row |= {"errors": errors, "difference": None, "floor_us": stack.floor_us(selection, ceilings)}
    contenders: dict[str, Callable[[], object]] = {"flashqsa": stack.flashqsa, "projections": stack.projections}
    if vllm is not None:
        peer = Peer(vllm, stack)
        row["difference"] = peer.difference()
        contenders["vllm"] = peer.all
    return row | {"times": timer.interleaved(contenders, graph=shape.decode)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument(
        "--out", type=Path, default=None, help="JSON lines to write; the committed file is " + RESULTS.name
    )
    parser.add_argument("--shapes", default="", help="only shapes whose name holds this, e.g. '6/1'")
    parser.add_argument("--repeats", type=int, default=15, help="timed rounds")
    parser.add_argument("--commit", default=None, help="commit to record where the checkout has no git")


def run(options: argparse.Namespace) -> int:
    """Measure every shape; a line each on the terminal, all figures in the file. 1 when a gate did not hold."""
    if not torch.cuda.is_available():
        print("gpu-stack: needs a CUDA GPU, found none.", file=sys.stderr)
        return 2
    vllm = importlib.import_module("peer_vllm").load() if importlib.util.find_spec("peer_vllm") else None
    timer, generator = Timer(options.repeats), torch.Generator("cuda").manual_seed(0)
    ceilings = Ceilings.measure(timer)
    facts = {"environment": gpu_environment(options.commit), "command": command(), **asdict(ceilings)}
    lines, failed = [], False
    with torch.no_grad():
        for shape in (shape for shape in SHAPES if options.shapes in str(shape)):
            try:
                row = measure(shape, vllm, timer, ceilings, generator)
            except GateError as error:
                failed = True
                print(f"gpu-stack: {shape}: {error}", file=sys.stderr, flush=True)
                continue
            lines.append(json.dumps({**facts, **row}))
            print(told(row), flush=True)
            if options.out:
                options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return int(failed)


def told(row: dict[str, Any]) -> str:
    """A row in one line."""
    medians = {name: spread["median_us"] / 1e3 for name, spread in row["times"].items()}
    text = f"{row['name']:36s} floor {row['floor_us'] / 1e3:.3f} ms, "
    text += ", ".join(f"{name} {ms:.3f}" for name, ms in medians.items())
    if "vllm" in medians:
        text += f"; ratio {medians['flashqsa'] / medians['vllm']:.2f}, first layers differ by {row['difference']:.3f}"
    return text
