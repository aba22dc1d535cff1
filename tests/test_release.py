"""What a release consists of: its files, its version, its public interface."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import flashqsa

ROOT = Path(__file__).resolve().parents[1]
SNAPSHOT = Path(__file__).with_name("public_api.txt")
MODULES = ("flashqsa", "flashqsa.analysis", "flashqsa.errors", "flashqsa.integrations.hf", "flashqsa.testing")


def public_lines() -> Iterator[str]:
    """Every public name with its parameters, and those of the methods of classes."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        names = getattr(module, "__all__", None) or [
            name for name, value in vars(module).items() if getattr(value, "__module__", "") == module_name
        ]
        for name in sorted(names):
            value = getattr(module, name)
            yield f"{module_name}.{name}{parameters(value)}"
            if inspect.isclass(value) and module_name == "flashqsa":
                yield from (
                    f"{module_name}.{name}.{method}{parameters(getattr(value, method))}"
                    for method in sorted({name for kind in value.__mro__ if own(kind) for name in vars(kind)})
                    if not method.startswith("_") and callable(getattr(value, method))
                )


def own(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "flashqsa"


def parameters(value: object) -> str:
    """Names of parameters, `=` for those with a default, `*` before keyword-only ones."""
    if not callable(value) or (inspect.isclass(value) and issubclass(value, Exception)):
        return ""
    shown, keyword_only = [], False
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            shown.append("*")
        shown.append(parameter.name + ("" if parameter.default is parameter.empty else "="))
    return f"({', '.join(shown)})"


@pytest.mark.transformers
def test_the_public_interface_is_the_one_written_down() -> None:
    pytest.importorskip("transformers")
    lines = list(public_lines())
    written = SNAPSHOT.read_text(encoding="utf-8").splitlines()
    changed = sorted({f"+ {line}" for line in lines if line not in written} |
                     {f"- {line}" for line in written if line not in lines})  # fmt: skip
    assert not changed, "meant? then tell it in CHANGELOG.md and run: python tests/test_release.py"


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert project["version"] == flashqsa.__version__
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == flashqsa.__version__
    assert f"license: {project['license']}" in citation
    headings = re.findall(
        r"^## \[(.+?)\](?: - (.+))?$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    version, date = next(heading for heading in headings if heading[0] != "Unreleased")
    assert version == flashqsa.__version__
    assert re.search(r"^date-released: (.+)$", citation, re.MULTILINE)[1] == date


def _build(source: Path, folder: Path, *targets: str) -> None:
    words = [word for target in targets for word in ("-t", target)]
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder), *words]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_wheel_and_source_distribution(tmp_path: Path) -> None:
    """Both are complete, the one is made from the other, and the wheel runs outside a checkout."""
    pytest.importorskip("hatchling")
    _build(ROOT, tmp_path, "wheel", "sdist")
    (wheel,), (sdist,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0].split("-")[0] for name in packed} == {"flashqsa", "flashqsa_command"}
    kept = {name for name in packed if "dist-info" in name}
    assert {name.rpartition("/")[2] for name in kept} >= {"LICENSE", "NOTICE", "METADATA", "entry_points.txt"}
    own = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert packed - kept == own | {"flashqsa/py.typed"}
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    for name in ("CITATION.cff", "NOTICE", "Makefile", "constraints-vllm.txt", "docs/img/path.svg", "tests/conftest.py",
                 "examples/paged_engine.py", "benchmarks/results/gpu_decode.jsonl"):  # fmt: skip
        assert (source / name).exists(), name
    _build(source, tmp_path / "again", "wheel")
    (again,) = (tmp_path / "again").glob("*.whl")
    assert set(zipfile.ZipFile(again).namelist()) == packed
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-m", "flashqsa", "--version"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, f"flashqsa {flashqsa.__version__}\n"), done.stderr


if __name__ == "__main__":
    SNAPSHOT.write_text("".join(f"{line}\n" for line in public_lines()), encoding="utf-8")
