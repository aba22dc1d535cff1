"""`plan_step`: from query starts, lengths and a page table to a `StepPlan`, without reading values on the device."""

from __future__ import annotations

import torch

from flashqsa.backends import takes_kernels
from flashqsa.cache.layout import check_page_tokens, ring_capacity
from flashqsa.checks import expect, expect_int, expect_type, values_are_checked
from flashqsa.errors import ArgumentError
from flashqsa.plan.step import StepPlan
from flashqsa.plan.values import check_apart, check_plan_values, check_step_values

INT32 = (torch.int32,)
INT64 = (torch.int64,)
ROW_TENSORS = {
    "request_ids": torch.int32,
    "positions": torch.int64,
    "visible_blocks": torch.int32,
    "slot_ids": torch.int64,
    "closed_block_slot_ids": torch.int64,
    "ring_slot_ids": torch.int64,
}
REFILLED = ("query_starts", "seq_lens", "page_table", "first_slots", "first_block_slots", "ring_ids", *ROW_TENSORS)


def plan_step(
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor | None,
    *,
    page_tokens: int | None,
    block_tokens: int,
    topk_blocks: int,
    max_query_len: int,
    max_seq_len: int,
    num_pages: int | None = None,
    first_slots: torch.Tensor | None = None,
    first_block_slots: torch.Tensor | None = None,
    ring_ids: torch.Tensor | None = None,
    ring_tokens: int | None = None,
    speculative_rows: int = 0,
    num_rows: int | None = None,
    out: StepPlan | None = None,
) -> StepPlan:
    """Plan one step of a ragged batch: prefill, decode and verify rows side by side.

    Rows of a request are consecutive and are the last tokens of it. A request with ``seq_lens`` 0 is padding, and so
    are rows past ``query_starts[R]``: they are neither read nor written.

    Args:
        query_starts: [R + 1] int32, first packed row of each request, from 0, never falling.
        seq_lens: [R] int32, tokens of each request after this step (its rows included), 0 for padding.
        page_table: [R, pages] int32 page ids, any value past a request's length; None with `first_slots`.
        page_tokens: Tokens of a page, a multiple of `block_tokens`; None with `first_slots`.
        block_tokens: Tokens of a block (`r`).
        topk_blocks: Blocks that a row selects at most (`K`).
        max_query_len: Bound on the rows of a request, known on the host.
        max_seq_len: Bound on `seq_lens`, known on the host.
        num_pages: Pages of the pool; ids are checked against it.
        first_slots: [R] int64 slot of each request's token 0, for caches that are contiguous per request.
        first_block_slots: [R] int64 block slot of each request's block 0; ``first_slots // block_tokens`` by default.
        ring_ids: [R] int32, ring of each request, -1 for none; None when nothing is prepared through this plan.
        ring_tokens: Raw index keys of a ring; with `ring_ids`. At least ``block_tokens + speculative_rows``.
        speculative_rows: Draft rows that a step may add beyond the accepted one.
        num_rows: Packed rows, padding included; ``query_starts[R]`` by default on the CPU, required elsewhere.
        out: A plan of the same shapes to refill in place, e.g. one that a CUDA graph has captured.

    Returns:
        The plan, `out` itself when given.

    Raises:
        ShapeError, DTypeError, DeviceError: A tensor does not fit the others.
        ArgumentError: A number or a value breaks a rule (values are read on the CPU, or with FLASHQSA_DEBUG=1).
    """
    where = "plan_step"
    dims: dict[str, int] = {}
    expect(where, "seq_lens", seq_lens, "R", dims, dtypes=INT32)
    device = seq_lens.device
    _expect_starts(where, query_starts, dims["R"], device)
    _check_numbers(where, block_tokens, topk_blocks, max_query_len, max_seq_len, speculative_rows)
    _check_optional_numbers(where, num_pages, num_rows)
    if out is not None:
        expect_type(where, "out", out, StepPlan)
    _check_addressing(where, dims, page_table, page_tokens, first_slots, first_block_slots, block_tokens, device)
    _check_ring(where, dims, ring_ids, ring_tokens, speculative_rows, block_tokens, device)
    if values_are_checked(device):
        check_step_values(
            where, query_starts, seq_lens, page_table, page_tokens, num_pages, first_slots, ring_ids,
            max_query_len=max_query_len, max_seq_len=max_seq_len, num_rows=num_rows,
        )  # fmt: skip
        if first_block_slots is not None:
            check_apart(where, "first_block_slots", first_block_slots, seq_lens // block_tokens)
    if num_rows is None:
        if device.type != "cpu":
            raise ArgumentError(
                f"{where}: num_rows must be given on {device}, got None. Reading query_starts there would stall the "
                "device; pass the number of packed rows."
            )
        num_rows = int(query_starts[-1])
    by_kernel = takes_kernels(device)
    given = (query_starts, seq_lens, page_table, first_slots, first_block_slots, ring_ids)
    if first_slots is not None and first_block_slots is None:
        first_block_slots = torch.empty_like(first_slots) if by_kernel else first_slots // block_tokens
    if by_kernel:
        row_tensors = _row_buffers(num_rows, device, out)
    else:
        row_tensors = _row_tensors(
            query_starts, seq_lens, page_table, first_slots, first_block_slots, ring_ids,
            num_rows=num_rows, page_tokens=page_tokens, block_tokens=block_tokens, ring_tokens=ring_tokens,
            num_pages=num_pages,
        )  # fmt: skip
    plan = StepPlan(
        query_starts=query_starts,
        seq_lens=seq_lens,
        page_table=page_table,
        first_slots=first_slots,
        first_block_slots=first_block_slots,
        ring_ids=ring_ids,
        page_tokens=page_tokens,
        block_tokens=block_tokens,
        topk_blocks=topk_blocks,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        num_pages=num_pages,
        ring_tokens=ring_tokens,
        **row_tensors,
    )
    if out is not None and by_kernel and not values_are_checked(device):
        _check_refill(where, out, plan)
        _fill_by_kernel(out, given, num_pages)
        out.forget_host_copies()
        return out
    if by_kernel:
        _fill_by_kernel(plan, given, num_pages)
    if values_are_checked(device):
        check_plan_values(where, plan)
    return plan if out is None else _refill(where, out, plan)


def check_tensors(plan: StepPlan) -> None:
    """Check the tensors of a plan that an engine assembled itself."""
    where = "StepPlan.from_tensors"
    dims: dict[str, int] = {}
    expect(where, "seq_lens", plan.seq_lens, "R", dims, dtypes=INT32)
    device = plan.seq_lens.device
    _expect_starts(where, plan.query_starts, dims["R"], device)
    _check_numbers(where, plan.block_tokens, plan.topk_blocks, plan.max_query_len, plan.max_seq_len, 0)
    _check_optional_numbers(where, plan.num_pages, None)
    _check_addressing(where, dims, plan.page_table, plan.page_tokens, None, None, plan.block_tokens, device)
    _check_ring(where, dims, plan.ring_ids, plan.ring_tokens, 0, plan.block_tokens, device)
    for name, dtypes in (
        ("request_ids", INT32),
        ("positions", INT64),
        ("visible_blocks", INT32),
        ("slot_ids", INT64),
        ("closed_block_slot_ids", INT64),
        ("ring_slot_ids", INT64),
    ):
        expect(where, name, getattr(plan, name), "T", dims, dtypes=dtypes, device=device)
    if values_are_checked(device):
        check_step_values(
            where, plan.query_starts, plan.seq_lens, plan.page_table, plan.page_tokens, plan.num_pages, None,
            plan.ring_ids, max_query_len=plan.max_query_len, max_seq_len=plan.max_seq_len, num_rows=plan.num_rows,
        )  # fmt: skip
        check_plan_values(where, plan)


def _expect_starts(where: str, query_starts: torch.Tensor, num_requests: int, device: torch.device) -> None:
    expect(
        where, "query_starts", query_starts, str(num_requests + 1), {}, dtypes=INT32, device=device,
        hint="One start a request and the end of the last.",
    )  # fmt: skip


def _check_numbers(
    where: str, block_tokens: int, topk_blocks: int, max_query_len: int, max_seq_len: int, speculative_rows: int
) -> None:
    for name, value, least in (
        ("block_tokens", block_tokens, 1),
        ("topk_blocks", topk_blocks, 1),
        ("max_query_len", max_query_len, 0),
        ("max_seq_len", max_seq_len, 0),
        ("speculative_rows", speculative_rows, 0),
    ):
        expect_int(where, name, value, least=least)


def _check_optional_numbers(where: str, num_pages: int | None, num_rows: int | None) -> None:
    for name, value in (("num_pages", num_pages), ("num_rows", num_rows)):
        if value is not None:
            expect_int(where, name, value)


def _check_addressing(
    where: str,
    dims: dict[str, int],
    page_table: torch.Tensor | None,
    page_tokens: int | None,
    first_slots: torch.Tensor | None,
    first_block_slots: torch.Tensor | None,
    block_tokens: int,
    device: torch.device,
) -> None:
    if (page_table is None) == (first_slots is None):
        raise ArgumentError(
            f"{where}: exactly one of page_table and first_slots must be given, got "
            f"{'neither' if page_table is None else 'both'}. Paged caches have a table, contiguous ones first slots."
        )
    if first_slots is not None:
        expect(where, "first_slots", first_slots, "R", dims, dtypes=INT64, device=device)
        if first_block_slots is not None:
            expect(where, "first_block_slots", first_block_slots, "R", dims, dtypes=INT64, device=device)
        return
    assert page_table is not None
    expect(where, "page_table", page_table, "R pages", dims, dtypes=INT32, device=device)
    if page_tokens is None:
        raise ArgumentError(f"{where}: page_tokens must be given with a page_table, got None. Pass the page size.")
    check_page_tokens(where, page_tokens, block_tokens)


def _check_ring(
    where: str,
    dims: dict[str, int],
    ring_ids: torch.Tensor | None,
    ring_tokens: int | None,
    speculative_rows: int,
    block_tokens: int,
    device: torch.device,
) -> None:
    if ring_ids is None:
        return
    expect(where, "ring_ids", ring_ids, "R", dims, dtypes=INT32, device=device)
    needed = ring_capacity(block_tokens, speculative_rows)
    if ring_tokens is not None:
        expect_int(where, "ring_tokens", ring_tokens)
    if ring_tokens is None or ring_tokens < needed or ring_tokens % block_tokens:
        raise ArgumentError(
            f"{where}: ring_tokens must be a multiple of block_tokens = {block_tokens} and at least {needed} for "
            f"{speculative_rows} speculative rows, got {ring_tokens}. "
            "Use ring_capacity(block_tokens, speculative_rows)."
        )


def _row_tensors(
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor | None,
    first_slots: torch.Tensor | None,
    first_block_slots: torch.Tensor | None,
    ring_ids: torch.Tensor | None,
    *,
    num_rows: int,
    page_tokens: int | None,
    block_tokens: int,
    ring_tokens: int | None,
    num_pages: int | None,
) -> dict[str, torch.Tensor]:
    """Per-row tensors of a plan. Padding is masked, never branched on, so nothing is read on the host."""
    starts = query_starts.to(torch.int64)
    rows = torch.arange(num_rows, device=seq_lens.device)
    requests = torch.searchsorted(starts[1:].contiguous(), rows, right=True)
    inside = requests < seq_lens.shape[0]
    requests = requests.clamp(max=max(seq_lens.shape[0] - 1, 0))
    if seq_lens.shape[0] == 0:
        nothing = torch.full((num_rows,), -1, device=seq_lens.device)
        positions, lens, live = nothing, nothing, nothing >= 0
    else:
        lens = seq_lens.to(torch.int64)[requests]
        positions = lens - starts[requests + 1] + rows
        live = inside & (lens > 0) & (positions >= 0)
        positions = torch.where(live, positions, -1)
    closes = live & ((positions + 1) % block_tokens == 0)
    block_ids = positions // block_tokens
    if not num_rows or seq_lens.shape[0] == 0 or (page_table is not None and page_table.shape[1] == 0):
        slots = block_slots = torch.full_like(positions, -1)
    elif page_table is not None:
        assert page_tokens is not None
        column = (positions.clamp(min=0) // page_tokens).clamp(max=page_table.shape[1] - 1)
        page = page_table[requests, column].to(torch.int64)
        live_page = (page >= 0) & (page < (num_pages if num_pages is not None else 1 << 40))
        slots = torch.where(live & live_page, page * page_tokens + positions % page_tokens, -1)
        page_blocks = page_tokens // block_tokens
        block_slots = torch.where(closes & live_page, page * page_blocks + block_ids % page_blocks, -1)
    else:
        assert first_slots is not None
        assert first_block_slots is not None
        slots = torch.where(live, first_slots[requests] + positions, -1)
        block_slots = torch.where(closes, first_block_slots[requests] + block_ids, -1)
    ring_slots = torch.full_like(positions, -1)
    if ring_ids is not None and ring_tokens is not None and seq_lens.shape[0]:
        ring = ring_ids.to(torch.int64)[requests]
        kept = live & (ring >= 0) & (lens - positions <= ring_tokens)
        ring_slots = torch.where(kept, ring * ring_tokens + positions % ring_tokens, -1)
    return {
        "request_ids": torch.where(live, requests, -1).to(torch.int32),
        "positions": positions,
        "visible_blocks": torch.where(live, (positions + 1) // block_tokens, 0).to(torch.int32),
        "slot_ids": slots,
        "closed_block_slot_ids": block_slots,
        "ring_slot_ids": ring_slots,
    }


def _row_buffers(num_rows: int, device: torch.device, out: StepPlan | None) -> dict[str, torch.Tensor]:
    """Per-row tensors for a kernel to fill: those of `out` where nothing is checked first, else new ones."""
    if out is not None and out.num_rows == num_rows and not values_are_checked(device):
        return {name: getattr(out, name) for name in ROW_TENSORS}
    return {name: torch.empty(num_rows, dtype=dtype, device=device) for name, dtype in ROW_TENSORS.items()}


def _fill_by_kernel(plan: StepPlan, given: tuple[torch.Tensor | None, ...], num_pages: int | None) -> None:
    from flashqsa.plan.triton_plan import plan_step_triton

    query_starts, seq_lens, page_table, first_slots, first_block_slots, ring_ids = given
    plan_step_triton(  # type: ignore[no-untyped-call]
        query_starts, seq_lens, page_table, plan, num_pages=num_pages, first_slots=first_slots,
        first_block_slots=first_block_slots, ring_ids=ring_ids,
    )  # fmt: skip


def _check_refill(where: str, out: StepPlan, plan: StepPlan) -> None:
    """Raise unless `out` can hold `plan`: the same shapes and numbers, bounds no smaller."""
    for name in REFILLED:
        target, source = getattr(out, name), getattr(plan, name)
        if (target is None) != (source is None) or (target is not None and target.shape != source.shape):
            old, new = (None if x is None else list(x.shape) for x in (target, source))
            raise ArgumentError(
                f"{where}: out must have {name} of the same shape, got {old} for {new}. "
                "Refill a plan with the shapes that it was made with."
            )
    for name in ("page_tokens", "block_tokens", "topk_blocks", "ring_tokens"):
        if getattr(out, name) != getattr(plan, name):
            raise ArgumentError(
                f"{where}: out must have {name} = {getattr(plan, name)}, got {getattr(out, name)}. "
                "Make a plan for each pool and model."
            )
    for name in ("max_query_len", "max_seq_len"):
        if getattr(plan, name) > getattr(out, name):
            raise ArgumentError(
                f"{where}: {name} must not exceed the plan's own {getattr(out, name)}, got {getattr(plan, name)}. "
                "Make the plan with the largest bounds that it will see."
            )


def _refill(where: str, out: StepPlan, plan: StepPlan) -> StepPlan:
    """Copy a plan's values into tensors that others already point at."""
    _check_refill(where, out, plan)
    for name in REFILLED:
        target, source = getattr(out, name), getattr(plan, name)
        if target is not None and target is not source:
            target.copy_(source)
    out.forget_host_copies()
    return out
