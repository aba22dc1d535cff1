"""`flashqsa::prepare`: preparation in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashqsa.cache.state import LayerCache
from flashqsa.ops.parts import (
    join_cache,
    join_plan,
    needs_gradients,
    outside_graphs,
    split_plan,
    split_scales,
)
from flashqsa.plan.step import StepPlan
from flashqsa.results import Prepared
from flashqsa.rope import RopeTable


@torch.library.custom_op(
    "flashqsa::prepare",
    mutates_args=("index_q", "q", "k_pages", "v_pages", "block_keys", "ring", "ring_positions"),
)
def prepare_op(
    index_q: torch.Tensor,
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    block_keys: torch.Tensor | None,
    ring: torch.Tensor | None,
    ring_positions: torch.Tensor | None,
    rows: Sequence[torch.Tensor],
    cos_sin: torch.Tensor,
    norm_weights: Sequence[torch.Tensor],
    scale_tensors: Sequence[torch.Tensor | None],
    plan_tensors: Sequence[torch.Tensor | None],
    scale_numbers: Sequence[float],
    plan_numbers: Sequence[int],
    mrope_section: Sequence[int],
    eps: float,
    backend: str,
) -> None:
    """Fill `index_q`, `q` and the caches; `rows` are q_gate, k, v, index_qk and the rotary positions of `prepare`."""
    from flashqsa.preparation import NormWeights, prepare

    q_gate, k, v, index_qk, rope_positions = rows
    cache = join_cache(k_pages, v_pages, block_keys, ring, ring_positions, scale_tensors, scale_numbers)
    sections = (mrope_section[0], mrope_section[1], mrope_section[2]) if mrope_section else None
    gate = q_gate[..., k.shape[-1] :]
    norms = NormWeights(norm_weights[0], norm_weights[1], norm_weights[2], norm_weights[3], eps)
    prepare(
        q_gate, k, v, index_qk, rope_positions, RopeTable(cos_sin, sections), norms, cache,
        join_plan(plan_tensors, plan_numbers), out=Prepared(index_q, q, gate), backend=backend,
    )  # fmt: skip


@prepare_op.register_fake
def _(*_: Any) -> None:
    """Nothing is returned."""


@outside_graphs
def _prepare_outside_the_graph(*args: Any, **options: Any) -> Prepared:
    from flashqsa.preparation import prepare

    return prepare(*args, **options)


def prepare_traced(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index_qk: torch.Tensor,
    rope_positions: torch.Tensor,
    rope: RopeTable,
    norms: Any,
    cache: LayerCache,
    plan: StepPlan,
    *,
    out: Prepared | None,
    backend: str,
) -> Prepared:
    """`prepare` as one operator of a graph; arguments and result are the same."""
    weights = [norms.q, norms.k, norms.index_q, norms.index_k]
    if needs_gradients((q_gate, k, v, *weights, cache.k_pages, cache.v_pages)):
        return _prepare_outside_the_graph(
            q_gate, k, v, index_qk, rope_positions, rope, norms, cache, plan, out=out, backend=backend
        )
    dim = cache.head_dim
    gate = q_gate[..., dim:]
    if out is not None:
        out.gate.copy_(gate)
    else:
        out = Prepared(torch.empty_like(index_qk[:, :-1]), torch.empty_like(q_gate[..., :dim]), gate)
    scale_tensors, scale_numbers = split_scales(cache)
    plan_tensors, plan_numbers = split_plan(plan)
    rows = [q_gate, k, v, index_qk.detach(), rope_positions]
    prepare_op(
        out.index_q, out.q, cache.k_pages, cache.v_pages, cache.block_keys, cache.ring, cache.ring_positions, rows,
        rope.cos_sin, weights, scale_tensors, plan_tensors, scale_numbers, plan_numbers, list(rope.mrope_section or ()),
        norms.eps, backend,
    )  # fmt: skip
    return out
