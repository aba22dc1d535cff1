"""The manifest against the source of vLLM's wheels, which is read and not imported."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from flashqsa.integrations.vllm_plugin.seams import CPU, MANIFEST, STREAMS, Seam, seams_of

INSTALLED = Path(importlib.util.find_spec("vllm").submodule_search_locations[0]).parent
FETCHED = Path(__file__).parents[3] / "build" / "vllm-sources"  # by `make test-vllm`
ROOTS = {"0.31": FETCHED / "0.31.0", "0.32": INSTALLED, "0.33": FETCHED / "0.33.0"}


def _definition(root: Path, module: str, name: str) -> ast.FunctionDef:
    """Definition of a function or method, followed through `from x import y` of the module."""
    path = root / f"{module.replace('.', '/')}.py"
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for part in name.split("."):
        for node in ast.walk(ast.Module(body, [])):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == part:
                found = node
                break
            if isinstance(node, ast.ImportFrom) and any(alias.name == part for alias in node.names):
                base = module.split(".")[: -node.level] if node.level else []
                return _definition(root, ".".join([*base, node.module or ""]), name)
        else:
            raise AssertionError(f"{module}.{name} is not there")
        body = found.body
    assert isinstance(found, ast.FunctionDef)
    return found


def _seams() -> list[tuple[str, Seam]]:
    """Every seam of every version. What only CPU builds need is read in the installed one."""
    pairs = []
    for version, seams in MANIFEST.items():
        of_cpu = (*seams.cpu, *seams.streams) if version == "0.32" else ()
        pairs += [(version, seam) for seam in (*seams.operators, *seams.forwards, *of_cpu)]
    return pairs


@pytest.mark.parametrize(("version", "seam"), _seams(), ids=lambda value: getattr(value, "name", value))
def test_arguments_in_the_source(version: str, seam: Seam) -> None:
    arguments = _definition(ROOTS[version], seam.module, seam.name).args
    assert arguments.vararg is arguments.kwarg is None
    names = [argument.arg for argument in arguments.posonlyargs + arguments.args]
    if arguments.kwonlyargs:
        names += ["*", *(argument.arg for argument in arguments.kwonlyargs)]
    assert tuple(names) == seam.arguments


def test_the_cpu_seams_are_there() -> None:
    assert (seams_of("0.32.0").cpu, seams_of("0.32.0+cpu").streams) == (CPU, STREAMS)


def test_why_0_31_has_no_mode_full() -> None:
    """Its indexer returns ids alone, and preparation is no operator of the kind that is replaced."""
    forward = _definition(ROOTS["0.31"], "vllm.models.qwen4_exp.nvidia.indexer_qsa", "QSAIndexer.forward")
    assert not forward.args.kwonlyargs
    with pytest.raises(AssertionError, match="qsa_prepare is not there"):
        _definition(ROOTS["0.31"], "vllm.models.qwen4_exp.nvidia.indexer_qsa", "qsa_prepare")
