"""What only a device shows of decode and verification: graphs, pools beyond 2^31, depth, wide batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.attention import attend, merge_partials
from flashqsa.cache import LayerCache
from flashqsa.cache.state import read_slots
from flashqsa.errors import SelectionError
from flashqsa.plan import StepPlan, plan_step
from flashqsa.selection import select_blocks
from flashqsa.testing import assert_bitwise_equal, assert_within_budget, oracles

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
R, TOPK = 4, 512


@pytest.mark.parametrize("requests", [1, 2, 4, 8])
def test_fault_17_one_graph_replayed_over_edited_steps(requests: int, released: Any) -> None:
    """Plan, selection and attention in one graph; lengths and page table are edited in place between replays.

    Padding requests have length 0 and page rows of garbage; live rows have the bits of an eager step.
    """
    work = released(requests, 9000, 2 * requests, seed=70)
    starts = (torch.arange(requests + 1) * 2).to(device="cuda", dtype=torch.int32)
    seq_lens = torch.full((requests,), 9000, dtype=torch.int32, device="cuda")
    table = work.table.clone()

    def planned(out: StepPlan | None = None) -> StepPlan:
        return plan_step(
            starts, seq_lens, table, page_tokens=64, block_tokens=R, topk_blocks=TOPK, max_query_len=2,
            max_seq_len=9000, num_pages=work.cache.k_pages.shape[0], num_rows=2 * requests, out=out,
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
    for turn, live in enumerate(range(requests, -1, -1)):
        generator = torch.Generator("cuda").manual_seed(turn)
        lens = torch.randint(2, 9000, (requests,), generator=generator, device="cuda", dtype=torch.int32)
        lens[live:] = 0
        shuffled = work.table[torch.randperm(requests, generator=generator, device="cuda")].clone()
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


@pytest.mark.parametrize("chunk", [3, 600])
def test_fault_47_no_synchronisation(chunk: int, released: Any, no_synchronisation: Any) -> None:
    """Decode beside verification, and beside a chunk of prefill."""
    rows = [1, chunk, 2]
    work = released(3, 9000, sum(rows), seed=71)
    plan = work.plan([9000, 8000, 10], rows)
    work.run(plan)
    with no_synchronisation():
        result = work.run(plan)
    work.check_rows(plan, result, [0, 2, chunk + 2])
    assert bool(torch.isfinite(result[1]).all())


def test_fault_42_page_ids_whose_offsets_pass_32_bits(released: Any) -> None:
    """Caches that are views of one pool of pages of 1,077,120 bytes, page ids to 6,000: offsets beyond 2^31.

    Decode, verification, and a chunk that goes by tiles.
    """
    page_bytes, pages, page_tokens = 1_077_120, 6000, 64
    lens, rows = [6400, 6300, 6000], [1, 2, 40]
    work = released(3, 6400, sum(rows), seed=72)
    wanted = work.run(work.plan(lens, rows))
    pool = torch.empty(pages * page_bytes // 2, dtype=BF16, device="cuda")
    stride = page_bytes // 2
    far = torch.randperm(2000, device="cuda")[: work.table.numel()].view_as(work.table) + 3990
    assert int(far.max()) * stride > 2**31
    old, views, offset = work.table.flatten().to(torch.int64), [], 0
    for source in (work.cache.k_pages, work.cache.v_pages, work.cache.block_keys):
        views.append(pool.as_strided((pages, *source.shape[1:]), [stride, *source[0].stride()], offset))
        views[-1][far.flatten()] = source[old]
        offset += source[0].numel()
    assert [view.shape[1] for view in views] == [page_tokens, page_tokens, page_tokens // R]
    work.cache, work.table = LayerCache(*views, None, None), far.to(torch.int32)
    got = work.run(work.plan(lens, rows))
    for name in ("block_ids", "scores"):
        assert_bitwise_equal(getattr(got[0], name), getattr(wanted[0], name), name)
    assert_bitwise_equal(got[1], wanted[1], "output")


CONTEXTS = [1, 3, 4, 5, 63, 64, 100, 464, 1700, 2047, 2048, 2051]


def test_fault_5_contexts_within_the_budget_are_dense(released: Any, assert_same: Any) -> None:
    """Decode rows that select all they see, together and alone, scored or not: attention over everything."""
    work = released(len(CONTEXTS), 2051, len(CONTEXTS), seed=79)
    plan = work.plan(CONTEXTS, [1] * len(CONTEXTS))
    result = work.run(plan)
    assert torch.equal(result[0].block_counts, plan.visible_blocks)
    work.check_rows(plan, result, range(len(CONTEXTS)))
    unscored = select_blocks(work.index_q, work.cache, plan, backend="triton")
    assert_same((unscored, *work.attend(unscored, plan)), result, "without scores")
    split = work.run(work.plan(CONTEXTS, [1] * len(CONTEXTS), max_seq_len=2112))
    assert_same(split, result, "a bound past the budget")
    for row, context in enumerate(CONTEXTS):
        alone = work.only(slice(row, row + 1), slice(row, row + 1))
        assert_same(alone.run(alone.plan([context], [1])), result, f"{context} tokens", slice(row, row + 1))


def test_fault_37_contexts_around_a_page(released: Any, assert_same: Any) -> None:
    """Pages of 64, shuffled, NaN and infinity past each request's end."""
    lens = [*range(63, 71), *range(127, 131), 4097]
    work = released(len(lens), 4097, len(lens), seed=80)
    plan = work.plan(lens, [1] * len(lens))
    work.fill_past(lens, float("nan"))
    result = work.run(plan)
    work.check_rows(plan, result, range(len(lens)))
    work.fill_past(lens, float("inf"))
    assert_same(work.run(plan), result, "infinity past the end")


def test_fault_1_twenty_runs_of_64_rows(released: Any, assert_same: Any) -> None:
    """64 rows that see 1 to 4,096 blocks: the same bits 20 times, whatever lies past what a row sees."""
    lens = [4 * (1 + 65 * row) for row in range(64)]
    work = released(64, 4 * 4096, 64, seed=81)
    plan = work.plan(lens, [1] * 64)
    first = work.run(plan)
    work.check_rows(plan, first, [0, 7, 8, 31, 63])
    ids = first[0].block_ids.long()
    rising = (ids[:, 1:] > ids[:, :-1]) | (ids[:, 1:] == -1)
    assert bool(rising.all())
    for run in range(20):
        work.fill_past(lens, (float("nan"), float("inf"))[run % 2])
        assert_same(work.run(plan), first, f"run {run}")


@pytest.mark.parametrize("context", [120_000, 210_001])
def test_fault_38_long_contexts(context: int, released: Any, assert_same: Any) -> None:
    """Random pages, four times, then a short request after long ones in the same call and by itself."""
    work = released(3, context, 5, seed=73)
    lens, rows = [context, context - 1000, 37], [1, 3, 1]
    plan = work.plan(lens, rows)
    result = work.run(plan)
    work.check_rows(plan, result, range(5))
    for seed in range(4):
        moved = work.repaged(seed)
        assert_same(moved.run(moved.plan(lens, rows)), result, f"pages {seed}")
    short = work.only(slice(4, 5), slice(2, 3))
    assert_same(short.run(short.plan([37], [1])), result, "a short request", slice(4, 5))


def test_fault_38_a_context_of_a_million_tokens(released: Any, assert_same: Any) -> None:
    work = released(1, 1 << 20, 1, seed=74)
    plan = work.plan([1 << 20], [1])
    result = work.run(plan)
    work.check_rows(plan, result, [0])
    assert_same(work.run(plan), result, "again")


def test_fault_46_a_table_of_a_million_tokens_changes_no_bit(released: Any, assert_same: Any) -> None:
    """8k live of 1M planned: the bits of a table of 8k. What it costs is a row of the benchmark gpu-decode."""
    lens, rows = [8000, 8192, 5000, 8190], [1, 1, 4, 30]
    work = released(4, 8192, sum(rows), seed=82)
    wanted = work.run(work.plan(lens, rows))
    table = torch.full((4, (1 << 20) // 64), 2**31 - 1, dtype=torch.int32, device="cuda")
    table[:, : work.table.shape[1]] = work.table
    assert_same(work.run(work.plan(lens, rows, max_seq_len=1 << 20, table=table)), wanted, "wide")


@pytest.mark.parametrize("page_tokens", [16, 64, 848])
def test_a_decode_row_alone_among_256(page_tokens: int, released: Any, assert_same: Any) -> None:
    """Another form of the work, other pages: the same scores, ids, output and lse."""
    work = released(256, 5000, 256, page_tokens=page_tokens, seed=75)
    lens = (torch.arange(256) * 97 % 4990 + 1).tolist()
    lens[17], lens[255] = 5000, 4999
    together = work.run(work.plan(lens, [1] * 256))
    for row in (0, 17, 100, 255):
        here = slice(row, row + 1)
        alone = work.only(here, here)
        assert_same(alone.run(alone.plan([lens[row]], [1], max_seq_len=5000)), together, f"row {row}", here)


@pytest.mark.parametrize("width", [2, 5, 16])
def test_fault_36_wide_windows_at_depth(width: int, released: Any, assert_same: Any) -> None:
    """Row i of a verification window at 20,000 tokens selects and, row by row, attends as its own decode step."""
    work = released(2, 20_000, 2 * width, seed=76)
    lens = [20_000, 19_998]
    plan = work.plan(lens, [width, width])
    work.check_rows(plan, work.run(plan), [0, width - 1, 2 * width - 1])
    together = work.run(plan, row_exact=True)
    for request in range(2):
        for i in {0, width // 2, width - 1}:
            row = request * width + i
            alone = work.only(slice(row, row + 1), slice(request, request + 1))
            got = alone.run(alone.plan([lens[request] - width + 1 + i], [1]))
            assert_same(got, together, f"row {row}", slice(row, row + 1))


@pytest.mark.parametrize("requests", [1, 3, 64, 65])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 8])
def test_fault_48_widths_and_batches(width: int, requests: int, released: Any, assert_same: Any) -> None:
    """Every row of every window has, with row_exact, the bits of the decode step at its place."""
    lens = [3000 - 7 * request for request in range(requests)]
    work = released(requests, 3000, requests * width, seed=83)
    plan = work.plan(lens, [width] * requests)
    work.check_rows(plan, work.run(plan), {0, width - 1, requests * width - 1})
    together = work.run(plan, row_exact=True)
    for i in range(width):
        rows = slice(i, None, width)
        decode = work.only(rows, slice(None))
        got = decode.run(decode.plan([length - width + 1 + i for length in lens], [1] * requests))
        assert_same(got, together, f"row {i} of {width}", rows)


def test_fault_34_a_window_reuses_the_row_that_was_accepted(released: Any) -> None:
    """Windows of 4, 1 to 4 rows accepted: the next row attends what the accepted one selected, and all since."""
    lens, accepted = [5000, 9000, 7001, 2400], [1, 4, 2, 3]
    window = released(4, 9000, 16, seed=84)
    selected = window.run(window.plan(lens, [4] * 4))[0]
    rows = torch.tensor([4 * request + count - 1 for request, count in enumerate(accepted)], device="cuda")
    reused = selected.take(rows)
    assert_bitwise_equal(reused.block_ids, selected.block_ids[rows], "ids")
    step = window.only(slice(0, 4), slice(None))
    plan = step.plan([length - 4 + count + 1 for length, count in zip(lens, accepted, strict=True)], [1] * 4)
    step.check_attention(plan, (reused, *step.attend(reused, plan)), range(4))


def test_fault_35_a_selection_follows_its_requests(released: Any, refuses: Any) -> None:
    """Requests leave and change places: `take` carries rows along. The selection of another layer is refused."""
    work = released(4, 9000, 4, seed=85)
    lens, order = [9000, 2000, 7001, 5000], [3, 0, 2]
    cache = dataclasses.replace(work.cache, layer_id=3)
    work = dataclasses.replace(work, cache=cache)
    selected = work.run(work.plan(lens, [1] * 4))[0]
    kept = torch.tensor(order, device="cuda")
    reused = selected.take(kept)
    step = dataclasses.replace(work.only(slice(0, 3), slice(None)), table=work.table[kept])
    plan = step.plan([lens[request] + 3 for request in order], [1] * 3, max_seq_len=9003)
    step.check_attention(plan, (reused, *step.attend(reused, plan)), range(3))
    other = dataclasses.replace(step, cache=dataclasses.replace(cache, layer_id=7))
    with refuses(SelectionError, "attend", "layer"):
        other.attend(reused, plan)


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_fault_44_shards_of_2051_tokens(shards: int, released: Any) -> None:
    """Blocks dealt to shards, one shard empty, the tail owned by the last: fp32 within 1e-5 of the whole."""
    work = released(1, 2051, 1, seed=86)
    k_pages, v_pages = work.cache.k_pages.float(), work.cache.v_pages.float()
    cache = dataclasses.replace(work.cache, k_pages=k_pages, v_pages=v_pages)
    work = dataclasses.replace(work, q=work.q.float(), gate=work.gate.float(), cache=cache)
    plan = work.plan([2051], [1])
    selection, _, lse = work.run(plan)
    outputs, lses = [], []
    for shard in range(shards + 1):
        ids = selection.block_ids[0, selection.block_ids[0] % shards == shard]
        part = torch.full_like(selection.block_ids, -1)
        part[0, : len(ids)] = ids
        counts = torch.full_like(selection.block_counts, len(ids))
        owned = dataclasses.replace(selection, block_ids=part, block_counts=counts)
        got = attend(
            work.q, work.cache, owned, plan, return_lse=True, include_tail=shard == shards - 1,
            out_dtype=torch.float32, backend="triton",
        )  # fmt: skip
        outputs.append(got[0])
        lses.append(got[1])
    whole = attend(work.q, work.cache, selection, plan, out_dtype=torch.float32, backend="triton")
    merged = merge_partials(outputs, lses)
    assert not bool(merged.isnan().any())
    assert float((merged - whole).abs().max()) < 1e-5
    assert bool((lses[-1] == -torch.inf).all())
    assert float((torch.stack(lses).logsumexp(0) - lse).abs().max()) < 1e-5


def test_fault_45_debug_mode_refuses_ids_that_break_a_rule(
    released: Any, refuses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With FLASHQSA_DEBUG=1 a device's values are looked at: -1 alone and in the middle, duplicates, later blocks."""
    monkeypatch.setenv("FLASHQSA_DEBUG", "1")
    work = released(2, 9000, 2, seed=87)
    plan = work.plan([9000, 4000], [1, 1])
    selection, wanted, _ = work.run(plan)
    for column, value in ((slice(None), -1), (7, -1), (7, int(selection.block_ids[1, 6])), (511, 1000)):
        ids = selection.block_ids.clone()
        ids[1, column] = value
        with refuses(SelectionError, "attend", "block_ids", "row 1"):
            work.attend(dataclasses.replace(selection, block_ids=ids), plan)
    assert_bitwise_equal(work.attend(selection, plan)[0], wanted, "a good selection")


def test_more_programs_than_65535(released: Any) -> None:
    """70,000 decode rows of short contexts."""
    requests = 70_000
    work = released(1, 64, requests, seed=77)
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


def test_the_current_device_is_not_assumed(released: Any) -> None:
    """Tensors on the last device while the first one is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    results: list[Any] = []
    for device in ("cuda:0", f"cuda:{torch.cuda.device_count() - 1}"):
        work = released(2, 6000, 2, seed=78, device=device)
        selection, out, _ = work.run(work.plan([6000, 5000], [1, 1]))
        results.append((selection.block_ids.cpu(), out.cpu()))
        assert torch.cuda.current_device() == 0
    assert_bitwise_equal(results[1][0], results[0][0], "ids")
    assert_bitwise_equal(results[1][1], results[0][1], "output")
