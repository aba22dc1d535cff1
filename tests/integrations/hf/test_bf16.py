"""In bf16 we round at fewer places than transformers: no further from fp32, and no fewer blocks of its choice.

Both sides run the same bf16 weights on the same inputs; the truth is stock transformers on them in fp32.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.integrations import hf
from flashqsa.testing import stream

SEEDS = (1, 2, 3)
MAY_MISS = 0.001


def _on_bf16_weights(model: Any) -> tuple[Any, Any]:
    """A model with weights that bf16 holds, in fp32, and in bf16 as `from_pretrained(dtype=)` has it."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    low = copy.deepcopy(model).to(torch.bfloat16)
    low.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.clone()  # stays fp32
    return model, low


def _root_mean_square(difference: torch.Tensor) -> float:
    return float(difference.double().square().mean().sqrt())


@torch.no_grad()
def test_bf16_model_is_no_further_from_fp32(case: Any, make_model: Any, make_tokens: Any) -> None:
    model, low = _on_bf16_weights(make_model(case))
    prompt = make_tokens(1, case.prompt)
    exact = model(prompt).logits
    stock = _root_mean_square(low(prompt).logits.float() - exact)
    with hf.enabled(low):
        ours = _root_mean_square(low(prompt).logits.float() - exact)
    assert ours <= 2 * stock, f"{ours:.4f} against {stock:.4f}"
    assert stock > 1e-3, "the measure must see bf16"


@pytest.mark.slow
@torch.no_grad()
def test_bf16_layers_err_less_and_select_as_often_what_fp32_selects(
    all_cases: Any, make_model: Any, watch: Any
) -> None:
    """The first QSA layer of each case alone, pooled over cases and seeds: about 12,000 rows that leave tokens out."""
    shared, wanted, errors, rows = torch.zeros(2), 0.0, torch.zeros(2), 0
    for case in all_cases:
        for seed in SEEDS:
            pair = _on_bf16_weights(make_model(dataclasses.replace(case, seed=seed)))
            hidden = torch.randn(1, case.prompt, 96, generator=stream(seed, 5)).bfloat16()
            outputs, selected = [], []
            for model, enabled in ((pair[0], False), (pair[1], False), (pair[1], True)):
                layer = hf.patch.qsa_attentions(hf.enable(model) if enabled else model)[0]
                x = hidden.to(model.dtype)
                table = model.model.rotary_emb(x, torch.arange(case.prompt)[None, None].expand(3, 1, -1))
                mask: Any = torch.ones(case.prompt, case.prompt, dtype=torch.bool).tril()[None, None]
                if enabled:
                    mask = hf.masks.step_mask(1, case.prompt, case.prompt, mask_function=_causal(), config=model.config)
                with watch() as records:
                    outputs.append(layer(x, table, mask)[0].float())
                selected.append(records[0].tokens)
            exact, *chosen = selected
            sparse = exact.sum(dim=-1) <= torch.arange(case.prompt)
            wanted += float(exact[sparse].sum())
            rows += int(sparse.sum())
            shared += torch.stack([(tokens & exact)[sparse].sum() for tokens in chosen])
            stock, ours = (_root_mean_square(out - outputs[0]) for out in outputs[1:])
            assert ours <= 2 * stock, f"{case} with seed {seed}: {ours:.5f} against {stock:.5f}"
            errors += torch.tensor([stock, ours])
    stock_share, our_share = (shared / wanted).tolist()
    assert rows > 8_000
    assert stock_share < 1 - MAY_MISS, "the measure must see bf16"
    assert our_share >= stock_share - MAY_MISS, f"{our_share:.5f} against {stock_share:.5f}"
    assert errors[1] <= 1.1 * errors[0], "rounding less must not, on the whole, err more"


def _causal() -> Any:
    from transformers.masking_utils import causal_mask_function

    return causal_mask_function
