"""Real engines of vLLM's CPU build, each in its own process, on one small checkpoint; its arguments of a step."""

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
from flashqsa.testing import Step, stream

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


PrepareArguments = Callable[[Step, bool], dict[str, Any]]


@pytest.fixture
def prepare_arguments() -> PrepareArguments:
    """Arguments of `qsa_prepare` for a step whose caches are packed; rings lie from block 1 on, as vLLM has them.

    The second argument says whether rings keep rotary positions behind the keys.
    """

    def arguments(step: Step, keeps_positions: bool) -> dict[str, Any]:
        rings, ring_tokens, dim = step.cache.ring.shape
        dtype, case = step.case.dtype, step.case
        state = torch.zeros(rings + 1, ring_tokens, 1, dim + (12 if keeps_positions else 0), dtype=dtype)
        state[1:, :, 0, :dim] = step.cache.ring
        if keeps_positions:
            state[1:, :, 0, dim:].view(torch.int64).copy_(step.cache.ring_positions)
        k_pages, slots = step.cache.k_pages, step.plan.ring_slot_ids
        packed = k_pages.as_strided((*k_pages.shape[:3], 2 * case.head_dim), k_pages.stride(), k_pages.storage_offset())
        return {
            "q": step.index_qk[:, :-1].flatten(1), "k": step.index_qk[:, -1], "positions": step.rope_positions,
            "cos_sin_cache": step.rope.cos_sin, "q_norm_weight": step.norms.index_q,
            "k_norm_weight": step.norms.index_k, "eps": step.norms.eps,
            "q_out": torch.empty(step.num_rows, case.index_heads, dim, dtype=dtype), "state_cache": state,
            "state_slots": torch.where(slots >= 0, slots + ring_tokens, -1),
            "state_block_table": (step.plan.ring_ids + 1)[:, None], "query_start_loc": step.plan.query_starts,
            "logical_positions": step.plan.positions, "compressed_cache": step.cache.block_keys[:, :, None],
            "compressed_slots": step.plan.closed_block_slot_ids,
            "k_work_metadata": torch.empty(0, 2, dtype=torch.int32), "compress_ratio": case.block_tokens,
            "mrope_section": case.mrope_section, "rope_pos_offset": dim if keeps_positions else None,
            "main_qkv": torch.cat([step.q_gate.flatten(1), step.k.flatten(1), step.v.flatten(1)], dim=1),
            "main_q_norm_weight": step.norms.q, "main_k_norm_weight": step.norms.k, "main_eps": step.norms.eps,
            "main_kv_cache": packed, "main_slot_mapping": step.plan.slot_ids, "main_k_scale": 1.0, "main_v_scale": 1.0,
        }  # fmt: skip

    return arguments
