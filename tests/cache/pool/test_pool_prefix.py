"""Prefix hits: pages are shared, rings never; what a hit reuses at every length, from live and from closed requests."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.testing import assert_unchanged, snapshot


@pytest.mark.parametrize("tokens", range(60, 77))
def test_fault_30_a_hit_copies_the_ring_or_is_cut_to_whole_blocks(
    make_serving: Any, draw_tokens: Any, tokens: int
) -> None:
    """The donor of 76 tokens holds the raw keys of its last 12: from token 64 on any length is a hit."""
    serving = make_serving(speculative_rows=7)
    shared = draw_tokens(76)
    serving.open("a")
    serving.step({"a": shared})
    hit = serving.open("b", shared, prefix_of="a", tokens=tokens)
    assert hit == (tokens if tokens >= 64 else tokens - tokens % 4)
    assert serving.pool.page_ids("b") == serving.pool.page_ids("a")[: -(-hit // 16)]
    serving.step({"b": draw_tokens(9, 1), "a": draw_tokens(2, 2)})
    for name in "ab":
        serving.check_caches(name)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("left", [1, 2, 3])
def test_fault_22_a_prefix_of_a_closed_request_with_a_ring_that_had_another_owner(
    make_serving: Any, draw_tokens: Any, left: int, device: str
) -> None:
    """B reuses A's first tokens after A was closed, in the ring that another request has just used."""
    serving = make_serving(rings=1, pages=120, device=device)
    shared = draw_tokens(1600 + left, 1)
    serving.open("a")
    serving.step({"a": shared})
    prefix = serving.pool.hold_prefix("a")
    serving.close("a")
    serving.open("other")
    serving.step({"other": draw_tokens(30, 2)})
    ring_id = serving.pool.ring_id("other")
    serving.close("other")
    assert serving.open("b", shared, prefix_of=prefix) == 1600
    assert serving.pool.ring_id("b") == ring_id
    for cache in serving.pool.caches:
        assert (cache.ring_positions[ring_id] == -1).all(), "nothing of the ring's last owner can be taken for a key"
    serving.step({"b": shared[1600:]})
    serving.step({"b": draw_tokens(5, 3)})
    serving.check_caches("b")


def test_fault_12_a_prefix_of_any_length_and_a_chunk_of_any_length(make_serving: Any, draw_tokens: Any) -> None:
    whole = draw_tokens(60)
    for cut in (1, 2, 3, 5, 16, 31, 33):
        serving = make_serving()
        serving.open("a")
        serving.step({"a": whole[:50]})
        hit = serving.open("b", whole, prefix_of="a", tokens=cut)
        serving.step({"a": [1], "b": whole[hit:47]})
        serving.step({"b": whole[47:], "a": [2]})
        for name in "ab":
            serving.check_caches(name)


def test_a_donor_goes_on_and_back_without_harm(make_serving: Any, draw_tokens: Any) -> None:
    """The prefix ends within a page; both write that page on, roll back below the cut and write again."""
    serving, shared = make_serving(), draw_tokens(43)
    serving.open("a")
    serving.step({"a": shared})
    assert serving.open("b", shared, prefix_of="a", tokens=41) == 41
    serving.step({"a": draw_tokens(4, 1)})
    serving.rollback("a", 40)
    serving.step({"a": draw_tokens(3, 2), "b": draw_tokens(3, 3)})
    serving.rollback("b", 39)
    serving.step({"b": draw_tokens(3, 4)})
    serving.close("a")
    serving.step({"b": draw_tokens(30, 5)})
    serving.check_caches("b")


def test_pages_of_a_held_prefix_are_never_written(make_serving: Any, draw_tokens: Any) -> None:
    serving, shared = make_serving(pages=12), draw_tokens(40)
    serving.open("a")
    serving.step({"a": shared})
    prefix = serving.pool.hold_prefix("a")
    held = {
        name: getattr(cache, name)[page]
        for cache in serving.pool.caches
        for name in ("k_pages", "v_pages", "block_keys")
        for page in prefix.page_ids
    }
    before = snapshot(held)
    serving.step({"a": draw_tokens(5, 1)})
    serving.rollback("a", 39)
    serving.step({"a": draw_tokens(8, 2)})
    serving.close("a")
    for number in range(3):
        assert serving.open(number, shared, prefix_of=prefix) == 40
        serving.step({number: draw_tokens(25, number)})
        serving.check_caches(number)
        serving.close(number)
    assert_unchanged(before)
    serving.pool.release_prefix(prefix)
    assert serving.pool.free_pages == 12


@pytest.mark.parametrize("length", [0, 3, 4])
def test_short_and_empty_prefixes(make_serving: Any, draw_tokens: Any, length: int) -> None:
    serving = make_serving()
    shared = draw_tokens(length)
    serving.open("a")
    serving.step({"a": shared})
    prefix = serving.pool.hold_prefix("a")
    assert prefix.tokens == length - length % 4
    assert serving.open("b", shared, prefix_of=prefix) == prefix.tokens
    assert serving.open("c", shared, prefix_of="a") == length
    serving.step({"a": [1], "b": [2, 3], "c": draw_tokens(7, 5)})
    for name in "abc":
        serving.check_caches(name)


def test_a_hit_shares_memory(make_serving: Any, draw_tokens: Any) -> None:
    """Ten requests with one prefix cost its pages once."""
    serving, shared = make_serving(pages=20, rings=11), draw_tokens(160)
    serving.open("a")
    serving.step({"a": shared})
    free = serving.pool.free_pages
    for number in range(10):
        serving.open(number, shared, prefix_of="a")
    assert serving.pool.free_pages == free == 10
    serving.step({number: [number] for number in range(10)})
    assert serving.pool.free_pages == 0
    assert len({serving.pool.page_ids(number)[-1] for number in range(10)}) == 10
    assert torch.tensor([serving.pool.page_ids(number)[:10] for number in range(10)]).unique(dim=0).shape[0] == 1
