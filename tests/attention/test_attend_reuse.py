"""A selection of an earlier step, taken along: everything since is tail, nothing is lost and nothing counted twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.attention import attend
from flashqsa.results import Selection
from flashqsa.testing import StepCase, assert_bitwise_equal, make_step, oracles

Check = Callable[..., tuple[torch.Tensor, torch.Tensor]]
SEEDS = (0, 1, 2)


@pytest.mark.parametrize("later", [0, 1, 3, 4, 5, 9, 64, 131])
def test_reused_selections_attend_everything_since(later: int, backend: str, choose: Any, check: Check) -> None:
    """Selected at 61, 30 and 2; used `later` tokens on, with the requests in another order and one gone."""
    contexts = (61, 30, 2)
    first = make_step(StepCase("first", tuple((n, 1) for n in contexts), topk_blocks=4), seed=34)
    selected = choose(first)
    for order in ((0, 1, 2), (2, 0), (1,)):
        requests = tuple((contexts[i] + later, 1) for i in order)
        step = make_step(StepCase("later", requests, topk_blocks=4, request_seeds=order), seed=34)
        reused = selected.take(torch.tensor(order))
        out, lse = check(step, reused, backend)
        for row, request in enumerate(order):
            position, visible = contexts[request] + later, (contexts[request] + 1) // 4
            count = min(4, visible)
            blocks = selected.block_ids[request, :count].tolist()
            tokens = [4 * block + member for block in blocks for member in range(4)] + list(
                range(4 * visible, position + 1)
            )
            assert len(set(tokens)) == len(tokens)
            truth = step.requests[row]
            wanted, wanted_lse = oracles.attend_row(step.q[row], truth.k, truth.v, tokens, gate=step.gate[row])
            torch.testing.assert_close(out[row].double(), wanted, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(lse[row].double(), wanted_lse, rtol=1e-5, atol=1e-6)


def test_fault_34_a_window_reuses_the_row_that_was_accepted(backend: str, choose: Any, check: Check) -> None:
    """Window of 4, 1 to 4 of it accepted: the next row attends what the accepted row selected, and all since."""
    window = make_step(StepCase("window", ((57, 4), (90, 4), (33, 4)), topk_blocks=5), seed=35)
    selected = choose(window)
    for accepted in ((1, 4, 2), (3, 1, 4)):
        rows = torch.tensor([4 * request + count - 1 for request, count in enumerate(accepted)])
        contexts = [before + count for (before, _), count in zip(window.case.requests, accepted, strict=True)]
        step = make_step(StepCase("next", tuple((n, 1) for n in contexts), topk_blocks=5), seed=35)
        reused = selected.take(rows)
        assert_bitwise_equal(reused.block_ids, selected.block_ids[rows], "ids")
        check(step, reused, backend)


def test_several_rows_reuse_one_selection(backend: str, choose: Any, check: Check) -> None:
    """A draft of 6 rows on the selection of the row before them: tails of 1 to 9 tokens over blocks that close."""
    for before in (60, 61, 62, 63):
        first = make_step(StepCase("first", ((before - 1, 1),), topk_blocks=4), seed=36)
        selected = choose(first)
        draft = make_step(StepCase("draft", ((before, 6),), topk_blocks=4), seed=36)
        reused = selected.take(torch.zeros(6, dtype=torch.int64))
        shared, _ = check(draft, reused, backend)
        exact, _ = check(draft, reused, backend, row_exact=True)
        for row in range(6):
            one = make_step(StepCase("one", ((before + row, 1),), topk_blocks=4), seed=36)
            alone = attend(one.q, one.cache, selected, one.plan, gate=one.gate, backend=backend)
            assert_bitwise_equal(exact[row], alone[0], f"row {row} after {before}")
        torch.testing.assert_close(shared, exact, rtol=1e-5, atol=1e-6)


def test_a_selection_reused_within_its_own_step_is_fresh(backend: str, choose: Any) -> None:
    step = make_step(StepCase("same", ((61, 1), (30, 5), (0, 20))), seed=37)
    selection = choose(step)
    again = selection.take(torch.arange(step.num_rows))
    wanted = attend(step.q, step.cache, selection, step.plan, backend=backend)
    assert_bitwise_equal(attend(step.q, step.cache, again, step.plan, backend=backend), wanted, "taken whole")


def test_an_empty_view_attends_the_whole_past(backend: str, check: Check) -> None:
    """A selection made before the first block closed: all tokens are tail, which is dense attention."""
    step = make_step(StepCase("whole", ((90, 3), (20, 1))), seed=38)
    zeros = torch.zeros(4, dtype=torch.int32)
    selection = Selection(torch.full((4, 8), -1, dtype=torch.int32), zeros, None, zeros, step.plan.request_ids, 3)
    out, _ = check(step, selection, backend, gated=False)
    torch.testing.assert_close(out.double(), oracles.step_attention(step, gated=False)[0], rtol=1e-5, atol=1e-6)


def test_without_its_tail_a_reused_selection_is_its_blocks(
    backend: str, choose: Any, attend_hostile: Any, exact: Any, row_lists: Any
) -> None:
    first = make_step(StepCase("first", ((61, 1), (30, 1))), seed=39)
    selected = choose(first)
    step = make_step(StepCase("later", ((70, 1), (39, 1))), seed=39)
    out, lse = attend_hostile(step, selected, backend=backend, include_tail=False)
    wanted, wanted_lse = exact(step, row_lists(step, selected, False))
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), wanted_lse, rtol=1e-5, atol=1e-6)
    one_block = dataclasses.replace(selected, block_counts=torch.ones(2, dtype=torch.int32))
    _, fewer = attend_hostile(step, one_block, backend=backend, include_tail=False)
    assert bool((fewer < lse).all())
