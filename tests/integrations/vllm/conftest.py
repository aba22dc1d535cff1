"""Real engines of vLLM's CPU build, each in a process of its own, on one small checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("vllm") is None:  # `make test-vllm` has an environment of its own
    collect_ignore_glob = ["test_engine*.py"]

from flashqsa.commands import tiny_checkpoint
from flashqsa.testing import stream

SCRIPT = Path(__file__).with_name("engine_process.py")


@dataclass(frozen=True)
class EngineOutput:
    """What an engine's process did: tokens of each prompt, what is known of them, calls of each stage."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached_tokens: list[int]
    preemptions: int
    calls: dict[str, int]
    steps: int
    printed: str
    exit_code: int


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint: vLLM's gated-delta kernel for CPUs takes heads of 64 and more.

    Every token goes to all experts: with two of them, rounding alone sends a token elsewhere now and then.
    """
    folder = tmp_path_factory.mktemp("vllm") / "tiny"
    make_config = tiny_checkpoint.model_config

    def wider(options: tiny_checkpoint.TinyOptions) -> Any:
        config = make_config(options)
        config.linear_key_head_dim = config.linear_value_head_dim = 64
        config.num_experts_per_tok = config.num_experts
        return config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny_checkpoint, "model_config", wider)
        tiny_checkpoint.write_tiny_checkpoint(folder, tiny_checkpoint.TinyOptions(dtype="bfloat16"))
    return folder


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """20 prompts of 5 to 3,000 tokens; the budget of the checkpoint is 128."""
    lengths = (5, 6, 7, 8, 33, 64, 80, 127, 128, 129, 131, 132, 200, 257, 400, 641, 900, 1601, 2200, 3000)
    return [torch.randint(2, 256, (n,), generator=stream(n, 5)).tolist() for n in lengths]


RunEngine = Callable[..., EngineOutput]


@pytest.fixture(scope="session")
def run_engine(tmp_path_factory: pytest.TempPathFactory) -> RunEngine:
    """Generate greedily from prompts in a new process."""

    def run(
        checkpoint: Path,
        prompts: list[list[int]],
        *,
        mode: str | None = "full",
        max_tokens: int = 8,
        before: str = "",
        one_by_one: bool = False,
        **options: Any,
    ) -> EngineOutput:
        """`before` is code that runs before vLLM is imported; `options` go to `vllm.LLM`."""
        folder = tmp_path_factory.mktemp("run")
        job, result = folder / "job.json", folder / "result.json"
        job.write_text(
            json.dumps({
                "checkpoint": str(checkpoint), "prompts": prompts, "max_tokens": max_tokens, "before": before,
                "one_by_one": one_by_one, "options": options,
            })
        )  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name != "FLASHQSA_VLLM"}
        if mode is not None:
            environment["FLASHQSA_VLLM"] = mode
        environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.run(
            [sys.executable, str(SCRIPT), str(job), str(result)], capture_output=True, text=True, check=False,
            timeout=280, env=environment, cwd=folder,
        )  # fmt: skip
        nothing = {"tokens": [], "logprobs": [], "cached_tokens": [], "preemptions": 0, "calls": {}, "steps": 0}
        values = json.loads(result.read_text()) if result.exists() else nothing
        return EngineOutput(**values, printed=process.stdout + process.stderr, exit_code=process.returncode)

    return run
