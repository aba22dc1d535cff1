"""Classes that were enabled for a while: what hooks and threads took along from that time does no harm later."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa.errors import UnsupportedError
from flashqsa.integrations import hf

transformers = pytest.importorskip("transformers")

# Some versions warn where weights are offloaded: prompts are then on another device than the first of them.
pytestmark = pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")

PATIENCE = 60
"""Seconds that a thread waits for the other before the test fails."""


@pytest.fixture(autouse=True)
def classes_are_disabled() -> Iterator[None]:
    yield
    hf.disable()


@pytest.fixture
def plain(make_model: Any, small_case: Any) -> Any:
    return make_model(small_case)


@pytest.fixture
def say(make_tokens: Any) -> Callable[[Any], torch.Tensor]:
    prompt = make_tokens(2, 100)
    return lambda model: model.generate(prompt, max_new_tokens=4, do_sample=False)


def _with_layers_on_disk(plain: Any, folder: Path) -> Any:
    plain.save_pretrained(folder / "model")
    places = {f"model.{name}": "cpu" for name in ("embed_tokens", "rotary_emb", "hyper_connection_mixer")}
    places |= {"lm_head": "cpu", "model.layers.0": "disk", "model.layers.1": "disk"}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32, device_map=places, offload_folder=folder / "offloaded"
    ).eval()


def _with_weights_in_memory(plain: Any, folder: Path) -> Any:
    """Each module that has weights has hooks: attention has none of its own."""
    return pytest.importorskip("accelerate").cpu_offload(plain, execution_device=torch.device("cpu"))


def _with_hooks_everywhere(plain: Any, folder: Path) -> Any:
    hooks = pytest.importorskip("accelerate.hooks")
    for module in plain.modules():
        hooks.add_hook_to_module(module, hooks.ModelHook())
    return plain


HOOKED = [_with_layers_on_disk, _with_weights_in_memory, _with_hooks_everywhere]


@pytest.mark.parametrize("hooked", HOOKED)
def test_hooks_from_the_time_when_classes_were_enabled(plain: Any, say: Any, tmp_path: Path, hooked: Any) -> None:
    expected = say(plain)
    hf.enable()
    model = hooked(plain, tmp_path)
    assert torch.equal(say(model), expected)
    rows = [layer.rows for layer in hf.report(model)]
    assert rows == [2 * 103]
    hf.disable()
    assert torch.equal(say(model), expected), "it is on transformers again"
    assert [layer.rows for layer in hf.report(model)] == rows
    hf.enable()
    assert torch.equal(say(model), expected)
    assert [layer.rows for layer in hf.report(model)] == [2 * rows[0]]


@pytest.mark.parametrize("hooked", HOOKED)
def test_a_model_with_such_hooks_can_be_enabled(plain: Any, say: Any, tmp_path: Path, hooked: Any) -> None:
    """Its own forward is not what the hooks found: each would call the other for ever."""
    expected = say(plain)
    hf.enable()
    model = hooked(plain, tmp_path)
    with hf.enabled(model):
        assert torch.equal(say(model), expected)
        assert [layer.rows for layer in hf.report(model)] == [2 * 103]
        hf.disable()
        assert torch.equal(say(model), expected)
        assert [layer.rows for layer in hf.report(model)] == [4 * 103]
    assert torch.equal(say(model), expected)
    assert [layer.rows for layer in hf.report(model)] == [4 * 103], "it is on transformers again"


@pytest.mark.parametrize("hooked", [_with_layers_on_disk, _with_hooks_everywhere])
def test_classes_enabled_after_hooks(
    plain: Any, say: Any, tmp_path: Path, hooked: Any, refuses: Any, dense_masks: Any
) -> None:
    """It is said with what to do; where the text model has hooks too, transformers goes on and the report is empty."""
    expected = say(plain)
    model = hooked(plain, tmp_path)
    with hf.enabled():
        if hooked is _with_layers_on_disk:
            with refuses(UnsupportedError, "flashqsa", "Call enable on this model"):
                say(model)
        else:
            dense_masks.allowed = True
            assert torch.equal(say(model), expected)
            assert hf.report(model) == []
            dense_masks.allowed = False
        with hf.enabled(model):
            assert torch.equal(say(model), expected)
            assert [layer.rows for layer in hf.report(model)] == [2 * 103]
    assert torch.equal(say(model), expected)


def test_a_text_model_whose_hooks_came_first_says_what_to_do(
    plain: Any, say: Any, refuses: Any, dense_masks: Any
) -> None:
    dense_masks.allowed = True
    hooks = pytest.importorskip("accelerate.hooks")
    hooks.add_hook_to_module(plain.model, hooks.ModelHook())
    with (
        hf.enabled(),
        refuses(UnsupportedError, "flashqsa", "must stay 'flashqsa'", "got 'sdpa'", "Call enable"),
    ):
        say(plain)


@torch.no_grad()
def test_threads_that_share_a_model(plain: Any, make_tokens: Any) -> None:
    """The first to come is the first to go; what it found in the config is put back by the last."""
    prompt, before = make_tokens(1, 80), plain.config._attn_implementation
    inside, finished = [threading.Event(), threading.Event()], threading.Event()
    expected = plain(prompt).logits
    said: dict[int, torch.Tensor] = {}
    seen: list[Any] = []

    def wait(*_: Any) -> None:
        number = int(threading.current_thread().name)
        inside[number].set()
        assert (inside[1] if number == 0 else finished).wait(PATIENCE)
        seen.append(plain.config._attn_implementation)

    def run() -> None:
        with torch.no_grad():
            said[int(threading.current_thread().name)] = plain(prompt).logits

    with hf.enabled(), plain.model.layers[0].register_forward_pre_hook(wait):
        first, second = (threading.Thread(target=run, name=str(number)) for number in range(2))
        first.start()
        assert inside[0].wait(PATIENCE)
        second.start()
        first.join(PATIENCE)
        finished.set()
        second.join(PATIENCE)
    assert seen == ["flashqsa"] * 2
    assert plain.config._attn_implementation == before
    for logits in said.values():
        assert torch.allclose(logits, expected, atol=1e-4)
    assert len(said) == 2
