"""How an enabled layer selects: as the model does, with another budget, or by a caller's function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashqsa.errors import ArgumentError
from flashqsa.results import Selection

if TYPE_CHECKING:
    import torch

    from flashqsa.integrations.hf.selector import SelectorContext

SETTINGS = "flashqsa_settings"  # on an enabled attention: what it was enabled with
OBSERVERS = "flashqsa_observers"  # on an observed attention: who is told what it selected

Selector = Callable[["SelectorContext"], "torch.Tensor | Selection"]
Observe = Callable[["SelectorContext", Selection], None]


@dataclass(frozen=True)
class Settings:
    """What `enable` was called with.

    Attributes:
        selector: Function that selects in place of the model, or None.
        budget_tokens: Budget in place of the model's, or None.
        capture_steps: Whether decode steps are replayed as CUDA graphs.
    """

    selector: Selector | None = None
    budget_tokens: int | None = None
    capture_steps: bool = False

    def topk_blocks(self, model_topk_blocks: int, block_tokens: int) -> int:
        """Blocks that a row selects at most.

        Args:
            model_topk_blocks: What the model was made for.
            block_tokens: Tokens of a block.

        Raises:
            ArgumentError: The budget is no multiple of a block.
        """
        if self.budget_tokens is None:
            return model_topk_blocks
        if self.budget_tokens % block_tokens:
            raise ArgumentError(
                f"enable: budget_tokens must be a multiple of the model's blocks of {block_tokens} tokens, got "
                f"{self.budget_tokens}. Round it; whole blocks are selected."
            )
        return self.budget_tokens // block_tokens


@dataclass(frozen=True)
class Observer:
    """Someone who is told what a layer selected.

    Attributes:
        tell: Called with what the layer selected from, and with what it selected.
        wants_scores: Whether the selection must bring scores.
    """

    tell: Observe
    wants_scores: bool = False


@dataclass
class _ClassSettings:
    """Settings of the layers of models that are not enabled themselves."""

    now: Settings = field(default_factory=Settings)


OF_CLASSES = _ClassSettings()


def settings_of(attention: Any) -> Settings:
    """What an attention was enabled with, by its model or by its class."""
    own: Settings | None = attention.__dict__.get(SETTINGS)
    return OF_CLASSES.now if own is None else own


def checked_settings(selector: Selector | None, budget_tokens: int | None, capture_steps: bool) -> Settings:
    """The settings, as far as they can be checked without a model.

    Raises:
        ArgumentError: The selector cannot be called, the budget is no positive number of tokens, or `capture_steps` is
            neither True nor False.
    """
    if selector is not None and not callable(selector):
        raise ArgumentError(
            f"enable: selector must be a function of a SelectorContext, got {type(selector).__name__}. "
            "Pass a callable that returns block ids."
        )
    is_number = isinstance(budget_tokens, int) and not isinstance(budget_tokens, bool)
    if budget_tokens is not None and not (is_number and budget_tokens > 0):
        raise ArgumentError(
            f"enable: budget_tokens must be a positive number of tokens, got {budget_tokens!r}. "
            "Pass a multiple of the model's indexer_compress_ratio."
        )
    if not isinstance(capture_steps, bool):
        raise ArgumentError(
            f"enable: capture_steps must be True or False, got {capture_steps!r}. Leave it out to run steps one by one."
        )
    return Settings(selector, budget_tokens, capture_steps)
