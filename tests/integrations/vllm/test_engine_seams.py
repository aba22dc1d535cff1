"""The manifest against the source of the installed vLLM, which is read and not imported."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from flashqsa.integrations.vllm_plugin.seams import CPU, FORWARDS, OPERATORS, STREAMS, Seam

ROOT = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]).parent


def _definition(module: str, name: str) -> ast.FunctionDef:
    """Definition of a function or method, followed through `from x import y` of the module."""
    path = ROOT / f"{module.replace('.', '/')}.py"
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        for node in ast.walk(ast.Module(body, [])):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part:
                found = node
                break
            if isinstance(node, ast.ImportFrom) and any(alias.name == part for alias in node.names):
                base = module.split(".")[: -node.level] if node.level else []
                return _definition(".".join([*base, node.module or ""]), name)
        else:
            raise AssertionError(f"{module}.{name} is not there")
        body = found.body
    assert isinstance(found, ast.FunctionDef)
    return found


@pytest.mark.parametrize("seam", [*OPERATORS, *FORWARDS, *CPU, *STREAMS], ids=lambda seam: seam.name)
def test_arguments_in_the_source(seam: Seam) -> None:
    arguments = _definition(seam.module, seam.name).args
    assert arguments.vararg is arguments.kwarg is None
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    if arguments.kwonlyargs:
        names += ["*", *(argument.arg for argument in arguments.kwonlyargs)]
    assert tuple(names) == seam.arguments
