"""From requests and their new rows to a `StepPlan`: packed on the host, uploaded at once, refilled in place."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flashqsa.checks import expect_int, expect_type
from flashqsa.errors import ArgumentError, DeviceError

if TYPE_CHECKING:
    from flashqsa.plan import StepPlan

ALIGNED = 4
"""Numbers that each part of the upload is rounded up to: 16 bytes, what kernels like best."""


@dataclass(frozen=True)
class PlannedRequest:
    """One request in a step.

    Attributes:
        ring_id: Its ring.
        rows: Rows that it adds.
        seq_len: Tokens after the step.
        page_ids: int32 pages of those tokens.
    """

    ring_id: int
    rows: int
    seq_len: int
    page_ids: array[int]


@dataclass(frozen=True)
class StepNumbers:
    """What a pool fixes about its steps.

    Attributes:
        page_tokens: Tokens of a page.
        block_tokens: Tokens of a block.
        ring_tokens: Raw keys of a ring.
        topk_blocks: Blocks that a row selects at most.
        num_pages: Pages of the pool.
        device: Where plans live.
    """

    page_tokens: int
    block_tokens: int
    ring_tokens: int
    topk_blocks: int
    num_pages: int
    device: torch.device


@dataclass(frozen=True)
class StepShape:
    """Shapes and bounds of a step.

    Attributes:
        num_requests: Requests, padding included.
        num_rows: Packed rows, padding included.
        table_pages: Columns of the page table.
        max_query_len: Bound on the rows of a request.
        max_seq_len: Bound on lengths.
    """

    num_requests: int
    num_rows: int
    table_pages: int
    max_query_len: int
    max_seq_len: int


def shape_of(
    where: str, planned: Sequence[PlannedRequest], given: dict[str, int | None], out: StepPlan | None
) -> StepShape:
    """Shapes of a step: those of `out`, those that are given, or the smallest that fit.

    Args:
        where: Name of the calling function.
        planned: The requests.
        given: The fields of `StepShape`, None where the caller left them open.
        out: A plan to refill, or None.

    Raises:
        ArgumentError: The step does not fit, or a number is none.
    """
    needed = StepShape(
        num_requests=len(planned),
        num_rows=sum(request.rows for request in planned),
        table_pages=max((len(request.page_ids) for request in planned), default=0),
        max_query_len=max((request.rows for request in planned), default=0),
        max_seq_len=max((request.seq_len for request in planned), default=0),
    )
    chosen: dict[str, int] = {}
    for name, value in given.items():
        least = getattr(needed, name)
        if out is not None:
            if value is not None:
                raise ArgumentError(
                    f"{where}: {name} must not be given with out, got {value}. The plan that is refilled fixes it."
                )
            value = _shape_in(out, name)
        if value is not None:
            expect_int(where, name, value, least=None)
            if value < least:
                raise ArgumentError(
                    f"{where}: {'' if out is None else 'out.'}{name} must be at least the {least} of this step, got "
                    f"{value}. Make the plan as large as the largest step, or plan fewer requests or rows."
                )
        chosen[name] = least if value is None else int(value)
    return StepShape(**chosen)


def _shape_in(out: StepPlan, name: str) -> int:
    if name == "table_pages":
        assert out.page_table is not None
        return out.page_table.shape[1]
    number: int = getattr(out, name)
    return number


def expect_refillable(where: str, out: object, numbers: StepNumbers) -> None:
    """Raise unless a plan can be refilled with steps of a pool: it has a page table, rings and the pool's numbers.

    Raises:
        ArgumentError: It is no such plan.
        DeviceError: It lives elsewhere.
    """
    from flashqsa.plan import StepPlan  # at call time: the planner itself imports the cache layout

    expect_type(where, "out", out, StepPlan)
    assert isinstance(out, StepPlan)
    if out.page_table is None or out.ring_ids is None:
        missing = "page_table" if out.page_table is None else "ring_ids"
        raise ArgumentError(f"{where}: out must have {missing}, got a plan without. Refill a plan that a pool made.")
    for name in ("page_tokens", "block_tokens", "ring_tokens", "topk_blocks", "num_pages"):
        if getattr(out, name) != getattr(numbers, name):
            raise ArgumentError(
                f"{where}: out must have {name} = {getattr(numbers, name)}, got {getattr(out, name)}. "
                "Refill a plan that this pool made."
            )
    if out.device != numbers.device:
        raise DeviceError(f"{where}: out must be on {numbers.device}, got {out.device}. Refill a plan of this pool.")


def fill_plan(
    planned: Sequence[PlannedRequest], shape: StepShape, numbers: StepNumbers, out: StepPlan | None
) -> StepPlan:
    """Plan a step.

    Args:
        planned: The requests.
        shape: Shapes of the step.
        numbers: What the pool fixes.
        out: A plan of this shape to refill.
    """
    from flashqsa.plan import plan_step

    width = max((len(request.page_ids) for request in planned), default=0) if out is not None else shape.table_pages
    starts, lens, rings, table = _upload(planned, shape.num_requests, width, numbers.device)
    if out is not None:  # entries past a request's pages may hold anything: a wide table costs what its requests use
        assert out.page_table is not None
        out.page_table[:, :width].copy_(table)
        table = out.page_table
    return plan_step(
        starts, lens, table, page_tokens=numbers.page_tokens, block_tokens=numbers.block_tokens,
        topk_blocks=numbers.topk_blocks, max_query_len=shape.max_query_len, max_seq_len=shape.max_seq_len,
        num_pages=numbers.num_pages, ring_ids=rings, ring_tokens=numbers.ring_tokens, num_rows=shape.num_rows, out=out,
    )  # fmt: skip


def _upload(
    planned: Sequence[PlannedRequest], num_requests: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """query_starts, seq_lens, ring_ids and page_table as views of one int32 upload; padding has length 0."""
    sizes = [num_requests + 1, num_requests, num_requests, num_requests * width]
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + -(-size // ALIGNED) * ALIGNED)
    cpu = torch.device("cpu")  # whatever torch's default device is
    host = torch.full((ends[-1],), -1, dtype=torch.int32, device=cpu, pin_memory=device.type == "cuda")

    def parts(buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        starts, lens, rings, table = (
            buffer[first : first + size] for first, size in zip(ends[:-1], sizes, strict=True)
        )
        return starts, lens, rings, table.view(num_requests, width)

    starts, lens, rings, table = parts(host)
    padding = [0] * (num_requests - len(planned))
    starts.copy_(torch.tensor([0, *(request.rows for request in planned), *padding], device=cpu).cumsum(0))
    lens.copy_(torch.tensor([*(request.seq_len for request in planned), *padding], device=cpu))
    rings[: len(planned)] = torch.tensor([request.ring_id for request in planned], device=cpu)
    for row, request in enumerate(planned):
        if request.page_ids:
            table[row, : len(request.page_ids)] = torch.frombuffer(request.page_ids, dtype=torch.int32)
    return (starts, lens, rings, table) if device.type == "cpu" else parts(host.to(device, non_blocking=True))
