"""Plans and caches as operators take them: tensors and numbers, and back again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from flashqsa.cache.state import LayerCache
from flashqsa.plan.step import StepPlan

P = ParamSpec("P")
R = TypeVar("R")

PLAN_TENSORS = (
    "query_starts",
    "seq_lens",
    "page_table",
    "first_slots",
    "first_block_slots",
    "ring_ids",
    "request_ids",
    "positions",
    "visible_blocks",
    "slot_ids",
    "closed_block_slot_ids",
    "ring_slot_ids",
)
PLAN_NUMBERS = (
    "page_tokens",
    "block_tokens",
    "topk_blocks",
    "max_query_len",
    "max_seq_len",
    "num_pages",
    "ring_tokens",
)
NOT_TOLD = -1
"""Stands for None among numbers, which are never negative."""

NO_GRADIENTS = (
    "flashqsa's operators have no gradients in a graph. Call under torch.no_grad() or torch.inference_mode(), or leave "
    "fullgraph out, so that the call runs outside the graph."
)


def needs_gradients(tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether a traced call would have to be differentiated, which only the eager one can be."""
    wanted = torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
    return wanted and torch.compiler.is_dynamo_compiling()


def outside_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """The function as a break in the graph; with fullgraph, torch refuses and gives the reason."""
    outside: Callable[P, R] = torch.compiler.disable(function, reason=NO_GRADIENTS)  # type: ignore[no-untyped-call]
    return outside


def split_plan(plan: StepPlan) -> tuple[list[torch.Tensor | None], list[int]]:
    """A plan's tensors and numbers, in the order of `PLAN_TENSORS` and `PLAN_NUMBERS`."""
    numbers = [getattr(plan, name) for name in PLAN_NUMBERS]
    return [getattr(plan, name) for name in PLAN_TENSORS], [NOT_TOLD if n is None else n for n in numbers]


def join_plan(tensors: Sequence[torch.Tensor | None], numbers: Sequence[int]) -> StepPlan:
    """The plan again, with scratch and host copies of its own."""
    told = [None if number == NOT_TOLD else number for number in numbers]
    fields = dict(zip(PLAN_TENSORS, tensors, strict=True)) | dict(zip(PLAN_NUMBERS, told, strict=True))
    return StepPlan(**fields)  # type: ignore[arg-type]


def split_scales(cache: LayerCache) -> tuple[list[torch.Tensor | None], list[float]]:
    """Scales of K and V: those that are tensors, and those that are numbers; 0 for none."""
    scales = (cache.k_scale, cache.v_scale)
    tensors = [scale if isinstance(scale, torch.Tensor) else None for scale in scales]
    return tensors, [0.0 if scale is None or isinstance(scale, torch.Tensor) else float(scale) for scale in scales]


def join_cache(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_keys: torch.Tensor | None = None,
    ring: torch.Tensor | None = None,
    ring_positions: torch.Tensor | None = None,
    scale_tensors: Sequence[torch.Tensor | None] = (None, None),
    scale_numbers: Sequence[float] = (0.0, 0.0),
    layer_id: int = NOT_TOLD,
) -> LayerCache:
    """The caches of a layer again."""
    k_scale, v_scale = (
        number or None if tensor is None else tensor
        for tensor, number in zip(scale_tensors, scale_numbers, strict=True)
    )
    layer = None if layer_id == NOT_TOLD else layer_id
    return LayerCache(k_pages, v_pages, block_keys, ring, ring_positions, k_scale, v_scale, layer)


def number_of(layer_id: int | None) -> int:
    """A layer's index as operators take it."""
    return NOT_TOLD if layer_id is None else layer_id
