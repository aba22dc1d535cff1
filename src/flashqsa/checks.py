"""Argument checks: named dimensions, dtypes, devices, and when values are looked at.

Shapes, dtypes, strides and devices are checked always. Values of integer tensors (ids, lengths) are checked on the
CPU, where reading them is free, and on other devices with ``FLASHQSA_DEBUG=1``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from numbers import Integral, Real
from types import ModuleType

import torch

from flashqsa.errors import ArgumentError, DeviceError, DTypeError, FlashQSAError, ShapeError, UnsupportedError

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
CACHE_DTYPES = (*FLOAT_DTYPES, FP8)


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


def expect_int(
    where: str,
    name: str,
    value: object,
    *,
    least: int | None = 0,
    hint: str = "",
    error: type[FlashQSAError] = ArgumentError,
) -> None:
    """Check one whole number; True and 2.0 are none.

    Args:
        where: Name of the calling function, first in the message.
        name: Name of the argument.
        value: The argument.
        least: The smallest number allowed, None for any.
        hint: What to do about it, the last sentence of the message.
        error: What to raise.
    """
    whole = isinstance(value, Integral | torch.SymInt) and not isinstance(value, bool)
    if not whole or (least is not None and value < least):  # type: ignore[operator]
        rule = "" if least is None else f" of at least {least}"
        raise error(f"{where}: {name} must be a whole number{rule}, got {value!r}. {hint or f'Pass {name} as an int.'}")


def expect_number(
    where: str,
    name: str,
    value: object,
    *,
    above: float = -math.inf,
    least: float = -math.inf,
    hint: str = "",
    error: type[FlashQSAError] = ArgumentError,
) -> None:
    """Check one finite number, greater than `above` and at least `least`; other arguments as `expect_int`."""
    real = isinstance(value, Real | torch.SymFloat) and not isinstance(value, bool)
    if not real or not math.isfinite(value) or not value > above or not value >= least:  # type: ignore[operator, arg-type]
        rule = "".join(
            [f" above {above:g}" if above > -math.inf else "", f" of at least {least:g}" if least > -math.inf else ""]
        )
        raise error(
            f"{where}: {name} must be a finite number{rule}, got {value!r}. {hint or f'Pass {name} as a float.'}"
        )


def expect_type(where: str, name: str, value: object, kind: type, *, hint: str = "") -> None:
    """Check that an argument is one of this library's own objects.

    Raises:
        ArgumentError: It is something else.
    """
    if not isinstance(value, kind):
        raise ArgumentError(
            f"{where}: {name} must be a {kind.__name__}, got {type(value).__name__}. "
            f"{hint or f'Pass the {kind.__name__}.'}"
        )


def import_safetensors(where: str) -> tuple[ModuleType, ModuleType]:
    """The modules `safetensors` and `safetensors.torch`.

    Args:
        where: Name of the calling function, first in the message.

    Raises:
        UnsupportedError: safetensors is not installed.
    """
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise UnsupportedError(
            f"{where}: safetensors must be installed, got {type(error).__name__}: {error}. "
            "Run pip install 'flashqsa[transformers]'."
        ) from error
    return safetensors, safetensors.torch
