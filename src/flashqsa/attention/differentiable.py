"""Gradients of sparse attention in q, K and V: tile by tile, as it was attended, in memory linear in the rows."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flashqsa.attention.plain import (
    StepRows,
    attend_rows_torch,
    by_kv_head,
    by_row,
    exact_products,
    piece_scores,
    pieces,
    scaled_queries,
    wide_dtype,
)
from flashqsa.attention.slots import SlotReader
from flashqsa.attention.tiles import Tile


class _SparseAttention(torch.autograd.Function):
    """`attend_rows_torch` without a gate, with gradients. What is attended is a constant."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, step: StepRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, Hq, D] and lse [T, Hq], wide."""
        out = torch.empty(q.shape, dtype=wide_dtype(q), device=q.device)
        lse = torch.empty(q.shape[:2], dtype=out.dtype, device=q.device)
        attend_rows_torch(q, k_pages, v_pages, step, out, lse)
        # Integers too: whoever rewrites caches, plan or selection before the backward pass gets an error from torch.
        tokens, plan = step.tokens, step.plan
        lists = (tokens.unit_ids, tokens.unit_counts, tokens.visible_units, tokens.positions)
        ctx.save_for_backward(q, k_pages, v_pages, out, lse, *lists, plan.page_table, plan.first_slots)
        ctx.step = step
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad: torch.Tensor | None, lse_grad: torch.Tensor | None) -> tuple[Any, ...]:
        """Gradients of q, k_pages and v_pages, in their dtypes."""
        q, k_pages, v_pages, out, lse = ctx.saved_tensors[:5]
        out_grad = torch.zeros_like(out) if out_grad is None else out_grad
        lse_grad = torch.zeros_like(lse) if lse_grad is None else lse_grad
        # The sum of weight * d weight over a row's tokens is the product of its output with the output's gradient.
        shift = lse_grad - (out_grad * out).sum(dim=-1)
        sums = _GradientSums(q, k_pages, v_pages, ctx.step, ctx.needs_input_grad[:3])
        with exact_products(q.device):
            for tile, slots in ctx.step.tiles(q.shape[1] // k_pages.shape[2]):
                rows = tile.rows
                sums.add_tile(tile, slots, q[rows], out_grad[rows], lse[rows, :, None], shift[rows, :, None])
        return sums.q_grad(), sums.pages_grad(sums.keys_sum, k_pages), sums.pages_grad(sums.values_sum, v_pages), None


class _GradientSums:
    """Wide sums of the gradients that are wanted: [T, Hq, D] of queries, [Hkv, slots, D] of keys and of values."""

    def __init__(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, step: StepRows, wanted: tuple[bool, ...]
    ) -> None:
        self.step, self.q_dtype, wide = step, q.dtype, wide_dtype(q)
        self.keys, self.values = SlotReader(k_pages, wide), SlotReader(v_pages, wide)
        by_slot = (self.keys.heads, k_pages.shape[0] * k_pages.shape[1], k_pages.shape[3])
        shapes = (q.shape, by_slot, by_slot)
        self.queries_sum, self.keys_sum, self.values_sum = (
            torch.zeros(shape, dtype=wide, device=q.device) if want else None
            for shape, want in zip(shapes, wanted, strict=True)
        )

    def add_tile(
        self,
        tile: Tile,
        slots: torch.Tensor,
        q: torch.Tensor,
        out_grad: torch.Tensor,
        lse: torch.Tensor,
        shift: torch.Tensor,
    ) -> None:
        """Add what the rows of one tile contribute; [n, Hq, D] and [n, Hq, 1] tensors."""
        queries = scaled_queries(q, self.keys.heads, self.step)
        out_grad, lse, shift = (by_kv_head(x, self.keys.heads) for x in (out_grad, lse, shift))
        if self.step.v_scale is not None:
            out_grad = out_grad * self.step.v_scale
        base = lse.masked_fill(lse == -torch.inf, 0)
        row_sums = torch.zeros_like(queries)
        key_places, value_places = self.keys.places(slots), self.values.places(slots)
        for piece in pieces(slots.shape[0]):
            keys, values = self.keys.read(key_places[:, piece]), self.values.read(value_places[:, piece])
            weights = piece_scores(queries, keys, tile.mask, piece).sub_(base).exp_()
            if self.values_sum is not None:
                self.values_sum.index_add_(1, slots[piece], torch.bmm(weights.transpose(1, 2), out_grad))
            score_grad = torch.bmm(out_grad, values.transpose(1, 2)).add_(shift).mul_(weights)
            if self.keys_sum is not None:
                self.keys_sum.index_add_(1, slots[piece], torch.bmm(score_grad.transpose(1, 2), queries))
            row_sums.baddbmm_(score_grad, keys)
        if self.queries_sum is not None:
            self.queries_sum[tile.rows] = by_row(row_sums, tile)

    def q_grad(self) -> torch.Tensor | None:
        """Gradient of q in its dtype."""
        if self.queries_sum is None:
            return None
        total = self.queries_sum * self.step.softmax_scale
        return (total if self.step.k_scale is None else total * self.step.k_scale).to(self.q_dtype)

    @staticmethod
    def pages_grad(by_slot: torch.Tensor | None, pages: torch.Tensor) -> torch.Tensor | None:
        """Gradient of K or V in the shape and dtype of its pages."""
        if by_slot is None:
            return None
        by_page = by_slot.view(by_slot.shape[0], *pages.shape[:2], pages.shape[3])
        return by_page.permute(1, 2, 0, 3).to(pages.dtype)


def attend_rows_differentiable(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, step: StepRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a step, not gated, differentiable in q, K and V.

    Returns:
        Output [T, Hq, D] and lse [T, Hq] in fp32 (float64 for float64 queries); padding rows are 0 and -inf.
    """
    attended: tuple[torch.Tensor, torch.Tensor] = _SparseAttention.apply(  # type: ignore[no-untyped-call]
        q, k_pages, v_pages, step
    )
    return attended
