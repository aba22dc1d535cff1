"""Which implementation serves a call. An explicit backend never falls back; `auto` says once why it chose."""

from __future__ import annotations

import functools
import warnings

import torch

from flashqsa.errors import ArgumentError, UnsupportedError

STAGES = ("prepare", "select_blocks", "attend")
BACKENDS = ("reference", "torch", "triton")
LEAST_CAPABILITY = (8, 0)

_announced: set[tuple[str, str]] = set()


@functools.cache
def triton_refusal(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, whatever the call; None when they can.

    CUDA devices of compute capability 8.0 and later are served, and the CPU where Triton's interpreter is on
    (TRITON_INTERPRET=1 before Triton is imported).
    """
    try:
        import triton
    except ImportError:
        return "triton is not installed"
    if device.type == "cpu":
        return None if triton.knobs.runtime.interpret else "kernels run on CUDA devices"
    if device.type != "cuda" or torch.version.cuda is None:
        return f"kernels run on CUDA devices, not on {device.type}"
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return "kernels need compute capability 8.0"
    return None


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; 1 where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def takes_kernels(device: torch.device) -> bool:
    """Whether `auto` takes kernels on this device, whatever the call."""
    return device.type == "cuda" and triton_refusal(device) is None


def resolve_backend(stage: str, backend: str, device: torch.device, refusal: str | None) -> str:
    """Name of the backend that serves a call.

    Args:
        stage: One of `STAGES`.
        backend: "auto", or one of `BACKENDS`.
        device: Where the tensors are.
        refusal: Why Triton does not serve the call, or None when it does.

    Raises:
        ArgumentError: An unknown name.
        UnsupportedError: The named backend does not serve this call.
    """
    if backend != "auto" and backend not in BACKENDS:
        raise ArgumentError(
            f"{stage}: backend must be one of auto, {', '.join(BACKENDS)}, got {backend!r}. Leave it out for auto."
        )
    if backend == "triton" and refusal is not None:
        raise UnsupportedError(
            f"{stage}: backend must serve the call, got 'triton', which refuses it: {refusal}. Use 'torch', or 'auto'."
        )
    if backend != "auto":
        return backend
    if device.type == "cpu":
        return "torch"
    if refusal is None:
        return "triton"
    if (stage, refusal) not in _announced:
        _announced.add((stage, refusal))
        warnings.warn(f"{stage}: backend 'torch' serves {device.type} tensors: {refusal}.", stacklevel=4)
    return "torch"


def explain(device: torch.device | str = "cpu") -> dict[str, dict[str, str]]:
    """Why each backend of each stage is taken or refused on a device.

    A call can be refused for more reasons (dtypes, head counts, gradients); asking for backend "triton" names them.

    Args:
        device: Where the tensors would be.

    Returns:
        Stage name to backend name to one line; the line of the backend that "auto" takes starts with "taken".
    """
    where = torch.device(device)
    lines = {}
    refusal, takes_triton = triton_refusal(where), takes_kernels(where)
    if refusal is not None:
        kernel = f"refused: {refusal}"
    else:
        kernel = "taken" if takes_triton else "refused by auto: interpreted"
    for stage in STAGES:
        lines[stage] = {
            "torch": "refused by auto: kernels are faster"
            if takes_triton
            else "taken: plain torch serves every device",
            "triton": kernel,
            "reference": "refused by auto: the definition, for tests; ask for it by name",
        }
    return lines
