"""Timing on one GPU: captured graphs, cold L2, contenders in turn; and the card's two ceilings in the same run."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from benchmarks.environment import commit, installed


class Timer:
    """Median device time of graph replays, the L2 flushed before each.

    Args:
        repeats: Replays of each contender.
        flush_bytes: Bytes written before each replay, several times the L2.
    """

    def __init__(self, repeats: int = 30, flush_bytes: int = 256 << 20) -> None:
        self.repeats = repeats
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8, device="cuda")

    def interleaved(
        self, contenders: dict[str, Callable[[], object]], *, graph: bool = True
    ) -> dict[str, dict[str, float]]:
        """Microseconds of each contender, median and percentiles, over rounds in which every one runs once."""
        runs = {name: self._captured(run) if graph else run for name, run in contenders.items()}
        times: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
        for _ in range(self.repeats):
            for name, run in runs.items():
                self.flush.zero_()
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                run()
                end.record()
                times[name].append((begin, end))
        torch.cuda.synchronize()
        spreads = {}
        for name, pairs in times.items():
            ordered = sorted(begin.elapsed_time(end) * 1e3 for begin, end in pairs)
            cuts = {"median_us": 0.5, "p20_us": 0.2, "p80_us": 0.8}
            spreads[name] = {cut: ordered[int(share * len(ordered))] for cut, share in cuts.items()}
        return spreads

    @staticmethod
    def _captured(run: Callable[[], object]) -> Callable[[], object]:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()
        replay: Callable[[], object] = graph.replay
        return replay


@dataclass(frozen=True)
class Ceilings:
    """What the card does at most: bytes of a large copy (read plus written), FLOP of a large bf16 product."""

    copy_bytes_per_us: float
    matmul_flop_per_us: float

    @classmethod
    def measure(cls, timer: Timer) -> Ceilings:
        """Measure both on random data."""
        source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        times = timer.interleaved({"copy": lambda: target.copy_(source), "matmul": lambda: a @ b}, graph=False)
        return cls(2 * source.numel() / times["copy"]["median_us"], 2 * 8192**3 / times["matmul"]["median_us"])


def gpu_environment(commit_given: str | None) -> dict[str, Any]:
    """Commit, date, device and versions of this run.

    Args:
        commit_given: The commit, for a checkout without git.
    """
    return {
        "commit": commit_given or commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **{name: installed(name) for name in ("torch", "triton")},
    }
