"""How much memory this process holds, and held at most since a moment of one's choice."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_PEAK = Path("/proc/self/clear_refs")


def start_peak(device: torch.device) -> int:
    """Forgets the peak so far, where the system can.

    Args:
        device: A CUDA device, whose allocations are then counted; any other means this process's resident memory.

    Returns:
        Bytes held now.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    with suppress(OSError):  # not Linux, or not allowed: the peak then counts from the start of the process
        _CLEAR_PEAK.write_text("5", encoding="ascii")
    return _resident_bytes()


def peak_bytes(device: torch.device) -> int:
    """Bytes held at most since `start_peak`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # getrusage would do, but a process inherits there the peak of the one that started it.
    peak = _status_bytes("VmHWM")
    return _largest_resident_bytes() if peak is None else peak


def _resident_bytes() -> int:
    now = _status_bytes("VmRSS")
    if now is None:
        import psutil

        now = int(psutil.Process().memory_info().rss)
    return now


def _largest_resident_bytes() -> int:
    """The peak since the process started, on systems without a status file."""
    if sys.platform == "win32":
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _status_bytes(name: str) -> int | None:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(encoding="ascii", errors="replace"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
