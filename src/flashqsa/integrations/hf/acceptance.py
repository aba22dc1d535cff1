"""Which transformers is served: one whose QSA attention takes the known arguments and computes the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashqsa.errors import UnsupportedError
from flashqsa.integrations.hf.angles import NeededAngles
from flashqsa.integrations.hf.following import unfollow_caches
from flashqsa.integrations.hf.forward import attention_forward
from flashqsa.integrations.hf.masks import step_mask
from flashqsa.integrations.hf.replacing import own_attribute, own_forward

CACHE_NAMES = ("cache", "past_key_values")  # since 5.18, and before
ARGUMENTS: dict[str, tuple[str | tuple[str, ...], ...]] = {
    "Qwen4ExpTextAttention": ("hidden_states", "position_embeddings", "attention_mask", CACHE_NAMES),
    "Qwen4ExpTextRotaryEmbedding": ("x", "position_ids"),
}
PROMPT, DECODED = 21, 2
TOLERANCE = 1e-4
"""Of the largest output; fp32 rounding stays 100 times below it, another formula far above."""

_accepted: set[Any] = set()


def accept(modeling: Any) -> None:
    """Raise unless transformers' layer is the one that FlashQSA computes; looked at once a process.

    Random numbers, default dtype and device of the caller are left as they are.

    Args:
        modeling: transformers' module of the model.

    Raises:
        UnsupportedError: Naming what differs.
    """
    if modeling in _accepted:
        return
    for name, arguments in ARGUMENTS.items():
        _check_arguments(modeling, name, arguments)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
        difference = _difference(modeling)
    if not difference <= TOLERANCE:  # NaN as well
        raise UnsupportedError(
            f"enable: Qwen4ExpTextAttention of {_version()} must compute what FlashQSA computes, got outputs of a tiny "
            f"layer that differ by {difference:.1e} of their size. {_remedy()}"
        )
    _accepted.add(modeling)


def _check_arguments(modeling: Any, name: str, arguments: tuple[str | tuple[str, ...], ...]) -> None:
    """A forward takes the known arguments first, and no other that it needs."""
    owner = getattr(modeling, name, None)
    if owner is None:
        raise UnsupportedError(f"enable: {modeling.__name__} must have {name}, got {_version()} without. {_remedy()}")
    signature = inspect.signature(own_attribute(owner, "forward"))
    parameters = list(signature.parameters.values())[1:]
    known, rest = parameters[: len(arguments)], parameters[len(arguments) :]
    fits = len(known) == len(arguments) and all(
        p.name in ((names,) if isinstance(names, str) else names) for p, names in zip(known, arguments, strict=True)
    )
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    if not fits or any(p.default is p.empty and p.kind not in variable for p in rest):
        wanted = ", ".join(names if isinstance(names, str) else " or ".join(names) for names in arguments)
        got = ", ".join(p.name for p in parameters)
        raise UnsupportedError(f"enable: {name}.forward of {_version()} must take ({wanted}), got ({got}). {_remedy()}")


def _difference(modeling: Any) -> float:
    """Largest difference of the two forwards on a prompt and on tokens after it, as a share of the largest output."""
    config, attention, tables = _tiny_layer(modeling)
    stock = inspect.signature(own_attribute(type(attention), "forward"))
    cache_name = next(name for name in CACHE_NAMES if name in stock.parameters)
    hidden = torch.randn(1, PROMPT + DECODED, config.hidden_size, generator=_generator(1), dtype=torch.float32)
    try:
        theirs = _run(config, hidden, own_forward(attention), cache_name, tables, ours=False)
        mine = _run(config, hidden, partial(attention_forward, attention), cache_name, tables, ours=True)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"enable: Qwen4ExpTextAttention of {_version()} must run a tiny layer, got "
            f"{type(error).__name__}: {error}. {_remedy()}"
        ) from error
    finally:
        unfollow_caches(attention)
    return float((mine - theirs).abs().max() / theirs.abs().max())


def _run(
    config: Any, hidden: torch.Tensor, forward: Callable[..., Any], cache_name: str, tables: Any, *, ours: bool
) -> torch.Tensor:
    """Outputs [1, tokens, hidden] of a prompt and single tokens after it, over one cache."""
    from transformers import DynamicCache
    from transformers.masking_utils import causal_mask_function

    cache, outputs, past = DynamicCache(config=config), [], 0
    for end in range(PROMPT, PROMPT + DECODED + 1):
        tokens = end - past
        positions = torch.arange(end)[None, None] * torch.tensor([1, 2, 3])[:, None, None]  # three axes, all different
        like = hidden[:0]
        if ours:
            angles: Any = NeededAngles(tables, like, positions)
            mask: Any = step_mask(
                1, tokens, end, q_offset=past, mask_function=causal_mask_function, config=config, device=hidden.device
            )
        else:
            angles = tables(like, positions)
            mask = torch.ones(end, end, dtype=torch.bool).tril_()[None, None, past:]
        outputs.append(forward(hidden[:, past:end], angles, mask, **{cache_name: cache})[0])
        past = end
    return torch.cat(outputs, dim=1)


def _tiny_layer(modeling: Any) -> tuple[Any, Any, Callable[..., Any]]:
    """Config, attention and rotary tables of one small layer, its weights drawn here whatever the caller's mode."""
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    config = Qwen4ExpTextConfig(
        vocab_size=8, hidden_size=24, num_hidden_layers=1, layer_types=["full_attention"], num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, indexer_n_heads=8, indexer_kv_heads=1, indexer_head_dim=8,
        indexer_budget=8, indexer_compress_ratio=2, max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
                         "mrope_section": [2, 1, 1], "mrope_interleaved": True},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    attention = modeling.Qwen4ExpTextAttention(config, 0).eval()
    generator = _generator(0)
    for module in attention.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                weight = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                scale = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3
                module._parameters[name] = torch.nn.Parameter(weight * scale, requires_grad=False)
    return config, attention, own_forward(modeling.Qwen4ExpTextRotaryEmbedding(config))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _version() -> str:
    import transformers

    return f"transformers {transformers.__version__}"


def _remedy() -> str:
    return "Use transformers 5.16.1 to 5.25.0, or a release of FlashQSA that knows this version."
