"""The plan of one operator call, from the operator's own arguments: in torch, or by kernels that give the same numbers.

Kernels serve what vLLM passes; arguments of other shapes or dtypes go to torch, which says what is wrong with them.
"""

from __future__ import annotations

from typing import Any

import torch

from flashqsa.backends import takes_kernels
from flashqsa.integrations.vllm_plugin.plans import first_positions, plan_of_tensors, row_requests
from flashqsa.integrations.vllm_plugin.rings import Ring, open_ring
from flashqsa.plan import StepPlan
from flashqsa.results import Selection

INT32, INT64 = torch.int32, torch.int64


def fits(tensor: torch.Tensor, dtype: torch.dtype, *shape: int) -> bool:
    """Whether a tensor has this dtype and shape."""
    return tensor.dtype == dtype and tuple(tensor.shape) == shape


def select_plan(
    visible_blocks: torch.Tensor,
    query_starts: torch.Tensor | None,
    page_table: torch.Tensor,
    *,
    rows: int,
    query_len: int,
    page_tokens: int,
    block_tokens: int,
    topk_blocks: int,
    max_seq_len: int,
) -> StepPlan:
    """Rows lie where their visible blocks first allow it; no result depends on that.

    Args:
        visible_blocks: [T] int32; 0 throughout for a padding request.
        query_starts: [R + 1] int32 from any number on, or None where every request has `query_len` rows.
        page_table: [R, pages] int32.
        rows: T.
        query_len: Bound on the rows of a request.
        page_tokens: Tokens of a page.
        block_tokens: Tokens of a block.
        topk_blocks: Blocks that a row selects at most.
        max_seq_len: Bound on the tokens of a request.
    """
    device = visible_blocks.device
    requests = rows // query_len if query_starts is None else query_starts.shape[0] - 1
    known: dict[str, Any] = dict(
        page_table=page_table, page_tokens=page_tokens, block_tokens=block_tokens, topk_blocks=topk_blocks,
        max_seq_len=max_seq_len, max_query_len=max(1, min(query_len, rows)),
    )  # fmt: skip
    starts_fit = query_starts is None or (fits(query_starts, INT32, requests + 1) and query_starts.is_contiguous())
    if takes_kernels(device) and rows and requests > 0 and starts_fit and fits(visible_blocks, INT32, rows):
        from flashqsa.integrations.vllm_plugin.triton_ops import plan_select_triton

        made = plan_select_triton(
            visible_blocks, query_starts, requests=requests, query_len=query_len, block_tokens=block_tokens
        )
        return plan_of_tensors(**made, visible_blocks=visible_blocks, **known)
    if query_starts is None:
        starts = torch.arange(requests + 1, dtype=INT32, device=device) * query_len
    else:
        starts = query_starts - query_starts[0]
    of_row = row_requests(starts, rows)
    visible = visible_blocks.to(INT32)
    first = first_positions(visible.to(INT64) * block_tokens - 1, of_row, starts)
    wide = starts.to(INT64)
    positions = first[of_row] + torch.arange(rows, device=device) - wide[of_row]
    live = torch.zeros_like(first).scatter_reduce(0, of_row, visible.to(INT64), "amax") > 0
    return plan_of_tensors(
        request_ids=torch.where(live[of_row], of_row, -1).to(INT32),
        positions=torch.where(live[of_row], positions, -1),
        visible_blocks=visible,
        query_starts=starts,
        seq_lens=torch.where(live, first + wide[1:] - wide[:-1], 0).to(INT32),
        **known,
    )


def expand_plan(
    block_ids: torch.Tensor, positions: torch.Tensor, visible_blocks: torch.Tensor, *, block_tokens: int,
    topk_blocks: int,
) -> tuple[StepPlan, Selection]:  # fmt: skip
    """Every row a request of its own, and the selection whose blocks are `block_ids`.

    Args:
        block_ids: [T, K] int32.
        positions: [T] int64, -1 for padding.
        visible_blocks: [T] int32.
        block_tokens: Tokens of a block.
        topk_blocks: Blocks that a row selects at most.
    """
    rows, device = block_ids.shape[0], block_ids.device
    known: dict[str, Any] = dict(
        positions=positions, page_table=torch.empty(rows, 0, dtype=INT32, device=device), page_tokens=block_tokens,
        block_tokens=block_tokens, topk_blocks=topk_blocks, max_seq_len=1 << 30,
    )  # fmt: skip
    if takes_kernels(device) and rows and fits(positions, INT64, rows) and fits(visible_blocks, INT32, rows):
        from flashqsa.integrations.vllm_plugin.triton_ops import plan_expand_triton

        made = plan_expand_triton(visible_blocks, positions, topk=topk_blocks)
        counts = made.pop("block_counts")
        plan = plan_of_tensors(**made, **known)
    else:
        alone = torch.arange(rows + 1, dtype=INT32, device=device)
        live = positions >= 0
        visible = torch.where(live, visible_blocks, 0)
        plan = plan_of_tensors(
            request_ids=torch.where(live, alone[:-1], -1),
            visible_blocks=visible,
            query_starts=alone,
            seq_lens=(positions + 1).to(INT32),
            **known,
        )
        counts = visible.clamp(max=topk_blocks)
    return plan, Selection(block_ids, counts, None, plan.visible_blocks, plan.request_ids)


def attend_plan(
    token_ids: torch.Tensor, token_to_req: torch.Tensor, page_table: torch.Tensor, *, page_tokens: int
) -> StepPlan:
    """A request's rows lie one behind the other, as early as the tokens that they attend allow.

    Args:
        token_ids: [T, W + 1] int32 token ids, and in the last column how many of them count; 0 for padding.
        token_to_req: [T] int32 request of each row; rows of one request are consecutive.
        page_table: [R, pages] int32.
        page_tokens: Tokens of a page.
    """
    rows, requests, device = token_ids.shape[0], page_table.shape[0], token_ids.device
    width = token_ids.shape[1] - 1
    known: dict[str, Any] = dict(
        page_table=page_table, page_tokens=page_tokens, block_tokens=1, topk_blocks=max(width, 1),
        max_seq_len=page_table.shape[1] * page_tokens,
    )  # fmt: skip
    lists_fit = width > 0 and token_ids.dtype == INT32 and token_ids.stride(1) == 1
    if takes_kernels(device) and rows and requests and lists_fit and fits(token_to_req, INT32, rows):
        from flashqsa.integrations.vllm_plugin.triton_ops import plan_attend_triton

        made = plan_attend_triton(token_ids, token_to_req, requests=requests)
        del made["last"]
        return plan_of_tensors(**made, **known)
    columns = torch.arange(width, device=device)[None]
    counts = token_ids[:, -1]
    live = (counts > 0) & (token_to_req >= 0) & (token_to_req < requests)
    last = torch.where(columns < counts[:, None], token_ids[:, :-1], -1).amax(dim=1).to(INT64)
    of_row = token_to_req.to(INT64).clamp(0, max(requests - 1, 0))
    row_ids = torch.arange(rows, device=device)
    first_row = torch.full((requests,), rows, device=device)
    first_row = first_row.scatter_reduce(0, of_row, torch.where(live, row_ids, rows), "amin")
    offsets = row_ids - first_row[of_row]
    begin = torch.zeros(requests, dtype=INT64, device=device)
    begin = begin.scatter_reduce(0, of_row, torch.where(live, last - offsets, 0), "amax")
    positions = torch.where(live, begin[of_row] + offsets, -1)
    ends = torch.zeros_like(begin).scatter_reduce(0, of_row, positions + 1, "amax")
    live_rows = torch.zeros_like(begin).scatter_add(0, of_row, live.to(INT64))
    return plan_of_tensors(
        request_ids=torch.where(live, token_to_req, -1),
        positions=positions,
        visible_blocks=torch.zeros(rows, dtype=INT32, device=device),
        query_starts=torch.nn.functional.pad(live_rows.cumsum(0), (1, 0)).to(INT32),
        seq_lens=ends.to(INT32),
        **known,
    )


def prepare_plan(
    logical_positions: torch.Tensor,
    query_starts: torch.Tensor,
    state_slots: torch.Tensor,
    state_block_table: torch.Tensor,
    state_cache: torch.Tensor,
    *,
    key_dim: int,
    rope_offset: int | None,
    slot_ids: torch.Tensor,
    closed_block_slot_ids: torch.Tensor,
    page_tokens: int,
    block_tokens: int,
    max_seq_len: int,
) -> tuple[StepPlan, Ring]:
    """The plan of a preparation, and the rings that it writes; `close_ring` belongs behind it.

    Args:
        logical_positions: [T] int64, -1 for padding.
        query_starts: [R + 1] int32 from 0.
        state_slots: [T] int64 where raw keys go, -1 for none.
        state_block_table: [>= R, >= 1] int32, block of each request in the first column.
        state_cache: [blocks, ring_tokens, 1, width] raw keys.
        key_dim: Dimension of a raw key.
        rope_offset: Where rotary positions begin in a row of `state_cache`, or None.
        slot_ids: [T] int64 slots of K and V.
        closed_block_slot_ids: [T] int64 block slots.
        page_tokens: Tokens of a page.
        block_tokens: Tokens of a block.
        max_seq_len: Bound on the tokens of a request.
    """
    rows, requests, device = logical_positions.shape[0], query_starts.shape[0] - 1, logical_positions.device
    ring_tokens = state_cache.shape[1]
    known: dict[str, Any] = dict(
        positions=logical_positions, query_starts=query_starts, slot_ids=slot_ids,
        page_table=torch.empty(requests, 0, dtype=INT32, device=device), page_tokens=page_tokens,
        closed_block_slot_ids=closed_block_slot_ids, block_tokens=block_tokens, topk_blocks=1,
        max_seq_len=max_seq_len, ring_tokens=ring_tokens,
    )  # fmt: skip
    table_fits = state_block_table.dtype == INT32 and state_block_table.shape[0] >= requests
    starts_fit = fits(query_starts, INT32, requests + 1) and query_starts.is_contiguous()
    rows_fit = fits(logical_positions, INT64, rows) and fits(state_slots, INT64, rows)
    some = rows and requests > 0 and ring_tokens and key_dim and state_cache.stride(3) == 1
    if takes_kernels(device) and some and table_fits and starts_fit and rows_fit:
        from flashqsa.integrations.vllm_plugin.triton_ops import plan_prepare_triton

        made = plan_prepare_triton(
            logical_positions, query_starts, state_slots, state_block_table, state_cache, key_dim=key_dim,
            block_tokens=block_tokens, copies=rope_offset is None,
        )  # fmt: skip
        keys, positions = made.pop("ring_keys"), made.pop("ring_positions")
        if rope_offset is None:
            ring = Ring(keys, positions, made["ring_ids"], state_block_table[:requests, 0])
        else:
            ring = Ring.within(state_cache, key_dim, rope_offset, made["ring_ids"])
        return plan_of_tensors(nowhere=slot_ids, **made, **known), ring
    starts = query_starts.to(INT64)
    last_rows = (starts[1:] - 1).clamp(0, max(rows - 1, 0))
    lens = starts[1:] - starts[:-1]
    ends = torch.where(lens > 0, logical_positions[last_rows] + 1, 0) if rows else torch.zeros_like(lens)
    ring = open_ring(state_cache, state_block_table, (ends - lens).clamp(min=0), key_dim, rope_offset)
    of_row = row_requests(query_starts, rows)
    if ring.copied_from is not None:
        inside = of_row * ring_tokens + logical_positions % ring_tokens
        state_slots = torch.where((state_slots >= 0) & (ring.ring_ids[of_row] >= 0), inside, -1)
    plan = plan_of_tensors(
        request_ids=of_row.to(INT32).masked_fill(logical_positions < 0, -1),
        visible_blocks=((logical_positions + 1) // block_tokens).to(INT32),
        seq_lens=ends.to(INT32),
        ring_slot_ids=state_slots,
        ring_ids=ring.ring_ids,
        nowhere=slot_ids,
        **known,
    )
    return plan, ring
