"""Who imports whom: stages do not know each other, references know nothing, importing the package costs torch alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flashqsa

ROOT = Path(flashqsa.__file__).parent
STAGES = ("preparation", "selection", "attention")
FOUNDATION = {"errors", "checks", "config", "rope", "results", "matmul", "backends", "launching", "cache", "plan"}
"""What the stages stand on; it knows no stage."""
HEAVY = ("triton", "transformers", "vllm", "matplotlib", "typer", "rich", "numpy.testing", "accelerate")


def _imports(path: Path) -> set[str]:
    """Full names of the modules, or of the names in them, that a file imports anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _own(path: Path) -> set[str]:
    """What a file imports of this package, without the package's name."""
    return {name.removeprefix("flashqsa.") for name in _imports(path) if name.split(".")[0] == "flashqsa"}


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


FILES = sorted(ROOT.rglob("*.py"))


def test_all_files_are_looked_at() -> None:
    assert {"layer.py", "attention/api.py", "selection/plain.py", "integrations/hf/forward.py"} <= set(
        map(_name, FILES)
    )


@pytest.mark.parametrize("stage", STAGES)
def test_stages_do_not_import_each_other(stage: str) -> None:
    others = set(STAGES) - {stage}
    for path in (ROOT / stage).rglob("*.py"):
        tops = {name.split(".")[0] for name in _own(path)}
        assert not tops & others, f"{_name(path)} imports {tops & others}"
        allowed = FOUNDATION | {stage} | ({"ops"} if path.name == "api.py" else set())  # its own operator, for graphs
        assert tops <= allowed, f"{_name(path)} imports {tops - allowed}"


def test_only_the_layer_and_integrations_see_two_stages() -> None:
    """And the warm-up, which runs them all on nothing."""
    allowed = ("__init__.py", "layer.py", "warming/", "integrations/", "testing/", "commands/")
    for path in FILES:
        seen = {name.split(".")[0] for name in _own(path)} & set(STAGES)
        if len(seen) > 1:
            assert _name(path).startswith(allowed), f"{_name(path)} sees {sorted(seen)}"


def test_the_foundation_knows_no_stage() -> None:
    for path in FILES:
        top = _name(path).split("/")[0].removesuffix(".py")
        if top in FOUNDATION:
            tops = {name.split(".")[0] for name in _own(path)}
            assert tops <= FOUNDATION, f"{_name(path)} imports {tops - FOUNDATION}"


@pytest.mark.parametrize("stage", STAGES)
def test_api_imports_backends_and_never_the_reverse(stage: str) -> None:
    """A definition imports no other implementation either: it could not be compared with what it is made of."""
    folder = ROOT / stage
    parts = {path: {name for name in _own(path) if name.startswith(f"{stage}.")} for path in folder.rglob("*.py")}
    assert any(name.startswith(f"{stage}.reference.") for name in parts[folder / "api.py"])
    assert any(name.startswith(f"{stage}.plain.") for name in parts[folder / "api.py"])
    for path, names in parts.items():
        if path.name in ("__init__.py", "api.py"):
            continue
        assert not any(name.startswith((f"{stage}.api.", f"{stage}.select", f"{stage}.attend")) for name in names), (
            f"{_name(path)} imports the api: {sorted(names)}"
        )
    implementations = (f"{stage}.plain", f"{stage}.triton_", f"{stage}.tiles")
    leaning = {name for name in parts[folder / "reference.py"] if name.startswith(implementations)}
    assert not leaning, f"{stage}/reference.py imports {leaning}"


def test_nothing_in_the_library_needs_its_test_kit_or_its_commands() -> None:
    for path in FILES:
        top = _name(path).split("/")[0]
        tops = {name.split(".")[0] for name in _own(path)}
        assert top == "testing" or "testing" not in tops, f"{_name(path)} imports the test kit"
        assert top in ("commands", "__main__.py") or "commands" not in tops, f"{_name(path)} imports the commands"
        assert top in ("integrations", "commands") or "integrations" not in tops, (
            f"{_name(path)} imports an integration"
        )


def test_no_module_shadows_another_package() -> None:
    shadowing = set(sys.stdlib_module_names) | {"torch", "triton", "transformers", "vllm", "numpy", "accelerate"}
    shadowing |= {"utils", "common", "helpers", "misc"}
    for path in FILES:
        assert path.stem == "__init__" or path.stem.startswith("__") or path.stem not in shadowing, _name(path)


@pytest.mark.parametrize("module", ["flashqsa", "flashqsa.testing"])
def test_import_loads_no_optional_package(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "", f"import {module} loads {run.stdout}"


def test_public_names_exist_once() -> None:
    assert sorted(flashqsa.__all__) == sorted(set(flashqsa.__all__))
    assert all(hasattr(flashqsa, name) for name in flashqsa.__all__)
