"""`QSAConfig`: what a checkpoint fixes about its QSA layers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashqsa.checks import expect_int, expect_number
from flashqsa.errors import ConfigError
from flashqsa.rope import check_mrope_section, check_rope_type

QSA_LAYER_TYPES = (
    "full_attention",
    "qwen_sparse_attention",
    "indexed_attention",
    "deepseek_sparse_attention",
    "hybrid_indexed",
)
"""Names under which checkpoints and library versions list a QSA layer."""

OTHER_LAYER_TYPES = ("linear_attention",)
DEFAULT_MROPE_SECTION = (11, 11, 10)
"""What the model takes when its config names no sections."""

INDEXER_FIELDS = (
    "indexer_n_heads",
    "indexer_kv_heads",
    "indexer_head_dim",
    "indexer_budget",
    "indexer_compress_ratio",
)

POSITIVE_FIELDS = (
    "hidden_size",
    "q_heads",
    "kv_heads",
    "head_dim",
    "index_heads",
    "index_head_dim",
    "budget_tokens",
    "block_tokens",
    "max_positions",
)


@dataclass(frozen=True)
class QSAConfig:
    """Shapes and constants of the QSA layers of one checkpoint.

    Attributes:
        hidden_size: Width of the hidden states that enter a layer.
        q_heads: Query heads of the main attention (`Hq`).
        kv_heads: Key/value heads (`Hkv`); `q_heads` is a multiple of it.
        head_dim: Dimension of a main head (`D`).
        index_heads: Index query heads (`Hi`); there is one index key head.
        index_head_dim: Dimension of an index head (`Di`).
        budget_tokens: Tokens that a row attends through selected blocks, a multiple of `block_tokens`.
        block_tokens: Tokens of a block (`r`).
        rotary_dim: Leading dimensions of both kinds of head that rotate.
        mrope_section: Frequencies of the three position axes, or None when positions have one axis.
        rope_parameters: `rope_type`, `rope_theta` and what the type needs.
        norm_eps: Epsilon of the RMS norms.
        max_positions: `max_position_embeddings` of the checkpoint.
        attention_bias: Whether q, k, v and o projections have a bias (`index_qk_proj` never has).
        qsa_layer_ids: Indices of the layers that are QSA.
    """

    hidden_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    index_heads: int
    index_head_dim: int
    budget_tokens: int
    block_tokens: int
    rotary_dim: int
    mrope_section: tuple[int, int, int] | None = None
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 1e7})
    norm_eps: float = 1e-6
    max_positions: int = 262_144
    attention_bias: bool = False
    qsa_layer_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        where, hint = "QSAConfig", "Check the checkpoint."
        for name in POSITIVE_FIELDS:
            expect_int(where, name, getattr(self, name), least=1, hint=hint, error=ConfigError)
        expect_int(where, "rotary_dim", self.rotary_dim, hint="Check partial_rotary_factor.", error=ConfigError)
        expect_number(where, "norm_eps", self.norm_eps, least=0.0, hint=hint, error=ConfigError)
        if self.q_heads % self.kv_heads:
            raise ConfigError(
                f"QSAConfig: q_heads must be a multiple of kv_heads, got {self.q_heads} and {self.kv_heads}. "
                "Under tensor parallelism, replicate KV heads until they divide."
            )
        if self.budget_tokens % self.block_tokens:
            raise ConfigError(
                f"QSAConfig: budget_tokens must be a multiple of block_tokens, got {self.budget_tokens} and "
                f"{self.block_tokens}. Choose a budget of whole blocks."
            )
        if self.rotary_dim % 2 or not 0 <= self.rotary_dim <= min(self.head_dim, self.index_head_dim):
            raise ConfigError(
                f"QSAConfig: rotary_dim must be even and fit both heads (head_dim {self.head_dim}, index_head_dim "
                f"{self.index_head_dim}), got {self.rotary_dim}. Check partial_rotary_factor."
            )
        if self.mrope_section is not None:
            check_mrope_section(where, self.mrope_section, ConfigError)
        if not isinstance(self.rope_parameters, Mapping):
            raise ConfigError(
                f"{where}: rope_parameters must be a mapping, got {type(self.rope_parameters).__name__}. {hint}"
            )
        check_rope_type(self.rope_parameters.get("rope_type", "default"))

    @property
    def topk_blocks(self) -> int:
        """Blocks that a row selects at most (`K`)."""
        return self.budget_tokens // self.block_tokens

    @classmethod
    def from_pretrained_config(cls, config: Any) -> QSAConfig:
        """From a transformers config object, of the text model or of the multimodal one around it.

        Raises:
            ConfigError: As in `from_dict`.
        """
        return cls.from_dict(config.to_dict())

    @classmethod
    def from_checkpoint(cls, path: str | Path) -> QSAConfig:
        """From a checkpoint folder that holds a `config.json`.

        Raises:
            ConfigError: The folder or file is missing, cannot be read or is not JSON, or as in `from_dict`.
        """
        file = Path(path) / "config.json"
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise ConfigError(
                f"from_checkpoint: path must hold a config.json, got {path}. Pass the checkpoint's folder."
            ) from None
        except OSError as error:
            raise ConfigError(
                f"from_checkpoint: {file} must be readable, got {error.strerror}. Check its permissions."
            ) from error
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"from_checkpoint: {file} must be JSON, got {error}. Fetch the file again.") from error
        if not isinstance(values, dict):
            raise ConfigError(
                f"from_checkpoint: {file} must hold a JSON object, got {type(values).__name__}. Fetch the file again."
            )
        return cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> QSAConfig:
        """From a configuration as a dict, flat or with a nested `text_config`.

        Raises:
            ConfigError: The model type is another one, a layer type is unknown, some indexer fields are missing, or
                a value breaks a rule of `QSAConfig`.
        """
        _expect_mapping("the config", values)
        text = values.get("text_config") or values
        _expect_mapping("text_config", text)
        model_type = text.get("model_type", values.get("model_type", "qwen4_exp_text"))
        if not str(model_type).startswith("qwen4_exp"):
            raise ConfigError(
                f"QSAConfig: model_type must be qwen4_exp or qwen4_exp_text, got {model_type!r}. "
                "Qwen Sparse Attention is the attention of qwen4_exp models."
            )
        layer_types = text.get("layer_types")
        _check_layer_types(layer_types)
        has_indexer = _indexer_is_configured(text)
        if not has_indexer:
            raise ConfigError(
                f"QSAConfig: the fields {', '.join(INDEXER_FIELDS)} must be set, got none of them. "
                "Full-attention layers without an indexer are dense; there is nothing for QSA to do."
            )
        rope = _rope_parameters(text)
        head_dim = _need(text, "head_dim")  # the model's default is no quotient of other fields
        expect_int("QSAConfig", "head_dim", head_dim, least=1, hint="Check the checkpoint.", error=ConfigError)
        share = rope["partial_rotary_factor"]
        expect_number("QSAConfig", "partial_rotary_factor", share, least=0.0, hint="Give a share of head_dim.",
                      error=ConfigError)  # fmt: skip
        section = rope.get("mrope_section") or DEFAULT_MROPE_SECTION
        return cls(
            hidden_size=_need(text, "hidden_size"),
            q_heads=_need(text, "num_attention_heads"),
            kv_heads=_need(text, "num_key_value_heads"),
            head_dim=head_dim,
            index_heads=text["indexer_n_heads"],
            index_head_dim=text["indexer_head_dim"],
            budget_tokens=text["indexer_budget"],
            block_tokens=text["indexer_compress_ratio"],
            rotary_dim=int(head_dim * share),
            mrope_section=tuple(section) if isinstance(section, Sequence) else section,
            rope_parameters=rope,
            norm_eps=text.get("rms_norm_eps", 1e-6),
            max_positions=_need(text, "max_position_embeddings"),
            attention_bias=bool(text.get("attention_bias", False)),
            qsa_layer_ids=_qsa_layer_ids(text, layer_types),
        )


def _expect_mapping(name: str, values: Any) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"QSAConfig: {name} must be a mapping, got {type(values).__name__}. Pass the config as a dict."
        )


def _need(text: Mapping[str, Any], name: str) -> Any:
    if text.get(name) is None:
        raise ConfigError(f"QSAConfig: {name} must be set, got none. Check the checkpoint's config.json.")
    return text[name]


def _check_layer_types(layer_types: list[str] | None) -> None:
    known = QSA_LAYER_TYPES + OTHER_LAYER_TYPES
    if layer_types is not None and (isinstance(layer_types, str) or not isinstance(layer_types, Sequence)):
        raise ConfigError(
            f"QSAConfig: layer_types must be a list of names, got {layer_types!r}. Check the checkpoint's config.json."
        )
    for name in layer_types or ():
        if name not in known:
            raise ConfigError(
                f"QSAConfig: layer_types must be among {', '.join(known)}, got {name!r}. "
                "A new spelling needs a new version of this library."
            )


def _indexer_is_configured(text: Mapping[str, Any]) -> bool:
    """Whether the five indexer fields are there; they come together or not at all."""
    missing = [name for name in INDEXER_FIELDS if text.get(name) is None]
    if len(missing) == len(INDEXER_FIELDS):
        return False
    if missing:
        raise ConfigError(
            f"QSAConfig: the five indexer fields must come together, got a config without {', '.join(missing)}. "
            "Complete the config; no defaults are assumed."
        )
    if text["indexer_kv_heads"] != 1:
        raise ConfigError(
            f"QSAConfig: indexer_kv_heads must be 1, got {text['indexer_kv_heads']}. qwen4_exp has one index key head."
        )
    return True


def _rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """Rope parameters with `partial_rotary_factor` and `rope_theta` from either place a config may keep them."""
    for name in ("rope_parameters", "rope_scaling"):
        _expect_mapping(name, text.get(name) or {})
    rope, scaling = (dict(text.get(name) or {}) for name in ("rope_parameters", "rope_scaling"))
    if rope and scaling and rope != scaling:
        raise ConfigError(
            f"QSAConfig: rope_scaling must not differ from rope_parameters, got {scaling} and {rope}. "
            "Keep one of them; they are two names of the same thing."
        )
    rope = rope or scaling
    rope.setdefault("rope_type", rope.pop("type", "default"))
    for name, default in (("partial_rotary_factor", 1.0), ("rope_theta", None)):
        outer = text.get(name)
        for value in (outer, rope.get(name)):
            if value is not None:
                expect_number("QSAConfig", name, value, hint="Check the checkpoint's config.json.", error=ConfigError)
        if rope.get(name) is not None and outer is not None and float(outer) != float(rope[name]):
            raise ConfigError(
                f"QSAConfig: {name} must be the same at top level and in rope_parameters, got {outer} and "
                f"{rope[name]}. Keep one of them."
            )
        if rope.get(name) is None:
            rope[name] = outer if outer is not None else default
    if rope["rope_theta"] is None:
        raise ConfigError("QSAConfig: rope_theta must be set, got none. Give it in rope_parameters.")
    if rope["rope_type"] in ("llama3", "yarn"):
        trained = text.get("original_max_position_embeddings") or _need(text, "max_position_embeddings")
        rope.setdefault("original_max_position_embeddings", trained)
    return rope


def _qsa_layer_ids(text: Mapping[str, Any], layer_types: list[str] | None) -> tuple[int, ...]:
    layers = _need(text, "num_hidden_layers") if layer_types is None else text.get("num_hidden_layers")
    if layers is not None:
        expect_int("QSAConfig", "num_hidden_layers", layers, least=1, hint="Check the checkpoint's config.json.",
                   error=ConfigError)  # fmt: skip
    if layer_types is None:
        interval = text.get("full_attention_interval", 4)
        expect_int("QSAConfig", "full_attention_interval", interval, least=1, hint="Every so many layers one is QSA.",
                   error=ConfigError)  # fmt: skip
        return tuple(i for i in range(_need(text, "num_hidden_layers")) if (i + 1) % interval == 0)
    if layers is not None and len(layer_types) != layers:
        raise ConfigError(
            f"QSAConfig: layer_types must have one entry for each of num_hidden_layers = {layers}, got "
            f"{len(layer_types)}. Check the checkpoint's config.json."
        )
    return tuple(i for i, name in enumerate(layer_types) if name in QSA_LAYER_TYPES)
