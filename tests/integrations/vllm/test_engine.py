"""vLLM's CPU build serves a qwen4_exp checkpoint: the tokens of transformers, whatever the engine does around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QSA_LAYERS = 1
Check = Callable[[list[list[int]], Any], int]

pytestmark = pytest.mark.timeout(600)


def test_stock_vllm_refuses_the_checkpoint(run_engine: Any, checkpoint: Path, prompts: list[list[int]]) -> None:
    output = run_engine(checkpoint, prompts[:1], mode="off")
    assert output.exit_code != 0
    assert "Qwen4Exp QSA requires FlashAttention" in output.printed


@pytest.mark.parametrize("mode", ["full", "ops", None])
def test_tokens_equal_transformers(
    run_engine: Any, checkpoint: Path, prompts: list[list[int]], check_tokens: Check, mode: str | None
) -> None:
    output = run_engine(checkpoint, prompts, mode=mode)
    assert output.exit_code == 0, output.printed[-3000:]
    assert output.printed.count("FlashQSA serves QSA layers: mode") == 1
    # How many margins exceed the budget depends on the CPU's matrix products: 77 and 80 of 160 have been seen.
    assert check_tokens(prompts, output) >= len(prompts) * 8 // 3
    expected = QSA_LAYERS * output.steps
    assert output.steps > 0
    if mode == "ops":
        (calls,) = output.rank_calls
        assert calls["qsa_prepare"] == calls["qsa_sparse_paged_attention"] == expected
        assert calls["expand_qsa_block_indices"] == expected
        assert calls["qsa_select_paged_decode"] > 0
        assert calls["qsa_select_paged_prefill"] > 0
        assert "select_blocks" not in calls
    else:
        assert output.rank_calls == [dict.fromkeys(("qsa_prepare", "select_blocks", "attend"), expected)]


@pytest.mark.parametrize("mode", ["full", "ops"])
@pytest.mark.parametrize("batched_tokens", [64, 257])
def test_chunked_prefill(
    run_engine: Any, checkpoint: Path, prompts: list[list[int]], check_tokens: Check, batched_tokens: int, mode: str
) -> None:
    chosen = [prompt for prompt in prompts if len(prompt) < 1700][::2]
    output = run_engine(checkpoint, chosen, mode=mode, max_num_batched_tokens=batched_tokens, max_num_seqs=16)
    assert output.exit_code == 0, output.printed[-3000:]
    assert output.steps > sum(map(len, chosen)) // batched_tokens
    assert check_tokens(chosen, output) > len(chosen)


def test_fault_22_prefix_hits(run_engine: Any, checkpoint: Path, prompts: list[list[int]], check_tokens: Check) -> None:
    """1,600 shared tokens, then remainders that are no multiple of a block, one request after the other."""
    shared = prompts[17][:1600]
    chosen = [shared + prompts[4][:more] for more in (1, 2, 3, 30, 0)]
    output = run_engine(checkpoint, chosen, one_by_one=True)
    assert output.exit_code == 0, output.printed[-3000:]
    assert output.cached_tokens[0] == 0
    assert min(output.cached_tokens[1:]) > 1000
    assert check_tokens(chosen, output) > 0


def test_preemption(run_engine: Any, checkpoint: Path, prompts: list[list[int]], check_tokens: Check) -> None:
    """So few pages that requests are put off and computed again."""
    chosen = prompts[10:16]
    output = run_engine(
        checkpoint, chosen, max_tokens=24, num_gpu_blocks_override=24, max_model_len=1024, max_num_seqs=6
    )
    assert output.exit_code == 0, output.printed[-3000:]
    assert output.preemptions > 0
    assert check_tokens(chosen, output) > len(chosen)


def test_shadow_is_refused_on_the_cpu(run_engine: Any, checkpoint: Path, prompts: list[list[int]]) -> None:
    """There is nothing of vLLM's to serve."""
    output = run_engine(checkpoint, prompts[:1], mode="shadow")
    assert output.exit_code != 0
    assert "FLASHQSA_VLLM must be off, ops or full with vLLM's CPU build, got 'shadow'" in output.printed


def test_a_renamed_symbol_leaves_vllm_untouched(run_engine: Any, checkpoint: Path, prompts: list[list[int]]) -> None:
    renaming = (
        "import vllm.models.qwen4_exp.nvidia.ops.qsa_indexer as m\n"
        "m.expand_blocks = m.expand_qsa_block_indices\n"
        "del m.expand_qsa_block_indices\n"
    )
    output = run_engine(checkpoint, prompts[:1], before=renaming)
    assert output.printed.count("FlashQSA leaves vLLM untouched") == 1
    assert "expand_qsa_block_indices is missing" in output.printed
    assert "Qwen4Exp QSA requires FlashAttention" in output.printed
