"""What has to hold on a GPU before anything is timed: sampled rows beside float64 and fp32."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from benchmarks.gates import GateError
from benchmarks.gpu_workload import BLOCK, TOPK
from flashqsa import LayerCache, Selection, StepPlan
from flashqsa.cache.state import read_slots

LARGEST_OUTPUT_ERROR = 4e-3
"""Norm of the error of a bf16 row beside fp32, over the norm of the row."""


def sampled_rows(count: int, most: int = 8) -> list[int]:
    """Rows spread over a step, the last one among them."""
    return sorted({round(i * (count - 1) / max(most - 1, 1)) for i in range(most)})


def check_selection(
    index_q: torch.Tensor, cache: LayerCache, plan: StepPlan, selection: Selection, rows: Iterable[int]
) -> float:
    """Each row's blocks are the best in float64, as far as the promised bound of fp32 scores can tell them apart.

    Returns:
        How far the worst selected block lies below the best one left out, as a share of that bound.

    Raises:
        GateError: Beyond the bound, or ids out of order.
    """
    worst = 0.0
    assert cache.block_keys is not None
    for row in rows:
        visible, count = int(plan.visible_blocks[row]), int(selection.block_counts[row])
        ids = selection.block_ids[row, :count].to(torch.int64)
        slots = plan.block_slots(int(plan.request_ids[row]), torch.arange(visible, device=ids.device))
        keys = read_slots(cache.block_keys, slots).double()
        query = index_q[row].double()
        exact = torch.relu(keys @ query.T).sum(1)
        bound = (keys.abs() @ query.abs().T).sum(1) * (query.shape[1] + 8) * 2.0**-24
        chosen = torch.zeros(visible, dtype=torch.bool, device=ids.device)
        chosen[ids] = True
        if count != min(TOPK, visible) or int(chosen.sum()) != count or not bool((ids.diff() > 0).all()):
            raise GateError(f"ids of row {row} are not {min(TOPK, visible)} blocks in order")
        if count < visible:
            low, high = exact.masked_fill(~chosen, torch.inf).argmin(), exact.masked_fill(chosen, -1.0).argmax()
            worst = max(worst, float((exact[high] - exact[low]) / (bound[high] + bound[low])))
    if worst > 1:
        raise GateError(f"a block was left out that is better by {worst:.2f} of what rounding explains")
    return worst


def check_attention(
    q: torch.Tensor, gate: torch.Tensor, cache: LayerCache, plan: StepPlan, selection: Selection, out: torch.Tensor,
    rows: Iterable[int],
) -> float:  # fmt: skip
    """Each row's output is fp32 attention over its blocks and tail.

    Returns:
        The largest relative error.

    Raises:
        GateError: It is more than rounding explains.
    """
    worst = 0.0
    for row in rows:
        count, visible = int(selection.block_counts[row]), int(plan.visible_blocks[row])
        ids = selection.block_ids[row, :count].to(torch.int64)
        tail = torch.arange(visible * BLOCK, int(plan.positions[row]) + 1, device=ids.device)
        tokens = torch.cat([(ids[:, None] * BLOCK + torch.arange(BLOCK, device=ids.device)).flatten(), tail])
        slots = plan.token_slots(int(plan.request_ids[row]), tokens)
        k, v = (read_slots(x, slots).float() for x in (cache.k_pages, cache.v_pages))
        grouped = q[row].float().view(cache.kv_heads, -1, cache.head_dim)
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", grouped, k) * cache.head_dim**-0.5, -1)
        wanted = torch.einsum("hgn,nhd->hgd", weights, v).reshape(q.shape[1:])
        wanted = wanted.bfloat16().float() * torch.sigmoid(gate[row].float())
        worst = max(worst, float((out[row].float() - wanted).norm() / wanted.norm()))
    if not worst < LARGEST_OUTPUT_ERROR:
        raise GateError(f"outputs are off by {worst:.2g}")
    return worst
