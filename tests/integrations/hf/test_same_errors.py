"""Where transformers raises, the enabled model raises the same; where it does not, neither does this."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flashqsa.integrations import hf

TOKENS = 60


@dataclass
class World:
    """What a call may use.

    Attributes:
        hybrid: A model with a recurrent layer.
        indexed: A model of QSA layers alone.
        prompt: [2, tokens].
        other: [3, tokens].
    """

    hybrid: Any
    indexed: Any
    prompt: torch.Tensor
    other: torch.Tensor

    def filled(self, model: Any, static: bool = False) -> Any:
        """A cache with the prompt in it."""
        from transformers import DynamicCache, StaticCache

        cache = StaticCache(model.config, max_cache_len=TOKENS + 4) if static else DynamicCache(config=model.config)
        model(self.prompt, cache=cache)
        return cache

    def go_on(self, static: bool, tokens: torch.Tensor) -> None:
        self.indexed(tokens, cache=self.filled(self.indexed, static))

    def generate(self, **options: Any) -> None:
        self.hybrid.generate(self.prompt[:1], max_new_tokens=3, do_sample=False, **options)


CALLS: dict[str, Callable[[World], Any]] = {
    "crop of a hybrid cache": lambda w: w.filled(w.hybrid).crop(-4),
    "repeat of a hybrid cache": lambda w: w.filled(w.hybrid).batch_repeat_interleave(2),
    "select of a hybrid cache": lambda w: w.filled(w.hybrid).batch_select_indices(torch.tensor([1])),
    "select of a static cache": lambda w: w.filled(w.indexed, True).batch_select_indices(torch.tensor([1])),
    "repeat of a static cache": lambda w: w.filled(w.indexed, True).batch_repeat_interleave(2),
    "crop of a static cache": lambda w: w.filled(w.indexed, True).crop(-4),
    "reorder out of range": lambda w: w.filled(w.indexed).reorder_cache(torch.tensor([0, 5])),
    "more rows than the cache": lambda w: w.go_on(False, w.other[:, :1]),
    "fewer rows than the cache": lambda w: w.go_on(False, w.other[:1, :1]),
    "more rows than the static cache": lambda w: w.go_on(True, w.other[:, :1]),
    "more tokens than the static cache": lambda w: w.go_on(True, w.prompt[:, :5]),
    "one token more than the static cache": lambda w: w.indexed(
        w.prompt[:, :1], cache=(c := w.filled(w.indexed, True), w.indexed(w.prompt[:, :4], cache=c))[0]
    ),
    "a cache of no model": lambda w: w.indexed(w.prompt, cache=__import__("transformers").DynamicCache()),
    "a tuple as cache": lambda w: w.indexed(w.prompt, cache=((w.prompt, w.prompt),)),
    "assisted generation": lambda w: w.generate(assistant_model=w.hybrid),
    "prompt lookup": lambda w: w.generate(prompt_lookup_num_tokens=2),
    "offloaded cache": lambda w: w.generate(cache_implementation="offloaded"),
    "offloaded static cache": lambda w: w.generate(cache_implementation="offloaded_static"),
    "quantized cache": lambda w: w.generate(cache_implementation="quantized"),
    "ids and embeddings": lambda w: w.indexed(w.prompt, inputs_embeds=torch.zeros(2, TOKENS, 96)),
    "nothing": lambda w: w.indexed(),
    "no tokens": lambda w: w.indexed(w.prompt[:, :0]),
    "fewer positions": lambda w: w.indexed(w.prompt, position_ids=torch.arange(50).repeat(2, 1)),
    "positions of one row for two": lambda w: w.indexed(w.prompt, position_ids=torch.arange(TOKENS)[None]),
    "positions of three rows for two": lambda w: w.indexed(w.prompt, position_ids=torch.arange(TOKENS).repeat(3, 1)),
    "a token that is none": lambda w: w.indexed(w.prompt + 400),
    "a mask with three axes": lambda w: w.indexed(w.prompt, attention_mask=torch.ones(2, TOKENS, TOKENS)),
}
SERVED: dict[str, Callable[[World], Any]] = {
    "exactly as many tokens as the static cache": lambda w: w.go_on(True, w.prompt[:, :4]),
    "embeddings": lambda w: w.indexed(inputs_embeds=w.indexed.get_input_embeddings()(w.prompt)),
    "hidden states": lambda w: w.indexed(w.prompt, output_hidden_states=True),
    "router logits": lambda w: w.indexed(w.prompt, output_router_logits=True),
    "a tuple": lambda w: w.indexed(w.prompt, return_dict=False)[0],
    "the last logits": lambda w: w.indexed(w.prompt, logits_to_keep=2),
}


@pytest.fixture
def world(make_model: Any, small_case: Any, qsa_case: Any, make_tokens: Any) -> World:
    return World(make_model(small_case), make_model(qsa_case), make_tokens(2, TOKENS), make_tokens(3, TOKENS, seed=1))


@torch.no_grad()
@pytest.mark.parametrize("name", [*CALLS, *SERVED])
def test_the_same_error_or_none(world: World, name: str) -> None:
    call = CALLS.get(name) or SERVED[name]

    def error_of_call() -> Exception | None:
        try:
            call(world)
        except Exception as error:
            return error
        return None

    stock = error_of_call()
    with hf.enabled(world.hybrid), hf.enabled(world.indexed):
        ours = error_of_call()
    if stock is None:  # later versions of transformers serve more
        assert ours is None, repr(ours)
    else:
        assert isinstance(ours, type(stock)), f"{stock!r} there, {ours!r} here"
    assert name in CALLS or stock is None
