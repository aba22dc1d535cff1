"""Change the source in one place at a time, and see whether the tests notice.

    pip install cosmic-ray                       # in an environment of its own, if you like
    python tests/mutation/run.py --python .venv/bin/python

`mutation.toml` says what is mutated and which tests must notice. Of all places that cosmic-ray would mutate, a seeded
sample is drawn, and of each place one mutant, so that an operator with a dozen replacements counts once. Each mutant
runs in a copy of the tree. Annotations are left out: they are never evaluated. A result is one JSON file, with the
change of every survivor. Not part of CI: it takes about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import current_process
from pathlib import Path
from typing import Any

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("mutation.toml")
TREE = ("src", "tests", "docs", "pyproject.toml", "README.md")
Span = tuple[tuple[int, int], tuple[int, int]]


def annotations(source: str) -> Iterator[Span]:
    """Where annotations are: (first, last) of (line, column)."""
    for node in ast.walk(ast.parse(source)):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if part is not None:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def mutants(modules: list[str], database: Path) -> list[MutationSpec]:
    """Every mutant of some modules, those in annotations left out."""
    with use_db(str(database), WorkDB.Mode.create) as db:
        init([Path(module) for module in modules], db, {})
        specs = [item.mutations[0] for item in db.work_items]
    hidden = {module: list(annotations(Path(module).read_text())) for module in modules}
    return [
        spec
        for spec in specs
        if not any(first <= tuple(spec.start_pos) < last for first, last in hidden[str(spec.module_path)])
    ]


def sample(groups: list[dict[str, Any]], count: int, seed: int) -> list[tuple[dict[str, Any], MutationSpec]]:
    """A seeded sample of places, and one mutant of each."""
    places: dict[tuple[str, Any, Any], list[tuple[dict[str, Any], MutationSpec]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, group in enumerate(groups):
            for spec in mutants(group["modules"], Path(folder) / f"{number}.sqlite"):
                places.setdefault((str(spec.module_path), *map(tuple, (spec.start_pos, spec.end_pos))), []).append(
                    (group, spec)
                )
    dice = random.Random(seed)
    chosen = dice.sample(sorted(places), min(count, len(places)))
    return [dice.choice(sorted(places[place], key=lambda x: (x[1].operator_name, x[1].occurrence))) for place in chosen]


def enter_copy(folder: str) -> None:
    """Give this process a copy of the tree."""
    copy = Path(folder) / current_process().name
    copy.mkdir()
    for name in TREE:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy / "src")
    os.environ["OMP_NUM_THREADS"] = "1"


def command(group: dict[str, Any], python: str) -> str:
    """How to run the tests of a group, those in Triton's interpreter last: they take a process of their own."""
    pytest = f'{python} -m pytest -q -x -n 0 -m "not gpu"'
    runs = [f"{pytest} {' '.join(group['tests'])}"] if "tests" in group else []
    if "interpreted" in group:
        runs.append(f"TRITON_INTERPRET=1 {pytest} {' '.join(group['interpreted'])}")
    return f"bash -c '{' && '.join(runs)}'"


def run_mutant(group: dict[str, Any], spec: MutationSpec, python: str, timeout_s: float) -> dict[str, Any]:
    """Run the tests on one mutant."""
    result = mutate_and_test([spec], command(group, python), timeout_s)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", result.output or "", re.MULTILINE)
    return {
        "module": str(spec.module_path),
        "line": spec.start_pos[0],
        "definition": spec.definition_name,
        "operator": spec.operator_name.removeprefix("core/"),
        "outcome": str(result.test_outcome.value if result.test_outcome else result.worker_outcome.value),
        "killed_by": failed.group(1) if failed else (result.output or "")[-200:],
        "diff": [x for x in (result.diff or "").splitlines() if re.match(r"[-+](?![-+])", x)],
    }


def main() -> None:
    config = tomllib.loads(CONFIG.read_text())
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--python", default=sys.executable, help="the environment that runs the tests")
    options.add_argument("--sample", type=int, default=config["sample"])
    options.add_argument("--seed", type=int, default=config["seed"])
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--group", action="append", help="only these groups")
    options.add_argument("--out", type=Path, default=ROOT / "build" / "mutation.json")
    given = options.parse_args()
    python, out = str(Path(given.python).absolute()), given.out.absolute()
    os.chdir(ROOT)
    groups = [group for group in config["group"] if not given.group or group["name"] in given.group]
    chosen = sample(groups, given.sample, given.seed)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    results = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(given.workers, initializer=enter_copy, initargs=(folder,)) as workers,
    ):
        tasks = [workers.submit(run_mutant, group, spec, python, config["timeout_s"]) for group, spec in chosen]
        for number, task in enumerate(as_completed(tasks), 1):
            result = task.result()
            results.append(result)
            place = f"{result['module']}:{result['line']} {result['operator']}"
            print(f"{number}/{len(tasks)} {result['outcome']} {place}", *result["diff"], sep="\n    ", flush=True)
    killed = sum(result["outcome"] != "survived" for result in results)
    report = {
        "commit": commit.stdout.strip(), "seed": given.seed, "mutants": len(results), "killed": killed,
        "survivors": [result for result in results if result["outcome"] == "survived"], "all": results,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{killed} of {len(results)} mutants killed; {out}")


if __name__ == "__main__":
    main()
