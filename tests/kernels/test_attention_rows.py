"""The bits of a row's attention depend on the row alone: not on the form of the work, the batch, pages or padding."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.attention.tokens import RowTokens
from flashqsa.attention.triton_rows import RowsKernelConfig, attend_rows_triton, row_segments
from flashqsa.backends import multiprocessors
from flashqsa.testing import Step, StepCase, assert_bitwise_equal, make_step

Result = tuple[torch.Tensor, torch.Tensor]


def _attend_shared(step: Step, selection: Any, share: int, **changes: Any) -> Result:
    """The kernel with `share` segments a program, output poisoned first."""
    out = torch.full_like(step.q, torch.nan)
    lse = torch.full(step.q.shape[:2], torch.nan, device=step.q.device)
    plan = step.plan
    tokens = RowTokens(
        selection.block_ids, selection.block_counts, plan.block_tokens, selection.visible_blocks, plan.positions
    )
    wide = step.q.dtype == torch.float32
    chosen = RowsKernelConfig.choose(1, row_segments(selection.block_ids.shape[1] * plan.block_tokens), 1, wide)
    config = dataclasses.replace(chosen, share=share, **changes)
    attend_rows_triton(
        step.q, step.cache, plan, tokens, step.q.shape[2] ** -0.5, gate=step.gate, out=out, lse=lse, config=config
    )
    return out, lse


def _assert_same(got: Result, wanted: Result, label: str) -> None:
    assert_bitwise_equal(got[0], wanted[0], f"{label}: output")
    assert_bitwise_equal(got[1], wanted[1], f"{label}: lse")


@pytest.mark.parametrize("late", [False, True], ids=["fresh", "long tails"])
def test_every_share_has_the_same_bits(late: bool, dtype: torch.dtype, device: torch.device, choose: Any) -> None:
    """1, 4, 8 or all segments a program, merged by the second kernel or in registers: several times on one plan."""
    requests = ((1300, 1), (500, 1), (129, 2), (20, 1), (3, 1))
    case = StepCase("share", requests, topk_blocks=300, head_dim=32, dtype=dtype, padding_rows=1)
    step = make_step(case, seed=50, device=device)
    selection = choose(step)
    if late:
        moved = tuple((before + 170, new) for before, new in requests)
        step = make_step(dataclasses.replace(case, requests=moved), seed=50, device=device)
    segments = row_segments(1200)
    wanted = _attend_shared(step, selection, segments)
    assert bool(torch.isfinite(wanted[0]).all())
    for share, stages in ((1, 3), (4, 1), (8, 2)):
        got = _attend_shared(step, selection, share, stages=stages)
        _assert_same(got, wanted, f"share {share}, {stages} stages")


def test_chosen_forms_differ_between_batches() -> None:
    """What the tests here compare is really different work."""
    chosen = [RowsKernelConfig.choose(pairs, 16, 132, False) for pairs in (1, 16, 64, 256, 4096)]
    assert len({config.share for config in chosen}) >= 3
    tiles = {
        (config.block_n, config.warps)
        for pairs in (1, 256, 4096)
        for config in [RowsKernelConfig.choose(pairs, 16, 132, False)]
    }
    assert len(tiles) == 1, "tiles are part of the arithmetic: never a function of the batch"


@pytest.mark.parametrize("page_tokens", [16, 64, 848])
def test_a_decode_row_alone_has_the_same_bits(
    page_tokens: int, dtype: torch.dtype, device: torch.device, choose: Any, attend_hostile: Any, alone: Any
) -> None:
    """Beside prefill and verification, with padding, on other pages."""
    requests = ((500, 1), (0, 33), (260, 4), (40, 1), (300, 1))
    case = StepCase("batch", requests, topk_blocks=70, head_dim=64, dtype=dtype, padding_rows=3, padding_requests=1)
    step = make_step(case, seed=51, device=device)
    together = attend_hostile(step, choose(step))
    for request in (0, 3, 4):
        row = step.requests[request].first_row
        single = make_step(alone(case, request, page_tokens=page_tokens), seed=51, device=device)
        got = attend_hostile(single, choose(single))
        _assert_same(got, (together[0][row : row + 1], together[1][row : row + 1]), f"request {request}")


@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 8])
def test_fault_48_verified_rows_equal_their_decode_form(
    width: int, device: torch.device, choose: Any, attend_hostile: Any
) -> None:
    """Windows of every width, with row_exact: row i has the bits of its own decode step."""
    case = StepCase("window", ((300 - width, width), (40, 1)), topk_blocks=20, head_dim=32, request_seeds=(5, 6))
    step = make_step(case, seed=52, device=device)
    together = attend_hostile(step, choose(step), row_exact=True)
    for row in range(width):
        decode = dataclasses.replace(case, requests=((300 - width + row, 1),), request_seeds=(5,))
        single = make_step(decode, seed=52, device=device)
        got = attend_hostile(single, choose(single))
        _assert_same(got, (together[0][row : row + 1], together[1][row : row + 1]), f"row {row} of {width}")


def test_fault_1_two_runs_have_the_same_bits(device: torch.device, choose: Any, attend_hostile: Any) -> None:
    step = make_step(
        StepCase("twice", ((500, 1), (0, 9), (90, 3)), topk_blocks=70, head_dim=32), seed=53, device=device
    )
    selection = choose(step)
    first = attend_hostile(step, selection)
    for _ in range(3):
        _assert_same(attend_hostile(step, selection), first, "again")


@pytest.mark.parametrize("layout", ["packed", "hnd", "dense", "contiguous"])
def test_fault_16_layouts_and_pages_change_no_bit(
    layout: Any, device: torch.device, choose: Any, attend_hostile: Any
) -> None:
    case = StepCase("layout", ((300, 1), (0, 20), (90, 3)), topk_blocks=20, head_dim=32)
    wanted = attend_hostile(step := make_step(case, seed=54, device=device), choose(step))
    for page_tokens in (16, 80, 848):
        changes = {"contiguous": True} if layout == "contiguous" else {"layout": layout, "page_tokens": page_tokens}
        other = make_step(dataclasses.replace(case, **changes), seed=54, device=device)
        _assert_same(attend_hostile(other, choose(other)), wanted, f"{layout}, pages of {page_tokens}")


def test_fault_16_slots_are_where_the_plan_says(device: torch.device, choose: Any, attend_hostile: Any) -> None:
    """Pages of every size hold tokens and blocks at the slots that the oracle wrote."""
    wanted = None
    for page_tokens in (16, 64, 96, 128, 640, 1600):
        case = StepCase("pages", ((150, 1), (33, 2)), page_tokens=page_tokens, topk_blocks=6, head_dim=32)
        step = make_step(case, seed=55, device=device)
        got = attend_hostile(step, choose(step))
        wanted = wanted or got
        _assert_same(got, wanted, f"pages of {page_tokens}")


def test_the_number_of_multiprocessors_is_known(device: torch.device) -> None:
    assert multiprocessors(device) >= 1
