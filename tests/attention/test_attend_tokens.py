"""`attend_tokens`: the same attention over lists of tokens that the caller made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.attention import attend, attend_tokens
from flashqsa.selection import expand_tokens
from flashqsa.testing import StepCase, assert_bitwise_equal, make_step, stream

PHASES = {
    "prefill": ((0, 70), (0, 3)),
    "decode": ((96, 1), (31, 1), (3, 1), (0, 1)),
    "verify": ((100, 4), (63, 2), (31, 7), (1, 3)),
    "mixed": ((0, 129), (90, 1), (57, 4), (0, 0)),
}
Attended = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def _shuffled(token_ids: torch.Tensor, seed: int) -> torch.Tensor:
    """The same lists in random order, garbage past their counts."""
    mixed = token_ids.clone()
    for row, count in enumerate(token_ids[:, -1].tolist()):
        mixed[row, :count] = token_ids[row, torch.randperm(count, generator=stream(seed, row))]
        mixed[row, count:-1] = 2**31 - 1 if row % 2 else -(2**31)
    return mixed


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_expanded_selections_give_the_same_attention(
    phase: str, dtype: torch.dtype, backend: str, choose: Any, attend_hostile: Attended, assert_attends: Any,
    row_lists: Any,
) -> None:  # fmt: skip
    step = make_step(StepCase(phase, PHASES[phase], dtype=dtype, padding_rows=1, padding_requests=1), seed=50)
    selection = choose(step)
    token_ids = expand_tokens(selection, step.plan)
    wanted = attend_hostile(step, selection, backend=backend)
    got = attend_hostile(step, token_ids, backend=backend)
    assert_attends(step, row_lists(step, selection), got, backend, definition=wanted)
    exact = attend_hostile(step, token_ids, backend=backend, row_exact=True)
    exact_blocks = attend_hostile(step, selection, backend=backend, row_exact=True)
    assert_bitwise_equal(exact[0], exact_blocks[0], "row by row")
    assert_bitwise_equal(exact[1], exact_blocks[1], "row by row")


@pytest.mark.parametrize("phase", PHASES)
def test_any_order_is_accepted(
    phase: str, backend: str, choose: Any, attend_hostile: Attended, assert_attends: Any, row_lists: Any
) -> None:
    step = make_step(StepCase(phase, PHASES[phase]), seed=51)
    selection = choose(step)
    token_ids = expand_tokens(selection, step.plan)
    definition = attend_hostile(step, token_ids, backend="reference")
    ordered = attend_hostile(step, token_ids, backend=backend)
    for seed in (1, 2):
        got = attend_hostile(step, _shuffled(token_ids, seed), backend=backend)
        assert_attends(step, row_lists(step, selection), got, backend, definition=definition)
        if backend == "torch":  # attended from the first token on, however they are listed
            assert_bitwise_equal(got[0], ordered[0], "order")
            assert_bitwise_equal(got[1], ordered[1], "order")


def test_tokens_need_not_fill_blocks(backend: str, attend_hostile: Attended, assert_attends: Any) -> None:
    """Random subsets of the past, some empty, some without the row's own token."""
    step = make_step(StepCase("subsets", PHASES["mixed"], padding_rows=2), seed=52)
    width = 40
    token_ids = torch.full((step.num_rows, width + 1), -7, dtype=torch.int32)
    lists: list[list[int]] = []
    for row, position in enumerate(step.plan.positions.tolist()):
        count = min(row % (width + 1), position + 1)
        chosen = torch.randperm(position + 1, generator=stream(52, row))[:count]
        token_ids[row, :count], token_ids[row, -1] = chosen.to(torch.int32), count
        lists.append(chosen.tolist())
    definition = attend_hostile(step, token_ids, backend="reference")
    got = attend_hostile(step, token_ids, backend=backend)
    assert_attends(step, lists, got, backend, definition=definition if backend != "reference" else None)
    empty = [row for row, tokens in enumerate(lists) if not tokens]
    assert len(empty) > 4
    assert bool((got[0][empty] == 0).all())
    assert bool((got[1][empty] == -torch.inf).all())


def test_reused_selections_expand_with_a_longer_tail(backend: str, choose: Any, attend_hostile: Attended) -> None:
    first = make_step(StepCase("first", ((61, 1), (30, 1))), seed=53)
    selected = choose(first)
    step = make_step(StepCase("later", ((75, 1), (44, 1))), seed=53)
    token_ids = expand_tokens(selected, step.plan, tail_tokens=20)
    got = attend_hostile(step, token_ids, backend=backend)
    wanted = attend_hostile(step, selected, backend=backend)
    assert_bitwise_equal(got[0], wanted[0], "output")
    assert_bitwise_equal(got[1], wanted[1], "lse")


def test_lists_of_no_width(backend: str) -> None:
    step = make_step(StepCase("none", ((9, 1), (0, 5))), seed=54)
    counts = torch.zeros(6, 1, dtype=torch.int32)
    out, lse = attend_tokens(step.q, step.cache, counts, step.plan, gate=step.gate, return_lse=True, backend=backend)
    assert bool((out == 0).all())
    assert bool((lse == -torch.inf).all())


def test_lists_as_views_of_wider_ones(backend: str, choose: Any) -> None:
    step = make_step(StepCase("views", PHASES["mixed"]), seed=55)
    token_ids = expand_tokens(choose(step), step.plan)
    wide = torch.full((token_ids.shape[0], 2, token_ids.shape[1] + 5), 2**31 - 1, dtype=torch.int32)
    wide[:, 1, 2:-3] = token_ids
    wanted = attend_tokens(step.q, step.cache, token_ids, step.plan, backend=backend)
    got = attend_tokens(step.q, step.cache, wide[:, 1, 2:-3], step.plan, backend=backend)
    assert_bitwise_equal(got, wanted, "strided lists")


def test_options_mean_what_they_mean_in_attend(backend: str, choose: Any) -> None:
    step = make_step(StepCase("options", PHASES["verify"], dtype=torch.bfloat16), seed=56)
    selection = choose(step)
    token_ids = expand_tokens(selection, step.plan)
    for options in (
        {"softmax_scale": 0.1},
        {"out_dtype": torch.float32},
        {"gate": step.gate},
        {"gate": step.gate, "out_dtype": torch.float32, "softmax_scale": 0.3},
    ):
        options.update(backend=backend, row_exact=True)
        wanted = attend(step.q, step.cache, selection, step.plan, **options)
        got = attend_tokens(step.q, step.cache, token_ids, step.plan, **options)
        assert_bitwise_equal(got, wanted, str(options))
