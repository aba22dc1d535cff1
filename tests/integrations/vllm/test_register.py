"""Registering is cheap and idempotent; an unknown switch and a vLLM with other names are told."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from flashqsa.errors import ArgumentError
from flashqsa.integrations.vllm_plugin import registration
from flashqsa.integrations.vllm_plugin.seams import Seam, differences


def test_register_imports_nothing_and_adds_one_finder() -> None:
    code = (
        "import sys\n"
        "from flashqsa.integrations import vllm_plugin\n"
        "before = len(sys.meta_path)\n"
        "vllm_plugin.register(); vllm_plugin.register()\n"
        "import torch\n"
        "print(len(sys.meta_path) - before, *(m for m in ('vllm', 'triton', 'transformers') if m in sys.modules),\n"
        "      torch.cuda.is_initialized())\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["1", "False"]


def test_off_adds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registration.VARIABLE, "off")
    before = list(sys.meta_path)
    registration.register()
    assert sys.meta_path == before


def test_an_unknown_switch_is_refused(monkeypatch: pytest.MonkeyPatch, refuses) -> None:
    monkeypatch.setenv(registration.VARIABLE, "fast")
    with refuses(ArgumentError, "flashqsa", "FLASHQSA_VLLM", "'fast'"):
        registration.register()


def _operator(a, b, out=None, *, gate): ...


@pytest.mark.parametrize(
    ("version", "name", "arguments", "told"),
    [
        ("0.32.0", "operator", ("a", "b", "out", "*", "gate"), None),
        ("0.33.1+cu129", "operator", ("a", "b", "out", "*", "gate"), None),
        ("0.34.0", "operator", ("a", "b", "out", "*", "gate"), "version 0.34.0"),
        ("0.32.0", "renamed", ("a",), "fake_vllm_ops.renamed is missing"),
        ("0.32.0", "operator", ("a", "b", "out", "gate"), "takes (a, b, out, *, gate) instead of (a, b, out, gate)"),
        ("0.32.0", "operator", ("b", "a", "out", "*", "gate"), "takes (a, b, out, *, gate)"),
    ],
)
def test_differences(
    monkeypatch: pytest.MonkeyPatch, version: str, name: str, arguments: tuple[str, ...], told: str | None
) -> None:
    module = types.ModuleType("fake_vllm_ops")
    module.operator = _operator
    monkeypatch.setitem(sys.modules, "fake_vllm_ops", module)
    found = differences(version, [Seam("fake_vllm_ops", name, arguments)])
    assert len(found) == (told is not None)
    assert told is None or told in found[0]


def test_a_missing_module_is_told() -> None:
    assert differences("0.32.0", [Seam("no_such_module_of_vllm", "f", ())]) == ["no_such_module_of_vllm.f is missing"]
