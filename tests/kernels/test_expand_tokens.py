"""`expand_tokens` by kernel: the numbers of the torch form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.plan import StepPlan
from flashqsa.results import Selection
from flashqsa.selection import expand
from flashqsa.selection.triton_expand import expand_tokens_triton
from flashqsa.testing import StepCase, assert_bitwise_equal, assert_unchanged, guarded, make_step, oracles, snapshot

RAGGED = ((0, 37), (5, 1), (62, 3), (0, 1), (130, 16), (64, 1), (0, 0), (97, 5))

Expand = Callable[..., torch.Tensor]


def _expanded(selection: Selection, plan: StepPlan, tail_tokens: int | None = None) -> torch.Tensor:
    """By kernel, into a poisoned strided buffer between canaries; equal to the torch form."""
    tail_tokens = plan.block_tokens - 1 if tail_tokens is None else tail_tokens
    shape = (plan.num_rows, plan.topk_blocks * plan.block_tokens + tail_tokens + 1)
    guard, wanted = (guarded(shape, torch.int32, padding=(1, 5), device=plan.device) for _ in range(2))
    before = snapshot(selection, plan)
    expand_tokens_triton(selection, plan, guard.view, tail_tokens=tail_tokens)
    assert_unchanged(before)
    guard.assert_intact()
    expand._expand_tokens_torch(selection, plan, wanted.view, tail_tokens)
    assert_bitwise_equal(guard.view, wanted.view)
    return guard.view


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("more_columns", [0, 1, 7])
def test_the_kernel_lists_what_torch_does(
    device: torch.device, choose: Any, row_lists: Any, block_tokens: int, more_columns: int
) -> None:
    """Blocks, then tail, then -1; what padding rows and columns past a count hold is garbage."""
    case = StepCase(
        "r", RAGGED, block_tokens=block_tokens, page_tokens=6 * block_tokens, topk_blocks=6, padding_rows=2,
        padding_requests=2,
    )  # fmt: skip
    step = make_step(case, seed=110, device=device)
    selection = choose(step, seed=1)
    tokens = _expanded(selection, step.plan, block_tokens - 1 + more_columns)
    assert [row[: row[-1]] for row in tokens.tolist()] == row_lists(step, selection)


def test_fault_04_every_selected_block_gives_all_its_tokens(device: torch.device, choose: Any) -> None:
    """2,600 to 2,603 tokens: 512 blocks of 4 and a tail of 0 to 3."""
    case = StepCase(
        "2600", ((2_599, 4), (2_597, 1)), q_heads=1, kv_heads=1, head_dim=8, index_head_dim=8, topk_blocks=512
    )
    step = make_step(case, seed=111, device=device)
    selection = choose(step)
    tokens = _expanded(selection, step.plan)
    assert tokens[:, -1].tolist() == [2048, 2049, 2050, 2051, 2050]
    for row in range(5):
        blocks = selection.block_ids[row].tolist()
        assert tokens[row, :2048].tolist() == [4 * block + i for block in blocks for i in range(4)]


@pytest.mark.parametrize("topk", [1, 255, 256, 257, 341])
def test_lists_of_one_column_more_or_less_than_a_program_writes(device: torch.device, choose: Any, topk: int) -> None:
    case = StepCase("width", ((1_500, 2), (3, 1)), q_heads=1, kv_heads=1, head_dim=8, index_head_dim=8,
                    topk_blocks=topk)  # fmt: skip
    step = make_step(case, seed=112, device=device)
    for tail_tokens in (0, 3, 4, 1024 - 4 * min(topk, 255)):
        _expanded(choose(step), step.plan, tail_tokens)


def test_a_reused_selection_has_a_longer_tail_that_loses_no_token(device: torch.device, choose: Any) -> None:
    """Selections of the last verified rows, reused one to six tokens later, one request gone."""
    verified = make_step(StepCase("verify", ((50, 4), (61, 3), (18, 2)), topk_blocks=5), seed=114, device=device)
    reused = choose(verified).take(torch.tensor([3, 7], device=device))
    for later in range(1, 7):
        case = StepCase("draft", ((53 + later, 1), (19 + later, 1)), topk_blocks=5, request_seeds=(0, 2))
        draft = make_step(case, seed=114, device=device)
        tokens = _expanded(reused, draft.plan, 10).tolist()
        for row, position in enumerate((53 + later, 19 + later)):
            ids = reused.block_ids[row, : int(reused.block_counts[row])].tolist()
            wanted = oracles.selected_tokens(ids, int(reused.visible_blocks[row]), position, 4)
            assert tokens[row][: tokens[row][-1]] == wanted


def test_a_tail_too_long_for_its_columns_is_cut(device: torch.device, choose: Any) -> None:
    """Where nobody checks."""
    first = make_step(StepCase("now", ((49, 1),), topk_blocks=5), seed=115, device=device)
    later = make_step(StepCase("later", ((57, 1),), topk_blocks=5), seed=115, device=device)
    assert int(_expanded(choose(first), later.plan, 4)[0, -1]) == 24


@pytest.mark.parametrize("value", [2**31 - 1, -(2**31), -1, 7, 100])
@pytest.mark.parametrize("name", ["block_ids", "block_counts", "visible_blocks"])
def test_fault_45_garbage_stays_in_its_row(device: torch.device, choose: Any, name: str, value: int) -> None:
    """Whatever the numbers are, the two forms agree and write nothing beside."""
    step = make_step(StepCase("garbage", RAGGED, topk_blocks=6, padding_rows=1), seed=116, device=device)
    selection = choose(step)
    dirty = getattr(selection, name).clone()
    dirty[::2] = value
    _expanded(dataclasses.replace(selection, **{name: dirty}), step.plan)


def test_a_step_without_rows(device: torch.device) -> None:
    step = make_step(StepCase("nothing", ()), seed=118, device=device)
    empty = torch.zeros(0, dtype=torch.int32, device=device)
    selection = Selection(empty.view(0, 8), empty, None, empty, empty)
    assert _expanded(selection, step.plan).shape == (0, 36)


@pytest.mark.gpu
def test_a_device_expands_by_kernel(device: torch.device, choose: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(StepCase("auto", RAGGED, topk_blocks=6, padding_rows=2), seed=119, device=device)
    selection = choose(step)
    wanted = _expanded(selection, step.plan)
    monkeypatch.setattr(expand, "_expand_tokens_torch", None)
    assert_bitwise_equal(expand.expand_tokens(selection, step.plan), wanted)
