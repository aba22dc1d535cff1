"""Putting FlashQSA into vLLM's modules, or leaving them as they are where a name differs."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from flashqsa.errors import UnsupportedError
from flashqsa.integrations.vllm_plugin import cpu_engine, cpu_streams, forwards, ops
from flashqsa.integrations.vllm_plugin.seams import MANIFEST, Seam, Seams, differences, seams_of
from flashqsa.integrations.vllm_plugin.shadow import Shadow

logger = logging.getLogger("vllm.flashqsa")  # below vLLM's own logger, so that its handlers print it

Make = Callable[[Callable[..., Any]], Callable[..., Any]]

_active: list[str] = []


def activate(mode: str | None, shadow_steps: int) -> None:
    """Replace the names of vLLM, once a process, after its attention layer has been imported.

    Args:
        mode: "ops", "full" or "shadow"; None for "full" on the CPU and nothing elsewhere.
        shadow_steps: Steps that mode "shadow" compares.

    Raises:
        UnsupportedError: Mode "shadow" on vLLM's CPU build, which has no operators to compare with.
    """
    if _active:
        return
    import vllm
    from vllm.platforms import current_platform

    is_cpu = current_platform.is_cpu()
    mode = mode or ("full" if is_cpu else "off")
    if mode == "off":
        return
    if mode == "shadow" and is_cpu:
        raise UnsupportedError(
            "flashqsa: FLASHQSA_VLLM must be off, ops or full with vLLM's CPU build, got 'shadow'. That build "
            "has no QSA operators to serve and to compare with."
        )
    seams, refusal = _seams(vllm.__version__, mode, is_cpu)
    if seams is None:
        logger.warning("FlashQSA leaves vLLM untouched: %s.", refusal)
        return
    if mode == "shadow":
        _put_in_shadow(seams, shadow_steps)
    else:
        _put_in_place(seams, mode, is_cpu)
    _active.append(mode)
    served = "runs in the shadow of" if mode == "shadow" else "serves"
    device = "CPU" if is_cpu else "GPU"
    logger.info("FlashQSA %s QSA layers: mode %s, vLLM %s, %s.", served, mode, vllm.__version__, device)


def _seams(version: str, mode: str, is_cpu: bool) -> tuple[Seams | None, str]:
    """The seams of this vLLM where all that the mode needs fit, or None and what differs."""
    seams = seams_of(version)
    if seams is None:
        return None, f"version {version}, known are {', '.join(MANIFEST)}"
    if mode == "full" and not seams.forwards:
        return None, f"version {version} has no forwards that mode full replaces, mode ops serves it"
    if is_cpu and not seams.cpu:
        return None, f"version {version} is not known as a CPU build"
    differing = differences(seams.used(mode, on_cpu=is_cpu))
    return (None, "; ".join(differing)) if differing else (seams, "")


def _put_in_place(seams: Seams, mode: str, is_cpu: bool) -> None:
    for seam in seams.operators:
        _replace(seam, getattr(ops, seam.name))
    makers: list[tuple[Seam, Make]] = []
    if mode == "full":
        makers += zip(seams.forwards, (forwards.indexer_forward, forwards.impl_forward), strict=True)
    if is_cpu:
        ours = (cpu_engine.attention_available, cpu_engine.fused_init, cpu_engine.token_requests)
        makers += zip(seams.cpu, ours, strict=True)
        for seam in seams.streams:
            _replace(seam, getattr(cpu_streams, seam.name))
    for seam, make in makers:
        _replace_with(seam, make)


def _put_in_shadow(seams: Seams, steps: int) -> None:
    from vllm.forward_context import get_forward_context

    shadow = Shadow(steps, lambda: get_forward_context().attn_metadata)
    shadow.tell_at_exit()
    for seam in seams.operators:
        _replace_with(seam, partial(shadow.wrap, seam.name, getattr(ops, seam.name)))


def _owner(seam: Seam) -> tuple[Any, str]:
    owner: Any = importlib.import_module(seam.module)
    *classes, name = seam.name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return owner, name


def _replace(seam: Seam, ours: Callable[..., Any]) -> None:
    owner, name = _owner(seam)
    setattr(owner, name, ours)


def _replace_with(seam: Seam, make: Make) -> None:
    """Replace a name by what `make` returns for vLLM's own function."""
    owner, name = _owner(seam)
    setattr(owner, name, make(getattr(owner, name)))
