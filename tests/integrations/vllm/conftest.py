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
    """What an engine did: tokens of each prompt, what is known of them, calls of each stage in each rank's process."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    cached_tokens: list[int]
    preemptions: int
    rank_calls: list[dict[str, int]]
    steps: int
    drafted: int
    block_size: int
    printed: str
    exit_code: int


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Small checkpoints; vLLM's gated-delta kernel for CPUs takes heads of 64 and more.

    Every token goes to all experts: with two of them, rounding alone sends a token elsewhere now and then.
    """
    make_config = tiny_checkpoint.model_config

    def make(*, qsa_alone: bool = False, **options: Any) -> Path:
        folder = tmp_path_factory.mktemp("vllm") / "tiny"

        def wider(options: tiny_checkpoint.TinyOptions) -> Any:
            config = make_config(options)
            config.linear_key_head_dim = config.linear_value_head_dim = 64
            config.num_experts_per_tok = config.num_experts
            if qsa_alone:
                config.layer_types = ["indexed_attention"] * options.layers
            return config

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiny_checkpoint, "model_config", wider)
            tiny_checkpoint.write_tiny_checkpoint(folder, tiny_checkpoint.TinyOptions(dtype="bfloat16", **options))
        return folder

    return make


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: Callable[..., Path]) -> Path:
    """The checkpoint of most tests: one QSA layer, a budget of 128 tokens."""
    return make_checkpoint()


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
        then_one_by_one: bool = False,
        seeds: list[int] | None = None,
        abort: tuple[int, ...] = (),
        **options: Any,
    ) -> EngineOutput:
        """`before` is code that runs before vLLM is imported; `options` go to `vllm.LLM`.

        With `seeds`, tokens are sampled. `then_one_by_one` runs all together first. `abort` are prompts that end early.
        """
        folder = tmp_path_factory.mktemp("run")
        job, result = folder / "job.json", folder / "result.json"
        job.write_text(
            json.dumps({
                "checkpoint": str(checkpoint), "prompts": prompts, "max_tokens": max_tokens, "before": before,
                "one_by_one": one_by_one, "then_one_by_one": then_one_by_one, "seeds": seeds, "abort": abort,
                "options": options,
            })
        )  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if name != "FLASHQSA_VLLM"}
        if mode is not None:
            environment["FLASHQSA_VLLM"] = mode
        environment |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        }  # fmt: skip
        process = subprocess.run(
            [sys.executable, str(SCRIPT), str(job), str(result)], capture_output=True, text=True, check=False,
            timeout=580, env=environment, cwd=folder,
        )  # fmt: skip
        nothing = {
            "tokens": [], "logprobs": [], "cached_tokens": [], "preemptions": 0, "rank_calls": [], "steps": 0,
            "drafted": 0, "block_size": 0,
        }  # fmt: skip
        values = json.loads(result.read_text()) if result.exists() else nothing
        return EngineOutput(**values, printed=process.stdout + process.stderr, exit_code=process.returncode)

    return run


Check = Callable[[list[list[int]], Any], int]


@pytest.fixture(scope="session")
def check_tokens(checkpoint: Path) -> Check:
    """The comparison with transformers for the checkpoint of most tests."""
    return _check_tokens_of(checkpoint)


@pytest.fixture
def check_tokens_of() -> Callable[..., Check]:
    """The comparison with transformers for any checkpoint."""
    return _check_tokens_of


def _check_tokens_of(checkpoint: Path, *, least_share: float = 0.0) -> Check:
    """Compares each token with transformers on FlashQSA in bf16, given all tokens before it.

    Where the two best logits lie closer than twice the most that bf16 moves a logit of the prompt from fp32, the token
    is left out. The log-probabilities of all tokens are on average no more than twice as far from fp32 as those of
    transformers in bf16. At least a share of all tokens is the same. Returns how many tokens were compared.
    """
    import transformers

    from flashqsa.integrations import hf

    models = []
    for dtype in (torch.bfloat16, torch.float32):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        models.append(hf.enable(model.eval()))

    def logits(ids: torch.Tensor, rows: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(input_ids=ids, logits_to_keep=rows + 1).logits[0, :-1].float() for model in models]

    def check(prompts: list[list[int]], output: Any) -> int:
        compared, same, ours, theirs = 0, 0, [], []
        assert len(output.tokens) == len(prompts)
        for prompt, tokens, logprobs in zip(prompts, output.tokens, output.logprobs, strict=True):
            low, exact = logits(torch.tensor([prompt + tokens]), len(tokens))
            of_tokens = torch.arange(len(tokens)), torch.tensor(tokens)
            right = exact.log_softmax(dim=1)[of_tokens]
            ours += (torch.tensor(logprobs) - right).abs().tolist()
            theirs += (low.log_softmax(dim=1)[of_tokens] - right).abs().tolist()
            budget = 2 * (low - exact).abs().max()
            best = low.topk(2, dim=1)
            clear = best.values[:, 0] - best.values[:, 1] > budget
            differs = clear & (best.indices[:, 0] != torch.tensor(tokens))
            assert not bool(differs.any()), (
                f"prompt of {len(prompt)} tokens: token {int(differs.nonzero()[0, 0])} is {tokens}, transformers has "
                f"{best.indices[:, 0].tolist()} with margins {(best.values[:, 0] - best.values[:, 1]).tolist()}"
            )
            compared += int(clear.sum())
            same += int((best.indices[:, 0] == torch.tensor(tokens)).sum())
        ours_mean, theirs_mean = sum(ours) / len(ours), sum(theirs) / len(theirs)
        assert ours_mean <= 2 * theirs_mean, f"vLLM is {ours_mean} from fp32, transformers in bf16 {theirs_mean}"
        assert same >= least_share * len(ours), f"{same} of {len(ours)} tokens are those of transformers"
        return compared

    return check


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
