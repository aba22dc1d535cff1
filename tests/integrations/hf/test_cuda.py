"""The drop-in on a GPU: the same tokens as transformers there, also when layers are spread over devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import CompileConfig

from flashqsa.integrations import hf

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*backend 'torch' serves")]

OPTIONS = {"max_new_tokens": 24, "do_sample": False}


@pytest.fixture
def prompt(make_tokens: Any) -> torch.Tensor:
    return make_tokens(2, 150).cuda()


@pytest.fixture
def mask(prompt: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    mask[1, :6] = 0
    return mask


def test_generate(case: Any, make_model: Any, prompt: torch.Tensor, mask: torch.Tensor) -> None:
    model = make_model(case).cuda()
    expected = model.generate(prompt, attention_mask=mask, **OPTIONS)
    with hf.enabled(model):
        assert torch.equal(model.generate(prompt, attention_mask=mask, **OPTIONS), expected)
    counted = hf.report(model)
    assert all(layer.rows == 2 * (150 + 23) - 6 for layer in counted)


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning",
    "ignore:The CUDA Graph is empty",
    "ignore:TensorFloat32",
    r"ignore:\s*Online softmax is disabled",
)  # of torch itself
def test_static_cache_which_compiles_by_itself(
    make_model: Any, small_case: Any, prompt: torch.Tensor, mask: torch.Tensor
) -> None:
    """Without CUDA graphs: their next replay writes over the history of positions, which transformers keeps."""
    model = make_model(small_case).cuda()
    expected = model.generate(prompt, attention_mask=mask, **OPTIONS)
    compiled = {"cache_implementation": "static", "compile_config": CompileConfig(mode="default")}
    with hf.enabled(model):
        said = model.generate(prompt, attention_mask=mask, **compiled, **OPTIONS)
    assert torch.equal(said, expected)


def test_layers_on_several_devices(make_model: Any, all_cases: Any, prompt: torch.Tensor, mask: torch.Tensor) -> None:
    """As `device_map` spreads them: the mask is made where the embedding is, the layers run elsewhere."""
    accelerate = pytest.importorskip("accelerate")
    model = make_model(next(case for case in all_cases if case.name == "two_qsa_layers"))
    expected = model.generate(prompt.cpu(), attention_mask=mask.cpu(), **OPTIONS)
    places = {"model.embed_tokens": "cpu", "lm_head": 0, "model.rotary_emb": 0, "model.hyper_connection_mixer": 0}
    places |= {f"model.layers.{layer}": 0 if layer > 1 else "cpu" for layer in range(4)}
    model = accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=None, force_hooks=True)
    hf.enable(model)
    said = model.generate(prompt.cpu(), attention_mask=mask.cpu(), **OPTIONS)
    assert torch.equal(said.cpu(), expected)
    assert len(hf.report(model)) == 2
