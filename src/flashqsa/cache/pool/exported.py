"""`ExportedRequest`: one request without pages and rings, and the file it can be."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flashqsa.checks import import_safetensors
from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError, DeviceError, UnsupportedError

FORMAT, VERSION = "flashqsa.request", 1
NUMBERS = ("length", "ring_start", "block_tokens")


@dataclass(frozen=True)
class ExportedRequest:
    """One request: its tokens in order, in every layer.

    Attributes:
        length: Tokens.
        ring_start: The raw index keys of tokens [ring_start, length) are here; at least those of the open block.
        block_tokens: Tokens of a block.
        layer_ids: The layers.
        model: What the exporting pool was told about the model, or None.
        tensors: For each layer ``layer.3.k`` and ``...v`` [length, Hkv, D], ``...block_keys`` [length // r, Di],
            ``...raw_index_keys`` [length - ring_start, Di], ``...ring_positions`` [length - ring_start, 3] int64; with
            scales also ``...k_scale`` and ``...v_scale`` [1] fp32.
    """

    length: int
    ring_start: int
    block_tokens: int
    layer_ids: tuple[int, ...]
    model: Any
    tensors: Mapping[str, torch.Tensor]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, under another name until it is whole.

        Its metadata has ``format`` = ``flashqsa.request``, ``version`` = ``1`` and ``request``, a JSON object with the
        attributes other than the tensors.

        Args:
            path: File to write, in a folder that exists.

        Raises:
            ArgumentError: `path` names no file that could be written.
            OSError: It could not be written. What was there before is as it was.
            UnsupportedError: safetensors is not installed.
        """
        where = "ExportedRequest.save"
        safetensors, torch_files = import_safetensors(where)
        about: dict[str, Any] = {name: int(getattr(self, name)) for name in NUMBERS}
        about |= {"layer_ids": list(self.layer_ids), "model": plain_model(where, self.model)}
        metadata = {"format": FORMAT, "version": str(VERSION), "request": json.dumps(about)}
        target = _path(where, path)
        if not target.name or target.is_dir() or not target.parent.is_dir():
            raise ArgumentError(
                f"{where}: path must be a file in a folder that exists, got {str(path)!r}. Make the folder first."
            )
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.{threading.get_ident()}.unfinished")
        tensors = {name: tensor.detach().contiguous() for name, tensor in self.tensors.items()}
        try:
            torch_files.save_file(tensors, unfinished, metadata)
            unfinished.replace(target)
        except safetensors.SafetensorError as error:
            raise OSError(f"{where}: {error}") from error
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> ExportedRequest:
        """Read what `save` wrote.

        Args:
            path: File to read.
            device: Where to put the tensors.

        Raises:
            ArgumentError: The file cannot be read, is no exported request, or is damaged.
            DeviceError: There is no such device.
            UnsupportedError: safetensors is not installed, or the file is of another version.
        """
        where = "ExportedRequest.load"
        safetensors, _ = import_safetensors(where)
        path, target = _path(where, path), device_of(where, device)
        try:
            with safetensors.safe_open(path, framework="pt", device=str(target)) as file:
                about = _about(where, path, file.metadata() or {})
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a method of the file
        except (safetensors.SafetensorError, OSError) as error:
            raise ArgumentError(
                f"{where}: path must be a whole exported request, got {path}: {error}. Pass what save wrote."
            ) from error
        return cls(
            about["length"], about["ring_start"], about["block_tokens"], tuple(about["layer_ids"]), about["model"],
            tensors,
        )  # fmt: skip


def _about(where: str, path: Any, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The JSON object of a file, with all that it must hold."""
    if metadata.get("format") != FORMAT:
        raise ArgumentError(
            f"{where}: path must be an exported request, got {path} of format {metadata.get('format')!r}. "
            "Pass what save wrote."
        )
    if metadata.get("version") != str(VERSION):
        raise UnsupportedError(
            f"{where}: path must be of version {VERSION}, got {path} of version {metadata.get('version')!r}. "
            "Read it with the release that wrote it."
        )
    try:
        about = json.loads(metadata["request"])
    except (KeyError, ValueError, RecursionError):  # numbers too long and brackets too deep are no JSON errors
        about = None
    needed = {*NUMBERS, "layer_ids", "model"}
    if not isinstance(about, dict) or not needed <= about.keys() or not isinstance(about["layer_ids"], list):
        raise ArgumentError(f"{where}: path must describe its request, got {path} without. Export the request again.")
    return about


def _path(where: str, path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ArgumentError(f"{where}: path must be a str or a Path, got {path!r}. Name a file.")
    return Path(path)


def device_of(where: str, device: object) -> torch.device:
    """The device that is meant.

    Raises:
        DeviceError: torch knows none of that name, or sees no GPU.
    """
    found: torch.device | None
    try:
        found = torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError):
        found = None
    if found is None or (found.type == "cuda" and not torch.cuda.is_available()):
        raise DeviceError(f"{where}: device must be one that torch can use here, got {device!r}. Pass cpu or cuda.")
    return found


def plain_model(where: str, model: Any) -> Any:
    """What a model is described by, as a file gives it back: tuples as lists, keys as strings.

    Raises:
        ArgumentError: It is no JSON value.
    """
    try:
        return json.loads(json.dumps(model))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"{where}: model must be a JSON value, got {type(model).__name__}: {error}. Describe the model by strings, "
            "numbers, lists and objects."
        ) from error


def model_of(config: QSAConfig) -> dict[str, Any]:
    """What a checkpoint's constants say about the content of caches: how keys are rotated and normed."""
    about = {"rope_parameters": dict(config.rope_parameters), "rotary_dim": config.rotary_dim,
             "mrope_section": config.mrope_section, "norm_eps": config.norm_eps}  # fmt: skip
    plain: dict[str, Any] = json.loads(json.dumps(about, default=str))
    return plain
