"""vLLM's CPU build serves a qwen4_exp checkpoint: the tokens of transformers, whatever the engine does around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from flashqsa.integrations import hf

QSA_LAYERS = 1
Check = Callable[[list[list[int]], Any], int]


@pytest.fixture(scope="session")
def check_tokens(checkpoint: Path) -> Check:
    """Compares each token with transformers on FlashQSA in bf16, given all tokens before it.

    Where the two best logits lie closer than twice the most that bf16 moves a logit of the prompt from fp32, the token
    is left out. The log-probabilities of all tokens are on average no more than twice as far from fp32 as those of
    transformers in bf16. Returns how many tokens were compared.
    """
    models = []
    for dtype in (torch.bfloat16, torch.float32):
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
        models.append(hf.enable(model.eval()))

    def logits(ids: torch.Tensor, rows: int) -> list[torch.Tensor]:
        with torch.no_grad():
            return [model(input_ids=ids, logits_to_keep=rows + 1).logits[0, :-1].float() for model in models]

    def check(prompts: list[list[int]], output: Any) -> int:
        compared, ours, theirs = 0, [], []
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
        ours_mean, theirs_mean = sum(ours) / len(ours), sum(theirs) / len(theirs)
        assert ours_mean <= 2 * theirs_mean, f"vLLM is {ours_mean} from fp32, transformers in bf16 {theirs_mean}"
        return compared

    return check


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
    assert check_tokens(prompts, output) >= len(prompts) * 8 // 2
    expected = QSA_LAYERS * output.steps
    assert output.steps > 0
    if mode == "ops":
        assert output.calls["qsa_prepare"] == output.calls["qsa_sparse_paged_attention"] == expected
        assert output.calls["expand_qsa_block_indices"] == expected
        assert output.calls["qsa_select_paged_decode"] > 0
        assert output.calls["qsa_select_paged_prefill"] > 0
        assert "select_blocks" not in output.calls
    else:
        assert output.calls == dict.fromkeys(("qsa_prepare", "select_blocks", "attend"), expected)


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
