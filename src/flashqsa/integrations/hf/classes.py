"""Enabling for the classes: every model of a process runs on FlashQSA, also those made later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from threading import Lock
from typing import Any

import torch

from flashqsa.integrations.hf.angles import rotary_forward
from flashqsa.integrations.hf.forward import attention_forward
from flashqsa.integrations.hf.masks import MASK_NAME
from flashqsa.integrations.hf.replacing import OF_CLASS, class_attributes, own_attribute, replace_class_attribute


def enable_classes(modeling: Any) -> None:
    """Replace the attention's forward; our mask is asked for while the text model runs, and when `generate` plans.

    Args:
        modeling: transformers' module of the model.
    """
    if class_attributes:
        return
    _replace_forward(modeling.Qwen4ExpTextAttention, attention_forward)
    _replace_forward(modeling.Qwen4ExpTextRotaryEmbedding, rotary_forward)
    _replace_forward(modeling.Qwen4ExpTextModel, _with_our_mask(modeling.Qwen4ExpTextModel.forward))
    for name in ("Qwen4ExpPreTrainedModel", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"):
        _replace_mask_planning(getattr(modeling, name))


def _replace_forward(owner: type, ours: Callable[..., Any]) -> None:
    """What hooks keep of an enabled class, for good, serves a class that is not enabled any longer as well."""

    @torch.compiler.disable(recursive=False)  # type: ignore  # what it calls may be compiled
    @wraps(vars(owner)["forward"])
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        serves = ours if class_attributes else own_attribute(owner, "forward")
        return serves(self, *args, **kwargs)

    setattr(forward, OF_CLASS, True)
    replace_class_attribute(owner, "forward", forward)


def _with_our_mask(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _our_mask(self.config):
            return model_forward(self, *args, **kwargs)

    return forward


def _replace_mask_planning(owner: type) -> None:
    """`generate` calls it for static caches; some versions have one of their own in the classes that generate."""
    from transformers import masking_utils

    name = "create_masks_for_generate"
    if name in vars(owner):
        theirs = getattr(owner, name)
    elif any(name in vars(base) for base in owner.__mro__):
        return  # replaced where it is
    else:
        theirs = masking_utils.create_masks_for_generate

    def with_our_mask(config: Any, *args: Any, **kwargs: Any) -> Any:
        with _our_mask(config.get_text_config()):
            return theirs(config, *args, **kwargs)

    replace_class_attribute(owner, name, staticmethod(with_our_mask))


@dataclass
class _Running:
    """A config with which forwards run at the moment, maybe in several threads.

    Attributes:
        config: The config, which must not go while its id stands for it.
        before: Its attention implementation outside them.
        forwards: How many.
    """

    config: Any
    before: str | None
    forwards: int = 0


_running: dict[int, _Running] = {}
_changing = Lock()


@contextmanager
def _our_mask(config: Any) -> Iterator[None]:
    """The first forward that comes puts our name into the config, the last that goes takes it out."""
    with _changing:
        running = _running.setdefault(id(config), _Running(config, config._attn_implementation))
        running.forwards += 1
        config._attn_implementation = MASK_NAME
    try:
        yield
    finally:
        with _changing:
            running.forwards -= 1
            if not running.forwards:
                config._attn_implementation = running.before
                del _running[id(config)]
