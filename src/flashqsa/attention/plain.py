"""Sparse attention in plain torch: union tiles, online softmax over pieces of the union, on any device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

from flashqsa.attention.tiles import RowTokens, Tile, row_tile, union_tiles
from flashqsa.cache.state import LayerCache, read_slots
from flashqsa.matmul import exact_fp32_matmul
from flashqsa.plan import RowGroup, StepPlan

PIECE_TOKENS = 1024
"""Tokens of a union that are attended at once; bounds memory, whatever the context."""


def attend_rows_torch(
    q: torch.Tensor,
    cache: LayerCache,
    plan: StepPlan,
    tokens_of: Callable[[RowGroup], RowTokens],
    softmax_scale: float,
    *,
    row_exact: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows of a step, each over the tokens of its request's `RowTokens`.

    A request with one row, and every row with `row_exact`, is attended alone: a function of the row and its tokens.

    Returns:
        Output [T, Hq, D] and lse [T, Hq] in fp32 (float64 for float64), not gated; padding rows are 0 and -inf.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(q.shape, dtype=wide, device=q.device)
    lse = torch.full(q.shape[:2], -torch.inf, dtype=wide, device=q.device)
    differentiable = torch.is_grad_enabled() and any(
        x.requires_grad for x in (q, cache.k_pages, cache.v_pages)
    )
    with exact_fp32_matmul():
        for group in plan.row_groups():
            tokens = tokens_of(group)
            if row_exact or group.num_rows == 1:
                tiles = (row_tile(tokens, row, group.first_row + row) for row in range(group.num_rows))
            else:
                tiles = union_tiles(tokens, group.first_row, group.first_position, q.shape[1] // cache.kv_heads)
            for tile in tiles:
                if not tile.token_ids.numel():
                    continue
                slots = plan.token_slots(group.request_id, tile.token_ids)
                if differentiable:  # keep no gathered keys between forward and backward
                    attended = checkpoint(_attend_tile, q[tile.rows], cache, tile, slots, softmax_scale,
                                          use_reentrant=False)  # fmt: skip
                else:
                    attended = _attend_tile(q[tile.rows], cache, tile, slots, softmax_scale)
                out[tile.rows], lse[tile.rows] = attended
    return out, lse


def _attend_tile(
    q: torch.Tensor, cache: LayerCache, tile: Tile, slots: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [n, Hq, D] of one tile over its tokens; online softmax, one piece of the tokens at a time."""
    rows, q_heads, dim = q.shape
    kv_heads = cache.kv_heads
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    # [Hkv, n * G, D], contiguous: the product of a row is the same whatever it was cut from
    queries = q.to(wide).view(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim) * softmax_scale
    tops = [torch.full(queries.shape[1:2], -torch.inf, dtype=wide, device=q.device) for _ in range(kv_heads)]
    sums = [torch.zeros_like(top) for top in tops]
    totals = [torch.zeros_like(queries[head]) for head in range(kv_heads)]
    for start in range(0, slots.shape[0], PIECE_TOKENS):
        piece = slots[start : start + PIECE_TOKENS]
        k = _read(cache.k_pages, piece, cache.k_scale, wide)
        v = _read(cache.v_pages, piece, cache.v_scale, wide)
        hidden = None if tile.mask is None else _hidden(tile.mask[:, start : start + PIECE_TOKENS], q_heads // kv_heads)
        for head in range(kv_heads):
            scores = queries[head] @ k[:, head].t()
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            top = torch.maximum(tops[head], scores.amax(dim=-1))
            base = top.masked_fill(top == -torch.inf, 0)  # nothing seen yet: exp(-inf - 0) is 0, not NaN
            weights = torch.exp(scores - base[:, None])
            keep = torch.exp(tops[head] - base)
            sums[head] = sums[head] * keep + weights.sum(dim=-1)
            totals[head] = totals[head] * keep[:, None] + weights @ v[:, head]
            tops[head] = top
    total, weight, top = torch.stack(totals), torch.stack(sums), torch.stack(tops)
    out = torch.where(weight[..., None] == 0, 0, total / weight[..., None].masked_fill(weight[..., None] == 0, 1))
    lse = top + torch.log(weight)
    by_row = (kv_heads, rows, q_heads // kv_heads)
    return (
        out.view(*by_row, dim).transpose(0, 1).reshape(rows, q_heads, dim),
        lse.view(by_row).transpose(0, 1).reshape(rows, q_heads),
    )


def _read(
    pages: torch.Tensor, slots: torch.Tensor, scale: float | torch.Tensor | None, wide: torch.dtype
) -> torch.Tensor:
    rows = read_slots(pages, slots).to(wide)
    return rows if scale is None else rows * scale


def _hidden(mask: torch.Tensor, query_group: int) -> torch.Tensor:
    """[n, U] of attended tokens to [n * G, U] of hidden ones."""
    return (~mask).repeat_interleave(query_group, dim=0)
