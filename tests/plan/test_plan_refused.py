"""What `plan_step` and `from_tensors` refuse, and how they say it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.errors import ArgumentError, DeviceError, DTypeError, FlashQSAError, ShapeError
from flashqsa.plan import StepPlan, plan_step


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def arguments(**overrides: Any) -> dict[str, Any]:
    """A valid step of three requests (decode, 4-row verify, 5-token prefill) and two padding rows, with changes."""
    table = torch.tensor([[4, 1, -1], [0, 5, 2], [3, -1, 2**31 - 1]], dtype=torch.int32)
    return {
        "query_starts": int32(0, 1, 5, 10),
        "seq_lens": int32(20, 40, 5),
        "page_table": table,
        "page_tokens": 16,
        "block_tokens": 4,
        "topk_blocks": 8,
        "max_query_len": 5,
        "max_seq_len": 40,
        "num_pages": 6,
        "ring_ids": int32(2, 0, 1),
        "ring_tokens": 8,
        "speculative_rows": 3,
        "num_rows": 12,
    } | overrides


def table_with(row: int, column: int, page: int) -> torch.Tensor:
    table = arguments()["page_table"].clone()
    table[row, column] = page
    return table


REFUSED: dict[str, tuple[dict[str, Any], type[FlashQSAError], tuple[str, ...]]] = {
    "seq_lens of int64": ({"seq_lens": torch.tensor([20, 40, 5])}, DTypeError, ("seq_lens", "int32", "int64")),
    "seq_lens nested": ({"seq_lens": int32(20, 40, 5)[None]}, ShapeError, ("seq_lens", "[R]", "[1, 3]")),
    "seq_lens a list": ({"seq_lens": [20, 40, 5]}, DTypeError, ("seq_lens", "torch.Tensor", "list")),
    "too few starts": ({"query_starts": int32(0, 1, 5)}, ShapeError, ("query_starts", "[4]", "[3]")),
    "starts of int64": ({"query_starts": torch.tensor([0, 1, 5, 10])}, DTypeError, ("query_starts", "int64")),
    "starts elsewhere": (
        {"query_starts": torch.zeros(4, dtype=torch.int32, device="meta")},
        DeviceError,
        ("query_starts", "meta"),
    ),
    "starts strided": (
        {"query_starts": int32(0, 0, 1, 0, 5, 0, 10, 0)[::2]},
        ShapeError,
        ("query_starts", "contiguous"),
    ),
    "starts not from 0": ({"query_starts": int32(1, 2, 5, 10)}, ArgumentError, ("query_starts", "[1, 2, 5, 10]")),
    "starts falling": ({"query_starts": int32(0, 5, 1, 10)}, ArgumentError, ("query_starts", "[0, 5, 1, 10]")),
    "starts beyond the rows": ({"num_rows": 9}, ArgumentError, ("query_starts", "num_rows = 9", "got 10")),
    "negative length": ({"seq_lens": int32(20, -40, 5)}, ArgumentError, ("seq_lens[1] = -40",)),
    "length without its rows": ({"seq_lens": int32(20, 40, 4)}, ArgumentError, ("seq_lens[2] = 4", "5 rows")),
    "length above the bound": ({"max_seq_len": 39}, ArgumentError, ("max_seq_len", "got 39", "seq_lens[1] = 40")),
    "rows above the bound": ({"max_query_len": 4}, ArgumentError, ("max_query_len", "got 4", "5 rows")),
    "page of no whole blocks": (
        {"page_tokens": 18},
        ArgumentError,
        ("page_tokens", "multiple of block_tokens = 4", "got 18"),
    ),
    "page of nothing": ({"page_tokens": 0}, ArgumentError, ("page_tokens", "got 0")),
    "page size missing": ({"page_tokens": None}, ArgumentError, ("page_tokens", "got None")),
    "block of nothing": ({"block_tokens": 0}, ArgumentError, ("block_tokens", "at least 1", "got 0")),
    "no blocks selected": ({"topk_blocks": 0}, ArgumentError, ("topk_blocks", "at least 1", "got 0")),
    "negative drafts": ({"speculative_rows": -1}, ArgumentError, ("speculative_rows", "at least 0", "got -1")),
    "negative bound": ({"max_query_len": -1}, ArgumentError, ("max_query_len", "at least 0", "got -1")),
    "table of int64": ({"page_table": arguments()["page_table"].long()}, DTypeError, ("page_table", "int64")),
    "table of fewer rows": (
        {"page_table": arguments()["page_table"][:2]},
        ShapeError,
        ("page_table", "[3, pages]", "[2, 3]"),
    ),
    "table flat": ({"page_table": int32(4, 0, 3)}, ShapeError, ("page_table", "[R, pages]")),
    "table too narrow": (
        {"page_table": arguments()["page_table"][:, :2]},
        ArgumentError,
        ("page_table", "3 columns", "seq_lens[1] = 40", "got 2"),
    ),
    "page not allocated": ({"page_table": table_with(1, 2, -1)}, ArgumentError, ("page_table[1, 2] = -1", "[0, 6)")),
    "page beyond the pool": ({"page_table": table_with(0, 1, 6)}, ArgumentError, ("page_table[0, 1] = 6", "[0, 6)")),
    "huge page in an unknown pool": (
        {"page_table": table_with(0, 0, 2**31 - 1), "num_pages": None},
        ArgumentError,
        ("page_table[0, 0] = 2147483647",),
    ),
    "page shared by writers": ({"page_table": table_with(2, 0, 2)}, ArgumentError, ("slot_ids", "got 36")),
    "both ways to address": (
        {"first_slots": torch.zeros(3, dtype=torch.int64)},
        ArgumentError,
        ("page_table and first_slots", "got both"),
    ),
    "no way to address": ({"page_table": None}, ArgumentError, ("page_table and first_slots", "got neither")),
    "first slots of int32": (
        {"page_table": None, "first_slots": int32(0, 64, 128)},
        DTypeError,
        ("first_slots", "int32"),
    ),
    "first slots negative": (
        {"page_table": None, "first_slots": torch.tensor([0, -64, 128])},
        ArgumentError,
        ("first_slots", "got -64"),
    ),
    "first block slots of other length": (
        {"page_table": None, "first_slots": torch.tensor([0, 64, 128]), "first_block_slots": torch.tensor([0, 16])},
        ShapeError,
        ("first_block_slots", "[3]", "[2]"),
    ),
    "overlapping requests": (
        {"page_table": None, "first_slots": torch.tensor([20, 0, 100])},
        ArgumentError,
        ("first_slots must keep requests apart", "slots 0 to 39", "20 onwards for request 0"),
    ),
    "overlapping block keys": (
        {
            "page_table": None,
            "first_slots": torch.tensor([0, 20, 60]),
            "first_block_slots": torch.tensor([9, 0, 30]),
        },
        ArgumentError,
        ("first_block_slots must keep requests apart", "slots 0 to 9", "9 onwards for request 0"),
    ),
    "negative block slots": (
        {
            "page_table": None,
            "first_slots": torch.tensor([0, 20, 60]),
            "first_block_slots": torch.tensor([20, 0, -2]),
        },
        ArgumentError,
        ("first_block_slots must not be negative", "-2 for request 2"),
    ),
    **{
        f"{name} of {value!r}": ({name: value}, ArgumentError, (f"{name} must be a whole number", f"got {value!r}"))
        for name, value in (
            ("block_tokens", 4.0),
            ("topk_blocks", 2.5),
            ("topk_blocks", True),
            ("max_query_len", "5"),
            ("max_seq_len", None),
            ("num_pages", 6.0),
            ("num_pages", -1),
            ("ring_tokens", 8.0),
            ("speculative_rows", 1.5),
            ("num_rows", 12.0),
            ("page_tokens", 16.0),
        )
    },
    "out is no plan": ({"out": {}}, ArgumentError, ("out must be a StepPlan", "dict")),
    "rings of int64": ({"ring_ids": torch.tensor([2, 0, 1])}, DTypeError, ("ring_ids", "int64")),
    "rings of other length": ({"ring_ids": int32(2, 0)}, ShapeError, ("ring_ids", "[3]", "[2]")),
    "ring shared": ({"ring_ids": int32(2, 0, 2)}, ArgumentError, ("ring_ids", "ring 2 for requests 0 and 2")),
    "ring size missing": ({"ring_tokens": None}, ArgumentError, ("ring_tokens", "at least 8", "got None")),
    "ring too small for the drafts": (
        {"ring_tokens": 4},
        ArgumentError,
        ("ring_tokens", "at least 8 for 3 speculative rows", "got 4"),
    ),
    "ring of no whole blocks": (
        {"ring_tokens": 10},
        ArgumentError,
        ("ring_tokens", "multiple of block_tokens = 4", "got 10"),
    ),
}


def test_plan_step_takes_the_step_that_the_others_vary() -> None:
    assert plan_step(**arguments()).num_rows == 12


@pytest.mark.parametrize("reason", REFUSED)
def test_plan_step_refuses(refuses, reason: str) -> None:
    overrides, error, parts = REFUSED[reason]
    with refuses(error, "plan_step", *parts):
        plan_step(**arguments(**overrides))


def test_plan_step_asks_for_num_rows_off_the_cpu(refuses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHQSA_DEBUG", raising=False)
    moved = {name: value.to("meta") for name, value in arguments().items() if isinstance(value, torch.Tensor)}
    with refuses(ArgumentError, "plan_step", "num_rows must be given on meta", "got None"):
        plan_step(**arguments(**moved, num_rows=None))


@pytest.mark.parametrize("name", ["seq_lens", "page_table", "ring_ids"])
def test_plan_step_leaves_padding_unread(name: str) -> None:
    """Leftovers of a padding request are nobody's business: its pages, its ring, its rows."""
    values = arguments(seq_lens=int32(20, 0, 5))
    if name == "page_table":
        values["page_table"] = table_with(1, 0, -7)
    if name == "ring_ids":
        values["ring_ids"] = int32(2, 2, 1)
    plan = plan_step(**values)
    assert plan.request_ids.tolist() == [0] + [-1] * 4 + [2] * 5 + [-1] * 2


def test_shared_prefix_pages_are_accepted_where_nobody_writes() -> None:
    """Requests 0 and 1 read page 4; both write elsewhere."""
    plan_step(**arguments(page_table=table_with(1, 0, 4)))


FROM_TENSORS = (
    "query_starts", "seq_lens", "page_table", "request_ids", "positions", "visible_blocks", "slot_ids",
    "closed_block_slot_ids", "ring_slot_ids", "ring_ids",
)  # fmt: skip
NUMBERS = ("page_tokens", "block_tokens", "topk_blocks", "max_query_len", "max_seq_len", "ring_tokens", "num_pages")


def tensors_of(plan: StepPlan) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in (*FROM_TENSORS, *NUMBERS)}


def test_from_tensors_equals_plan_step_and_copies_nothing() -> None:
    planned = plan_step(**arguments())
    values = tensors_of(planned)
    plan = StepPlan.from_tensors(**values)
    for name in FROM_TENSORS:
        assert getattr(plan, name).data_ptr() == values[name].data_ptr(), name
    for name in NUMBERS:
        assert getattr(plan, name) == values[name], name
    assert plan.row_groups() == planned.row_groups()
    assert plan.all_visible == planned.all_visible


def test_from_tensors_without_preparation_writes_nowhere() -> None:
    values = tensors_of(plan_step(**arguments()))
    for name in ("closed_block_slot_ids", "ring_slot_ids", "ring_ids", "ring_tokens"):
        del values[name]
    plan = StepPlan.from_tensors(**values)
    assert plan.closed_block_slot_ids.tolist() == [-1] * 12
    assert plan.ring_slot_ids.tolist() == [-1] * 12
    assert plan.ring_ids is None


def changed(tensor: torch.Tensor, row: int, value: int) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[row] = value
    return tensor


WRONG_TENSORS: dict[str, tuple[str, Any, type[FlashQSAError], tuple[str, ...]]] = {
    "positions of int32": ("positions", lambda x: x.int(), DTypeError, ("positions", "int64", "int32")),
    "slots of int32": ("slot_ids", lambda x: x.int(), DTypeError, ("slot_ids", "int64", "int32")),
    "fewer rows": ("visible_blocks", lambda x: x[:-1], ShapeError, ("visible_blocks", "[12]", "[11]")),
    "unknown request": ("request_ids", lambda x: changed(x, 0, 3), ArgumentError, ("request_ids", "got 3 in row 0")),
    "row of another request": (
        "request_ids",
        lambda x: changed(x, 1, 0),
        ArgumentError,
        ("request_ids", "query_starts"),
    ),
    "position jumps": (
        "positions",
        lambda x: changed(x, 3, 30),
        ArgumentError,
        ("positions", "[36, 37, 30, 39]", "request 1"),
    ),
    "not the last tokens": (
        "positions",
        lambda x: changed(x, 0, 18),
        ArgumentError,
        ("last tokens", "position 18", "seq_lens 20"),
    ),
    "sees an open block": ("visible_blocks", lambda x: changed(x, 1, 10), ArgumentError, ("visible_blocks",)),
    "sees less than nothing": ("visible_blocks", lambda x: changed(x, 1, -1), ArgumentError, ("visible_blocks",)),
    "slot written twice": ("slot_ids", lambda x: changed(x, 1, int(x[2])), ArgumentError, ("slot_ids", "once")),
    "block written twice": (
        "closed_block_slot_ids",
        lambda x: changed(x, 4, int(x[0])),
        ArgumentError,
        ("closed_block_slot_ids", "once"),
    ),
    "ring row written twice": (
        "ring_slot_ids",
        lambda x: changed(x, 1, int(x[2])),
        ArgumentError,
        ("ring_slot_ids", "once"),
    ),
}


@pytest.mark.parametrize("reason", WRONG_TENSORS)
def test_from_tensors_refuses(refuses, reason: str) -> None:
    name, change, error, parts = WRONG_TENSORS[reason]
    values = tensors_of(plan_step(**arguments()))
    values[name] = change(values[name])
    with refuses(error, "StepPlan.from_tensors", *parts):
        StepPlan.from_tensors(**values)


def test_from_tensors_accepts_rows_that_see_less() -> None:
    """Reuse of an earlier selection: a row may see fewer blocks than its position would allow."""
    values = tensors_of(plan_step(**arguments()))
    values["visible_blocks"] = changed(values["visible_blocks"], 4, 3)
    assert StepPlan.from_tensors(**values).visible_blocks[4] == 3
