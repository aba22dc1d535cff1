"""`python -m benchmarks gpu-check`: the tests that need a CUDA GPU, counted, and a short soak under compute-sanitizer.

Tests run in several processes, since most of their time is compilation, and the soak in another one beside them. Each
test of a fault that was reported for this or a related library carries the fault's number in its name; numbers that
have to be shown on a GPU and have no passed test fail the check.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

import torch

from benchmarks.environment import ROOT
from benchmarks.gpu_timing import gpu_environment

NAME = "gpu-check"
MOST_WORKERS = 15
FAULTS = frozenset({*range(1, 6), *range(7, 19), 22, *range(34, 40), *range(41, 50), 54})
"""Numbers of the faults whose tests have to pass on a GPU."""
SANITIZED = (
    "flashqsa.testing.soak_command", "50", "--stages", "triton", "--device", "cuda", "--max-tokens", "120",
    "--num-pages", "40",
)  # fmt: skip
"""What compute-sanitizer sees: random steps of all stages over a pool whose free memory is NaN."""


@dataclass
class Outcome:
    """What a run of pytest gave.

    Attributes:
        counts: Tests by "passed", "failed" and "skipped".
        failed: Names of the tests that failed.
        faults: Passed tests by the number of the fault that they show.
    """

    counts: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    faults: Counter[int] = field(default_factory=Counter)

    @classmethod
    def read(cls, report: Path) -> Outcome:
        """From the JUnit file of a run; nothing where the run wrote none."""
        outcome = cls()
        for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
            name = f"{case.get('classname')}::{case.get('name')}"
            kind = "passed"
            if case.find("failure") is not None or case.find("error") is not None:
                kind = "failed"
                outcome.failed.append(name)
            elif case.find("skipped") is not None:
                kind = "skipped"
            outcome.counts[kind] += 1
            found = re.search(r"::test_fault_(\d+)_", name)
            if found and kind == "passed":
                outcome.faults[int(found[1])] += 1
        return outcome

    def missing_faults(self) -> list[int]:
        """Numbers that no passed test shows."""
        return sorted(FAULTS - self.faults.keys())


def test_paths() -> list[str]:
    """Files that hold tests marked `gpu`, the long ones first, then the folder of the kernels."""
    kernels = ROOT / "tests" / "kernels"
    marked = [
        path for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if kernels not in path.parents and "mark.gpu" in path.read_text(encoding="utf-8")
    ]  # fmt: skip
    return [str(path.relative_to(ROOT)) for path in (*marked, kernels)]


def run_tests(workers: int, words: Sequence[str]) -> tuple[int, Outcome]:
    """All tests marked `gpu` in this many processes; the output of pytest goes to the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable, "-m", "pytest", *test_paths(), "-m", "gpu", "-n", str(workers), "--dist", "worksteal", "-q",
            "-p", "no:benchmark", "--durations=8", f"--junit-xml={report}", *words,
        ]  # fmt: skip
        code = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False).returncode
        return code, Outcome.read(report)


def find_sanitizer() -> str | None:
    """The path of compute-sanitizer, or None."""
    homes = [os.environ.get("CUDA_HOME", ""), *map(str, sorted(Path("/usr/local").glob("cuda*")))]
    places = [f"{home}/{folder}" for home in homes if home for folder in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(places))


def sanitize(sanitizer: str, tool: str, limit_s: int) -> tuple[bool, str]:
    """Some steps of a soak under one tool of compute-sanitizer.

    Returns:
        Whether nothing is wrong as far as it ran, and what to print.
    """
    command = [sanitizer, "--tool", tool, "--error-exitcode", "86", sys.executable, "-m", *SANITIZED]
    # Each tensor an allocation of its own: within a cached one the tool sees no access that leaves a tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=limit_s, check=False, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return True, f"not finished in {limit_s} s"
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    summary = next((line.strip("= ") for line in lines if "ERROR SUMMARY" in line or "RACECHECK SUMMARY" in line), None)
    ran = next((line for line in lines if line.startswith('{"steps"')), None)
    if summary is None:
        return True, f"not run ({lines[-1] if lines else 'no output'})"
    if done.returncode:
        print("\n".join(lines[-60:]))
    said = f"{json.loads(ran)['steps']} steps" if ran else "stopped by an error"
    return done.returncode == 0, f"{said}; {summary}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    cores = os.cpu_count() or 2
    parser.add_argument("--workers", type=int, default=max(1, min(MOST_WORKERS, cores - 1)), help="processes")
    parser.add_argument("--tools", default="memcheck", help="tools of compute-sanitizer, by commas; empty for none")
    parser.add_argument("--tool-limit-s", type=int, default=240, help="seconds that a tool may take")
    parser.add_argument("--commit", default=None, help="commit to print where the checkout has no git")
    parser.add_argument("words", nargs="*", help="further words for pytest, after --")


def run(options: argparse.Namespace) -> int:
    """Run the tests, then the sanitizer; 1 when something failed or a number has no passed test, 2 without a GPU."""
    if not torch.cuda.is_available():
        print("gpu-check: needs a CUDA GPU, found none.", file=sys.stderr)
        return 2
    begun = time.monotonic()
    sanitizer = find_sanitizer()
    with ThreadPoolExecutor() as beside:
        looked = {
            tool: beside.submit(sanitize, sanitizer, tool, options.tool_limit_s) if sanitizer else None
            for tool in filter(None, options.tools.split(","))
        }
        code, outcome = run_tests(options.workers, options.words)
        tests_s = time.monotonic() - begun
    facts = gpu_environment(options.commit)
    print(f"\ngpu-check: {', '.join(f'{name} {value}' for name, value in facts.items())}")
    counted = ", ".join(f"{outcome.counts[kind]} {kind}" for kind in ("passed", "failed", "skipped"))
    print(f"tests: {counted} in {tests_s:.0f} s, {options.workers} workers")
    for name in outcome.failed:
        print(f"failed: {name}")
    shown = ", ".join(f"{number} ({count})" for number, count in sorted(outcome.faults.items()))
    print(f"faults shown (tests): {shown}")
    missing = [] if options.words else outcome.missing_faults()
    print(f"faults without a passed test: {', '.join(map(str, missing)) or 'none'}", flush=True)
    fine = True
    for tool, future in looked.items():
        good, said = future.result() if future else (True, "not run (not found)")
        fine &= good
        print(f"compute-sanitizer {tool}: {said}", flush=True)
    print(f"took {time.monotonic() - begun:.0f} s")
    return int(code != 0 or bool(missing) or not fine)
