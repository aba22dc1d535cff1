"""One cache, whoever used it before: switching sides, cropping, reordering, forking, and what comes after."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.integrations import hf
from flashqsa.testing import assert_within_budget, stream

PROMPT, MORE = 150, 24


def _decode(model: Any, cache: Any, token: torch.Tensor, steps: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Tokens [B, steps], greedy, from the last known one."""
    tokens = [token]
    for _ in range(steps):
        if mask is not None:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        out = model(tokens[-1], cache=cache, attention_mask=mask)
        tokens.append(out.logits[:, -1:].argmax(dim=-1))
    return torch.cat(tokens[1:], dim=1)


def _start(model: Any, prompt: torch.Tensor, mask: torch.Tensor | None = None) -> tuple[Any, torch.Tensor]:
    out = model(prompt, attention_mask=mask, use_cache=True)
    return out.cache, out.logits[:, -1:].argmax(dim=-1)


@torch.no_grad()
@pytest.mark.parametrize("sides", ["fs", "sf", "fsf", "sfsf"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_switching_sides_in_mid_conversation(
    make_model: Any,
    small_case: Any,
    make_tokens: Any,
    watch: Any,
    join: Any,
    assert_same_sets: Any,
    sides: str,
    static: bool,
) -> None:
    """One cache goes from FlashQSA to stock and back; nobody notices."""
    from transformers import StaticCache

    model, prompt = make_model(small_case), make_tokens(2, PROMPT)
    mask = torch.ones_like(prompt)
    mask[1, :6] = 0

    def converse(sides: str) -> tuple[torch.Tensor, list[Any]]:
        cache = StaticCache(model.config, max_cache_len=PROMPT + MORE * len(sides)) if static else None
        seen, said = mask, prompt
        token = prompt
        with watch() as selected:
            for side in sides:
                (hf.enable if side == "f" else hf.disable)(model)
                for _ in range(MORE):
                    out = model(token, cache=cache, attention_mask=seen, use_cache=True)
                    cache, token = out.cache, out.logits[:, -1:].argmax(dim=-1)
                    said = torch.cat([said, token], dim=1)
                    seen = torch.cat([seen, torch.ones_like(token)], dim=1)
        hf.disable(model)
        return said, selected

    expected, stock = converse("s" * len(sides))
    said, ours = converse(sides)
    assert torch.equal(said, expected)
    assert_same_sets(ours, stock, mask.bool())


@torch.no_grad()
def test_enabling_again_in_mid_generation(make_model: Any, small_case: Any, make_tokens: Any, watch: Any) -> None:
    model, prompt = make_model(small_case), make_tokens(1, PROMPT)
    cache, token = _start(model, prompt)
    expected = _decode(model, cache, token, 2 * MORE)
    hf.enable(model)
    cache, token = _start(model, prompt)
    said = _decode(model, cache, token, MORE)
    hf.enable(model)
    said = torch.cat([said, _decode(model, cache, said[:, -1:], MORE)], dim=1)
    assert torch.equal(said, expected)


Change = Callable[[Any, torch.Tensor], torch.Tensor]


def _crop(count: int) -> Change:
    def change(cache: Any, prompt: torch.Tensor) -> torch.Tensor:
        cache.crop(-count)
        return prompt[:, :-count]

    change.__name__ = f"crop_{count}"
    return change


def _reorder(cache: Any, prompt: torch.Tensor) -> torch.Tensor:
    order = torch.tensor([2, 0, 2])
    cache.reorder_cache(order)
    return prompt[order]


def _select(cache: Any, prompt: torch.Tensor) -> torch.Tensor:
    cache.batch_select_indices(torch.tensor([2, 1]))
    return prompt[[2, 1]]


def _repeat(cache: Any, prompt: torch.Tensor) -> torch.Tensor:
    cache.batch_repeat_interleave(2)
    return prompt.repeat_interleave(2, dim=0)


def _reset(cache: Any, prompt: torch.Tensor) -> torch.Tensor:
    cache.reset()
    return prompt[:, :0]


def _offload(cache: Any, prompt: torch.Tensor) -> torch.Tensor:
    for layer in cache.layers:
        layer.offload()
        layer.prefetch()
    return prompt


CHANGES: list[Change] = [
    _crop(1),
    _crop(2),
    _crop(3),
    _crop(4),
    _crop(77),
    _reorder,
    _select,
    _repeat,
    _reset,
    _offload,
]


@torch.no_grad()
@pytest.mark.usefixtures("cache_keeps_positions")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
@pytest.mark.parametrize("decoded", [0, 5])
def test_what_follows_a_changed_cache_equals_a_fresh_start(
    make_model: Any,
    qsa_case: Any,
    make_tokens: Any,
    watch: Any,
    join: Any,
    assert_same_sets: Any,
    exactly: Any,
    change: Change,
    decoded: int,
) -> None:
    """Every call that transformers makes on a cache, on the layers that hold raw index keys."""
    model = hf.enable(make_model(qsa_case))
    prompt, after = make_tokens(3, 130), make_tokens(6, 40, seed=1)
    out = model(prompt[:, : 130 - decoded], use_cache=True)
    for token in range(130 - decoded, 130):
        out = model(prompt[:, token : token + 1], cache=out.cache)
    kept = change(out.cache, prompt)
    after = after[: kept.shape[0]]
    with watch() as continued:
        logits = []
        for rows in (after[:, :30], *after[:, 30:].split(1, dim=1)):
            logits.append(model(rows, cache=out.cache).logits)
    whole = torch.cat([kept, after], dim=1)
    with watch() as fresh:
        expected = model(whole, use_cache=False).logits
    fresh_rows = [
        type(s)(s.layer_id, s.tokens[:, kept.shape[1] :], s.close[:, kept.shape[1] :], s.tied[:, kept.shape[1] :])
        for s in fresh
    ]
    left_out = assert_same_sets(join(continued), fresh_rows)
    assert left_out <= 1
    with exactly(model) as exact:
        exact_logits = exact(whole, use_cache=False).logits[:, kept.shape[1] :]
    assert_within_budget(torch.cat(logits, dim=1), expected[:, kept.shape[1] :], exact_logits)


@torch.no_grad()
@pytest.mark.usefixtures("cache_keeps_positions")
def test_selecting_rows_of_a_padded_batch(make_model: Any, qsa_case: Any, make_tokens: Any, watch: Any) -> None:
    """Another row's padding must not stay with the pooled keys."""
    model, prompt = hf.enable(make_model(qsa_case)), make_tokens(3, 130)
    pads = torch.tensor([0, 3, 9])
    mask = (torch.arange(130)[None] >= pads[:, None]).long()
    cache, token = _start(model, prompt, mask)
    expected = _decode(model, cache, token, MORE, mask)
    cache, token = _start(model, prompt, mask)
    order = torch.tensor([2, 0])
    cache.batch_select_indices(order)
    assert torch.equal(_decode(model, cache, token[order], MORE, mask[order]), expected[order])


@torch.no_grad()
def test_forks_of_a_cache_go_their_own_ways(make_model: Any, small_case: Any, make_tokens: Any) -> None:
    model, prompt = hf.enable(make_model(small_case)), make_tokens(1, PROMPT)
    ways = [torch.tensor([[7]]), torch.tensor([[200]])]
    expected = [_decode(model, _start(model, prompt)[0], way, MORE) for way in ways]
    cache, _ = _start(model, prompt)
    caches = [cache, copy.deepcopy(cache)]
    said: list[list[torch.Tensor]] = [[], []]
    last = list(ways)
    for _ in range(MORE):  # in turns, so that one would overwrite what the other pooled
        for fork in (0, 1):
            last[fork] = _decode(model, caches[fork], last[fork], 1)
            said[fork].append(last[fork])
    for fork in (0, 1):
        assert torch.equal(torch.cat(said[fork], dim=1), expected[fork])


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_fault_23_a_cache_that_stock_filled_anew(
    make_model: Any, qsa_case: Any, make_tokens: Any, watch: Any, static: bool
) -> None:
    """Reset, then filled by stock with as many other tokens, in place: what was pooled before is of another text."""
    from transformers import DynamicCache, StaticCache

    model, first, second = make_model(qsa_case), make_tokens(2, PROMPT), make_tokens(2, PROMPT, seed=1)
    cache = StaticCache(model.config, max_cache_len=PROMPT + MORE) if static else DynamicCache(config=model.config)
    with hf.enabled(model):
        model(first, cache=cache)
    cache.reset()
    token = model(second, cache=cache).logits[:, -1:].argmax(dim=-1)
    other = copy.deepcopy(cache)
    expected = _decode(model, other, token, MORE)
    with hf.enabled(model):
        assert torch.equal(_decode(model, cache, token, MORE), expected)


@torch.no_grad()
@pytest.mark.usefixtures("cache_keeps_positions")
def test_crop_of_a_static_cache(
    make_model: Any, qsa_case: Any, make_tokens: Any, watch: Any, assert_same_sets: Any, exactly: Any
) -> None:
    """It leaves the buffers as they are and only counts back; the position history is left to the caller."""
    from transformers import StaticCache

    model, prompt, after = make_model(qsa_case), make_tokens(2, PROMPT), make_tokens(2, 30, seed=1)
    removed = 10

    def run() -> torch.Tensor:
        cache = StaticCache(model.config, max_cache_len=PROMPT + 30)
        model(prompt, cache=cache)
        cache.crop(-removed)
        positions = cache.layers[0].indexer_position_ids
        cache.layers[0].indexer_position_ids = positions[..., :-removed]
        return torch.cat([model(rows, cache=cache).logits for rows in after.split([7, 1, 22], dim=1)], dim=1)

    with watch() as stock:
        expected = run()
    with hf.enabled(model), watch() as ours:
        logits = run()
    assert assert_same_sets(ours, stock) <= 1
    with exactly(model) as exact:
        fresh = exact(torch.cat([prompt[:, :-removed], after], dim=1), use_cache=False).logits
    assert_within_budget(logits, expected, fresh[:, PROMPT - removed :])


@torch.no_grad()
@pytest.mark.parametrize("pads", [(5, 0), (0, 5), (5, 6)], ids=str)
def test_padding_that_only_a_later_mask_shows(
    make_model: Any, qsa_case: Any, make_tokens: Any, watch: Any, assert_same_sets: Any, pads: tuple[int, int]
) -> None:
    """Blocks are counted by the mask of the forward at hand, whatever the forwards before were told."""
    model, tokens = make_model(qsa_case), make_tokens(1, PROMPT)
    masks = [(torch.arange(PROMPT) >= pad).long()[None] for pad in pads]

    def run() -> None:
        out = model(tokens[:, :-6], attention_mask=masks[0][:, :-6], use_cache=True)
        for end in range(PROMPT - 5, PROMPT + 1):
            model(tokens[:, end - 1 : end], attention_mask=masks[1][:, :end], cache=out.cache)

    with watch() as stock:
        run()
    with hf.enabled(model), watch() as ours:
        run()
    real = masks[0].bool() if pads[0] > pads[1] else masks[1].bool()
    assert assert_same_sets(ours, stock, real) <= 1


def test_beam_search(make_model: Any, small_case: Any, make_tokens: Any) -> None:
    model, prompt = make_model(small_case), make_tokens(2, 100)
    mask = torch.ones_like(prompt)
    mask[0, :7] = 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "num_beams": 4, "do_sample": False}
    expected = model.generate(prompt, **options)
    assert not torch.equal(expected, model.generate(prompt, **options | {"num_beams": 1})), "the beams must matter"
    with hf.enabled(model):
        assert torch.equal(model.generate(prompt, **options), expected)


def test_generate_with_chunked_prefill(make_model: Any, small_case: Any, make_tokens: Any) -> None:
    model, prompt = make_model(small_case), make_tokens(2, 171)
    expected = model.generate(prompt, max_new_tokens=20, do_sample=False)
    with hf.enabled(model):
        said = model.generate(prompt, max_new_tokens=20, do_sample=False, prefill_chunk_size=50)
    assert torch.equal(said, expected)


@torch.no_grad()
def test_the_older_name_of_the_cache(make_model: Any, qsa_case: Any) -> None:
    """Layers called directly may still get `past_key_values`."""
    from transformers import DynamicCache
    from transformers.masking_utils import causal_mask_function

    model = hf.enable(make_model(qsa_case))
    attention = hf.patch.qsa_attentions(model)[0]
    hidden = torch.randn(1, 20, model.config.hidden_size, generator=stream(3))
    table = model.model.rotary_emb(hidden, torch.arange(20)[None, None].expand(3, 1, -1))
    outputs = []
    for name in ("cache", "past_key_values"):
        cache = DynamicCache(config=model.config)
        step = hf.masks.step_mask(1, 20, 20, mask_function=causal_mask_function, config=model.config)
        outputs.append(attention(hidden, table, step, **{name: cache})[0])
        assert cache.get_seq_length() == 20
    assert torch.equal(*outputs)
