"""Enabling and disabling, per model or for the classes, without a trace left behind."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError, UnsupportedError
from flashqsa.integrations.hf.acceptance import accept
from flashqsa.integrations.hf.angles import rotary_forward
from flashqsa.integrations.hf.classes import enable_classes
from flashqsa.integrations.hf.following import unfollow_caches, users
from flashqsa.integrations.hf.forward import attention_forward
from flashqsa.integrations.hf.masks import MASK_NAME, step_mask
from flashqsa.integrations.hf.replacing import (
    BEFORE,
    class_attributes,
    replace_forward,
    restore_class_attributes,
    restore_forward,
)
from flashqsa.integrations.hf.report import forget_counts
from flashqsa.integrations.hf.settings import (
    OBSERVERS,
    OF_CLASSES,
    SETTINGS,
    Observe,
    Observer,
    Selector,
    Settings,
    checked_settings,
)

NEEDED = (
    "q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm", "indexer", "head_dim", "scaling", "layer_idx",
    "attention_dropout",
)  # fmt: skip
NEEDED_OF_INDEXER = ("index_qk_proj", "q_layernorm", "k_layernorm", "index_head_dim")


def enable(
    model: Any = None,
    *,
    selector: Selector | None = None,
    budget_tokens: int | None = None,
    capture_steps: bool = False,
) -> Any:
    """Run the QSA layers of a transformers model on FlashQSA.

    Enabling what is enabled already changes its selector and its budget to those of the last call.

    Args:
        model: A `Qwen4Exp` model, or None for every such model of this process, also those made later.
        selector: For study, a function that selects in place of the model: ``selector(context) -> block_ids``. It is
            called once a layer and forward (again where gradient checkpointing repeats a layer), without gradients,
            with a `SelectorContext`: the plan, queries, keys, the model's scores and its own selection. It returns
            [T, K] integer block ids for the T rows of the forward: ascending and unique in a row, among the blocks
            that the row sees, -1 behind the last; K is free, and rows of padding are ignored. The tail (tokens of the
            block still open) is attended always. A `Selection` is taken as well. Wrong ids raise `SelectionError`
            before anything is attended.
        budget_tokens: For study, the budget in place of the model's: a positive multiple of its block. It is what the
            model's own selection keeps; a selector is not bound by it.
        capture_steps: Replay decode steps over a dynamic cache on CUDA as one graph a layer, from the fourth step on.
            Takes less of the host's time, and memory for the graphs. The results have not been compared on a GPU with
            those of steps that run kernel by kernel.

    Returns:
        The model, for chaining.

    Raises:
        UnsupportedError: transformers is missing or has no `qwen4_exp`, or its attention is not the one known here.
        ArgumentError: The model has no QSA layer, or the selector or the budget breaks a rule. For the classes a
            budget that is no multiple of a model's block is refused when that model runs.
        ConfigError: Its configuration is not served.
    """
    settings = checked_settings(selector, budget_tokens, capture_steps)
    modeling = _modeling()
    accept(modeling)
    if model is None:
        _register_mask()
        enable_classes(modeling)
        OF_CLASSES.now = settings
        return None
    attentions = _checked_attentions(model, modeling)
    for attention in attentions:
        settings.topk_blocks(1, attention.config.indexer_compress_ratio)
    _register_mask()
    _warn_of_unused_index_weights(model, attentions)
    for attention in attentions:
        if replace_forward(attention, attention_forward, attention.config._attn_implementation):
            forget_counts(attention)
        attention.__dict__[SETTINGS] = settings
    for attention in attentions:
        attention.config._attn_implementation = MASK_NAME
    for rotary in _rotary_modules(model, modeling):
        replace_forward(rotary, rotary_forward)
    return model


def disable(model: Any = None) -> Any:
    """Give a model, or the classes, their own forward back. Does nothing where FlashQSA is not enabled.

    Args:
        model: A model that was enabled, or None for the classes.

    Returns:
        The model.
    """
    if model is None:
        restore_class_attributes()
        OF_CLASSES.now = Settings()
        for user in users():
            if BEFORE not in user.__dict__:
                unfollow_caches(user)
        return None
    modeling = _modeling()
    for attention in qsa_attentions(model):
        attention.__dict__.pop(SETTINGS, None)
        before = restore_forward(attention)
        if before is not None and attention.config._attn_implementation == MASK_NAME:
            attention.config._attn_implementation = before.implementation
        if not class_attributes:
            unfollow_caches(attention)
    for rotary in _rotary_modules(model, modeling):
        restore_forward(rotary)
    return model


@contextmanager
def enabled(
    model: Any = None,
    *,
    selector: Selector | None = None,
    budget_tokens: int | None = None,
    capture_steps: bool = False,
) -> Iterator[Any]:
    """FlashQSA inside the block, what was before after it.

    Args:
        model: As in `enable`.
        selector: As in `enable`.
        budget_tokens: As in `enable`.
        capture_steps: As in `enable`.
    """
    before = _settings_now(model)
    enable(model, selector=selector, budget_tokens=budget_tokens, capture_steps=capture_steps)
    try:
        yield model
    finally:
        if before is None:
            disable(model)
        else:
            enable(
                model,
                selector=before.selector,
                budget_tokens=before.budget_tokens,
                capture_steps=before.capture_steps,
            )


def _settings_now(model: Any) -> Settings | None:
    """What a model, or the classes, are enabled with; None where they are not."""
    if model is None:
        return OF_CLASSES.now if class_attributes else None
    return next((a.__dict__[SETTINGS] for a in qsa_attentions(model) if SETTINGS in a.__dict__), None)


@contextmanager
def observed(model: Any, observe: Observe, *, scores: bool = False) -> Iterator[None]:
    """Tell someone, inside the block, what each QSA layer of a model selects; FlashQSA is enabled for it if need be.

    Args:
        model: A `Qwen4Exp` model.
        observe: Called once a layer and forward with the `SelectorContext` and the `Selection` that is attended.
        scores: Whether the model's own selections must bring scores.

    Raises:
        ArgumentError, UnsupportedError, ConfigError: As `enable`.
    """
    observer = Observer(observe, scores)
    runs = OF_CLASSES.now if class_attributes else _settings_now(model)
    with nullcontext() if runs is not None else enabled(model):
        attentions = qsa_attentions(model)
        for attention in attentions:
            attention.__dict__[OBSERVERS] = (*attention.__dict__.get(OBSERVERS, ()), observer)
        try:
            yield
        finally:
            for attention in attentions:
                left = tuple(other for other in attention.__dict__.pop(OBSERVERS, ()) if other is not observer)
                if left:
                    attention.__dict__[OBSERVERS] = left


def qsa_layers(model: Any) -> tuple[int, tuple[int, ...]]:
    """Tokens of a block, and the layer ids of a model's QSA layers.

    Raises:
        ArgumentError, UnsupportedError, ConfigError: As `enable`.
    """
    attentions = _checked_attentions(model, _modeling())
    return attentions[0].config.indexer_compress_ratio, tuple(attention.layer_idx for attention in attentions)


def qsa_attentions(model: Any) -> list[Any]:
    """The QSA attention modules of a model, by layer."""
    attention_class = _modeling().Qwen4ExpTextAttention
    return [module for module in model.modules() if isinstance(module, attention_class)]


def _rotary_modules(model: Any, modeling: Any) -> list[Any]:
    """The rotary modules of the text models in a model; none in an attention alone."""
    return [module for module in model.modules() if isinstance(module, modeling.Qwen4ExpTextRotaryEmbedding)]


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


def _warn_of_unused_index_weights(model: Any, attentions: list[Any]) -> None:
    """An indexer in a layer of another class would be ignored without a word, and that layer stays as it is."""
    known = {id(attention.indexer) for attention in attentions}
    strays = [
        name for name, module in model.named_modules() if "index_qk_proj" in module._modules and id(module) not in known
    ]
    if strays:
        warnings.warn(
            f"enable: index weights must belong to a Qwen4ExpTextAttention, got {len(strays)} modules with others, "
            f"{strays[0]} the first. FlashQSA leaves their layers as they are.",
            stacklevel=3,
        )
