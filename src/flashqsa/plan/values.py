"""Value checks of a step: lengths, ids and slots, read on the host where that is allowed."""

from __future__ import annotations

import itertools

import torch

from flashqsa.errors import ArgumentError
from flashqsa.plan.step import StepPlan


def check_step_values(
    where: str,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor | None,
    page_tokens: int | None,
    num_pages: int | None,
    first_slots: torch.Tensor | None,
    ring_ids: torch.Tensor | None,
    *,
    max_query_len: int,
    max_seq_len: int,
    num_rows: int | None,
) -> None:
    """Check what a caller hands to the planner.

    Raises:
        ArgumentError: Naming the argument, the rule, the value and what to do.
    """
    starts, lens = query_starts.tolist(), seq_lens.tolist()
    if starts[0] != 0 or any(b < a for a, b in itertools.pairwise(starts)):
        raise ArgumentError(
            f"{where}: query_starts must rise from 0, got {starts}. Pass the running sum of rows a request."
        )
    if num_rows is not None and starts[-1] > num_rows:
        raise ArgumentError(
            f"{where}: query_starts must end within num_rows = {num_rows}, got {starts[-1]}. Count all packed rows."
        )
    live_rings: dict[int, int] = {}
    rings = None if ring_ids is None else ring_ids.tolist()
    for request, seq_len in enumerate(lens):
        query_len = starts[request + 1] - starts[request]
        _check_lengths(where, request, seq_len, query_len, max_query_len, max_seq_len)
        if seq_len == 0 or query_len == 0 or rings is None or rings[request] < 0:
            continue
        other = live_rings.setdefault(rings[request], request)
        if other != request:
            raise ArgumentError(
                f"{where}: ring_ids must differ between requests, got ring {rings[request]} for requests {other} and "
                f"{request}. A ring is private to its request."
            )
    if page_table is not None:
        assert page_tokens is not None
        _check_pages(where, lens, page_table, page_tokens, num_pages)
    if first_slots is not None:
        check_apart(where, "first_slots", first_slots, seq_lens)


def check_apart(where: str, name: str, first_slots: torch.Tensor, lens: torch.Tensor) -> None:
    """Slots of contiguous requests: none negative, none of two requests unless both begin at the same place.

    Args:
        where: Name of the calling function.
        name: Name of the argument that holds the first slots.
        first_slots: [R] int64, slot of each request's first token or block.
        lens: [R] integers, how many tokens or blocks each request has.

    Raises:
        ArgumentError: As `check_step_values`.
    """
    spans = sorted(
        (first, first + slots, request)
        for request, (first, slots) in enumerate(zip(first_slots.tolist(), lens.tolist(), strict=True))
        if slots > 0
    )
    if spans and spans[0][0] < 0:
        raise ArgumentError(
            f"{where}: {name} must not be negative, got {spans[0][0]} for request {spans[0][2]}. "
            "Pass the slot where the request begins."
        )
    for (first, end, request), (other_first, _, other) in itertools.pairwise(spans):
        if first < other_first < end:
            raise ArgumentError(
                f"{where}: {name} must keep requests apart, got slots {first} to {end - 1} for request {request} and "
                f"{other_first} onwards for request {other}. Give every request room for all that it holds."
            )


def _check_lengths(
    where: str, request: int, seq_len: int, query_len: int, max_query_len: int, max_seq_len: int
) -> None:
    if seq_len < 0 or (0 < seq_len < query_len):
        raise ArgumentError(
            f"{where}: seq_lens must count a request's rows of this step too, got seq_lens[{request}] = {seq_len} with "
            f"{query_len} rows. Pass the length after the step, or 0 for a padding request."
        )
    if seq_len > max_seq_len:
        raise ArgumentError(
            f"{where}: max_seq_len must bound seq_lens, got {max_seq_len} with seq_lens[{request}] = {seq_len}. "
            "Pass the largest length that the step can have."
        )
    if seq_len and query_len > max_query_len:
        raise ArgumentError(
            f"{where}: max_query_len must bound the rows of a request, got {max_query_len} with {query_len} rows of "
            f"request {request}. Pass the largest number of rows."
        )


def _check_pages(
    where: str, lens: list[int], page_table: torch.Tensor, page_tokens: int, num_pages: int | None
) -> None:
    """Every page of a live token must be in the table and in the pool; entries past the length may be anything."""
    if not lens or not max(lens):
        return
    needed = [-(-n // page_tokens) for n in lens]
    if max(needed) > page_table.shape[1]:
        request = needed.index(max(needed))
        raise ArgumentError(
            f"{where}: page_table must have {max(needed)} columns for seq_lens[{request}] = {lens[request]} with pages "
            f"of {page_tokens} tokens, got {page_table.shape[1]}. Widen the table."
        )
    columns = torch.arange(max(needed), device=page_table.device)
    live = columns[None] < torch.tensor(needed, device=page_table.device)[:, None]
    page_ids = page_table[:, : max(needed)]
    bad = live & ((page_ids < 0) | (page_ids >= (num_pages if num_pages is not None else 2**31 - 1)))
    if bool(bad.any()):
        request, column = (int(x) for x in bad.nonzero()[0])
        raise ArgumentError(
            f"{where}: page_table must hold page ids in [0, {num_pages if num_pages is not None else 'num_pages'}) for "
            f"live tokens, got page_table[{request}, {column}] = {int(page_ids[request, column])}. "
            "Allocate the page before planning the step."
        )


def check_plan_values(where: str, plan: StepPlan) -> None:
    """Check the rows of a plan: where query_starts has them, consecutive, counts that fit, no slot written twice.

    Raises:
        ArgumentError: As `check_step_values`.
    """
    lens, starts = plan.seq_lens.tolist(), plan.query_starts.tolist()
    for group in plan.row_groups():
        if not 0 <= group.request_id < len(lens):
            raise ArgumentError(
                f"{where}: request_ids must be in [0, {len(lens)}) or -1, got {group.request_id} in row "
                f"{group.first_row}. Number requests as seq_lens does."
            )
        if (group.first_row, group.end_row) != (starts[group.request_id], starts[group.request_id + 1]):
            raise ArgumentError(
                f"{where}: request_ids must agree with query_starts, got request {group.request_id} in rows "
                f"{group.first_row} to {group.end_row - 1} and query_starts {starts}. "
                "Rows of a request are consecutive."
            )
        expected = torch.arange(group.first_position, group.end_position, device=plan.device)
        if group.first_position < 0 or not torch.equal(plan.positions[group.first_row : group.end_row], expected):
            raise ArgumentError(
                f"{where}: positions must rise by one within a request, got "
                f"{plan.positions[group.first_row : group.end_row].tolist()[:8]} for request {group.request_id}. "
                "Pack the rows of a request in the order of its tokens."
            )
        if group.end_position != lens[group.request_id]:
            raise ArgumentError(
                f"{where}: the rows of a request must be its last tokens, got position {group.end_position - 1} "
                f"as the last of request {group.request_id} with seq_lens {lens[group.request_id]}. "
                "Pass lengths after the step."
            )
    seen = (plan.positions + 1) // plan.block_tokens
    if bool(((plan.visible_blocks < 0) | (plan.visible_blocks > seen.clamp(min=0))).any()):
        raise ArgumentError(
            f"{where}: visible_blocks must be in [0, (position + 1) // block_tokens], got "
            f"{plan.visible_blocks.tolist()[:8]} at positions {plan.positions.tolist()[:8]}. "
            "Count complete blocks only."
        )
    for name in ("slot_ids", "closed_block_slot_ids", "ring_slot_ids"):
        slots = getattr(plan, name)
        live = slots[slots >= 0]
        if live.numel() > 1:
            ordered = live.sort().values
            twice = ordered[1:] == ordered[:-1]
            if bool(twice.any()):
                raise ArgumentError(
                    f"{where}: {name} must name each place once, got {int(ordered[1:][twice][0])} for two rows. "
                    "Two requests may share pages only for tokens that neither writes."
                )
