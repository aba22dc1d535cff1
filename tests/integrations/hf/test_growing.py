"""Caches that grow in place, and rows by one kernel: what GPUs run, here with the kernel's work done by torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashqsa.integrations import hf
from flashqsa.integrations.hf import captured, forward, growing, kernels, masks
from flashqsa.preparation import triton_context
from flashqsa.preparation.plain import pool_block_keys, rms_norm, rotate

cache_utils = pytest.importorskip("transformers.cache_utils")

PROMPT, PADS = 250, (0, 3, 9)
"""Pages of 256 tokens: a few steps more, and the buffers move."""


def _by_torch(
    rows: Any, cos: Any, sin: Any, norms: Any, caches: Any, *, query_tokens: int, past: int, row_angle: int,
    closed_block_slot_ids: Any, block_tokens: int,
) -> Any:  # fmt: skip
    past, (q_gate, k, v, index_qk) = int(past), rows
    k_cache, v_cache, raw_keys, block_keys = caches
    batch, new = cos.shape[0], slice(past, past + query_tokens)
    angles = [x[:, row_angle : row_angle + query_tokens].flatten(0, 1) for x in (cos, sin)]
    (q_norm, k_norm, index_norm, block_norm), dim = norms, k.shape[2]
    q, keys, index_q = (
        rotate(rms_norm(x, *norm), *angles).to(x.dtype)
        for x, norm in ((q_gate[..., :dim], q_norm), (k, k_norm), (index_qk[:, :-1], index_norm))
    )
    for cache, written in ((k_cache, keys), (v_cache, v), (raw_keys, index_qk[:, -1])):
        cache[:, new] = written.reshape(batch, query_tokens, *written.shape[1:])
    for row, slot in enumerate(closed_block_slot_ids.tolist() if block_keys is not None else ()):
        if slot >= 0:
            batch_row, first = row // query_tokens, row % query_tokens - block_tokens + 1
            members = raw_keys[batch_row, past + first : past + first + block_tokens]
            angle = [x[batch_row, row_angle + first][None] for x in (cos, sin)]
            block_keys[batch_row, slot % block_keys.shape[1]] = pool_block_keys(members[None], *block_norm, *angle)[0]
    return q, index_q


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Takes a device for one of kernels, and counts how often the kernel ran and how often buffers were made."""
    counts = SimpleNamespace(kernel=0, buffers=0)
    empty = growing.Buffers.empty

    def prepare(*args: Any, **options: Any) -> Any:
        counts.kernel += 1
        return _by_torch(*args, **options)

    def counting(*args: Any) -> Any:
        counts.buffers += 1
        return empty(*args)

    monkeypatch.setattr(kernels, "takes_kernels", lambda device: True)
    monkeypatch.setattr(triton_context, "prepare_context_triton", prepare)
    monkeypatch.setattr(growing.Buffers, "empty", counting)
    return counts


@pytest.fixture
def model(make_model: Any, qsa_case: Any) -> Any:
    return make_model(qsa_case)


@pytest.fixture
def mask() -> torch.Tensor:
    return (torch.arange(PROMPT + 40)[None] >= torch.tensor(PADS)[:, None]).long()


class _Graph:
    """What a captured step does when it is replayed: the same work, into the same memory."""

    def __init__(self, step: Any, attention: Any, replays: list[int]) -> None:
        self.step, self.attention, self.replays = step, attention, replays

    def replay(self) -> None:
        self.replays.append(1)
        self.step.out = self.step._run(self.attention)


@pytest.fixture
def replays(served: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps are captured after a few, and counted when replayed."""
    counted: list[int] = []

    def capture(self: Any, attention: Any) -> None:
        self.graph, self.out = _Graph(self, attention, counted), self.lengths

    monkeypatch.setattr(captured, "captures", lambda device: True)
    monkeypatch.setattr(captured.CapturedStep, "_capture", capture)
    return counted


def _decode(model: Any, cache: Any, tokens: torch.Tensor, mask: torch.Tensor, past: int, end: int) -> torch.Tensor:
    """Logits of single tokens after `past`."""
    logits = []
    for column in range(past, end):
        step = tokens[:, column : column + 1]
        logits.append(model(step, attention_mask=mask[:, : column + 1], cache=cache).logits)
    return torch.cat(logits, dim=1)


def _conversation(model: Any, tokens: torch.Tensor, mask: torch.Tensor, change: Callable[[Any], Any]) -> torch.Tensor:
    cache = cache_utils.DynamicCache(config=model.config)
    first = model(tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], cache=cache, logits_to_keep=1).logits
    logits = [first, _decode(model, cache, tokens, mask, PROMPT, PROMPT + 10)]
    cache, past = change(cache)
    logits.append(_decode(model, cache, tokens, mask, past, past + 6))
    chunk = model(tokens[:, past + 6 : past + 11], attention_mask=mask[:, : past + 11], cache=cache)
    return torch.cat([*logits, chunk.logits], dim=1)


def _nothing(cache: Any) -> Any:
    return cache, PROMPT + 10


def _crop(cache: Any) -> Any:
    cache.crop(-7)
    return cache, PROMPT + 3


def _copy(cache: Any) -> Any:
    return copy.deepcopy(cache), PROMPT + 10


def _repeat_and_select(cache: Any) -> Any:
    cache.batch_repeat_interleave(2)
    cache.batch_select_indices(torch.tensor([0, 2, 4]))
    return cache, PROMPT + 10


def _offload(cache: Any) -> Any:
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    return cache, PROMPT + 10


def _reset(cache: Any) -> Any:
    cache.reset()
    return cache, 0


@torch.no_grad()
@pytest.mark.parametrize("change", [_nothing, _crop, _copy, _repeat_and_select, _offload, _reset])
def test_the_same_is_said(
    model: Any, make_tokens: Any, mask: torch.Tensor, served: SimpleNamespace, monkeypatch: Any, change: Any
) -> None:
    """As the torch path says, within rounding, also past the end of the buffers and after what is done to a cache."""
    tokens = make_tokens(3, PROMPT + 40)
    with hf.enabled(model):
        said = _conversation(model, tokens, mask, change)
        assert served.kernel, "the kernel served"
        with monkeypatch.context() as patch:
            patch.setattr(forward, "norms_for_kernel", lambda *_: None)
            expected = _conversation(model, tokens, mask, change)
    assert (said - expected).abs().max() < 1e-4 * expected.abs().max()


@torch.no_grad()
@pytest.mark.parametrize("change", [_nothing, _crop, _copy, _repeat_and_select, _offload, _reset])
def test_captured_steps_say_the_same(
    model: Any, make_tokens: Any, mask: torch.Tensor, replays: list[int], change: Any
) -> None:
    """Lengths, plan and caches of a captured step follow what is done to a cache in between, and larger buffers."""
    tokens = make_tokens(3, PROMPT + 40)
    with hf.enabled(model, capture_steps=True):
        said = _conversation(model, tokens, mask, change)
        assert len(replays) >= 4
        counted = [layer.rows for layer in hf.report(model)]
        replays.clear()
        hf.disable(model)
        hf.enable(model)
        expected = _conversation(model, tokens, mask, change)
        assert not replays, "nobody asked for it"
        assert [layer.rows for layer in hf.report(model)] == counted
    assert torch.equal(said, expected)


@torch.no_grad()
def test_steps_write_in_place_until_the_buffers_are_full(
    model: Any, make_tokens: Any, mask: torch.Tensor, served: SimpleNamespace
) -> None:
    tokens, layers = make_tokens(3, PROMPT + 40), 2
    cache = cache_utils.DynamicCache(config=model.config)
    with hf.enabled(model):
        model(tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], cache=cache)
        assert served.buffers == layers
        for column in range(PROMPT, PROMPT + 20):
            _decode(model, cache, tokens, mask, column, column + 1)
            assert served.buffers == (layers if column < 256 else 2 * layers), f"column {column}"
            for layer in cache.layers[-1:]:
                assert layer.keys.shape[2] == layer.values.shape[2] == layer.indexer_keys.shape[1] == column + 1
    assert served.kernel == 21 * layers


@torch.no_grad()
def test_what_was_taken_from_a_cache_keeps_what_it_shows(
    model: Any, make_tokens: Any, mask: torch.Tensor, served: SimpleNamespace
) -> None:
    """Cropped and continued with other tokens: tensors of before are not written over."""
    tokens = make_tokens(3, PROMPT + 40)
    cache = cache_utils.DynamicCache(config=model.config)
    with hf.enabled(model):
        model(tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], cache=cache)
        layer = cache.layers[-1]
        held = [layer.keys, layer.values, layer.indexer_keys]
        before = [x.clone() for x in held]
        cache.crop(-5)
        _decode(model, cache, tokens.flip(1), mask, PROMPT - 5, PROMPT + 3)
        assert all(torch.equal(x, y) for x, y in zip(held, before, strict=True))


@torch.no_grad()
@pytest.mark.usefixtures("served")
def test_transformers_goes_on_from_a_cache_that_grew(model: Any, make_tokens: Any, mask: torch.Tensor) -> None:
    tokens = make_tokens(3, PROMPT + 40)
    logits = []
    for ours in (True, False):
        cache = cache_utils.DynamicCache(config=model.config)
        if ours:
            hf.enable(model)
        model(tokens[:, :PROMPT], attention_mask=mask[:, :PROMPT], cache=cache)
        hf.disable(model)
        logits.append(_decode(model, cache, tokens, mask, PROMPT, PROMPT + 3))
    assert (logits[0] - logits[1]).abs().max() < 1e-4 * logits[1].abs().max()


@torch.no_grad()
def test_hooks_on_a_norm_are_called(model: Any, make_tokens: Any, served: SimpleNamespace) -> None:
    norm = hf.patch.qsa_attentions(model)[0].k_norm
    calls: list[int] = []
    handle = norm.register_forward_hook(lambda *_: calls.append(1))
    with hf.enabled(model):
        model(make_tokens(1, 20))
        handle.remove()
    assert calls == [1]


def test_gradients_go_through_the_modules(model: Any, make_tokens: Any, served: SimpleNamespace) -> None:
    with hf.enabled(model):
        model(make_tokens(1, 20)).logits.sum().backward()
    assert served.kernel == 0
    assert all(a.q_norm.weight.grad is not None for a in hf.patch.qsa_attentions(model))


@pytest.mark.parametrize("block_tokens", [2, 4, 8])
def test_room_is_whole_pages_and_never_moves_back(block_tokens: int) -> None:
    """Capacities rise with the context, rarely, and by at most an eighth more than is needed."""
    page, last, moves = masks.PAGE_BLOCKS * block_tokens, 0, 0
    for tokens in range(1, 40_000, 7):
        blocks = masks.block_capacity(tokens, block_tokens)
        columns = blocks * block_tokens
        assert blocks % masks.PAGE_BLOCKS == 0
        assert tokens <= columns <= max(tokens + page, tokens + tokens // 8 + page)
        assert columns >= last
        assert masks.block_capacity(columns, block_tokens) == blocks, "full buffers are not moved"
        moves, last = moves + (columns > last), columns
    assert moves < 80
