from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError, ConfigError, DTypeError, ShapeError
from flashqsa.rope import FIXED_ROPE_TYPES, RopeTable, inverse_frequencies
from flashqsa.testing import oracles, stream, tiny_config

POSITIONS = 4096
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn_betas": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn_untruncated": YARN | {"truncate": False},
    "yarn_attention_factor": YARN | {"attention_factor": 0.75},
    "yarn_mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn_no_scaling": YARN | {"factor": 1.0},
}
SECTIONS = [(4, 2, 2), (3, 3, 2), (8, 0, 0), (0, 4, 4), (11, 11, 10)]


def rope_parameters(name: str, section: tuple[int, ...] = (4, 2, 2)) -> dict[str, Any]:
    shared = {"rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": list(section)}
    return ROPES[name] | shared


def different_axes(count: int, seed: int) -> torch.Tensor:
    """[3, N] positions of which no token has two equal axes."""
    base = torch.randint(0, POSITIONS, (count,), generator=stream(seed))
    return torch.stack([base, (base + 1 + torch.arange(count) % 911) % POSITIONS, (base + 2000) % POSITIONS])


@pytest.fixture(scope="module")
def modeling() -> Any:
    pytest.importorskip("transformers", minversion="5.16.1")
    from transformers.models.qwen4_exp import modeling_qwen4_exp

    return modeling_qwen4_exp


def build(config: QSAConfig, dtype: torch.dtype = torch.float32, **kwargs: Any) -> RopeTable:
    return RopeTable.build(
        config.rope_parameters,
        rotary_dim=config.rotary_dim,
        num_positions=POSITIONS,
        max_positions=config.max_positions,
        mrope_section=config.mrope_section,
        dtype=dtype,
        **kwargs,
    )


@pytest.mark.transformers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ROPES)
def test_lookup_fault_54_equals_transformers_with_all_axes_different(
    modeling: Any, name: str, dtype: torch.dtype
) -> None:
    from transformers import Qwen4ExpTextConfig

    values = tiny_config(rope_parameters=rope_parameters(name))
    rotary = modeling.Qwen4ExpTextRotaryEmbedding(Qwen4ExpTextConfig(**values))
    table = build(QSAConfig.from_dict(values), dtype)
    positions = different_axes(1000, seed=1)
    theirs = rotary(torch.zeros((), dtype=dtype), positions[:, None])
    for ours, other in zip(table.lookup(positions), theirs, strict=True):
        assert torch.equal(ours, other[0, :, : table.rotary_dim // 2])


@pytest.mark.transformers
@pytest.mark.parametrize("section", SECTIONS, ids=str)
def test_lookup_composes_sections_as_transformers_does(modeling: Any, section: tuple[int, int, int]) -> None:
    from transformers import Qwen4ExpTextConfig

    values = tiny_config(rope_parameters=rope_parameters("default", section))
    rotary = modeling.Qwen4ExpTextRotaryEmbedding(Qwen4ExpTextConfig(**values))
    table = build(QSAConfig.from_dict(values))
    positions = different_axes(300, seed=2)
    theirs = rotary(torch.zeros(()), positions[:, None])
    for ours, other in zip(table.lookup(positions), theirs, strict=True):
        assert torch.equal(ours, other[0, :, : table.rotary_dim // 2])


@pytest.mark.transformers
def test_lookup_of_one_axis_equals_transformers_and_three_equal_axes(modeling: Any) -> None:
    from transformers import Qwen4ExpTextConfig

    values = tiny_config(rope_parameters=rope_parameters("default"))
    rotary = modeling.Qwen4ExpTextRotaryEmbedding(Qwen4ExpTextConfig(**values))
    table = build(QSAConfig.from_dict(values))
    positions = torch.randint(0, POSITIONS, (500,), generator=stream(3))
    theirs = rotary(torch.zeros(()), positions[None])
    one_axis, three_axes = table.lookup(positions), table.lookup(positions.expand(3, -1))
    for ours, spread, other in zip(one_axis, three_axes, theirs, strict=True):
        assert torch.equal(ours, other[0, :, : table.rotary_dim // 2])
        assert torch.equal(ours, spread)


@pytest.mark.parametrize("section", [*SECTIONS, None], ids=str)
def test_lookup_takes_the_axis_of_each_frequency(section: tuple[int, int, int] | None) -> None:
    half = 8
    table = RopeTable(torch.arange(POSITIONS)[:, None].expand(-1, 2 * half).double().contiguous(), section)
    positions = different_axes(50, seed=4)
    cos, sin = table.lookup(positions)
    for frequency in range(half):
        expected = positions[oracles.position_axis(frequency, section)].double()
        assert torch.equal(cos[:, frequency], expected)
        assert torch.equal(sin[:, frequency], expected)


def test_lookup_reads_a_strided_engine_table() -> None:
    """Engines keep one table for several models; ours may be a view of it, and positions a view of a wider buffer."""
    whole = torch.randn(64, 32, generator=stream(5))
    wide = torch.randint(0, 64, (3, 40), generator=stream(6))
    view = RopeTable(whole[:, 8:24], (4, 2, 2))
    copy = RopeTable(whole[:, 8:24].contiguous(), (4, 2, 2))
    for ours, expected in zip(view.lookup(wide[:, :23]), copy.lookup(wide[:, :23].contiguous()), strict=True):
        assert torch.equal(ours, expected)


def test_build_scales_yarn_by_the_lengths_when_factor_is_missing() -> None:
    given = inverse_frequencies(rope_parameters("yarn"), rotary_dim=16)
    parameters = rope_parameters("yarn")
    del parameters["factor"]
    derived = inverse_frequencies(parameters, rotary_dim=16, max_positions=4096)
    assert torch.equal(given[0], derived[0])
    assert given[1] == derived[1]


def test_build_refuses_yarn_without_factor_and_lengths(refuses) -> None:
    with refuses(ConfigError, "rope_parameters", "factor"):
        inverse_frequencies(
            {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}, rotary_dim=8
        )


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("default", "rope_theta"),
        ("linear", "factor"),
        ("llama3", "factor"),
        ("llama3", "high_freq_factor"),
        ("llama3", "original_max_position_embeddings"),
        ("yarn", "original_max_position_embeddings"),
    ],
)
def test_build_names_missing_parameters(refuses, name: str, missing: str) -> None:
    parameters = rope_parameters(name)
    del parameters[missing]
    with refuses(ConfigError, "rope_parameters", f"{missing} must be set for rope_type {name!r}"):
        RopeTable.build(parameters, rotary_dim=16, num_positions=8)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "proportional", "axial"])
def test_build_refuses_other_rope_types(refuses, rope_type: str) -> None:
    with refuses(ConfigError, "rope_parameters", *FIXED_ROPE_TYPES, repr(rope_type)):
        RopeTable.build({"rope_type": rope_type, "rope_theta": 1e4}, rotary_dim=8, num_positions=4)


def test_build_reads_the_older_key_of_the_type() -> None:
    older = {"type": "linear", "factor": 2.0, "rope_theta": 1e4}
    newer = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    tables = [RopeTable.build(p, rotary_dim=8, num_positions=9).cos_sin for p in (older, newer)]
    assert torch.equal(*tables)


@pytest.mark.parametrize(
    ("sizes", "part"),
    [
        ({"rotary_dim": 8.0}, "rotary_dim must be a whole number"),
        ({"rotary_dim": -8}, "rotary_dim"),
        ({"num_positions": None}, "num_positions must be a whole number"),
        ({"num_positions": -1}, "num_positions"),
        ({"max_positions": 0}, "max_positions"),
        ({"mrope_section": [4]}, "mrope_section must be three counts"),
    ],
    ids=str,
)
def test_build_refuses_sizes_that_are_none(refuses, sizes: dict[str, Any], part: str) -> None:
    with refuses(ArgumentError, "RopeTable.build", part):
        RopeTable.build({"rope_theta": 1e4}, **{"rotary_dim": 8, "num_positions": 4} | sizes)


@pytest.mark.parametrize("theta", ["many", 0, -1.0, float("inf")], ids=repr)
def test_build_refuses_parameters_that_are_no_numbers(refuses, theta: Any) -> None:
    with refuses(ConfigError, "rope_parameters", "rope_theta must be a finite number above 0", repr(theta)):
        RopeTable.build({"rope_theta": theta}, rotary_dim=8, num_positions=4)


def test_rope_table_refuses_odd_widths_and_bad_sections(refuses) -> None:
    with refuses(ShapeError, "RopeTable", "cos_sin", "[8, 7]"):
        RopeTable(torch.zeros(8, 7))
    with refuses(ShapeError, "RopeTable", "cos_sin", "[2, 8, 8]"):
        RopeTable(torch.zeros(2, 8, 8))
    with refuses(DTypeError, "RopeTable", "cos_sin must be a floating-point tensor", "int32"):
        RopeTable(torch.zeros(8, 8, dtype=torch.int32))
    with refuses(DTypeError, "RopeTable", "cos_sin", "list"):
        RopeTable([[1.0, 0.0]])  # type: ignore[arg-type]
    with refuses(ArgumentError, "RopeTable", "mrope_section", "[2, 2]"):
        RopeTable(torch.zeros(8, 8), (2, 2))  # type: ignore[arg-type]
    with refuses(ArgumentError, "RopeTable", "mrope_section", "[2, 3, -1]"):
        RopeTable(torch.zeros(8, 8), (2, 3, -1))
