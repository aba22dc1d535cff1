"""`select_blocks`: checks and dispatch."""

from __future__ import annotations

from dataclasses import replace

import torch

from flashqsa.backends import resolve_backend
from flashqsa.cache.state import LayerCache
from flashqsa.checks import CACHE_DTYPES, expect, expect_int, expect_type
from flashqsa.errors import ArgumentError, ShapeError
from flashqsa.ops.tracing import is_traced
from flashqsa.plan import StepPlan
from flashqsa.results import Selection
from flashqsa.selection.plain import least_workspace_bytes, select_blocks_torch
from flashqsa.selection.reference import select_blocks_reference
from flashqsa.selection.support import select_refusal

MIB = 1 << 20
DEFAULT_WORKSPACE_BYTES = {"cpu": 64 * MIB}
OTHER_WORKSPACE_BYTES = 256 * MIB


def select_blocks(
    index_q: torch.Tensor,
    cache: LayerCache,
    plan: StepPlan,
    *,
    return_scores: bool = False,
    out: Selection | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
) -> Selection:
    """Select the blocks that each row attends: the exact top-K of its scores, the lower id first on ties.

    ``score[t, g] = sum over h of relu(index_q[t, h] . block_key[g])`` in fp32, over the blocks that row t sees.
    A row that sees at most K blocks selects them all, without scoring. NaN scores rank below every number.

    Args:
        index_q: [T, Hi, Di] normalised and rotated index queries, a float dtype or float8_e4m3fn.
        cache: Caches of the layer; only `block_keys` is read.
        plan: The step.
        return_scores: Also return the fp32 scores of the selected blocks, which merging needs.
        out: Buffers to fill: a Selection whose tensors have the shapes of the result.
        workspace_bytes: Budget for scores, 64 MiB on the CPU and 256 MiB elsewhere by default. Changes no result.
        backend: "auto", "reference", "torch" or "triton".

    Returns:
        The selection; padding rows have count 0.

    Raises:
        ShapeError, DTypeError, DeviceError: A tensor does not fit the caches or the plan.
        ArgumentError: The workspace is too small for one tile, or an option is unknown.
        UnsupportedError: The named backend does not serve this device.

    Source: transformers 5.24.0, Qwen4ExpTextQSAIndexer; ties by design (torch.topk leaves them open).
    """
    where = "select_blocks"
    if is_traced(index_q):
        from flashqsa.ops.selection import select_blocks_traced

        return select_blocks_traced(index_q, cache, plan, return_scores=return_scores, out=out,
                                    workspace_bytes=workspace_bytes, backend=backend)  # fmt: skip
    expect_type(where, "cache", cache, LayerCache)
    expect_type(where, "plan", plan, StepPlan)
    if cache.block_keys is None:
        raise ArgumentError(f"{where}: cache must have block_keys, got None. Allocate them beside K and V.")
    dims = {"T": plan.num_rows, "Di": cache.block_keys.shape[2]}
    expect(
        where, "index_q", index_q, "T Hi Di", dims, dtypes=CACHE_DTYPES, device=cache.device,
        hint="One row of index queries a row of the plan.",
    )  # fmt: skip
    if not index_q.shape[1]:
        raise ShapeError(f"{where}: index_q must have at least one head, got {list(index_q.shape)}. Pass all of them.")
    plan.check_cache(where, cache)
    least = least_workspace_bytes(index_q, cache.block_keys, plan.topk_blocks)
    if workspace_bytes is None:
        workspace_bytes = max(least, DEFAULT_WORKSPACE_BYTES.get(cache.device.type, OTHER_WORKSPACE_BYTES))
    expect_int(where, "workspace_bytes", workspace_bytes, least=None)
    if workspace_bytes < least:
        raise ArgumentError(
            f"{where}: workspace_bytes must be at least {least}, got {workspace_bytes}. One tile of scores needs that."
        )
    backend = resolve_backend(where, backend, cache.device, select_refusal(index_q, cache.block_keys, plan.topk_blocks))
    with torch.no_grad():
        if out is not None:
            _check_out(where, plan, cache, return_scores, out)
        result = _buffers(plan, cache, return_scores, out)
        if backend == "triton":
            from flashqsa.selection.triton_select import select_blocks_triton

            select_blocks_triton(index_q, cache, plan, result, workspace_bytes=workspace_bytes)  # type: ignore[no-untyped-call]
            return result
        _preset(plan, result)
        if backend == "reference":
            select_blocks_reference(index_q, cache, plan, result)
        else:
            select_blocks_torch(index_q, cache, plan, result, workspace_bytes=workspace_bytes)
    return result


def _check_out(where: str, plan: StepPlan, cache: LayerCache, return_scores: bool, out: Selection) -> None:
    expect_type(where, "out", out, Selection)
    if return_scores != (out.scores is not None):
        raise ArgumentError(
            f"{where}: out.scores must be a tensor exactly when return_scores is set, got {return_scores} and "
            f"{'no scores' if out.scores is None else 'scores'}. Change one of them."
        )
    dims, device = {"T": plan.num_rows, "K": plan.topk_blocks}, cache.device
    expect(where, "out.block_ids", out.block_ids, "T K", dims, dtypes=(torch.int32,), device=device)
    for name in ("block_counts", "visible_blocks", "request_ids"):
        expect(where, f"out.{name}", getattr(out, name), "T", dims, dtypes=(torch.int32,), device=device)
    if out.scores is not None:
        expect(where, "out.scores", out.scores, "T K", dims, dtypes=(torch.float32,), device=device)


def _buffers(plan: StepPlan, cache: LayerCache, return_scores: bool, out: Selection | None) -> Selection:
    """The tensors of the result, not filled yet."""
    if out is not None:
        return replace(out, layer_id=cache.layer_id)
    rows, topk, device = plan.num_rows, plan.topk_blocks, cache.device
    counts, visible, requests = torch.empty(3, rows, dtype=torch.int32, device=device)
    return Selection(
        block_ids=torch.empty(rows, topk, dtype=torch.int32, device=device),
        block_counts=counts,
        scores=torch.empty(rows, topk, dtype=torch.float32, device=device) if return_scores else None,
        visible_blocks=visible,
        request_ids=requests,
        layer_id=cache.layer_id,
    )


def _preset(plan: StepPlan, out: Selection) -> None:
    """Counts, visible blocks and requests as planned; every id and score unset."""
    visible = plan.visible_blocks.masked_fill(plan.request_ids < 0, 0)  # an engine's padding rows may hold leftovers
    out.block_ids.fill_(-1)
    out.block_counts.copy_(visible.clamp(max=plan.topk_blocks))
    out.visible_blocks.copy_(visible)
    out.request_ids.copy_(plan.request_ids)
    if out.scores is not None:
        out.scores.fill_(-torch.inf)
