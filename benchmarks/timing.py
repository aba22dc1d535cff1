"""Time: calls of several engines taken in turn, and what the machine could do at best in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import quantiles

import torch

Call = Callable[[], object]
Prepared = Callable[[], AbstractContextManager[Call]]
"""Sets one call up, untimed, and hands it over to be timed once."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one engine's calls.

    Attributes:
        median_ms: Half of the calls took no longer.
        p20_ms: A fifth took no longer.
        p80_ms: Four fifths took no longer.
        calls: Timed calls.
    """

    median_ms: float
    p20_ms: float
    p80_ms: float
    calls: int

    @classmethod
    def of(cls, seconds: list[float]) -> Timing:
        """Summary of measured calls."""
        tenths = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds * 9
        return cls(*(round(1e3 * tenths[i], 3) for i in (4, 1, 7)), calls=len(seconds))


def interleave(engines: Mapping[str, Prepared], *, repeats: int, warmups: int = 1) -> dict[str, Timing]:
    """Time one call of each engine in turn, again and again, so that a drifting machine drifts for all of them.

    Args:
        engines: Name to what sets up a call.
        repeats: Timed calls an engine.
        warmups: Calls an engine before that.
    """
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(warmups + repeats):
        order = list(engines) if turn % 2 == 0 else list(reversed(engines))
        for name in order:
            with engines[name]() as call:
                start = time.perf_counter()
                call()
                elapsed = time.perf_counter() - start
            if turn >= warmups:
                seconds[name].append(elapsed)
    return {name: Timing.of(values) for name, values in seconds.items()}


@dataclass(frozen=True)
class Ceilings:
    """What the machine does at best.

    Attributes:
        gflop_per_s: fp32 matrix product, 2048 x 2048 x 2048.
        gbyte_per_s: Copy of 256 MiB, read and written bytes counted.
    """

    gflop_per_s: float
    gbyte_per_s: float

    def floor_ms(self, flop: float, moved_bytes: float) -> float:
        """Time below which work of that size cannot be done."""
        return 1e3 * max(flop / (self.gflop_per_s * 1e9), moved_bytes / (self.gbyte_per_s * 1e9))


def measure_ceilings(repeats: int = 7) -> Ceilings:
    """The best of several products and copies."""
    a, b, product = (torch.randn(2048, 2048) for _ in range(3))
    source, target = torch.randn(1 << 26), torch.empty(1 << 26)
    multiply = min(_seconds(lambda: torch.mm(a, b, out=product)) for _ in range(repeats))
    copy = min(_seconds(lambda: target.copy_(source)) for _ in range(repeats))
    return Ceilings(round(2 * 2048**3 / multiply / 1e9, 1), round(2 * source.nbytes / copy / 1e9, 2))


def _seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
