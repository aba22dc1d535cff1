"""Decode steps on a GPU: captured ones are those of kernel by kernel, to the bit, and none waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from flashqsa.integrations import hf
from flashqsa.integrations.hf import captured, forward, growing, masks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*backend 'torch' serves")]

PROMPT, STEPS = 240, 40
"""The buffers of 256 columns are left on the way."""


@pytest.fixture
def model(make_model: Any, qsa_case: Any) -> Any:
    return make_model(qsa_case).cuda()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Columns at which a graph was replayed."""
    columns: list[int] = []
    replay = captured.CapturedStep.replay

    def counting(self: Any, rows: Any, angles: Any, past: int) -> torch.Tensor:
        columns.append(past)
        return replay(self, rows, angles, past)

    monkeypatch.setattr(captured.CapturedStep, "replay", counting)
    return columns


def _conversation(
    model: Any, tokens: torch.Tensor, mask: torch.Tensor, change: Callable[[Any, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    logits = [model(tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], cache=cache).logits[:, -1:]]
    column = PROMPT
    while column < PROMPT + STEPS:
        if column == PROMPT + 30:
            mask = change(cache, mask)
        step = tokens[: len(mask), column : column + 1]
        logits.append(model(step, attention_mask=mask[:, : column + 1], cache=cache).logits)
        column += 1
    return torch.cat([x.flatten() for x in logits])


def _nothing(cache: Any, mask: torch.Tensor) -> torch.Tensor:
    return mask


def _reorder(cache: Any, mask: torch.Tensor) -> torch.Tensor:
    order = torch.tensor([1, 0], device=mask.device)
    cache.reorder_cache(order)
    return mask[order]


@torch.no_grad()
@pytest.mark.parametrize("change", [_nothing, _reorder])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_steps_have_the_bits_of_steps_kernel_by_kernel(
    model: Any, make_tokens: Any, replays: list[int], change: Any, dtype: Any
) -> None:
    model, tokens = model.to(dtype), make_tokens(2, PROMPT + STEPS).cuda()
    mask = torch.ones_like(tokens)
    mask[1, :6] = 0
    with hf.enabled(model, capture_steps=True):
        found = _conversation(model, tokens, mask, change)
        assert len(replays) > STEPS, "two layers, most of whose steps are replayed"
        counted = hf.report(model)
        replays.clear()
        hf.enable(model)
        expected = _conversation(model, tokens, mask, change)
        assert not replays
    assert torch.equal(found, expected)
    rows = 2 * (PROMPT + STEPS) - 6
    assert [layer.rows for layer in counted] == [rows] * len(counted)


@torch.no_grad()
def test_the_torch_path_says_the_same(
    model: Any, make_tokens: Any, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = make_tokens(1, PROMPT + STEPS).cuda()
    mask = torch.ones_like(tokens)
    with hf.enabled(model, capture_steps=True):
        found = _conversation(model, tokens, mask, _nothing)
        assert replays
        monkeypatch.setattr(forward, "norms_for_kernel", lambda *_: None)
        expected = _conversation(model, tokens, mask, _nothing)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()


@torch.no_grad()
def test_fault_47_a_step_does_not_wait_for_the_device(
    model: Any, replays: list[int], no_synchronisation: Callable[[], AbstractContextManager[None]]
) -> None:
    """Planning it and running it in a layer, kernel by kernel, captured and replayed."""
    from transformers import DynamicCache
    from transformers.masking_utils import causal_mask_function

    attention, device = hf.patch.qsa_attentions(model)[0], torch.device("cuda", 0)
    config, cache = attention.config, DynamicCache(config=model.config)
    hidden = torch.randn(1, PROMPT + 12, config.hidden_size, device=device)
    positions = torch.arange(PROMPT + 12, device=device)[None].expand(3, 1, -1)
    cos, sin = model.model.rotary_emb(hidden, positions)

    def run(past: int, end: int) -> None:
        step = masks.step_mask(
            1, end - past, end, past, mask_function=causal_mask_function, config=config, device=device
        )
        attention(hidden[:, past:end], (cos[:, :end], sin[:, :end]), step, cache)

    with hf.enabled(attention, capture_steps=True):
        run(0, PROMPT)
        for column in range(PROMPT, PROMPT + 6):
            run(column, column + 1)
        before = len(replays)
        with no_synchronisation():
            for column in range(PROMPT + 6, PROMPT + 12):
                run(column, column + 1)
    assert before
    assert len(replays) == before + 6
    assert growing.buffers_behind(cache.layers[attention.layer_idx], DynamicCache) is not None
