"""What `flashqsa doctor` prints: tables for people, or one JSON object for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashqsa import __version__
from flashqsa.commands.doctor_caches import GIB, CacheCost
from flashqsa.commands.doctor_devices import Device
from flashqsa.commands.doctor_findings import Finding
from flashqsa.commands.doctor_parts import Part, Seam
from flashqsa.commands.doctor_trial import Trial
from flashqsa.config import QSAConfig


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """Everything there is to tell.

    Attributes:
        python: Version of the interpreter, and its platform.
        parts: Packages.
        seams: Engines.
        devices: Where tensors can live.
        checkpoint: The checkpoint's folder as given, or None for the released shapes.
        config: The constants of its QSA layers.
        device: The device that the rest is about.
        dtype: The model dtype.
        page_tokens: Tokens of a cache page.
        memory_bytes: Memory of the device that is free, or as the user gave it.
        weight_bytes: What the weights take of it, or None where they are not known.
        stages: Stage to backend to why it is taken or refused.
        trials: Each stage, tried.
        costs: What caches cost.
        findings: What to do.
    """

    python: str
    parts: tuple[Part, ...]
    seams: tuple[Seam, ...]
    devices: tuple[Device, ...]
    checkpoint: str | None
    config: QSAConfig
    device: str
    dtype: torch.dtype
    page_tokens: int
    memory_bytes: int
    weight_bytes: int | None
    stages: Mapping[str, Mapping[str, str]]
    trials: tuple[Trial, ...]
    costs: tuple[CacheCost, ...]
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> int:
        """How many findings are problems."""
        return sum(finding.problem for finding in self.findings)


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """The diagnosis as plain values, under the names that the documentation lists."""
    config = diagnosis.config
    shapes = ("q_heads", "kv_heads", "head_dim", "index_heads", "index_head_dim", "block_tokens", "budget_tokens")
    return {
        "versions": {"flashqsa": __version__, "python": diagnosis.python},
        "packages": [asdict(part) for part in diagnosis.parts],
        "seams": [asdict(seam) for seam in diagnosis.seams],
        "devices": [asdict(device) for device in diagnosis.devices],
        "checkpoint": diagnosis.checkpoint,
        "shapes": {name: getattr(config, name) for name in (*shapes, "max_positions")}
        | {"qsa_layer_ids": list(config.qsa_layer_ids)},
        "device": diagnosis.device,
        "dtype": _name(diagnosis.dtype),
        "stages": {stage: dict(lines) for stage, lines in diagnosis.stages.items()},
        "trials": [asdict(trial) for trial in diagnosis.trials],
        "page_tokens": diagnosis.page_tokens,
        "memory_bytes": diagnosis.memory_bytes,
        "weight_bytes": diagnosis.weight_bytes,
        "caches": [
            asdict(cost) | {"kv_dtype": _name(cost.kv_dtype), "index_dtype": _name(cost.index_dtype)}
            for cost in diagnosis.costs
        ],
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "problems": diagnosis.problems,
    }


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Prints the diagnosis for people."""
    console.out(f"flashqsa {__version__}, Python {diagnosis.python}", highlight=False)
    for table in _tables(diagnosis):
        console.print()
        console.print(table)
        console.print()
        if table.title == "caches":
            for line in _cache_lines(diagnosis):
                console.out(line, highlight=False)
            console.print()
    for line in _finding_lines(diagnosis):
        console.print(line, soft_wrap=True, highlight=False)


def _tables(diagnosis: Diagnosis) -> Iterator[Table]:
    parts = _table("packages", "package", "installed", "needed", "for")
    for part in diagnosis.parts:
        installed = {"ok": part.version or "", "missing": "no"}.get(part.state, f"{part.version}, too old")
        parts.add_row(part.name, installed, f">= {part.least}" if part.least else "any", part.serves)
    yield parts
    seams = _table("engines", "engine", "version", "fits", "why")
    for seam in diagnosis.seams:
        fits = "-" if seam.fits is None else "yes" if seam.fits else "no"
        seams.add_row(seam.engine, seam.version or "-", fits, escape(seam.told))
    yield seams
    devices = _table("devices", "device", "what", "free memory", "kernels")
    for device in diagnosis.devices:
        free = f"{device.free_bytes / GIB:,.1f} of {device.total_bytes / GIB:,.1f} GiB"
        devices.add_row(device.name, device.told, free, f"no: {device.kernels}" if device.kernels else "yes")
    yield devices
    stages = _table(f"stages: {_subject(diagnosis)}", "stage", "backend", "why", "tried")
    trials = {(trial.stage, trial.backend): trial for trial in diagnosis.trials}
    for stage, lines in diagnosis.stages.items():
        for first, (backend, line) in enumerate(lines.items()):
            trial = trials.get((stage, backend))
            tried = "" if trial is None else "works" if trial.works else "fails"
            stages.add_row("" if first else stage, backend, escape(line), tried)
    yield stages
    caches = _table("caches", "K and V", "block keys", "bytes a token", "longest context", "tokens that fit")
    for cost in diagnosis.costs:
        fit, longest = cost.tokens_that_fit, cost.longest_context
        caches.add_row(
            _name(cost.kv_dtype),
            _name(cost.index_dtype),
            f"{cost.token_bytes:,.0f}",
            "-" if longest is None else f"{longest:,}",
            "-" if fit is None else f"{fit:,}",
        )
    yield caches


def _subject(diagnosis: Diagnosis) -> str:
    what = "the released shapes" if diagnosis.checkpoint is None else diagnosis.checkpoint
    return escape(f"{what}, {_name(diagnosis.dtype)} on {diagnosis.device}")


def _cache_lines(diagnosis: Diagnosis) -> Iterator[str]:
    number = len(diagnosis.config.qsa_layer_ids)
    layers = f"{number} QSA layer{'' if number == 1 else 's'}"
    weights = diagnosis.weight_bytes
    left = f"{diagnosis.memory_bytes / GIB:,.1f} GiB"
    left += " without weights, which are not known" if weights is None else f" less {weights / GIB:,.1f} GiB of weights"
    yield f"{layers}, pages of {diagnosis.page_tokens} tokens; {left}; other layers and activations on top"


def _finding_lines(diagnosis: Diagnosis) -> Iterator[str]:
    if not diagnosis.findings:
        yield "nothing to do"
    for finding in diagnosis.findings:
        mark = "[bold red]problem[/]" if finding.problem else "[bold]note[/]"
        yield f"{mark}: {escape(finding.about)}: {escape(finding.told)}"
        yield f"  {escape(finding.remedy)}"
    number = diagnosis.problems
    yield f"{number} problem{'' if number == 1 else 's'}"


def _table(title: str, *columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False, title=title, title_justify="left")
    for name in columns:
        numbers = name in ("bytes a token", "longest context", "tokens that fit")
        table.add_column(name, justify="right" if numbers else "left")
    return table


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
