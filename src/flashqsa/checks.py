"""Argument checks: named dimensions, dtypes, devices, and when values are looked at.

Shapes, dtypes, strides and devices are checked always. Values of integer tensors (ids, lengths) are checked on the
CPU, where reading them is free, and on other devices with ``FLASHQSA_DEBUG=1``.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from flashqsa.errors import DeviceError, DTypeError, ShapeError

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def values_are_checked(device: torch.device) -> bool:
    """Whether this call may read tensor values on the host."""
    return device.type == "cpu" or os.environ.get("FLASHQSA_DEBUG") == "1"


def expect(
    where: str,
    name: str,
    tensor: torch.Tensor,
    spec: str,
    dims: dict[str, int],
    *,
    dtypes: Sequence[torch.dtype] | None = None,
    device: torch.device | None = None,
    hint: str = "",
) -> None:
    """Check one tensor against named dimensions, binding the names that are new.

    Args:
        where: Name of the calling function, first in the message.
        name: Name of the argument.
        tensor: The argument.
        spec: Dimension names separated by spaces, e.g. ``"T Hq D"``; a number stands for itself.
        dims: Known dimensions; names of `spec` that it lacks are added.
        dtypes: Allowed dtypes, or None for any.
        device: Device it must be on, or None for any.
        hint: What to do about it, the last sentence of the message.

    Raises:
        ShapeError: Rank or a dimension differs, or the last dimension is not contiguous.
        DTypeError: The dtype is not allowed.
        DeviceError: The device differs.
    """
    if not isinstance(tensor, torch.Tensor):
        got = type(tensor).__name__
        raise DTypeError(f"{where}: {name} must be a torch.Tensor [{spec}], got {got}. {hint or 'Pass a tensor.'}")
    letters = spec.split()
    shape = list(tensor.shape)
    wanted = [int(d) if d.isdigit() else dims.get(d) for d in letters]
    if len(shape) != len(letters) or any(w is not None and w != s for w, s in zip(wanted, shape, strict=True)):
        known = ", ".join(d if w is None else str(w) for d, w in zip(letters, wanted, strict=True))
        raise ShapeError(
            f"{where}: {name} must be [{', '.join(letters)}] = [{known}], got {shape}. "
            f"{hint or f'Pass {name} in that shape.'}"
        )
    for letter, size in zip(letters, shape, strict=True):
        if not letter.isdigit():
            dims.setdefault(letter, size)
    if shape and shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ShapeError(
            f"{where}: {name} must be contiguous in its last dimension, got strides {list(tensor.stride())}. "
            f"{hint or 'Pass x.contiguous() or a view that keeps the last dimension whole.'}"
        )
    if dtypes is not None and tensor.dtype not in dtypes:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        got = str(tensor.dtype).removeprefix("torch.")
        raise DTypeError(f"{where}: {name} must be one of {allowed}, got {got}. {hint or f'Convert {name}.'}")
    if device is not None and tensor.device != device:
        raise DeviceError(
            f"{where}: {name} must be on {device} like the caches, got {tensor.device}. {hint or f'Move {name}.'}"
        )
