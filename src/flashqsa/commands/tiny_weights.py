"""The weights of the small random checkpoint.

They are random but not arbitrary: their scales make attention decide something. With the usual standard deviation of
0.02 the logits are flat and greedy decoding repeats one token. Here a projection keeps the variance of what it
transforms, attention is peaked, its output weighs as much as the residual stream, and the two best logits lie thousands
of fp32 roundings apart.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flashqsa.commands.tiny_tokenizer import BYTE_COUNT

_GAINS = {"o_proj": 4.0, "out_proj": 1.5, "down_proj": 1.5, "gate": 2.0, "lm_head": 3.0}
"""Standard deviation of a projection's output for inputs of standard deviation 1, where it is not 1 itself."""

_SLOWEST_DECAY = 1e-3


def tensors_to_draw(model_class: Any, config: Any, *, with_mtp: bool) -> dict[str, torch.Tensor]:
    """All tensors of the model, under the names of its modules, with values that only integer tensors keep.

    Args:
        model_class: `Qwen4ExpForCausalLM`.
        config: Its configuration.
        with_mtp: Whether to add a multi-token-prediction layer under `mtp.`: one QSA decoder layer, the final mixer,
            and the two norms and projections that join the last hidden state to the next token's embedding.

    Returns:
        Name to tensor, the model's first.
    """
    tensors = _build(model_class, config)
    if not with_mtp:
        return tensors
    one_layer = copy.deepcopy(config)
    one_layer.num_hidden_layers = 1
    one_layer.layer_types = ["indexed_attention"]
    one_layer.ple_layer_ids = []
    for name, tensor in _build(model_class, one_layer).items():
        inner = name.removeprefix("model.")
        if inner.startswith(("layers.0.", "hyper_connection_mixer.")):
            tensors[f"mtp.{inner}"] = tensor
    width = config.hidden_size
    tensors["mtp.pre_fc_norm_embedding.weight"] = torch.empty(width)
    tensors["mtp.pre_fc_norm_hidden.weight"] = torch.empty(width * config.hc_count)
    tensors["mtp.fc_embedding.weight"] = torch.empty(width, width)
    tensors["mtp.fc_hidden.weight"] = torch.empty(width, width)
    return tensors


def draw_weight(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """Draws one weight; a function of its arguments alone, so no weight depends on which others there are.

    Args:
        name: The parameter's name in the model.
        shape: Its shape.
        seed: Seed of the checkpoint.

    Returns:
        fp32 tensor of that shape.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    noise = torch.randn(*shape, generator=generator)
    leaf = name.removesuffix(".weight").rpartition(".")[2]
    if leaf == "A_log":  # Time constants from one step to a thousand, evenly on a log scale.
        return torch.rand(*shape, generator=generator) * -math.log(_SLOWEST_DECAY) + math.log(_SLOWEST_DECAY)
    if leaf == "dt_bias" or name.endswith("linear_attn.norm.weight"):  # Neither is centred at 0.
        return 1 + 0.1 * noise
    if leaf in ("q_norm", "k_norm"):  # The norms multiply by 1 + w: attention logits of standard deviation 2.5.
        return 0.6 + 0.1 * noise
    if leaf in ("embed_tokens", "ngram_embedding"):
        return noise
    if len(shape) == 1:
        return 0.1 * noise
    weight = noise * (_GAINS.get(leaf, 1.0) / math.sqrt(shape[-1]))
    if leaf == "lm_head":  # Greedy decoding yields bytes alone: it never ends early, and any output is text.
        weight[BYTE_COUNT:] = 0
    return weight


def stored_form(name: str, tensor: torch.Tensor, *, ngram_parts: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Splits a module's tensor into those that a checkpoint stores: one an expert, and parts of the n-gram table."""
    prefix, _, leaf = name.rpartition(".")
    if leaf == "gate_up_proj" and prefix.endswith(".experts"):
        for expert, (gate, up) in enumerate(half.chunk(2) for half in tensor):
            yield f"{prefix}.{expert}.gate_proj.weight", gate.contiguous()
            yield f"{prefix}.{expert}.up_proj.weight", up.contiguous()
    elif leaf == "down_proj" and prefix.endswith(".experts"):
        for expert, down in enumerate(tensor):
            yield f"{prefix}.{expert}.down_proj.weight", down.contiguous()
    elif prefix.endswith(".ngram_embedding"):
        for part, rows in enumerate(tensor.chunk(ngram_parts)):
            yield f"{prefix}.shard_{part}.{leaf}", rows.contiguous()
    else:
        yield name, tensor.contiguous()


def _build(model_class: Any, config: Any) -> dict[str, torch.Tensor]:
    """The state of a freshly made model; the caller's random state stays as it was."""
    with torch.random.fork_rng(devices=[]):
        state: dict[str, torch.Tensor] = model_class(config).state_dict()
    return dict(state)
