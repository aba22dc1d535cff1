"""The weights of a checkpoint as `flashqsa doctor` sees them: from the headers of its files, nothing is loaded."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashqsa.commands.doctor_findings import Finding
from flashqsa.config import QSAConfig
from flashqsa.errors import ConfigError

FLOATS = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""Bytes of an element, by the names in safetensors files; others (quantised weights) keep their size."""

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
INDEXER_PARTS = ("index_qk_proj", "q_layernorm", "k_layernorm")
_MOST_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class Weights:
    """What a checkpoint's files hold.

    Attributes:
        dtype: The dtype of most of its floating-point bytes; None when there are none.
        float_elements: Elements of floating-point tensors.
        other_bytes: Bytes of all other tensors.
        missing: Parts of indexers that no file holds, as `layer 3: index_qk_proj`.
    """

    dtype: torch.dtype | None
    float_elements: int
    other_bytes: int
    missing: tuple[str, ...]

    def loaded_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the weights once loaded in a dtype."""
        return self.float_elements * dtype.itemsize + self.other_bytes


def read_weights(checkpoint: Path, config: QSAConfig) -> Weights | None:
    """Looks at the safetensors files of a checkpoint.

    Returns:
        None where there is no such file.

    Raises:
        ConfigError: A file is damaged or cannot be read.
    """
    files = sorted(checkpoint.glob("*.safetensors"))
    if not files:
        return None
    stored: dict[str, int] = {}
    other_bytes, names = 0, []
    for file in files:
        for name, tensor in _header(file):
            names.append(name)
            elements = math.prod(tensor["shape"])
            if tensor["dtype"] in FLOATS:
                stored[tensor["dtype"]] = stored.get(tensor["dtype"], 0) + elements
            else:
                start, end = tensor["data_offsets"]
                other_bytes += end - start
    most = max(stored, key=lambda kind: stored[kind] * FLOATS[kind], default=None)
    return Weights(
        dtype=None if most is None else DTYPES[most],
        float_elements=sum(stored.values()),
        other_bytes=other_bytes,
        missing=tuple(_missing(names, config)),
    )


def weight_findings(checkpoint: Path, weights: Weights | None) -> list[Finding]:
    """What to do about a checkpoint without weights, or without those of an indexer."""
    if weights is None:
        told, remedy = "holds no safetensors file", "fetch its weights, or pass a folder that holds them"
    elif weights.missing:
        parts = f"{len(weights.missing)} parts of indexers, such as {weights.missing[0]}"
        told, remedy = f"lacks {parts}", "fetch or convert it again: without them nothing can be selected"
    else:
        return []
    return [Finding(problem=True, about=str(checkpoint), told=told, remedy=remedy)]


def _header(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name, dtype, shape and place of every tensor of a file."""
    try:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            if header_bytes > _MOST_HEADER_BYTES:
                raise ValueError("its header is too long")
            header = json.loads(stream.read(header_bytes))
        tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
        end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
        held = file.stat().st_size - 8 - header_bytes
        if held != end:
            raise ValueError(f"it holds {held} bytes of tensors, its header says {end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        told = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            f"doctor: checkpoint must hold whole safetensors files, got {file} ({told}). Fetch it again."
        ) from error
    yield from tensors.items()


def _missing(names: list[str], config: QSAConfig) -> Iterator[str]:
    for layer_id in config.qsa_layer_ids:
        for part in INDEXER_PARTS:
            wanted = re.compile(rf"(^|\.)layers\.{layer_id}\..*\bindexer\.{part}\b")
            if not any(wanted.search(name) for name in names):
                yield f"layer {layer_id}: {part}"
