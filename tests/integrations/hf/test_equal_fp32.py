"""In fp32 an enabled model is transformers: the same selected sets, the same tokens, logits within the error budget."""

from __future__ import annotations

from typing import Any

import torch

from flashqsa.integrations import hf
from flashqsa.testing import assert_within_budget

NEW_TOKENS = 48
PADS = (0, 1, 3, 7, 61)


def _greedy(model: Any, prompt: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of every prompt token and of the tokens then decoded one by one, and those tokens."""
    out = model(prompt, use_cache=True)
    logits, tokens = [out.logits], [out.logits[:, -1:].argmax(dim=-1)]
    for _ in range(NEW_TOKENS - 1):
        out = model(tokens[-1], cache=out.cache)
        logits.append(out.logits)
        tokens.append(out.logits.argmax(dim=-1))
    return torch.cat(logits, dim=1), torch.cat(tokens, dim=1)


def _few_left_out(left_out: int, selected: list[Any]) -> None:
    rows = sum(s.close.numel() for s in selected)
    assert left_out <= rows // 200, f"{left_out} of {rows} rows are tied by rounding: the case shows too little"


@torch.no_grad()
def test_forward_and_decode_select_the_same_and_say_the_same(
    case: Any, make_model: Any, make_tokens: Any, watch: Any, exactly: Any, assert_same_sets: Any
) -> None:
    model, prompt = make_model(case), make_tokens(1, case.prompt)
    with watch() as stock:
        stock_logits, stock_tokens = _greedy(model, prompt)
    with exactly(model) as exact:
        exact_logits = exact(torch.cat([prompt, stock_tokens[:, :-1]], dim=1)).logits
    with hf.enabled(model), watch() as ours:
        logits, tokens = _greedy(model, prompt)
    assert torch.equal(tokens, stock_tokens)
    _few_left_out(assert_same_sets(ours, stock), ours)
    assert 3 * sum(s.sparse_rows for s in ours) > sum(s.close.numel() for s in ours), "most rows attend everything"
    assert_within_budget(logits, stock_logits, exact_logits, str(case))
    if case.name == "one_index_head_ties_at_zero":
        assert sum(int((s.tied & ~s.close).sum()) for s in stock) > 30, "the case must have ties to break"


@torch.no_grad()
def test_generate_with_left_padding_says_the_same(
    case: Any, make_model: Any, make_tokens: Any, watch: Any, assert_same_sets: Any
) -> None:
    model, prompt = make_model(case), make_tokens(len(PADS), 3 * case.budget // 2 + 40, seed=1)
    mask = torch.arange(prompt.shape[1])[None] >= torch.tensor(PADS)[:, None]
    prompt = prompt.masked_fill(~mask, model.config.pad_token_id)

    def generate() -> torch.Tensor:
        return model.generate(prompt, attention_mask=mask.long(), max_new_tokens=NEW_TOKENS, do_sample=False)

    with watch() as stock:
        expected = generate()
    with hf.enabled(model), watch() as ours:
        assert torch.equal(generate(), expected)
    assert expected.shape[1] == prompt.shape[1] + NEW_TOKENS
    _few_left_out(assert_same_sets(ours, stock, mask), ours)
