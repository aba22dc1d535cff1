"""The tokenizer of the small random checkpoint: a token is a byte, plus what a chat needs."""

from __future__ import annotations

import json
from pathlib import Path

BYTE_COUNT = 256
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID = BYTE_COUNT
END_OF_TURN_ID = BYTE_COUNT + 2

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def write_tokenizer(directory: Path, *, model_max_length: int) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`; byte `b` is token id `b`.

    Args:
        directory: An existing directory.
        model_max_length: Longest input that the tokenizer takes without a warning.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    pad, _, end_of_turn = SPECIAL_TOKENS
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": pad,
        "eos_token": end_of_turn,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": model_max_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def _byte_characters() -> list[str]:
    """The visible character that byte-level tokenizers write for each byte.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, take the characters from 256 on.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    characters = []
    substitute = BYTE_COUNT
    for byte in range(BYTE_COUNT):
        characters.append(chr(byte) if byte in printable else chr(substitute))
        substitute += byte not in printable
    return characters
