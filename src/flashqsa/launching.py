# mypy: ignore-errors
"""Launches that overlap: a kernel becomes resident while the one before it on its stream ends (compute capability 9.0).

A kernel that is launched with `overlapping` calls `wait_for_previous` before it touches memory that another kernel may
write or read. Waiting is for the whole of the launch before, which waited for the one before it, and so on.
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Return when all launches before have ended and their writes are seen; let the next launch become resident."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()


@functools.cache
def overlapping(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel with a constexpr OVERLAP: both True where the device can overlap launches."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}
