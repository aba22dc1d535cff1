"""Verification: union lists of a request's few rows are exact, cut in spans by their own length alone, and merged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.attention import triton_verify_lists
from flashqsa.attention.tokens import RowTokens
from flashqsa.attention.triton_union import LEAST_ROWS
from flashqsa.attention.triton_verify_lists import (
    MOST_SPANS,
    SPAN_STEPS,
    STEP_TOKENS,
    VerifyLists,
    holds_verify_lists,
    verify_lists,
)
from flashqsa.attention.triton_verify_merge import merge_spans
from flashqsa.testing import Step, StepCase, guarded, make_step, poison

NARROW = ((150, 1), (40, 2), (3, 5), (0, 19), (270, 16), (61, 4), (0, 3), (90, 9))


def _tokens(step: Step, selection: Any, include_tail: bool = True) -> RowTokens:
    visible = selection.visible_blocks if include_tail else None
    return RowTokens(selection.block_ids, selection.block_counts, step.plan.block_tokens, visible, step.plan.positions)


def _narrow_rows(step: Step, most: int) -> list[int]:
    """Rows of requests that verification serves."""
    groups = [[row for row, _ in request.rows()] for request in step.requests]
    return sorted(row for rows in groups if 2 <= len(rows) <= most for row in rows)


@pytest.mark.parametrize(
    ("most", "page_tokens", "layout", "look_words"),
    [(4, 16, "dense", 1024), (10, 80, "split", 2), (16, 48, "contiguous", 1024)],
)
def test_verify_lists_are_exact(
    most: int, page_tokens: int, layout: Any, look_words: int, device: torch.device, choose: Any
) -> None:
    """All rows of a request in one tile, other requests marked as told; again on the same plan."""
    case = StepCase(
        "verify", NARROW, padding_rows=2, padding_requests=1, topk_blocks=9, page_tokens=page_tokens, layout=layout
    )
    step = make_step(case, seed=79, device=device)
    selection = choose(step)
    step.plan.scratch("attend.union.served", (step.plan.num_rows,), torch.int32).fill_(7)
    for _ in range(2):
        lists = verify_lists(
            _tokens(step, selection), step.plan, page_tokens, 2, most, mark_below=LEAST_ROWS, look_words=look_words
        )
    ids, counts = selection.block_ids.cpu(), selection.block_counts.cpu()
    seen, tiles = [], 0
    for number, fields in enumerate(lists.tiles.tolist()):
        first, rows, found, end, _, spans, tail, position = fields
        if not spans:
            assert not rows
            continue
        tiles += 1
        seen += list(range(first, first + rows))
        union = sorted({int(block) for row in range(first, first + rows) for block in ids[row, : counts[row]]})
        assert found == len(union)
        request = int(step.plan.request_ids[first])
        expected = step.plan.token_slots(request, torch.tensor(union, dtype=torch.int64, device=device) * 4)
        assert lists.slot_ids[number, :found].tolist() == expected.tolist()
        for row in range(first, first + rows):
            has = (lists.row_bits[number, :found].cpu() >> (row - first)) & 1
            assert [b for b, bit in zip(union, has.tolist(), strict=True) if bit] == ids[row, : counts[row]].tolist()
        positions = step.plan.positions[first : first + rows].tolist()
        visible = selection.visible_blocks[first : first + rows].tolist()
        assert (position, tail) == (positions[0], 4 * min(visible))
        assert end == 4 * found + positions[-1] + 1 - tail
        assert number == request
    assert seen == _narrow_rows(step, most)
    assert tiles == sum(2 <= new <= most for _, new in NARROW)
    served = torch.full((step.plan.num_rows,), 7)
    for request in step.requests:
        rows = [row for row, _ in request.rows()]
        served[rows] = 7 if len(rows) >= LEAST_ROWS else int(2 <= len(rows) <= most)
    assert lists.served[: step.num_rows - 2].tolist() == served[: step.num_rows - 2].tolist()


def test_spans_are_a_function_of_the_length(device: torch.device, choose: Any) -> None:
    """Unions of 1 to 1,024 blocks: no span is empty, none but the last is cut, and they are at most so many."""
    case = StepCase("spans", ((4092, 4),), topk_blocks=256, head_dim=8, page_tokens=64)
    step = make_step(case, seed=3, device=device)
    selection = choose(step)
    seen = set()
    for blocks in (1, 100, 190, 193, 256):
        for apart in (0, 1):
            ids = torch.arange(blocks, device=device, dtype=torch.int32) * 4
            for row in range(4):
                selection.block_ids[row, :blocks] = ids + row * apart
                selection.block_counts[row] = blocks
            lists = verify_lists(_tokens(step, selection, False), step.plan, 64, 2, 16)
            _, rows, found, end, span_steps, spans, _, _ = lists.tiles[0].tolist()
            assert (rows, found, end) == (4, blocks * (1 + 3 * apart), 4 * found)
            steps = -(-end // STEP_TOKENS)
            assert 1 <= spans <= MOST_SPANS
            assert (spans - 1) * span_steps < steps <= spans * span_steps
            assert span_steps <= 2 * SPAN_STEPS or spans == MOST_SPANS
            seen.add(spans)
    assert len(seen) >= 4


def test_lists_fit_a_program_whatever_the_step() -> None:
    assert holds_verify_lists(512, 5)
    assert holds_verify_lists(512, 16)
    assert not holds_verify_lists(513, 16)
    assert holds_verify_lists(2048, 4)


def _spans_by_torch(
    step: Step, lists: VerifyLists, kv_heads: int, first_number: int, numbers: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the spans of some tiles leave to the merge, by matrices, NaN where nothing is left."""
    group, height, dim = step.q.shape[1] // kv_heads, lists.height, step.q.shape[2]
    partial = torch.full((numbers, kv_heads, MOST_SPANS, height * group, dim), torch.nan)
    state = torch.full((numbers, kv_heads, MOST_SPANS, 2, height * group), torch.nan)
    for number in range(numbers):
        first, rows, found, end, span_steps, spans, tail, position = lists.tiles[first_number + number].tolist()
        if not spans:
            continue
        request = next(r for r in step.requests if any(row == first for row, _ in r.rows()))
        slots = lists.slot_ids[first_number + number, :found, None] + torch.arange(4)
        places = {int(slot): token for token, slot in enumerate(request.slot_ids.tolist())}
        tokens = [places[int(slot)] for slot in slots.flatten()] + list(range(tail, tail + end - 4 * found))
        bits = lists.row_bits[first_number + number, :found].repeat_interleave(4)
        for s in range(spans):
            stop = end if s == spans - 1 else (s + 1) * span_steps * triton_verify_lists.STEP_TOKENS
            span = range(s * span_steps * triton_verify_lists.STEP_TOKENS, stop)
            for row in range(rows):
                seen = [
                    tokens[n]
                    for n in span
                    if (bits[n] >> row & 1 if n < 4 * found else _in_tail(step, first + row, tokens[n], position + row))
                ]
                k, v = (x[seen].float().transpose(0, 1) for x in (request.k, request.v))
                q = step.q[first + row].float().reshape(kv_heads, group, dim)
                scores = q @ k.transpose(1, 2) * dim**-0.5 * 1.4426950408889634
                top = scores.max(dim=2).values if seen else torch.full((kv_heads, group), -torch.inf)
                weights = torch.exp2(scores - top[..., None])
                columns = slice(row * group, (row + 1) * group)
                partial[number, :, s, columns] = weights @ v
                state[number, :, s, 0, columns] = top
                state[number, :, s, 1, columns] = weights.sum(2)
    return partial, state


def _in_tail(step: Step, row: int, token: int, position: int) -> bool:
    return int(step.plan.visible_blocks[row]) * 4 <= token <= position


@pytest.mark.parametrize(("heads", "gated"), [((4, 2), True), ((6, 1), False)], ids=str)
def test_spans_merge_within_the_error_budget(
    heads: tuple[int, int], gated: bool, device: torch.device, choose: Any, row_lists: Any, assert_attends: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Spans of one step of 8 tokens, tiles in two launches; rows of other requests are not written."""
    if device.type == "cuda":
        pytest.skip("spans are made on the CPU")
    monkeypatch.setattr(triton_verify_lists, "STEP_TOKENS", 8)
    monkeypatch.setattr(triton_verify_lists, "SPAN_STEPS", 1)
    case = StepCase(
        "merge", ((40, 3), (0, 19), (270, 9), (61, 1)), padding_rows=1, topk_blocks=8, q_heads=heads[0],
        kv_heads=heads[1], head_dim=32, dtype=torch.float16,
    )  # fmt: skip
    step = make_step(case, seed=80, device=device)
    selection = choose(step)
    lists = verify_lists(_tokens(step, selection), step.plan, step.plan.page_tokens, 2, 9)
    assert int(lists.tiles[:, 5].max()) >= MOST_SPANS - 1
    target = guarded(tuple(step.q.shape), step.q.dtype, padding=(1, 1, 8), device=device)
    poison(target.view)
    lse = torch.full(step.q.shape[:2], torch.nan, device=device)
    cut = lists.tiles.shape[0] // 2
    for first, numbers in ((0, cut), (cut, lists.tiles.shape[0] - cut)):
        partial, state = _spans_by_torch(step, lists, heads[1], first, numbers)
        merge_spans(
            partial, state, lists, step.plan, heads[1], first, numbers, step.q.dtype,
            gate=step.gate if gated else None, out=target.view, lse=lse,
        )  # fmt: skip
    target.assert_intact()
    narrow = torch.zeros(step.num_rows, dtype=torch.bool)
    narrow[_narrow_rows(step, 9)] = True
    assert bool(target.view[~narrow].isnan().all())
    tokens = [tokens if narrow[row] else [] for row, tokens in enumerate(row_lists(step, selection))]
    filled = target.view.masked_fill(~narrow[:, None, None], 0), lse.masked_fill(~narrow[:, None], -torch.inf)
    assert_attends(step, tokens, filled, gated=gated)


def test_others_stay_marked_by_the_lists_before(device: torch.device, choose: Any) -> None:
    step = make_step(StepCase("marks", NARROW, topk_blocks=9, head_dim=8), seed=81, device=device)
    served = step.plan.scratch("attend.union.served", (step.plan.num_rows,), torch.int32).fill_(7)
    lists = verify_lists(_tokens(step, choose(step)), step.plan, step.plan.page_tokens, 4, 5, mark_below=0)
    assert lists.served.data_ptr() == served.data_ptr()
    rows = [
        row
        for request, (_, new) in zip(step.requests, NARROW, strict=True)
        for row, _ in request.rows()
        if 4 <= new <= 5
    ]
    assert [row for row, mark in enumerate(served.tolist()) if mark == 1] == rows
    assert set(served.tolist()) == {1, 7}
