"""The prompt of `flashqsa generate`: from the command line, from a file, or drawn at random."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashqsa.errors import ArgumentError

STANDARD_INPUT = "-"


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """What the user asked for.

    Attributes:
        text: The prompt itself, or None.
        file: A UTF-8 file that holds it, `-` for standard input, or None.
        random_tokens: How many tokens to draw instead, or None.
        seed: Decides the drawn tokens; None for 0. Of drawn tokens only.
        chat: Whether the text is a user's turn in the checkpoint's chat template; None where it has one.
    """

    text: str | None = None
    file: Path | None = None
    random_tokens: int | None = None
    seed: int | None = None
    chat: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What the model gets.

    Attributes:
        token_ids: The tokens.
        source: `text`, `file` or `random`.
        chat: Whether the chat template was applied.
        seed: Of a random prompt; None for others.
    """

    token_ids: tuple[int, ...]
    source: str
    chat: bool = False
    seed: int | None = None


def check_prompt_options(options: PromptOptions) -> None:
    """Checks what can be checked without the checkpoint.

    Raises:
        ArgumentError: There is not exactly one source, or an option breaks a rule or does not fit the source.
    """
    named = {"--prompt": options.text, "--prompt-file": options.file, "--random-tokens": options.random_tokens}
    given = [name for name, value in named.items() if value is not None]
    if len(given) != 1:
        raise ArgumentError(
            f"generate: exactly one of {', '.join(named)} must be given, got {' and '.join(given) or 'none'}. "
            "Choose where the prompt comes from."
        )
    if options.random_tokens is not None and options.random_tokens < 1:
        raise ArgumentError(
            f"generate: random-tokens must be at least 1, got {options.random_tokens}. Choose another value."
        )
    if options.seed is not None and options.random_tokens is None:
        raise ArgumentError(
            f"generate: seed must come with --random-tokens, got {options.seed} with {given[0]}. Leave it out; "
            "nothing else is drawn."
        )
    check_seed(options.seed or 0)
    check_text("prompt", options.text)
    if options.random_tokens is not None and options.chat:
        raise ArgumentError("generate: chat must be off for random tokens, got --chat. Leave it out, or pass a text.")


def check_seed(seed: int) -> None:
    """Checks a seed of torch's generators.

    Raises:
        ArgumentError: They do not take it.
    """
    if not 0 <= seed < 1 << 63:
        raise ArgumentError(f"generate: seed must be at least 0 and below 2^63, got {seed}. Choose another value.")


def check_text(name: str, text: str | None) -> None:
    """Checks a text that a user gave on the command line; None for none.

    Raises:
        ArgumentError: Its bytes were no UTF-8.
    """
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError as error:
        raise ArgumentError(
            f"generate: {name} must be UTF-8, got {text!r}, character {error.start} of which is not. "
            "Write it into a UTF-8 file, or change the terminal's encoding."
        ) from error


def make_prompt(options: PromptOptions, tokenizer: Any | None, *, vocab_size: int, stop_ids: Collection[int]) -> Prompt:
    """Turns the checked options into tokens.

    Args:
        options: What the user asked for.
        tokenizer: Of the checkpoint, or None when it has none.
        vocab_size: Rows of the model's embedding.
        stop_ids: Tokens that no random prompt holds.

    Raises:
        ArgumentError: The text is empty or unreadable, or needs a tokenizer or a chat template that is not there.
    """
    if options.random_tokens is not None:
        seed = options.seed or 0
        token_ids = _draw(options.random_tokens, seed, tokenizer, vocab_size, stop_ids)
        return Prompt(token_ids=token_ids, source="random", seed=seed)
    source = "text" if options.text is not None else "file"
    text = options.text if options.text is not None else _read_text(options.file or Path())
    if not text.strip():
        raise ArgumentError(f"generate: the prompt must hold text, got an empty {source}. Pass some.")
    if tokenizer is None:
        raise ArgumentError(
            "generate: checkpoint must hold a tokenizer for a prompt of text, got none. Add its files, or pass "
            "--random-tokens."
        )
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if options.chat and not has_template:
        raise ArgumentError("generate: checkpoint must hold a chat template for --chat, got none. Pass --no-chat.")
    chat = has_template if options.chat is None else options.chat
    token_ids = _encode(tokenizer, text, chat)
    if not token_ids or max(token_ids) >= vocab_size:
        raise ArgumentError(
            f"generate: the prompt's tokens must be ids below the model's {vocab_size}, got "
            f"{max(token_ids, default='no token')}. The tokenizer is of another model: fetch the checkpoint again."
        )
    return Prompt(token_ids=token_ids, source=source, chat=chat)


def _read_text(file: Path) -> str:
    try:
        if str(file) == STANDARD_INPUT:
            return sys.stdin.buffer.read().decode("utf-8")
        return file.read_text(encoding="utf-8")
    except OSError as error:
        told = error.strerror or error
    except UnicodeDecodeError as error:
        told = f"byte {error.start} is not UTF-8"
    raise ArgumentError(
        f"generate: prompt-file must be a readable text file, got {file} ({told}). Choose another file."
    )


def _encode(tokenizer: Any, text: str, chat: bool) -> tuple[int, ...]:
    if not chat:
        return tuple(tokenizer(text)["input_ids"])
    import jinja2

    turns = [{"role": "user", "content": text}]
    try:
        whole = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    except jinja2.TemplateError as error:
        raise ArgumentError(
            f"generate: the checkpoint's chat template must take one user's turn, got: {error}. Pass --no-chat."
        ) from error
    return tuple(tokenizer(whole, add_special_tokens=False)["input_ids"])


def _draw(count: int, seed: int, tokenizer: Any | None, vocab_size: int, stop_ids: Collection[int]) -> tuple[int, ...]:
    """Random ordinary tokens: those that the tokenizer knows, without its special ones."""
    known, special = vocab_size, set(stop_ids)
    if tokenizer is not None:
        known = min(vocab_size, len(tokenizer))
        special |= set(tokenizer.all_special_ids)
    ordinary = torch.tensor([token_id for token_id in range(known) if token_id not in special])
    places = torch.randint(len(ordinary), (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(ordinary[places].tolist())
