"""Verification in Gluon, on the one architecture whose products it uses: the error budget, bits of a request alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.attention import gluon_verify
from flashqsa.attention.gluon_verify import attend_verify_gluon, most_verify_rows
from flashqsa.attention.tokens import RowTokens
from flashqsa.attention.triton_verify_lists import FEWEST_ROWS, MOST_SPANS, VerifyLists
from flashqsa.testing import (
    Step,
    StepCase,
    assert_bitwise_equal,
    assert_unchanged,
    guarded,
    make_step,
    poison,
    snapshot,
)

BF16, FP16 = torch.bfloat16, torch.float16
NARROW = ((1500, 1), (1400, 5), (3, 5), (0, 19), (2700, 16), (610, 4), (0, 3), (1900, 9))
CASE = StepCase(
    "verify", NARROW, topk_blocks=200, q_heads=24, kv_heads=2, head_dim=128, dtype=BF16,
    request_seeds=tuple(range(40, 48)),
)  # fmt: skip

Result = tuple[torch.Tensor, torch.Tensor]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9, reason="needs compute capability 9.0"
    ),
]


def _attend(step: Step, selection: Any, *, include_tail: bool = True, gated: bool = True) -> tuple[Result, VerifyLists]:
    """Verification into a poisoned output between canaries; nothing else is written."""
    visible = selection.visible_blocks if include_tail else None
    tokens = RowTokens(
        selection.block_ids, selection.block_counts, step.plan.block_tokens, visible, step.plan.positions
    )
    target = guarded(tuple(step.q.shape), step.q.dtype, padding=(1, 1, 8), device=step.q.device)
    poison(target.view)
    lse = torch.full(step.q.shape[:2], torch.nan, device=step.q.device)
    before = snapshot(step.q, step.gate, step.cache, selection)
    lists = attend_verify_gluon(
        step.q, step.cache, step.plan, tokens, step.q.shape[2] ** -0.5, gate=step.gate if gated else None,
        out=target.view, lse=lse,
    )  # fmt: skip
    target.assert_intact()
    step.assert_guards_intact()
    assert_unchanged(before)
    return (target.view.clone(), lse), lists


def _check(step: Step, lists: list[list[int]], got: Result, assert_attends: Any, *, gated: bool = True) -> None:
    """Rows of narrow requests within the budget; those of others not written."""
    narrow = torch.zeros(step.num_rows, dtype=torch.bool, device=step.q.device)
    for request in step.requests:
        rows = [row for row, _ in request.rows()]
        narrow[rows] = FEWEST_ROWS <= len(rows) <= most_verify_rows(step.q.shape[1] // step.cache.k_pages.shape[2])
    assert bool(got[0][~narrow].isnan().all()), "rows of other requests are not written"
    alone = [tokens if narrow[row] else [] for row, tokens in enumerate(lists)]
    filled = (got[0].masked_fill(~narrow[:, None, None], 0), got[1].masked_fill(~narrow[:, None], -torch.inf))
    assert_attends(step, alone, filled, gated=gated)


@pytest.mark.parametrize(
    ("heads", "head_dim", "page_tokens", "layout", "dtype"),
    [
        ((24, 2), 256, 64, "packed", BF16),
        ((12, 1), 128, 848, "hnd", FP16),
        ((3, 1), 64, 80, "split", BF16),
        ((16, 1), 64, 16, "dense", BF16),
    ],
    ids=str,
)
def test_rows_within_the_error_budget(
    heads: tuple[int, int], head_dim: int, page_tokens: int, layout: Any, dtype: torch.dtype,
    device: torch.device, choose: Any, row_lists: Any, assert_attends: Any,
) -> None:  # fmt: skip
    """Lists of one span and of many; and again on the same plan, for a race would differ."""
    case = dataclasses.replace(
        CASE, requests=(*NARROW, (2100, 4)), padding_rows=2, padding_requests=1, dtype=dtype, q_heads=heads[0],
        kv_heads=heads[1], head_dim=head_dim, page_tokens=page_tokens, layout=layout, request_seeds=None,
    )  # fmt: skip
    step = make_step(case, seed=72, device=device)
    selection = choose(step)
    got, lists = _attend(step, selection)
    assert set(lists.tiles[:, 5].tolist()) >= {0, 1, 2}
    _check(step, row_lists(step, selection), got, assert_attends)
    for _ in range(3):
        again, _ = _attend(step, selection)
        assert_bitwise_equal(again[0].nan_to_num(7), got[0].nan_to_num(7), "output again")
        assert_bitwise_equal(again[1].nan_to_num(7), got[1].nan_to_num(7), "lse again")


def test_no_tail_and_no_gate(device: torch.device, choose: Any, row_lists: Any, assert_attends: Any) -> None:
    step = make_step(CASE, seed=73, device=device)
    selection = choose(step)
    got, _ = _attend(step, selection, include_tail=False, gated=False)
    _check(step, row_lists(step, selection, False), got, assert_attends, gated=False)


def test_neighbours_without_a_common_block(
    device: torch.device, choose: Any, row_lists: Any, assert_attends: Any
) -> None:
    """The longest unions there are: spans longer than usual, and no more of them."""
    step = make_step(
        dataclasses.replace(CASE, requests=((13000, 16), (90, 4)), q_heads=8, request_seeds=None),
        seed=74,
        device=device,
    )
    selection = choose(step)
    for row in range(16):
        selection.block_ids[row] = torch.arange(200, device=device) * 16 + row
    got, lists = _attend(step, selection)
    assert int(lists.tiles[0, 2]) == 200 * 16
    assert int(lists.tiles[0, 5]) == MOST_SPANS
    _check(step, row_lists(step, selection), got, assert_attends)


@pytest.mark.parametrize("heads", [(24, 2), (6, 1), (3, 1)], ids=str)
def test_fault_12_requests_alone_have_the_same_bits(
    heads: tuple[int, int], device: torch.device, choose: Any, alone: Any
) -> None:
    """Beside other requests of more rows, on other pages, or by themselves in lower tiles."""
    case = dataclasses.replace(CASE, q_heads=heads[0], kv_heads=heads[1])
    step = make_step(case, seed=75, device=device)
    together, _ = _attend(step, choose(step))
    most = most_verify_rows(heads[0] // heads[1])
    for request_id in [i for i, (_, rows) in enumerate(NARROW) if FEWEST_ROWS <= rows <= most]:
        single = make_step(alone(case, request_id, page_tokens=48), seed=75, device=device)
        got, _ = _attend(single, choose(single))
        first, rows = step.requests[request_id].first_row, NARROW[request_id][1]
        assert_bitwise_equal(got[0], together[0][first : first + rows], f"output of request {request_id}")
        assert_bitwise_equal(got[1], together[1][first : first + rows], f"lse of request {request_id}")


def test_many_requests_in_several_launches_have_the_same_bits(
    device: torch.device, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More spans than programs; what the spans leave is bounded, whatever the bound."""
    case = dataclasses.replace(
        CASE, requests=((2000, 4),) * 90, topk_blocks=300, page_tokens=64, request_seeds=tuple(range(90))
    )
    step = make_step(case, seed=76, device=device)
    selection = choose(step)
    wanted, lists = _attend(step, selection)
    assert 2 * int(lists.tiles[:, 5].sum()) > 2 * torch.cuda.get_device_properties(device).multi_processor_count
    monkeypatch.setattr(gluon_verify, "PARTIAL_BYTES", 10 << 20)
    again = make_step(case, seed=76, device=device)
    got, _ = _attend(again, choose(again))
    assert_bitwise_equal(got[0], wanted[0], "output")
    assert_bitwise_equal(got[1], wanted[1], "lse")


def test_fault_45_nan_where_no_row_of_a_request_attends(
    device: torch.device, choose: Any, row_lists: Any, unseen_poisoned: Any
) -> None:
    case = dataclasses.replace(CASE, requests=((1400, 5), (270, 4), (610, 4)), topk_blocks=20, request_seeds=None)
    step = make_step(case, seed=77, device=device)
    selection = choose(step, noise=0.1)
    wanted, _ = _attend(step, selection)
    assert bool(torch.isfinite(wanted[0]).all())
    got, _ = _attend(unseen_poisoned(step, row_lists(step, selection)), selection)
    assert_bitwise_equal(got[0], wanted[0], "output")
    assert_bitwise_equal(got[1], wanted[1], "lse")


def test_reused_selections_attend_all_tokens_since(
    device: torch.device, choose: Any, row_lists: Any, assert_attends: Any
) -> None:
    """Rows whose selections were made when they saw less: tails of different lengths in one tile, some of 300."""
    case = dataclasses.replace(CASE, requests=((420, 14),), topk_blocks=24, q_heads=8, request_seeds=None)
    step = make_step(case, seed=78, device=device)
    early = choose(step)
    seen = (early.visible_blocks - torch.arange(14, device=device, dtype=torch.int32) % 4 * 25).clamp(min=24)
    ids = torch.stack([torch.arange(24, device=device) * (int(n) // 24) for n in seen]).to(torch.int32)
    selection = dataclasses.replace(early, block_ids=ids, visible_blocks=seen.to(torch.int32))
    got, _ = _attend(step, selection)
    _check(step, row_lists(step, selection), got, assert_attends)
