"""What is pooled follows its cache, and is given up where the raw keys are no longer those that it came from."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flashqsa.integrations import hf
from flashqsa.integrations.hf import following, pooled

cache_utils = pytest.importorskip("transformers.cache_utils")

R, PROMPT, PADS = 4, 130, (0, 3, 9)


@pytest.fixture
def model(make_model: Any, qsa_case: Any) -> Any:
    return make_model(qsa_case)


@pytest.fixture
def mask() -> torch.Tensor:
    return (torch.arange(PROMPT)[None] >= torch.tensor(PADS)[:, None]).long()


@pytest.fixture
def blocks_pooled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of blocks, by call."""
    counts: list[int] = []
    mean_of_blocks = pooled.mean_of_blocks

    def counting(raw_keys: torch.Tensor) -> torch.Tensor:
        counts.append(raw_keys.shape[0])
        return mean_of_blocks(raw_keys)

    monkeypatch.setattr(pooled, "mean_of_blocks", counting)
    return counts


def _trace() -> dict[str, dict[str, int]]:
    classes = (cache_utils.DynamicIndexedLayer, cache_utils.StaticIndexedLayer)
    return {c.__name__: {key: id(value) for key, value in vars(c).items() if key[:2] != "__"} for c in classes}


@pytest.fixture(autouse=True)
def cache_classes_are_left_alone() -> Iterator[None]:
    gc.collect()  # models of other tests that nobody disabled
    for user in following.users():
        following.unfollow_caches(user)
    before = _trace()
    yield
    for user in following.users():
        hf.disable(user)
    assert _trace() == before


def _cache(model: Any, static: bool) -> Any:
    if static:
        return cache_utils.StaticCache(model.config, max_cache_len=PROMPT + 40)
    return cache_utils.DynamicCache(config=model.config)


Change = Callable[[Any, torch.Tensor], torch.Tensor]


def _reorder(cache: Any, rows: torch.Tensor) -> torch.Tensor:
    cache.reorder_cache(torch.tensor([2, 0, 2]))
    return rows[[2, 0, 2]]


def _reorder_by_name(cache: Any, rows: torch.Tensor) -> torch.Tensor:
    cache.reorder_cache(beam_idx=torch.tensor([1, 1, 0]))
    return rows[[1, 1, 0]]


def _select(cache: Any, rows: torch.Tensor) -> torch.Tensor:
    cache.batch_select_indices(torch.tensor([2, 1]))
    return rows[[2, 1]]


def _select_by_mask(cache: Any, rows: torch.Tensor) -> torch.Tensor:
    cache.batch_select_indices(torch.tensor([True, False, True]))
    return rows[[0, 2]]


def _repeat(cache: Any, rows: torch.Tensor) -> torch.Tensor:
    cache.batch_repeat_interleave(2)
    return rows.repeat_interleave(2, dim=0)


def _offload(cache: Any, rows: torch.Tensor) -> torch.Tensor:
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    return rows


def _remove(cache: Any, tokens: int) -> None:
    cache.crop(-tokens)
    if isinstance(cache, cache_utils.StaticCache):  # it leaves its positions to the caller
        cache.layers[0].indexer_position_ids = cache.layers[0].indexer_position_ids[..., :-tokens]


def _crop(cache: Any, rows: torch.Tensor) -> torch.Tensor:
    _remove(cache, 10)
    return rows[:, :-10]


def _crop_and_reorder(cache: Any, rows: torch.Tensor) -> torch.Tensor:
    return _reorder(cache, _crop(cache, rows))


def _twice(cache: Any, rows: torch.Tensor) -> torch.Tensor:
    return _reorder(cache, _reorder(cache, rows))


DYNAMIC: list[Change] = [
    _reorder, _reorder_by_name, _select, _select_by_mask, _repeat, _offload, _crop, _crop_and_reorder, _twice,
]  # fmt: skip
STATIC: list[Change] = [_reorder, _reorder_by_name, _crop, _crop_and_reorder]
CHANGES = [(change, False) for change in DYNAMIC] + [(change, True) for change in STATIC]


@torch.no_grad()
@pytest.mark.usefixtures("cache_keeps_positions")
@pytest.mark.parametrize(("change", "static"), CHANGES, ids=lambda x: getattr(x, "__name__", str(x)).strip("_"))
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_changed_cache_is_followed(
    model: Any, make_tokens: Any, mask: torch.Tensor, blocks_pooled: list[int], change: Change, static: bool, mode: Any
) -> None:
    """Only blocks that close are pooled, and what is said equals what is said from raw keys alone."""
    prompt, after, layers = make_tokens(3, PROMPT), make_tokens(6, 9, seed=1), 2

    def run(*, forget: bool) -> torch.Tensor:
        cache = _cache(model, static)
        model(prompt, attention_mask=mask, cache=cache, logits_to_keep=1)
        seen = change(cache, mask)
        logits = []
        for column in range(9):
            if forget:
                for layer in cache.layers:
                    vars(layer).pop(pooled.ATTRIBUTE, None)
            seen = torch.cat([seen, torch.ones_like(seen[:, :1])], dim=1)
            blocks_pooled.clear()
            logits.append(model(after[: len(seen), column : column + 1], attention_mask=seen, cache=cache).logits)
            if not forget:
                closed = int((seen.sum(dim=1) % R == 0).sum())
                assert sum(blocks_pooled) == layers * closed, f"step {column}"
        return torch.cat(logits, dim=1)

    with mode(), hf.enabled(model):
        assert torch.equal(run(forget=False), run(forget=True))


@torch.no_grad()
def test_beams_pool_each_block_once(model: Any, make_tokens: Any, mask: torch.Tensor, blocks_pooled: list[int]) -> None:
    """Every step of a beam search reorders the cache."""
    beams, new, layers = 3, 12, 2
    with hf.enabled(model):
        model.generate(
            make_tokens(3, PROMPT), attention_mask=mask, num_beams=beams, do_sample=False, max_new_tokens=new,
            min_new_tokens=new,
        )  # fmt: skip
    lengths = [PROMPT - pad + new - 1 for pad in PADS]
    assert sum(blocks_pooled) == layers * beams * sum(length // R for length in lengths)


@pytest.mark.usefixtures("cache_keeps_positions")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("watched", [False, True], ids=["disabled", "by another model"])
def test_fault_23_tokens_that_stock_rewrote_are_never_stale(
    model: Any, make_model: Any, qsa_case: Any, make_tokens: Any, watch: Any, mode: Any, static: bool, watched: bool
) -> None:
    """Cropped and filled up to the same length with other tokens, behind the back of the enabled model."""
    prompt, other, removed = make_tokens(2, PROMPT), make_tokens(2, 20, seed=1), 20
    twin = make_model(qsa_case) if watched else model
    token = prompt[:, :1]

    def run(*, enable: bool) -> torch.Tensor:
        cache = _cache(model, static)
        if enable:
            hf.enable(model)
        model(prompt, cache=cache)
        if enable and not watched:
            hf.disable(model)
        _remove(cache, removed)
        twin(other, cache=cache)
        if enable:
            hf.enable(model)
        logits = model(token, cache=cache).logits
        hf.disable(model)
        return logits

    with mode():
        expected = run(enable=False)
        assert torch.allclose(run(enable=True), expected, atol=1e-4)
        with hf.enabled(model):
            stale = model(token, cache=model(prompt, use_cache=True).cache).logits
    assert not torch.allclose(stale, expected, atol=1e-2), "the other tokens must matter"


@torch.no_grad()
@pytest.mark.usefixtures("cache_keeps_positions")
def test_fault_22_a_cache_used_again_for_another_text(model: Any, make_tokens: Any, blocks_pooled: list[int]) -> None:
    first, second = make_tokens(2, PROMPT), make_tokens(2, PROMPT, seed=1)
    with hf.enabled(model):
        expected = model(second, use_cache=True).logits
        for static in (False, True):
            cache = _cache(model, static)
            model(first, cache=cache)
            cache.reset()
            assert not any(pooled.ATTRIBUTE in vars(layer) for layer in cache.layers)
            blocks_pooled.clear()
            assert torch.equal(model(second, cache=cache).logits, expected)
            assert sum(blocks_pooled) == 2 * 2 * (PROMPT // R)


@torch.no_grad()
@pytest.mark.parametrize("filler", [torch.nan, torch.inf, 1e30])
def test_fault_29_rows_past_the_visible_ones_are_never_read(model: Any, make_tokens: Any, filler: float) -> None:
    prompt = make_tokens(2, PROMPT)
    with hf.enabled(model):
        caches = [model(prompt, use_cache=True).cache for _ in range(2)]
        for layer in caches[1].layers:
            layer.flashqsa_pooled.keys[:, PROMPT // R :] = filler
        for column in range(9):
            token = prompt[:, column : column + 1]
            one, other = (model(token, cache=cache).logits for cache in caches)
            assert torch.equal(one, other)


def test_a_cache_of_inference_mode_goes_on_outside_it(model: Any, make_tokens: Any) -> None:
    """Also where a block closes, whose key is written beside those of inference mode."""
    prompt = make_tokens(2, PROMPT)
    with hf.enabled(model):
        logits = []
        for modes in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
            with modes[0]():
                cache = model(prompt, use_cache=True).cache
            with modes[1]():
                logits.append(torch.cat([model(prompt[:, i : i + 1], cache=cache).logits for i in range(6)]))
    assert torch.equal(*logits)


@torch.no_grad()
def test_cache_classes_are_theirs_again_when_nobody_uses_them(
    model: Any, make_model: Any, qsa_case: Any, make_tokens: Any
) -> None:
    before, prompt = _trace(), make_tokens(1, 40)
    other = make_model(qsa_case)
    hf.enable(model)
    assert _trace() == before, "a cache must be used first"
    hf.enable(other)
    for each in (model, other):
        each(prompt, use_cache=True)
    assert _trace() != before
    hf.disable(model)
    assert _trace() != before
    hf.disable(other)
    assert _trace() == before
    with hf.enabled():
        model(prompt, use_cache=True)
        with hf.enabled(other):
            other(prompt, use_cache=True)
        assert _trace() != before
    assert _trace() == before
    twin = copy.deepcopy(hf.enable(model))
    hf.disable(model)
    twin(prompt, use_cache=True)
    assert _trace() != before
    hf.disable(twin)
    assert _trace() == before
    hf.enable(model)
    model(prompt, use_cache=True)
    assert _trace() != before
    attentions = hf.patch.qsa_attentions(model)
    for block in model.model.layers:
        block.self_attn = None  # a model that is forgotten rather than disabled
    attentions.clear()
    gc.collect()
    assert _trace() == before


@torch.no_grad()
def test_a_failing_call_leaves_nothing_stale(model: Any, make_tokens: Any) -> None:
    prompt = make_tokens(3, PROMPT)
    with hf.enabled(model):
        cache = model(prompt, use_cache=True).cache
        with pytest.raises(IndexError):
            cache.reorder_cache(torch.tensor([0, 7, 1]))
        assert pooled.ATTRIBUTE not in vars(cache.layers[0])
