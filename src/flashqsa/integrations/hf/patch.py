"""Enabling and disabling, per model or for the classes, without a trace left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError, UnsupportedError
from flashqsa.integrations.hf.forward import attention_forward
from flashqsa.integrations.hf.masks import MASK_NAME, step_mask
from flashqsa.integrations.hf.report import forget_counts

BEFORE = "flashqsa_before"  # on an enabled attention: what `disable` puts back
HOOKED = "_old_forward"  # where accelerate's hooks keep the forward that they wrap
NEEDED = (
    "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "indexer", "head_dim", "scaling", "layer_idx",
    "attention_dropout",
)  # fmt: skip
NEEDED_OF_INDEXER = ("index_qk_proj", "q_layernorm", "k_layernorm", "index_head_dim")

_class_attributes: dict[tuple[type, str], Any] = {}
"""What the classes had in their own namespace where FlashQSA has something now; None where they had nothing."""


@dataclass(frozen=True)
class _Before:
    """One attention module before it was enabled.

    Attributes:
        forward: The forward of the instance, or None where its class's served.
        implementation: `_attn_implementation` of its config.
    """

    forward: Any
    implementation: str | None


def enable(model: Any = None) -> Any:
    """Run the QSA layers of a transformers model on FlashQSA.

    Args:
        model: A `Qwen4Exp` model, or None for every such model of this process, also those made later.

    Returns:
        The model, for chaining.

    Raises:
        UnsupportedError: transformers is missing or has no `qwen4_exp`, or its attention is not the one known here.
        ArgumentError: The model has no QSA layer.
        ConfigError: Its configuration is not served.
    """
    modeling = _modeling()
    _register_mask()
    if model is None:
        _enable_classes(modeling)
        return None
    for attention in _checked_attentions(model, modeling):
        _enable_attention(attention)
    for attention in qsa_attentions(model):
        attention.config._attn_implementation = MASK_NAME
    return model


def disable(model: Any = None) -> Any:
    """Give a model, or the classes, their own forward back. Does nothing where FlashQSA is not enabled.

    Args:
        model: A model that was enabled, or None for the classes.

    Returns:
        The model.
    """
    if model is None:
        for (owner, name), value in _class_attributes.items():
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        _class_attributes.clear()
        return None
    for attention in qsa_attentions(model):
        _disable_attention(attention)
    return model


@contextmanager
def enabled(model: Any = None) -> Iterator[Any]:
    """FlashQSA inside the block, what was before after it.

    Args:
        model: As in `enable`.
    """
    already = bool(_class_attributes) if model is None else _is_enabled(model)
    enable(model)
    try:
        yield model
    finally:
        if not already:
            disable(model)


def qsa_attentions(model: Any) -> list[Any]:
    """The QSA attention modules of a model, by layer."""
    attention_class = _modeling().Qwen4ExpTextAttention
    return [module for module in model.modules() if isinstance(module, attention_class)]


def _is_enabled(model: Any) -> bool:
    return any(BEFORE in attention.__dict__ for attention in qsa_attentions(model))


def _enable_attention(attention: Any) -> None:
    """Replace the forward of one module, inside the hooks that it may have."""
    if BEFORE in attention.__dict__:
        return
    name = HOOKED if HOOKED in attention.__dict__ else "forward"
    before = _Before(attention.__dict__.get(name), attention.config._attn_implementation)
    attention.__dict__[BEFORE] = before
    setattr(attention, name, partial(attention_forward, attention))
    forget_counts(attention)


def _disable_attention(attention: Any) -> None:
    """Undo `_enable_attention`, also where hooks came or went in the meantime."""
    before: _Before | None = attention.__dict__.pop(BEFORE, None)
    if before is None:
        return
    if attention.config._attn_implementation == MASK_NAME:
        attention.config._attn_implementation = before.implementation
    for name in (HOOKED, "forward"):
        if getattr(attention.__dict__.get(name), "func", None) is not attention_forward:
            continue
        if before.forward is None and name == "forward":
            del attention.forward
        else:
            setattr(attention, name, before.forward or MethodType(type(attention).forward, attention))


def _modeling() -> Any:
    try:
        from transformers.models.qwen4_exp import modeling_qwen4_exp
    except ImportError as error:
        raise UnsupportedError(
            "flashqsa.integrations.hf: transformers must be installed with qwen4_exp (5.16.1 or later), got "
            f"{type(error).__name__}: {error}. Run pip install 'flashqsa[transformers]'."
        ) from error
    return modeling_qwen4_exp


def _register_mask() -> None:
    from transformers import AttentionMaskInterface

    AttentionMaskInterface.register(MASK_NAME, step_mask)


def _checked_attentions(model: Any, modeling: Any) -> list[Any]:
    attentions = qsa_attentions(model)
    if not attentions:
        raise ArgumentError(
            f"enable: model must have Qwen4ExpTextAttention layers, got {type(model).__name__} without one. "
            "FlashQSA serves qwen4_exp models."
        )
    for attention in attentions:
        missing = [name for name in NEEDED if not hasattr(attention, name)]
        missing += [f"indexer.{n}" for n in NEEDED_OF_INDEXER if not hasattr(getattr(attention, "indexer", None), n)]
        if missing:
            raise UnsupportedError(
                f"enable: {modeling.__name__}.Qwen4ExpTextAttention must have {', '.join(missing)}, got a version "
                "without. Use a transformers version that this release names."
            )
    QSAConfig.from_pretrained_config(attentions[0].config)
    return attentions


def _enable_classes(modeling: Any) -> None:
    """Replace the attention's forward; our mask is asked for while the text model runs, and when `generate` plans."""
    if _class_attributes:
        return
    model_class = modeling.Qwen4ExpTextModel
    model_forward = model_class.forward

    @wraps(model_forward)
    def forward_with_our_mask(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _our_mask(self.config):
            return model_forward(self, *args, **kwargs)

    _replace(modeling.Qwen4ExpTextAttention, "forward", attention_forward)
    _replace(model_class, "forward", forward_with_our_mask)
    for name in ("Qwen4ExpPreTrainedModel", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"):
        _replace_mask_planning(getattr(modeling, name))


def _replace(owner: type, name: str, value: Any) -> None:
    _class_attributes[owner, name] = vars(owner).get(name)
    setattr(owner, name, value)


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

    _replace(owner, name, staticmethod(with_our_mask))


@contextmanager
def _our_mask(config: Any) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = MASK_NAME
    try:
        yield
    finally:
        config._attn_implementation = before
