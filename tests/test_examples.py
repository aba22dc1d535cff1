"""Every example runs, in a process of its own, and says what it should."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LONGEST = {"own_page_tables.py": 60, "paged_engine.py": 80}
WITH_VLLM = "vllm_serve.py"  # run by tests/integrations/vllm/test_engine_commands.py, in vLLM's own environment


def run(name: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent / "src")}
    command = [sys.executable, str(EXAMPLES / name)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", LONGEST)
def test_it_reads_on_one_screen(name: str):
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= LONGEST[name]


def test_own_page_tables():
    output = run("own_page_tables.py")
    assert "prefill: output [240, 6, 64]" in output
    assert "request 0: 16 of 37 blocks" in output
    assert "request 1: 16 of 22 blocks" in output


@pytest.mark.transformers
def test_patch_transformers():
    pytest.importorskip("transformers")
    output = run("patch_transformers.py")
    assert re.search(r"layer 3: 319 rows, 67 of them within the budget", output)
    assert re.search(r"\d+ of 20 new tokens are those of stock transformers", output)


def test_paged_engine():
    output = run("paged_engine.py")
    together, alone = re.search(r"7 requests in (\d+) steps, (\d+) for one after the other", output).groups()
    assert int(together) < int(alone)
    assert output.endswith("\nthe same tokens\n")


def test_draft_and_verify():
    output = run("draft_and_verify.py")
    assert int(re.search(r"48 tokens in (\d+) verified steps of 4 rows", output)[1]) < 47
    assert "one token a step: the same tokens" in output


@pytest.mark.transformers
def test_selection_study():
    pytest.importorskip("transformers")
    output = run("selection_study.py")
    least, own, most = (float(found) for found in re.findall(r"budget \d+: KL (\S+) from dense", output))
    assert least > own > most > 0
    assert "layer 3: 900 rows attend" in output
    assert "replayed: the same logits" in output


def test_sharded_selection():
    output = run("sharded_selection.py")
    for rank in range(2):
        for what in ("rows", "contexts"):
            assert f"rank {rank} of 2, {what}: the same selection" in output
        assert float(re.search(rf"rank {rank} of 2, attention: at most (\S+) away", output)[1]) < 1e-5


def test_all_examples_are_tested():
    tested = re.findall(r'run\("(\w+\.py)"\)', Path(__file__).read_text(encoding="utf-8"))
    assert sorted({*tested, WITH_VLLM}) == sorted(path.name for path in EXAMPLES.glob("*.py"))
