"""Decode and verify on one GPU: selection and attention against vLLM's kernels and the floor, in one run.

    PYTHONPATH=src:PEER_TOOLS python -m benchmarks.gpu_decode [--out FILE] [--rows SUBSTRING]

PEER_TOOLS is a folder with a `peer_vllm` module that loads vLLM 0.33's operators; without it the peer column is empty.
Every row first passes a correctness gate, then is timed by graph replay with a cold L2, ours and the peer in turn.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.gpu_timing import Ceilings, Timer, run_facts
from flashqsa import LayerCache, attend, plan_step, select_blocks
from flashqsa.backends import multiprocessors
from flashqsa.cache.state import read_slots
from flashqsa.selection.triton_scores import score_blocks_triton

Q_HEADS, KV_HEADS, HEAD_DIM, INDEX_HEADS, INDEX_DIM, BLOCK, BUDGET, PAGE = 24, 2, 256, 4, 128, 4, 2048, 64
TOPK = BUDGET // BLOCK
WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True)
class Shape:
    """One row of the table."""

    requests: int
    context: int
    rows: int = 1
    fp8_index: bool = False

    def __str__(self) -> str:
        verify = f" x {self.rows} rows" if self.rows > 1 else ""
        return f"{self.requests} x {self.context}{verify}{', fp8 index' if self.fp8_index else ''}"


SHAPES = [
    Shape(1, 8192), Shape(1, 131072), Shape(1, 1048576), Shape(8, 32768), Shape(32, 131072), Shape(128, 32768),
    Shape(128, 131072), Shape(256, 8192), Shape(1, 1048576, fp8_index=True), Shape(32, 131072, fp8_index=True),
    Shape(128, 131072, fp8_index=True), Shape(32, 131072, rows=4),
]  # fmt: skip


def normed(x: torch.Tensor) -> torch.Tensor:
    """Rows of root mean square 1, in bf16."""
    return (x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True))).to(torch.bfloat16)


class Workload:
    """Random tensors of one shape: shuffled pages, correlated rows within a request."""

    def __init__(self, shape: Shape, generator: torch.Generator) -> None:
        device = torch.device("cuda")
        self.shape, pages = shape, -(-shape.context // PAGE)
        total = shape.requests * pages + 1
        order = torch.randperm(total - 1, device=device, generator=generator).to(torch.int32) + 1
        table = order.view(shape.requests, pages).contiguous()

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, device=device, generator=generator, dtype=torch.bfloat16)

        keys = normed(randn(total, PAGE // BLOCK, INDEX_DIM))
        self.index_dtype = torch.float8_e4m3fn if shape.fp8_index else torch.bfloat16
        kv = randn(total, KV_HEADS, PAGE, 2 * HEAD_DIM).transpose(1, 2)
        k, v = kv.split(HEAD_DIM, dim=-1)
        self.cache = LayerCache(k, v, keys.to(self.index_dtype), None, None)
        count = shape.requests * shape.rows
        base = randn(shape.requests, 1, INDEX_HEADS, INDEX_DIM)
        index_q = base + 0.3 * randn(shape.requests, shape.rows, INDEX_HEADS, INDEX_DIM)
        self.index_q = normed(index_q.view(count, INDEX_HEADS, INDEX_DIM)).to(self.index_dtype)
        self.q, self.gate = randn(count, Q_HEADS, HEAD_DIM), randn(count, Q_HEADS, HEAD_DIM)
        self.plan = plan_step(
            (torch.arange(shape.requests + 1, device=device) * shape.rows).to(torch.int32),
            torch.full((shape.requests,), shape.context, dtype=torch.int32, device=device),
            table, page_tokens=PAGE, block_tokens=BLOCK, topk_blocks=TOPK, max_query_len=shape.rows,
            max_seq_len=shape.context, num_pages=total, num_rows=count,
        )  # fmt: skip
        self.selection = select_blocks(self.index_q, self.cache, self.plan)
        self.scores = self.plan.scratch("select.scores", (count, shape.context // BLOCK), torch.float32)
        self.out = torch.empty_like(self.q)

    def score(self) -> None:
        """The first kernel of selection, by itself."""
        sms = multiprocessors(self.q.device)
        score_blocks_triton(self.index_q, self.cache, self.plan, self.scores, 0, TOPK, multiprocessors=sms)

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

    def gate_correctness(self) -> dict[str, float]:
        """Exact ids from our own scores, scores against float64, outputs against fp32, on the first rows."""
        self.selection.block_ids.fill_(-7)
        self.all()
        torch.cuda.synchronize()
        worst_score = worst_out = 0.0
        for row in range(0, min(8, self.q.shape[0])):
            request, visible = row // self.shape.rows, int(self.plan.visible_blocks[row])
            blocks = torch.arange(visible, device="cuda")
            keys = read_slots(self.cache.block_keys, self.plan.block_slots(request, blocks)).double()
            exact = torch.relu(keys @ self.index_q[row].double().T).sum(1)
            bound = (keys.abs() @ self.index_q[row].double().abs().T).sum(1)
            error = ((self.scores[row, :visible].double() - exact).abs() / bound).max()
            worst_score = max(worst_score, float(error) / ((INDEX_DIM + 8) * 2**-24))
            order = torch.sort(self.scores[row, :visible], descending=True, stable=True).indices[:TOPK].sort().values
            assert torch.equal(order.to(torch.int32), self.selection.block_ids[row]), (
                f"{self.shape}: ids of row {row} are wrong"
            )
            tail = torch.arange(visible * BLOCK, int(self.plan.positions[row]) + 1, device="cuda")
            tokens = torch.cat([(order[:, None] * BLOCK + torch.arange(BLOCK, device="cuda")).flatten(), tail])
            slots = self.plan.token_slots(request, tokens)
            k, v = (read_slots(x, slots).float() for x in (self.cache.k_pages, self.cache.v_pages))
            q = self.q[row].float().view(KV_HEADS, -1, HEAD_DIM)
            weights = torch.softmax(torch.einsum("hgd,nhd->hgn", q, k) * HEAD_DIM**-0.5, -1)
            out = torch.einsum("hgn,nhd->hgd", weights, v).reshape(Q_HEADS, HEAD_DIM)
            out = out.bfloat16().float() * torch.sigmoid(self.gate[row].float())
            worst_out = max(worst_out, float((self.out[row].float() - out).norm() / out.norm()))
        assert worst_score <= 1, f"{self.shape}: scores break their bound, {worst_score}"
        assert worst_out < 4e-3, f"{self.shape}: outputs are off, {worst_out}"
        return {"score_error_of_bound": worst_score, "out_error": worst_out}


class Peer:
    """vLLM's operators on the tensors of a workload."""

    def __init__(self, vllm: Any, work: Workload) -> None:
        shape, plan = work.shape, work.plan
        count = work.q.shape[0]
        keys = work.cache.block_keys.unsqueeze(2)
        chosen = torch.empty(count, TOPK, dtype=torch.int32, device="cuda")
        packed = torch.empty(count, BUDGET + BLOCK, dtype=torch.int32, device="cuda")
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


def measure(shape: Shape, vllm: Any, timer: Timer, ceilings: Ceilings, generator: torch.Generator) -> dict[str, Any]:
    """One row of the table."""
    torch.cuda.empty_cache()
    work = Workload(shape, generator)
    row: dict[str, Any] = {"kind": "decode", "name": str(shape), **asdict(shape), **work.gate_correctness()}
    key_bytes = shape.requests * (shape.context // BLOCK) * INDEX_DIM * work.cache.block_keys.element_size()
    kv_bytes = shape.requests * min(shape.context, BUDGET) * KV_HEADS * 2 * HEAD_DIM * 2
    if shape.rows > 1:
        union = sum(
            work.selection.block_ids[i * shape.rows : (i + 1) * shape.rows].unique().numel()
            for i in range(shape.requests)
        )
        kv_bytes = union * BLOCK * KV_HEADS * 2 * HEAD_DIM * 2
    row["floor_us"] = (key_bytes + kv_bytes) / ceilings.copy_bytes_per_us
    timed = {"ours_all": work.all, "ours_select": work.select, "ours_score": work.score, "ours_attend": work.attend}
    if vllm is not None:
        peer = Peer(vllm, work)
        timed |= {
            "vllm_all": peer.all,
            "vllm_select": peer.select,
            "vllm_expand": peer.expand,
            "vllm_attend": peer.attend,
        }
    row |= {f"{name}_us": time for name, time in timer.interleaved(timed).items()}
    return row


def main() -> None:
    """Measure every shape, print a table, write JSON lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None, help="JSON lines to append to")
    parser.add_argument("--rows", default="", help="only shapes whose name holds this")
    options = parser.parse_args()
    try:
        import peer_vllm

        vllm = peer_vllm.load()
    except (ImportError, OSError):
        vllm = None
    timer, generator = Timer(), torch.Generator("cuda").manual_seed(0)
    ceilings = Ceilings.measure(timer)
    facts = run_facts()
    print(f"copy {ceilings.copy_bytes_per_us / 1e6:.2f} TB/s, matmul {ceilings.matmul_flop_per_us / 1e6:.0f} TFLOP/s")
    for shape in SHAPES:
        if options.rows not in str(shape):
            continue
        row = measure(shape, vllm, timer, ceilings, generator)
        ours, peer = row["ours_all_us"], row.get("vllm_all_us", float("nan"))
        print(
            f"{row['name']:28s} ours {ours:7.1f} ({row['ours_select_us']:6.1f}, score {row['ours_score_us']:6.1f} / "
            f"{row['ours_attend_us']:6.1f})  vLLM {peer:7.1f} ({row.get('vllm_select_us', 0):6.1f} / "
            f"{row.get('vllm_expand_us', 0):5.1f} / {row.get('vllm_attend_us', 0):6.1f})  ratio {ours / peer:.2f}  "
            f"floor {row['floor_us']:6.1f}  score err {row['score_error_of_bound']:.2f} out {row['out_error']:.1e}",
            flush=True,
        )
        if options.out:
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(json.dumps({**facts, **row}) + "\n")


if __name__ == "__main__":
    main()
