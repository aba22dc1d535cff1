"""Measuring on a machine that others use too: wait for calm, repeat what was disturbed, say how much it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from benchmarks.environment import Disturbance

CALM_CORES = 0.15
"""Cores that others may use during a measurement that is not repeated."""
WATCH_SECONDS = 5

Measured = TypeVar("Measured")


def calmest(measure: Callable[[], Measured], patience: float) -> tuple[Measured, float | None]:
    """The first calm measurement, or the calmest in the time given, and the cores that others used during it."""
    deadline = time.monotonic() + patience
    calmest: tuple[Measured, float | None] | None = None
    while True:
        while time.monotonic() < deadline and not _is_calm(_watch()):
            pass
        disturbance = Disturbance()
        found = measure()
        others = disturbance.cores()
        if calmest is None or (others or 0) < (calmest[1] or 0):
            calmest = found, others
        if _is_calm(others) or time.monotonic() >= deadline:
            return calmest


def _watch() -> float | None:
    """Cores that others use over some seconds."""
    disturbance = Disturbance()
    time.sleep(WATCH_SECONDS)
    return disturbance.cores()


def _is_calm(cores: float | None) -> bool:
    return cores is None or cores <= CALM_CORES
