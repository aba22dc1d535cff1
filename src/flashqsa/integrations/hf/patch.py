"""Enabling and disabling, per model or for the class, without a trace left behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any

from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError, UnsupportedError
from flashqsa.integrations.hf.forward import attention_forward
from flashqsa.integrations.hf.masks import MASK_NAME, step_mask
from flashqsa.integrations.hf.report import forget_counts

BEFORE = "flashqsa_attn_implementation"  # on an enabled text config: what it was before
NEEDED = "q_proj k_proj v_proj o_proj q_norm k_norm indexer head_dim scaling layer_idx attention_dropout".split()
NEEDED_OF_INDEXER = "index_qk_proj q_layernorm k_layernorm index_head_dim".split()

_class_forwards: dict[type, Any] = {}


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
    attentions = _checked_attentions(model, modeling)
    config = attentions[0].config
    if config._attn_implementation != MASK_NAME:
        setattr(config, BEFORE, config._attn_implementation)
        config._attn_implementation = MASK_NAME
    for attention in attentions:
        attention.forward = MethodType(attention_forward, attention)
        forget_counts(attention)
    return model


def disable(model: Any = None) -> Any:
    """Give a model, or the classes, their own forward back. Does nothing where FlashQSA is not enabled.

    Args:
        model: A model that was enabled, or None for the classes.

    Returns:
        The model.
    """
    if model is None:
        for owner, forward in _class_forwards.items():
            owner.forward = forward  # type: ignore[attr-defined]
        _class_forwards.clear()
        return None
    for attention in qsa_attentions(model):
        if isinstance(attention.__dict__.get("forward"), MethodType):
            del attention.forward
        config = attention.config
        if BEFORE in config.__dict__:
            config._attn_implementation = config.__dict__.pop(BEFORE)
    return model


@contextmanager
def enabled(model: Any = None) -> Iterator[Any]:
    """FlashQSA inside the block, what was before after it.

    Args:
        model: As in `enable`.
    """
    already = bool(_class_forwards) if model is None else _is_enabled(model)
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
    return any(BEFORE in attention.config.__dict__ for attention in qsa_attentions(model))


def _modeling() -> Any:
    try:
        from transformers.models.qwen4_exp import modeling_qwen4_exp
    except ImportError as error:
        raise UnsupportedError(
            "flashqsa.integrations.hf: transformers with qwen4_exp must be installed (5.16.1 or later), got: "
            f"{error}. Run pip install 'flashqsa[transformers]'."
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
    """Replace the forward of the attention class; the text model asks for our mask while it runs."""
    attention_class, model_class = modeling.Qwen4ExpTextAttention, modeling.Qwen4ExpTextModel
    if attention_class in _class_forwards:
        return
    _class_forwards[attention_class] = attention_class.forward
    _class_forwards[model_class] = model_forward = model_class.forward
    attention_class.forward = attention_forward

    @wraps(model_forward)
    def with_our_mask(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = self.config._attn_implementation
        self.config._attn_implementation = MASK_NAME
        try:
            return model_forward(self, *args, **kwargs)
        finally:
            self.config._attn_implementation = before

    model_class.forward = with_our_mask
