"""The small random checkpoint of `flashqsa tiny`: its options, its configuration and how it gets into a directory."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashqsa.commands.tiny_tokenizer import END_OF_TURN_ID, PAD_ID, write_tokenizer
from flashqsa.commands.tiny_weights import draw_weight, stored_form, tensors_to_draw
from flashqsa.errors import ArgumentError, UnsupportedError

VOCAB_SIZE = 512
MAX_POSITIONS = 262_144
QSA_INTERVAL = 4
NGRAM_LAYER = 2
"""One-based id of the layer with n-gram embeddings, as `ple_layer_ids` counts."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class TinyOptions:
    """What `flashqsa tiny` can vary.

    Attributes:
        layers: Decoder layers, 4 or more; every fourth is a QSA layer.
        heads: Query heads of a QSA layer, a multiple of `kv_heads`.
        kv_heads: Key/value heads of a QSA layer.
        head_dim: Dimension of these heads, a multiple of 8; a quarter of it rotates.
        index_heads: Query heads of the indexer.
        index_head_dim: Dimension of an index head, no smaller than the rotating part.
        ratio: Tokens of a block.
        budget: Tokens that a row selects at most, a multiple of `ratio`.
        ngram: Whether the second layer adds hashed n-gram embeddings.
        mtp: Whether the file holds a multi-token-prediction layer too.
        seed: Decides all weights.
        dtype: `float32` or `bfloat16`.
    """

    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    index_heads: int = 4
    index_head_dim: int = 32
    ratio: int = 4
    budget: int = 128
    ngram: bool = False
    mtp: bool = False
    seed: int = 0
    dtype: str = "float32"


@dataclass(frozen=True)
class TinyReport:
    """What was written.

    Attributes:
        parameters: Numbers in the floating-point tensors.
        tensors: Tensors in `model.safetensors`.
        file_bytes: Size of `model.safetensors`.
        qsa_layer_ids: Zero-based ids of the QSA layers, without the multi-token-prediction layer.
    """

    parameters: int
    tensors: int
    file_bytes: int
    qsa_layer_ids: tuple[int, ...]


def write_tiny_checkpoint(
    directory: str | Path,
    options: TinyOptions | None = None,
    *,
    force: bool = False,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> TinyReport:
    """Writes a small random checkpoint that transformers loads.

    Everything is written beside `directory` first and moved there at the end, so a failure leaves nothing behind.

    Args:
        directory: Where to write; made, with its parents, when it does not exist.
        options: Shapes, seed and dtype; the defaults when None.
        force: Whether `directory` may hold files. Those of the same names are replaced, others stay.
        on_tensor: Called with (tensors drawn, tensors in all) while the weights are made.

    Returns:
        What was written.

    Raises:
        ArgumentError: An option breaks a rule, the directory holds files, or it cannot be written.
        UnsupportedError: The installed transformers does not know the architecture.
    """
    options = TinyOptions() if options is None else options
    target = Path(directory)
    check_options(options)
    try:
        _check_target(target, force)
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as workspace:
            # A folder of its own inside: the temporary one is private to the user, the checkpoint need not be.
            staging = Path(workspace) / "checkpoint"
            staging.mkdir()
            report = _write_files(staging, options, on_tensor)
            _publish(staging, target)
    except OSError as error:
        raise ArgumentError(
            f"tiny: directory must be writable, got {target} ({error.strerror or error}). Choose another directory."
        ) from error
    return report


def check_options(options: TinyOptions) -> None:
    """Checks every option.

    Raises:
        ArgumentError: One of them breaks a rule.
    """
    for name in ("heads", "kv_heads", "head_dim", "index_heads", "index_head_dim", "ratio", "budget"):
        value = getattr(options, name)
        _require(value >= 1, name, "at least 1", value)
    _require(options.layers >= QSA_INTERVAL, "layers", "at least 4", options.layers, "Every fourth is a QSA layer.")
    _require(
        options.heads % options.kv_heads == 0, "heads", f"a multiple of {options.kv_heads} kv-heads", options.heads
    )
    _require(options.head_dim % 8 == 0, "head_dim", "a multiple of 8", options.head_dim, "A quarter of it rotates.")
    _require(
        options.index_head_dim >= options.head_dim // 4,
        "index_head_dim",
        f"at least {options.head_dim // 4}, a quarter of head-dim",
        options.index_head_dim,
        "Both kinds of head rotate the same number of dimensions.",
    )
    _require(options.budget % options.ratio == 0, "budget", f"a multiple of ratio {options.ratio}", options.budget)
    _require(options.seed >= 0, "seed", "at least 0", options.seed)
    _require(options.dtype in DTYPES, "dtype", " or ".join(DTYPES), options.dtype)


def model_config(options: TinyOptions) -> Any:
    """The transformers configuration (`Qwen4ExpTextConfig`) of a tiny model.

    Raises:
        UnsupportedError: The installed transformers does not know the architecture.
    """
    frequencies = options.head_dim // 8
    side = frequencies // 4
    fields: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "hc_count": 2,
        "hc_lowrank": 16,
        "indexer_n_heads": options.index_heads,
        "indexer_kv_heads": 1,
        "indexer_head_dim": options.index_head_dim,
        "indexer_budget": options.budget,
        "indexer_compress_ratio": options.ratio,
        "output_gate_type": "silu",
        "pad_token_id": PAD_ID,
        "eos_token_id": END_OF_TURN_ID,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [frequencies - 2 * side, side, side],
            "mrope_interleaved": True,
        },
        "architectures": ["Qwen4ExpForCausalLM"],
        "dtype": options.dtype,
    }
    if options.ngram:
        fields |= {"ple_layer_ids": [NGRAM_LAYER], "heads_per_ngram": 4, "ngram_vocab_size_base": 512}
        fields |= {"split_ngram_parts": 2}
    if options.mtp:
        fields |= {"mtp_num_hidden_layers": 1}
    return _architecture()[0](**fields)


def _architecture() -> tuple[Any, Any]:
    """The configuration and the model class of transformers."""
    import transformers

    try:
        return transformers.Qwen4ExpTextConfig, transformers.Qwen4ExpForCausalLM
    except AttributeError:
        raise UnsupportedError(
            f"tiny: transformers must know qwen4_exp, got version {transformers.__version__}. Install 5.16.1 or later."
        ) from None


def _write_files(staging: Path, options: TinyOptions, on_tensor: Callable[[int, int], None]) -> TinyReport:
    from safetensors.torch import save_file

    config = model_config(options)
    templates = tensors_to_draw(_architecture()[1], config, with_mtp=options.mtp)
    tensors: dict[str, torch.Tensor] = {}
    for done, (name, template) in enumerate(templates.items(), start=1):
        if template.is_floating_point():
            template = draw_weight(name, template.shape, options.seed).to(DTYPES[options.dtype])
        tensors.update(stored_form(name, template, ngram_parts=config.split_ngram_parts))
        on_tensor(done, len(templates))
    weights = staging / "model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    config.save_pretrained(staging)
    generation = {"do_sample": False, "eos_token_id": END_OF_TURN_ID, "pad_token_id": PAD_ID}
    (staging / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    write_tokenizer(staging, model_max_length=MAX_POSITIONS)
    return TinyReport(
        parameters=sum(tensor.numel() for tensor in tensors.values() if tensor.is_floating_point()),
        tensors=len(tensors),
        file_bytes=weights.stat().st_size,
        qsa_layer_ids=tuple(range(QSA_INTERVAL - 1, options.layers, QSA_INTERVAL)),
    )


def _check_target(target: Path, force: bool) -> None:
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"tiny: directory must be a directory, got the file {target}. Choose another name.")
    if not force and target.is_dir() and any(target.iterdir()):
        raise ArgumentError(f"tiny: directory must be empty, got {target}. Pass --force to write into it anyway.")


def _publish(staging: Path, target: Path) -> None:
    """Moves the finished files to where they belong: the whole folder at once where nothing is in its place."""
    if target.is_dir() and any(target.iterdir()):
        for file in sorted(staging.iterdir()):
            file.replace(target / file.name)
    else:
        staging.replace(target)


def _require(holds: bool, name: str, rule: str, value: object, advice: str = "") -> None:
    if not holds:
        raise ArgumentError(f"tiny: {name.replace('_', '-')} must be {rule}, got {value}. {advice}".rstrip())
