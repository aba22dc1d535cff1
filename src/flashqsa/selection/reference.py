"""The definition of selection: one row at a time, no cleverness. float64 inputs are computed in float64."""

from __future__ import annotations

import math

import torch

from flashqsa.cache.state import LayerCache, read_slots
from flashqsa.plan import StepPlan
from flashqsa.results import Selection


def score_blocks_reference(index_q: torch.Tensor, block_keys: torch.Tensor) -> torch.Tensor:
    """Scores of one row: ``sum over h of relu(index_q[h] . block_keys[g])``.

    Args:
        index_q: [Hi, Di] index queries of the row.
        block_keys: [M, Di] keys of the blocks that it sees.

    Returns:
        [M] scores, float64 for float64 inputs, else fp32.
    """
    dtype = torch.float64 if index_q.dtype == torch.float64 else torch.float32
    scores = torch.zeros(block_keys.shape[0], dtype=dtype, device=block_keys.device)
    for head in index_q.to(dtype):
        scores = scores + torch.relu((head * block_keys.to(dtype)).sum(-1))
    return scores


def top_blocks_reference(scores: list[float], topk_blocks: int) -> list[int]:
    """Ids of the best scores, ascending. Higher first, then the lower id; -0.0 equals +0.0; NaN last."""

    def rank(block_id: int) -> tuple[bool, float, int]:
        score = scores[block_id]
        return (math.isnan(score), 0.0 if math.isnan(score) else -score, block_id)

    return sorted(sorted(range(len(scores)), key=rank)[:topk_blocks])


def select_blocks_reference(index_q: torch.Tensor, cache: LayerCache, plan: StepPlan, out: Selection) -> None:
    """Fill `out` (counts and visible blocks set, ids -1) with the selection of every row, as `select_blocks` does."""
    assert cache.block_keys is not None
    requests, visible = plan.request_ids.tolist(), out.visible_blocks.tolist()
    for row in range(plan.num_rows):
        if visible[row] == 0:
            continue
        block_ids = torch.arange(visible[row], device=cache.device)
        keys = read_slots(cache.block_keys, plan.block_slots(requests[row], block_ids))
        scores = score_blocks_reference(index_q[row], keys)
        chosen = torch.tensor(top_blocks_reference(scores.tolist(), plan.topk_blocks), device=cache.device)
        out.block_ids[row, : len(chosen)] = chosen.to(torch.int32)
        if out.scores is not None:
            out.scores[row, : len(chosen)] = scores[chosen].to(torch.float32)
