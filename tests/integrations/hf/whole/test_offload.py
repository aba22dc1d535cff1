"""Weights that are elsewhere until a module is called: accelerate's offload to memory and to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from flashqsa.errors import UnsupportedError
from flashqsa.integrations import hf

PLACES = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.hyper_connection_mixer": "cpu",
    "lm_head": "cpu",
}


@pytest.fixture
def plain(make_model: Any, plain_shape: Any) -> Any:
    return make_model(plain_shape)


@pytest.fixture
def folder(plain: Any, tmp_path: Path) -> Path:
    plain.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def inputs(make_tokens: Any, plain_shape: Any) -> dict[str, torch.Tensor]:
    prompt = make_tokens(2, plain_shape.prompt)
    mask = torch.ones_like(prompt)
    mask[0, :3] = 0
    return {"input_ids": prompt, "attention_mask": mask}


def _offloaded(model: Any) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]


@pytest.fixture
def on_disk(folder: Path, tmp_path: Path) -> Any:
    import transformers

    places = PLACES | {"model.layers.0": "disk", "model.layers.1": "cpu", "model.layers.2": "disk"}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, device_map=places, offload_folder=tmp_path / "offloaded"
    ).eval()


def test_layers_on_disk(on_disk: Any, plain: Any, inputs: Any, assert_as_stock: Any) -> None:
    projections = ("self_attn.q_proj.weight", "self_attn.indexer.index_qk_proj.weight", "self_attn.q_norm.weight")
    away = {f"model.layers.{layer}.{name}" for layer in (0, 2) for name in projections}
    assert away <= set(_offloaded(on_disk))
    said = assert_as_stock(on_disk, inputs, plain=plain)
    assert away <= set(_offloaded(on_disk)), "they must have gone back"
    assert torch.equal(said, plain.generate(**inputs, max_new_tokens=16, do_sample=False))


def test_classes_are_too_late_for_a_model_that_has_hooks(on_disk: Any, inputs: Any, on: Any, refuses: Any) -> None:
    """Hooks keep the forward that they found: it is said, with what to do."""
    with on(), refuses(UnsupportedError, "flashqsa", "Call enable on this model too"):
        on_disk(**inputs)


@pytest.mark.parametrize("enabled_first", [False, True])
def test_offload_to_memory(
    folder: Path, plain: Any, inputs: Any, assert_as_stock: Any, on: Any, enabled_first: bool
) -> None:
    """Every module fetches its own weights, also where hooks are put on an enabled model."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu").eval()
    expected = plain.generate(**inputs, max_new_tokens=16, do_sample=False)
    if enabled_first:
        with on(model):
            accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
            assert torch.equal(model.generate(**inputs, max_new_tokens=16, do_sample=False), expected)
    else:
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert len(_offloaded(model)) == len(list(model.parameters()))
    assert torch.equal(assert_as_stock(model, inputs, plain=plain), expected)


def test_class_enabled_before_weights_exist(folder: Path, plain: Any, inputs: Any, on: Any, tmp_path: Path) -> None:
    import transformers

    expected = plain.generate(**inputs, max_new_tokens=16, do_sample=False)
    places = PLACES | {f"model.layers.{layer}": "disk" for layer in range(3)}
    with on():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, device_map=places, offload_folder=tmp_path / "offloaded"
        ).eval()
        assert torch.equal(model.generate(**inputs, max_new_tokens=16, do_sample=False), expected)
        assert [layer.rows for layer in hf.report(model)] == [2 * (inputs["input_ids"].shape[1] + 15) - 3] * 2
