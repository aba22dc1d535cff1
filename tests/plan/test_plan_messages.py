"""What messages of a plan name, and slots of requests that are contiguous."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.errors import ArgumentError
from flashqsa.plan import StepPlan, plan_step


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def assembled(**changes: Any) -> dict[str, Any]:
    """A plan of one request of ten rows, tensor by tensor."""
    return {
        "query_starts": int32(0, 10),
        "seq_lens": int32(30),
        "page_table": int32(1, 0)[None],
        "request_ids": torch.zeros(10, dtype=torch.int32),
        "positions": torch.arange(20, 30),
        "visible_blocks": torch.arange(21, 31, dtype=torch.int32) // 4,
        "slot_ids": torch.arange(4, 14),
        "page_tokens": 16,
        "block_tokens": 4,
        "topk_blocks": 8,
        "max_query_len": 10,
        "max_seq_len": 64,
    } | changes


@pytest.mark.parametrize("first", [18, 19, 21])
def test_the_last_position_is_named(refuses: Any, first: int) -> None:
    positions = torch.arange(first, first + 10)
    visible = ((positions + 1) // 4).to(torch.int32)
    with refuses(ArgumentError, "StepPlan.from_tensors", f"position {first + 9} as the last of request 0", "30"):
        StepPlan.from_tensors(**assembled(positions=positions, visible_blocks=visible))


def test_eight_positions_are_shown(refuses: Any) -> None:
    positions = torch.arange(20, 30)
    positions[9] = 31
    with refuses(ArgumentError, "StepPlan.from_tensors", "got [20, 21, 22, 23, 24, 25, 26, 27] for request 0"):
        StepPlan.from_tensors(**assembled(positions=positions))


def test_slots_of_contiguous_requests() -> None:
    plan = plan_step(
        int32(0, 1, 3), int32(9, 20), None, page_tokens=None, block_tokens=4, topk_blocks=8, max_query_len=2,
        max_seq_len=20, first_slots=torch.tensor([100, 40]), first_block_slots=torch.tensor([50, 7]),
    )  # fmt: skip
    assert plan.token_slots(0, torch.tensor([0, 8])).tolist() == [100, 108]
    assert plan.token_slots(1, torch.tensor([19])).tolist() == [59]
    assert plan.block_slots(0, torch.tensor([0, 1])).tolist() == [50, 51]
    assert plan.block_slots(1, torch.tensor([4])).tolist() == [11]


def test_a_plan_prints_its_numbers_alone() -> None:
    plan = StepPlan.from_tensors(**assembled())
    plan.row_groups()
    text = repr(plan)
    assert "seq_lens=" in text
    assert "max_seq_len=64" in text
    assert "_scratch" not in text
    assert "_row_groups" not in text
    assert "_end_slots" not in text


def test_a_refill_compares_numbers_not_objects() -> None:
    """Numbers of any size: those of a pool come from elsewhere than those of the plan that it refills."""

    def step(text: str, **options: Any) -> StepPlan:
        return plan_step(
            int32(0, 1), int32(9), int32(0)[None], page_tokens=int(text), block_tokens=4, topk_blocks=int("512"),
            max_query_len=1, max_seq_len=9, ring_ids=int32(0), ring_tokens=int("400"), **options,
        )  # fmt: skip

    plan = step("1616")
    assert step("1616", out=plan) is plan
