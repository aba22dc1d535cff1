"""Greedy generation with a prompt that enters in chunks: the same loop under either engine."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashqsa.errors import ArgumentError

Progress = Callable[[str, int, int], None]
"""Called with a stage (`prefill` or `decode`), the tokens done in it and its tokens in all."""

CACHE_NAMES = ("cache", "past_key_values")
"""The forward's cache argument under its names in transformers, the newest first."""


@dataclass(frozen=True, kw_only=True)
class Generated:
    """What one run of the loop produced.

    Attributes:
        token_ids: The generated tokens; one that stopped the run is the last.
        margins: How far each token's logit lay above the second best.
        stopped: `length`, or `stop token`.
        prefill_s: Seconds from the start until the first token was known.
        decode_s: Seconds for the tokens after it.
    """

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]
    stopped: str
    prefill_s: float
    decode_s: float


def generate_tokens(
    model: Any,
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    prefill_chunk: int,
    stop_ids: Collection[int] = (),
    on_progress: Progress = lambda stage, done, total: None,
) -> Generated:
    """Generates greedily after one prompt.

    Every chunk and every token goes through the same cache, so a chunk attends all that came before it.

    Args:
        model: A causal language model of transformers, in evaluation mode.
        prompt_ids: The prompt, 1 token or more.
        max_new_tokens: Tokens to generate at most, 1 or more.
        prefill_chunk: Prompt tokens that enter at once; memory grows with it.
        stop_ids: Tokens after which nothing more is generated.
        on_progress: Told about every chunk and every token.

    Raises:
        ArgumentError: The model's logits are not finite.
    """
    step = _stepper(model)
    token_ids: list[int] = []
    margins: list[float] = []
    started = time.perf_counter()
    with torch.inference_mode():
        for start in range(0, len(prompt_ids), prefill_chunk):
            logits = step(prompt_ids[start : start + prefill_chunk])
            on_progress("prefill", min(start + prefill_chunk, len(prompt_ids)), len(prompt_ids))
        while True:
            token_id, margin = _best(logits, position=len(prompt_ids) + len(token_ids))
            token_ids.append(token_id)
            margins.append(margin)
            if len(token_ids) == 1:
                first_known = time.perf_counter()
            on_progress("decode", len(token_ids), max_new_tokens)
            if token_id in stop_ids or len(token_ids) == max_new_tokens:
                break
            logits = step(token_ids[-1:])
    return Generated(
        token_ids=tuple(token_ids),
        margins=tuple(margins),
        stopped="stop token" if token_ids[-1] in stop_ids else "length",
        prefill_s=first_known - started,
        decode_s=time.perf_counter() - first_known,
    )


def _stepper(model: Any) -> Callable[[Sequence[int]], torch.Tensor]:
    """A function that feeds the next tokens and returns the logits [vocabulary] after the last of them."""
    from transformers import DynamicCache

    parameters = inspect.signature(model.forward).parameters
    name = next(name for name in CACHE_NAMES if name in parameters)
    cache = DynamicCache(config=model.config.get_text_config())
    device = model.get_input_embeddings().weight.device

    def step(token_ids: Sequence[int]) -> torch.Tensor:
        input_ids = torch.tensor([list(token_ids)], device=device)
        output = model(input_ids=input_ids, **{name: cache}, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    return step


def _best(logits: torch.Tensor, *, position: int) -> tuple[int, float]:
    """The best token, the lowest id among equals, and its lead over the second best."""
    logits = logits.float()
    best = logits.max()
    if not torch.isfinite(logits.sum()):
        raise ArgumentError(
            f"generate: logits must be finite, got {logits[~logits.isfinite()][:1].tolist()} for position {position}. "
            "Choose a --dtype with a wider range, or check the checkpoint's weights."
        )
    token_id = int((logits == best).nonzero()[0, 0])
    logits = logits.clone()
    logits[token_id] = float("-inf")
    return token_id, float(best - logits.max())
