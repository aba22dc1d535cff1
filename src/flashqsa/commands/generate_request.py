"""From checked options to a run: what must be known of a checkpoint before its weights are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashqsa.commands.generate_engine import ENGINES, RunRequest, check_threads
from flashqsa.commands.generate_model import DTYPES, load_stop_ids, load_text_config, load_tokenizer
from flashqsa.commands.generate_prompt import Prompt, PromptOptions, check_prompt_options, make_prompt
from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError, DeviceError


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run.

    Attributes:
        max_new_tokens: Tokens to generate at most.
        ignore_stop: Whether to go on after a stop token.
        prefill_chunk: Prompt tokens that enter at once.
        dtype: One of `DTYPES`; `auto` is the checkpoint's own.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; `auto` is CUDA where there is one.
        threads: CPU threads; None leaves torch's choice.
        engine: A key of `ENGINES`; None for flashqsa, or for both to compare.
    """

    max_new_tokens: int = 64
    ignore_stop: bool = False
    prefill_chunk: int = 512
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    engine: str | None = None


def check_options(prompt_options: PromptOptions, run_options: RunOptions, *, compare: bool) -> None:
    """Checks what can be checked without the checkpoint.

    Raises:
        ArgumentError: An option breaks a rule.
    """
    check_prompt_options(prompt_options)
    check_threads(run_options.threads)
    for name in ("max_new_tokens", "prefill_chunk"):
        value = getattr(run_options, name)
        if value < 1:
            raise ArgumentError(
                f"generate: {name.replace('_', '-')} must be at least 1, got {value}. Choose another value."
            )
    choices: Sequence[tuple[str, str, Sequence[str]]] = (
        ("dtype", run_options.dtype, DTYPES),
        ("engine", run_options.engine or "flashqsa", tuple(ENGINES)),
    )
    for name, choice, allowed in choices:
        if choice not in allowed:
            raise ArgumentError(
                f"generate: {name} must be among {', '.join(allowed)}, got {choice}. Choose one of them."
            )
    if compare and run_options.engine is not None:
        raise ArgumentError(
            f"generate: engine must be left out with --compare, got {run_options.engine}. Comparing runs both."
        )


def prepare_run(
    checkpoint: Path, config: QSAConfig, prompt_options: PromptOptions, run_options: RunOptions
) -> tuple[RunRequest, Prompt, Any | None]:
    """Makes the run's request, its prompt, and the tokenizer if there is one.

    Raises:
        ArgumentError: The prompt cannot be made, or is too long for the model.
        ConfigError: The checkpoint's configuration or tokenizer is damaged.
        DeviceError: The device is not there.
        UnsupportedError: transformers does not know the architecture.
    """
    text_config = load_text_config(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    stop_ids = load_stop_ids(checkpoint, text_config)
    _check_length(prompt_options.random_tokens or 0, run_options, config)  # before so many are drawn
    prompt = make_prompt(prompt_options, tokenizer, vocab_size=text_config.vocab_size, stop_ids=stop_ids)
    _check_length(len(prompt.token_ids), run_options, config)
    request = RunRequest(
        checkpoint=checkpoint,
        prompt_ids=prompt.token_ids,
        max_new_tokens=run_options.max_new_tokens,
        prefill_chunk=run_options.prefill_chunk,
        stop_ids=() if run_options.ignore_stop else stop_ids,
        dtype=run_options.dtype,
        device=device_named(run_options.device),
        threads=run_options.threads or torch.get_num_threads(),
    )
    return request, prompt, tokenizer


def _check_length(prompt_tokens: int, run_options: RunOptions, config: QSAConfig) -> None:
    if prompt_tokens + run_options.max_new_tokens > config.max_positions:
        raise ArgumentError(
            f"generate: prompt and new tokens must fit into the model's {config.max_positions:,} positions, got "
            f"{prompt_tokens:,} + {run_options.max_new_tokens:,}. Shorten the prompt or --max-new-tokens."
        )


def device_named(name: str, *, command: str = "generate") -> str:
    """The device's full name, if it is there.

    Args:
        name: `auto`, `cpu`, `cuda` or `cuda:N`.
        command: Name of the sub-command, first in the message.

    Raises:
        ArgumentError: It is no name of a device.
        DeviceError: The device is not there.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda:0" if available else "cpu"
    if name == "cpu":
        return name
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdecimal() or name == "cuda"):
        raise ArgumentError(f"{command}: device must be auto, cpu, cuda or cuda:N, got {name}. Choose one of them.")
    if int(number or 0) >= available:
        raise DeviceError(f"{command}: device must be there, got {name} with {available} CUDA devices. Choose another.")
    return f"cuda:{int(number or 0)}"
