# mypy: ignore-errors
"""Launches that overlap: a kernel becomes resident while the one before it on its stream ends (compute capability 9.0).

A kernel that is launched with `overlapping` calls `wait_for_previous` before it touches memory that another kernel may
write or read. Waiting is for the whole of the launch before, which waited for the one before it, and so on.

Between both it may ask for lines of memory (`ask_for`).
"""

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The next launch may become resident once all programs of this one have come here or ended."""
    if OVERLAP:
        gdc_launch_dependents()


@triton.jit
def wait_for_writes(OVERLAP: tl.constexpr):
    """Return when all launches before have ended and their writes are seen."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """Let the next launch become resident, then wait for those before."""
    let_next_start(OVERLAP)
    wait_for_writes(OVERLAP)


@triton.jit
def ask_for(addresses):
    """Ask the L2 for the lines of some addresses. Nothing is read, so it may stand before the wait."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [addresses.to(tl.int64)], dtype=tl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


def launched_where(device_of):
    """Decorate a launcher: its kernels go to the device of its first argument, whatever device is current.

    Triton launches on the current device and its stream.

    Args:
        device_of: The device, from the first argument.
    """

    def decorate(launcher):
        @functools.wraps(launcher)
        def launch(first, *args, **kwargs):
            device = device_of(first)
            if device.type != "cuda" or device.index == torch.cuda.current_device():
                return launcher(first, *args, **kwargs)
            with torch.cuda.device(device):
                return launcher(first, *args, **kwargs)

        return launch

    return decorate


@functools.cache
def overlapping(device: torch.device) -> dict[str, bool]:
    """Launch options of a kernel with a constexpr OVERLAP: both True where the device can overlap launches."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"OVERLAP": True, "launch_pdl": True} if able else {"OVERLAP": False}
