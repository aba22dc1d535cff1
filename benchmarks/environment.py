"""Where a figure comes from: commit, machine, versions, command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ("src", "benchmarks/*.py")
"""What a figure depends on; a change here that is not committed is told beside the commit."""


def environment() -> dict[str, Any]:
    """Everything that a reader needs to place a figure. Goes into every row."""
    return {
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "device": "cpu",
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instruction_set": torch.backends.cpu.get_cpu_capability(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "transformers")},
    }


def commit() -> str:
    """Short commit of the checkout, with "+changes" when measured files differ from it; "unknown" without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", *MEASURED)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+changes" if changed else head


class Disturbance:
    """How many cores other processes keep busy from its making on. A figure that was disturbed says so."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._before = self._others()

    def cores(self) -> float | None:
        """Cores that others used on average; None on a system without /proc/stat."""
        now = self._others()
        if now is None or self._before is None:
            return None
        return round(max(0.0, now - self._before) / (time.perf_counter() - self._begun), 2)

    @staticmethod
    def _others() -> float | None:
        """Core seconds of all processes, time taken by a hypervisor included, without those of this one."""
        try:
            fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        user, nice, system, _, _, irq, softirq, steal = (int(field) for field in fields)
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return busy - sum(os.times()[:4])


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def cpu_model() -> str:
    """Name of the processor, with family and model where the name alone says little."""
    facts: dict[str, str] = {}
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    for line in lines:
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    named = facts.get("model name", platform.machine())
    if "cpu family" in facts:
        named += f" (family {facts['cpu family']}, model {facts.get('model', '?')})"
    return named


def installed(name: str) -> str:
    """Version of a package, or "absent"."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"


def command() -> str:
    """The words that started this run, as one would type them in the root of a checkout."""
    return shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
