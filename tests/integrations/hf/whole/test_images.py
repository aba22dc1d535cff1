"""Images through the multimodal model: three position axes that its own grid decides, alone and in a padded batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.commands.tiny_weights import draw_weight
from flashqsa.integrations import hf
from flashqsa.testing import assert_within_budget, stream

IMAGE, VIDEO, START = 310, 311, 312
GRID = torch.tensor([[1, 8, 12], [1, 6, 4]])
"""Two images in patches; four patches make one token."""


@pytest.fixture
def model(plain_shape: Any) -> Any:
    import transformers

    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4}
    text = plain_shape.config()
    config = transformers.Qwen4ExpConfig(
        text_config=text.to_dict(),
        vision_config=vision | {"out_hidden_size": text.hidden_size, "num_position_embeddings": 256},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=START + 1,
    )
    config.text_config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        model = transformers.Qwen4ExpForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(draw_weight(name, parameter.shape, plain_shape.seed))
    return model


@pytest.fixture
def inputs(make_tokens: Any) -> dict[str, torch.Tensor]:
    """Two prompts, the second padded on the left, each with both images."""
    prompt, mask = make_tokens(2, 120), torch.ones(2, 120, dtype=torch.int64)
    mask[1, :7] = 0
    prompt[1, :7] = 301
    for row, first in enumerate((20, 33)):
        prompt[row, first : first + 24] = IMAGE
        prompt[row, first + 30 : first + 36] = IMAGE
    patches = int(GRID.prod(dim=1).sum())
    return {
        "input_ids": prompt,
        "attention_mask": mask,
        "pixel_values": torch.randn(2 * patches, 3 * 2 * 4 * 4, generator=stream(4)),
        "image_grid_thw": GRID.repeat(2, 1),
        "mm_token_type_ids": (prompt == IMAGE).int(),
    }


@pytest.mark.parametrize("by_class", [False, True])
def test_a_batch_of_prompts_with_images(model: Any, inputs: Any, assert_as_stock: Any, by_class: bool) -> None:
    axes = model.model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"], None, inputs["attention_mask"]
    )[0]
    images = axes[:, inputs["input_ids"] == IMAGE]
    for one, other in ((0, 1), (1, 2), (0, 2)):
        assert not torch.equal(images[one], images[other]), "the images must spread their axes"
    assert_as_stock(model, inputs, new_tokens=24, by_class=by_class)
    if not by_class:
        assert [layer.rows for layer in hf.report(model)] == [2 * (120 + 23) - 7] * 2


@torch.no_grad()
def test_fault_54_three_axes_that_all_differ_in_a_view_with_a_longer_row_stride(
    model: Any, make_tokens: Any, watch: Any, on: Any, exactly: Any, assert_same_sets: Any
) -> None:
    """Positions as engines hand them out: a slice of a wider buffer, no two axes alike anywhere."""
    tokens, text = make_tokens(1, 130), model.model.language_model
    buffer = torch.full((3, 1, 200), 9999)
    positions = buffer[:, :, 31:161]
    step = torch.arange(130)
    positions.copy_(torch.stack([step // 7, 400 + step // 3, 900 + 2 * step])[:, None])
    assert positions.stride(0) > 130

    def run(model: Any) -> torch.Tensor:
        first = model(tokens[:, :125], position_ids=positions[..., :125], use_cache=True)
        rest = model(tokens[:, 125:], position_ids=positions[..., 125:], cache=first.cache)
        return torch.cat([first.last_hidden_state, rest.last_hidden_state], dim=1)

    with watch() as stock:
        expected = run(text)
    with on(model), watch() as ours:
        said = run(text)
    assert_same_sets(ours, stock)
    with exactly(text) as exact_text:
        exact = run(exact_text)
    assert_within_budget(said, expected, exact)
    one_axis = text(tokens, position_ids=positions[:1].expand(3, -1, -1)).last_hidden_state
    assert not torch.allclose(one_axis, expected, atol=0.1), "the axes must matter"
