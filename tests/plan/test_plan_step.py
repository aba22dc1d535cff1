"""`plan_step` against a plain loop over Python integers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from flashqsa.cache import ring_capacity
from flashqsa.plan import RowGroup, StepPlan, plan_step
from flashqsa.testing import stream

PAGES = (16, 64, 80, 96, 128, 640, 800, 848, 1600, 1616)
ROW_TENSORS = ("request_ids", "positions", "visible_blocks", "slot_ids", "closed_block_slot_ids", "ring_slot_ids")


@dataclass
class Batch:
    """Plain integers of one step; `requests` are (context before, new rows), a negative context is padding."""

    requests: list[tuple[int, int]]
    page_tokens: int = 16
    block_tokens: int = 4
    speculative_rows: int = 0
    padding_rows: int = 0
    contiguous: bool = False
    seed: int = 0
    extra_columns: int = 3
    starts: list[int] = field(init=False)
    lens: list[int] = field(init=False)
    rings: list[int] = field(init=False)

    def __post_init__(self) -> None:
        generator = stream(self.seed)
        self.starts = [0]
        for _, new in self.requests:
            self.starts.append(self.starts[-1] + new)
        self.lens = [before + new if before >= 0 else 0 for before, new in self.requests]
        count = len(self.requests)
        self.rings = torch.randperm(count + 2, generator=generator).tolist()[:count]
        needed = [-(-n // self.page_tokens) for n in self.lens]
        self.num_pages = sum(needed) + 2
        free = torch.randperm(self.num_pages, generator=generator).tolist()
        width = max([*needed, 0]) + self.extra_columns
        self.table = [
            [free.pop() for _ in range(n)] + [(-1, 2**31 - 1)[i % 2] for i in range(width - n)] for n in needed
        ]
        self.first_slots = [i * 100_003 + 5 for i in range(count)]
        self.first_block_slots = [i * 50_021 + 3 for i in range(count)]

    @property
    def num_rows(self) -> int:
        return self.starts[-1] + self.padding_rows

    @property
    def ring_tokens(self) -> int:
        return ring_capacity(self.block_tokens, self.speculative_rows)

    def plan(self) -> StepPlan:
        def int64(values: list[int]) -> torch.Tensor | None:
            return torch.tensor(values, dtype=torch.int64) if self.contiguous else None

        table = torch.tensor(self.table, dtype=torch.int32).reshape(
            len(self.table), len(self.table[0]) if self.table else 0
        )
        return plan_step(
            torch.tensor(self.starts, dtype=torch.int32),
            torch.tensor(self.lens, dtype=torch.int32),
            None if self.contiguous else table,
            page_tokens=None if self.contiguous else self.page_tokens,
            block_tokens=self.block_tokens,
            topk_blocks=8,
            max_query_len=max([new for _, new in self.requests] + [0]),
            max_seq_len=max([*self.lens, 0]),
            num_pages=None if self.contiguous else self.num_pages,
            first_slots=int64(self.first_slots),
            first_block_slots=int64(self.first_block_slots),
            ring_ids=torch.tensor(self.rings, dtype=torch.int32),
            ring_tokens=self.ring_tokens,
            speculative_rows=self.speculative_rows,
            num_rows=self.num_rows,
        )

    def slot(self, request: int, token: int) -> int:
        if self.contiguous:
            return self.first_slots[request] + token
        return self.table[request][token // self.page_tokens] * self.page_tokens + token % self.page_tokens

    def block_slot(self, request: int, block: int) -> int:
        if self.contiguous:
            return self.first_block_slots[request] + block
        page_blocks = self.page_tokens // self.block_tokens
        return self.table[request][block // page_blocks] * page_blocks + block % page_blocks

    def expected(self) -> dict[str, list[int]]:
        """Every per-row tensor of the plan, row by row."""
        rows = {name: [-1] * self.num_rows for name in ROW_TENSORS}
        rows["visible_blocks"] = [0] * self.num_rows
        for request, (before, new) in enumerate(self.requests):
            for i in range(new if before >= 0 else 0):
                row, position = self.starts[request] + i, before + i
                rows["request_ids"][row] = request
                rows["positions"][row] = position
                rows["visible_blocks"][row] = (position + 1) // self.block_tokens
                rows["slot_ids"][row] = self.slot(request, position)
                if (position + 1) % self.block_tokens == 0:
                    rows["closed_block_slot_ids"][row] = self.block_slot(request, position // self.block_tokens)
                if position >= before + new - self.ring_tokens:
                    rows["ring_slot_ids"][row] = self.rings[request] * self.ring_tokens + position % self.ring_tokens
        return rows


def assert_plan_is(plan: StepPlan, batch: Batch) -> None:
    for name, values in batch.expected().items():
        assert getattr(plan, name).tolist() == values, name
    groups = [
        RowGroup(i, batch.starts[i], batch.starts[i + 1], before)
        for i, (before, new) in enumerate(batch.requests)
        if before >= 0 and new
    ]
    assert plan.row_groups() == groups
    assert (plan.num_rows, plan.num_requests) == (batch.num_rows, len(batch.requests))


MIXES = {
    "prefill": [(0, 37)],
    "chunk": [(64, 33)],
    "decode": [(0, 1), (15, 1), (16, 1), (17, 1), (1000, 1)],
    "verify": [(40, 4), (43, 4), (3, 4)],
    "mixed": [(100, 1), (0, 21), (62, 4), (7, 1), (33, 16)],
    "page_edges": [(0, 15), (0, 16), (0, 17), (15, 1), (16, 1), (14, 4)],
    "padding_requests_between": [(-1, 1), (20, 2), (-1, 0), (5, 3), (-1, 4), (-1, 1)],
    "live_without_rows": [(9, 2), (30, 0), (0, 3)],
    "one_token": [(0, 1)],
    "nothing": [],
}


@pytest.mark.parametrize("contiguous", [False, True], ids=["paged", "contiguous"])
@pytest.mark.parametrize("padding_rows", [0, 3])
@pytest.mark.parametrize("mix", MIXES)
def test_plan_step_equals_a_plain_loop(mix: str, padding_rows: int, contiguous: bool) -> None:
    batch = Batch(MIXES[mix], padding_rows=padding_rows, contiguous=contiguous, speculative_rows=3)
    assert_plan_is(batch.plan(), batch)


@given(
    requests=st.lists(st.tuples(st.integers(-1, 70), st.integers(0, 20)), min_size=1, max_size=7),
    blocks_a_page=st.integers(1, 9),
    block_tokens=st.sampled_from([1, 2, 3, 4, 8]),
    speculative_rows=st.integers(0, 9),
    padding_rows=st.integers(0, 4),
    contiguous=st.booleans(),
    seed=st.integers(0, 99),
)
def test_plan_step_equals_a_plain_loop_on_any_batch(
    requests: list[tuple[int, int]],
    blocks_a_page: int,
    block_tokens: int,
    speculative_rows: int,
    padding_rows: int,
    contiguous: bool,
    seed: int,
) -> None:
    batch = Batch(
        requests, page_tokens=blocks_a_page * block_tokens, block_tokens=block_tokens,
        speculative_rows=speculative_rows, padding_rows=padding_rows, contiguous=contiguous, seed=seed,
    )  # fmt: skip
    assert_plan_is(batch.plan(), batch)


@pytest.mark.parametrize("rows", range(1, 9))
def test_plan_step_fault_19_verify_of_any_width_at_any_offset(rows: int) -> None:
    """Also draft extend: fewer rows than the window, for each request another number."""
    batch = Batch([(40 + i, max(1, rows - i)) for i in range(5)], speculative_rows=rows - 1)
    assert_plan_is(batch.plan(), batch)


@pytest.mark.parametrize("contexts", [(1, 55_995), (2047, 2049, 1), (2049, 1, 55_995, 2047, 1, 2049, 2047)], ids=len)
def test_plan_step_fault_25_ragged_batches(contexts: tuple[int, ...]) -> None:
    """Decode rows, then a chunk of every second request."""
    for page_tokens in (16, 848):
        decode = Batch([(n, 1) for n in contexts], page_tokens=page_tokens)
        assert_plan_is(decode.plan(), decode)
        chunk = Batch([(n, 1 + 30 * (i % 2)) for i, n in enumerate(contexts)], page_tokens=page_tokens)
        assert_plan_is(chunk.plan(), chunk)


@pytest.mark.parametrize("columns", [0, 1, 4])
def test_plan_step_fault_18_requests_of_length_zero(columns: int) -> None:
    """seq_lens [0, 5, 0]: table rows of the empty ones are all -1, and a table of no columns serves padding alone."""
    batch = Batch([(-1, 0), (0, 5), (-1, 0)])
    batch.table = [[-1] * 4, [2, -1, -1, -1], [-1] * 4]
    assert_plan_is(batch.plan(), batch)
    empty = plan_step(
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.zeros(2, dtype=torch.int32),
        torch.full((2, columns), -1, dtype=torch.int32),
        page_tokens=16, block_tokens=4, topk_blocks=8, max_query_len=1, max_seq_len=0,
    )  # fmt: skip
    assert empty.row_groups() == []
    for name in ("request_ids", "positions", "slot_ids", "closed_block_slot_ids", "ring_slot_ids"):
        assert getattr(empty, name).tolist() == [-1, -1], name
    assert empty.visible_blocks.tolist() == [0, 0]


@pytest.mark.parametrize("page_tokens", PAGES)
def test_block_slots_fault_16_every_block_has_its_own_place(page_tokens: int) -> None:
    """(request, block) -> block slot over 4,096 blocks of two requests on interleaved shuffled pages."""
    tokens = 4096 * 4
    batch = Batch([(tokens, 0), (tokens - 4, 4)], page_tokens=page_tokens, seed=page_tokens)
    plan = batch.plan()
    seen: dict[int, tuple[int, int]] = {}
    tokens_seen: set[int] = set()
    for request in range(2):
        slots = plan.block_slots(request, torch.arange(4096)).tolist()
        assert slots == [batch.block_slot(request, g) for g in range(4096)]
        for block, slot in enumerate(slots):
            assert seen.setdefault(slot, (request, block)) == (request, block)
        token_slots = plan.token_slots(request, torch.arange(tokens))
        assert torch.equal(token_slots[::4] // 4, torch.tensor(slots)), "a block lies where its tokens lie"
        tokens_seen.update(token_slots.tolist())
    assert len(tokens_seen) == 2 * tokens
    assert plan.closed_block_slot_ids[-1] == batch.block_slot(1, 4095)


@pytest.mark.parametrize("page_tokens", PAGES)
@pytest.mark.parametrize("drafts", range(17))
def test_ring_fault_9_capacity_never_depends_on_the_page(drafts: int, page_tokens: int) -> None:
    capacity = ring_capacity(4, drafts)
    assert capacity >= 4 + drafts
    assert capacity % 4 == 0
    batch = Batch([(50, drafts + 1)], page_tokens=page_tokens, speculative_rows=drafts)
    assert_plan_is(batch.plan(), batch)


def test_ring_keeps_the_last_rows_only() -> None:
    """A ring row is written once: 21 rows of one request leave the last `capacity` of them."""
    for drafts in range(6):
        plan = Batch([(10, 21)], speculative_rows=drafts).plan()
        kept = plan.ring_slot_ids[plan.ring_slot_ids >= 0]
        capacity = ring_capacity(4, drafts)
        assert plan.positions[plan.ring_slot_ids >= 0].tolist() == list(range(31 - capacity, 31))
        assert len(set(kept.tolist())) == capacity


def test_ring_is_left_alone_without_ring_ids() -> None:
    batch = Batch([(5, 9), (30, 2)])
    batch.rings = [-1, 3]
    plan = batch.plan()
    assert plan.ring_slot_ids[:9].tolist() == [-1] * 9
    assert plan.ring_slot_ids[9:].tolist() == [3 * 4 + 30 % 4, 3 * 4 + 31 % 4]


def test_plan_step_fault_14_a_million_positions_on_a_one_column_table() -> None:
    batch = Batch([(1_048_571, 5), (1_048_575, 1)], page_tokens=1 << 20, extra_columns=0, speculative_rows=1)
    assert [len(row) for row in batch.table] == [1, 1]
    assert_plan_is(batch.plan(), batch)


def test_slots_fault_42_are_wider_than_32_bits() -> None:
    batch = Batch([(4000, 4)], page_tokens=1600, extra_columns=0)
    batch.table, batch.num_pages = [[4_000_000, 2_000_000_000, 2_100_000_000]], 2_147_000_000
    assert batch.slot(0, 4003) > 2**41
    assert_plan_is(batch.plan(), batch)


def test_plan_step_reads_nothing_on_the_host_where_values_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors have no values: any read of one raises."""
    monkeypatch.delenv("FLASHQSA_DEBUG", raising=False)
    meta = {"device": "meta", "dtype": torch.int32}
    plan = plan_step(
        torch.zeros(4, **meta), torch.zeros(3, **meta), torch.zeros(3, 9, **meta),
        page_tokens=16, block_tokens=4, topk_blocks=8, max_query_len=5, max_seq_len=99, num_pages=7,
        ring_ids=torch.zeros(3, **meta), ring_tokens=4, num_rows=11,
    )  # fmt: skip
    assert {getattr(plan, name).device.type for name in ROW_TENSORS} == {"meta"}


class OperationLog(TorchDispatchMode):
    """Names of the operations run, and elements of what each returned."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        outputs = result if isinstance(result, tuple | list) else [result]
        self.entries.append((str(func), sum(x.numel() for x in outputs if isinstance(x, torch.Tensor))))
        return result


def test_plan_step_does_the_same_work_on_a_page_table_a_million_wide() -> None:
    """Operation by operation the same number of elements; the table itself is neither copied nor scanned."""
    logs = []
    for extra_columns in (3, 1 << 20):
        batch = Batch([(100, 1), (0, 21), (-1, 1), (62, 4)], padding_rows=2, extra_columns=0)
        width = len(batch.table[0]) + extra_columns
        table = torch.full((4, width), -1, dtype=torch.int32)
        for request, pages in enumerate(batch.table):
            table[request, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        starts, lens = (torch.tensor(x, dtype=torch.int32) for x in (batch.starts, batch.lens))
        with OperationLog() as log:
            plan = plan_step(
                starts, lens, table, page_tokens=16, block_tokens=4, topk_blocks=8, max_query_len=21, max_seq_len=101,
                num_pages=batch.num_pages, num_rows=batch.num_rows,
            )  # fmt: skip
        assert plan.page_table is not None
        assert plan.page_table.data_ptr() == table.data_ptr()
        logs.append(log.entries)
    assert logs[0] == logs[1]


@pytest.mark.parametrize(("max_seq_len", "dense"), [(35, True), (36, False)])
def test_all_visible_follows_the_host_bound(max_seq_len: int, dense: bool) -> None:
    """8 blocks of 4 are selected: up to 35 tokens no row sees more. The bound decides, whatever the lengths are."""
    plan = plan_step(
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([5], dtype=torch.int32),
        torch.tensor([[0]], dtype=torch.int32),
        page_tokens=16, block_tokens=4, topk_blocks=8, max_query_len=1, max_seq_len=max_seq_len,
    )  # fmt: skip
    assert plan.all_visible is dense


def test_first_block_slots_follow_first_slots_by_default() -> None:
    plan = plan_step(
        torch.tensor([0, 8, 16], dtype=torch.int32), torch.tensor([8, 8], dtype=torch.int32), None,
        page_tokens=None, block_tokens=4, topk_blocks=8, max_query_len=8, max_seq_len=8,
        first_slots=torch.tensor([43, 5]),
    )  # fmt: skip
    closed = plan.closed_block_slot_ids[plan.closed_block_slot_ids >= 0]
    assert closed.tolist() == [10, 11, 1, 2]
