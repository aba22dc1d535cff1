"""`python -m benchmarks gpu-prefill`: selection and attention of long chunks on one CUDA GPU.

Beside vLLM and the floor. Prefill by context, with index queries that drift so that neighbours select alike; attention
alone at the heads of a tensor-parallel rank, for decode, verification and prefill, with rows that exchange some
blocks; and a curve over that share. vLLM gets these blocks in no order, as its own selection leaves them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import ROOT, command
from benchmarks.gpu_gates import check_attention, check_selection, sampled_rows
from benchmarks.gpu_timing import Ceilings, Timer, gpu_environment
from benchmarks.gpu_workload import (
    BLOCK,
    BUDGET,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    PAGE,
    TOPK,
    drifting,
    keys_and_values,
    normed,
    randn,
    shuffled_pages,
    sliding,
)
from flashqsa import LayerCache, Selection, attend, plan_step, select_blocks

NAME = "gpu-prefill"
RESULTS = ROOT / "benchmarks" / "results" / "gpu_prefill.jsonl"
KEEP = 0.95


@dataclass(frozen=True)
class Shape:
    """One row of a table; `churn` None lets the index queries choose the blocks."""

    requests: int
    rows: int
    context: int
    heads: tuple[int, int] = (24, 2)
    churn: float | None = None
    keep: float = KEEP
    fp8_index: bool = False

    def __str__(self) -> str:
        how = f"keep {self.keep}" if self.churn is None else f"churn {self.churn}"
        heads = "{}/{}".format(*self.heads)
        return f"{heads} {self.requests} x {self.rows} at {self.context}, {how}{', fp8 index' * self.fp8_index}"


PREFILL = [
    Shape(1, 8192, 8192), Shape(1, 8192, 32768), Shape(1, 8192, 131072), Shape(1, 8192, 524288),
    Shape(1, 8192, 131072, keep=0.0), Shape(1, 8192, 131072, fp8_index=True), Shape(8, 1024, 8192),
]  # fmt: skip
HEADS = [
    Shape(requests, rows, context, heads=heads, churn=churn)
    for heads in ((24, 2), (12, 1), (6, 1), (3, 1))
    for requests, rows, context, churn in (
        *((n, 1, 131072, 0.0) for n in (1, 32, 128)),
        *((32, n, 65536, 0.05) for n in (4, 8, 16)),
        *((1, 8192, 131072, share) for share in (0.05, 0.1, 0.3)),
    )
]
CURVE = [Shape(1, 8192, 131072, churn=share) for share in (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)]
TABLES = {"prefill": PREFILL, "heads": HEADS, "curve": CURVE}


class Workload:
    """Random tensors of one shape."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        self.shape, count = shape, shape.requests * shape.rows
        self.table, pages = shuffled_pages(shape.requests, shape.context, generator)
        self.index_dtype = torch.float8_e4m3fn if shape.fp8_index else torch.bfloat16
        chosen_by_queries = shape.churn is None
        keys = torch.empty(pages, PAGE // BLOCK, INDEX_DIM, dtype=torch.bfloat16, device=generator.device)
        if chosen_by_queries:
            keys = normed(keys.normal_(generator=generator))
        k, v = keys_and_values(pages, shape.heads[1], generator)
        self.cache = LayerCache(k, v, keys.to(self.index_dtype), None, None)
        self.q, self.gate = (randn(generator, count, shape.heads[0], HEAD_DIM) for _ in range(2))
        self.out = torch.empty_like(self.q)
        device = generator.device
        starts = torch.arange(shape.requests + 1, device=device) * shape.rows
        self.plan = plan_step(
            starts.to(torch.int32),
            torch.full((shape.requests,), shape.context, dtype=torch.int32, device=device), self.table,
            page_tokens=PAGE, block_tokens=BLOCK, topk_blocks=TOPK, max_query_len=shape.rows,
            max_seq_len=shape.context, num_pages=pages, num_rows=count,
        )  # fmt: skip
        if chosen_by_queries:
            queries = [drifting(shape.rows, shape.keep, generator) for _ in range(shape.requests)]
            self.index_q = torch.cat(queries).to(self.index_dtype)
            self.selection = select_blocks(self.index_q, self.cache, self.plan)
            self.unordered = torch.empty_like(self.selection.block_ids)
        else:
            blocks = (shape.context - shape.rows) // BLOCK
            given = [sliding(shape.rows, blocks, shape.churn or 0.0, generator) for _ in range(shape.requests)]
            self.unordered = torch.cat(given)
            self.selection = Selection(
                self.unordered.sort(dim=1).values, torch.full_like(self.plan.visible_blocks, TOPK), None,
                self.plan.visible_blocks.clone(), self.plan.request_ids.clone(), None,
            )  # fmt: skip

    def select(self) -> None:
        """Selection, as a caller runs it."""
        select_blocks(self.index_q, self.cache, self.plan, out=self.selection)

    def attend(self, row_exact: bool = False) -> None:
        """Attention, as a caller runs it."""
        attend(self.q, self.cache, self.selection, self.plan, gate=self.gate, out=self.out, row_exact=row_exact)

    def gate_correctness(self) -> dict[str, float]:
        """Sampled rows beside float64 and fp32."""
        rows, found = sampled_rows(self.q.shape[0]), {}
        if self.shape.churn is None:
            self.selection.block_ids.fill_(-7)
            self.select()
            found["selection"] = check_selection(self.index_q, self.cache, self.plan, self.selection, rows)
        self.out.fill_(float("nan"))
        self.attend()
        found["output"] = check_attention(self.q, self.gate, self.cache, self.plan, self.selection, self.out, rows)
        return found

    def neighbour_overlap(self) -> float:
        """Share of its blocks that a row has in common with the row before it, averaged over sampled rows."""
        if self.shape.rows == 1:
            return 1.0
        ids = self.selection.block_ids
        counts = self.selection.block_counts
        pairs = [row for row in sampled_rows(ids.shape[0] - 1, 64) if (row + 1) % self.shape.rows and counts[row + 1]]
        shares = [torch.isin(ids[row + 1, : counts[row + 1]], ids[row, : counts[row]]).float().mean() for row in pairs]
        return float(torch.stack(shares).mean())

    def attended_tokens(self) -> int:
        """Tokens that all rows attend in all."""
        tail = self.plan.positions + 1 - self.plan.visible_blocks * BLOCK
        return int((self.selection.block_counts * BLOCK + tail).sum())

    def floors_us(self, ceilings: Ceilings) -> dict[str, float]:
        """The larger of what must move and what must be multiplied, for each stage."""
        shape = self.shape
        token_bytes = shape.heads[1] * 2 * HEAD_DIM * 2
        if shape.rows <= 16:
            requests = self.selection.block_ids.view(shape.requests, -1)
            union = sum(request.unique().numel() for request in requests) * BLOCK
            return {"attend": union * token_bytes / ceilings.copy_bytes_per_us}
        floors = {"attend": 4 * self.attended_tokens() * shape.heads[0] * HEAD_DIM / ceilings.matmul_flop_per_us}
        if shape.churn is None:
            scored = int(self.plan.visible_blocks.to(torch.int64).sum())
            peak = ceilings.matmul_flop_per_us * (2 if shape.fp8_index else 1)
            floors["select"] = 2 * scored * INDEX_HEADS * INDEX_DIM / peak
        return floors


def peer_calls(vllm: Any, work: Workload) -> dict[str, Callable[[], object]]:
    """vLLM's operators on the tensors of a workload."""
    plan, shape, ops = work.plan, work.shape, vllm.qsa_indexer
    packed = torch.empty(work.q.shape[0], BUDGET + BLOCK, dtype=torch.int32, device=work.q.device)
    out, prefill = torch.empty_like(work.q), shape.rows > 16
    calls: dict[str, Callable[[], object]] = {}
    if shape.churn is None and vllm.with_topk:
        keys = work.cache.block_keys.unsqueeze(2)
        calls["select"] = lambda: ops.qsa_select_paged_prefill(
            work.index_q, keys, plan.page_table, plan.query_starts, plan.visible_blocks, BUDGET, BLOCK, shape.rows,
            work.unordered, shape.context,
        )  # fmt: skip
        calls["select"]()
    elif shape.churn is None:
        work.unordered.copy_(work.selection.block_ids)
    calls["expand"] = lambda: ops.expand_qsa_block_indices(
        work.unordered, plan.positions, plan.visible_blocks, BLOCK, BUDGET, packed
    )
    calls["expand"]()
    calls["attend"] = lambda: vllm.qsa.qsa_sparse_paged_attention(
        work.q,
        work.cache.k_pages,
        work.cache.v_pages,
        packed,
        plan.page_table,
        plan.request_ids,
        prefill,
        out,
        output_gate=work.gate,
    )
    return calls


def measure(shape: Shape, vllm: Any, timer: Timer, ceilings: Ceilings, generator: torch.Generator) -> dict[str, Any]:
    """One row of a table."""
    torch.cuda.empty_cache()
    work = Workload(shape, generator)
    row: dict[str, Any] = {"name": str(shape), **asdict(shape), "errors": work.gate_correctness()}
    row |= {"overlap": work.neighbour_overlap(), "floors_us": work.floors_us(ceilings)}
    calls: dict[str, Callable[[], object]] = {"flashqsa attend": work.attend}
    if shape.churn is None:
        calls["flashqsa select"] = work.select
    if shape.rows > 1:
        calls["flashqsa row_exact"] = lambda: work.attend(row_exact=True)
    if vllm is not None:
        calls |= {f"vllm {stage}": call for stage, call in peer_calls(vllm, work).items()}
    row["times"] = timer.interleaved(calls, graph=shape.rows <= 16)
    flop = 4 * work.attended_tokens() * shape.heads[0] * HEAD_DIM
    row["useful_tflops"] = flop / row["times"]["flashqsa attend"]["median_us"] / 1e6
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument(
        "--out", type=Path, default=None, help="JSON lines to write; the committed file is " + RESULTS.name
    )
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES), help="which tables")
    parser.add_argument("--shapes", default="", help="only shapes whose name holds this, e.g. '24/2'")
    parser.add_argument("--repeats", type=int, default=10, help="timed rounds")
    parser.add_argument("--without-topk", action="store_true", help="leave vLLM's compiled top-k out")
    parser.add_argument("--commit", default=None, help="commit to record where the checkout has no git")


def run(options: argparse.Namespace) -> int:
    """Measure every shape; a line each on the terminal, all figures in the file."""
    if not torch.cuda.is_available():
        print("gpu-prefill: needs a CUDA GPU, found none.", file=sys.stderr)
        return 2
    vllm = None
    if importlib.util.find_spec("peer_vllm"):
        vllm = importlib.import_module("peer_vllm").load(with_topk=not options.without_topk)
        vllm.with_topk = not options.without_topk
    timer, generator = Timer(options.repeats), torch.Generator("cuda").manual_seed(0)
    ceilings = Ceilings.measure(timer)
    facts = {"environment": gpu_environment(options.commit), "command": command(), **asdict(ceilings)}
    lines = []
    for table, shape in _wanted(options):
        row = measure(shape, vllm, timer, ceilings, generator)
        lines.append(json.dumps({**facts, "measure": f"gpu {table}", **row}))
        print(_line(row), flush=True)
        if options.out:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def _wanted(options: argparse.Namespace) -> Iterator[tuple[str, Shape]]:
    for table in options.tables:
        for shape in TABLES[table]:
            if options.shapes in str(shape):
                yield table, replace(shape)


def _line(row: dict[str, Any]) -> str:
    medians = {name: spread["median_us"] for name, spread in row["times"].items()}
    text = f"{row['name']:44s} overlap {row['overlap']:.2f} "
    text += " ".join(f"{name} {us:.1f}" for name, us in medians.items())
    text += " us; floor " + " ".join(f"{stage} {us:.1f}" for stage, us in row["floors_us"].items())
    for stage in ("select", "attend"):
        if f"vllm {stage}" in medians:
            text += f"; {stage} {medians[f'flashqsa {stage}'] / medians[f'vllm {stage}']:.2f}"
    return text
