"""Training: gradients and losses are those of transformers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from flashqsa.errors import UnsupportedError
from flashqsa.testing import assert_within_budget

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


def _gradients(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
def test_gradients_of_2500_tokens(
    only_qsa: Any, make_model: Any, make_tokens: Any, watch: Any, on: Any, exactly: Any, assert_same_sets: Any
) -> None:
    """Budget 256. `q_proj` holds queries and gates side by side, head by head: each is compared with its own budget."""
    model = make_model(only_qsa, indexer_budget=256).train()
    tokens = make_tokens(1, 2500)
    with watch() as stock_selected:
        stock = _gradients(model, tokens)
    with on(model), watch() as selected:
        ours = _gradients(model, tokens)
    assert assert_same_sets(selected, stock_selected) <= 2 * 2500 // 200
    assert sum(s.sparse_rows for s in selected) > 2 * 2200
    with exactly(model) as exact_model:
        exact = _gradients(exact_model, tokens)
    assert list(ours) == list(stock)
    assert not any(".indexer." in name for name in ours), "the selection is a constant, here as there"
    heads, _, dim = only_qsa.heads
    for layer in range(2):
        for name in PROJECTIONS:
            sides = [side[f"model.layers.{layer}.self_attn.{name}.weight"] for side in (ours, stock, exact)]
            if name == "q_proj":
                halves = [side.view(heads, 2, dim, -1).unbind(1) for side in sides]
                assert_within_budget(*(half[0] for half in halves), f"layer {layer}: q")
                assert_within_budget(*(half[1] for half in halves), f"layer {layer}: gate")
            else:
                assert_within_budget(*sides, f"layer {layer}: {name}")


def test_overfitting_for_30_steps(plain_shape: Any, make_model: Any, make_tokens: Any, on: Any, exactly: Any) -> None:
    tokens = make_tokens(1, 90)

    def train(model: Any) -> torch.Tensor:
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        losses = []
        for _ in range(30):
            optimizer.zero_grad(set_to_none=True)
            loss = model(tokens, labels=tokens, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.detach())
        return torch.stack(losses)

    stock = train(make_model(plain_shape))
    enabled = make_model(plain_shape)
    with on(enabled):
        ours = train(enabled)
    with exactly(make_model(plain_shape)) as exact_model:
        exact = train(exact_model)
    assert_within_budget(ours, stock, exact)
    assert float(ours[-1]) < 0.5 * float(ours[0]), "it must learn"


def test_checkpointed_gradients(plain_shape: Any, make_model: Any, make_tokens: Any, on: Any, exactly: Any) -> None:
    """A layer that runs again in the backward pass selects the same again."""
    model, tokens = make_model(plain_shape).train(), make_tokens(2, plain_shape.prompt)
    runs = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        for side in (nullcontext(), on(model)):
            with side:
                runs.append(_gradients(model, tokens))
    stock, ours, stock_again, ours_again = runs
    model.activation_checkpointing_disable()
    with exactly(model) as exact_model:
        exact = _gradients(exact_model, tokens)
    for name in stock:
        assert torch.equal(ours[name], ours_again[name]), name
        assert torch.equal(stock[name], stock_again[name]), name
        if ".self_attn." in name:
            assert_within_budget(ours_again[name], stock_again[name], exact[name], name)


def test_a_checkpoint_that_runs_again_after_disabling_is_refused(
    plain_shape: Any, make_model: Any, make_tokens: Any, on: Any, refuses: Any
) -> None:
    """The loss is FlashQSA's: its gradient can be no other's."""
    model, tokens = make_model(plain_shape).train(), make_tokens(1, 60)
    model.activation_checkpointing_enable()
    with on(model):
        loss = model(tokens, labels=tokens, use_cache=False).loss
    with refuses(UnsupportedError, "flashqsa", "disable after the backward pass"):
        loss.backward()
