"""The plan by kernel: the integers of the torch form, for every mix of phases, fresh and refilled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.cache import ring_capacity
from flashqsa.errors import ArgumentError
from flashqsa.plan import StepPlan, build, plan_step, triton_plan
from flashqsa.testing import assert_unchanged, guarded, snapshot, stream
from flashqsa.testing.hostile import poison

PAGES = (16, 64, 80, 96, 128, 640, 800, 848, 1600, 1616)
MIXES = {
    "prefill": [(0, 37)],
    "chunk": [(64, 33)],
    "decode": [(0, 1), (15, 1), (16, 1), (17, 1), (1000, 1)],
    "verify": [(40, 4), (43, 4), (3, 4)],
    "mixed": [(100, 1), (0, 21), (62, 4), (7, 1), (33, 16)],
    "page edges": [(0, 15), (0, 16), (0, 17), (15, 1), (16, 1), (14, 4)],
    "padding requests between": [(-1, 1), (20, 2), (-1, 0), (5, 3), (-1, 4), (-1, 1)],
    "live without rows": [(9, 2), (30, 0), (0, 3)],
    "one token": [(0, 1)],
    "nothing": [],
    "more rows than a program": [(3, 150), (-1, 40), (70, 1), (9, 70)],
    "requests of two chunks": [(i % 37, i % 3) for i in range(300)],
    "a chunk of requests": [(5, 1)] * 256,
}


def arguments(
    requests: list[tuple[int, int]],
    device: torch.device,
    *,
    page_tokens: int = 16,
    block_tokens: int = 4,
    drafts: int = 3,
    padding_rows: int = 0,
    contiguous: bool = False,
    rings: bool = True,
    extra_columns: int = 3,
    seed: int = 0,
) -> dict[str, Any]:
    """Arguments of `plan_step`; requests are (context before, new rows), a negative context is padding."""
    generator = stream(seed)
    rows = [new for _, new in requests]
    lens = [before + new if before >= 0 else 0 for before, new in requests]
    needed = [-(-n // page_tokens) for n in lens]
    free = torch.randperm(sum(needed) + 2, generator=generator).tolist()
    table = guarded((len(requests), max([*needed, 0]) + extra_columns), torch.int32, padding=(1, 1), device=device).view
    for request, pages in enumerate(needed):
        own = [free.pop() for _ in range(pages)] + [(-1, 2**31 - 1)[i % 2] for i in range(table.shape[1] - pages)]
        table[request] = torch.tensor(own, dtype=torch.int32)
    order = torch.randperm(len(requests) + 2, generator=generator)[: len(requests)]
    given: dict[str, Any] = dict(
        query_starts=torch.tensor([0, *rows]).cumsum(0).to(device=device, dtype=torch.int32),
        seq_lens=torch.tensor(lens, dtype=torch.int32).to(device), page_table=table, page_tokens=page_tokens,
        block_tokens=block_tokens, topk_blocks=8, max_query_len=max([*rows, 0]), max_seq_len=max([*lens, 0]),
        num_pages=sum(needed) + 2, num_rows=sum(rows) + padding_rows,
    )  # fmt: skip
    if contiguous:
        given |= dict(page_table=None, page_tokens=None, num_pages=None, first_slots=(order * 100_003 + 5).to(device))
        given["first_block_slots"] = (order * 50_021 + 3).to(device)
    if rings:
        given |= dict(
            ring_ids=order.to(device=device, dtype=torch.int32), speculative_rows=drafts,
            ring_tokens=ring_capacity(block_tokens, drafts),
        )  # fmt: skip
    return given


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., StepPlan]:
    """`by("kernel" or "torch", arguments, **changes)`: the plan in that form, on any device."""

    def make(form: str, given: dict[str, Any], **changes: Any) -> StepPlan:
        with monkeypatch.context() as patch:
            patch.setattr(build, "takes_kernels", lambda device: form == "kernel")
            return plan_step(**given | changes)

    return make


def assert_same_plan(got: StepPlan, wanted: StepPlan, label: str = "") -> None:
    for name in build.REFILLED:
        one, other = getattr(got, name), getattr(wanted, name)
        assert (one is None) == (other is None), f"{label} {name}"
        if one is not None:
            assert one.dtype == other.dtype, f"{label} {name}"
            assert one.tolist() == other.tolist(), f"{label} {name}"
    assert got.row_groups() == wanted.row_groups()


@pytest.mark.parametrize("contiguous", [False, True], ids=["paged", "contiguous"])
@pytest.mark.parametrize("padding_rows", [0, 3])
@pytest.mark.parametrize("mix", MIXES)
def test_the_kernel_plans_what_torch_does(
    by: Any, device: torch.device, mix: str, padding_rows: int, contiguous: bool
) -> None:
    given = arguments(MIXES[mix], device, padding_rows=padding_rows, contiguous=contiguous)
    before = snapshot(given)
    plan = by("kernel", given)
    assert_unchanged(before)
    assert_same_plan(plan, by("torch", given))
    assert plan.seq_lens is given["seq_lens"]


@pytest.mark.parametrize("seed", range(40))
def test_random_batches_are_planned_alike(by: Any, device: torch.device, seed: int) -> None:
    """Any block size, page size, ring, padding; whatever a page table holds past the lengths."""
    generator = stream(90, seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    block_tokens = (1, 2, 3, 4, 8)[draw(0, 4)]
    requests = [(draw(-1, 70), draw(0, 20)) for _ in range(draw(1, 7))]
    given = arguments(
        requests, device, page_tokens=block_tokens * draw(1, 9), block_tokens=block_tokens, drafts=draw(0, 9),
        padding_rows=draw(0, 4), contiguous=bool(draw(0, 1)), rings=bool(draw(0, 3)), seed=seed,
    )  # fmt: skip
    if given.get("ring_ids") is not None and draw(0, 1):
        given["ring_ids"][::2] = -1
    assert_same_plan(by("kernel", given), by("torch", given))


@pytest.mark.parametrize("page_tokens", PAGES)
def test_fault_16_any_page_size(by: Any, device: torch.device, page_tokens: int) -> None:
    requests = [(page_tokens - 2, 5), (2 * page_tokens - 1, 1), (3 * page_tokens, 4), (0, page_tokens + 1)]
    given = arguments(requests, device, page_tokens=page_tokens)
    assert_same_plan(by("kernel", given), by("torch", given))


@pytest.mark.parametrize("drafts", range(17))
def test_fault_09_rings_of_any_number_of_draft_rows(by: Any, device: torch.device, drafts: int) -> None:
    for page_tokens in (16, 1616):
        given = arguments([(50, drafts + 1), (3, 40)], device, page_tokens=page_tokens, drafts=drafts)
        assert_same_plan(by("kernel", given), by("torch", given))


def test_fault_14_a_million_positions_on_a_one_column_table(by: Any, device: torch.device) -> None:
    requests = [(1_048_571, 5), (1_048_575, 1)]
    given = arguments(requests, device, page_tokens=1 << 20, extra_columns=0)
    plan = by("kernel", given)
    assert plan.positions.tolist() == [*range(1_048_571, 1_048_576), 1_048_575]
    assert_same_plan(plan, by("torch", given))


def test_fault_42_slots_are_wider_than_32_bits(by: Any, device: torch.device) -> None:
    given = arguments([(4000, 4)], device, page_tokens=1600, extra_columns=0)
    given["page_table"][:] = torch.tensor([4_000_000, 2_000_000_000, 2_100_000_000], dtype=torch.int32)
    for num_pages in (2_147_000_000, None):
        plan = by("kernel", given, num_pages=num_pages)
        assert int(plan.slot_ids.min()) > 2**41
        assert_same_plan(plan, by("torch", given, num_pages=num_pages))


@pytest.mark.parametrize("columns", [0, 1, 4])
def test_fault_18_requests_of_length_zero(by: Any, device: torch.device, columns: int) -> None:
    """A table of no columns serves padding alone."""
    given = arguments([(-1, 1), (-1, 1)], device, extra_columns=columns)
    assert_same_plan(by("kernel", given), by("torch", given))
    given = arguments([(-1, 0), (0, 5), (-1, 0)], device)
    given["page_table"][[0, 2]] = -1
    assert_same_plan(by("kernel", given), by("torch", given))


def test_first_block_slots_follow_first_slots_by_default(by: Any, device: torch.device) -> None:
    given = arguments(MIXES["mixed"], device, contiguous=True) | {"first_block_slots": None}
    plan = by("kernel", given)
    assert_same_plan(plan, by("torch", given))
    edited = given | {"first_slots": given["first_slots"].flip(0) + 2}
    assert_same_plan(by("kernel", edited, out=plan), by("torch", edited))


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: no value is read, and a refill goes straight into the plan's own tensors."""
    monkeypatch.setattr(build, "values_are_checked", lambda device: False)


STEPS = (
    dict(requests=[(100, 1), (0, 21), (62, 4), (7, 1), (33, 16)], padding_rows=3),
    dict(requests=[(101, 1), (21, 21), (-1, 4), (0, 1), (49, 16)], padding_rows=3),
    dict(requests=[(3, 4), (-1, 21), (60, 1), (0, 1), (33, 0)], padding_rows=19),
    dict(requests=[(-1, 1), (-1, 1), (-1, 1), (-1, 0), (-1, 0)], padding_rows=43),
)


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("contiguous", [False, True], ids=["paged", "contiguous"])
def test_a_refill_holds_the_next_step_and_nothing_of_the_one_before(
    by: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, contiguous: bool, checked: bool
) -> None:
    """Lengths, starts, tables and rings come in other tensors; those of the plan stay where they are."""
    if not checked:
        unchecked(monkeypatch)
    wide = dict(max_query_len=64, max_seq_len=400)
    steps = [arguments(**step, device=device, contiguous=contiguous, seed=i) for i, step in enumerate(STEPS)]
    width = None if contiguous else max(step["page_table"].shape[1] for step in steps)
    for step in steps:
        step |= wide | dict(num_pages=None if contiguous else 40)
        if width:
            step["page_table"] = torch.nn.functional.pad(
                step["page_table"], (0, width - step["page_table"].shape[1]), value=-9
            )
    first = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in steps[0].items()}
    plan = by("kernel", first)
    places = {name: getattr(plan, name).data_ptr() for name in build.REFILLED if getattr(plan, name) is not None}
    for step in [*steps[1:], steps[0]]:
        before = snapshot(step)
        for name in places:
            if name in build.ROW_TENSORS or checked:
                poison(getattr(plan, name))
        assert by("kernel", step, out=plan) is plan
        assert_unchanged(before)
        assert_same_plan(plan, by("torch", step))
    assert {name: getattr(plan, name).data_ptr() for name in places} == places


def test_fault_17_a_refill_from_the_plans_own_tensors_edited_in_place(
    by: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a captured graph does: lengths and table are edited in place, then the same call runs again."""
    unchecked(monkeypatch)
    given = arguments([(30, 1)] * 8, device, seed=1) | dict(max_seq_len=400)
    plan = by("kernel", given)
    for turn in range(4):
        live = (8, 3, 1, 0)[turn]
        lens = torch.randint(1, 48, (8,), generator=stream(91, turn), dtype=torch.int32)
        lens[live:] = 0
        given["seq_lens"].copy_(lens)
        given["page_table"].copy_(given["page_table"].flip(0))
        given["page_table"][live:] = (-1, 2**31 - 1, -(2**31), 0)[turn]
        by("kernel", given, out=plan)
        assert plan.seq_lens is given["seq_lens"]
        assert_same_plan(plan, by("torch", given), f"turn {turn}")


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_a_refill_refuses_other_shapes_and_changes_nothing(
    by: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, refuses: Any, checked: bool
) -> None:
    if not checked:
        unchecked(monkeypatch)
    given = arguments(MIXES["mixed"], device)
    plan = by("kernel", given)
    before = snapshot(plan)
    for other, parts in (
        (arguments(MIXES["mixed"], device, padding_rows=1), ("request_ids", "[43]", "[44]")),
        (arguments(MIXES["verify"], device), ("query_starts", "[6]", "[4]")),
        (arguments(MIXES["mixed"], device, extra_columns=4), ("page_table",)),
        (arguments(MIXES["mixed"], device, contiguous=True), ("page_table", "None")),
        (arguments(MIXES["mixed"], device, rings=False), ("ring_ids", "None")),
        (arguments(MIXES["mixed"], device, drafts=9), ("ring_tokens", "= 16", "got 8")),
        (given | dict(max_seq_len=9999), ("max_seq_len", "9999")),
    ):
        with refuses(ArgumentError, "plan_step", *parts):
            by("kernel", other, out=plan)
        assert_unchanged(before)


def test_the_kernel_writes_its_rows_and_nothing_beside_them(device: torch.device, by: Any) -> None:
    """Per-row tensors between canaries, rows no multiple of what a program plans."""
    given = arguments(MIXES["more rows than a program"], device, padding_rows=2)
    wanted = by("torch", given)
    guards = {name: guarded((wanted.num_rows,), dtype, padding=(5,), device=device)
              for name, dtype in build.ROW_TENSORS.items()}  # fmt: skip
    plan = StepPlan(
        **{name: getattr(wanted, name) for name in (*build.REFILLED[:6], "page_tokens", "block_tokens", "topk_blocks",
                                                    "max_query_len", "max_seq_len", "num_pages", "ring_tokens")},
        **{name: guard.view for name, guard in guards.items()},
    )  # fmt: skip
    triton_plan.plan_step_triton(
        given["query_starts"], given["seq_lens"], given["page_table"], plan, num_pages=given["num_pages"],
        first_slots=None, first_block_slots=None, ring_ids=given["ring_ids"],
    )  # fmt: skip
    for guard in guards.values():
        guard.assert_intact()
    assert_same_plan(plan, wanted)


def test_garbage_lengths_and_starts_stay_inside_their_memory(
    device: torch.device, by: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device nothing is read before: columns and pages are held to the table and the pool."""
    unchecked(monkeypatch)
    given = arguments([(30, 2), (9, 3), (0, 4)], device)
    for lens in ([2**31 - 1, 0, -5], [2, 2**30, 3], [-(2**31), 5, 2**31 - 1]):
        edited = given | {"seq_lens": torch.tensor(lens, dtype=torch.int32, device=device)}
        assert_same_plan(by("kernel", edited), by("torch", edited), str(lens))
