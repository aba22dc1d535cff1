"""`out=`: a plan that others already point at, refilled in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.errors import ArgumentError
from flashqsa.plan import StepPlan, plan_step
from flashqsa.plan.build import REFILLED
from flashqsa.testing import assert_unchanged, poison, snapshot


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step(**overrides: Any) -> dict[str, Any]:
    """Four decode rows, two of them padding in the second step."""
    return {
        "query_starts": int32(0, 1, 2, 3, 4),
        "seq_lens": int32(20, 33, 8, 1),
        "page_table": torch.tensor([[4, 1, 9], [0, 5, 2], [3, 8, 8], [7, 9, 9]], dtype=torch.int32),
        "page_tokens": 16,
        "block_tokens": 4,
        "topk_blocks": 8,
        "max_query_len": 1,
        "max_seq_len": 40,
        "num_pages": 10,
        "ring_ids": int32(2, 0, 1, 3),
        "ring_tokens": 4,
        "num_rows": 5,
    } | overrides


def next_step() -> dict[str, Any]:
    table = torch.tensor([[6, 3, -1], [1, 0, 9], [-1, -1, -1], [-1, 2**31 - 1, 0]], dtype=torch.int32)
    return step(
        query_starts=int32(0, 1, 2, 3, 4), seq_lens=int32(24, 40, 0, 0), page_table=table, ring_ids=int32(1, 3, 3, 3)
    )


def tensors(plan: StepPlan) -> dict[str, torch.Tensor]:
    return {name: getattr(plan, name) for name in REFILLED if getattr(plan, name) is not None}


def test_refill_keeps_every_tensor_and_holds_the_next_step() -> None:
    plan = plan_step(**step())
    before = {name: (id(x), x.data_ptr()) for name, x in tensors(plan).items()}
    assert [group.request_id for group in plan.row_groups()] == [0, 1, 2, 3]
    assert plan_step(**next_step(), out=plan) is plan
    fresh = plan_step(**next_step())
    assert {name: (id(x), x.data_ptr()) for name, x in tensors(plan).items()} == before
    for name, expected in tensors(fresh).items():
        assert torch.equal(getattr(plan, name), expected), name
    assert plan.row_groups() == fresh.row_groups()
    assert [group.request_id for group in plan.row_groups()] == [0, 1]


def test_refill_leaves_nothing_of_the_step_before() -> None:
    plan = plan_step(**step())
    for tensor in tensors(plan).values():
        poison(tensor)
    plan_step(**next_step(), out=plan)
    for name, expected in tensors(plan_step(**next_step())).items():
        assert torch.equal(getattr(plan, name), expected), name


def test_refill_from_the_plans_own_tensors_edited_in_place() -> None:
    """What a captured graph does: lengths and table are edited in place, then the same call runs again."""
    values = step()
    plan = plan_step(**values)
    for name in ("query_starts", "seq_lens", "page_table", "ring_ids"):
        values[name].copy_(next_step()[name])
    plan_step(**values, out=plan)
    assert plan.seq_lens is values["seq_lens"]
    for name, expected in tensors(plan_step(**next_step())).items():
        assert torch.equal(getattr(plan, name), expected), name


def test_refill_leaves_the_callers_tensors_alone() -> None:
    plan, values = plan_step(**step()), next_step()
    before = snapshot(values)
    plan_step(**values, out=plan)
    assert_unchanged(before)


OTHER_SHAPES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "fewer requests": (
        {
            "query_starts": int32(0, 1, 2),
            "seq_lens": int32(20, 33),
            "page_table": step()["page_table"][:2],
            "ring_ids": int32(2, 0),
        },
        ("query_starts", "[5]", "[3]"),
    ),
    "another table width": (
        {"page_table": torch.cat([step()["page_table"], step()["page_table"]], dim=1)},
        ("page_table", "[4, 3]", "[4, 6]"),
    ),
    "fewer rows": ({"num_rows": 4}, ("request_ids", "[5]", "[4]")),
    "no rings": ({"ring_ids": None, "ring_tokens": None}, ("ring_ids", "[4]", "None")),
    "contiguous requests": (
        {"page_table": None, "first_slots": torch.tensor([0, 40, 80, 120])},
        ("page_table", "[4, 3]", "None"),
    ),
    "another page size": ({"page_tokens": 32}, ("page_tokens", "= 32", "got 16")),
    "another block size": ({"block_tokens": 2}, ("block_tokens", "= 2", "got 4")),
    "another budget": ({"topk_blocks": 9}, ("topk_blocks", "= 9", "got 8")),
    "another ring": ({"ring_tokens": 8}, ("ring_tokens", "= 8", "got 4")),
    "a larger bound on lengths": ({"max_seq_len": 41}, ("max_seq_len", "own 40", "got 41")),
    "a larger bound on rows": ({"max_query_len": 2}, ("max_query_len", "own 1", "got 2")),
}


@pytest.mark.parametrize("reason", OTHER_SHAPES)
def test_refill_refuses_other_shapes_and_changes_nothing(refuses, reason: str) -> None:
    overrides, parts = OTHER_SHAPES[reason]
    plan = plan_step(**step())
    before = snapshot(tensors(plan))
    with refuses(ArgumentError, "plan_step", *parts):
        plan_step(**step(**overrides), out=plan)
    assert_unchanged(before)


def test_refill_takes_smaller_bounds_and_keeps_its_own() -> None:
    plan = plan_step(**step())
    plan_step(**step(max_seq_len=33), out=plan)
    assert plan.max_seq_len == 40
