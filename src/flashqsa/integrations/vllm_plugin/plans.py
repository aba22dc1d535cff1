"""Plans from vLLM's tensors. Its block tables are page tables here, its blocks are pages."""

from __future__ import annotations

from typing import Any

import torch

from flashqsa.errors import UnsupportedError
from flashqsa.plan import StepPlan


def row_requests(query_starts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows] int64 request of each packed row; the last request for rows past the end.

    Args:
        query_starts: [R + 1] int32 from 0.
        num_rows: Packed rows, padding included.
    """
    rows = torch.arange(num_rows, device=query_starts.device)
    found = torch.searchsorted(query_starts[1:].to(torch.int64).contiguous(), rows, right=True)
    return found.clamp(max=max(query_starts.shape[0] - 2, 0))


def plan_of_tensors(
    *,
    request_ids: torch.Tensor,
    positions: torch.Tensor,
    visible_blocks: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    page_tokens: int,
    block_tokens: int,
    topk_blocks: int,
    max_seq_len: int,
    nowhere: torch.Tensor | None = None,
    slot_ids: torch.Tensor | None = None,
    closed_block_slot_ids: torch.Tensor | None = None,
    ring_slot_ids: torch.Tensor | None = None,
    ring_ids: torch.Tensor | None = None,
    ring_tokens: int | None = None,
    max_query_len: int | None = None,
) -> StepPlan:
    """The plan of one operator call, which knows no more of the step than its own arguments; checked by the stages.

    `nowhere` is [T] int64 of -1, for slots that are not told; `max_query_len` is T where nothing bounds it.
    """
    if nowhere is None:
        nowhere = torch.full((positions.shape[0],), -1, dtype=torch.int64, device=positions.device)
    return StepPlan(
        query_starts=query_starts,
        seq_lens=seq_lens,
        page_table=page_table,
        first_slots=None,
        first_block_slots=None,
        ring_ids=ring_ids,
        request_ids=request_ids,
        positions=positions,
        visible_blocks=visible_blocks,
        slot_ids=nowhere if slot_ids is None else slot_ids,
        closed_block_slot_ids=nowhere if closed_block_slot_ids is None else closed_block_slot_ids,
        ring_slot_ids=nowhere if ring_slot_ids is None else ring_slot_ids,
        page_tokens=page_tokens,
        block_tokens=block_tokens,
        topk_blocks=topk_blocks,
        max_query_len=positions.shape[0] if max_query_len is None else max_query_len,
        max_seq_len=max_seq_len,
        ring_tokens=ring_tokens,
    )


def first_positions(least: torch.Tensor, request_ids: torch.Tensor, query_starts: torch.Tensor) -> torch.Tensor:
    """Smallest position [R] int64 of each request's first row at which no row comes before `least`.

    Args:
        least: [T] int64 position that each row has at least; negative where it may be anywhere.
        request_ids: [T] int64 request of each row.
        query_starts: [R + 1] int32 first row of each request.
    """
    rows = torch.arange(least.shape[0], device=least.device)
    starts = least - (rows - query_starts.to(torch.int64)[request_ids])
    first = torch.zeros(query_starts.shape[0] - 1, dtype=torch.int64, device=least.device)
    return first.scatter_reduce(0, request_ids, starts, "amax")


def check_page_sizes(page_tokens: int, index_page_rows: int, compress_ratio: int) -> None:
    """Raise unless K, V and pooled keys have pages of the same tokens."""
    if page_tokens != index_page_rows * compress_ratio:
        raise UnsupportedError(
            f"flashqsa: pages of K/V and of pooled index keys must hold the same tokens, got {page_tokens} and "
            f"{index_page_rows * compress_ratio}. Let vLLM choose the block size."
        )


def step_plan(raw: Any, compressed: Any, main: Any, *, page_tokens: int, topk_blocks: int, ring_tokens: int
              ) -> tuple[StepPlan, StepPlan]:  # fmt: skip
    """The plans of one step, made by its first layer and kept with vLLM's metadata for the others.

    Args:
        raw: `QSAForwardMetadata` of the ring.
        compressed: `QSAForwardMetadata` of the pooled keys.
        main: `FlashAttentionMetadata` of K and V.
        page_tokens: Tokens of a page.
        topk_blocks: Blocks that a row selects at most.
        ring_tokens: Raw keys of a ring.

    Returns:
        The plan on the page table of K and V, and the one on that of the pooled keys (the same where they share it).
    """
    known: dict[tuple[int, int], tuple[StepPlan, StepPlan]] = raw.__dict__.setdefault("flashqsa_plans", {})
    key = (id(compressed), id(main))
    if key not in known:
        known[key] = _make_plans(raw, compressed, main, page_tokens, topk_blocks, ring_tokens)
    return known[key]


def _make_plans(
    raw: Any, compressed: Any, main: Any, page_tokens: int, topk_blocks: int, ring_tokens: int
) -> tuple[StepPlan, StepPlan]:
    rows: int = raw.num_actual_tokens
    positions = raw.logical_positions[:rows]
    requests = raw.token_to_req[:rows].masked_fill(positions < 0, -1)
    rings = raw.block_table[:, 0]
    plans: list[StepPlan] = []
    for table in (main.block_table, compressed.block_table):
        if plans and table.data_ptr() == main.block_table.data_ptr():
            plans.append(plans[0])
            continue
        plan = StepPlan.from_tensors(
            query_starts=raw.query_start_loc,
            seq_lens=raw.seq_lens,
            page_table=table,
            request_ids=requests,
            positions=positions,
            visible_blocks=compressed.visible_blocks[:rows],
            slot_ids=main.slot_mapping[:rows],
            page_tokens=page_tokens,
            block_tokens=compressed.compress_ratio,
            topk_blocks=topk_blocks,
            max_query_len=raw.max_query_len,
            max_seq_len=raw.max_seq_len,
            closed_block_slot_ids=compressed.slot_mapping[:rows],
            ring_slot_ids=raw.slot_mapping[:rows],
            ring_ids=torch.where(rings > 0, rings, -1),
            ring_tokens=ring_tokens,
        )
        plans.append(plan)
    return plans[0], plans[1]
