"""Images: three position axes, all different, in prefill and in decode."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.commands.tiny_weights import draw_weight
from flashqsa.integrations import hf
from flashqsa.testing import assert_within_budget, stream

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


@torch.no_grad()
@pytest.mark.parametrize("by_class", [False, True])
def test_generate_from_an_image(
    all_cases: Any, make_tokens: Any, watch: Any, assert_same_sets: Any, by_class: bool
) -> None:
    """The multimodal model around the text model: a nested config, and positions that its processor's grid decides."""
    import transformers

    case = next(case for case in all_cases if case.name == "two_qsa_layers")
    image_token, grid = 310, torch.tensor([[1, 8, 12]])
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
    config = transformers.Qwen4ExpConfig(
        text_config=case.config().to_dict(),
        vision_config=vision | {"out_hidden_size": 96, "num_position_embeddings": 256},
        image_token_id=image_token,
        video_token_id=311,
        vision_start_token_id=312,
        vision_end_token_id=313,
    )
    with torch.random.fork_rng(devices=[]):
        model = transformers.Qwen4ExpForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        parameter.copy_(draw_weight(name, parameter.shape, 0))
    prompt = make_tokens(1, 120)
    prompt[0, 30:54] = image_token
    inputs = {
        "input_ids": prompt,
        "pixel_values": torch.randn(96, 3 * 2 * 4 * 4, generator=stream(4)),
        "image_grid_thw": grid,
        "mm_token_type_ids": (prompt == image_token).int(),
        "max_new_tokens": 24,
        "do_sample": False,
    }
    with watch() as stock:
        expected = model.generate(**inputs)
    with hf.enabled(None if by_class else model), watch() as ours:
        assert torch.equal(model.generate(**inputs), expected)
    assert assert_same_sets(ours, stock) <= 2
    axes = model.model.get_rope_index(prompt, inputs["mm_token_type_ids"], grid)[0]
    assert not torch.equal(axes[1], axes[2]), "the image must spread its axes"
