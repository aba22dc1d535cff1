"""The score kernel and selection as a whole: bounds, ragged steps, layouts, and rows that nothing else changes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.cache import LayerCache
from flashqsa.plan import plan_step
from flashqsa.selection import row_levels, select_blocks
from flashqsa.selection.plain import least_workspace_bytes
from flashqsa.selection.triton_scores import ScoreKernelConfig, score_blocks_triton
from flashqsa.testing import (
    StepCase,
    assert_best_selection,
    assert_bitwise_equal,
    assert_same_selection,
    assert_scores_within,
    guarded,
    make_step,
    oracles,
    poison,
    score_bounds,
)

RAGGED = ((150, 1), (0, 37), (61, 5), (31, 1), (0, 3), (270, 2), (3, 1))
"""Decode, prefill, verification, within the budget, shorter than a block."""

NAMES = ("block_ids", "block_counts", "scores", "visible_blocks", "request_ids")


@pytest.mark.parametrize(
    ("heads", "dim", "page_tokens"),
    [(1, 32, 16), (2, 64, 64), (3, 96, 80), (4, 128, 848), (5, 40, 16), (16, 64, 64), (4, 16, 16)],
    ids=str,
)
def test_scores_within_their_bound(
    heads: int, dim: int, page_tokens: int, dtype: torch.dtype, device: torch.device, select: Any
) -> None:
    """Random keys: scores against float64, the selection the best up to what the bound leaves open."""
    case = StepCase(
        "bounds", RAGGED, index_heads=heads, index_head_dim=dim, page_tokens=page_tokens, dtype=dtype,
        padding_rows=3, padding_requests=2,
    )  # fmt: skip
    step = make_step(case, seed=10, device=device)
    selection = select(step, return_scores=True)
    for request in step.requests:
        for row, position in request.rows():
            keys = request.block_keys[: (position + 1) // 4]
            exact, bounds = oracles.score_blocks(step.index_q[row], keys), score_bounds(step.index_q[row], keys)
            ids = selection.block_ids[row, : int(selection.block_counts[row])].to(torch.int64)
            assert_best_selection(ids.tolist(), exact, bounds, case.topk_blocks, f"row {row}")
            assert_scores_within(selection.scores[row, : len(ids)], exact[ids], bounds[ids], f"row {row}")
    padding = step.plan.request_ids < 0
    assert bool((selection.scores[padding] == -torch.inf).all())
    assert_bitwise_equal(select(step).block_ids, selection.block_ids, "without scores")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("index_dtype", "index_q_dtype"),
    [(torch.float8_e4m3fn, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.bfloat16), (torch.float32, torch.float16)],
    ids=str,
)
def test_scores_of_mixed_dtypes(
    index_dtype: torch.dtype, index_q_dtype: torch.dtype, device: torch.device, select: Any
) -> None:
    case = StepCase(
        "mixed", RAGGED, index_head_dim=128, dtype=torch.bfloat16, index_dtype=index_dtype, index_q_dtype=index_q_dtype
    )
    step = make_step(case, seed=11, device=device)
    selection = select(step, return_scores=True)
    for request in step.requests:
        for row, position in request.rows():
            keys = request.block_keys[: (position + 1) // 4]
            exact, bounds = oracles.score_blocks(step.index_q[row], keys), score_bounds(step.index_q[row], keys)
            ids = selection.block_ids[row, : int(selection.block_counts[row])].to(torch.int64)
            assert_best_selection(ids.tolist(), exact, bounds, case.topk_blocks, f"row {row}")
            assert_scores_within(selection.scores[row, : len(ids)], exact[ids], bounds[ids], f"row {row}")


@pytest.mark.parametrize("layout", ["split", "dense", "contiguous"])
@pytest.mark.parametrize(("heads", "page_tokens"), [(1, 16), (3, 80), (4, 848)], ids=str)
def test_fault_37_exact_ids_of_integers(
    heads: int, page_tokens: int, layout: str, dtype: torch.dtype, device: torch.device, with_integers: Any, select: Any
) -> None:
    """Scores that every order of summation gets right, ties among them: the oracle's ids, every page and stride."""
    case = StepCase(
        "integers", RAGGED, index_heads=heads, index_head_dim=32, page_tokens=page_tokens, dtype=dtype, padding_rows=2,
        padding_requests=1, contiguous=layout == "contiguous", layout="dense" if layout == "dense" else "split",
        topk_blocks=7, max_query_len=40, max_seq_len=1000,
    )  # fmt: skip
    step = with_integers(make_step(case, seed=12, device=device), seed=12)
    assert_same_selection(select(step), oracles.step_selection(step))
    scored = select(step, return_scores=True)
    assert_same_selection(scored, oracles.step_selection(step))
    exact = oracles.step_scores(step)
    for row, count in enumerate(scored.block_counts.tolist()):
        ids = scored.block_ids[row, :count].to(torch.int64)
        assert torch.equal(scored.scores[row, :count].to(torch.float64), exact[row][ids])


def test_fault_8_heads_are_summed_after_relu(device: torch.device, select: Any) -> None:
    """Three blocks that win by the sum of relus, by the relu of the sum, and by the largest head."""
    keys = torch.full((1, 4, 32), torch.nan, device=device)
    keys[0, :3] = 0.0
    keys[0, 0, :2] = torch.tensor([5.0, 4.0])  # sum of relu 9
    keys[0, 1, :2] = torch.tensor([8.0, -20.0])  # largest head 8
    keys[0, 2, :4] = torch.tensor([3.0, 3.0, 2.0, 0.0])  # relu of the sum 8 beats 9 - 3
    queries = torch.zeros(1, 3, 32, device=device)
    queries[0, :, :3] = torch.eye(3)
    keys[0, 0, 2] = -3.0
    plan = plan_step(
        torch.tensor([0, 1], dtype=torch.int32, device=device), torch.tensor([12], dtype=torch.int32, device=device),
        torch.zeros(1, 1, dtype=torch.int32, device=device), page_tokens=16, block_tokens=4, topk_blocks=1,
        max_query_len=1, max_seq_len=12, num_rows=1,
    )  # fmt: skip
    kv = torch.zeros(1, 16, 1, 1, device=device)
    selection = select_blocks(queries, LayerCache(kv, kv, keys, None, None), plan, return_scores=True, backend="triton")
    assert selection.block_ids.tolist() == [[0]]
    assert selection.scores.tolist() == [[9.0]]


def test_fault_29_stale_keys_are_never_seen(device: torch.device, with_integers: Any, select: Any) -> None:
    """NaN, infinities and huge keys past each request's last block and in pages of nobody."""
    step = with_integers(make_step(StepCase("stale", RAGGED), seed=13, device=device), seed=13)
    wanted = select(step, return_scores=True)
    live = torch.cat([request.block_slot_ids for request in step.requests])
    for value in (torch.inf, 3e38, -3e38):
        keys = torch.full_like(step.cache.block_keys, value)
        pages, places = live // keys.shape[1], live % keys.shape[1]
        keys[pages, places] = step.cache.block_keys[pages, places]
        got = select(
            dataclasses.replace(step, cache=dataclasses.replace(step.cache, block_keys=keys)), return_scores=True
        )
        for name in NAMES:
            assert_bitwise_equal(getattr(got, name), getattr(wanted, name), f"{name}, {value}")


@pytest.mark.parametrize("seq_lens", [[0, 5, 0], [0, 0], [0], []], ids=str)
def test_fault_18_requests_without_tokens(seq_lens: list[int], device: torch.device, select: Any) -> None:
    """Padding alone, or around one short request, page rows of -1: counts of zero, nothing read."""
    rows = len(seq_lens)
    keys = torch.full((1, 4, 32), torch.nan, device=device)
    if 5 in seq_lens:
        keys[0, 0] = 1.0
    table = torch.full((rows, 2), -1, dtype=torch.int32, device=device)
    if 5 in seq_lens:
        table[1, 0] = 0
    plan = plan_step(
        torch.arange(rows + 1, dtype=torch.int32, device=device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device), table, page_tokens=16, block_tokens=4, topk_blocks=2,
        max_query_len=1, max_seq_len=64, num_rows=rows + 2,
    )  # fmt: skip
    kv = torch.zeros(1, 16, 1, 1, device=device)
    queries = torch.full((rows + 2, 4, 32), torch.nan, device=device)
    queries[1:2] = 1.0
    selection = select_blocks(queries, LayerCache(kv, kv, keys, None, None), plan, return_scores=True, backend="triton")
    counts = [int(n == 5) for n in seq_lens] + [0, 0]
    assert selection.block_counts.tolist() == counts
    assert selection.block_ids.tolist() == [[0, -1] if n else [-1, -1] for n in counts]
    assert selection.request_ids.tolist() == [i if n else -1 for i, n in enumerate(counts)]


def _assert_rows(got: Any, wanted: Any, rows: slice, label: str) -> None:
    for name in ("block_ids", "block_counts", "scores", "visible_blocks"):
        assert_bitwise_equal(getattr(got, name)[rows], getattr(wanted, name), f"{label}: {name}")


def test_fault_6_a_request_alone_has_the_same_bits(
    dtype: torch.dtype, device: torch.device, select: Any, alone: Any
) -> None:
    """Scores and ids of every request of a ragged step equal those of its single run, on other pages."""
    case = StepCase("batch", RAGGED, index_head_dim=64, dtype=dtype, padding_rows=2, padding_requests=1)
    step = make_step(case, seed=14, device=device)
    together = select(step, return_scores=True)
    for request in (0, 1, 2, 5):
        for page_tokens in (16, 80):
            single = make_step(alone(case, request, page_tokens=page_tokens), seed=14, device=device)
            first = step.requests[request].first_row
            rows = slice(first, first + single.num_rows)
            _assert_rows(together, select(single, return_scores=True), rows, f"request {request}")


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_fault_36_verified_rows_equal_serial_decode(
    width: int, dtype: torch.dtype, device: torch.device, select: Any
) -> None:
    """Row i of a window sees the blocks that earlier rows of it closed, and has the bits of its own decode step."""
    before = 150 - width
    case = StepCase("window", ((before, width), (40, 1)), dtype=dtype, index_head_dim=64, request_seeds=(3, 4))
    together = select(make_step(case, seed=15, device=device), return_scores=True)
    for row in range(width):
        decode = dataclasses.replace(case, requests=((before + row, 1),), request_seeds=(3,))
        serial = select(make_step(decode, seed=15, device=device), return_scores=True)
        _assert_rows(together, serial, slice(row, row + 1), f"row {row} of {width}")


@pytest.mark.parametrize("cut", [1, 16, 37])
def test_chunks_equal_one_prefill(cut: int, device: torch.device, select: Any) -> None:
    whole = select(make_step(StepCase("whole", ((0, 90),)), seed=16, device=device), return_scores=True)
    for before, new in ((0, cut), (cut, 90 - cut)):
        part = select(make_step(StepCase("part", ((before, new),)), seed=16, device=device), return_scores=True)
        for name in NAMES[:4]:
            assert_bitwise_equal(getattr(part, name), getattr(whole, name)[before : before + new], name)


def test_workspaces_and_passes_change_no_bit(
    device: torch.device, select: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row at a time, a few, all; groups and none."""
    case = StepCase("workspace", RAGGED, padding_rows=2, max_query_len=40, index_head_dim=32)
    step = make_step(case, seed=17, device=device)
    wanted = select(step, return_scores=True)
    least = least_workspace_bytes(step.index_q, step.cache.block_keys, case.topk_blocks)
    for workspace_bytes in (least, 4 * least, 1 << 30):
        got = select(step, return_scores=True, workspace_bytes=workspace_bytes)
        for name in NAMES:
            assert_bitwise_equal(getattr(got, name), getattr(wanted, name), f"{name}, {workspace_bytes} bytes")
    monkeypatch.setattr(row_levels, "LEAST_BLOCK", 32)
    monkeypatch.setattr(row_levels, "MOST_BLOCK", 32)
    for workspace_bytes in (least, 1 << 30):
        fresh = make_step(case, seed=17, device=device)
        got = select(fresh, return_scores=True, workspace_bytes=workspace_bytes)
        for name in NAMES:
            assert_bitwise_equal(getattr(got, name), getattr(wanted, name), f"{name}, groups")


def _scores(step: Any, config: ScoreKernelConfig, rows: slice, least_blocks: int = 0) -> torch.Tensor:
    """Scores of these rows by these tiles; -7 where nothing was written."""
    out = torch.full((rows.stop - rows.start, step.plan.max_seq_len // 4), -7.0, device=step.index_q.device)
    score_blocks_triton(
        step.index_q, step.cache, step.plan, out, rows.start, least_blocks, multiprocessors=2, config=config
    )
    return out


@pytest.mark.parametrize("heads", [1, 3, 4, 16])
def test_fault_6_tiles_change_no_bit(heads: int, device: torch.device) -> None:
    """Decode, verification and prefill have tiles of their own: each gives the same bits."""
    case = StepCase("tiles", RAGGED, index_heads=heads, index_head_dim=32, dtype=torch.float16, padding_rows=1)
    step = make_step(case, seed=24, device=device)
    visible = step.plan.visible_blocks[:, None]
    wanted = _scores(step, ScoreKernelConfig(), slice(0, step.num_rows))
    assert torch.equal(wanted != -7, torch.arange(wanted.shape[1], device=device) < visible)
    tiles = (
        ScoreKernelConfig(rows=16, stages=1, programs=1, pages_ahead=3),
        ScoreKernelConfig(block_m=128, rows=4, programs=50),
        ScoreKernelConfig(rows=64 if heads < 8 else 16, stages=2), ScoreKernelConfig(block_m=32, rows=1, stages=1),
    )  # fmt: skip
    for config in tiles:
        got = _scores(step, config, slice(0, step.num_rows))
        assert_bitwise_equal(got, wanted, f"{config}")
        part = slice(5, 41)
        assert_bitwise_equal(_scores(step, config, part), wanted[part], f"{config}, rows 5 to 40")
        budget = _scores(step, config, slice(0, step.num_rows), 9)
        assert_bitwise_equal(budget, torch.where(visible > 9, wanted, -7), f"{config}, a budget of 9 blocks")


@pytest.mark.gpu
@pytest.mark.parametrize("index_head_dim", [48, 128])
def test_fault_6_e4m3_keys_wherever_they_lie(index_head_dim: int, device: torch.device) -> None:
    """Keys that lie so that they load two by two, and keys that do not: the same bits in every tile."""
    case = StepCase(
        "words", RAGGED, index_head_dim=index_head_dim, dtype=torch.bfloat16, index_dtype=torch.float8_e4m3fn,
        index_q_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    step = make_step(case, seed=25, device=device)
    keys = step.cache.block_keys
    wide = torch.full((*keys.shape[:2], 256 + 1), 0x7F, dtype=torch.uint8, device=device)
    every = slice(0, step.num_rows)
    wanted = _scores(step, ScoreKernelConfig(), every)
    assert int((wanted != -7).sum()) == int(step.plan.visible_blocks.sum())
    for start, width in ((0, 257), (1, 257), (0, 256), (32, 256), (16, 256)):
        place = wide.view(-1)[: keys.shape[0] * keys.shape[1] * width].view(*keys.shape[:2], width)
        moved = place[:, :, start : start + index_head_dim]
        moved.copy_(keys.view(torch.uint8))
        there = dataclasses.replace(
            step, cache=dataclasses.replace(step.cache, block_keys=moved.view(torch.float8_e4m3fn))
        )
        for config in (ScoreKernelConfig(), ScoreKernelConfig(rows=32, stages=2)):
            assert_bitwise_equal(_scores(there, config, every), wanted, f"{config}, {start} of {width} bytes")


def test_fault_1_two_runs_have_the_same_bits(device: torch.device, select: Any) -> None:
    step = make_step(StepCase("twice", RAGGED, index_head_dim=64), seed=18, device=device)
    first = select(step, return_scores=True)
    for _ in range(3):
        again = select(step, return_scores=True)
        for name in NAMES:
            assert_bitwise_equal(getattr(again, name), getattr(first, name), name)


@pytest.mark.parametrize("return_scores", [False, True])
def test_fault_13_only_the_buffers_are_written(return_scores: bool, device: torch.device) -> None:
    """Strided poisoned buffers between canaries, many requests that end in the middle of a tile."""
    requests = tuple(((17 * i) % 131, 1 + (5 * i) % 9) for i in range(23))
    step = make_step(StepCase("out", requests, topk_blocks=5, padding_rows=3), seed=19, device=device)
    rows = step.num_rows
    buffers = {
        name: guarded(shape, dtype, padding=padding, device=device)
        for name, shape, dtype, padding in (
            ("block_ids", (rows, 5), torch.int32, (1, 3)),
            ("scores", (rows, 5), torch.float32, (1, 2)),
            ("block_counts", (rows,), torch.int32, (4,)),
            ("visible_blocks", (rows,), torch.int32, (4,)),
            ("request_ids", (rows,), torch.int32, (4,)),
        )
    }
    for buffer in buffers.values():
        poison(buffer.view)
    wanted = select_blocks(step.index_q, step.cache, step.plan, return_scores=return_scores, backend="triton")
    out = dataclasses.replace(wanted, **{name: buffers[name].view for name in NAMES})
    if not return_scores:
        out = dataclasses.replace(out, scores=None)
    got = select_blocks(step.index_q, step.cache, step.plan, return_scores=return_scores, out=out, backend="triton")
    for name in NAMES if return_scores else ("block_ids", "block_counts", "visible_blocks", "request_ids"):
        assert getattr(got, name) is getattr(out, name)
        buffers[name].assert_intact()
        assert_bitwise_equal(getattr(got, name), getattr(wanted, name), name)
    step.assert_guards_intact()


@pytest.mark.parametrize("before", [63, 64, 65, 127, 128, 129])
def test_fault_37_contexts_around_a_page(before: int, device: torch.device, with_integers: Any, select: Any) -> None:
    case = StepCase("page", ((before, 1), (before - 1, 3)), page_tokens=64, topk_blocks=9)
    step = with_integers(make_step(case, seed=20, device=device), seed=20)
    assert_same_selection(select(step), oracles.step_selection(step))


@pytest.mark.parametrize("block_tokens", [1, 2, 8])
def test_blocks_of_other_sizes(block_tokens: int, device: torch.device, with_integers: Any, select: Any) -> None:
    case = StepCase("block", RAGGED, block_tokens=block_tokens, page_tokens=16)
    step = with_integers(make_step(case, seed=21, device=device), seed=21)
    assert_same_selection(select(step), oracles.step_selection(step))


def test_expanded_and_strided_queries(device: torch.device, with_integers: Any, select: Any) -> None:
    """Queries whose heads are one row seen several times, and queries that lie between other numbers."""
    step = with_integers(make_step(StepCase("strides", RAGGED, index_heads=3), seed=22, device=device), seed=22)
    one = step.index_q[:, :1].expand(-1, 3, -1)
    wanted = oracles.step_selection(dataclasses.replace(step, index_q=one))
    assert_same_selection(select(dataclasses.replace(step, index_q=one)), wanted)
    wide = torch.full((step.num_rows, 5, 40), torch.nan, device=device)
    wide[:, 1:4, 3:19] = step.index_q
    apart = dataclasses.replace(step, index_q=wide[:, 1:4, 3:19])
    assert_same_selection(select(apart), oracles.step_selection(step))


def test_lengths_within_the_budget_are_not_scored(device: torch.device, select: Any) -> None:
    """Keys of NaN: a step that can select all it sees reads none of them, and every row selects everything."""
    step = make_step(StepCase("budget", ((20, 1), (0, 35), (31, 2)), padding_rows=1), seed=23, device=device)
    keys = poison(step.cache.block_keys.clone())
    blind = dataclasses.replace(step, cache=dataclasses.replace(step.cache, block_keys=keys))
    wanted = [list(range(visible)) for visible in step.plan.visible_blocks.tolist()]
    assert_same_selection(select(blind), wanted)
    assert_same_selection(select(step, return_scores=True), wanted)
