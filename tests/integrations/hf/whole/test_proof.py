"""Nobody has to believe that the sparse path ran, or guess what is served."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashqsa
from flashqsa.errors import ArgumentError, UnsupportedError
from flashqsa.integrations import hf


@torch.no_grad()
@pytest.mark.parametrize("by_class", [False, True])
def test_fault_55_the_report_tells_the_sparse_path_from_the_dense_one(
    model: Any, make_tokens: Any, plain_shape: Any, on: Any, by_class: bool
) -> None:
    prompt = make_tokens(2, plain_shape.prompt)
    model(prompt)
    assert hf.report(model) == [], "stock ran: nothing to report"
    with on(None if by_class else model):
        model(prompt)
    first, second = hf.report(model)
    assert (first.layer_id, second.layer_id) == (0, 2)
    seen = [(t + 1) // plain_shape.ratio for t in range(plain_shape.prompt)] * 2
    topk = plain_shape.budget // plain_shape.ratio
    for layer in (first, second):
        assert layer.rows == len(seen)
        assert layer.dense_rows == sum(blocks <= topk for blocks in seen) < layer.rows
        assert layer.blocks_visible == sum(seen)
        assert layer.blocks_selected == sum(min(blocks, topk) for blocks in seen) < layer.blocks_visible
    model(prompt)
    assert hf.report(model) == [first, second], "stock ran again: nothing was added"


@torch.no_grad()
def test_fault_55_below_the_budget_every_row_is_dense(model: Any, make_tokens: Any, plain_shape: Any, on: Any) -> None:
    with on(model):
        model(make_tokens(1, plain_shape.budget))
    for layer in hf.report(model):
        assert layer.rows == layer.dense_rows == plain_shape.budget
        assert layer.share_selected == 1.0


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_fault_56_another_attention_chosen_while_enabled(
    model: Any, make_tokens: Any, refuses: Any, implementation: str
) -> None:
    """It is told, neither obeyed in part nor ignored."""
    prompt = make_tokens(1, 60)
    expected = model(prompt).logits
    hf.enable(model)
    logits = model(prompt).logits
    model.set_attn_implementation(implementation)
    for tokens in (60, 1):
        with refuses(
            UnsupportedError, "flashqsa", "must stay 'flashqsa'", f"got '{implementation}'", "Call enable on this model"
        ):
            model(prompt[:, :tokens])
    hf.enable(model)
    assert torch.equal(model(prompt).logits, logits)
    model.set_attn_implementation(implementation)
    hf.disable(model)
    assert torch.allclose(model(prompt).logits, expected, atol=1e-4)


def test_fault_56_an_unknown_backend_is_answered_with_those_that_are_known() -> None:
    plan = flashqsa.plan_step(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([8], dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.int32),
        page_tokens=8,
        block_tokens=4,
        topk_blocks=2,
        max_query_len=1,
        max_seq_len=8,
    )
    cache = flashqsa.LayerCache(torch.zeros(1, 8, 1, 16), torch.zeros(1, 8, 1, 16), torch.zeros(1, 2, 16), None, None)
    index_q = torch.zeros(1, 1, 16)
    with pytest.raises(ArgumentError, match=r"select_blocks: .* auto, reference, torch, triton, got 'cutlass'"):
        flashqsa.select_blocks(index_q, cache, plan, backend="cutlass")
    selection = flashqsa.select_blocks(index_q, cache, plan)
    with pytest.raises(ArgumentError, match=r"attend: .* auto, reference, torch, triton, got 'flash'"):
        flashqsa.attend(torch.zeros(1, 1, 16), cache, selection, plan, backend="flash")
