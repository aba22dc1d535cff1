"""Measure what docs/reliability.md says in figures: `.venv/bin/python tests/testing/measure.py` writes figures.json.

Runs three soaks of 300 steps, the state machine and the calls that are stopped anywhere, and counts tests: two minutes.
The mutation report and soaks of a GPU are handed in: `--mutation build/mutation.json`, `--soak soak.jsonl`. What is not
handed in stays as it was. Then `.venv/bin/python tests/testing/test_reliability.py` writes the document.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIGURES = Path(__file__).with_name("figures.json")
FAULT = re.compile(r"(?:^|_)fault_\d")
MUTANT = ("module", "line", "operator", "diff")
MEASURED = ["tests/cache/pool/test_pool_machine.py", "tests/cache/pool/test_pool_interrupted.py"]


class Counts:
    """Counts tests as pytest collects them, and what they record."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()

    @pytest.hookimpl(tryfirst=True)
    def pytest_itemcollected(self, item: Any) -> None:
        self.counts["tests"] += 1
        fixtures = set(getattr(item, "fixturenames", ()))
        self.counts["bad inputs refused with a typed error"] += "refuses" in fixtures
        self.counts["bad calls of the pool that change no byte"] += "nothing_changes" in fixtures
        self.counts["tests of a fault of others"] += bool(FAULT.search(item.name))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                self.counts[name] += value


def counted(*arguments: str) -> dict[str, int]:
    counts = Counts()
    if pytest.main(["-q", "-n", "0", *arguments], plugins=[counts]) not in (0, 5):
        raise SystemExit("tests failed")
    return dict(counts.counts)


def soaks() -> list[dict[str, Any]]:
    """Three seeds on the CPU, each in a process of its own."""
    command = [sys.executable, "-m", "flashqsa.testing.soak_command", "300", "--stages", "torch", "--seed"]
    return [
        json.loads(subprocess.run([*command, str(seed)], check=True, capture_output=True, text=True).stdout)
        for seed in range(3)
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--mutation", type=Path, action="append", help="reports of tests/mutation/run.py")
    options.add_argument("--soak", type=Path, help="lines that flashqsa.testing.soak_command printed on a GPU")
    given = options.parse_args()
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    collected = counted("--collect-only", "-m", "gpu or not gpu", str(ROOT / "tests"))
    recorded = counted(*(str(ROOT / path) for path in MEASURED))
    figures["counts"] = {**collected, **{n: v for n, v in recorded.items() if n.startswith("calls")}}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    figures["commit"] = commit.stdout.strip()
    at = {"commit": figures["commit"]}  # of each soak: those of a GPU are older than the rest
    figures["soaks"] = [soak for soak in figures.get("soaks", []) if soak["device"] != "cpu"]
    figures["soaks"] += [soak | at for soak in soaks()]
    if given.soak:
        lines = [json.loads(line) | at for line in given.soak.read_text().splitlines() if line.startswith("{")]
        figures["soaks"] = [soak for soak in figures["soaks"] if soak["device"] == "cpu"] + lines
    if given.mutation:
        reports = [json.loads(path.read_text()) for path in given.mutation]
        figures["mutation"] = [
            {name: report[name] for name in ("commit", "seed", "mutants", "killed")}
            | {"survivors": [{name: x[name] for name in MUTANT} for x in report["survivors"]]}
            for report in reports
        ]
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
