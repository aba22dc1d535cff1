"""Rotary tables: which angle a position has, and how three position axes are interleaved.

The table is a plain tensor, so an engine may hand in its own. Rotation itself belongs to the preparation stage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flashqsa.checks import expect_int, expect_number
from flashqsa.errors import ArgumentError, ConfigError, DTypeError, FlashQSAError, ShapeError

FIXED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rope types whose table does not depend on the length of the sequence."""


@dataclass(frozen=True)
class RopeTable:
    """Cosines and sines by position.

    Attributes:
        cos_sin: [positions, rotary_dim], any float dtype: the cosines of the rotary_dim / 2 frequencies, then their
            sines. Rotation multiplies the values as they are stored here, in fp32.
        mrope_section: How many frequencies each of the three position axes (time, height, width) owns, interleaved:
            frequency j takes axis j % 3 while the section of that axis lasts, else the first. None: one axis.
    """

    cos_sin: torch.Tensor
    mrope_section: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.cos_sin, torch.Tensor) or not self.cos_sin.is_floating_point():
            got = getattr(self.cos_sin, "dtype", type(self.cos_sin).__name__)
            raise DTypeError(f"RopeTable: cos_sin must be a floating-point tensor, got {got}. Use RopeTable.build.")
        if self.cos_sin.dim() != 2 or self.cos_sin.shape[1] % 2:
            raise ShapeError(
                f"RopeTable: cos_sin must be [positions, rotary_dim] with an even rotary_dim, got "
                f"{list(self.cos_sin.shape)}. Put cosines and sines of the same frequencies side by side."
            )
        if self.mrope_section is not None:
            check_mrope_section("RopeTable", self.mrope_section, ArgumentError)

    @property
    def rotary_dim(self) -> int:
        """Number of leading dimensions of a head that rotate."""
        return self.cos_sin.shape[1]

    def lookup(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of given positions.

        Args:
            positions: [N] (one axis) or [3, N] int64, each in [0, positions of the table).

        Returns:
            cos and sin, each [N, rotary_dim / 2], in the dtype of the table.
        """
        half = self.rotary_dim // 2
        if positions.dim() == 1:
            rows = self.cos_sin[positions]
            return rows[:, :half], rows[:, half:]
        frequency = torch.arange(half, device=positions.device)
        per_frequency = positions[self._axes(positions.device)].transpose(0, 1)  # [N, half]
        return self.cos_sin[per_frequency, frequency], self.cos_sin[per_frequency, half + frequency]

    def _axes(self, device: torch.device) -> torch.Tensor:
        """Position axis of each frequency, [rotary_dim / 2]."""
        half = self.rotary_dim // 2
        axes = torch.zeros(half, dtype=torch.int64, device=device)
        if self.mrope_section is not None:
            for axis in (1, 2):
                axes[axis : 3 * self.mrope_section[axis] : 3] = axis
        return axes

    @classmethod
    def build(
        cls,
        parameters: Mapping[str, Any],
        *,
        rotary_dim: int,
        num_positions: int,
        max_positions: int | None = None,
        mrope_section: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> RopeTable:
        """Compute a table from a checkpoint's rope parameters.

        Args:
            parameters: `rope_parameters` of the config: `rope_type`, `rope_theta` and what the type needs.
            rotary_dim: Dimensions that rotate.
            num_positions: Rows of the table.
            max_positions: `max_position_embeddings` of the model, which yarn uses when `factor` is missing.
            mrope_section: Sections of the three axes, or None for one axis.
            dtype: Dtype of the table; transformers rounds it to the model dtype.
            device: Device of the table.

        Raises:
            ConfigError: An unknown rope type, one whose table moves with the sequence length, or a parameter that is
                missing or no number.
            ArgumentError: A size or a section breaks a rule.
        """
        where = "RopeTable.build"
        expect_int(where, "rotary_dim", rotary_dim, hint="Use rotary_dim of the QSAConfig.")
        expect_int(where, "num_positions", num_positions, hint="Count the positions that the table serves.")
        if max_positions is not None:
            expect_int(where, "max_positions", max_positions, least=1)
        if mrope_section is not None:
            check_mrope_section(where, mrope_section, ArgumentError)
        frequencies, scale = inverse_frequencies(parameters, rotary_dim=rotary_dim, max_positions=max_positions)
        angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None]
        table = torch.cat([angles.cos() * scale, angles.sin() * scale], dim=-1).to(device=device, dtype=dtype)
        sections = None if mrope_section is None else (mrope_section[0], mrope_section[1], mrope_section[2])
        return cls(table, sections)


def check_mrope_section(where: str, section: Any, error: type[FlashQSAError]) -> None:
    """Raise unless three whole numbers say how many frequencies each axis owns."""
    counts = list(section) if isinstance(section, Sequence) and not isinstance(section, str) else [section]
    if len(counts) != 3 or not all(type(count) is int and count >= 0 for count in counts):
        raise error(f"{where}: mrope_section must be three counts, got {counts}. Use the sections of the checkpoint.")


def check_rope_type(rope_type: str) -> None:
    """Raise unless pooled keys can live under this rope type."""
    if rope_type in ("dynamic", "longrope"):
        raise ConfigError(
            f"rope_parameters: rope_type must be one of {', '.join(FIXED_ROPE_TYPES)}, got {rope_type!r}. "
            f"{rope_type} changes its angles as the sequence grows, under keys that are already pooled and cached."
        )
    if rope_type not in FIXED_ROPE_TYPES:
        raise ConfigError(
            f"rope_parameters: rope_type must be one of {', '.join(FIXED_ROPE_TYPES)}, got {rope_type!r}. "
            "Use the rope_parameters of the checkpoint."
        )


def inverse_frequencies(
    parameters: Mapping[str, Any], *, rotary_dim: int, max_positions: int | None = None
) -> tuple[torch.Tensor, float]:
    """Angle per position of each frequency, [rotary_dim / 2] fp32, and the factor on cosines and sines."""
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    check_rope_type(rope_type)
    theta = _number(parameters, rope_type, "rope_theta")
    periods = theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if rope_type == "linear":
        return 1.0 / periods / _number(parameters, rope_type, "factor"), 1.0
    if rope_type == "llama3":
        return _llama3_frequencies(1.0 / periods, parameters), 1.0
    if rope_type == "yarn":
        return _yarn_frequencies(periods, parameters, theta, rotary_dim, max_positions)
    return 1.0 / periods, 1.0


def _number(parameters: Mapping[str, Any], rope_type: str, name: str) -> float:
    """A parameter that the rope type cannot do without."""
    if parameters.get(name) is None:
        raise ConfigError(
            f"rope_parameters: {name} must be set for rope_type {rope_type!r}, got none. "
            "Use the rope_parameters of the checkpoint."
        )
    expect_number("rope_parameters", name, parameters[name], above=0.0, hint="Use the rope_parameters of the "
                  "checkpoint.", error=ConfigError)  # fmt: skip
    return float(parameters[name])


def _llama3_frequencies(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    factor, low, high = (
        _number(parameters, "llama3", name) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    original = _number(parameters, "llama3", "original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    share = ((original / wavelengths - low) / (high - low)).clamp(0, 1)
    blended = (1 - share) * frequencies / factor + share * frequencies
    stretched = torch.where(wavelengths > original / low, frequencies / factor, blended)
    return torch.where(wavelengths < original / high, frequencies, stretched)


def _yarn_frequencies(
    periods: torch.Tensor, parameters: Mapping[str, Any], theta: float, rotary_dim: int, max_positions: int | None
) -> tuple[torch.Tensor, float]:
    """Yarn: fast frequencies as trained, slow ones divided by the factor, a linear ramp between."""
    original = _number(parameters, "yarn", "original_max_position_embeddings")
    factor = parameters.get("factor")
    if factor is None:
        if max_positions is None:
            raise ConfigError("rope_parameters: yarn must have factor, got none. Give factor or max_positions.")
        factor = max_positions / original
    factor = float(factor)

    def dimension_of(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(float(parameters.get("beta_fast") or 32))
    high = dimension_of(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    frequencies = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    return frequencies, _yarn_scale(parameters, factor)


def _yarn_scale(parameters: Mapping[str, Any], factor: float) -> float:
    """Factor on cosines and sines: given, or 0.1 ln(factor) + 1, or the ratio of two such terms."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    mscale, over_all = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return magnitude(mscale) / magnitude(over_all) if mscale and over_all else magnitude(1.0)
