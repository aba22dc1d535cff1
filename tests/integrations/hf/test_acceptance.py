"""Which transformers is served: the known arguments, the same numbers, and the caller left as they are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flashqsa.errors import UnsupportedError
from flashqsa.integrations import hf
from flashqsa.integrations.hf import acceptance

modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")

ATTENTION, ROTARY = modeling.Qwen4ExpTextAttention, modeling.Qwen4ExpTextRotaryEmbedding


@pytest.fixture(autouse=True)
def not_accepted_yet(monkeypatch: pytest.MonkeyPatch, watch: Any) -> Iterator[None]:
    monkeypatch.setattr(acceptance, "_accepted", set())
    yield
    hf.disable()


def _named_cache(self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any, state: Any) -> None:
    """The cache under a third name."""


def _reordered(self: Any, position_embeddings: Any, hidden_states: Any, attention_mask: Any, cache: Any) -> None:
    """The same names in another order."""


def _needs_more(self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any, cache: Any, spans: Any):
    """An argument without a default that nobody here passes."""


def _fewer(self: Any, hidden_states: Any) -> None:
    """Arguments that are gone."""


@pytest.mark.parametrize("forward", [_named_cache, _reordered, _needs_more, _fewer])
def test_other_arguments_are_named(monkeypatch: pytest.MonkeyPatch, refuses: Any, forward: Callable[..., Any]) -> None:
    monkeypatch.setattr(ATTENTION, "forward", forward)
    names = ", ".join(list(forward.__annotations__)[1 : forward.__code__.co_argcount])
    with refuses(UnsupportedError, "enable", "Qwen4ExpTextAttention.forward", "cache or past_key_values", names):
        hf.enable()
    assert vars(ATTENTION)["forward"] is forward


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_both_names_of_the_cache_and_more_that_has_defaults(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    theirs = ATTENTION.forward
    names: dict[str, Any] = {"theirs": theirs}
    exec(
        f"def forward(self, hidden_states, position_embeddings, attention_mask, {name}=None, more=1, **kwargs):\n"
        f"    return theirs(self, hidden_states, position_embeddings, attention_mask, {name}, **kwargs)",
        names,
    )
    monkeypatch.setattr(ATTENTION, "forward", names["forward"])
    with hf.enabled():
        assert hasattr(ATTENTION.forward, hf.replacing.OF_CLASS), "it serves"
    assert ATTENTION.forward is names["forward"]


def test_a_missing_class_is_named(monkeypatch: pytest.MonkeyPatch, refuses: Any) -> None:
    monkeypatch.delattr(modeling, "Qwen4ExpTextRotaryEmbedding")
    with refuses(UnsupportedError, "enable", "must have Qwen4ExpTextRotaryEmbedding"):
        hf.enable()


def _larger(self: Any, hidden_states: Any, position_embeddings: Any, attention_mask: Any, cache: Any = None) -> Any:
    return 1.001 * _THEIRS(self, hidden_states, position_embeddings, attention_mask, cache)[0], None


_THEIRS = ATTENTION.forward


def test_another_formula_is_refused(monkeypatch: pytest.MonkeyPatch, refuses: Any) -> None:
    """A rotation the other way round, one block fewer, an output one thousandth larger."""
    rotate_half, indexer = modeling.rotate_half, modeling.Qwen4ExpTextQSAIndexer.__init__

    def smaller_budget(self: Any, config: Any, layer_idx: int) -> None:
        indexer(self, config, layer_idx)
        self.block_topk -= 1

    for owner, name, value in (
        (modeling, "rotate_half", lambda x: -rotate_half(x)),
        (modeling.Qwen4ExpTextQSAIndexer, "__init__", smaller_budget),
        (ATTENTION, "forward", _larger),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            with refuses(UnsupportedError, "enable", "must compute what FlashQSA computes", "transformers 5."):
                hf.enable()
    with hf.enabled():
        pass


def test_a_layer_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, refuses: Any) -> None:
    monkeypatch.delattr(modeling.Qwen4ExpTextQSAIndexer, "forward")
    monkeypatch.setattr(modeling.Qwen4ExpTextQSAIndexer, "forward", None, raising=False)
    with refuses(UnsupportedError, "enable", "must run a tiny layer", "TypeError"):
        hf.enable()


def test_the_check_runs_once(monkeypatch: pytest.MonkeyPatch, make_model: Any, qsa_case: Any) -> None:
    calls: list[Any] = []
    difference = acceptance._difference
    monkeypatch.setattr(acceptance, "_difference", lambda *args: calls.append(args) or difference(*args))
    with hf.enabled(), hf.enabled(make_model(qsa_case)):
        assert len(calls) == 1


@pytest.mark.parametrize("around", ["float64", "bfloat16", "meta", "inference", "autocast", "accelerate"])
def test_the_caller_is_left_as_they_are(around: str) -> None:
    """Seeds, default dtype and device, modes: neither used nor changed."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    try:
        if around == "meta":
            with torch.device("meta"), hf.enabled():
                assert torch.empty(1).device.type == "meta"
        elif around == "inference":
            with torch.inference_mode(), hf.enabled():
                assert torch.is_inference_mode_enabled()
        elif around == "autocast":
            with torch.autocast("cpu", torch.bfloat16), hf.enabled():
                assert torch.is_autocast_enabled("cpu")
        elif around == "accelerate":
            init_empty_weights = pytest.importorskip("accelerate").init_empty_weights
            with init_empty_weights(), hf.enabled():
                assert torch.nn.Linear(2, 2).weight.device.type == "meta"
        else:
            torch.set_default_dtype(getattr(torch, around))
            with hf.enabled():
                assert torch.get_default_dtype() == getattr(torch, around)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    assert modeling in acceptance._accepted


def test_the_check_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import cache_utils

    def trace() -> dict[str, Any]:
        classes = (ATTENTION, ROTARY, cache_utils.DynamicIndexedLayer)
        return {c.__name__: {k: id(v) for k, v in vars(c).items() if not k.startswith("__")} for c in classes}

    before = trace()
    acceptance.accept(modeling)
    assert trace() == before
    assert modeling in acceptance._accepted


def test_a_fresh_process_enables_under_warnings_as_errors() -> None:
    code = "from flashqsa.integrations import hf; hf.enable(); hf.disable(); print('enabled')"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.stdout.strip() == "enabled", run.stderr
