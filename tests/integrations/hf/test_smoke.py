"""The ways a model is used, in words that every served transformers version knows; run it with each of them."""

from __future__ import annotations

import dataclasses
import inspect
import warnings
from typing import Any

import pytest
import torch

import flashqsa
from flashqsa.commands.tiny_weights import draw_weight
from flashqsa.integrations import hf
from flashqsa.testing import assert_within_budget, stream

transformers = pytest.importorskip("transformers")

TOKENS, NEW = 150, 12


@pytest.fixture(params=["model", "classes"])
def target(request: pytest.FixtureRequest, model: Any) -> Any:
    """What to enable."""
    return model if request.param == "model" else None


@pytest.fixture
def model(make_model: Any, all_cases: Any) -> Any:
    return make_model(next(case for case in all_cases if case.name == "two_qsa_layers"))


@pytest.fixture
def prompt(make_tokens: Any) -> torch.Tensor:
    return make_tokens(2, TOKENS)


@pytest.fixture
def mask(prompt: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    mask[1, :6] = 0
    return mask


def _cache_name(model: Any) -> str:
    forward = inspect.signature(type(model).forward)
    return next(name for name in ("cache", "past_key_values") if name in forward.parameters)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3},
        {"do_sample": True, "temperature": 0.9},
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 40},
        {"use_cache": False},
    ],
    ids=["greedy", "beams", "sampling", "static", "chunks", "no cache"],
)
def test_generate(model: Any, target: Any, prompt: torch.Tensor, mask: torch.Tensor, options: dict[str, Any]) -> None:
    def generate() -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return model.generate(prompt, attention_mask=mask, **{"max_new_tokens": NEW, "do_sample": False} | options)

    try:
        expected = generate()
    except Exception as error:  # where transformers raises, so does the enabled model
        with hf.enabled(target), pytest.raises(type(error)):
            generate()
        return
    with hf.enabled(target):
        assert torch.equal(generate(), expected)
        if target is not None:
            assert all(layer.blocks_selected < layer.blocks_visible for layer in hf.report(model))
    assert torch.equal(generate(), expected), "transformers must be itself again"


@pytest.mark.parametrize("drafts", ["prompt", "model"])
def test_speculation(
    model: Any, target: Any, make_model: Any, qsa_case: Any, prompt: torch.Tensor, drafts: str
) -> None:
    """Drafts are cropped from the cache again; versions that cannot do it raise, and so does the enabled model."""
    repeated = prompt[:1, :40].repeat(1, 3)
    drafting = make_model(dataclasses.replace(qsa_case, seed=1))
    options = {"prompt_lookup_num_tokens": 3} if drafts == "prompt" else {"assistant_model": drafting}

    def generate() -> Any:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of transformers, about its own call of the assistant
                return model.generate(repeated, max_new_tokens=2 * NEW, do_sample=False, **options)
        except ValueError as error:
            return type(error)

    expected = generate()
    with hf.enabled(target):
        said = generate()
    assert said is expected or torch.equal(said, expected)


@torch.no_grad()
def test_two_turns_over_one_cache(
    model: Any, target: Any, prompt: torch.Tensor, mask: torch.Tensor, watch: Any, assert_same_sets: Any
) -> None:
    name = _cache_name(model)

    def converse(sides: str) -> list[torch.Tensor]:
        said, cache, seen, rows = [], None, mask, prompt
        for side in sides:
            (hf.enable if side == "f" else hf.disable)(target)
            out = model(rows, attention_mask=seen, use_cache=True, **{name: cache})
            cache, rows = getattr(out, name), prompt[:, :9]
            seen = torch.cat([seen, torch.ones_like(rows)], dim=1)
            said.append(out.logits)
        hf.disable(target)
        return said

    with watch() as stock:
        expected = converse("sss")
    for sides in ("fff", "sfs", "fsf"):
        with watch() as ours:
            said = converse(sides)
        assert_same_sets(ours, stock, torch.nn.functional.pad(mask, (0, 18), value=1).bool())
        for one, other in zip(said, expected, strict=True):
            assert torch.allclose(one[0], other[0], atol=2e-4)


def test_gradients(model: Any, target: Any, prompt: torch.Tensor, exactly: Any) -> None:
    def gradients(of: Any) -> torch.Tensor:
        of.zero_grad(set_to_none=True)
        of(prompt, labels=prompt, use_cache=False).loss.backward()
        return torch.cat(
            [p.grad.flatten() for n, p in of.named_parameters() if "self_attn" in n and p.grad is not None]
        )

    model.train()
    stock = gradients(model)
    with exactly(model) as exact:
        truth = gradients(exact)
    with hf.enabled(target):
        assert_within_budget(gradients(model), stock, truth)


def test_images(all_cases: Any, make_tokens: Any) -> None:
    case = next(case for case in all_cases if case.name == "two_qsa_layers")
    config = transformers.Qwen4ExpConfig(
        text_config=case.config().to_dict(),
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
            "out_hidden_size": 96, "num_position_embeddings": 256,
        },
        image_token_id=310, video_token_id=311, vision_start_token_id=312, vision_end_token_id=313,
    )  # fmt: skip
    prompt = make_tokens(1, 120)
    prompt[0, 30:54] = 310
    inputs = {
        "input_ids": prompt,
        "pixel_values": torch.randn(96, 3 * 2 * 4 * 4, generator=stream(4)),
        "image_grid_thw": torch.tensor([[1, 8, 12]]),
        "mm_token_type_ids": (prompt == 310).int(),
        "max_new_tokens": NEW,
        "do_sample": False,
    }
    said = []
    for enable in (False, True):
        if enable:
            hf.enable()  # before there are weights
        with torch.random.fork_rng(devices=[]):
            model = transformers.Qwen4ExpForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(draw_weight(name, parameter.shape, 0))
        said.append(model.generate(**inputs))
    hf.disable()
    with hf.enabled(model):
        said.append(model.generate(**inputs))
    assert torch.equal(said[1], said[0])
    assert torch.equal(said[2], said[0])


@torch.no_grad()
def test_selector_budget_and_recording(model: Any, prompt: torch.Tensor, mask: torch.Tensor) -> None:
    with flashqsa.record(model, scores=True) as recording:
        expected = model(prompt, attention_mask=mask).logits
    with recording.replay(model):
        assert torch.equal(model(prompt, attention_mask=mask).logits, expected)
    with hf.enabled(model, selector=lambda context: context.selection.block_ids, budget_tokens=20):
        small = model(prompt, attention_mask=mask).logits
    with hf.enabled(model, budget_tokens=20):
        assert torch.equal(model(prompt, attention_mask=mask).logits, small)
    assert not torch.allclose(small, expected, atol=1e-2)
