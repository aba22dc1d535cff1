"""Images: three position axes, all different, in prefill and in decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.integrations import hf
from flashqsa.testing import assert_within_budget

PROMPT, DECODED = 150, 12


def _positions(batch: int) -> torch.Tensor:
    """[3, B, T]: text, then a grid of patches 9 wide whose time stands still, then text again."""
    total = PROMPT + DECODED
    axes = torch.arange(total).repeat(3, 1)
    patches = torch.arange(40, 103)
    axes[:, patches] = torch.stack([torch.full_like(patches, 40), 41 + (patches - 40) // 9, 43 + (patches - 40) % 9])
    axes[:, 103:] = torch.arange(52, 52 + total - 103)
    rows = torch.stack([axes + 5 * row for row in range(batch)], dim=1)
    return rows + torch.tensor([0, 2, 7])[:, None, None]  # nowhere do two axes agree


@torch.no_grad()
@pytest.mark.parametrize("axes", [3, 4])
def test_three_axes_in_prefill_and_decode(
    make_model: Any, all_cases: Any, make_tokens: Any, watch: Any, exactly: Any, assert_same_sets: Any, axes: int
) -> None:
    """With four, the first is the position in the text, which only masks use."""
    model = make_model(next(case for case in all_cases if case.name == "two_qsa_layers"))
    prompt, positions = make_tokens(2, PROMPT + DECODED), _positions(2)
    assert bool((positions[0] != positions[1]).all() & (positions[1] != positions[2]).all())
    if axes == 4:
        positions = torch.cat([torch.arange(PROMPT + DECODED).expand(1, 2, -1), positions])

    def run() -> torch.Tensor:
        out = model(prompt[:, :PROMPT], position_ids=positions[..., :PROMPT], use_cache=True)
        logits = [out.logits]
        for token in range(PROMPT, PROMPT + DECODED):
            step = slice(token, token + 1)
            out = model(prompt[:, step], position_ids=positions[..., step], cache=out.cache)
            logits.append(out.logits)
        return torch.cat(logits, dim=1)

    with watch() as stock:
        expected = run()
    with hf.enabled(model), watch() as ours:
        logits = run()
    assert assert_same_sets(ours, stock) <= 2
    with exactly(model) as exact:
        exact_logits = exact(prompt, position_ids=positions, use_cache=False).logits
    assert_within_budget(logits, expected, exact_logits)
    plain = model(prompt, use_cache=False).logits
    assert not torch.allclose(plain, expected, atol=0.1), "the positions must matter"
