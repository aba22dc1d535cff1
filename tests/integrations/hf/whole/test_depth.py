"""Deep contexts: a cache of 120,000 and of 210,000 tokens, as far as a CPU reaches."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flashqsa.testing import assert_within_budget, error_budget, stream

DEPTHS = (120_001, 210_002)
STEPS = (5, 1, 1)


def _filled(model: Any, tokens: int, seed: int) -> Any:
    """A cache that holds a context of random states; what wrote it does not matter to what follows."""
    from transformers import DynamicCache

    config, random = model.config, stream(seed)
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        shape = (1, config.num_key_value_heads, tokens, config.head_dim)
        cache.update(torch.randn(shape, generator=random), torch.randn(shape, generator=random), layer)
        cache.update_indexer(torch.randn(1, tokens, config.indexer_head_dim, generator=random), layer)
    cache.layers[0].indexer_position_ids = torch.arange(tokens).expand(3, 1, -1)
    return cache


def _in_float64(cache: Any) -> Any:
    cache = copy.deepcopy(cache)
    for layer in cache.layers:
        for name in ("keys", "values", "indexer_keys"):
            setattr(layer, name, getattr(layer, name).double())
    return cache


def _continue(model: Any, cache: Any, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(piece, cache=cache).logits for piece in tokens.split(STEPS, dim=1)], dim=1)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("depth", DEPTHS)
def test_fault_38_deep_contexts_then_a_short_one(
    only_qsa: Any,
    make_model: Any,
    make_tokens: Any,
    watch: Any,
    on: Any,
    join: Any,
    assert_same_sets: Any,
    exactly: Any,
    depth: int,
) -> None:
    """Four times, each with another context, and a short request behind them in the same process."""
    model = make_model(only_qsa, max_position_embeddings=262_144)
    for seed in range(4):
        tokens, context = make_tokens(1, sum(STEPS), seed), _filled(model, depth, seed)
        with watch() as stock:
            expected = _continue(model, copy.deepcopy(context), tokens)
        with on(model), watch() as ours:
            logits = _continue(model, copy.deepcopy(context), tokens)
        assert assert_same_sets(join(ours), join(stock)) == 0
        chosen = join(ours)[0].tokens
        assert chosen.shape[-1] == depth + sum(STEPS)
        assert int(chosen.sum(dim=-1).max()) < only_qsa.budget + only_qsa.ratio
        if seed == 0:  # what stock is off by depends on the model more than on the context
            with exactly(model) as exact_model:
                exact = _continue(exact_model, _in_float64(context), tokens)
            assert_within_budget(logits, expected, exact)
            budget = error_budget(expected, exact)
        assert float((logits - expected).abs().max()) <= budget, f"context {seed}"
    short = make_tokens(1, 61)
    with watch() as stock:
        expected = model(short).logits
    with on(model), watch() as ours:
        logits = model(short).logits
    assert_same_sets(ours, stock)
    with exactly(model) as exact_model:
        assert_within_budget(logits, expected, exact_model(short).logits, "short")
