"""`python -m benchmarks gpu-decode`: selection and attention on one CUDA GPU, beside vLLM, cuDNN and the floor.

With a `peer_vllm` module on the path that loads vLLM 0.33's operators, these run on the same tensors in the same run;
so does the paged decode selection of cuDNN's frontend where its packages can be imported. Without them their columns
stay empty. Every row first passes a correctness gate, then is timed by graph replay with a cold L2, contenders in turn.
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
from benchmarks.gpu_gates import check_attention, check_selection, sampled_rows
from benchmarks.gpu_timing import Ceilings, Timer, gpu_environment
from benchmarks.gpu_workload import (
    BLOCK,
    BUDGET,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    KV_HEADS,
    PAGE,
    Q_HEADS,
    TOPK,
    keys_and_values,
    normed,
    randn,
    shuffled_pages,
)
from flashqsa import LayerCache, StepPlan, attend, plan_step, select_blocks
from flashqsa.backends import multiprocessors

NAME = "gpu-decode"
RESULTS = ROOT / "benchmarks" / "results" / "gpu_decode.jsonl"
WORKSPACE_BYTES = 256 << 20
CUDNN = "cudnn.QSA.selection_paged"
LEAST_IN_COMMON = 0.99
"""Share of our blocks that cuDNN has to select too: both are exact up to the rounding of scores."""
MOST_FOR_WIDE_TABLES = 1.1
"""Time of a step whose page table is far wider than its requests are long, over that of the step planned tightly."""


@dataclass(frozen=True)
class Shape:
    """One row of the table."""

    requests: int
    context: int
    rows: int = 1
    fp8_index: bool = False
    table_tokens: int | None = None
    """What page table and plan have room for, where that is more than the context."""

    def __str__(self) -> str:
        verify = f" x {self.rows} rows" if self.rows > 1 else ""
        wide = f", table of {self.table_tokens}" if self.table_tokens else ""
        return f"{self.requests} x {self.context}{verify}{', fp8 index' if self.fp8_index else ''}{wide}"


SHAPES = [
    Shape(1, 8192), Shape(1, 131072), Shape(1, 1048576), Shape(8, 32768), Shape(32, 131072), Shape(64, 32768),
    Shape(128, 32768), Shape(128, 131072), Shape(256, 8192), Shape(1, 1048576, fp8_index=True),
    Shape(32, 131072, fp8_index=True), Shape(128, 131072, fp8_index=True), Shape(32, 131072, rows=4),
    Shape(1, 8192, table_tokens=1 << 20), Shape(32, 8192, table_tokens=1 << 20),
]  # fmt: skip


class Workload:
    """Random tensors of one shape: shuffled pages, correlated rows within a request."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        self.shape = shape
        table, total = shuffled_pages(shape.requests, shape.context, generator)
        keys = normed(randn(generator, total, PAGE // BLOCK, INDEX_DIM))
        self.index_dtype = torch.float8_e4m3fn if shape.fp8_index else torch.bfloat16
        k, v = keys_and_values(total, KV_HEADS, generator)
        self.cache = LayerCache(k, v, keys.to(self.index_dtype), None, None)
        count = shape.requests * shape.rows
        base = randn(generator, shape.requests, 1, INDEX_HEADS, INDEX_DIM)
        index_q = base + 0.3 * randn(generator, shape.requests, shape.rows, INDEX_HEADS, INDEX_DIM)
        self.index_q = normed(index_q.view(count, INDEX_HEADS, INDEX_DIM)).to(self.index_dtype)
        self.q, self.gate = (randn(generator, count, Q_HEADS, HEAD_DIM) for _ in range(2))
        self.tight_plan = self.plan = self._plan(table, shape.context, total)
        if shape.table_tokens:
            wide = table.new_zeros(shape.requests, shape.table_tokens // PAGE)
            wide[:, : table.shape[1]] = table
            self.plan = self._plan(wide, shape.table_tokens, total)
        self.selection = select_blocks(self.index_q, self.cache, self.plan)
        self.scores = self.plan.scratch("select.scores", (count, self.plan.max_seq_len // BLOCK), torch.float32)
        self.out = torch.empty_like(self.q)

    def _plan(self, table: torch.Tensor, max_seq_len: int, pages: int) -> StepPlan:
        shape, device = self.shape, table.device
        return plan_step(
            (torch.arange(shape.requests + 1, device=device) * shape.rows).to(torch.int32),
            torch.full((shape.requests,), shape.context, dtype=torch.int32, device=device),
            table, page_tokens=PAGE, block_tokens=BLOCK, topk_blocks=TOPK, max_query_len=shape.rows,
            max_seq_len=max_seq_len, num_pages=pages, num_rows=shape.requests * shape.rows,
        )  # fmt: skip

    def score(self) -> None:
        """The first kernel of selection, by itself."""
        from flashqsa.selection.row_levels import RowLevels
        from flashqsa.selection.triton_scores import score_blocks_triton, score_kernel_config

        rows, blocks = self.scores.shape
        config = score_kernel_config(self.index_q, self.cache, self.plan, rows)
        levels = RowLevels.of(blocks, TOPK, config.block_m)
        largest = self.plan.scratch("select.largest", (rows, levels.numbers()), torch.float32) if levels.given else None
        score_blocks_triton(
            self.index_q, self.cache, self.plan, self.scores, 0, TOPK, config=config,
            multiprocessors=multiprocessors(self.q.device), largest=largest, levels=levels,
        )  # fmt: skip

    def select(self) -> None:
        """Selection, as a caller runs it."""
        select_blocks(self.index_q, self.cache, self.plan, out=self.selection, workspace_bytes=WORKSPACE_BYTES)

    def attend(self) -> None:
        """Attention, as a caller runs it."""
        attend(self.q, self.cache, self.selection, self.plan, gate=self.gate, out=self.out)

    def all(self) -> None:
        """What a layer does between preparation and output projection."""
        self.select()
        self.attend()

    def tight(self) -> None:
        """The same with a plan that has room for the context and no more."""
        select_blocks(self.index_q, self.cache, self.tight_plan, out=self.selection, workspace_bytes=WORKSPACE_BYTES)
        attend(self.q, self.cache, self.selection, self.tight_plan, gate=self.gate, out=self.out)

    def gate_correctness(self) -> dict[str, float]:
        """Sampled rows beside float64 and fp32."""
        rows = sampled_rows(self.q.shape[0])
        self.selection.block_ids.fill_(-7)
        self.out.fill_(float("nan"))
        self.all()
        return {
            "selection_error_of_bound": check_selection(self.index_q, self.cache, self.plan, self.selection, rows),
            "out_error": check_attention(self.q, self.gate, self.cache, self.plan, self.selection, self.out, rows),
        }

    def key_bytes(self) -> int:
        """Block keys of all requests, which selection has to read."""
        blocks = self.shape.requests * (self.shape.context // BLOCK)
        return blocks * INDEX_DIM * self.cache.block_keys.element_size()

    def attended_bytes(self) -> int:
        """K and V of the blocks that the rows of a request select together, each once."""
        requests = self.selection.block_ids.view(self.shape.requests, -1)
        return sum(request.unique().numel() for request in requests) * BLOCK * KV_HEADS * 2 * HEAD_DIM * 2


class Peer:
    """vLLM's operators on the tensors of a workload."""

    def __init__(self, vllm: Any, work: Workload) -> None:
        shape, plan = work.shape, work.plan
        count = work.q.shape[0]
        keys = work.cache.block_keys.unsqueeze(2)
        chosen = torch.empty(count, TOPK, dtype=torch.int32, device=work.q.device)
        packed = torch.empty(count, BUDGET + BLOCK, dtype=torch.int32, device=work.q.device)
        out, requests = torch.empty_like(work.q), plan.request_ids
        self.select = lambda: vllm.qsa_indexer.qsa_select_paged_decode(
            work.index_q, keys, plan.page_table, plan.visible_blocks, BUDGET, BLOCK, shape.rows, chosen
        )
        self.expand = lambda: vllm.qsa_indexer.expand_qsa_block_indices(
            chosen, plan.positions, plan.visible_blocks, BLOCK, BUDGET, packed
        )
        self.attend = lambda: vllm.qsa.qsa_sparse_paged_attention(
            work.q, work.cache.k_pages, work.cache.v_pages, packed, plan.page_table, requests, False, out,
            output_gate=work.gate,
        )  # fmt: skip

    def all(self) -> None:
        self.select()
        self.expand()
        self.attend()


def peer_vllm() -> Any | None:
    """vLLM's operators; None without a module of that name that loads them."""
    return importlib.import_module("peer_vllm").load() if importlib.util.find_spec("peer_vllm") else None


def peer_cudnn() -> Callable[..., Any] | None:
    """The paged decode selection of cuDNN's frontend; None, and a line, where it cannot be imported."""
    try:
        return importlib.import_module(CUDNN).qsa_select_decode_paged_forward
    except (ImportError, OSError, AttributeError) as error:
        print(f"gpu-decode: cuDNN's selection is left out: {error}", flush=True)
        return None


def cudnn_call(select: Callable[..., Any], work: Workload) -> Callable[[], object] | None:
    """cuDNN's selection on the tensors of a workload; None, and a line, where it fails or selects other blocks."""
    shape, plan = work.shape, work.plan
    keys = work.cache.block_keys.unsqueeze(2)

    def call() -> Any:
        return select(work.index_q, keys, plan.page_table, plan.seq_lens, seq_q=shape.rows, top_k=TOPK)

    ours = work.selection.block_ids
    try:
        theirs = call()["block_ids"].reshape(ours.shape)
    except Exception as error:  # its compiler has classes of its own, and the others are measured all the same
        print(f"gpu-decode: cuDNN's selection fails at {shape}: {type(error).__name__}: {error}", flush=True)
        return None
    shares = [torch.isin(ours[row], theirs[row]).float().mean() for row in sampled_rows(ours.shape[0])]
    common = float(torch.stack(shares).mean())
    if common < LEAST_IN_COMMON:
        print(f"gpu-decode: cuDNN selects other blocks at {shape}: {common:.3f} are ours", flush=True)
        return None
    return call


def measure(
    shape: Shape,
    vllm: Any,
    timer: Timer,
    ceilings: Ceilings,
    generator: torch.Generator,
    cudnn: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """One row of the table."""
    torch.cuda.empty_cache()
    work = Workload(shape, generator)
    row: dict[str, Any] = {"measure": "gpu decode", "name": str(shape), **asdict(shape), **work.gate_correctness()}
    row["floor_us"] = (work.key_bytes() + work.attended_bytes()) / ceilings.copy_bytes_per_us
    row["select_floor_us"] = work.key_bytes() / ceilings.copy_bytes_per_us
    timed = {"all": work.all, "select": work.select, "score": work.score, "attend": work.attend}
    if shape.table_tokens:
        timed["tight"] = work.tight
    contenders: dict[str, Callable[[], object]] = {f"flashqsa {stage}": run for stage, run in timed.items()}
    if vllm is not None:
        peer = Peer(vllm, work)
        timed = {"all": peer.all, "select": peer.select, "expand": peer.expand, "attend": peer.attend}
        contenders |= {f"vllm {stage}": run for stage, run in timed.items()}
    selection = cudnn_call(cudnn, work) if cudnn is not None and not shape.table_tokens else None
    if selection is not None:
        contenders["cudnn select"] = selection
    times = timer.interleaved(contenders)
    for engine in ("flashqsa", "vllm", "cudnn"):
        found = {name.split()[1]: spread for name, spread in times.items() if name.startswith(engine)}
        row[engine] = found or None
    if shape.table_tokens:
        row["wide_over_tight"] = times["flashqsa all"]["median_us"] / times["flashqsa tight"]["median_us"]
    return row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument(
        "--out", type=Path, default=None, help="JSON lines to write; the committed file is " + RESULTS.name
    )
    parser.add_argument("--shapes", default="", help="only shapes whose name holds this, e.g. '1 x'")
    parser.add_argument("--commit", default=None, help="commit to record where the checkout has no git")


def run(options: argparse.Namespace) -> int:
    """Measure every shape; a line each on the terminal, all figures in the file. 1 when wide tables cost too much."""
    if not torch.cuda.is_available():
        print("gpu-decode: needs a CUDA GPU, found none.", file=sys.stderr)
        return 2
    vllm, cudnn = peer_vllm(), peer_cudnn()
    timer, generator = Timer(), torch.Generator("cuda").manual_seed(0)
    ceilings = Ceilings.measure(timer)
    facts = {"environment": gpu_environment(options.commit), "command": command(), **asdict(ceilings)}
    lines, fine = [], True
    for shape in SHAPES:
        if options.shapes not in str(shape):
            continue
        row = measure(shape, vllm, timer, ceilings, generator, cudnn)
        lines.append(json.dumps({**facts, **row}))
        print(told(row), flush=True)
        fine &= row.get("wide_over_tight", 0.0) <= MOST_FOR_WIDE_TABLES
        if options.out:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if fine else 1


def told(row: dict[str, Any]) -> str:
    """A row in one line: medians of all contenders beside the floor."""
    ours = {stage: spread["median_us"] for stage, spread in row["flashqsa"].items()}
    text = f"{row['name']:28s} floor {row['floor_us']:6.1f} us, FlashQSA " + " ".join(
        f"{k} {v:.1f}" for k, v in ours.items()
    )
    if row["vllm"] is not None:
        theirs = {stage: spread["median_us"] for stage, spread in row["vllm"].items()}
        text += ", vLLM " + " ".join(f"{k} {v:.1f}" for k, v in theirs.items())
        text += f", ratio {ours['all'] / theirs['all']:.2f}"
    if row["cudnn"] is not None:
        text += f", cuDNN select {row['cudnn']['select']['median_us']:.1f}"
    if "wide_over_tight" in row:
        text += f"; wide over tight {row['wide_over_tight']:.2f}, at most {MOST_FOR_WIDE_TABLES}"
    return text
