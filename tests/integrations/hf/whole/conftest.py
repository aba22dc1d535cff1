"""Random small models of every kind, and FlashQSA on them in a way that no dense mask goes unnoticed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from flashqsa.integrations import hf
from flashqsa.testing import assert_within_budget, tiny_config

LINEAR, QSA = "linear_attention", "full_attention"
PAD_ID, EOS_ID, HIDDEN = 301, 300, 64
LAYERS = (
    (LINEAR, QSA, QSA),
    (QSA, LINEAR, QSA),
    (QSA, QSA),
    (LINEAR, QSA, LINEAR, QSA),
    (QSA, LINEAR, QSA, QSA),
)
SHARES = (0.25, 0.5, 1.0)
BLOCKS = (5, 6, 7, 9, 10, 11, 12, 13)
"""Budgets in blocks; none makes the budget a power of two."""


@dataclass(frozen=True)
class Shape:
    """One small model, drawn from a number alone.

    Attributes:
        seed: The number, also the seed of weights and prompts.
        ratio: Tokens of a block.
        budget: Tokens that a row selects.
        index: Index heads and their dimension.
        heads: Query heads, KV heads and their dimension.
        rotary: Share of a head that rotates.
        layers: What each layer is.
        ngram: Which layer has n-gram embeddings, counted from 1, or 0 for none.
        prompt: Tokens of its prompts.
    """

    seed: int
    ratio: int
    budget: int
    index: tuple[int, int]
    heads: tuple[int, int, int]
    rotary: float
    layers: tuple[str, ...]
    ngram: int
    prompt: int

    def __str__(self) -> str:
        return f"shape{self.seed}"

    @classmethod
    def draw(cls, number: int) -> Shape:
        """The shape of a number: the same everywhere and always."""
        dice = random.Random(number)
        ratio = dice.choice((2, 4, 8))
        kv_heads = dice.randint(1, 3)
        heads = kv_heads * dice.randint(2 if kv_heads == 1 else 1, 15 // kv_heads)
        dim, index_dim = 16 * dice.randint(2, 8), 8 * dice.randint(4, 16)
        rotary = dice.choice([share for share in SHARES if dim * share <= index_dim])
        layers = dice.choice(LAYERS)
        ngram = layers.index(LINEAR) + 1 if LINEAR in layers and dice.random() < 0.5 else 0
        budget = ratio * dice.choice(BLOCKS)
        prompt = 2 * budget + 2 * dice.randint(20, 35) + 1
        index = (dice.randint(1, 8), index_dim)
        return cls(number, ratio, budget, index, (heads, kv_heads, dim), rotary, layers, ngram, prompt)

    def config(self, **overrides: Any) -> Any:
        """A `Qwen4ExpTextConfig` with everything else as small as it goes."""
        import transformers

        frequencies = int(self.heads[2] * self.rotary) // 2
        third = frequencies // 3
        fields: dict[str, Any] = tiny_config(
            vocab_size=320,
            hidden_size=HIDDEN,
            num_hidden_layers=len(self.layers),
            layer_types=list(self.layers),
            num_attention_heads=self.heads[0],
            num_key_value_heads=self.heads[1],
            head_dim=self.heads[2],
            indexer_n_heads=self.index[0],
            indexer_head_dim=self.index[1],
            indexer_budget=self.budget,
            indexer_compress_ratio=self.ratio,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            linear_num_value_heads=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            num_experts=2,  # both are taken: no choice of the router can hide or cause a difference
            hc_lowrank=4,
            pad_token_id=PAD_ID,
            eos_token_id=EOS_ID,
            rope_parameters={
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": self.rotary,
                "mrope_section": [frequencies - 2 * third, third, third],
                "mrope_interleaved": True,
            },
        )
        if self.ngram:
            fields |= {"ple_layer_ids": [self.ngram], "heads_per_ngram": 2, "ngram_vocab_size_base": 64}
            fields |= {"split_ngram_parts": 2}
        config = transformers.Qwen4ExpTextConfig(**fields | overrides)
        config._experts_implementation = "eager"  # the other one takes no float64
        return config


@pytest.fixture
def draw_shape() -> Callable[[int], Shape]:
    return Shape.draw


@pytest.fixture
def plain_shape() -> Shape:
    """One recurrent layer between two QSA layers, three KV groups of two heads."""
    return Shape(1, 4, 44, (4, 32), (6, 3, 32), 0.5, (QSA, LINEAR, QSA), 0, 151)


@pytest.fixture
def only_qsa() -> Shape:
    """No recurrent layer: caches of it can be cut and merged."""
    return Shape(2, 4, 36, (3, 40), (4, 2, 32), 0.5, (QSA, QSA), 0, 131)


@pytest.fixture
def model(make_model: Any, plain_shape: Any) -> Any:
    """A model of the plain shape."""
    return make_model(plain_shape)


On = Callable[..., AbstractContextManager[Any]]


@pytest.fixture
def on(dense_masks: Any) -> On:
    """FlashQSA on a model, as `hf.enabled`; there what builds dense masks in transformers raises for any model."""

    @contextmanager
    def enabled(model: Any = None, **options: Any) -> Iterator[Any]:
        with hf.enabled(model, **options):
            dense_masks.inside.append(True)
            try:
                yield model
            finally:
                dense_masks.inside.pop()

    return enabled


@pytest.fixture
def assert_as_stock(watch: Any, on: On, exactly: Any, assert_same_sets: Any) -> Callable[..., torch.Tensor]:
    """Generates with a model as it is and enabled; the same tokens, sets and logits, within the error budget."""

    def check(
        model: Any, inputs: dict[str, torch.Tensor], *, new_tokens: int = 16, plain: Any = None, by_class: bool = False
    ) -> torch.Tensor:
        """The text [B, T + new_tokens]. `plain` is the model that computes in float64, where `model` itself cannot."""
        options = {"max_new_tokens": new_tokens, "do_sample": False}
        options |= {"return_dict_in_generate": True, "output_logits": True}
        with watch() as stock:
            expected = model.generate(**inputs, **options)
        with on(None if by_class else model), watch() as ours:
            said = model.generate(**inputs, **options)
        assert torch.equal(said.sequences, expected.sequences)
        mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
        assert_same_sets(ours, stock, mask.bool())
        text, whole = said.sequences[:, :-1], dict(inputs)
        whole |= {"input_ids": text, "attention_mask": F.pad(mask, (0, new_tokens - 1), value=1)}
        if "mm_token_type_ids" in whole:
            whole["mm_token_type_ids"] = F.pad(whole["mm_token_type_ids"], (0, new_tokens - 1))
        else:
            whole["position_ids"] = (whole["attention_mask"].cumsum(dim=1) - 1).clamp(min=0)
        with torch.no_grad(), exactly(plain or model) as exact_model:
            exact = exact_model(**whole, use_cache=False).logits[:, -new_tokens:]
        logits, stock_logits = (torch.stack(out.logits, dim=1) for out in (said, expected))
        assert_within_budget(logits, stock_logits, exact)
        return said.sequences

    return check
