"""What cannot be served is refused with a typed error, never attended wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.errors import UnsupportedError
from flashqsa.integrations import hf

TOKENS = 40


@pytest.fixture
def model(make_model: Any, small_case: Any) -> Any:
    return hf.enable(make_model(small_case))


@pytest.fixture
def prompt(make_tokens: Any) -> torch.Tensor:
    return make_tokens(2, TOKENS)


def test_masks_with_four_axes(model: Any, prompt: torch.Tensor, refuses: Any) -> None:
    causal = torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    for mask in (causal, torch.where(causal, 0.0, -torch.inf)):
        with refuses(UnsupportedError, "flashqsa", "attention_mask", "[2, 1, 40, 40]", "2-D"):
            model(prompt, attention_mask=mask)
    names = ("indexed_attention", "full_attention", "qwen_sparse_attention")  # as versions name the masks of QSA layers
    with refuses(UnsupportedError, "flashqsa", "attention_mask", "[2, 1, 40, 40]"):
        model.model(prompt, attention_mask=dict.fromkeys(names, causal))
    with refuses(UnsupportedError, "flashqsa", "attention_mask", "got None"):
        model.model(prompt, attention_mask=dict.fromkeys(names))


@pytest.mark.parametrize("hole", [(0, 5), (1, 20)])
def test_masks_with_holes(model: Any, prompt: torch.Tensor, refuses: Any, hole: tuple[int, int]) -> None:
    mask = torch.ones_like(prompt)
    mask[hole] = 0
    with refuses(UnsupportedError, "flashqsa", "attention_mask", f"batch row {hole[0]}"):
        model(prompt, attention_mask=mask)
    out = model(prompt)
    with refuses(UnsupportedError, "flashqsa", "attention_mask", f"batch row {hole[0]}"):
        model(prompt[:, :1], attention_mask=torch.cat([mask, mask[:, -1:]], dim=1), cache=out.cache)


def test_masks_of_another_length(model: Any, prompt: torch.Tensor, refuses: Any) -> None:
    with refuses(UnsupportedError, "flashqsa", "[2, 40]", "got [2, 39]"):
        model(prompt, attention_mask=torch.ones(2, TOKENS - 1))
    out = model(prompt)
    with refuses(UnsupportedError, "flashqsa", "[2, 41]", "got [2, 1]"):
        model(prompt[:, :1], attention_mask=torch.ones(2, 1), cache=out.cache)
    for rows in (1, 2):
        with refuses(UnsupportedError, "flashqsa", f"[{rows}, 40] without a cache", "47 columns"):
            model(prompt[:rows], attention_mask=torch.ones(rows, TOKENS + 7), use_cache=False)
    with refuses(UnsupportedError, "flashqsa", "[2, 40]", "got [2, 40, 40]"):
        model(prompt, attention_mask=torch.ones(2, TOKENS, TOKENS))


@pytest.mark.parametrize("axes", [1, 4])
def test_packed_positions(model: Any, prompt: torch.Tensor, refuses: Any, axes: int) -> None:
    """Two documents in a row: transformers sees it by the positions when there is neither mask nor cache."""
    positions = (torch.arange(TOKENS) % 23)[None].expand(2, -1)
    if axes == 4:
        positions = positions[None].expand(4, -1, -1)
    with refuses(UnsupportedError, "flashqsa", "packed", "one sequence a batch row"):
        model(prompt, position_ids=positions, use_cache=False)


def test_attention_weights(model: Any, prompt: torch.Tensor, refuses: Any) -> None:
    with refuses(UnsupportedError, "flashqsa", "output_attentions"):
        model(prompt, output_attentions=True)
    model.config._output_attentions = True
    with refuses(UnsupportedError, "flashqsa", "output_attentions"):
        model(prompt)


def test_attention_dropout_in_training(make_model: Any, small_case: Any, prompt: torch.Tensor, refuses: Any) -> None:
    model = hf.enable(make_model(small_case, attention_dropout=0.1))
    with torch.no_grad():
        model(prompt)
    model.train()
    with refuses(UnsupportedError, "flashqsa", "attention_dropout", "0.1"):
        model(prompt)
