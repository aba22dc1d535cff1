"""Loading what `flashqsa generate` runs from a checkpoint folder, with one clear sentence for each way to fail."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from flashqsa.errors import ConfigError, UnsupportedError

DTYPES = ("auto", "float32", "bfloat16", "float16")

SILENCED = (
    "is falling back to its reference PyTorch implementation",
    "The fast path is not available because one of the required library is not installed",
    "LOAD REPORT",
)
"""Messages of transformers: hints at other libraries' kernels, and the table that `load_model` puts in a sentence."""


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps the messages in `SILENCED` and the loading bar off the terminal, and nothing else."""
    from transformers.utils import logging as transformers_logging

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not any(part in message for part in SILENCED)

    transformers_logging.get_logger("transformers")  # it has its handler from the first logger on
    handlers = list(logging.getLogger("transformers").handlers)
    bar_shown = transformers_logging.is_progress_bar_enabled()
    for handler in handlers:
        handler.addFilter(keep)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(keep)
        if bar_shown:
            transformers_logging.enable_progress_bar()


def load_text_config(checkpoint: Path) -> Any:
    """The text model's configuration as transformers reads it.

    Raises:
        ConfigError: transformers does not read it.
        UnsupportedError: transformers does not know the architecture.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, __version__

    if "qwen4_exp" not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"generate: transformers must know qwen4_exp, got version {__version__}. Install 5.16.1 or later."
        )
    config = _read(checkpoint, "config.json", lambda: AutoConfig.from_pretrained(checkpoint, local_files_only=True))
    return config.get_text_config()


def load_tokenizer(checkpoint: Path) -> Any | None:
    """The tokenizer of a checkpoint, or None when it has none.

    Raises:
        ConfigError: Its files are damaged or incomplete.
    """
    from transformers import AutoTokenizer

    if not any(checkpoint.glob("tokenizer*")):
        return None
    return _read(checkpoint, "a tokenizer", lambda: AutoTokenizer.from_pretrained(checkpoint, local_files_only=True))


def load_stop_ids(checkpoint: Path, text_config: Any) -> tuple[int, ...]:
    """The tokens that end a text: of `generation_config.json` where it names any, else of the configuration.

    Raises:
        ConfigError: The file is damaged.
    """
    from transformers import GenerationConfig

    named = None
    if (checkpoint / "generation_config.json").exists():
        how = _read(
            checkpoint,
            "a generation_config.json",
            lambda: GenerationConfig.from_pretrained(checkpoint, local_files_only=True),
        )
        named = how.eos_token_id
    named = text_config.eos_token_id if named is None else named
    return tuple(named) if isinstance(named, list) else () if named is None else (int(named),)


def load_model(checkpoint: Path, *, dtype: str, device: torch.device) -> tuple[Any, tuple[str, ...]]:
    """The causal language model of a checkpoint, in evaluation mode.

    Args:
        checkpoint: Its folder.
        dtype: One of `DTYPES`; `auto` is the checkpoint's own.
        device: Where to put it.

    Returns:
        The model, and the names of the checkpoint's tensors that it has no use for.

    Raises:
        ConfigError: The weights are missing, damaged, incomplete or of other shapes than the configuration's.
    """
    from transformers import AutoModelForCausalLM

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(
            checkpoint,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            local_files_only=True,
        )

    model, loaded = _read(checkpoint, "weights that fit its config.json", load)
    for rule, names in (
        ("hold all weights", loaded["missing_keys"]),
        ("hold weights of its config.json's shapes", [name for name, *_ in loaded["mismatched_keys"]]),
    ):
        if names:
            raise ConfigError(
                f"generate: checkpoint must {rule}, got {checkpoint} with {len(names)} that break this, such as "
                f"{min(names)}. Fetch or convert it again."
            )
    return model.eval().to(device), tuple(sorted(loaded["unexpected_keys"]))


def _read(checkpoint: Path, what: str, load: Callable[[], Any]) -> Any:
    """Calls one of transformers' loaders, whose failures have many types and several lines."""
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError

    try:
        return load()
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        told = " ".join(str(error).split())
        reason = f"{type(error).__name__}: {told}" if len(told) < 240 else f"{type(error).__name__}: {told[:240]}…"
        raise ConfigError(
            f"generate: checkpoint must hold {what}, got {checkpoint} with ({reason}). Fetch or convert it again."
        ) from error
