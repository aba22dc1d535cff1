"""Peak memory of one call, measured in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.environment import ROOT

STATUS = Path("/proc/self/status")
CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Peak:
    """Resident memory around one call, in MiB.

    Attributes:
        before_mib: Before the call: the interpreter, torch, the weights and the inputs.
        peak_mib: The most during the call, all of that included.
    """

    before_mib: float
    peak_mib: float

    @property
    def growth_mib(self) -> float:
        """What the call added at its peak."""
        return self.peak_mib - self.before_mib


def peak_of(call: Callable[[], object]) -> Peak:
    """Run a call and see how far this process's resident memory rises.

    Args:
        call: What to run, once.

    Raises:
        RuntimeError: The system is not Linux, whose kernel keeps a peak that can be reset.
    """
    if not CLEAR.exists():
        raise RuntimeError("peak memory is read from /proc, which Linux has; leave memory out on other systems")
    CLEAR.write_text("5", encoding="ascii")
    before = _status_mib("VmRSS")
    call()
    return Peak(before, _status_mib("VmHWM"))


def _status_mib(name: str) -> float:
    for line in STATUS.read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"{STATUS} has no {name}")


def in_child(*words: str) -> dict[str, Any]:
    """Run ``python -m benchmarks`` with these words, and read the JSON object on its last line.

    Raises:
        RuntimeError: The child failed; its last lines are in the message.
    """
    done = subprocess.run([sys.executable, "-m", "benchmarks", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"benchmarks {' '.join(words)} failed:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
