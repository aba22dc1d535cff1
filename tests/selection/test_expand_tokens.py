"""`expand_tokens` against a plain loop over blocks and tail."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.errors import ArgumentError, DTypeError, SelectionError, ShapeError
from flashqsa.plan import StepPlan
from flashqsa.results import Selection
from flashqsa.selection import expand_tokens
from flashqsa.testing import Step, StepCase, assert_bitwise_equal, guarded, make_step, oracles

RAGGED = ((0, 37), (5, 1), (62, 3), (0, 1), (130, 16), (64, 1), (0, 0), (97, 5))


def by_loop(selection: Selection, plan: StepPlan, tail_tokens: int) -> list[list[int]]:
    rows = []
    for row in range(plan.num_rows):
        tokens: list[int] = []
        if int(plan.request_ids[row]) >= 0:
            ids = selection.block_ids[row, : int(selection.block_counts[row])].tolist()
            tokens = oracles.selected_tokens(
                ids, int(selection.visible_blocks[row]), int(plan.positions[row]), plan.block_tokens
            )
        width = selection.block_ids.shape[1] * plan.block_tokens + tail_tokens
        rows.append(tokens + [-1] * (width - len(tokens)) + [len(tokens)])
    return rows


@pytest.mark.parametrize("block_tokens", [1, 2, 4, 8])
@pytest.mark.parametrize("more_columns", [0, 1, 7])
def test_expand_tokens_lists_blocks_then_tail_then_nothing(
    integer_step: Any, select: Any, block_tokens: int, more_columns: int
) -> None:
    case = StepCase("r", RAGGED, block_tokens=block_tokens, topk_blocks=6, padding_rows=2, padding_requests=2)
    step = integer_step(case, seed=110)
    selection = select(step)
    tail_tokens = None if not more_columns else block_tokens - 1 + more_columns
    tokens = expand_tokens(selection, step.plan, tail_tokens=tail_tokens)
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == by_loop(selection, step.plan, block_tokens - 1 + more_columns)


def test_fault_04_every_selected_block_gives_all_its_tokens(integer_step: Any, select: Any, backend: str) -> None:
    """2,600 to 2,603 tokens: 512 blocks of 4 and a tail of 0 to 3."""
    case = StepCase(
        "2600", ((2_599, 4), (2_597, 1)), q_heads=1, kv_heads=1, head_dim=8, index_head_dim=8, topk_blocks=512
    )
    step = integer_step(case, seed=111)
    selection = select(step, backend=backend)
    tokens = expand_tokens(selection, step.plan)
    assert tokens[:, -1].tolist() == [2048, 2049, 2050, 2051, 2050]
    for row, position in enumerate(step.plan.positions.tolist()):
        listed = tokens[row, : int(tokens[row, -1])].tolist()
        assert listed == sorted(set(listed))
        whole = {token // 4 for token in listed if token < 4 * ((position + 1) // 4)}
        assert whole == set(selection.block_ids[row].tolist())
        assert listed[: 4 * 512] == [4 * block + i for block in sorted(whole) for i in range(4)]
        assert position in listed or position % 4 == 3


def test_fault_45_what_lies_past_a_count_is_never_read(integer_step: Any, select: Any) -> None:
    step = integer_step(StepCase("garbage", RAGGED, topk_blocks=20, padding_rows=2), seed=112)
    selection = select(step)
    clean = expand_tokens(selection, step.plan)
    for garbage in (0, 2**31 - 1, -(2**31)):
        past = torch.arange(20)[None] >= selection.block_counts[:, None]
        dirty = dataclasses.replace(selection, block_ids=selection.block_ids.masked_fill(past, garbage))
        assert_bitwise_equal(expand_tokens(dirty, step.plan), clean)


def test_fault_45_padding_rows_of_the_plan_expand_to_nothing_whatever_the_selection_holds(
    integer_step: Any, select: Any
) -> None:
    step = integer_step(StepCase("padding", ((40, 2),), padding_rows=3), seed=113)
    selection = select(step)
    rows = torch.tensor([0, 1, 0, 1, 1])  # as a batch of fixed shape leaves them
    tokens = expand_tokens(selection.take(rows), step.plan)
    assert tokens[2:, :-1].eq(-1).all()
    assert tokens[2:, -1].tolist() == [0, 0, 0]
    assert_bitwise_equal(tokens[:2], expand_tokens(selection, step.plan)[:2])


def test_a_reused_selection_has_a_longer_tail_that_loses_no_token(select: Any) -> None:
    """Selections of 3 requests at their last verified rows, reused one to six tokens later, one request gone."""
    verified = make_step(StepCase("verify", ((50, 4), (61, 3), (18, 2)), topk_blocks=5), seed=114)
    reused = select(verified).take(torch.tensor([3, 7]))  # the last rows of the first and of the third request
    for later in range(1, 7):
        draft = make_step(
            StepCase("draft", ((53 + later, 1), (19 + later, 1)), topk_blocks=5, request_seeds=(0, 2)), seed=114
        )
        tokens = expand_tokens(reused, draft.plan, tail_tokens=10)
        assert tokens.tolist() == by_loop(reused, draft.plan, 10)
        for row, position in enumerate((53 + later, 19 + later)):
            listed = tokens[row, : int(tokens[row, -1])].tolist()
            assert len(set(listed)) == len(listed), "a token is counted twice"
            assert set(range(4 * int(reused.visible_blocks[row]), position + 1)) <= set(listed)


def test_expand_tokens_refuses_a_tail_that_does_not_fit(refuses: Any, select: Any) -> None:
    first = make_step(StepCase("now", ((49, 1),), topk_blocks=5), seed=115)
    later = make_step(StepCase("later", ((57, 1),), topk_blocks=5), seed=115)
    selection = select(first)
    assert int(expand_tokens(selection, later.plan, tail_tokens=10)[0, -1]) == 30
    out = torch.full((1, 30), 7, dtype=torch.int32)
    with refuses(ArgumentError, "expand_tokens", "tail_tokens must hold the longest tail, 10 tokens", "got 9"):
        expand_tokens(selection, later.plan, tail_tokens=9, out=out)
    with refuses(ArgumentError, "expand_tokens", "tail_tokens must be a whole number of at least 0", "-1"):
        expand_tokens(selection, later.plan, tail_tokens=-1, out=out)
    assert out.eq(7).all()


def test_expand_tokens_refuses_a_selection_of_a_later_row(refuses: Any, select: Any) -> None:
    """After a rollback: the selection saw blocks whose tokens are not the request's any more."""
    ahead = make_step(StepCase("ahead", ((57, 1),), topk_blocks=5), seed=116)
    back = make_step(StepCase("back", ((54, 1),), topk_blocks=5), seed=116)
    with refuses(
        SelectionError,
        "expand_tokens",
        "visible_blocks must be at most the complete blocks of the row",
        "got 14 in row 0",
    ):
        expand_tokens(select(ahead), back.plan)


@pytest.fixture
def pair(select: Any) -> tuple[Step, Selection]:
    step = make_step(StepCase("pair", ((50, 3), (20, 2))), seed=117)
    return step, select(step)


def test_expand_tokens_fills_the_buffer_given(pair: tuple[Step, Selection]) -> None:
    step, selection = pair
    guard = guarded((5, 8 * 4 + 3 + 1), torch.int32, padding=(1, 5))
    returned = expand_tokens(selection, step.plan, out=guard.view)
    assert returned.data_ptr() == guard.view.data_ptr()
    guard.assert_intact()
    assert_bitwise_equal(guard.view, expand_tokens(selection, step.plan))


def test_expand_tokens_refuses_tensors_that_do_not_fit(refuses: Any, pair: tuple[Step, Selection]) -> None:
    step, selection = pair
    where = "expand_tokens"
    with refuses(ShapeError, where, "out must be", "[5, 35]"):
        expand_tokens(selection, step.plan, out=torch.zeros(5, 35, dtype=torch.int32))
    with refuses(DTypeError, where, "out", "int64"):
        expand_tokens(selection, step.plan, out=torch.zeros(5, 36, dtype=torch.int64))
    with refuses(ShapeError, where, "selection.block_ids", "[4, 8]", "take()"):
        expand_tokens(selection.take(torch.arange(4)), step.plan)
    with refuses(ShapeError, where, "selection.block_ids", "[5, 6]"):
        expand_tokens(dataclasses.replace(selection, block_ids=selection.block_ids[:, :6]), step.plan)
    with refuses(ShapeError, where, "selection.block_counts", "[1]"):
        expand_tokens(dataclasses.replace(selection, block_counts=selection.block_counts[:1]), step.plan)
    for name, change, part in (
        ("block_ids", lambda ids: torch.cat([ids[:, 1:2], ids[:, :1], ids[:, 2:]], dim=1), "ascending"),
        ("block_ids", lambda ids: ids - 1, "in [0, visible_blocks)"),
        ("block_ids", lambda ids: ids + 99, "in [0, visible_blocks)"),
        ("block_counts", lambda counts: counts + 9, "in [0, 8]"),
        ("block_counts", lambda counts: counts - 9, "in [0, 8]"),
    ):
        bad = dataclasses.replace(selection, **{name: change(getattr(selection, name))})
        with refuses(SelectionError, where, f"selection.{name}", part):
            expand_tokens(bad, step.plan)
    with refuses(ArgumentError, where, "selection must be a Selection", "Tensor"):
        expand_tokens(selection.block_ids, step.plan)
    with refuses(ArgumentError, where, "plan must be a StepPlan", "NoneType"):
        expand_tokens(selection, None)
    with refuses(ArgumentError, where, "tail_tokens must be a whole number", "3.0"):
        expand_tokens(selection, step.plan, tail_tokens=3.0)
    with refuses(ShapeError, where, "selection.visible_blocks", "[1]"):
        expand_tokens(dataclasses.replace(selection, visible_blocks=selection.visible_blocks[:1]), step.plan)


def test_expanding_a_step_without_rows(select: Any) -> None:
    step = make_step(StepCase("nothing", ()), seed=118)
    tokens = expand_tokens(select(step), step.plan)
    assert tokens.tolist() == []
    assert tokens.shape == (0, 36)
