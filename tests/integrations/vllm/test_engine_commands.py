"""The command line and the server, as a user calls them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from flashqsa.config import QSAConfig

EXAMPLE = Path(__file__).parents[3] / "examples" / "vllm_serve.py"


def _run(*arguments: str, timeout: float) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "FLASHQSA_VLLM"}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=timeout,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.timeout(600)
def test_vllm_serve_streams_a_chat_completion(checkpoint: Path) -> None:
    """The plugin is in the process that runs the model, and says so once there.

    vLLM's API server imports the model too unless a cache of an earlier start tells it what the model is.
    """
    run = _run(str(EXAMPLE), str(checkpoint), "Why is the sky blue?", "--wait-s", "480", timeout=590)
    assert run.returncode == 0, run.stderr[-3000:]
    assert 2 <= int(run.stdout.split()[-2]) <= 16, "several chunks arrived"
    assert run.stdout.splitlines()[-1].endswith(" chunks")
    told = re.findall(r"\((\w+) pid=(\d+)\).* FlashQSA serves QSA layers: mode full", run.stderr)
    assert len(told) == len(set(told))
    assert {process for process, _ in told} - {"APIServer"}


@pytest.mark.timeout(600)
def test_generate_with_vllm_equals_generate(checkpoint: Path) -> None:
    """In chunks of 64 tokens; the margins say how far apart bf16 may put the engines."""
    options = (str(checkpoint), "--random-tokens", "300", "--max-new-tokens", "6", "--threads", "1", "--json",
               "--prefill-chunk", "64", "--ignore-stop")  # fmt: skip
    runs = {}
    for engine in ("vllm", "flashqsa"):
        run = _run("-m", "flashqsa", "generate", *options, "--engine", engine, timeout=280)
        assert run.returncode == 0, run.stderr[-3000:]
        runs[engine] = json.loads(run.stdout)["runs"][engine]
    config = QSAConfig.from_checkpoint(checkpoint)
    calls = len(config.qsa_layer_ids) * (300 // 64 + 1 + 5)
    assert runs["vllm"]["operator_calls"] == dict.fromkeys(("qsa_prepare", "select_blocks", "attend"), calls)
    assert runs["vllm"]["stopped"] == "length"
    assert len(runs["vllm"]["token_ids"]) == 6
    assert runs["vllm"]["token_ids"][0] == runs["flashqsa"]["token_ids"][0]


def test_generate_tells_what_vllm_refuses(tmp_path: Path) -> None:
    """vLLM's gated-delta kernel for CPUs takes heads of 64 and more; `flashqsa tiny` makes narrower ones."""
    folder = tmp_path / "narrow"
    assert _run("-m", "flashqsa", "tiny", str(folder), "--dtype", "bfloat16", timeout=120).returncode == 0
    run = _run("-m", "flashqsa", "generate", str(folder), "--random-tokens", "9", "--engine", "vllm", timeout=280)
    assert run.returncode == 2
    assert "checkpoint must be one that vLLM serves here" in run.stderr
    assert "Unexpected head dim size, 32" in run.stderr
