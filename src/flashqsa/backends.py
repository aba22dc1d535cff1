"""Which implementation serves a call. An explicit backend never falls back; `auto` says once why it chose."""

from __future__ import annotations

import warnings

import torch

from flashqsa.errors import ArgumentError, UnsupportedError

STAGES = ("prepare", "select_blocks", "attend")
BACKENDS = ("reference", "torch", "triton")
NO_TRITON = "this version has no Triton kernel for {stage}"

_announced: set[tuple[str, str]] = set()


def resolve_backend(stage: str, backend: str, device: torch.device) -> str:
    """Name of the backend that serves a stage.

    Args:
        stage: One of `STAGES`.
        backend: "auto", or one of `BACKENDS`.
        device: Where the tensors are.

    Raises:
        ArgumentError: An unknown name.
        UnsupportedError: The named backend does not serve this stage here.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ArgumentError(f"{stage}: backend must be one of auto, {', '.join(BACKENDS)}, got {backend!r}.")
    if backend == "triton":
        raise UnsupportedError(
            f"{stage}: backend 'triton' is refused on {device}: {NO_TRITON.format(stage=stage)}. "
            "Use 'torch', or 'auto'."
        )
    if backend != "auto":
        return backend
    if device.type != "cpu" and (stage, device.type) not in _announced:
        _announced.add((stage, device.type))
        warnings.warn(
            f"{stage}: backend 'torch' serves {device.type} tensors, because {NO_TRITON.format(stage=stage)}.",
            stacklevel=4,
        )
    return "torch"


def explain(device: torch.device | str = "cpu") -> dict[str, dict[str, str]]:
    """Why each backend of each stage is taken or refused on a device.

    Args:
        device: Where the tensors would be.

    Returns:
        Stage name to backend name to one line; the line of the backend that "auto" takes starts with "taken".
    """
    kind = torch.device(device).type
    why_torch = "taken: plain torch serves every device" if kind == "cpu" else "taken: no kernel serves this device"
    return {
        stage: {
            "torch": why_torch,
            "triton": f"refused: {NO_TRITON.format(stage=stage)}",
            "reference": "refused by auto: the definition, for tests; ask for it by name",
        }
        for stage in STAGES
    }
