from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from flashqsa.config import INDEXER_FIELDS, QSA_LAYER_TYPES, QSAConfig
from flashqsa.errors import ConfigError
from flashqsa.testing import tiny_config

RELEASED = {
    "model_type": "qwen4_exp_text",
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 262_144,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
    },
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}


def test_from_dict_reads_the_released_model() -> None:
    config = QSAConfig.from_dict(RELEASED)
    assert (config.q_heads, config.kv_heads, config.head_dim) == (24, 2, 256)
    assert (config.index_heads, config.index_head_dim) == (4, 128)
    assert (config.budget_tokens, config.block_tokens, config.topk_blocks) == (2048, 4, 512)
    assert (config.rotary_dim, config.mrope_section) == (64, (11, 11, 10))
    assert config.qsa_layer_ids == tuple(range(3, 48, 4))


@pytest.mark.parametrize("spelling", QSA_LAYER_TYPES)
def test_from_dict_fault_51_knows_every_spelling_of_the_layer_type(spelling: str) -> None:
    types = ["linear_attention", spelling, "linear_attention", spelling]
    assert QSAConfig.from_dict(tiny_config(layer_types=types)).qsa_layer_ids == (1, 3)


@pytest.mark.parametrize("spelling", ["sliding_attention", "Full_Attention", "qsa", ""])
def test_from_dict_fault_51_refuses_unknown_layer_types(refuses, spelling: str) -> None:
    types = ["linear_attention", "linear_attention", "linear_attention", spelling]
    with refuses(ConfigError, "QSAConfig", "layer_types", *QSA_LAYER_TYPES, repr(spelling)):
        QSAConfig.from_dict(tiny_config(layer_types=types))


def test_from_dict_without_layer_types_takes_every_fourth_layer() -> None:
    values = tiny_config(layer_types=None, num_hidden_layers=9)
    assert QSAConfig.from_dict(values).qsa_layer_ids == (3, 7)
    assert QSAConfig.from_dict(values | {"full_attention_interval": 3}).qsa_layer_ids == (2, 5, 8)


def test_from_dict_fault_52_reads_nested_and_flat_configs_alike() -> None:
    nested = {"model_type": "qwen4_exp", "text_config": tiny_config(), "vision_config": {"hidden_size": 7}}
    assert QSAConfig.from_dict(nested) == QSAConfig.from_dict(tiny_config())
    assert QSAConfig.from_dict(tiny_config(model_type=None)) == QSAConfig.from_dict(tiny_config())


@pytest.mark.parametrize(
    "missing", [m for n in range(1, 5) for m in itertools.combinations(INDEXER_FIELDS, n)], ids=lambda m: "+".join(m)
)
@pytest.mark.parametrize("spelling", ["absent", "null"])
def test_from_dict_fault_52_names_what_a_partial_indexer_lacks(
    refuses, missing: tuple[str, ...], spelling: str
) -> None:
    values = tiny_config()
    for name in missing:
        del values[name]
        if spelling == "null":
            values[name] = None
    with refuses(ConfigError, "QSAConfig", f"without {', '.join(missing)}."):
        QSAConfig.from_dict(values)


def test_from_dict_refuses_a_config_without_any_indexer(refuses) -> None:
    with refuses(ConfigError, "QSAConfig", *INDEXER_FIELDS):
        QSAConfig.from_dict(tiny_config(**dict.fromkeys(INDEXER_FIELDS)))


def test_from_dict_refuses_more_than_one_index_key_head(refuses) -> None:
    with refuses(ConfigError, "QSAConfig", "indexer_kv_heads", "got 2"):
        QSAConfig.from_dict(tiny_config(indexer_kv_heads=2))


def test_from_dict_fault_53_reads_partial_rotary_factor_from_both_places() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7}
    inside = QSAConfig.from_dict(tiny_config(rope_parameters=rope | {"partial_rotary_factor": 0.25}))
    outside = QSAConfig.from_dict(tiny_config(rope_parameters=rope, partial_rotary_factor=0.25))
    both = tiny_config(rope_parameters=rope | {"partial_rotary_factor": 0.25}, partial_rotary_factor=0.25)
    assert inside.rotary_dim == 16
    assert inside == outside == QSAConfig.from_dict(both)


def test_from_dict_fault_53_refuses_two_partial_rotary_factors(refuses) -> None:
    with refuses(ConfigError, "QSAConfig", "partial_rotary_factor", "got 0.5 and 0.25"):
        QSAConfig.from_dict(tiny_config(partial_rotary_factor=0.5))


def test_from_dict_rotates_whole_heads_without_partial_rotary_factor() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e7}
    assert QSAConfig.from_dict(tiny_config(rope_parameters=rope, indexer_head_dim=64)).rotary_dim == 64


def test_from_dict_reads_rope_theta_from_both_places(refuses) -> None:
    rope = {"rope_type": "default", "partial_rotary_factor": 0.25}
    outside = QSAConfig.from_dict(tiny_config(rope_parameters=rope, rope_theta=12345.0))
    assert outside.rope_parameters["rope_theta"] == 12345.0
    with refuses(ConfigError, "QSAConfig", "rope_theta", "got none"):
        QSAConfig.from_dict(tiny_config(rope_parameters=rope))
    with refuses(ConfigError, "QSAConfig", "rope_theta", "got 1.0 and 2.0"):
        QSAConfig.from_dict(tiny_config(rope_parameters=rope | {"rope_theta": 2.0}, rope_theta=1.0))


def test_from_dict_reads_rope_scaling_as_an_older_name(refuses) -> None:
    rope = tiny_config()["rope_parameters"]
    older = {name: value for name, value in rope.items() if name != "rope_type"} | {"type": "default"}
    assert QSAConfig.from_dict(tiny_config(rope_parameters=None, rope_scaling=older)) == QSAConfig.from_dict(
        tiny_config()
    )
    scaled = rope | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    with refuses(ConfigError, "QSAConfig", "rope_scaling", "rope_parameters", "yarn"):
        QSAConfig.from_dict(tiny_config(rope_scaling=scaled))


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_from_dict_refuses_rope_types_whose_angles_move(refuses, rope_type: str) -> None:
    with refuses(ConfigError, "rope_parameters", "rope_type", repr(rope_type), "already pooled"):
        QSAConfig.from_dict(tiny_config(rope_parameters=tiny_config()["rope_parameters"] | {"rope_type": rope_type}))


def test_from_dict_refuses_unknown_rope_types(refuses) -> None:
    rope = tiny_config()["rope_parameters"] | {"rope_type": "su"}
    with refuses(ConfigError, "rope_parameters", "default, linear, llama3, yarn", "'su'"):
        QSAConfig.from_dict(tiny_config(rope_parameters=rope))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"indexer_budget": 66}, ("budget_tokens", "multiple of block_tokens", "66 and 4")),
        ({"num_attention_heads": 5}, ("q_heads", "multiple of kv_heads", "5 and 2")),
        ({"num_key_value_heads": 0}, ("kv_heads", "whole number", "got 0")),
        ({"head_dim": -64}, ("head_dim", "whole number", "got -64")),
        ({"indexer_compress_ratio": 0}, ("block_tokens", "whole number", "got 0")),
        ({"indexer_budget": 64.0}, ("budget_tokens", "whole number", "got 64.0")),
        ({"indexer_budget": "64"}, ("budget_tokens", "whole number", "got '64'")),
        ({"max_position_embeddings": 0}, ("max_positions", "whole number", "got 0")),
        ({"hidden_size": True}, ("hidden_size", "whole number", "got True")),
        ({"rms_norm_eps": float("nan")}, ("norm_eps must be a finite number of at least 0", "nan")),
        ({"rms_norm_eps": -1e-6}, ("norm_eps", "-1e-06")),
        ({"head_dim": "64"}, ("head_dim", "whole number", "got '64'")),
        ({"num_hidden_layers": 3}, ("layer_types must have one entry for each of num_hidden_layers = 3", "got 4")),
        ({"num_hidden_layers": "4"}, ("num_hidden_layers", "whole number", "'4'")),
        ({"layer_types": "full_attention"}, ("layer_types must be a list", "'full_attention'")),
        ({"layer_types": None, "full_attention_interval": 0}, ("full_attention_interval", "at least 1", "got 0")),
        ({"rope_parameters": [1]}, ("rope_parameters must be a mapping", "list")),
        ({"rope_parameters": {"rope_theta": "1e7"}}, ("rope_theta must be a finite number", "'1e7'")),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": "half"}},
            ("partial_rotary_factor", "'half'"),
        ),
        ({"text_config": 5}, ("text_config must be a mapping", "int")),
        ({"head_dim": 62}, ("rotary_dim", "even", "got 15")),
        ({"indexer_head_dim": 8}, ("rotary_dim", "index_head_dim 8", "got 16")),
        ({"model_type": "qwen3_next"}, ("model_type", "'qwen3_next'")),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_from_dict_refuses_values_that_break_a_rule(refuses, overrides: dict[str, Any], parts: tuple[str, ...]) -> None:
    with refuses(ConfigError, "QSAConfig", *parts):
        QSAConfig.from_dict(tiny_config(**overrides))


def test_from_dict_refuses_what_is_no_mapping(refuses) -> None:
    for values in (None, [], "config"):
        with refuses(ConfigError, "QSAConfig", "the config must be a mapping", type(values).__name__):
            QSAConfig.from_dict(values)  # type: ignore[arg-type]


@pytest.mark.parametrize("section", [[4, 4], [4, 2, -2], [4, 2, 2.0]])
def test_from_dict_refuses_sections_that_are_not_three_counts(refuses, section: list[int]) -> None:
    rope = tiny_config()["rope_parameters"] | {"mrope_section": section}
    with refuses(ConfigError, "QSAConfig", "mrope_section", str(section)):
        QSAConfig.from_dict(tiny_config(rope_parameters=rope))


@pytest.mark.parametrize(
    "name",
    ["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"],
)
def test_from_dict_assumes_no_size(refuses, name: str) -> None:
    with refuses(ConfigError, "QSAConfig", f"{name} must be set"):
        QSAConfig.from_dict(tiny_config(**{name: None}))


def test_from_dict_assumes_no_number_of_layers(refuses) -> None:
    with refuses(ConfigError, "QSAConfig", "num_hidden_layers must be set"):
        QSAConfig.from_dict(tiny_config(layer_types=None, num_hidden_layers=None))


def test_from_dict_leaves_its_argument_alone() -> None:
    values = tiny_config(partial_rotary_factor=0.25)
    before = json.dumps(values, sort_keys=True)
    QSAConfig.from_dict(values)
    assert json.dumps(values, sort_keys=True) == before


def test_from_checkpoint_reads_config_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen4_exp", "text_config": tiny_config()}))
    assert QSAConfig.from_checkpoint(tmp_path) == QSAConfig.from_dict(tiny_config())
    assert QSAConfig.from_checkpoint(str(tmp_path)) == QSAConfig.from_dict(tiny_config())


@pytest.mark.parametrize("missing", ["folder", "file"])
def test_from_checkpoint_names_what_is_missing(refuses, tmp_path: Path, missing: str) -> None:
    path = tmp_path / "nowhere" if missing == "folder" else tmp_path
    with refuses(ConfigError, "from_checkpoint", "config.json", str(path)):
        QSAConfig.from_checkpoint(path)


def test_from_checkpoint_says_when_the_file_cannot_be_read(refuses, tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("config.json")  # a loop: the system refuses, whoever asks
    with refuses(ConfigError, "from_checkpoint", "must be readable", "Check its permissions."):
        QSAConfig.from_checkpoint(tmp_path)


def test_from_checkpoint_refuses_the_file_instead_of_its_folder(refuses, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    with refuses(ConfigError, "from_checkpoint", "Pass the checkpoint's folder."):
        QSAConfig.from_checkpoint(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("content", "part"),
    [(b"{", "must be JSON"), (b"", "must be JSON"), (b"\xff\xfe\x00", "must be JSON"), (b"[1, 2]", "got list")],
)
def test_from_checkpoint_refuses_corrupt_files(refuses, tmp_path: Path, content: bytes, part: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with refuses(ConfigError, "from_checkpoint", "config.json", part):
        QSAConfig.from_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers", minversion="5.16.1")


@pytest.mark.transformers
@pytest.mark.parametrize("nested", [False, True])
def test_from_pretrained_config_equals_from_dict(transformers: Any, nested: bool) -> None:
    config = transformers.Qwen4ExpTextConfig(**tiny_config())
    if nested:
        config = transformers.Qwen4ExpConfig(text_config=tiny_config())
    assert QSAConfig.from_pretrained_config(config) == QSAConfig.from_dict(tiny_config())


@pytest.mark.transformers
@pytest.mark.parametrize("nested", [False, True])
def test_from_checkpoint_reads_what_transformers_saves(transformers: Any, tmp_path: Path, nested: bool) -> None:
    config = transformers.Qwen4ExpTextConfig(**tiny_config())
    if nested:
        config = transformers.Qwen4ExpConfig(text_config=tiny_config())
    config.save_pretrained(tmp_path)
    assert QSAConfig.from_checkpoint(tmp_path) == QSAConfig.from_dict(tiny_config())


ROPE_FORMS: dict[str, dict[str, Any]] = {
    "factor_outside": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7},
        "partial_rotary_factor": 0.25,
    },
    "both_outside": {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "whole_heads": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7}, "indexer_head_dim": 64},
    "rope_scaling": {
        "rope_parameters": None,
        "rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    },
    "yarn_without_original": {
        "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    },
    "llama3_without_original": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
        }
    },
}


@pytest.mark.transformers
@pytest.mark.parametrize("form", ROPE_FORMS, ids=str)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_from_dict_fault_52_fills_in_what_the_model_fills_in(transformers: Any, form: str) -> None:
    """Without transformers a config means what it means with it."""
    values = tiny_config(**ROPE_FORMS[form])
    ours = QSAConfig.from_dict(values)
    theirs = QSAConfig.from_pretrained_config(transformers.Qwen4ExpTextConfig(**values))
    assert (ours.rotary_dim, ours.mrope_section) == (theirs.rotary_dim, theirs.mrope_section)
    for name in ("rope_type", "rope_theta", "factor", "original_max_position_embeddings"):
        assert ours.rope_parameters.get(name) == theirs.rope_parameters.get(name), name
