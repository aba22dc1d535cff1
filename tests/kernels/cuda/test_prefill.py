"""What only a device shows of prefill: bounded memory, chunks in one graph, cuts, long requests, depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.attention.triton_attend import tile_rows
from flashqsa.plan import StepPlan, plan_step
from flashqsa.selection import select_blocks
from flashqsa.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu

R, TOPK = 4, 512
NEAR, FAR = 0.3, None
"""Neighbours that have most of their blocks in common, and neighbours that have few."""


def test_fault_43_memory_of_8192_rows_over_524288_tokens(released: Any) -> None:
    """What selection allocates beside its result stays within the workspace; ids do not depend on it."""
    rows, context = 8192, 524_288
    work = released(1, context, rows, seed=90, noise=NEAR)
    found = []
    for workspace_bytes in (64 << 20, 256 << 20, None, 1 << 40):
        plan = work.plan([context], [rows])
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        selection = select_blocks(work.index_q, work.cache, plan, workspace_bytes=workspace_bytes, backend="triton")
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
        result = sum(x.nbytes for x in (selection.block_ids, selection.block_counts, selection.visible_blocks))
        budget = 256 << 20 if workspace_bytes is None else workspace_bytes
        assert taken <= budget + result + (4 << 20), f"{taken} bytes with a workspace of {budget}"
        found.append((selection.block_ids, selection.block_counts))
        if workspace_bytes is None:
            work.check_rows(plan, (selection, *work.attend(selection, plan)), [0, 4097, rows - 1])
    assert taken > rows * context // R * 4, "without a bound all scores exist at once"
    for ids, counts in found[1:]:
        assert_bitwise_equal(ids, found[0][0], "ids")
        assert_bitwise_equal(counts, found[0][1], "counts")


@pytest.mark.parametrize("noise", [NEAR, FAR], ids=["near", "far"])
def test_fault_17_chunked_prefill_in_one_graph(noise: float | None, released: Any, assert_same: Any) -> None:
    """512 rows at offsets that move beside a decode row: lengths, rows and page table are edited in place.

    Chunks shorter than the captured one leave padding rows. Replays have the bits of eager steps with tight bounds.
    """
    work = released(2, 20_000, 520, seed=91, noise=noise)
    starts = torch.tensor([0, 512, 513], dtype=torch.int32, device="cuda")
    lens = torch.tensor([20_000, 20_000], dtype=torch.int32, device="cuda")
    table = work.table.clone()

    def planned(out: StepPlan | None = None) -> StepPlan:
        return plan_step(
            starts, lens, table, page_tokens=64, block_tokens=R, topk_blocks=TOPK, max_query_len=512,
            max_seq_len=20_000, num_pages=work.cache.k_pages.shape[0], num_rows=520, out=out,
        )  # fmt: skip

    plan = planned()
    selection, out, lse = work.run(plan)

    def step() -> None:
        planned(plan)
        select_blocks(work.index_q, work.cache, plan, return_scores=True, out=selection, backend="triton")
        lse.copy_(work.attend(selection, plan, out=out)[1])

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn, (before, rows) in enumerate([(0, 512), (512, 512), (1999, 300), (19_488, 512), (7000, 17), (3, 5)]):
        seen, chunk = [before + rows, 19_000 - turn], [rows, 1]
        starts.copy_(torch.tensor([0, rows, rows + 1]))
        lens.copy_(torch.tensor(seen))
        table.copy_(work.table.flip(0) if turn % 2 else work.table)
        for buffer in (out, lse):
            buffer.fill_(torch.nan)
        selection.block_ids.fill_(2**31 - 1)
        graph.replay()
        torch.cuda.synchronize()
        eager_plan = work.plan(seen, chunk, table=table)
        assert_same(work.run(eager_plan), (selection, out, lse), f"{rows} rows at {before}")
        work.check_rows(eager_plan, (selection, out, lse), {0, rows // 2, rows - 1, rows})
        assert not bool(out[rows + 1 :].any())
        assert bool((lse[rows + 1 :] == -torch.inf).all())


@pytest.mark.parametrize("noise", [NEAR, FAR], ids=["near", "far"])
def test_fault_12_requests_of_1_and_10000_rows_side_by_side(
    noise: float | None, released: Any, assert_same: Any
) -> None:
    """Each has the bits that it has alone, on other pages; sampled rows are the oracle's."""
    rows, lens = [1, 10_000, 1, 37], [9000, 10_500, 12_000, 37]
    work = released(4, 12_000, sum(rows), seed=92, noise=noise)
    plan = work.plan(lens, rows)
    together = work.run(plan)
    work.check_rows(plan, together, [0, 1, 2, 513, 5000, 10_000, 10_001, 10_002, 10_038])
    moved, first = work.repaged(1), 0
    for request, count in enumerate(rows):
        here = slice(first, first + count)
        alone = moved.only(here, slice(request, request + 1))
        assert_same(alone.run(alone.plan([lens[request]], [count])), together, f"request {request}", here)
        first += count


@pytest.mark.parametrize("noise", [NEAR, FAR], ids=["near", "far"])
def test_fault_12_chunks_of_a_prefill(noise: float | None, released: Any, assert_same: Any) -> None:
    """Cut at multiples of the tile height: the bits of the whole. Cut elsewhere: its selection, the oracle's output.

    Chunks run beside other requests, on other pages.
    """
    total = 6000
    work = released(2, total, total + 1, seed=93, noise=noise)
    requests = work.only(slice(0, total), slice(0, 1))
    whole = requests.run(requests.plan([total], [total]))
    height = tile_rows(12)
    for seed, cuts in enumerate(([300 * height, 411 * height], [841, 842, 2049, 4001])):
        moved = work.repaged(seed)
        for start, end in zip([0, *cuts], [*cuts, total], strict=True):
            rows = end - start
            part = moved.only(slice(start, end + 1), slice(None))
            plan = part.plan([end, 3333], [rows, 1])
            selection, out, lse = part.run(plan)
            mine = slice(start, end)
            for name in ("block_ids", "block_counts", "scores"):
                assert_bitwise_equal(getattr(selection, name)[:rows], getattr(whole[0], name)[mine], f"{name} {mine}")
            if seed == 0:
                assert_bitwise_equal(out[:rows], whole[1][mine], f"output {mine}")
                assert_bitwise_equal(lse[:rows], whole[2][mine], f"lse {mine}")
            else:
                part.check_rows(plan, (selection, out, lse), {0, 1, rows // 2, rows - 1})


def test_fault_12_row_exact_is_the_decode_form_in_any_chunk(released: Any, assert_same: Any) -> None:
    """Rows of 600 at 20,000 tokens, and of 30 at 40: a row fed with its chunk is the row of its own decode step."""
    rows, lens = [600, 30], [20_000, 70]
    work = released(2, 20_000, sum(rows), seed=94, noise=NEAR)
    together = work.run(work.plan(lens, rows), row_exact=True)
    for request, i in ((0, 0), (0, 1), (0, 299), (0, 599), (1, 0), (1, 17), (1, 29)):
        row = request * 600 + i
        alone = work.only(slice(row, row + 1), slice(request, request + 1))
        got = alone.run(alone.plan([lens[request] - rows[request] + 1 + i], [1]))
        assert_same(got, together, f"row {row}", slice(row, row + 1))


@pytest.mark.parametrize("noise", [NEAR, FAR], ids=["near", "far"])
def test_fault_1_twenty_runs_of_a_chunk(noise: float | None, released: Any, assert_same: Any) -> None:
    """Lists of unions, tiles and rows that are left to others come out the same every time."""
    work = released(3, 9000, 710, seed=95, noise=noise)
    lens, rows = [9000, 4000, 8000], [600, 100, 10]
    plan = work.plan(lens, rows)
    first = work.run(plan)
    work.check_rows(plan, first, [0, 599, 600, 699, 705])
    for run in range(20):
        assert_same(work.run(plan if run % 2 else work.plan(lens, rows)), first, f"run {run}")


@pytest.mark.parametrize("context", [120_000, 210_001, 1 << 20])
def test_fault_38_chunks_at_depth(context: int, released: Any, assert_same: Any) -> None:
    """Shuffled pages, a short prefill and a decode row beside; twice, on different pages."""
    rows, lens = [301, 40, 1], [context, 40, 2000]
    work = released(1, context, sum(rows), seed=96, noise=NEAR)
    work.table = work.table.expand(3, -1).contiguous()
    plan = work.plan(lens, rows)
    result = work.run(plan)
    work.check_rows(plan, result, [0, 150, 300, 301, 340, 341])
    moved = work.repaged(1)
    assert_same(moved.run(moved.plan(lens, rows)), result, "other pages")


def test_fault_45_nan_where_no_row_of_a_chunk_attends(released: Any) -> None:
    """K and V of all tokens that no row selected hold NaN: no bit changes."""
    rows, context = 200, 9000
    work = released(1, context, rows, seed=97, noise=NEAR)
    plan = work.plan([context], [rows])
    selection, out, lse = work.run(plan)
    attended = torch.zeros(work.table.shape[1] * 64, dtype=torch.bool, device="cuda")
    attended[context - rows - R :] = True  # tails
    blocks = selection.block_ids[selection.block_ids >= 0].long().unique()
    attended.view(-1, R)[blocks] = True
    spare = (~attended).nonzero().flatten()
    assert len(spare) > 1000
    for pages in (work.cache.k_pages, work.cache.v_pages):
        pages[work.table[0].long()[spare // 64], spare % 64] = torch.nan
    got = work.attend(selection, plan)
    assert_bitwise_equal(got[0], out, "output")
    assert_bitwise_equal(got[1], lse, "lse")


def test_fault_45_neighbours_without_a_common_block(released: Any) -> None:
    """Rows share blocks with every second, fifth or nineteenth row alone: rows of a tile have none in common."""
    rows, context = 60, 40_000
    work = released(1, context, rows, seed=98)
    plan = work.plan([context], [rows])
    selection, _, _ = work.run(plan)
    for period in (2, 5, 19):
        part = torch.arange(rows, device="cuda")[:, None] % period
        selection.block_ids.copy_(torch.arange(TOPK, device="cuda")[None] * 19 + part)
        work.check_attention(plan, (selection, *work.attend(selection, plan)), [0, 1, 4, 5, 9, 10, 30, 59])
