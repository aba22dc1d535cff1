"""The devices of this machine, and whether kernels run on them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.backends import triton_refusal


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device.

    Attributes:
        name: As torch names it.
        told: What it is.
        capability: Compute capability of a CUDA device, as `9.0`; None for others.
        free_bytes: Memory that can be allocated now.
        total_bytes: All its memory.
        kernels: Why Triton kernels do not run there; None where they do.
    """

    name: str
    told: str
    capability: str | None
    free_bytes: int
    total_bytes: int
    kernels: str | None


def look_at_devices() -> tuple[Device, ...]:
    """The CPU, then all CUDA devices."""
    cuda = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return _cpu(), *(_cuda(number) for number in cuda)


def _cpu() -> Device:
    import psutil

    memory = psutil.virtual_memory()
    threads = torch.get_num_threads()
    return Device(
        name="cpu",
        told=f"{threads} thread{'' if threads == 1 else 's'} of torch",
        capability=None,
        free_bytes=memory.available,
        total_bytes=memory.total,
        kernels=triton_refusal(torch.device("cpu")),
    )


def _cuda(number: int) -> Device:
    device = torch.device("cuda", number)
    properties = torch.cuda.get_device_properties(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return Device(
        name=str(device),
        told=f"{properties.name}, capability {properties.major}.{properties.minor}",
        capability=f"{properties.major}.{properties.minor}",
        free_bytes=free_bytes,
        total_bytes=total_bytes,
        kernels=triton_refusal(device),
    )
