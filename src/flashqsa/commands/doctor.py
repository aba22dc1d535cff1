"""`flashqsa doctor`: what is installed and usable here, and what to do about what is not."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from flashqsa.commands import EXIT_PROBLEM
from flashqsa.commands.doctor_backends import backend_findings, explain_stages
from flashqsa.commands.doctor_caches import GIB, cache_costs, layouts, memory_findings
from flashqsa.commands.doctor_checkpoint import read_weights, weight_findings
from flashqsa.commands.doctor_devices import Device, look_at_devices
from flashqsa.commands.doctor_output import Diagnosis, as_json, print_diagnosis
from flashqsa.commands.doctor_parts import look_at_parts, look_at_seams, part_findings, seam_findings
from flashqsa.commands.doctor_trial import trial_findings, try_stages
from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError, DeviceError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

MOST_GIB = 1_000_000_000
"""An exbibyte: above it somebody mistyped."""

RELEASED = QSAConfig(
    hidden_size=2560,
    q_heads=24,
    kv_heads=2,
    head_dim=256,
    index_heads=4,
    index_head_dim=128,
    budget_tokens=2048,
    block_tokens=4,
    rotary_dim=64,
    mrope_section=(11, 11, 10),
    qsa_layer_ids=tuple(range(3, 48, 4)),
)
"""The QSA layers of the released model."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What the user asked for.

    Attributes:
        device: `auto`, `cpu`, `cuda` or `cuda:N`; `auto` is CUDA where there is one.
        dtype: `auto`, `float32`, `bfloat16` or `float16`; `auto` is the checkpoint's own.
        page_tokens: Tokens of a cache page, a multiple of the block.
        memory_gib: Memory to count with in place of what is free on the device, in GiB.
    """

    device: str = "auto"
    dtype: str = "auto"
    page_tokens: int = 64
    memory_gib: float | None = None


_DEFAULTS = DoctorOptions()


def doctor(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="A checkpoint's folder; the released shapes by default.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = _DEFAULTS.device,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = _DEFAULTS.dtype,
    page_tokens: Annotated[int, typer.Option(help="Tokens of a cache page.")] = _DEFAULTS.page_tokens,
    memory_gib: Annotated[
        float | None, typer.Option(help="Count with so much memory; what is free on the device by default.")
    ] = _DEFAULTS.memory_gib,
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> int:
    """Tells what is installed and usable here.

    Returns:
        The exit code: 0, or 4 when there is a problem.

    Raises:
        FlashQSAError: Wrong input.
    """
    options = DoctorOptions(device=device, dtype=dtype, page_tokens=page_tokens, memory_gib=memory_gib)
    diagnosis = diagnose(checkpoint, options)
    if as_json_:
        typer.echo(json.dumps(as_json(diagnosis), indent=2))
    else:
        print_diagnosis(diagnosis, Console(highlight=False))
    return EXIT_PROBLEM if diagnosis.problems else 0


def diagnose(checkpoint: Path | None, options: DoctorOptions) -> Diagnosis:
    """Looks at everything.

    Args:
        checkpoint: A checkpoint's folder, or None for the released shapes.
        options: What the user asked for.

    Raises:
        ArgumentError, DeviceError: An option breaks a rule.
        ConfigError: The checkpoint is not one, or damaged.
    """
    _check_options(options)
    config = RELEASED if checkpoint is None else QSAConfig.from_checkpoint(checkpoint)
    weights = None if checkpoint is None else read_weights(checkpoint, config)
    stored = None if weights is None else weights.dtype
    dtype = DTYPES[options.dtype] if options.dtype != "auto" else stored or torch.bfloat16
    choices = layouts(config, dtype, options.page_tokens)
    devices = look_at_devices()
    device = _chosen_device(options.device, devices)
    memory_bytes = device.free_bytes if options.memory_gib is None else int(options.memory_gib * GIB)
    weight_bytes = None if weights is None else weights.loaded_bytes(dtype)
    where = torch.device(device.name)
    stages = explain_stages(config, choices[0], dtype, where)
    trials = try_stages(config, choices[0], dtype, where, stages)
    parts = look_at_parts()
    seams = look_at_seams(parts)
    found = [*part_findings(parts), *seam_findings(seams), *backend_findings(stages, where), *trial_findings(trials)]
    if checkpoint is not None:
        found += weight_findings(checkpoint, weights)
    found += memory_findings(memory_bytes, weight_bytes)
    return Diagnosis(
        python=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        parts=parts,
        seams=seams,
        devices=devices,
        checkpoint=None if checkpoint is None else str(checkpoint),
        config=config,
        device=device.name,
        dtype=dtype,
        page_tokens=options.page_tokens,
        memory_bytes=memory_bytes,
        weight_bytes=weight_bytes,
        stages=stages,
        trials=trials,
        costs=cache_costs(config, choices, max(0, memory_bytes - (weight_bytes or 0))),
        findings=tuple(sorted(found, key=lambda finding: not finding.problem)),
    )


def _check_options(options: DoctorOptions) -> None:
    if options.dtype not in ("auto", *DTYPES):
        raise ArgumentError(
            f"doctor: dtype must be among auto, {', '.join(DTYPES)}, got {options.dtype}. Choose one of them."
        )
    if options.memory_gib is not None and not 0 < options.memory_gib <= MOST_GIB:
        raise ArgumentError(
            f"doctor: memory-gib must be a number above 0 and at most {MOST_GIB:,}, got {options.memory_gib:g}. "
            "Leave it out for what is free."
        )


def _chosen_device(name: str, devices: tuple[Device, ...]) -> Device:
    known = {device.name: device for device in devices}
    if name == "auto":
        return devices[1] if len(devices) > 1 else devices[0]
    kind, _, number = name.partition(":")
    if name not in ("cpu", "cuda") and not (kind == "cuda" and number.isdecimal()):
        raise ArgumentError(f"doctor: device must be auto, cpu, cuda or cuda:N, got {name}. Choose one of them.")
    full = f"cuda:{int(number or 0)}" if kind == "cuda" else name
    if full not in known:
        raise DeviceError(
            f"doctor: device must be there, got {name} with {len(devices) - 1} CUDA devices. Choose another."
        )
    return known[full]
