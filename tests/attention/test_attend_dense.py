"""Rows that see no more than they may select: sparse attention is dense causal attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from flashqsa.attention import attend
from flashqsa.selection import select_blocks
from flashqsa.testing import StepCase, assert_within_budget, make_step, oracles

CONTEXTS = (1, 3, 4, 5, 63, 64, 100, 464, 1700, 2047, 2048, 2051)
Check = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fault_05_contexts_within_the_budget_are_dense(dtype: torch.dtype, backend: str, attend_hostile: Any) -> None:
    """All of them in one batch, the host told of much longer ones: what is done follows the live length."""
    case = StepCase(
        "dense", tuple((n - 1, 1) for n in CONTEXTS), topk_blocks=512, page_tokens=64, dtype=dtype,
        max_query_len=64, max_seq_len=262_144, padding_requests=1,
    )  # fmt: skip
    step = make_step(case, seed=5)
    selection = select_blocks(step.index_q, step.cache, step.plan, backend=backend)
    out, lse = attend_hostile(step, selection, backend=backend)
    exact, exact_lse = oracles.step_attention(step)
    definition = attend_hostile(step, selection, backend="reference")
    assert_within_budget(out, definition[0], exact, "output")
    assert_within_budget(lse, definition[1], exact_lse, "lse")
    rounding = oracles.step_attention(step, round_to=dtype)[0].to(dtype)
    slack = 8 * torch.finfo(torch.float32).eps * float(exact.abs().max())
    assert_within_budget(out, rounding + slack, exact, "output, from rounding alone")


@pytest.mark.parametrize("context", [c for c in CONTEXTS if c <= 464])
def test_fault_05_prefill_within_the_budget_is_dense(context: int, backend: str, check: Check) -> None:
    step = make_step(StepCase("prefill", ((0, context),), topk_blocks=512, page_tokens=64, q_heads=4), seed=5)
    selection = select_blocks(step.index_q, step.cache, step.plan, backend=backend)
    out, lse = check(step, selection, backend, gated=False)
    exact, exact_lse = oracles.step_attention(step, gated=False)
    assert float((out.double() - exact).abs().max()) < 2e-6
    assert float((lse.double() - exact_lse).abs().max()) < 2e-6


@pytest.mark.parametrize("cuts", [(2051,), (2047, 2051), (1024, 1030, 2051)], ids=str)
def test_fault_05_long_prefill_equals_torch_attention(cuts: tuple[int, ...]) -> None:
    """Against torch's own dense causal attention in float64, chunked or not."""
    case = StepCase("long", ((0, 2051),), topk_blocks=512, page_tokens=64, q_heads=4, head_dim=32)
    whole = make_step(case, seed=55)
    truth = whole.requests[0]
    q = whole.q.double().transpose(0, 1)[None]
    k, v = (x.transpose(0, 1)[None] for x in (truth.k, truth.v))
    wanted = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    start = 0
    for end in cuts:
        step = make_step(dataclasses.replace(case, requests=((start, end - start),)), seed=55)
        out = attend(step.q, step.cache, select_blocks(step.index_q, step.cache, step.plan), step.plan)
        torch.testing.assert_close(out.double(), wanted[start:end], rtol=0, atol=1e-6)
        start = end


def test_budgets_of_any_size_are_dense_as_soon_as_they_hold_all(backend: str, choose: Any, check: Check) -> None:
    """K = visible and K > visible give the same bits; K < visible does not."""
    results = {}
    for topk_blocks in (15, 16, 17, 400):
        step = make_step(StepCase("budget", ((60, 4), (63, 1)), topk_blocks=topk_blocks), seed=8)
        results[topk_blocks] = check(step, choose(step), backend)[0]
    assert torch.equal(results[16], results[17])
    assert torch.equal(results[16], results[400])
    assert not torch.equal(results[15], results[16])
