"""Registering is cheap and idempotent; an unknown switch and a vLLM with other names are told."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from flashqsa.errors import ArgumentError
from flashqsa.integrations.vllm_plugin import registration
from flashqsa.integrations.vllm_plugin.seams import MANIFEST, Seam, differences, seams_of


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
    ("name", "arguments", "told"),
    [
        ("operator", ("a", "b", "out", "*", "gate"), None),
        ("renamed", ("a",), "fake_vllm_ops.renamed is missing"),
        ("operator", ("a", "b", "out", "gate"), "takes (a, b, out, *, gate) instead of (a, b, out, gate)"),
        ("operator", ("b", "a", "out", "*", "gate"), "takes (a, b, out, *, gate)"),
    ],
)
def test_differences(monkeypatch: pytest.MonkeyPatch, name: str, arguments: tuple[str, ...], told: str | None) -> None:
    module = types.ModuleType("fake_vllm_ops")
    module.operator = _operator
    monkeypatch.setitem(sys.modules, "fake_vllm_ops", module)
    found = differences([Seam("fake_vllm_ops", name, arguments)])
    assert len(found) == (told is not None)
    assert told is None or told in found[0]


def test_a_missing_module_is_told() -> None:
    assert differences([Seam("no_such_module_of_vllm", "f", ())]) == ["no_such_module_of_vllm.f is missing"]


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0+cpu", "0.33.1+cu129", "0.33.0rc1"])
def test_known_versions(version: str) -> None:
    assert seams_of(version) is MANIFEST[version[:4]]


@pytest.mark.parametrize("version", ["0.30.2", "0.34.0", "0.3.3", "0.331.0", "1.32.0", "dev"])
def test_unknown_versions(version: str) -> None:
    assert seams_of(version) is None
