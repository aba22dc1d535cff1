"""What has to hold before `flashqsa bench` times anything: sampled rows beside float64 and fp32."""

from __future__ import annotations

import torch

from flashqsa.cache.state import read_slots
from flashqsa.commands.bench_workload import Workload

MOST_ROWS = 4
LEAST_TOLERANCE = 1e-5


def first_difference(work: Workload) -> str | None:
    """Runs selection, attention and dense attention, and says what is wrong with them; None where they are right.

    Selected blocks are the best in float64 as far as the promised bound of scores tells them apart; a row's output is
    fp32 attention over its blocks and tail, within four roundings of its norm.
    """
    count = work.q.shape[0]
    work.selection.block_ids.fill_(-7)
    work.out.fill_(float("nan"))
    with torch.no_grad():
        work.select()
        work.attend()
        dense = None if work.dense_k is None else work.dense().transpose(1, 2).flatten(0, 1)
        for row in sorted({round(place * (count - 1) / (MOST_ROWS - 1)) for place in range(MOST_ROWS)}):
            wrong = _selection(work, row) or _attention(work, row, dense)
            if wrong is not None:
                return f"row {row} of {count} at {work.context:,} tokens: {wrong}"
    return None


def _selection(work: Workload, row: int) -> str | None:
    plan, topk = work.plan, work.setting.config.topk_blocks
    visible, count = int(plan.visible_blocks[row]), int(work.selection.block_counts[row])
    ids = work.selection.block_ids[row, :count].to(torch.int64)
    everything = torch.arange(visible, device=ids.device)
    if count != min(topk, visible) or not bool((ids.diff() > 0).all()) or not bool(torch.isin(ids, everything).all()):
        return f"ids are not {min(topk, visible)} blocks in order"
    if count == visible:
        return None
    assert work.cache.block_keys is not None
    keys = read_slots(work.cache.block_keys, plan.block_slots(int(plan.request_ids[row]), everything)).double()
    query = work.index_q[row].double()
    exact = torch.relu(keys @ query.T).sum(dim=1)
    bound = (keys.abs() @ query.abs().T).sum(dim=1) * (query.shape[1] + 8) * 2.0**-24
    chosen = torch.zeros(visible, dtype=torch.bool, device=ids.device).scatter_(0, ids, True)
    low, high = exact.masked_fill(~chosen, torch.inf).argmin(), exact.masked_fill(chosen, -1.0).argmax()
    left_out = float(exact[high] - exact[low])
    return (
        None if left_out <= float(bound[high] + bound[low]) else f"a block was left out that is {left_out:.3g} better"
    )


def _attention(work: Workload, row: int, dense: torch.Tensor | None) -> str | None:
    plan, block = work.plan, work.setting.config.block_tokens
    ids = work.selection.block_ids[row, : int(work.selection.block_counts[row])].to(torch.int64)
    context = torch.arange(int(plan.positions[row]) + 1, device=ids.device)
    inside = (ids[:, None] * block + context[:block]).flatten()
    attended = torch.cat([inside, context[int(plan.visible_blocks[row]) * block :]])
    gate = torch.sigmoid(work.gate[row].float())
    wrong = _apart(work.out[row], _attend(work, row, attended).to(work.out.dtype).float() * gate, "attention")
    if wrong is None and dense is not None:
        wrong = _apart(dense[row], _attend(work, row, context), "dense attention")
    return wrong


def _attend(work: Workload, row: int, token_ids: torch.Tensor) -> torch.Tensor:
    """fp32 attention of one row over these tokens, [Hq, D]."""
    slots = work.plan.token_slots(int(work.plan.request_ids[row]), token_ids)
    k, v = (read_slots(pages, slots).float() for pages in (work.cache.k_pages, work.cache.v_pages))
    q = work.q[row].float().view(k.shape[1], -1, k.shape[2])
    weights = torch.softmax(torch.einsum("hgd,nhd->hgn", q, k) * k.shape[2] ** -0.5, dim=-1)
    return torch.einsum("hgn,nhd->hgd", weights, v).flatten(0, 1)


def _apart(made: torch.Tensor, wanted: torch.Tensor, what: str) -> str | None:
    error = float((made.float() - wanted).norm() / wanted.norm())
    tolerance = max(LEAST_TOLERANCE, 4 * torch.finfo(made.dtype).eps)
    return None if error <= tolerance else f"{what} is off by {error:.2g} of its norm"
