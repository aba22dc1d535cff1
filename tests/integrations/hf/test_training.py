"""Gradients: those of transformers, for everything that a loss reaches through the selection."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.integrations import hf
from flashqsa.testing import assert_within_budget

TRAINED = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")


def _gradients(model: Any, prompt: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor | None]:
    model.zero_grad(set_to_none=True)
    labels = prompt.masked_fill(mask == 0, -100)
    model(prompt, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture
def model(make_model: Any, all_cases: Any) -> Any:
    return make_model(next(case for case in all_cases if case.name == "two_qsa_layers")).train()


@pytest.fixture
def batch(make_tokens: Any) -> tuple[torch.Tensor, torch.Tensor]:
    prompt = make_tokens(2, 140)
    mask = torch.ones_like(prompt)
    mask[1, :6] = 0
    return prompt, mask


def test_gradients_equal_those_of_transformers(model: Any, batch: Any, exactly: Any) -> None:
    stock = _gradients(model, *batch)
    with exactly(model) as exact:
        truth = _gradients(exact, *batch)
    with hf.enabled(model):
        ours = _gradients(model, *batch)
    reached = [name for name, gradient in stock.items() if gradient is not None]
    assert reached == [name for name, gradient in ours.items() if gradient is not None]
    assert not any(".indexer." in name for name in reached), "the selection is a constant, here as there"
    trained = [name for name in reached if ".self_attn." in name]
    assert len(trained) == 2 * len(TRAINED)
    for name in trained:
        assert_within_budget(ours[name], stock[name], truth[name], name)
    everything = [torch.cat([side[name].flatten() for name in reached]) for side in (ours, stock, truth)]
    assert_within_budget(*everything, "all parameters together")


def test_gradient_checkpointing_changes_nothing(model: Any, batch: Any) -> None:
    hf.enable(model)
    plain = _gradients(model, *batch)
    model.activation_checkpointing_enable()
    again = _gradients(model, *batch)
    assert model.model.layers[1].gradient_checkpointing
    for name, gradient in plain.items():
        if gradient is None:
            assert again[name] is None
        else:
            assert torch.equal(gradient, again[name]), name


def test_frozen_layers_train_nothing_and_still_pass_gradients_on(model: Any, batch: Any) -> None:
    """As with adapters elsewhere in the model."""
    hf.enable(model)
    expected = _gradients(model, *batch)
    for attention in hf.patch.qsa_attentions(model):
        attention.requires_grad_(False)
    ours = _gradients(model, *batch)
    assert all(ours[name] is None for name in ours if ".self_attn." in name)
    below = "model.layers.0.linear_attn.in_proj_qkv.weight"
    assert torch.equal(ours[below], expected[below])
