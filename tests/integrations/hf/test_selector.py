"""A caller's budget and a caller's selector, in place of the model's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashqsa
from flashqsa.errors import ArgumentError, DeviceError, DTypeError, SelectionError, ShapeError
from flashqsa.integrations import hf
from flashqsa.integrations.hf import SelectorContext
from flashqsa.testing import assert_within_budget

modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")

R, TOPK = 4, 9  # of the case with QSA layers alone
TOKENS = 130


@pytest.fixture
def model(make_model: Any, qsa_case: Any) -> Any:
    return make_model(qsa_case)


@pytest.fixture
def prompt(make_tokens: Any) -> torch.Tensor:
    return make_tokens(2, TOKENS)


@pytest.fixture
def mask(prompt: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    mask[1, :6] = 0
    return mask


@torch.no_grad()
@pytest.mark.parametrize("budget", [4, 20, 36, 100, 4096])
@pytest.mark.parametrize("by_class", [False, True])
def test_a_budget_is_that_of_a_model_made_for_it(
    make_model: Any, model: Any, qsa_case: Any, prompt: torch.Tensor, mask: torch.Tensor, watch: Any, budget: int,
    by_class: bool, assert_same_sets: Any, exactly: Any,
) -> None:  # fmt: skip
    other = make_model(qsa_case, indexer_budget=budget)
    with watch() as stock:
        expected = other(prompt, attention_mask=mask).logits
    with hf.enabled(None if by_class else model, budget_tokens=budget), watch() as ours:
        logits = model(prompt, attention_mask=mask).logits
    assert assert_same_sets(ours, stock, mask.bool()) <= 2
    real = mask.bool()
    with exactly(other) as exact:
        assert_within_budget(logits[real], expected[real], exact(prompt, attention_mask=mask).logits[real])
    assert model.config.indexer_budget == R * TOPK


@torch.no_grad()
def test_the_last_call_decides_and_the_block_before_comes_back(model: Any, prompt: torch.Tensor) -> None:
    def selected() -> int:
        model(prompt)
        selected = max(layer.blocks_selected for layer in hf.report(model))
        hf.enable(hf.disable(model), **now)
        return selected

    counts = {}
    for budget in (None, 8, 16):
        now = {"budget_tokens": budget}
        hf.enable(model, **now)
        counts[budget] = selected()
    assert counts[8] < counts[16] < counts[None]
    hf.enable(model, budget_tokens=8)
    with hf.enabled(model, budget_tokens=16):
        now = {"budget_tokens": 16}
        assert selected() == counts[16]
        with hf.enabled(model):
            now = {}
            assert selected() == counts[None]
        now = {"budget_tokens": 16}
        assert selected() == counts[16]
    now = {"budget_tokens": 8}
    assert selected() == counts[8]
    with hf.enabled(budget_tokens=16):
        assert selected() == counts[8], "a model's own settings go before those of its class"
    now = {}
    hf.enable(model)
    assert selected() == counts[None]


def test_budgets_and_selectors_that_are_refused(model: Any, prompt: torch.Tensor, refuses: Any) -> None:
    before = model.config._attn_implementation
    for wrong in (0, -4, 4.0, True, "4"):
        with refuses(ArgumentError, "enable", "budget_tokens", repr(wrong)):
            hf.enable(model, budget_tokens=wrong)
        with refuses(ArgumentError, "enable", "budget_tokens", repr(wrong)):
            hf.enable(budget_tokens=wrong)
    with refuses(ArgumentError, "enable", "budget_tokens", "6"):
        hf.enable(model, budget_tokens=6)
    with refuses(ArgumentError, "enable", "selector", "int"):
        hf.enable(model, selector=3)
    with pytest.raises(ArgumentError, match="enable: capture_steps must be True or False, got 'yes'"):
        hf.enable(model, capture_steps="yes")
    assert model.config._attn_implementation == before, "a refused call changes nothing"
    with hf.enabled(budget_tokens=6), refuses(ArgumentError, "enable", "budget_tokens", "6"):
        model(prompt)


def _own(context: SelectorContext) -> Any:
    return context.selection


def _own_ids(context: SelectorContext) -> Any:
    return context.selection.block_ids.long()


def _by_scores(context: SelectorContext) -> Any:
    """The model's selection once more, from its scores, a few rows at a time."""
    ids = torch.full((context.plan.num_rows, TOPK), -1)
    for first in range(0, context.plan.num_rows, 13):
        scores = context.block_scores(first, min(first + 13, context.plan.num_rows))
        for row, visible in enumerate(context.plan.visible_blocks[first : first + 13].tolist()):
            best = scores[row, :visible].sort(descending=True, stable=True).indices[:TOPK].sort().values
            assert bool((scores[row, visible:] == -torch.inf).all())
            ids[first + row, : len(best)] = best
    return ids


@torch.no_grad()
@pytest.mark.parametrize("selector", [_own, _own_ids, _by_scores])
def test_the_models_own_choice_through_a_selector_is_bit_equal(
    model: Any, prompt: torch.Tensor, mask: torch.Tensor, selector: Any
) -> None:
    def run() -> torch.Tensor:
        out = model(prompt, attention_mask=mask, use_cache=True)
        logits, seen = [out.logits], mask
        for token in prompt[:, :6].split(1, dim=1):
            seen = torch.cat([seen, torch.ones_like(token)], dim=1)
            out = model(token, attention_mask=seen, cache=out.cache)
            logits.append(out.logits)
        return torch.cat(logits, dim=1)

    with hf.enabled(model):
        expected = run()
    with hf.enabled(model, selector=selector):
        assert torch.equal(run(), expected)
    with hf.enabled(selector=selector):
        assert torch.equal(run(), expected)


def _latest(context: SelectorContext) -> torch.Tensor:
    """The last blocks that a row sees, one fewer than the model's budget."""
    visible = context.plan.visible_blocks.long()[:, None]
    ids = (visible - (TOPK - 1)).clamp(min=0) + torch.arange(TOPK - 1)
    return torch.where(ids < visible, ids, -1)


@torch.no_grad()
def test_a_selector_decides_what_is_attended(
    model: Any, prompt: torch.Tensor, mask: torch.Tensor, monkeypatch: pytest.MonkeyPatch, exactly: Any
) -> None:
    """transformers, made to select the same, says the same."""

    def latest(self: Any, hidden: torch.Tensor, embeddings: Any, mask: torch.Tensor, *_: Any, **__: Any) -> Any:
        visible = mask if mask.dtype == torch.bool else mask == 0
        before = visible.long().cumsum(dim=-1) - 1  # visible tokens before each column
        blocks = visible.sum(dim=-1, keepdim=True) // R
        return visible & (before // R >= blocks - (TOPK - 1))

    with hf.enabled(model, selector=_latest):
        logits = model(prompt, attention_mask=mask).logits
    assert all(layer.blocks_selected < layer.blocks_visible for layer in hf.report(model))
    own = model(prompt, attention_mask=mask).logits
    monkeypatch.setattr(modeling.Qwen4ExpTextQSAIndexer, "forward", latest)
    expected = model(prompt, attention_mask=mask).logits
    real = mask.bool()
    with exactly(model) as exact:
        assert_within_budget(logits[real], expected[real], exact(prompt, attention_mask=mask).logits[real])
    assert not torch.allclose(own[real], expected[real], atol=1e-2), "the selection must matter"


def _mass(context: SelectorContext, row: int, position: int, keys: torch.Tensor) -> torch.Tensor:
    """Attention mass [visible blocks] that dense attention would give each block, summed over heads."""
    q = context.q[row].unflatten(0, (keys.shape[1], -1))  # [Hkv, G, D]
    logits = torch.einsum("hgd,nhd->hgn", q, keys[: position + 1]) * context.softmax_scale
    weights = logits.softmax(dim=-1).sum(dim=(0, 1))
    visible = int(context.plan.visible_blocks[row])
    return weights[: visible * R].view(visible, R).sum(dim=1)


def _dense_top_k(context: SelectorContext) -> torch.Tensor:
    """The blocks that dense attention would give the most weight."""
    ids = torch.full((context.plan.num_rows, TOPK), -1, dtype=torch.int32)
    for group in context.plan.row_groups():
        keys = context.keys(group.request_id)
        assert keys.shape[0] == context.values(group.request_id).shape[0] == group.end_position
        for row in range(group.first_row, group.end_row):
            mass = _mass(context, row, group.first_position + row - group.first_row, keys)
            best = mass.topk(min(TOPK, mass.shape[0])).indices.sort().values
            ids[row, : best.shape[0]] = best
    return ids


@torch.no_grad()
def test_an_oracle_of_dense_attention(model: Any, prompt: torch.Tensor, mask: torch.Tensor) -> None:
    """It sees what it needs: no selection of as many blocks holds more attention mass, also beside padding."""
    held: dict[str, list[float]] = {"oracle": [], "model": []}

    def oracle(context: SelectorContext) -> torch.Tensor:
        chosen = _dense_top_k(context)
        for group in context.plan.row_groups():
            keys = context.keys(group.request_id)
            for row in range(group.first_row, group.end_row):
                mass = _mass(context, row, group.first_position + row - group.first_row, keys)
                for name, ids in (("oracle", chosen[row]), ("model", context.selection.block_ids[row])):
                    held[name].append(float(mass[ids[ids >= 0].long()].sum()))
        return chosen

    with hf.enabled(model, selector=oracle):
        out = model(prompt, attention_mask=mask, use_cache=True)
        said = model(prompt[:, :1], attention_mask=torch.cat([mask, mask[:, -1:]], dim=1), cache=out.cache)
    assert bool(said.logits.isfinite().all())
    rows = len(hf.patch.qsa_attentions(model)) * (2 * TOKENS - 6 + 2)
    assert len(held["oracle"]) == rows
    assert all(best >= own - 1e-5 for best, own in zip(held["oracle"], held["model"], strict=True))
    assert sum(held["oracle"]) > 1.05 * sum(held["model"]), "the oracle must have something to gain"


@torch.no_grad()
def test_an_oracle_that_may_take_everything_is_dense_attention(model: Any, prompt: torch.Tensor) -> None:
    with hf.enabled(model, budget_tokens=R * TOKENS):
        expected = model(prompt).logits

    def everything(context: SelectorContext) -> torch.Tensor:
        ids = torch.arange(int(context.plan.visible_blocks.max()))[None]
        return torch.where(ids < context.plan.visible_blocks[:, None], ids, -1)

    with hf.enabled(model, selector=everything):
        assert torch.allclose(model(prompt).logits, expected, atol=1e-5)


@torch.no_grad()
def test_no_block_at_all_leaves_the_tail(model: Any, prompt: torch.Tensor) -> None:
    def nothing(context: SelectorContext) -> torch.Tensor:
        return torch.empty(context.plan.num_rows, 0, dtype=torch.int32)

    with hf.enabled(model, selector=nothing):
        assert bool(model(prompt).logits.isfinite().all())
    assert all(layer.blocks_selected == 0 for layer in hf.report(model))


Spoil = Callable[[torch.Tensor, SelectorContext], Any]


def _set(row: int, column: int, value: int) -> Spoil:
    def spoil(ids: torch.Tensor, context: SelectorContext) -> torch.Tensor:
        ids[row, column] = value
        return ids

    return spoil


WRONG: dict[str, tuple[type[Exception], Spoil, str]] = {
    "not visible": (SelectionError, _set(20, 4, 5), "row 20"),
    "twice": (SelectionError, _set(60, 3, 2), "ascending"),
    "falling": (SelectionError, _set(129, 8, 0), "row 129"),
    "gap": (SelectionError, _set(50, 3, -1), "only behind"),
    "negative": (SelectionError, _set(0, 0, -2), "at least -1"),
    "rows": (ShapeError, lambda ids, _: ids[:-1], "[259, 9]"),
    "axes": (ShapeError, lambda ids, _: ids[0], "[9]"),
    "floats": (DTypeError, lambda ids, _: ids.float(), "float32"),
    "bools": (DTypeError, lambda ids, _: ids >= 0, "bool"),
    "nothing": (DTypeError, lambda *_: None, "NoneType"),
    "a list": (DTypeError, lambda ids, _: ids.tolist(), "list"),
    "elsewhere": (DeviceError, lambda ids, _: ids.to("meta"), "meta"),
    "another layer": (SelectionError, lambda _, c: dataclasses.replace(c.selection, layer_id=7), "layer 7"),
    "later": (
        SelectionError,
        lambda _, c: dataclasses.replace(c.selection, visible_blocks=c.plan.visible_blocks + 1),
        "visible_blocks",
    ),
    "counts": (
        SelectionError,
        lambda _, c: dataclasses.replace(c.selection, block_counts=c.plan.visible_blocks + 1),
        "block_counts",
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", WRONG)
def test_wrong_ids_are_refused_before_anything_is_attended(
    model: Any, prompt: torch.Tensor, refuses: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    error, spoil, part = WRONG[name]

    def attend(*_: Any, **__: Any) -> None:
        raise AssertionError("attended")

    def selector(context: SelectorContext) -> Any:
        everything = torch.arange(TOPK, dtype=torch.int32)[None].repeat(context.plan.num_rows, 1)
        return spoil(torch.where(everything < context.plan.visible_blocks[:, None], everything, -1), context)

    monkeypatch.setattr(hf.forward, "attend", attend)
    with hf.enabled(model, selector=selector), refuses(error, "selector", part):
        model(prompt)


@torch.no_grad()
def test_what_a_selector_says_of_padding_is_ignored(model: Any, prompt: torch.Tensor, mask: torch.Tensor) -> None:
    def with_leftovers(context: SelectorContext) -> torch.Tensor:
        return torch.where(context.plan.request_ids[:, None] >= 0, context.selection.block_ids, 1_000_000)

    with hf.enabled(model):
        expected = model(prompt, attention_mask=mask).logits
    with hf.enabled(model, selector=with_leftovers):
        assert torch.equal(model(prompt, attention_mask=mask).logits, expected)


def test_layers_and_forwards_are_told_apart(model: Any, prompt: torch.Tensor, refuses: Any) -> None:
    """Also where gradient checkpointing runs the layers a second time."""
    seen: list[tuple[int, int]] = []

    def selector(context: SelectorContext) -> Any:
        seen.append((context.forward_id, context.layer_id))
        assert not torch.is_grad_enabled()
        assert not context.q.requires_grad
        with refuses(ArgumentError, "SelectorContext", "request_id", "99"):
            context.keys(99)
        return context.selection

    model.train()
    model.activation_checkpointing_enable()
    with hf.enabled(model, selector=selector):
        for _ in range(2):
            model(prompt[:1], labels=prompt[:1], use_cache=False).loss.backward()
    (first, second) = sorted({forward for forward, _ in seen})
    assert seen == [(f, layer) for f in (first, second) for layer in (0, 1, 1, 0)]


@torch.no_grad()
def test_a_budget_far_beyond_the_context_attends_everything(make_model: Any, small_case: Any, make_tokens: Any) -> None:
    """Ids take memory for the context, not for the budget."""
    model, prompt = make_model(small_case), make_tokens(2, 130)
    with hf.enabled(model, budget_tokens=132):
        expected = model(prompt).logits
    with hf.enabled(model, budget_tokens=4 * 10**12), flashqsa.record(model) as recording:
        logits = model(prompt).logits
    assert torch.equal(logits, expected)
    (layer,) = recording.steps[0].layers.values()
    assert layer.block_ids.shape[1] == 130 // 4
    assert torch.equal(layer.block_counts, layer.visible_blocks)
