"""A recording as one safetensors file."""

from __future__ import annotations

import json
from os import PathLike
from typing import Any

import torch

from flashqsa.checks import expect, import_safetensors
from flashqsa.errors import ArgumentError, UnsupportedError
from flashqsa.recording.contents import LayerRecord, Recording, StepRecord

FORMAT, VERSION = "flashqsa.recording", 1
LAYER_TENSORS = ("block_ids", "block_counts", "visible_blocks", "scores")


def save_recording(recording: Recording, path: str | PathLike[str]) -> None:
    """As `Recording.save`."""
    from flashqsa import __version__

    _, torch_files = import_safetensors("Recording.save")
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for number, step in enumerate(recording.steps):
        tensors[f"step.{number}.positions"] = step.positions
        tensors[f"step.{number}.request_ids"] = step.request_ids
        for layer_id, layer in step.layers.items():
            for name in LAYER_TENSORS:
                tensor = getattr(layer, name)
                if tensor is not None:
                    tensors[f"step.{number}.layer.{layer_id}.{name}"] = tensor
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage().data_ptr()
        if storage in storages or not tensor.is_contiguous():  # the format writes each tensor on its own
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        storages.add(storage)
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
    safetensors, _ = import_safetensors(where)
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
        [_step(path, tensors, number, about) for number in range(about["steps"])],
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
    try:
        about = json.loads(metadata.get("recording", ""))
    except json.JSONDecodeError:
        about = None
    counts = [about.get("block_tokens"), about.get("steps")] if isinstance(about, dict) else []
    layer_ids = about.get("layer_ids") if isinstance(about, dict) else None
    fits = all(type(n) is int and n >= 0 for n in counts) and isinstance(layer_ids, list)
    if not (fits and counts and counts[0] and all(type(n) is int for n in layer_ids or ())):
        raise ArgumentError(
            f"{where}: source must be a recording that can be read, with block_tokens, layer_ids and steps, got "
            f"metadata {metadata.get('recording')!r} in {path}. The file is damaged; record again."
        )
    assert isinstance(about, dict)
    return about


def _step(path: Any, tensors: dict[str, torch.Tensor], number: int, about: dict[str, Any]) -> StepRecord:
    """One step, its tensors checked against each other."""
    prefix = f"step.{number}."
    dims: dict[str, int] = {}
    positions = _read(path, tensors, prefix + "positions", "T", dims, torch.int64)
    request_ids = _read(path, tensors, prefix + "request_ids", "T", dims, torch.int32)
    layers = {}
    for layer_id in about["layer_ids"]:
        name, dims = f"{prefix}layer.{layer_id}.", {"T": positions.shape[0]}
        if not any(name + which in tensors for which in LAYER_TENSORS):
            continue  # the forward that was recorded had failed before this layer
        block_ids = _read(path, tensors, name + "block_ids", "T K", dims, torch.int32)
        counts, visible = (
            _read(path, tensors, name + which, "T", dims, torch.int32) for which in ("block_counts", "visible_blocks")
        )
        has_scores = name + "scores" in tensors
        scores = _read(path, tensors, name + "scores", "T K", dims, torch.float32) if has_scores else None
        layers[layer_id] = LayerRecord(block_ids, counts, visible, scores)
        _check_values(path, name, layers[layer_id], (positions + 1) // about["block_tokens"])
    return StepRecord(request_ids, positions, layers)


def _check_values(path: Any, name: str, layer: LayerRecord, seen: torch.Tensor) -> None:
    """Visible blocks within those of the positions, counts within both, ids ascending and visible, -1 behind them."""
    ids, counts, visible = layer.block_ids, layer.block_counts, layer.visible_blocks
    valid = torch.arange(ids.shape[1])[None] < counts[:, None]
    rows = {
        "visible_blocks": (visible < 0) | (visible > seen),
        "block_counts": (counts < 0) | (counts > ids.shape[1]),
        "block_ids": (torch.where(valid, (ids < 0) | (ids >= visible[:, None]), ids != -1)).any(dim=1)
        | (valid[:, 1:] & (ids[:, 1:] <= ids[:, :-1])).any(dim=1),
    }
    for which, bad in rows.items():
        if bool(bad.any()):
            row = int(bad.nonzero()[0, 0])
            raise ArgumentError(
                "Recording.load: path must hold ascending ids of visible blocks, as many as their count and -1 behind "
                f"them, got {which} {getattr(layer, which)[row].tolist()} in row {row} of {name[:-1]}. "
                f"{path} is damaged; record again."
            )


def _read(
    path: Any, tensors: dict[str, torch.Tensor], name: str, spec: str, dims: dict[str, int], dtype: torch.dtype
) -> torch.Tensor:
    hint = f"{path} is damaged; record again."
    if name not in tensors:
        raise ArgumentError(f"Recording.load: path must hold {name}, got a file without. {hint}")
    expect("Recording.load", name, tensors[name], spec, dims, dtypes=(dtype,), hint=hint)
    return tensors[name]
