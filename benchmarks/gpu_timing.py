"""Timing on one GPU: captured graphs, cold L2, contenders in turn; and the card's two ceilings in the same run."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch


class Timer:
    """Median device time of graph replays, the L2 flushed before each.

    Args:
        repeats: Replays of each contender.
        flush_bytes: Bytes written before each replay, several times the L2.
    """

    def __init__(self, repeats: int = 30, flush_bytes: int = 256 << 20) -> None:
        self.repeats = repeats
        self.flush = torch.empty(flush_bytes, dtype=torch.uint8, device="cuda")

    def interleaved(self, contenders: dict[str, Callable[[], None]], *, graph: bool = True) -> dict[str, float]:
        """Microseconds of each contender, medians over rounds in which every one runs once."""
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
        medians = {}
        for name, pairs in times.items():
            ordered = sorted(begin.elapsed_time(end) * 1e3 for begin, end in pairs)
            medians[name] = ordered[len(ordered) // 2]
        return medians

    @staticmethod
    def _captured(run: Callable[[], None]) -> Callable[[], None]:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()
        replay: Callable[[], None] = graph.replay
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
        return cls(2 * source.numel() / times["copy"], 2 * 8192**3 / times["matmul"])


def run_facts() -> dict[str, str]:
    """Commit, device, versions and command of this run."""
    import triton

    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": found.stdout.strip() or "unknown",
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "command": " ".join(["python", *sys.argv[1:]]) if sys.argv[0] == "-c" else "python -m " + sys.argv[0],
    }
