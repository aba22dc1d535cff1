"""Enabling and disabling: reversible without a trace, idempotent, nested, by model and by class."""

from __future__ import annotations

import copy
import json
import pickle
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch

from flashqsa.errors import ArgumentError, ConfigError, UnsupportedError
from flashqsa.integrations import hf

modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")

TOKENS = 70


@pytest.fixture
def model(make_model: Any, small_case: Any) -> Any:
    return make_model(small_case)


@pytest.fixture
def prompt(make_tokens: Any) -> torch.Tensor:
    return make_tokens(2, TOKENS)


@pytest.fixture(autouse=True)
def classes_are_left_alone() -> Iterator[None]:
    before = _class_trace()
    yield
    hf.disable()
    assert _class_trace() == before


def _class_trace() -> dict[str, dict[str, int]]:
    """Everything in the namespaces of the model's classes, by identity; a stray wrapper or attribute shows."""
    names = ["TextAttention", "TextModel", "PreTrainedModel", "ForCausalLM", "TextDecoderLayer"]
    classes = [getattr(modeling, f"Qwen4Exp{name}") for name in names]
    return {c.__name__: {k: id(v) for k, v in vars(c).items() if not k.startswith("_")} for c in classes}


def _trace(model: Any) -> dict[str, Any]:
    """All that a model says about itself: attributes and hooks of its modules, its config and its state."""
    parts = {
        f"{name}.{key}": list(value) if isinstance(value, dict) else repr(type(value)) + str(id(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if not (name == "" and key == "_can_set_attn_implementation_cached_value")
    }
    config = vars(model.config) | model.config.to_dict()
    return {"parts": parts, "config": {k: repr(v) for k, v in config.items()}, "state": list(model.state_dict())}


def _logits(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt).logits


def _runs_on_flashqsa(model: Any, prompt: torch.Tensor, watch: Any) -> bool:
    """Whether the QSA layers of a forward ran here; both sides must not mix."""
    attention = hf.patch.qsa_attentions(model)[0]
    calls: list[Any] = []
    with attention.indexer.register_forward_hook(lambda *_: calls.append(1)), watch() as selected:
        _logits(model, prompt)
    assert len(selected) == len(hf.patch.qsa_attentions(model))
    return not calls


def test_enable_and_disable_leave_no_trace(model: Any, prompt: torch.Tensor, watch: Any) -> None:
    stock = _logits(model, prompt)
    before = _trace(model)
    assert hf.enable(model) is model
    assert _runs_on_flashqsa(model, prompt, watch)
    assert list(model.state_dict()) == before["state"]
    assert hf.disable(model) is model
    assert _trace(model) == before
    assert torch.equal(_logits(model, prompt), stock), "transformers' own forward must be back, bit for bit"


def test_enable_twice_is_enable_once(model: Any, prompt: torch.Tensor, watch: Any) -> None:
    before = _trace(model)
    hf.enable(hf.enable(model))
    assert _runs_on_flashqsa(model, prompt, watch)
    hf.disable(model)
    assert _trace(model) == before
    hf.disable(model)
    assert _trace(model) == before


def test_enabled_nests_and_survives_errors(model: Any, prompt: torch.Tensor, watch: Any) -> None:
    before = _trace(model)

    def fail_inside() -> None:
        with hf.enabled(model):
            with hf.enabled(model) as same:
                assert same is model
            assert _runs_on_flashqsa(model, prompt, watch), "leaving the inner block must not end the outer one"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert _trace(model) == before
    hf.enable(model)
    with hf.enabled(model):
        pass
    assert _runs_on_flashqsa(model, prompt, watch), "a block inside enable() must not end it"


def test_enable_for_the_class_also_serves_models_made_later(
    model: Any, prompt: torch.Tensor, watch: Any, make_model: Any, small_case: Any
) -> None:
    stock, before = _logits(model, prompt), _trace(model)
    hf.enable()
    hf.enable()
    assert _runs_on_flashqsa(model, prompt, watch)
    assert _trace(model) == before, "nothing is kept on a model"
    later = make_model(small_case)
    assert _runs_on_flashqsa(later, prompt, watch)
    hf.disable()
    assert not _runs_on_flashqsa(later, prompt, watch)
    assert torch.equal(_logits(later, prompt), stock)


def test_class_and_model_are_independent(model: Any, prompt: torch.Tensor, watch: Any, make_model: Any) -> None:
    with hf.enabled():
        with hf.enabled(model):
            with hf.enabled():
                pass
            assert _runs_on_flashqsa(model, prompt, watch)
        assert _runs_on_flashqsa(model, prompt, watch), "the class is still enabled"
    assert not _runs_on_flashqsa(model, prompt, watch)
    hf.enable(model)
    with hf.enabled():
        pass
    assert _runs_on_flashqsa(model, prompt, watch), "the model is still enabled"


@pytest.mark.parametrize("by_class", [False, True])
def test_generate_with_a_static_cache(
    model: Any, prompt: torch.Tensor, watch: Any, assert_same_sets: Any, by_class: bool
) -> None:
    """`generate` asks for masks of static caches before the model runs."""
    mask = torch.ones_like(prompt)
    mask[1, :9] = 0
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static", "attention_mask": mask}
    with watch() as stock:
        expected = model.generate(prompt, **options)
    with hf.enabled(None if by_class else model), watch() as ours:
        assert torch.equal(model.generate(prompt, **options), expected)
    assert_same_sets(ours, stock, mask.bool())


def test_generate_with_a_static_cache_where_classes_plan_masks_themselves(
    model: Any, prompt: torch.Tensor, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers 5.16.1 does; theirs is called, and is back afterwards."""
    from transformers import masking_utils

    calls: list[str] = []
    plan_masks = getattr(model, "create_masks_for_generate", masking_utils.create_masks_for_generate)

    def theirs(config: Any, **kwargs: Any) -> Any:
        calls.append(config._attn_implementation)
        return plan_masks(config, **kwargs)

    options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    with monkeypatch.context() as patched:
        patched.setattr(type(model), "create_masks_for_generate", staticmethod(theirs), raising=False)
        expected = model.generate(prompt, **options)
        calls.clear()
        with hf.enabled(), watch() as ours:
            assert torch.equal(model.generate(prompt, **options), expected)
        assert calls == ["flashqsa"] * len(ours)
        assert type(model).create_masks_for_generate is theirs


def test_deepcopy_of_an_enabled_model_is_a_model_of_its_own(model: Any, prompt: torch.Tensor, watch: Any) -> None:
    hf.enable(model)
    before = _logits(model, prompt)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        hf.patch.qsa_attentions(twin)[0].q_proj.weight.mul_(-1)
    assert torch.equal(_logits(model, prompt), before)
    assert not torch.allclose(_logits(twin, prompt), before), "the copy ran with the weights of the original"
    hf.disable(twin)
    assert not _runs_on_flashqsa(twin, prompt, watch)
    assert _runs_on_flashqsa(model, prompt, watch)


def test_pickle_of_an_enabled_model(make_model: Any, small_case: Any, prompt: torch.Tensor, watch: Any) -> None:
    model = make_model(small_case)
    twin = pickle.loads(pickle.dumps(hf.enable(model)))
    assert torch.equal(_logits(twin, prompt), _logits(model, prompt))
    assert _runs_on_flashqsa(twin, prompt, watch)


def test_save_pretrained_of_an_enabled_model(model: Any, prompt: torch.Tensor, tmp_path: Path, watch: Any) -> None:
    model.save_pretrained(tmp_path / "stock")
    with hf.enabled(model):
        model.save_pretrained(tmp_path / "enabled")
    stock, saved = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("stock", "enabled"))
    assert saved == stock
    again = type(model).from_pretrained(tmp_path / "enabled", experts_implementation="eager").eval()
    assert again.state_dict().keys() == model.state_dict().keys()
    assert not _runs_on_flashqsa(again, prompt, watch)
    assert torch.equal(_logits(again, prompt), _logits(model, prompt))


def test_disable_leaves_the_patches_of_others_alone(model: Any, prompt: torch.Tensor, watch: Any) -> None:
    attention = hf.patch.qsa_attentions(model)[0]

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return type(self).forward(self, *args, **kwargs)

    attention.forward = MethodType(theirs, attention)
    before = attention.forward
    hf.disable(model)
    assert attention.forward is before
    with hf.enabled(model):
        assert _runs_on_flashqsa(model, prompt, watch)
    assert attention.forward is before


class _Counting:
    """An accelerate hook that counts."""

    def __new__(cls) -> Any:
        hooks = pytest.importorskip("accelerate.hooks")

        class Counting(hooks.ModelHook):
            calls = 0

            def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                return args, kwargs

        return Counting()


def test_enable_works_inside_the_hooks_of_accelerate(model: Any, prompt: torch.Tensor, watch: Any) -> None:
    """`device_map` puts a hook on every module; it moves tensors to where the weights are."""
    hooks = pytest.importorskip("accelerate.hooks")
    attention, stock = hf.patch.qsa_attentions(model)[0], _logits(model, prompt)
    hook = _Counting()
    hooks.add_hook_to_module(attention, hook)
    before = _trace(model)
    hf.enable(model)
    assert _runs_on_flashqsa(model, prompt, watch)
    assert hook.calls == 1
    hf.disable(model)
    assert _trace(model) == before
    assert torch.equal(_logits(model, prompt), stock)
    assert hook.calls == 2
    hf.enable(model)
    hooks.remove_hook_from_module(attention)
    assert _runs_on_flashqsa(model, prompt, watch), "a hook that goes leaves the forward that it wrapped"
    hf.disable(model)
    assert not _runs_on_flashqsa(model, prompt, watch)


def test_disable_reaches_under_hooks_that_came_later(model: Any, prompt: torch.Tensor, watch: Any) -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    attention, hook = hf.patch.qsa_attentions(model)[0], _Counting()
    hf.enable(model)
    hooks.add_hook_to_module(attention, hook)
    assert _runs_on_flashqsa(model, prompt, watch)
    hf.disable(model)
    assert not _runs_on_flashqsa(model, prompt, watch)
    assert hook.calls == 2
    hooks.remove_hook_from_module(attention)
    assert not _runs_on_flashqsa(model, prompt, watch)


def test_a_stock_layer_under_an_enabled_config_says_what_to_do(model: Any, prompt: torch.Tensor, refuses: Any) -> None:
    twin = type(model)(model.config).eval()
    hf.enable(model)
    with refuses(UnsupportedError, "flashqsa", "Call enable on this model too"):
        _logits(twin, prompt)


def test_enable_again_after_the_implementation_was_changed(model: Any, prompt: torch.Tensor, watch: Any) -> None:
    hf.enable(model)
    model.set_attn_implementation("eager")
    hf.enable(model)
    assert _runs_on_flashqsa(model, prompt, watch)
    model.set_attn_implementation("eager")
    hf.disable(model)
    assert model.config._attn_implementation == "eager", "what the user chose last stays"


@pytest.mark.slow
def test_compile_keeps_the_rest_of_the_model_in_graphs(make_model: Any, qsa_case: Any, prompt: torch.Tensor) -> None:
    """The QSA layer is a gap between graphs: its loops and plans are not traced piece by piece."""
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        traced.extend(node.stack_trace or "" for node in graph.graph.nodes)
        return graph.forward

    model = hf.enable(make_model(qsa_case))
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=backend)(prompt).logits, model(prompt).logits)
    assert sum("modeling_qwen4_exp" in trace for trace in traced) > 50
    assert not any("flashqsa" in trace for trace in traced)


def test_enable_refuses_other_models(refuses: Any, make_model: Any, small_case: Any) -> None:
    with refuses(ArgumentError, "enable", "Qwen4ExpTextAttention", "Linear"):
        hf.enable(torch.nn.Linear(2, 2))
    no_qsa = make_model(small_case, layer_types=["linear_attention"] * 2)
    with refuses(ArgumentError, "enable", "Qwen4ExpForCausalLM without one"):
        hf.enable(no_qsa)


def test_enable_refuses_another_version_of_the_layer(model: Any, refuses: Any) -> None:
    attention = hf.patch.qsa_attentions(model)[0]
    projection = attention.indexer.index_qk_proj
    del attention.indexer.index_qk_proj
    before = _trace(model)
    with refuses(UnsupportedError, "enable", "indexer.index_qk_proj"):
        hf.enable(model)
    attention.indexer.index_qk_proj = projection
    attention.config.rope_parameters["rope_type"] = "dynamic"
    with pytest.raises(ConfigError, match="rope_type must be"):
        hf.enable(model)
    attention.config.rope_parameters["rope_type"] = "default"
    del attention.indexer.index_qk_proj
    assert _trace(model) == before, "a refused model must be as it was"


def test_enable_without_qwen4_exp_names_the_extra(monkeypatch: pytest.MonkeyPatch, refuses: Any, model: Any) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "transformers.models.qwen4_exp", None)
        hf.disable()  # nothing to undo, nothing to import
        for call in (hf.enable, partial(hf.enable, model)):
            with refuses(UnsupportedError, "flashqsa.integrations.hf", "5.16.1", "flashqsa[transformers]"):
                call()


def test_report_counts_rows_and_blocks_since_enable(model: Any, prompt: torch.Tensor, watch: Any) -> None:
    assert hf.report(model) == []
    mask = torch.ones_like(prompt)
    mask[0, :5] = 0
    with hf.enabled(model), torch.no_grad():
        out = model(prompt, attention_mask=mask)
        model(prompt[:, :1], attention_mask=torch.cat([mask, mask[:, :1] * 0 + 1], dim=1), cache=out.cache)
    r, topk = 4, 11
    seen = [(t + 1) // r for length in (TOKENS - 5 + 1, TOKENS + 1) for t in range(length)]
    (counted,) = hf.report(model)
    assert counted.layer_id == 1
    assert counted.rows == len(seen)
    assert counted.dense_rows == sum(blocks <= topk for blocks in seen)
    assert counted.blocks_visible == sum(seen)
    assert counted.blocks_selected == sum(min(blocks, topk) for blocks in seen)
    assert counted.share_selected == counted.blocks_selected / counted.blocks_visible
    hf.enable(model)
    assert hf.report(model) == [], "counting starts over"


def test_fault_55_index_weights_of_another_class_are_told(model: Any, prompt: torch.Tensor) -> None:
    """A layer that FlashQSA does not know would select nothing, and nobody would notice."""

    class Other(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.indexer = torch.nn.Module()
            self.indexer.index_qk_proj = torch.nn.Linear(2, 2)

    model.extra = Other()
    with pytest.warns(UserWarning, match=r"1 modules with others, extra.indexer the first"):
        hf.enable(model)
    _logits(model, prompt)
    (counted,) = hf.report(model)
    assert 0 < counted.blocks_selected < counted.blocks_visible
    assert counted.rows == 2 * TOKENS
