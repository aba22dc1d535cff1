"""The prompts of `flashqsa needle`: filler with a needle in it, and a question behind it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashqsa.errors import ArgumentError

NEEDLE = "\nThe password of the lighthouse keeper is 48213.\n"
QUESTION = "\nWhat is the password of the lighthouse keeper? The password of the lighthouse keeper is"
FILLER = (
    "The morning train was late again, and nobody on the platform seemed to mind.",
    "Bread keeps best in a cool, dry place, wrapped in a clean cloth.",
    "She painted the fence green, then thought that blue would have been better.",
    "Rivers carry sand to the sea, a little every day, for a very long time.",
    "The library closes early on Fridays, except in winter.",
    "He counted the steps up to the tower and lost his place near the top.",
    "A good map shows what matters to its reader and leaves out the rest.",
    "The cat slept through the thunderstorm and woke when the rain had stopped.",
    "Old clocks need winding once a week, always on the same day.",
    "They planted apple trees along the road where the wall used to be.",
    "The recipe asks for two onions, but one large one will do.",
    "From the hill one sees three villages and, on clear days, the coast.",
    "The children built a bridge of planks over the ditch behind the school.",
    "Most of the letters were never sent, and some were never finished.",
    "Copper roofs turn green with the years, which many people like.",
    "The market moves indoors when the wind comes from the north.",
)
RANDOM_NEEDLE_TOKENS, RANDOM_QUESTION_TOKENS = 16, 12
"""Without a tokenizer: tokens of a random needle at least (and 4 blocks), and how many of its first ones (at least, and
3 blocks) are repeated as the question."""

_SIZE = re.compile(r"(\d+)([kKmM]?)")
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


@dataclass(frozen=True, kw_only=True)
class Haystack:
    """What prompts are made of, as tokens.

    Attributes:
        needle: What is to be found.
        question: What comes last; its last rows have to find it.
        filler: What the rest is made of, repeated as often as needed.
        source: `text`, `file` or `random`: where the filler came from.
    """

    needle: tuple[int, ...]
    question: tuple[int, ...]
    filler: tuple[int, ...]
    source: str


@dataclass(frozen=True, kw_only=True)
class Plant:
    """One prompt.

    Attributes:
        context: Its tokens.
        depth: Where the needle lies, in percent of the filler before it.
        first_token: Position of the needle's first token.
        token_ids: All of it.
    """

    context: int
    depth: float
    first_token: int
    token_ids: tuple[int, ...]


def parse_contexts(text: str, *, command: str = "needle") -> tuple[int, ...]:
    """Context lengths such as `4k,32k,100000`: tokens, k for 1,024 and m for 1,048,576 of them.

    Args:
        text: The lengths, separated by commas.
        command: Name of the sub-command, first in the message.

    Raises:
        ArgumentError: One of them is no such number.
    """
    contexts = []
    for word in text.split(","):
        match = _SIZE.fullmatch(word.strip())
        if not match or int(match[1]) < 1:
            raise ArgumentError(
                f"{command}: contexts must be numbers of tokens such as 4k,32k, got {word.strip() or 'an empty one'}. "
                "Separate them by commas."
            )
        contexts.append(int(match[1]) * _UNITS[match[2].lower()])
    return tuple(dict.fromkeys(contexts))


def parse_depths(text: str) -> tuple[float, ...]:
    """Depths in percent such as `0,25,50`.

    Raises:
        ArgumentError: One of them is no number from 0 to 100.
    """
    depths = []
    for word in text.split(","):
        try:
            depth = float(word)
        except ValueError:
            depth = -1.0
        if not 0 <= depth <= 100:
            raise ArgumentError(
                f"needle: depths must be percentages from 0 to 100, got {word.strip() or 'an empty one'}. "
                "Separate them by commas."
            )
        depths.append(depth)
    return tuple(dict.fromkeys(depths))


def make_haystack(
    tokenizer: Any | None,
    *,
    needle: str | None,
    question: str | None,
    filler_file: Path | None,
    seed: int,
    block_tokens: int,
    vocab_size: int,
    stop_ids: Collection[int],
) -> Haystack:
    """Turns texts into tokens; without a tokenizer draws them.

    Args:
        tokenizer: Of the checkpoint, or None when it has none.
        needle: Its text, or None for `NEEDLE`.
        question: Its text, or None for `QUESTION`.
        filler_file: A UTF-8 file, or None for sentences in random order.
        seed: Decides the order of the sentences, or the drawn tokens.
        block_tokens: Tokens of a block.
        vocab_size: Rows of the model's embedding.
        stop_ids: Tokens that are not drawn.

    Raises:
        ArgumentError: A text is empty or unreadable, or needs a tokenizer that is not there.
    """
    generator = torch.Generator().manual_seed(seed)
    if tokenizer is None:
        if needle is not None or question is not None or filler_file is not None:
            raise ArgumentError(
                "needle: checkpoint must hold a tokenizer for texts, got none. Add its files, or leave out --needle, "
                "--question and --filler-file."
            )
        return _random_haystack(block_tokens, vocab_size, stop_ids, generator)

    def tokens(name: str, text: str) -> tuple[int, ...]:
        token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if not text.strip() or not token_ids or max(token_ids) >= vocab_size:
            raise ArgumentError(
                f"needle: {name} must hold text whose tokens are ids below {vocab_size}, got "
                f"{max(token_ids, default='none')}. Pass some text, with the model's own tokenizer."
            )
        return token_ids

    if filler_file is None:
        order = torch.randint(len(FILLER), (512,), generator=generator)
        filler = "".join(f" {FILLER[i]}" for i in order.tolist())
    else:
        filler = _read_text(filler_file)
    return Haystack(
        needle=tokens("needle", NEEDLE if needle is None else needle),
        question=tokens("question", QUESTION if question is None else question),
        filler=tokens("filler-file" if filler_file else "filler", filler),
        source="text" if filler_file is None else "file",
    )


def plant(haystack: Haystack, context: int, depth: float) -> Plant:
    """Puts the needle into the filler.

    Args:
        haystack: What the prompt is made of.
        context: Its tokens.
        depth: Percent of the filler that comes before the needle.

    Raises:
        ArgumentError: The context is too short.
    """
    room = context - len(haystack.needle) - len(haystack.question)
    if room < 1:
        raise ArgumentError(
            f"needle: contexts must be longer than needle and question, {context - room} tokens, got {context}. "
            "Choose longer ones."
        )
    repeated = haystack.filler * -(-room // len(haystack.filler))
    first_token = round(room * depth / 100)
    token_ids = (*repeated[:first_token], *haystack.needle, *repeated[first_token:room], *haystack.question)
    return Plant(context=context, depth=depth, first_token=first_token, token_ids=token_ids)


def _random_haystack(
    block_tokens: int, vocab_size: int, stop_ids: Collection[int], generator: torch.Generator
) -> Haystack:
    ordinary: Sequence[int] = [token_id for token_id in range(vocab_size) if token_id not in set(stop_ids)]
    order = torch.randperm(len(ordinary), generator=generator).tolist()
    needle = tuple(ordinary[i] for i in order[: max(RANDOM_NEEDLE_TOKENS, 4 * block_tokens)])
    drawn = torch.randint(len(ordinary), (4096,), generator=generator).tolist()
    filler = tuple(ordinary[i] for i in drawn)
    return Haystack(
        needle=needle, question=needle[: max(RANDOM_QUESTION_TOKENS, 3 * block_tokens)], filler=filler, source="random"
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        told = str(error.strerror or error)
    except UnicodeDecodeError as error:
        told = f"byte {error.start} is not UTF-8"
    raise ArgumentError(f"needle: filler-file must be a readable text file, got {file} ({told}). Choose another file.")
