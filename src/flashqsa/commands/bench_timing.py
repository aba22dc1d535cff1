"""Times of `flashqsa bench`: contenders in turn, medians, and what the device does at best in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import quantiles

import torch

Call = Callable[[], object]

FLUSH_BYTES = 256 << 20
"""Written before each call on a GPU, several times its L2."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Microseconds of one contender.

    Attributes:
        median_us: Half of the calls took no longer.
        p20_us: A fifth took no longer.
        p80_us: Four fifths took no longer.
        calls: Timed calls.
    """

    median_us: float
    p20_us: float
    p80_us: float
    calls: int


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What the device does at best.

    Attributes:
        copy_gb_per_s: A large copy, read and written bytes counted.
        matmul_tflops: A large matrix product in the model dtype.
    """

    copy_gb_per_s: float
    matmul_tflops: float

    def floor_us(self, flop: float, moved_bytes: float) -> float:
        """Microseconds below which work of that size cannot be done."""
        return max(flop / (self.matmul_tflops * 1e6), moved_bytes / (self.copy_gb_per_s * 1e3))


def time_in_turn(contenders: Mapping[str, Call], *, repeats: int, device: torch.device) -> dict[str, Spread]:
    """Times one call of each contender in turn, again and again, so that a drifting machine drifts for all.

    On CUDA a call is the replay of a graph after the L2 was flushed, timed by events on the device.

    Args:
        contenders: Name to call.
        repeats: Timed calls of each.
        device: Where they run.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            return _time_graphs(contenders, repeats)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-1, repeats):
        for name, call in contenders.items():
            begin = time.perf_counter()
            call()
            if turn >= 0:
                times[name].append((time.perf_counter() - begin) * 1e6)
    return {name: _spread(calls) for name, calls in times.items()}


def measure_ceilings(dtype: torch.dtype, device: torch.device, repeats: int = 5) -> Ceilings:
    """Measures both on random data; the better ones of several calls count."""
    on_gpu = device.type == "cuda"
    side, size = (8192, 2 << 30) if on_gpu else (2048, 256 << 20)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.ones(size, dtype=torch.uint8, device=device)
    product, target = torch.empty_like(a), torch.empty_like(source)
    calls: dict[str, Call] = {"matmul": lambda: torch.mm(a, b, out=product), "copy": lambda: target.copy_(source)}
    best = {name: spread.p20_us for name, spread in time_in_turn(calls, repeats=repeats, device=device).items()}
    return Ceilings(
        copy_gb_per_s=round(2 * size / best["copy"] / 1e3, 2),
        matmul_tflops=round(2 * side**3 / best["matmul"] / 1e6, 4),
    )


def _time_graphs(contenders: Mapping[str, Call], repeats: int) -> dict[str, Spread]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    graphs = {name: _captured(call) for name, call in contenders.items()}
    pairs: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in graphs}
    for _ in range(repeats):
        for name, graph in graphs.items():
            flush.zero_()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            graph.replay()
            end.record()
            pairs[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: _spread([begin.elapsed_time(end) * 1e3 for begin, end in timed]) for name, timed in pairs.items()}


def _captured(call: Call) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _spread(times: list[float]) -> Spread:
    tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
    median, p20, p80 = (round(tenths[place], 2) for place in (4, 1, 7))
    return Spread(median_us=median, p20_us=p20, p80_us=p80, calls=len(times))
