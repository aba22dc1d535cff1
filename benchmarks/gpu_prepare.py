"""`python -m benchmarks gpu-prepare`: preparation on one CUDA GPU, beside vLLM and the floor.

Both run MRoPE with the same bf16 table and write bf16 caches. vLLM's operator copies the gates out; ours hands them on
as a view of the projection unless a buffer for them is given, so it is timed in both ways.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import ROOT, command
from benchmarks.gpu_timing import Ceilings, Timer, gpu_environment
from benchmarks.gpu_workload import (
    BLOCK,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    KV_HEADS,
    MROPE,
    PAGE,
    Q_HEADS,
    ROTARY,
    TOPK,
    keys_and_values,
    randn,
    shuffled_pages,
)
from flashqsa import LayerCache, StepPlan, plan_step, prepare
from flashqsa.preparation import NormWeights
from flashqsa.results import Prepared
from flashqsa.rope import RopeTable

NAME = "gpu-prepare"
RESULTS = ROOT / "benchmarks" / "results" / "gpu_prepare.jsonl"
RING_TOKENS = BLOCK
Rope = tuple[torch.Tensor, RopeTable]
"""[3, T] positions and the table."""
LARGEST_ERROR = 2**-7
"""Of a bf16 result beside the torch backend's, as a share of the largest: one place of bf16."""


@dataclass(frozen=True)
class Shape:
    """One row of the table."""

    requests: int
    rows: int
    context: int

    def __str__(self) -> str:
        return f"{self.requests} x {self.rows} rows at {self.context}"


SHAPES = [
    Shape(1, 1, 131072), Shape(32, 1, 131072), Shape(128, 1, 32768), Shape(256, 1, 8192), Shape(32, 4, 32768),
    Shape(1, 8192, 131072), Shape(8, 1024, 8192),
]  # fmt: skip


class Workload:
    """Projections of a step, caches and the plan."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        self.shape, self.count = shape, shape.requests * shape.rows
        table, pages = shuffled_pages(shape.requests, shape.context, generator)
        k_pages, v_pages = keys_and_values(pages, KV_HEADS, generator)
        self.cache = LayerCache(
            k_pages, v_pages, randn(generator, pages, PAGE // BLOCK, INDEX_DIM),
            randn(generator, shape.requests, RING_TOKENS, INDEX_DIM),
            torch.zeros(shape.requests, RING_TOKENS, 3, dtype=torch.int64, device=generator.device),
        )  # fmt: skip
        self.qkv = randn(generator, self.count, (2 * Q_HEADS + 2 * KV_HEADS) * HEAD_DIM)
        heads = self.qkv.view(self.count, -1, HEAD_DIM)
        self.q_gate = heads[:, : 2 * Q_HEADS].view(self.count, Q_HEADS, 2 * HEAD_DIM)
        self.k, self.v = heads[:, 2 * Q_HEADS :].split(KV_HEADS, dim=1)
        self.index_qk = randn(generator, self.count, INDEX_HEADS + 1, INDEX_DIM)
        own = torch.arange(shape.rows, device=generator.device).repeat(shape.requests) + shape.context - shape.rows
        self.positions = own.expand(3, -1).contiguous()
        self.rope = RopeTable.build(
            {"rope_theta": 1e7}, rotary_dim=ROTARY, num_positions=shape.context, mrope_section=MROPE,
            device=generator.device, dtype=torch.bfloat16,
        )  # fmt: skip
        self.norms = NormWeights(*(randn(generator, dim) for dim in (HEAD_DIM, HEAD_DIM, INDEX_DIM, INDEX_DIM)))
        starts = torch.arange(shape.requests + 1, device=generator.device) * shape.rows
        self.plan = plan_step(
            starts.to(torch.int32),
            torch.full((shape.requests,), shape.context, dtype=torch.int32, device=generator.device), table,
            page_tokens=PAGE, block_tokens=BLOCK, topk_blocks=TOPK, max_query_len=shape.rows,
            max_seq_len=shape.context, num_pages=pages, num_rows=self.count, ring_tokens=RING_TOKENS,
            ring_ids=torch.arange(shape.requests, dtype=torch.int32, device=generator.device),
        )  # fmt: skip
        q = self.qkv.new_empty(self.count, Q_HEADS, HEAD_DIM)
        index_q = self.qkv.new_empty(self.count, INDEX_HEADS, INDEX_DIM)
        self.views = Prepared(index_q=index_q, q=q, gate=self.q_gate[..., HEAD_DIM:])
        self.copies = Prepared(index_q=index_q, q=q, gate=torch.empty_like(q))

    def prepare(self, out: Prepared, backend: str = "auto") -> Prepared:
        """Preparation, as a caller runs it."""
        return prepare(
            self.q_gate, self.k, self.v, self.index_qk, self.positions, self.rope, self.norms, self.cache, self.plan,
            out=out, backend=backend,
        )  # fmt: skip

    def floor_bytes(self) -> int:
        """Numbers that are read and written once each, without gates, times 2 bytes."""
        main = (2 * Q_HEADS + 4 * KV_HEADS) * HEAD_DIM
        index = (2 * INDEX_HEADS + 1) * INDEX_DIM + INDEX_DIM // BLOCK
        return 2 * self.count * (main + index)

    def gate_correctness(self) -> dict[str, float]:
        """Outputs and what the caches hold, beside the torch backend."""
        results = []
        for backend in ("torch", "auto"):
            for name in ("index_q", "q"):
                getattr(self.views, name).fill_(float("nan"))
            self.prepare(self.views, backend)
            slots = self.plan.slot_ids
            stored = self.cache.k_pages[slots // PAGE, slots % PAGE]
            blocks = self.plan.closed_block_slot_ids[self.plan.closed_block_slot_ids >= 0]
            keys = self.cache.block_keys[blocks // (PAGE // BLOCK), blocks % (PAGE // BLOCK)]
            results.append([x.float().clone() for x in (self.views.q, self.views.index_q, stored, keys)])
        worst = 0.0
        for wanted, got in zip(*results, strict=True):
            if wanted.numel():
                error = float((wanted - got).abs().max() / wanted.abs().max())
                assert error <= LARGEST_ERROR, f"{self.shape}: differs from the torch backend by {error}"
                worst = max(worst, error)
        return {"error": worst}


class PeerStep:
    """What vLLM's operator wants of a step beside the plan, the same for all layers.

    Args:
        requests: Requests of the step.
        rows: Rows of each.
        context: Tokens of each, these rows included.
        plan: The step.
    """

    def __init__(self, requests: int, rows: int, context: int, plan: StepPlan) -> None:
        self.plan, self.requests, device = plan, requests, plan.device
        numbers = torch.arange(requests * rows, device=device)
        self.positions, request = plan.positions.contiguous(), numbers // rows
        self.rings = torch.arange(1, requests + 1, device=device, dtype=torch.int32)[:, None]
        last = numbers + RING_TOKENS >= plan.query_starts[request + 1]
        self.ring_slots = torch.where(last, (request + 1) * RING_TOKENS + self.positions % RING_TOKENS, -1)
        closing = max(context // BLOCK - (context - rows) // BLOCK, 1)
        pairs = [torch.arange(n, device=device) for n in (requests, closing)]
        items = torch.stack([pairs[0].repeat_interleave(closing), pairs[1].repeat(requests)], 1)
        self.items = items.to(torch.int32).contiguous()

    def ring(self) -> torch.Tensor:
        """An empty ring of a layer: behind each raw key its positions as int64, in units of bf16."""
        shape = (self.requests + 1, RING_TOKENS, 1, INDEX_DIM + 3 * 4)
        return torch.zeros(shape, device=self.plan.device, dtype=torch.bfloat16)

    def prepare(
        self, vllm: Any, index_q: torch.Tensor, index_k: torch.Tensor, qkv: torch.Tensor, rope: Rope,
        norms: NormWeights, out: torch.Tensor, ring: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Queries and gates of the main attention; index queries go to `out`, block keys, K and V to `caches`."""
        positions, table = rope
        keys, pool = caches
        return vllm.qsa_prepare.qsa_prepare(
            index_q, index_k, positions, table.cos_sin, norms.index_q, norms.index_k, norms.eps, out, ring,
            self.ring_slots, self.rings, self.plan.query_starts, self.positions, keys, self.plan.closed_block_slot_ids,
            self.items, compress_ratio=BLOCK, mrope_section=list(MROPE), rope_pos_offset=INDEX_DIM, main_qkv=qkv,
            main_q_norm_weight=norms.q, main_k_norm_weight=norms.k, main_eps=norms.eps, main_kv_cache=pool,
            main_slot_mapping=self.plan.slot_ids, main_k_scale=1.0, main_v_scale=1.0,
        )  # fmt: skip


def peer_call(vllm: Any, work: Workload) -> Callable[[], object]:
    """vLLM's operator on the same projections, with rings and work lists of its own making."""
    shape, count = work.shape, work.count
    step = PeerStep(shape.requests, shape.rows, shape.context, work.plan)
    index_q, index_k = work.index_qk[:, :-1].reshape(count, -1), work.index_qk[:, -1].contiguous()
    pool = work.qkv.new_zeros(work.cache.k_pages.shape[0], KV_HEADS, PAGE, 2 * HEAD_DIM).transpose(1, 2)
    caches = torch.zeros_like(work.cache.block_keys).unsqueeze(2), pool
    out, ring = torch.empty_like(work.views.index_q), step.ring()
    return lambda: step.prepare(
        vllm, index_q, index_k, work.qkv, (work.positions, work.rope), work.norms, out, ring, caches
    )


def measure(shape: Shape, vllm: Any, timer: Timer, ceilings: Ceilings, generator: torch.Generator) -> dict[str, Any]:
    """One row of the table."""
    torch.cuda.empty_cache()
    work = Workload(shape, generator)
    row: dict[str, Any] = {"measure": "gpu prepare", "name": str(shape), **asdict(shape), **work.gate_correctness()}
    row["floor_us"] = work.floor_bytes() / ceilings.copy_bytes_per_us
    contenders: dict[str, Callable[[], object]] = {
        "flashqsa": lambda: work.prepare(work.views),
        "flashqsa, gates copied": lambda: work.prepare(work.copies),
    }
    if vllm is not None:
        contenders["vllm"] = peer_call(vllm, work)
    return row | {"times": timer.interleaved(contenders)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument(
        "--out", type=Path, default=None, help="JSON lines to write; the committed file is " + RESULTS.name
    )
    parser.add_argument("--commit", default=None, help="commit to record where the checkout has no git")


def run(options: argparse.Namespace) -> int:
    """Measure every shape; a line each on the terminal, all figures in the file."""
    if not torch.cuda.is_available():
        print("gpu-prepare: needs a CUDA GPU, found none.", file=sys.stderr)
        return 2
    peer = importlib.util.find_spec("peer_vllm")
    vllm = importlib.import_module("peer_vllm").load(with_topk=False) if peer else None
    timer, generator = Timer(), torch.Generator("cuda").manual_seed(0)
    ceilings = Ceilings.measure(timer)
    facts = {"environment": gpu_environment(options.commit), "command": command(), **asdict(ceilings)}
    lines = []
    for shape in SHAPES:
        row = measure(shape, vllm, timer, ceilings, generator)
        lines.append(json.dumps({**facts, **row}))
        medians = {name: spread["median_us"] for name, spread in row["times"].items()}
        print(f"{row['name']:28s} floor {row['floor_us']:6.1f} us, "
              + ", ".join(f"{name} {us:.1f}" for name, us in medians.items()), flush=True)  # fmt: skip
        if options.out:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0
