"""Putting FlashQSA into vLLM's modules, or leaving them as they are where a name differs."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any

from flashqsa.integrations.vllm_plugin import cpu_engine, cpu_streams, forwards, ops
from flashqsa.integrations.vllm_plugin.seams import CPU, FORWARDS, OPERATORS, STREAMS, Seam, differences

logger = logging.getLogger("vllm.flashqsa")  # below vLLM's own logger, so that its handlers print it

Make = Callable[[Callable[..., Any]], Callable[..., Any]]

_active: list[str] = []


def activate(mode: str | None) -> None:
    """Replace the names of vLLM, once a process, after its attention layer has been imported.

    Args:
        mode: "ops" or "full"; None for "full" on the CPU and nothing elsewhere.
    """
    if _active:
        return
    import vllm
    from vllm.platforms import current_platform

    is_cpu = current_platform.is_cpu()
    mode = mode or ("full" if is_cpu else "off")
    if mode == "off":
        return
    seams = (*OPERATORS, *(FORWARDS if mode == "full" else ()), *((*CPU, *STREAMS) if is_cpu else ()))
    differing = differences(vllm.__version__, seams)
    if differing:
        logger.warning("FlashQSA leaves vLLM untouched: %s.", "; ".join(differing))
        return
    for seam in OPERATORS:
        _replace(seam, getattr(ops, seam.name))
    makers: list[tuple[Seam, Make]] = []
    if mode == "full":
        makers += zip(FORWARDS, (forwards.indexer_forward, forwards.impl_forward), strict=True)
    if is_cpu:
        ours = (cpu_engine.attention_available, cpu_engine.fused_init, cpu_engine.token_requests)
        makers += zip(CPU, ours, strict=True)
        for seam in STREAMS:
            _replace(seam, getattr(cpu_streams, seam.name))
    for seam, make in makers:
        _replace_with(seam, make)
    _active.append(mode)
    logger.info("FlashQSA serves QSA layers: mode %s, vLLM %s, %s.", mode, vllm.__version__, "CPU" if is_cpu else "GPU")


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
