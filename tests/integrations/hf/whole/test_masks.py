"""Masks: padding on either side is served without a dense mask, everything else is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.errors import UnsupportedError

TOKENS = 90


@pytest.fixture
def prompt(make_tokens: Any) -> torch.Tensor:
    return make_tokens(2, TOKENS)


def test_dense_masks_raise_while_a_model_is_enabled(model: Any, prompt: torch.Tensor, on: Any, make_model: Any,
                                                    plain_shape: Any) -> None:  # fmt: skip
    """The guard that every other test here relies on."""
    other = make_model(plain_shape)
    with torch.no_grad():
        expected = other(prompt).logits
        with on(model):
            model(prompt)
            with pytest.raises(AssertionError, match="sdpa_mask was called"):
                other(prompt)
            other.set_attn_implementation("eager")
            with pytest.raises(AssertionError, match="eager_mask was called"):
                other(prompt)
        other.set_attn_implementation("sdpa")
        assert torch.equal(other(prompt).logits, expected)


def _holes(prompt: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    mask[1, 20:23] = 0
    return mask


def _padding_in_mid_text(prompt: torch.Tensor) -> torch.Tensor:
    """What becomes of padding on the right once something is generated behind it."""
    mask = torch.ones_like(prompt)
    mask[0, 70:80] = 0
    return mask


def _causal(prompt: torch.Tensor) -> torch.Tensor:
    return torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril()


def _arbitrary(prompt: torch.Tensor) -> torch.Tensor:
    mask = _causal(prompt)
    mask[:, :, 50:, 10:20] = False
    return mask


def _additive(prompt: torch.Tensor) -> torch.Tensor:
    return torch.where(_arbitrary(prompt), 0.0, torch.finfo(torch.float32).min)


def _by_document(prompt: torch.Tensor) -> torch.Tensor:
    document = (torch.arange(TOKENS) >= 40).long()
    return _causal(prompt) & (document[:, None] == document[None])


@pytest.mark.parametrize("form", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("holes", [_holes, _padding_in_mid_text])
@pytest.mark.parametrize("use_cache", [False, True])
def test_holes(
    model: Any, prompt: torch.Tensor, on: Any, refuses: Any, form: torch.dtype, holes: Any, use_cache: bool
) -> None:
    mask = holes(prompt).to(form)
    with on(model), refuses(UnsupportedError, "flashqsa", "attention_mask", "holes in batch row"):
        model(prompt, attention_mask=mask, use_cache=use_cache)


@pytest.mark.parametrize("mask", [_causal, _arbitrary, _additive, _by_document])
def test_four_axes(model: Any, prompt: torch.Tensor, on: Any, refuses: Any, mask: Any) -> None:
    with on(model), refuses(UnsupportedError, "flashqsa", "attention_mask", f"[2, 1, {TOKENS}, {TOKENS}]"):
        model(prompt, attention_mask=mask(prompt))


@pytest.mark.parametrize("axes", [1, 4])
@pytest.mark.parametrize("cut", [1, 40, TOKENS - 1])
def test_packed(model: Any, prompt: torch.Tensor, on: Any, refuses: Any, axes: int, cut: int) -> None:
    positions = torch.cat([torch.arange(cut), torch.arange(TOKENS - cut)])[None].expand(2, -1)
    if axes == 4:
        positions = positions[None].expand(4, -1, -1)
    with on(model), refuses(UnsupportedError, "flashqsa", "packed"):
        model(prompt, position_ids=positions, use_cache=False)


def test_generating_behind_padding_on_the_right(model: Any, prompt: torch.Tensor, on: Any, refuses: Any) -> None:
    mask = torch.ones_like(prompt)
    mask[0, 80:] = 0
    with on(model), refuses(UnsupportedError, "flashqsa", "attention_mask", "holes in batch row 0"):
        model.generate(prompt, attention_mask=mask, max_new_tokens=3, do_sample=False)


@torch.no_grad()
def test_a_refused_call_leaves_the_model_as_good_as_before(
    model: Any, prompt: torch.Tensor, on: Any, refuses: Any
) -> None:
    with on(model):
        expected = model(prompt).logits
        with refuses(UnsupportedError, "flashqsa", "holes"):
            model(prompt, attention_mask=_holes(prompt))
        assert torch.equal(model(prompt).logits, expected)
