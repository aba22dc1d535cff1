"""What only a device shows: one graph over edited steps, no synchronisation, pools beyond 2^31, long contexts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.attention import attend
from flashqsa.cache import LayerCache
from flashqsa.cache.state import read_slots
from flashqsa.plan import StepPlan, plan_step
from flashqsa.results import Selection
from flashqsa.selection import select_blocks
from flashqsa.testing import (
    assert_best_selection,
    assert_bitwise_equal,
    assert_scores_within,
    assert_within_budget,
    oracles,
    score_bounds,
)

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
R, TOPK = 4, 512
Q_HEADS, KV_HEADS, HEAD_DIM, INDEX_HEADS, INDEX_DIM = 12, 1, 256, 4, 128


@dataclasses.dataclass
class Device:
    """Random caches and queries on the device at the released shapes, one rank of two; pages dealt out at random."""

    cache: LayerCache
    q: torch.Tensor
    gate: torch.Tensor
    index_q: torch.Tensor
    table: torch.Tensor
    page_tokens: int

    @classmethod
    def make(
        cls, requests: int, context: int, rows: int, *, page_tokens: int = 64, seed: int, device: str = "cuda",
        pages: int | None = None,
    ) -> Device:  # fmt: skip
        generator = torch.Generator(device).manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=BF16, device=device, generator=generator)

        columns = -(-context // page_tokens)
        total = pages or requests * columns + 1
        order = torch.randperm(total, device=device, generator=generator)[: requests * columns]
        cache = LayerCache(
            randn(total, page_tokens, KV_HEADS, HEAD_DIM), randn(total, page_tokens, KV_HEADS, HEAD_DIM),
            randn(total, page_tokens // R, INDEX_DIM), None, None,
        )  # fmt: skip
        return cls(
            cache, randn(rows, Q_HEADS, HEAD_DIM), randn(rows, Q_HEADS, HEAD_DIM), randn(rows, INDEX_HEADS, INDEX_DIM),
            order.view(requests, columns).to(torch.int32).contiguous(), page_tokens,
        )  # fmt: skip

    def plan(
        self, seq_lens: list[int], rows: list[int], *, max_seq_len: int, out: StepPlan | None = None,
        table: torch.Tensor | None = None,
    ) -> StepPlan:  # fmt: skip
        device = self.q.device
        starts = torch.tensor([0, *rows]).cumsum(0).to(device=device, dtype=torch.int32)
        lens = torch.tensor(seq_lens, dtype=torch.int32).to(device)
        return plan_step(
            starts, lens, self.table if table is None else table, page_tokens=self.page_tokens, block_tokens=R,
            topk_blocks=TOPK, max_query_len=max(rows), max_seq_len=max_seq_len, num_pages=self.cache.k_pages.shape[0],
            num_rows=self.q.shape[0], out=out,
        )  # fmt: skip

    def run(self, plan: StepPlan, **options: Any) -> tuple[Selection, torch.Tensor, torch.Tensor]:
        selection = select_blocks(self.index_q, self.cache, plan, return_scores=True, backend="triton")
        out, lse = attend(
            self.q, self.cache, selection, plan, gate=self.gate, return_lse=True, backend="triton", **options
        )
        return selection, out, lse

    def check_rows(self, plan: StepPlan, result: tuple[Selection, torch.Tensor, torch.Tensor], rows: list[int]) -> None:
        """Sample rows against float64: scores in bounds, the best blocks, attention over exactly those tokens."""
        selection, out, lse = result
        for row in rows:
            request, position = int(plan.request_ids[row]), int(plan.positions[row])
            visible, count = (position + 1) // R, int(selection.block_counts[row])
            ids = selection.block_ids[row, :count].to(torch.int64)
            blocks = torch.arange(visible, device=ids.device)
            keys = read_slots(self.cache.block_keys, plan.block_slots(request, blocks))
            exact, bounds = oracles.score_blocks(self.index_q[row], keys), score_bounds(self.index_q[row], keys)
            assert_best_selection(ids.tolist(), exact, bounds, TOPK, f"row {row}")
            assert_scores_within(selection.scores[row, :count], exact[ids], bounds[ids], f"row {row}")
            tail = torch.arange(visible * R, position + 1, device=ids.device)
            tokens = torch.cat([(ids[:, None] * R + torch.arange(R, device=ids.device)).flatten(), tail])
            slots = plan.token_slots(request, tokens)
            k, v = read_slots(self.cache.k_pages, slots), read_slots(self.cache.v_pages, slots)
            every = list(range(len(tokens)))
            wanted, wanted_lse = oracles.attend_row(self.q[row], k, v, every, gate=self.gate[row])
            low, _ = oracles.attend_row(self.q[row], k, v, every, gate=self.gate[row], round_to=BF16)
            assert_within_budget(out[row], low.to(BF16), wanted, f"row {row}")
            assert float((lse[row] - wanted_lse).abs().max()) < 1e-5, f"lse of row {row}"


def test_fault_17_one_graph_replayed_over_edited_steps() -> None:
    """Plan, selection and attention in one graph; lengths and page table are edited in place between replays.

    Padding requests have length 0 and page rows of garbage; live rows have the bits of an eager step.
    """
    work = Device.make(8, 9000, 16, seed=70)
    starts = (torch.arange(9) * 2).to(device="cuda", dtype=torch.int32)
    seq_lens = torch.full((8,), 9000, dtype=torch.int32, device="cuda")
    table = work.table.clone()

    def planned(out: StepPlan | None = None) -> StepPlan:
        return plan_step(
            starts, seq_lens, table, page_tokens=64, block_tokens=R, topk_blocks=TOPK, max_query_len=2,
            max_seq_len=9000, num_pages=work.cache.k_pages.shape[0], num_rows=16, out=out,
        )  # fmt: skip

    plan = planned()
    selection, out, lse = work.run(plan)

    def step() -> None:
        planned(plan)
        select_blocks(work.index_q, work.cache, plan, return_scores=True, out=selection, backend="triton")
        got = attend(work.q, work.cache, selection, plan, gate=work.gate, return_lse=True, out=out, backend="triton")
        lse.copy_(got[1])

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn, live in enumerate((8, 1, 3, 7, 0, 2)):
        generator = torch.Generator("cuda").manual_seed(turn)
        lens = torch.randint(2, 9000, (8,), generator=generator, device="cuda", dtype=torch.int32)
        lens[live:] = 0
        shuffled = work.table[torch.randperm(8, generator=generator, device="cuda")].clone()
        shuffled[live:] = (-1, 2**31 - 1, -(2**31))[turn % 3]
        seq_lens.copy_(lens)
        table.copy_(shuffled)
        for buffer in (out, lse):
            buffer.fill_(torch.nan)
        selection.block_ids.fill_(2**31 - 1)
        graph.replay()
        torch.cuda.synchronize()
        got = [x.clone() for x in (selection.block_ids, selection.block_counts, selection.scores, out, lse)]
        eager = work.run(planned())
        wanted = (eager[0].block_ids, eager[0].block_counts, eager[0].scores, *eager[1:])
        for name, a, b in zip(("ids", "counts", "scores", "out", "lse"), got, wanted, strict=True):
            assert_bitwise_equal(a, b, f"{name}, {live} live")
        assert bool((out[2 * live :] == 0).all())


def test_fault_47_no_synchronisation(no_synchronisation: Any) -> None:
    work = Device.make(3, 9000, 6, seed=71)
    plan = work.plan([9000, 8000, 10], [1, 3, 2], max_seq_len=9000)
    work.run(plan)
    with no_synchronisation():
        selection, out, _ = work.run(plan)
    work.check_rows(plan, (selection, *work.run(plan)[1:]), [0, 2, 5])
    assert bool(torch.isfinite(out).all())


def test_fault_42_page_ids_whose_offsets_pass_32_bits() -> None:
    """Caches that are views of one pool of pages of 1,077,120 bytes, page ids to 6,000: offsets beyond 2^31."""
    page_bytes, pages, page_tokens = 1_077_120, 6000, 64
    pool = torch.empty(pages * page_bytes // 2, dtype=BF16, device="cuda")
    stride, dim = page_bytes // 2, KV_HEADS * HEAD_DIM

    def view(offset: int, *shape: int) -> torch.Tensor:
        inner = [shape[1] * shape[2], shape[2], 1] if len(shape) == 3 else [shape[1], 1]
        return pool.as_strided((pages, *shape), [stride, *inner], offset)

    k_pages = view(0, page_tokens, KV_HEADS, HEAD_DIM)
    v_pages = view(page_tokens * dim, page_tokens, KV_HEADS, HEAD_DIM)
    keys = view(2 * page_tokens * dim, page_tokens // R, INDEX_DIM)
    work = Device.make(2, 6400, 3, seed=72)
    far = torch.randperm(2000, device="cuda")[: work.table.numel()].view_as(work.table) + 3990
    old = work.table.flatten().to(torch.int64)
    for target, source in ((k_pages, work.cache.k_pages), (v_pages, work.cache.v_pages), (keys, work.cache.block_keys)):
        target[far.flatten()] = source[old]
    near = work.plan([6400, 6300], [1, 2], max_seq_len=6400)
    wanted = work.run(near)
    work.cache = LayerCache(k_pages, v_pages, keys, None, None)
    work.table = far.to(torch.int32)
    assert int(far.max()) * stride > 2**31
    got = work.run(work.plan([6400, 6300], [1, 2], max_seq_len=6400))
    for name in ("block_ids", "scores"):
        assert_bitwise_equal(getattr(got[0], name), getattr(wanted[0], name), name)
    assert_bitwise_equal(got[1], wanted[1], "output")


@pytest.mark.parametrize("context", [120_000, 210_001])
def test_fault_38_long_contexts(context: int) -> None:
    """Random pages, then a short request after long ones in the same call."""
    work = Device.make(3, context, 5, seed=73)
    plan = work.plan([context, context - 1000, 37], [1, 3, 1], max_seq_len=context)
    work.check_rows(plan, work.run(plan), [0, 1, 3, 4])


def test_a_context_of_a_million_tokens() -> None:
    work = Device.make(1, 1 << 20, 1, seed=74)
    plan = work.plan([1 << 20], [1], max_seq_len=1 << 20)
    result = work.run(plan)
    work.check_rows(plan, result, [0])
    twice = work.run(plan)
    assert_bitwise_equal(twice[0].block_ids, result[0].block_ids, "ids of two runs")
    assert_bitwise_equal(twice[1], result[1], "output of two runs")


@pytest.mark.parametrize("page_tokens", [16, 64, 848])
def test_a_decode_row_alone_among_256(page_tokens: int) -> None:
    """Another form of the work, other pages: the same scores, ids, output and lse."""
    work = Device.make(256, 5000, 256, page_tokens=page_tokens, seed=75)
    lens = (torch.arange(256) * 97 % 4990 + 1).tolist()
    lens[17], lens[255] = 5000, 4999
    selection, out, lse = work.run(work.plan(lens, [1] * 256, max_seq_len=5000))
    for row in (0, 17, 100, 255):
        single = dataclasses.replace(
            work, q=work.q[row : row + 1], gate=work.gate[row : row + 1], index_q=work.index_q[row : row + 1],
            table=work.table[row : row + 1],
        )  # fmt: skip
        alone = single.run(single.plan([lens[row]], [1], max_seq_len=5000))
        for name in ("block_ids", "block_counts", "scores"):
            assert_bitwise_equal(getattr(selection, name)[row : row + 1], getattr(alone[0], name), f"{name} of {row}")
        assert_bitwise_equal(out[row : row + 1], alone[1], f"output of row {row}")
        assert_bitwise_equal(lse[row : row + 1], alone[2], f"lse of row {row}")


@pytest.mark.parametrize("width", [2, 5, 16])
def test_fault_36_wide_windows_at_depth(width: int) -> None:
    """Row i of a verification window at 20,000 tokens selects and, row by row, attends as its own decode step."""
    work = Device.make(2, 20_000, 2 * width, seed=76)
    lens = [20_000, 19_998]
    plan = work.plan(lens, [width, width], max_seq_len=20_000)
    work.check_rows(plan, work.run(plan), [0, width - 1, 2 * width - 1])
    selection, out, _ = work.run(plan, row_exact=True)
    for request in range(2):
        for i in {0, width // 2, width - 1}:
            row = request * width + i
            single = dataclasses.replace(
                work, q=work.q[row : row + 1], gate=work.gate[row : row + 1], index_q=work.index_q[row : row + 1],
                table=work.table[request : request + 1],
            )  # fmt: skip
            alone = single.run(single.plan([lens[request] - width + 1 + i], [1], max_seq_len=20_000))
            assert_bitwise_equal(selection.block_ids[row : row + 1], alone[0].block_ids, f"ids of row {row}")
            assert_bitwise_equal(selection.scores[row : row + 1], alone[0].scores, f"scores of row {row}")
            assert_bitwise_equal(out[row : row + 1], alone[1], f"output of row {row}")


def test_more_programs_than_65535() -> None:
    """70,000 decode rows of short contexts."""
    requests = 70_000
    work = Device.make(1, 64, requests, seed=77)
    table = work.table.expand(requests, 1).contiguous()
    lens = (torch.arange(requests) % 64 + 1).tolist()
    plan = work.plan(lens, [1] * requests, max_seq_len=64, table=table)
    selection = select_blocks(work.index_q, work.cache, plan, backend="triton")
    out = attend(work.q, work.cache, selection, plan, gate=work.gate, backend="triton")
    for row in (0, 65_535, 65_536, 69_999):
        seen = lens[row] // R
        assert selection.block_ids[row, :seen].tolist() == list(range(seen))
        k = read_slots(work.cache.k_pages, plan.token_slots(row, torch.arange(lens[row], device="cuda")))
        v = read_slots(work.cache.v_pages, plan.token_slots(row, torch.arange(lens[row], device="cuda")))
        every = list(range(lens[row]))
        exact, _ = oracles.attend_row(work.q[row], k, v, every, gate=work.gate[row])
        low, _ = oracles.attend_row(work.q[row], k, v, every, gate=work.gate[row], round_to=BF16)
        assert_within_budget(out[row], low.to(BF16), exact, f"row {row}")


def test_the_current_device_is_not_assumed() -> None:
    """Tensors on the last device while the first one is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    results: list[Any] = []
    for device in ("cuda:0", f"cuda:{torch.cuda.device_count() - 1}"):
        work = Device.make(2, 6000, 2, seed=78, device=device)
        selection, out, _ = work.run(work.plan([6000, 5000], [1, 1], max_seq_len=6000))
        results.append((selection.block_ids.cpu(), out.cpu()))
        assert torch.cuda.current_device() == 0
    assert_bitwise_equal(results[1][0], results[0][0], "ids")
    assert_bitwise_equal(results[1][1], results[0][1], "output")
