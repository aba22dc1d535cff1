"""What `flashqsa bench` found, its break-even length, and the same as JSON."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from flashqsa import __version__
from flashqsa.commands.bench_timing import Ceilings, Spread
from flashqsa.commands.bench_workload import Setting

NAME = "flashqsa bench"
SPARSE, DENSE = "select + attend", "dense"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One context.

    Attributes:
        context: Tokens of each request.
        times: Times by the name of what was timed.
        floor_us: Below it selection and attention cannot be done.
        neighbour_overlap: Share of a row's blocks that the row before it selected; None without such rows.
    """

    context: int
    times: Mapping[str, Spread]
    floor_us: float
    neighbour_overlap: float | None

    @property
    def speedup(self) -> float | None:
        """Dense attention's time over that of selection and attention; None where dense was left out."""
        return self.times[DENSE].median_us / self.times[SPARSE].median_us if DENSE in self.times else None


@dataclass(frozen=True, kw_only=True)
class BenchOutcome:
    """Everything there is to tell.

    Attributes:
        checkpoint: The folder as given, or None for the released shapes.
        setting: What all contexts have in common.
        repeats: Timed calls.
        threads: CPU threads.
        backends: What each stage took.
        ceilings: What the device does at best.
        contexts: What was found, shortest first.
    """

    checkpoint: str | None
    setting: Setting
    repeats: int
    threads: int
    backends: Mapping[str, str]
    ceilings: Ceilings
    contexts: tuple[Measured, ...]


def break_even(contexts: Sequence[Measured]) -> tuple[int | None, str]:
    """From which context on selection and attention take no longer than dense attention, and a sentence about it.

    Between two measured contexts, times are taken for powers of the context.
    """
    if not contexts or contexts[0].speedup is None:
        return None, "not looked for: dense attention was left out"
    behind = [place for place, measured in enumerate(contexts) if (measured.speedup or 0) < 1]
    if not behind:
        return None, f"faster than dense attention at every context, from {contexts[0].context:,} tokens on"
    last = behind[-1]
    if last == len(contexts) - 1:
        return None, f"not faster than dense attention at {contexts[last].context:,} tokens; measure longer contexts"
    before, after = contexts[last : last + 2]
    assert before.speedup is not None
    assert after.speedup is not None
    low, high = math.log(before.speedup), math.log(after.speedup)
    share = -low / (high - low)
    tokens = round(before.context * (after.context / before.context) ** share)
    return tokens, f"from about {float(f'{tokens:.2g}'):,.0f} tokens on faster than dense attention"


def as_json(outcome: BenchOutcome) -> dict[str, Any]:
    """The outcome as plain values, under the names that the documentation lists; its comparison comes beside it."""
    setting, config = outcome.setting, outcome.setting.config
    shapes = ("hidden_size", "q_heads", "kv_heads", "head_dim", "index_heads", "index_head_dim")
    tokens, told = break_even(outcome.contexts)
    return {
        "benchmark": NAME,
        "checkpoint": outcome.checkpoint,
        "shapes": {name: getattr(config, name) for name in (*shapes, "block_tokens", "budget_tokens")},
        "requests": setting.requests,
        "rows": setting.rows,
        "page_tokens": setting.page_tokens,
        "dtype": str(setting.dtype).removeprefix("torch."),
        "device": str(setting.device),
        "device_name": device_name(setting.device),
        "threads": outcome.threads,
        "repeats": outcome.repeats,
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            "flashqsa": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": _installed("triton"),
        },
        "backends": dict(outcome.backends),
        **asdict(outcome.ceilings),
        "contexts": [
            {
                "context": measured.context,
                "neighbour_overlap": measured.neighbour_overlap,
                "floor_us": measured.floor_us,
                "times": {name: asdict(spread) for name, spread in measured.times.items()},
                "speedup": None if measured.speedup is None else round(measured.speedup, 3),
            }
            for measured in outcome.contexts
        ],
        "break_even": {"tokens": tokens, "told": told},
    }


def device_name(device: torch.device) -> str:
    """What the device is: the card, or the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            named = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), "")
    except OSError:
        named = ""
    return named or platform.processor() or platform.machine()


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
