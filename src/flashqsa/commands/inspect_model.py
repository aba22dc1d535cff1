"""Running a checkpoint over a prompt without generating, for `flashqsa inspect` and `flashqsa needle`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from flashqsa.commands.generate_engine import RunRequest, is_out_of_memory, torch_threads
from flashqsa.commands.generate_loop import generate_tokens
from flashqsa.commands.generate_model import load_model, quiet_transformers
from flashqsa.errors import FlashQSAError, UnsupportedError

OTHER_COMMAND = "generate: "


@contextmanager
def errors_of(command: str) -> Iterator[None]:
    """Errors of what this command shares with `generate` name this one; too little memory becomes such an error.

    Args:
        command: Name of the sub-command.
    """
    try:
        yield
    except FlashQSAError as error:
        told = str(error)
        if not told.startswith(OTHER_COMMAND):
            raise
        raise type(error)(f"{command}: {told.removeprefix(OTHER_COMMAND)}") from error
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        told = " ".join(str(error).split())
        raise UnsupportedError(
            f"{command}: the model and its context must fit in memory, got: {told}. "
            "Take a smaller --prefill-chunk, a shorter context or a narrower --dtype."
        ) from error


@contextmanager
def loaded_model(request: RunRequest) -> Iterator[Any]:
    """The model of a request, on its device and with its threads.

    Raises:
        ConfigError: The checkpoint does not load.
    """
    with torch_threads(request.threads), quiet_transformers():
        model, _ = load_model(request.checkpoint, dtype=request.dtype, device=torch.device(request.device))
        yield model


def run_prompt(
    model: Any,
    token_ids: Sequence[int],
    *,
    prefill_chunk: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Feeds a prompt in chunks, through one cache.

    Args:
        model: A causal language model of transformers.
        token_ids: The prompt.
        prefill_chunk: Tokens that enter at once.
        on_progress: Called with (tokens done, tokens in all).

    Raises:
        ArgumentError: The logits after it are not finite.
    """

    def tell(stage: str, done: int, total: int) -> None:
        if stage == "prefill":
            on_progress(done, total)

    # One token is read off the last row's logits and never fed back.
    generate_tokens(model, token_ids, max_new_tokens=1, prefill_chunk=prefill_chunk, on_progress=tell)
