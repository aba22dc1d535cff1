"""Requests come, share, part and go: who holds which page, and that a refused call changes nothing."""

from __future__ import annotations

import collections
import random
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from flashqsa import CacheLayout, PagedPool, PoolFullError
from flashqsa.errors import ArgumentError


@pytest.fixture
def pool(tiny_config: Any) -> PagedPool:
    """12 pages of 8 tokens, 4 rings of 8 raw keys."""
    return PagedPool.from_config(
        tiny_config, page_tokens=8, num_pages=12, num_rings=4, speculative_rows=3, dtype=torch.float32
    )


def holders(pool: PagedPool, request: Any) -> list[int]:
    return [pool._accounts.holders[page] for page in pool.page_ids(request)]


def test_pages_and_rings_go_round(pool: PagedPool) -> None:
    assert (pool.free_pages, pool.free_rings, pool.requests) == (12, 4, ())
    assert pool.open("a") == 0
    assert pool.open(7) == 0
    assert pool.free_rings == 2
    pool.plan_step({"a": 17, 7: 8})
    assert (pool.length("a"), pool.length(7)) == (17, 8)
    assert [len(pool.page_ids(name)) for name in ("a", 7)] == [3, 1]
    assert not set(pool.page_ids("a")) & set(pool.page_ids(7))
    assert pool.ring_id("a") != pool.ring_id(7)
    assert pool.requests == ("a", 7)
    assert repr(pool) == "PagedPool(2 requests, 4 of 12 pages, cpu)"
    pool.close("a")
    assert (pool.free_pages, pool.free_rings, pool.requests) == (11, 3, (7,))
    pool._accounts.check()


def test_a_shared_page_is_copied_by_whoever_writes_it(pool: PagedPool) -> None:
    pool.open("a")
    pool.plan_step({"a": 18})
    pool.fork("a", "b")
    pool.fork("a", "c")
    assert pool.page_ids("a") == pool.page_ids("b") == pool.page_ids("c")
    assert holders(pool, "a") == [3, 3, 3]
    shared = pool.page_ids("a")
    assert pool.pages_needed({"a": 1, "b": 1, "c": 1}) == 2, "the last of the three writes in place"
    pool.plan_step({"a": 1, "b": 1, "c": 1})
    assert [pool.page_ids(name)[:2] for name in "abc"] == [shared[:2]] * 3
    last = [pool.page_ids(name)[2] for name in "abc"]
    assert len(set(last)) == 3
    assert last[2] == shared[2]
    assert holders(pool, "b") == [3, 3, 1]
    pool._accounts.check()


def test_a_rollback_into_shared_pages_copies_them_when_they_are_written_again(pool: PagedPool) -> None:
    pool.open("a")
    pool.plan_step({"a": 20})
    pool.fork("a", "b")
    pool.rollback("b", length=12)
    assert pool.page_ids("b") == pool.page_ids("a")[:2]
    pool.plan_step({"b": 2})
    assert pool.page_ids("b")[0] == pool.page_ids("a")[0]
    assert pool.page_ids("b")[1] != pool.page_ids("a")[1]
    assert holders(pool, "a") == [2, 1, 1]


def test_extend_reserves_and_a_step_then_takes_nothing(pool: PagedPool) -> None:
    pool.open("a")
    pool.plan_step({"a": 5})
    pool.fork("a", "b")
    pool.extend("b", 20)
    assert (pool.length("b"), len(pool.page_ids("b"))) == (5, 4)
    assert holders(pool, "b") == [1, 1, 1, 1]
    assert pool.pages_needed({"b": 20}) == 0
    free = pool.free_pages
    pool.plan_step({"b": 20})
    assert pool.free_pages == free
    pool.extend("b", 9)
    pool.fork("b", "c")
    assert len(pool.page_ids("c")) == 4, "a reserved page is not part of what was written"
    pool.rollback("b", rows=0)
    assert len(pool.page_ids("b")) == 4
    pool._accounts.check()


def test_a_held_prefix_outlives_its_request(pool: PagedPool) -> None:
    pool.open("a")
    pool.plan_step({"a": 22})
    prefix = pool.hold_prefix("a", 19)
    assert prefix.tokens == 16, "a prefix has no ring: whole blocks"
    assert prefix.page_ids == tuple(pool.page_ids("a")[:2])
    pool.close("a")
    assert pool.free_pages == 10
    assert pool.open("b", prefix_of=prefix) == 16
    assert pool.open("c", prefix_of=prefix, tokens=7) == 4
    assert pool.page_ids("c") == [prefix.page_ids[0]]
    pool.release_prefix(prefix)
    assert pool.free_pages == 10
    pool.close("b")
    assert pool.free_pages == 11
    pool.close("c")
    assert pool.free_pages == 12


@pytest.mark.parametrize("seed", range(3))
def test_fault_28_one_owner_of_every_length(tiny_config: Any, make_model: Any, refuses: Any, seed: int) -> None:
    """Random add, grow, roll back, fork, hold and remove over 8 requests, 500 steps: no page lost or held twice."""
    pool = PagedPool.from_config(
        tiny_config, page_tokens=8, num_pages=60, num_rings=8, speculative_rows=3, dtype=torch.float32
    )
    rng, model, prefixes, seen = random.Random(seed), make_model(8), [], collections.Counter()
    for number in range(500):
        names = list(model.lengths)
        action = rng.choice(["open", "grow", "grow", "grow", "back", "fork", "close", "hold", "release", "hit"])
        name = rng.choice(names) if names else None
        try:
            if action == "open":
                pool.open(number)
                model.add(number)
            elif action == "fork" and names:
                pool.fork(name, number)
                model.add(number, model.lengths[name], name)
            elif action == "hit" and names:
                wanted = rng.randint(0, model.lengths[name])
                exact = model.holds(name, wanted)
                got = pool.open(number, prefix_of=name, tokens=wanted)
                assert got == (wanted if exact else wanted - wanted % 4)
                model.add(number, got, name)
                seen[f"hit {exact}"] += 1
            elif action == "grow" and names:
                rows = {some: rng.choice([0, 1, 1, 3, 8, 21]) for some in rng.sample(names, rng.randint(1, len(names)))}
                plan = pool.plan_step(rows)
                for some, count in rows.items():
                    model.grow(some, count)
                assert plan.seq_lens.tolist() == [model.lengths[some] for some in rows]
                assert plan.num_rows == sum(rows.values())
            elif action == "back" and names:
                target = max(model.lengths[name] - rng.choice([0, 1, 2, 3, 4, 5, 9]), 0)
                possible = model.holds(name, target)
                with nullcontext() if possible else refuses(ArgumentError, "PagedPool.rollback", "raw index keys"):
                    pool.rollback(name, length=target)
                    model.cut(name, target)
                seen[f"back {possible}"] += 1
            elif action == "close" and names:
                pool.close(name)
                del model.lengths[name]
            elif action == "hold" and names and len(prefixes) < 4:
                prefixes.append(pool.hold_prefix(name))
            elif action == "release" and prefixes:
                pool.release_prefix(prefixes.pop(rng.randrange(len(prefixes))))
        except PoolFullError:
            seen["full"] += 1
        pool._accounts.check()
        assert {some: pool.length(some) for some in pool.requests} == model.lengths
        assert all(len(pool.page_ids(some)) == -(-length // 8) for some, length in model.lengths.items())
    assert all(seen[what] for what in ("full", "back True", "back False", "hit True", "hit False")), seen
    for some in pool.requests:
        pool.close(some)
    for prefix in prefixes:
        pool.release_prefix(prefix)
    assert (pool.free_pages, pool.free_rings) == (60, 8)


def full(pool: PagedPool) -> None:
    """Eleven of twelve pages and all rings."""
    pool.open("a")
    pool.open("b")
    pool.plan_step({"a": 44, "b": 24})
    pool.fork("b", "c")
    pool.fork("b", "d")
    pool.extend("a", 13)
    for cache in pool.caches:  # as if the steps had run
        cache.ring_positions.fill_(5)
    assert (pool.free_pages, pool.free_rings) == (1, 0)


@pytest.mark.parametrize(
    ("call", "where", "parts"),
    [
        (lambda p: p.plan_step({"b": 8, "c": 1}), "PagedPool.plan_step", ("cover the 2", "got 1")),
        (lambda p: p.plan_step({"a": 1, "c": 1, "d": 9}), "PagedPool.plan_step", ("cover the 3", "got 1")),
        (lambda p: p.extend("a", 100), "PagedPool.extend", ("got 1",)),
        (lambda p: p.open("e"), "PagedPool.open", ("num_rings", "4 open requests")),
        (lambda p: p.open("e", prefix_of="a"), "PagedPool.open", ("num_rings",)),
        (lambda p: p.fork("a", "e"), "PagedPool.fork", ("num_rings",)),
        (lambda p: p.import_request("e", p.export_request("a")), "PagedPool.import_request", ("num_rings",)),
    ],
)
def test_a_full_pool_refuses_and_nothing_changes(
    pool: PagedPool, refuses: Any, nothing_changes: Any, call: Any, where: str, parts: tuple[str, ...]
) -> None:
    full(pool)
    with nothing_changes(pool), refuses(PoolFullError, where, *parts):
        call(pool)


def test_too_few_pages_for_an_import_change_nothing(pool: PagedPool, refuses: Any, nothing_changes: Any) -> None:
    full(pool)
    exported = pool.export_request("b")
    pool.close("d")
    with nothing_changes(pool), refuses(PoolFullError, "PagedPool.import_request", "cover the 3", "got 1"):
        pool.import_request("e", exported)
    with nothing_changes(pool), pytest.raises(MemoryError):
        pool.import_request("e", exported)


@pytest.mark.parametrize(
    ("call", "where", "parts"),
    [
        (lambda p: p.open("a"), "PagedPool.open", ("request", "'a'")),
        (lambda p: p.open(["e"]), "PagedPool.open", ("hashable", "['e']")),
        (lambda p: p.open("e", tokens=4), "PagedPool.open", ("prefix_of", "got 4")),
        (lambda p: p.open("e", prefix_of="z"), "PagedPool.open", ("prefix_of", "'z'")),
        (lambda p: p.open("e", prefix_of="a", tokens=19), "PagedPool.open", ("at most the 18", "got 19")),
        (lambda p: p.open("e", prefix_of="a", tokens=-1), "PagedPool.open", ("tokens", "got -1")),
        (lambda p: p.fork("z", "e"), "PagedPool.fork", ("request", "'z'")),
        (lambda p: p.fork("a", "a"), "PagedPool.fork", ("new_request", "'a'")),
        (lambda p: p.close("z"), "PagedPool.close", ("'z'",)),
        (lambda p: p.length(["a"]), "PagedPool.length", ("['a']",)),
        (lambda p: p.page_ids("z"), "PagedPool.page_ids", ("'z'",)),
        (lambda p: p.ring_id("z"), "PagedPool.ring_id", ("'z'",)),
        (lambda p: p.cache(4), "PagedPool.cache", ("layer_id", "[3, 7]", "got 4")),
        (lambda p: p.hold_prefix("a", 19), "PagedPool.hold_prefix", ("at most the 18", "got 19")),
        (lambda p: p.release_prefix("a"), "PagedPool.release_prefix", ("prefix must be a Prefix", "got str")),
        (lambda p: p.extend("a", -1), "PagedPool.extend", ("rows['a']", "got -1")),
        (lambda p: p.plan_step({"a": 1.5}), "PagedPool.plan_step", ("rows['a']", "got 1.5")),
        (lambda p: p.plan_step({"a": 1, "z": 1}), "PagedPool.plan_step", ("'z'",)),
        (lambda p: p.plan_step(["a"]), "PagedPool.plan_step", ("rows", "list")),
        (lambda p: p.rollback("a"), "PagedPool.rollback", ("exactly one", "neither")),
        (lambda p: p.rollback("a", length=3, rows=3), "PagedPool.rollback", ("exactly one", "both")),
        (lambda p: p.rollback("a", length=19), "PagedPool.rollback", ("length", "[0, 18]", "got 19")),
        (lambda p: p.rollback("a", rows=19), "PagedPool.rollback", ("rows", "[0, 18]", "got 19")),
        (lambda p: p.rollback("a", rows=True), "PagedPool.rollback", ("rows", "got True")),
    ],
)
def test_bad_calls_are_refused_and_nothing_changes(
    pool: PagedPool, refuses: Any, nothing_changes: Any, call: Any, where: str, parts: tuple[str, ...]
) -> None:
    pool.open("a")
    pool.plan_step({"a": 18})
    with nothing_changes(pool), refuses(ArgumentError, where, *parts):
        call(pool)


def test_a_prefix_is_given_back_once_and_to_its_own_pool(pool: PagedPool, tiny_config: Any, refuses: Any) -> None:
    pool.open("a")
    pool.plan_step({"a": 18})
    prefix = pool.hold_prefix("a")
    other = PagedPool.from_config(tiny_config, page_tokens=8, num_pages=4, num_rings=1)
    with refuses(ArgumentError, "PagedPool.open", "held by this pool"):
        other.open("b", prefix_of=prefix)
    pool.release_prefix(prefix)
    with refuses(ArgumentError, "PagedPool.release_prefix", "held by this pool"):
        pool.release_prefix(prefix)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"layout": 3}, ("layout", "int")),
        ({"topk_blocks": 0}, ("topk_blocks", "got 0")),
        ({"num_pages": 0}, ("num_pages", "got 0")),
        ({"num_rings": -1}, ("num_rings", "got -1")),
        ({"layer_ids": []}, ("layer_ids", "[]")),
        ({"layer_ids": [1, 1]}, ("layer_ids", "[1, 1]")),
        ({"layer_ids": ["x"]}, ("layer_ids", "'x'")),
        ({"k_scale": [1.0]}, ("k_scale", "2 layers", "got 1")),
    ],
)
def test_a_pool_that_cannot_be(refuses: Any, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    layout = CacheLayout(page_tokens=8, block_tokens=4, kv_heads=1, head_dim=8, index_head_dim=8, ring_tokens=8)
    arguments = {"layout": layout, "topk_blocks": 4, "num_pages": 2, "num_rings": 1, "layer_ids": [0, 1]} | change
    with refuses(ArgumentError, "PagedPool", *parts):
        PagedPool(arguments.pop("layout"), **arguments)
