"""`register`: what the entry point in the group `vllm.general_plugins` calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from flashqsa.errors import ArgumentError

VARIABLE = "FLASHQSA_VLLM"
MODES = ("off", "ops", "full", "shadow")
SHADOW_STEPS = 32
"""Steps that mode `shadow` compares, unless `shadow:N` says how many."""
TARGET = "vllm.models.qwen4_exp.nvidia.qsa"
"""The module of the attention layer. When it has been executed, all that it builds on is there to be replaced."""


def chosen_mode() -> str | None:
    """What FLASHQSA_VLLM says; None when it says nothing: `full` on vLLM's CPU build, `off` elsewhere.

    Raises:
        ArgumentError: It says something else.
    """
    return _choice()[0]


def shadow_steps() -> int:
    """Steps that mode `shadow` compares.

    Raises:
        ArgumentError: FLASHQSA_VLLM has an unknown value.
    """
    return _choice()[1]


def _choice() -> tuple[str | None, int]:
    value = os.environ.get(VARIABLE)
    if value is None:
        return None, SHADOW_STEPS
    mode, _, steps = value.partition(":")
    fits = value in MODES or (mode == "shadow" and steps.isdecimal() and int(steps) > 0)
    if not fits:
        raise ArgumentError(
            f"flashqsa: {VARIABLE} must be one of {', '.join(MODES)} or shadow:N, got {value!r}. Choose one of them, "
            "or unset it."
        )
    return mode, int(steps or SHADOW_STEPS)


def register() -> None:
    """Make vLLM's qwen4_exp models run on FlashQSA as soon as vLLM imports them.

    Cheap and idempotent: nothing of vLLM is imported and no device is touched. Only when vLLM itself imports the
    attention layer are its names compared with those that the plugin knows, and replaced.

    Raises:
        ArgumentError: FLASHQSA_VLLM has an unknown value.
    """
    if chosen_mode() == "off":
        return
    if TARGET in sys.modules:
        _activate()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())


def _activate() -> None:
    from flashqsa.integrations.vllm_plugin.activation import activate

    activate(chosen_mode(), shadow_steps())


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds the target module as Python does, and activates the plugin once it has been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec with a loader that tells; None for every other module."""
        if fullname != TARGET:
            return None
        sys.meta_path.remove(self)  # found once: the others look, and later imports are none of ours
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _TellingLoader(spec.loader)
        return spec


class _TellingLoader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _activate()
