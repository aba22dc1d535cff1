"""Projections that are no plain Linear any more: adapters, and weights of one byte. They are called, never read."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import nn

from flashqsa.integrations import hf
from flashqsa.testing import assert_within_budget, stream

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by peft
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "index_qk_proj")


class Int8Linear(nn.Module):
    """A linear layer with weights of one byte and a scale for each output, as weight-only quantisation makes it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        largest = linear.weight.detach().abs().amax(dim=1, keepdim=True)
        self.register_buffer("scale", largest / 127)
        self.register_buffer("steps", (linear.weight.detach() / self.scale).round().to(torch.int8))
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.steps.to(x.dtype) * self.scale.to(x.dtype), self.bias)


def _quantise(module: nn.Module) -> int:
    count = 0
    for name, child in module.named_children():
        if isinstance(child, nn.Linear) and name in PROJECTIONS:
            setattr(module, name, Int8Linear(child))
            count += 1
        else:
            count += _quantise(child)
    return count


def _with_lora(model: Any) -> Any:
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=list(PROJECTIONS), init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=stream(index)) / parameter.shape[-1] ** 0.5)
    return model


@pytest.fixture
def inputs(make_tokens: Any, plain_shape: Any) -> dict[str, torch.Tensor]:
    prompt = make_tokens(2, plain_shape.prompt)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    return {"input_ids": prompt, "attention_mask": mask}


def test_weights_of_one_byte(model: Any, inputs: Any, assert_as_stock: Any) -> None:
    plain = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    assert _quantise(model) == 2 * len(PROJECTIONS)
    said = assert_as_stock(model, inputs)
    assert not torch.equal(said, plain), "the rounding must matter"


@pytest.mark.parametrize("enabled_first", [False, True])
def test_lora(model: Any, inputs: Any, on: Any, assert_as_stock: Any, enabled_first: bool) -> None:
    """Adapters put on a model, also on one that is enabled already; switched off, and merged."""
    options = {**inputs, "max_new_tokens": 16, "do_sample": False}
    plain = model.generate(**options)
    if enabled_first:
        with on(model):
            assert torch.equal(model.generate(**options), plain)
            model = _with_lora(model)
            early = model.generate(**options)
    else:
        model = _with_lora(model)
    said = assert_as_stock(model, inputs)
    assert not torch.equal(said, plain), "the adapters must matter"
    if enabled_first:
        assert torch.equal(early, said)
    with on(model):
        with model.disable_adapter():
            assert torch.equal(model.generate(**options), plain)
        assert torch.equal(model.generate(**options), said)
        merged = model.merge_and_unload()
        assert torch.equal(merged.generate(**options), said)
    assert len(hf.report(merged)) == 2


def test_training_adapters(model: Any, inputs: Any, on: Any, exactly: Any) -> None:
    """Gradients reach the adapters of all projections but the indexer's, whose selection is a constant."""
    model = _with_lora(model).train()

    def gradients(model: Any) -> dict[str, torch.Tensor | None]:
        model.zero_grad(set_to_none=True)
        labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        model(**inputs, labels=labels, use_cache=False).loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    stock = gradients(model)
    with on(model):
        ours = gradients(model)
    with exactly(model) as exact_model:
        exact = gradients(exact_model)
    reached = {name for name, gradient in stock.items() if gradient is not None}
    assert len(reached) == 2 * 2 * (len(PROJECTIONS) - 1)
    assert reached == {name for name, gradient in ours.items() if gradient is not None}
    for name in reached:
        assert_within_budget(ours[name], stock[name], exact[name], name)
