"""`flashqsa::select_blocks`: selection in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashqsa.cache.state import LayerCache
from flashqsa.ops.parts import NOT_TOLD, join_cache, join_plan, split_plan
from flashqsa.plan.step import StepPlan
from flashqsa.results import Selection


@torch.library.custom_op(
    "flashqsa::select_blocks", mutates_args=("block_ids", "block_counts", "visible_blocks", "request_ids", "scores")
)
def select_blocks_op(
    block_ids: torch.Tensor,
    block_counts: torch.Tensor,
    visible_blocks: torch.Tensor,
    request_ids: torch.Tensor,
    scores: torch.Tensor | None,
    index_q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_keys: torch.Tensor | None,
    plan_tensors: Sequence[torch.Tensor | None],
    plan_numbers: Sequence[int],
    workspace_bytes: int,
    backend: str,
) -> None:
    """Fill the tensors of a `Selection`."""
    from flashqsa.selection import select_blocks

    select_blocks(
        index_q, join_cache(k_pages, v_pages, block_keys), join_plan(plan_tensors, plan_numbers),
        return_scores=scores is not None,
        out=Selection(block_ids, block_counts, scores, visible_blocks, request_ids),
        workspace_bytes=None if workspace_bytes == NOT_TOLD else workspace_bytes, backend=backend,
    )  # fmt: skip


@select_blocks_op.register_fake
def _(*_: Any) -> None:
    """Nothing is returned."""


def select_blocks_traced(
    index_q: torch.Tensor,
    cache: LayerCache,
    plan: StepPlan,
    *,
    return_scores: bool,
    out: Selection | None,
    workspace_bytes: int | None,
    backend: str,
) -> Selection:
    """`select_blocks` as one operator of a graph; arguments and result are the same."""
    if out is None:
        rows, topk, device = plan.num_rows, plan.topk_blocks, cache.device
        per_row = [torch.empty(rows, dtype=torch.int32, device=device) for _ in range(3)]
        result = Selection(
            block_ids=torch.empty(rows, topk, dtype=torch.int32, device=device),
            block_counts=per_row[0],
            scores=torch.empty(rows, topk, dtype=torch.float32, device=device) if return_scores else None,
            visible_blocks=per_row[1],
            request_ids=per_row[2],
            layer_id=cache.layer_id,
        )
    else:
        result = Selection(
            out.block_ids, out.block_counts, out.scores, out.visible_blocks, out.request_ids, cache.layer_id
        )
    plan_tensors, plan_numbers = split_plan(plan)
    select_blocks_op(
        result.block_ids, result.block_counts, result.visible_blocks, result.request_ids, result.scores,
        index_q.detach(), cache.k_pages.detach(), cache.v_pages.detach(), cache.block_keys, plan_tensors, plan_numbers,
        NOT_TOLD if workspace_bytes is None else workspace_bytes, backend,
    )  # fmt: skip
    return result
