"""The check on a GPU: what it counts, what it runs, and what it says without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__, gpu_check

REPORT = """<testsuites><testsuite>
  <testcase classname="tests.a" name="test_fault_1_twice[64]"/>
  <testcase classname="tests.a" name="test_fault_01_again"/>
  <testcase classname="tests.a" name="test_fault_2_ties"><failure message="no"/></testcase>
  <testcase classname="tests.a" name="test_fault_3_bins"><skipped message="why"/></testcase>
  <testcase classname="tests.a" name="test_setup"><error message="no"/></testcase>
  <testcase classname="tests.a" name="test_other"/>
</testsuite></testsuites>"""


def test_results_are_counted_by_outcome_and_by_fault(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT, encoding="utf-8")
    outcome = gpu_check.Outcome.read(tmp_path / "report.xml")
    assert outcome.counts == {"passed": 3, "failed": 2, "skipped": 1}
    assert outcome.failed == ["tests.a::test_fault_2_ties", "tests.a::test_setup"]
    assert outcome.faults == {1: 2}
    assert outcome.missing_faults() == sorted(gpu_check.FAULTS - {1})
    assert gpu_check.Outcome.read(tmp_path / "none.xml").missing_faults() == sorted(gpu_check.FAULTS)


def test_it_runs_the_kernels_and_every_other_file_with_marked_tests() -> None:
    paths = gpu_check.test_paths()
    assert paths[-1] == "tests/kernels"
    assert "tests/cache/pool/test_pool_cuda.py" in paths
    assert "tests/benchmarks/test_gpu_check.py" not in paths


def test_what_the_sanitizer_sees_exists() -> None:
    """Its words are options that the soak's command line has."""
    help_text = subprocess.run(
        [sys.executable, "-m", gpu_check.SANITIZED[0], "--help"], check=True, capture_output=True, text=True
    ).stdout
    assert all(word in help_text for word in gpu_check.SANITIZED if word.startswith("--"))


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert __main__.main(["gpu-check"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
