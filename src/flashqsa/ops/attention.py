"""`flashqsa::attend` and `flashqsa::attend_tokens`: attention in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashqsa.cache.state import LayerCache
from flashqsa.ops.parts import (
    join_cache,
    join_plan,
    needs_gradients,
    number_of,
    outside_graphs,
    split_plan,
    split_scales,
)
from flashqsa.plan.step import StepPlan
from flashqsa.results import Selection

Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@torch.library.custom_op("flashqsa::attend", mutates_args=("out", "lse"))
def attend_op(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    gate: torch.Tensor | None,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    selected: Sequence[torch.Tensor],
    scale_tensors: Sequence[torch.Tensor | None],
    plan_tensors: Sequence[torch.Tensor | None],
    scale_numbers: Sequence[float],
    plan_numbers: Sequence[int],
    layer_ids: Sequence[int],
    softmax_scale: float,
    include_tail: bool,
    row_exact: bool,
    out_dtype: torch.dtype | None,
    backend: str,
) -> None:
    """Fill `out` and `lse`; `selected` are ids, counts, visible blocks and requests of a `Selection`.

    `layer_ids` are those of the cache and of the selection.
    """
    from flashqsa.attention import attend

    block_ids, block_counts, visible_blocks, request_ids = selected
    cache = join_cache(
        k_pages, v_pages, scale_tensors=scale_tensors, scale_numbers=scale_numbers, layer_id=layer_ids[0]
    )
    layer_id = None if layer_ids[1] < 0 else layer_ids[1]
    selection = Selection(block_ids, block_counts, None, visible_blocks, request_ids, layer_id)
    attended = attend(
        q, cache, selection, join_plan(plan_tensors, plan_numbers), gate=gate, softmax_scale=softmax_scale,
        include_tail=include_tail, row_exact=row_exact, out_dtype=out_dtype, return_lse=lse is not None, out=out,
        backend=backend,
    )  # fmt: skip
    if lse is not None:
        lse.copy_(attended[1])


@torch.library.custom_op("flashqsa::attend_tokens", mutates_args=("out", "lse"))
def attend_tokens_op(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    gate: torch.Tensor | None,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    token_ids: torch.Tensor,
    scale_tensors: Sequence[torch.Tensor | None],
    plan_tensors: Sequence[torch.Tensor | None],
    scale_numbers: Sequence[float],
    plan_numbers: Sequence[int],
    softmax_scale: float,
    row_exact: bool,
    out_dtype: torch.dtype | None,
    backend: str,
) -> None:
    """Fill `out` and `lse` from token lists."""
    from flashqsa.attention import attend_tokens

    cache = join_cache(k_pages, v_pages, scale_tensors=scale_tensors, scale_numbers=scale_numbers)
    attended = attend_tokens(
        q, cache, token_ids, join_plan(plan_tensors, plan_numbers), gate=gate, softmax_scale=softmax_scale,
        row_exact=row_exact, out_dtype=out_dtype, return_lse=lse is not None, out=out, backend=backend,
    )  # fmt: skip
    if lse is not None:
        lse.copy_(attended[1])


@attend_op.register_fake
@attend_tokens_op.register_fake
def _(*_: Any) -> None:
    """Nothing is returned."""


@outside_graphs
def _attend_outside_the_graph(*args: Any, **options: Any) -> Attended:
    from flashqsa.attention import attend

    return attend(*args, **options)


@outside_graphs
def _attend_tokens_outside_the_graph(*args: Any, **options: Any) -> Attended:
    from flashqsa.attention import attend_tokens

    return attend_tokens(*args, **options)


def attend_traced(
    q: torch.Tensor,
    cache: LayerCache,
    selection: Selection,
    plan: StepPlan,
    *,
    gate: torch.Tensor | None,
    softmax_scale: float | None,
    include_tail: bool,
    row_exact: bool,
    out_dtype: torch.dtype | None,
    return_lse: bool,
    out: torch.Tensor | None,
    backend: str,
) -> Attended:
    """`attend` as one operator of a graph; arguments and result are the same."""
    if needs_gradients((q, gate, cache.k_pages, cache.v_pages)):
        return _attend_outside_the_graph(
            q, cache, selection, plan, gate=gate, softmax_scale=softmax_scale, include_tail=include_tail,
            row_exact=row_exact, out_dtype=out_dtype, return_lse=return_lse, out=out, backend=backend,
        )  # fmt: skip
    result, lse = _buffers(q, out_dtype, return_lse, out)
    scale_tensors, scale_numbers = split_scales(cache)
    plan_tensors, plan_numbers = split_plan(plan)
    selected = [selection.block_ids, selection.block_counts, selection.visible_blocks, selection.request_ids]
    attend_op(
        result, lse, q, gate, cache.k_pages, cache.v_pages, selected, scale_tensors, plan_tensors, scale_numbers,
        plan_numbers, [number_of(cache.layer_id), number_of(selection.layer_id)],
        cache.head_dim**-0.5 if softmax_scale is None else softmax_scale, include_tail, row_exact,
        out_dtype, backend,
    )  # fmt: skip
    return result if lse is None else (result, lse)


def attend_tokens_traced(
    q: torch.Tensor,
    cache: LayerCache,
    token_ids: torch.Tensor,
    plan: StepPlan,
    *,
    gate: torch.Tensor | None,
    softmax_scale: float | None,
    row_exact: bool,
    out_dtype: torch.dtype | None,
    return_lse: bool,
    out: torch.Tensor | None,
    backend: str,
) -> Attended:
    """`attend_tokens` as one operator of a graph; arguments and result are the same."""
    if needs_gradients((q, gate, cache.k_pages, cache.v_pages)):
        return _attend_tokens_outside_the_graph(
            q, cache, token_ids, plan, gate=gate, softmax_scale=softmax_scale, row_exact=row_exact,
            out_dtype=out_dtype, return_lse=return_lse, out=out, backend=backend,
        )  # fmt: skip
    result, lse = _buffers(q, out_dtype, return_lse, out)
    scale_tensors, scale_numbers = split_scales(cache)
    plan_tensors, plan_numbers = split_plan(plan)
    attend_tokens_op(
        result, lse, q, gate, cache.k_pages, cache.v_pages, token_ids, scale_tensors, plan_tensors, scale_numbers,
        plan_numbers, cache.head_dim**-0.5 if softmax_scale is None else softmax_scale, row_exact, out_dtype,
        backend,
    )  # fmt: skip
    return result if lse is None else (result, lse)


def _buffers(
    q: torch.Tensor, out_dtype: torch.dtype | None, return_lse: bool, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output and lse as the eager call allocates them."""
    if out is None:
        out = torch.empty(q.shape, dtype=out_dtype or q.dtype, device=q.device)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, torch.empty(q.shape[:2], dtype=wide, device=q.device) if return_lse else None
