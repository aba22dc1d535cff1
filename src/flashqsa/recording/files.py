"""A recording as one safetensors file."""

from __future__ import annotations

import json
from os import PathLike
from types import ModuleType
from typing import Any

import torch

from flashqsa.checks import expect
from flashqsa.errors import ArgumentError, UnsupportedError
from flashqsa.recording.contents import LayerRecord, Recording, StepRecord

FORMAT, VERSION = "flashqsa.recording", 1
LAYER_TENSORS = ("block_ids", "block_counts", "visible_blocks", "scores")


def _safetensors(where: str) -> tuple[ModuleType, ModuleType]:
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise UnsupportedError(
            f"{where}: safetensors must be installed, got {type(error).__name__}: {error}. "
            "Run pip install 'flashqsa[transformers]'."
        ) from error
    return safetensors, safetensors.torch


def save_recording(recording: Recording, path: str | PathLike[str]) -> None:
    """As `Recording.save`."""
    from flashqsa import __version__

    _, torch_files = _safetensors("Recording.save")
    tensors: dict[str, torch.Tensor] = {}
    for number, step in enumerate(recording.steps):
        tensors[f"step.{number}.positions"] = step.positions
        tensors[f"step.{number}.request_ids"] = step.request_ids
        for layer_id, layer in step.layers.items():
            for name in LAYER_TENSORS:
                tensor = getattr(layer, name)
                if tensor is not None:
                    tensors[f"step.{number}.layer.{layer_id}.{name}"] = tensor
    about = {
        "block_tokens": recording.block_tokens,
        "layer_ids": list(recording.layer_ids),
        "steps": len(recording.steps),
        "flashqsa": __version__,
    }
    metadata = {"format": FORMAT, "version": str(VERSION), "recording": json.dumps(about)}
    torch_files.save_file(tensors, path, metadata=metadata)


def load_recording(path: str | PathLike[str]) -> Recording:
    """As `Recording.load`."""
    where = "Recording.load"
    safetensors, _ = _safetensors(where)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            about = _about(where, path, file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a method of the file
    except safetensors.SafetensorError as error:
        raise ArgumentError(
            f"{where}: path must be a recording, got {path}, no safetensors file: {error}. "
            "Pass what Recording.save wrote."
        ) from error
    return Recording(
        about["block_tokens"],
        tuple(about["layer_ids"]),
        [_step(path, tensors, number) for number in range(about["steps"])],
    )


def _about(where: str, path: Any, metadata: dict[str, str]) -> dict[str, Any]:
    if metadata.get("format") != FORMAT:
        raise ArgumentError(
            f"{where}: path must be a recording, got {path} of format {metadata.get('format')!r}. "
            "Pass what Recording.save wrote."
        )
    if metadata.get("version") != str(VERSION):
        raise UnsupportedError(
            f"{where}: path must be of version {VERSION}, got {path} of version {metadata.get('version')!r}. "
            "Read it with the release that wrote it, or a later one."
        )
    about: dict[str, Any] = json.loads(metadata["recording"])
    return about


def _step(path: Any, tensors: dict[str, torch.Tensor], number: int) -> StepRecord:
    """One step, its tensors checked against each other."""
    prefix = f"step.{number}."
    dims: dict[str, int] = {}
    positions = _read(path, tensors, prefix + "positions", "T", dims, torch.int64)
    request_ids = _read(path, tensors, prefix + "request_ids", "T", dims, torch.int32)
    layer_ids = sorted({int(name.split(".")[3]) for name in tensors if name.startswith(prefix + "layer.")})
    layers = {}
    for layer_id in layer_ids:
        name, dims = f"{prefix}layer.{layer_id}.", {"T": dims["T"]}
        block_ids = _read(path, tensors, name + "block_ids", "T K", dims, torch.int32)
        counts, visible = (
            _read(path, tensors, name + which, "T", dims, torch.int32) for which in ("block_counts", "visible_blocks")
        )
        has_scores = name + "scores" in tensors
        scores = _read(path, tensors, name + "scores", "T K", dims, torch.float32) if has_scores else None
        layers[layer_id] = LayerRecord(block_ids, counts, visible, scores)
    return StepRecord(request_ids, positions, layers)


def _read(
    path: Any, tensors: dict[str, torch.Tensor], name: str, spec: str, dims: dict[str, int], dtype: torch.dtype
) -> torch.Tensor:
    hint = f"{path} is damaged; record again."
    if name not in tensors:
        raise ArgumentError(f"Recording.load: path must hold {name}, got a file without. {hint}")
    expect("Recording.load", name, tensors[name], spec, dims, dtypes=(dtype,), hint=hint)
    return tensors[name]
