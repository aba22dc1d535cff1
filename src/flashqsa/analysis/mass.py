"""How much dense causal attention would give to each block: streamed over the context, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashqsa.cache.state import LayerCache, read_slots
from flashqsa.checks import FLOAT_DTYPES, expect, expect_int, expect_number, expect_type, values_are_checked
from flashqsa.errors import ArgumentError
from flashqsa.matmul import exact_fp32_matmul
from flashqsa.plan import RowGroup, StepPlan

MIB = 1 << 20
DEFAULT_WORKSPACE_BYTES = 64 * MIB
PIECE_TOKENS = 1024
"""Tokens whose keys are read at once, rounded to whole blocks."""


@dataclass(frozen=True)
class BlockMass:
    """Dense attention mass by block, the mean over the query heads. In each live row everything sums to 1.

    Attributes:
        rows: [n] int64 row numbers of the step.
        blocks: [n, M] mass of each complete block that the row sees, 0 behind them; fp32, float64 of float64 queries.
        tail: [n] mass of the tokens of the open block, the row's own included unless it closes a block.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    tail: torch.Tensor


def block_mass(
    q: torch.Tensor,
    cache: LayerCache,
    plan: StepPlan,
    *,
    rows: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> BlockMass:
    """The attention that each row would give to each block if it attended everything that it sees.

    A teacher for an indexer: a row's `blocks` and `tail` are one distribution, without gradient. The result has rows
    times blocks; everything else stays within the workspace. `iterate_block_mass` gives a part of the rows at a time.

    Args:
        q: [T, Hq, D] normed and rotated attention queries, one row a row of the plan.
        cache: Caches of the layer; only `k_pages` is read.
        plan: The step.
        rows: [n] int64 row numbers, in any order; all rows by default.
        softmax_scale: What products of queries and keys are multiplied by; D ** -0.5 by default.
        workspace_bytes: Bound on temporary memory; one row at a time is taken whatever it is. Changes the result by
            rounding alone.

    Returns:
        The mass of the rows in the order given, M being the most blocks that one of them sees; 0 in padding rows.

    Raises:
        ShapeError, DTypeError, DeviceError: A tensor does not fit the caches or the plan.
        ArgumentError: A row number or an option breaks a rule.
    """
    wanted = _wanted_rows(plan, rows)
    visible = plan.visible_blocks[wanted].masked_fill(plan.request_ids[wanted] < 0, 0)
    most = int(visible.max()) if wanted.shape[0] else 0
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    blocks = torch.zeros(wanted.shape[0], most, dtype=dtype, device=q.device)
    tail = torch.zeros(wanted.shape[0], dtype=dtype, device=q.device)
    for places, part in _stream(q, cache, plan, wanted, softmax_scale, workspace_bytes):
        blocks[places, : part.blocks.shape[1]] = part.blocks
        tail[places] = part.tail
    return BlockMass(wanted, blocks, tail)


def iterate_block_mass(
    q: torch.Tensor,
    cache: LayerCache,
    plan: StepPlan,
    *,
    rows: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
) -> Iterator[BlockMass]:
    """As `block_mass`, some rows of one request at a time, padding rows left out.

    Yields:
        Parts that name their rows; each fits into the workspace, whatever the context, unless a single row does not.
    """
    for _, part in _stream(q, cache, plan, _wanted_rows(plan, rows), softmax_scale, workspace_bytes):
        yield part


def _wanted_rows(plan: StepPlan, rows: torch.Tensor | None) -> torch.Tensor:
    where = "block_mass"
    expect_type(where, "plan", plan, StepPlan)
    if rows is None:
        return torch.arange(plan.num_rows, device=plan.device)
    expect(where, "rows", rows, "n", {}, dtypes=(torch.int64,), device=plan.device, hint="Pass row numbers.")
    if values_are_checked(rows.device) and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < plan.num_rows:
        raise ArgumentError(
            f"{where}: rows must be in [0, {plan.num_rows}), got {int(rows.min())} to {int(rows.max())}. "
            "Pass row numbers of the plan."
        )
    return rows


def _stream(
    q: torch.Tensor,
    cache: LayerCache,
    plan: StepPlan,
    wanted: torch.Tensor,
    softmax_scale: float | None,
    workspace_bytes: int,
) -> Iterator[tuple[torch.Tensor, BlockMass]]:
    """Parts of the result, each with the places of its rows in `wanted`."""
    where = "block_mass"
    expect_type(where, "cache", cache, LayerCache)
    dims = {"T": plan.num_rows, "D": cache.head_dim}
    expect(where, "q", q, "T Hq D", dims, dtypes=FLOAT_DTYPES, device=cache.device)
    if not q.shape[1] or q.shape[1] % cache.kv_heads:
        raise ArgumentError(
            f"{where}: q must have a multiple of {cache.kv_heads} heads, got {q.shape[1]}. Pass all query heads."
        )
    plan.check_cache(where, cache)
    expect_int(where, "workspace_bytes", workspace_bytes, least=1)
    scale = cache.head_dim**-0.5 if softmax_scale is None else softmax_scale
    expect_number(where, "softmax_scale", scale)
    for group in plan.row_groups():
        places = ((wanted >= group.first_row) & (wanted < group.end_row)).nonzero().flatten()
        if not places.shape[0]:
            continue
        piece_tokens = max(1, PIECE_TOKENS // plan.block_tokens) * plan.block_tokens
        row_bytes = 2 * 8 * (q.shape[1] * piece_tokens + group.end_position // plan.block_tokens + 1)
        together = max(1, workspace_bytes // row_bytes)
        for start in range(0, places.shape[0], together):
            some = places[start : start + together]
            with torch.no_grad(), exact_fp32_matmul():
                part = _mass_of_rows(q, cache, plan, group, wanted[some], scale, piece_tokens)
            yield some, part


def _mass_of_rows(
    q: torch.Tensor,
    cache: LayerCache,
    plan: StepPlan,
    group: RowGroup,
    rows: torch.Tensor,
    scale: float,
    piece_tokens: int,
) -> BlockMass:
    """Two passes over the keys that the rows see: the first finds each head's log-sum-exp, the second weighs by it."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    r, heads = plan.block_tokens, cache.kv_heads
    positions = group.first_position + (rows - group.first_row)
    tokens = int(positions.max()) + 1
    queries = (q[rows].to(dtype) * scale).view(rows.shape[0], heads, -1, q.shape[2])

    def scores(start: int) -> torch.Tensor:
        """[n, Hkv, G, p] of one piece, -inf at tokens behind the row."""
        token_ids = torch.arange(start, min(start + piece_tokens, tokens), device=q.device)
        keys = read_slots(cache.k_pages, plan.token_slots(group.request_id, token_ids)).to(dtype)
        if cache.k_scale is not None:
            keys = keys * cache.k_scale
        products = torch.einsum("nhgd,phd->nhgp", queries, keys)
        return products.masked_fill_((token_ids > positions[:, None])[:, None, None], -torch.inf)

    lse = queries.new_full(queries.shape[:3], -torch.inf)
    for start in range(0, tokens, piece_tokens):
        lse = torch.logaddexp(lse, torch.logsumexp(scores(start), dim=-1))
    by_block = queries.new_zeros(rows.shape[0], -(-tokens // r))
    for start in range(0, tokens, piece_tokens):
        mass = scores(start).sub_(lse[..., None]).exp_().mean(dim=(1, 2))
        mass = torch.nn.functional.pad(mass, (0, -mass.shape[1] % r))
        by_block[:, start // r : (start + mass.shape[1]) // r] = mass.view(rows.shape[0], -1, r).sum(dim=-1)
    visible = (positions + 1) // r
    is_tail = torch.arange(by_block.shape[1], device=q.device)[None] >= visible[:, None]
    tail = by_block.masked_fill(~is_tail, 0).sum(dim=1)
    blocks = by_block.masked_fill_(is_tail, 0)[:, : int(visible.max())]
    return BlockMass(rows, blocks, tail)
