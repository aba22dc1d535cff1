"""Sparse attention in plain torch: union tiles, online softmax over pieces of the union, on any device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from flashqsa.attention.gating import gate_output
from flashqsa.attention.slots import SlotReader
from flashqsa.attention.tiles import Tile, row_tile, union_tiles
from flashqsa.attention.tokens import RowTokens
from flashqsa.checks import values_are_checked
from flashqsa.matmul import exact_fp32_matmul
from flashqsa.plan import StepPlan

PIECE_TOKENS = 1024
"""Tokens of a union that are attended at once; bounds memory, whatever the context."""

SUM_TOKENS, SUM_DIMS = 256, 64
"""Terms that a matrix product may sum in a row: a long fp32 sum is several times less accurate than a sum of sums."""


@dataclass(frozen=True)
class StepRows:
    """What the rows of a step attend, and how: everything but queries, keys and values.

    Attributes:
        plan: The step.
        tokens: What each row attends.
        softmax_scale: Multiplies the scores.
        k_scale: Multiplies stored keys, or None.
        v_scale: Multiplies stored values, or None.
        row_exact: Whether every row is attended alone.
    """

    plan: StepPlan
    tokens: RowTokens
    softmax_scale: float
    k_scale: float | torch.Tensor | None
    v_scale: float | torch.Tensor | None
    row_exact: bool

    def tiles(self, query_group: int) -> Iterator[tuple[Tile, torch.Tensor]]:
        """All tiles of the step with the slots of their tokens.

        A request with one row, and every row with `row_exact`, is attended alone: a function of the row and its tokens.
        """
        checked = values_are_checked(self.plan.device)
        for group in self.plan.row_groups():
            tokens = self.tokens.rows(group.first_row, group.end_row)
            tiles: Iterable[Tile]
            if self.row_exact or group.num_rows == 1:
                tiles = (row_tile(tokens, row, group.first_row) for row in range(group.num_rows))
            else:
                tiles = union_tiles(tokens, group.first_row, group.first_position, query_group)
            for tile in tiles:
                token_ids = tile.token_ids
                if not checked:  # whatever a caller selected: only the request's own tokens are read
                    token_ids = token_ids.clamp(0, group.end_position - 1)
                yield tile, self.plan.token_slots(group.request_id, token_ids)


def attend_rows_torch(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    step: StepRows,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
) -> None:
    """Attend all rows of a step, computing in fp32 (float64 for float64 queries). Nothing here is differentiable.

    Args:
        q: [T, Hq, D] queries.
        k_pages: [P, page_tokens, Hkv, D] keys.
        v_pages: The same for values.
        step: What the rows attend.
        out: [T, Hq, D] filled with the output, gated if `gate` is given; 0 in rows without a token.
        lse: [T, Hq] fp32 filled with the log-sum-exp, -inf in those rows.
        gate: [T, Hq, D] gate logits, or None.
    """
    keys, values = (SlotReader(pages, wide_dtype(q)) for pages in (k_pages, v_pages))
    with torch.no_grad(), exact_products(q.device):
        _clear(out, lse, step.plan.request_ids < 0)
        for tile, slots in step.tiles(q.shape[1] // keys.heads):
            if not slots.shape[0]:
                _clear(out, lse, tile.rows)
                continue
            queries = scaled_queries(q[tile.rows], keys.heads, step)
            heads_out, heads_lse = _attend_tile(queries, keys, values, tile.mask, slots)
            if step.v_scale is not None:
                heads_out = heads_out * step.v_scale
            rows_out, rows_lse = by_row(heads_out, tile), by_row(heads_lse, tile)
            rows_gate = None if gate is None else gate[tile.rows]
            out[tile.rows] = gate_output(rows_out, rows_lse, rows_gate, q.dtype, out.dtype)
            lse[tile.rows] = rows_lse


def _clear(out: torch.Tensor, lse: torch.Tensor, rows: slice | torch.Tensor) -> None:
    """What rows without a token give."""
    out[rows] = 0
    lse[rows] = -torch.inf


def _attend_tile(
    queries: torch.Tensor, keys: SlotReader, values: SlotReader, mask: torch.Tensor | None, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [Hkv, n * G, D] and lse [Hkv, n * G] of one tile; online softmax, one piece of the tokens at a time."""
    top = torch.full(queries.shape[:2], -torch.inf, dtype=queries.dtype, device=queries.device)
    total, out = torch.zeros_like(top), torch.zeros_like(queries)
    key_places, value_places = keys.places(slots), values.places(slots)
    for piece in pieces(slots.shape[0]):
        scores = piece_scores(queries, keys.read(key_places[:, piece]), mask, piece)
        higher = torch.maximum(top, scores.amax(dim=-1))
        # A row that has seen nothing yet has no maximum: exp(-inf - 0) is 0, not NaN.
        base = higher if mask is None else higher.masked_fill(higher == -torch.inf, 0)
        weights = scores.sub_(base[..., None]).exp_()
        keep = top.sub_(base).exp_()
        total.mul_(keep).add_(weights.sum(dim=-1))
        out.mul_(keep[..., None])
        rows = values.read(value_places[:, piece])
        for start in range(0, rows.shape[1], SUM_TOKENS):
            part = slice(start, start + SUM_TOKENS)
            out.add_(torch.bmm(weights[..., part], rows[:, part]))
        top = higher
    return _normalized(out, total, mask), top.add_(total.log_())


def _normalized(out: torch.Tensor, total: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Weighted sums [Hkv, n * G, D] over their weights, in place; 0 in rows without a token."""
    out.div_(total[..., None])
    if mask is None:
        return out
    empty = (~mask.any(dim=1)).repeat_interleave(total.shape[1] // mask.shape[0])
    return out.masked_fill_(empty[:, None], 0)


def pieces(tokens: int) -> Iterator[slice]:
    """The tokens of a tile in pieces that are attended at once."""
    for start in range(0, tokens, PIECE_TOKENS):
        yield slice(start, min(start + PIECE_TOKENS, tokens))


def piece_scores(queries: torch.Tensor, keys: torch.Tensor, mask: torch.Tensor | None, piece: slice) -> torch.Tensor:
    """Scores [Hkv, n * G, p] of one piece, -inf where a row does not attend a token."""
    columns = keys.transpose(1, 2)
    scores = torch.bmm(queries[..., :SUM_DIMS], columns[:, :SUM_DIMS])
    for start in range(SUM_DIMS, queries.shape[-1], SUM_DIMS):
        dims = slice(start, start + SUM_DIMS)
        scores.add_(torch.bmm(queries[..., dims], columns[:, dims]))
    if mask is not None:
        hidden = ~mask[:, piece]
        if bool(hidden.any()):
            rows, tokens = hidden.shape
            scores.view(scores.shape[0], rows, -1, tokens).masked_fill_(hidden[:, None], -torch.inf)
    return scores


def scaled_queries(q: torch.Tensor, kv_heads: int, step: StepRows) -> torch.Tensor:
    """Queries [n, Hq, D] as [Hkv, n * G, D] wide and contiguous, times all that multiplies a score."""
    queries = q.to(wide_dtype(q)) * step.softmax_scale
    if step.k_scale is not None:
        queries = queries * step.k_scale
    return by_kv_head(queries, kv_heads)


def by_kv_head(rows: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[n, Hq, D] as [Hkv, n * G, D] contiguous."""
    count, _, dim = rows.shape
    return rows.reshape(count, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim).contiguous()


def by_row(heads: torch.Tensor, tile: Tile) -> torch.Tensor:
    """[Hkv, n * G, ...] as [n, Hq, ...]."""
    count = tile.rows.stop - tile.rows.start
    split = heads.view(heads.shape[0], count, -1, *heads.shape[2:])
    return split.transpose(0, 1).flatten(1, 2)


def wide_dtype(q: torch.Tensor) -> torch.dtype:
    """What attention computes in: fp32, or float64 for float64 queries."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@contextmanager
def exact_products(device: torch.device) -> Iterator[None]:
    """Keep TF32 and autocast out of the products inside the block."""
    with exact_fp32_matmul():
        if torch.amp.is_autocast_available(device.type):
            with torch.autocast(device.type, enabled=False):
                yield
        else:
            yield
