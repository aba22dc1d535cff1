"""`FLASHQSA_DEBUG=1`: freed memory is NaN, and what was planned but never written, or is not owned, is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa import PagedPool
from flashqsa.errors import ArgumentError

FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHQSA_DEBUG", "1")


def is_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float().isnan() if tensor.dtype == FP8 else tensor.isnan()


def assert_free_memory_is_nan(pool: Any) -> None:
    for cache in pool.caches:
        for tensor in (cache.k_pages, cache.v_pages, cache.block_keys):
            for page in pool._accounts.free_page_ids:
                assert is_nan(tensor[page]).all()
        for ring_id in pool._accounts.free_ring_ids:
            assert cache.ring[ring_id].isnan().all()
            assert (cache.ring_positions[ring_id] == -1).all()


@pytest.mark.parametrize(
    "options", [{}, {"kv_dtype": FP8, "index_dtype": FP8, "scales": (0.5, 2.0)}], ids=["fp32", "fp8"]
)
def test_free_memory_is_nan_from_the_beginning_and_again(make_serving: Any, draw_tokens: Any, options: Any) -> None:
    serving = make_serving(pages=12, rings=3, **options)
    pool = type(serving.pool)(
        serving.pool.layout, topk_blocks=5, num_pages=3, num_rings=2, layer_ids=(3, 7), k_scale=2.0
    )
    assert_free_memory_is_nan(pool)
    serving.open("a")
    serving.step({"a": draw_tokens(60)})
    serving.fork("a", "b")
    serving.step({"b": draw_tokens(7, 1), "a": draw_tokens(1, 2)})
    prefix = serving.pool.hold_prefix("a")
    for name in "ab":
        serving.check_caches(name)
        serving.close(name)
    for cache in serving.pool.caches:
        assert not is_nan(cache.k_pages[list(prefix.page_ids)[:3]]).any(), "held pages are in use"
    serving.pool.release_prefix(prefix)
    serving.pool._poison(range(12), range(3))  # pages that were never used hold what the test put there
    assert_free_memory_is_nan(serving.pool)


def test_everything_works_in_poisoned_memory(make_serving: Any, draw_tokens: Any) -> None:
    """Rows that a rollback took back and rows behind the cut of a copied page are NaN too, and nobody misses them."""
    serving = make_serving(speculative_rows=7)
    pool = serving.pool
    serving.open("a")
    serving.step({"a": draw_tokens(45)})
    serving.rollback("a", 38)
    last = pool.page_ids("a")[-1]
    for cache in pool.caches:
        assert cache.k_pages[last, 6:].isnan().all()
        assert not cache.k_pages[last, :6].isnan().any()
        assert cache.block_keys[last, 1:].isnan().all()
        assert cache.ring[pool.ring_id("a")].isnan().all(dim=-1).sum() == 7
    serving.step({"a": draw_tokens(9, 1)})
    serving.open("b", serving.tokens["a"], prefix_of="a", tokens=42)
    serving.step({"b": draw_tokens(1, 2)})
    copied = pool.page_ids("b")[-1]
    for cache in pool.caches:
        assert cache.v_pages[copied, 11:].isnan().all()
    serving.pool.import_request("c", pool.export_request("b"))
    serving.tokens["c"] = list(serving.tokens["b"])
    serving.step({"a": draw_tokens(3, 3), "b": draw_tokens(3, 4), "c": draw_tokens(20, 5)})
    for name in "abc":
        serving.check_caches(name)


def test_a_rollback_poisons_no_row_that_another_request_reads(make_serving: Any, draw_tokens: Any) -> None:
    serving = make_serving()
    serving.open("a")
    serving.step({"a": draw_tokens(45)})
    serving.fork("a", "b")
    serving.rollback("b", 40)
    serving.check_caches("a")
    serving.step({"a": [1], "b": [2]})
    for name in "ab":
        serving.check_caches(name)


CALLS = {
    "plan_step": lambda pool: pool.plan_step({"b": 1, "a": 1}),
    "fork": lambda pool: pool.fork("a", "c"),
    "open": lambda pool: pool.open("c", prefix_of="a", tokens=30),
    "hold_prefix": lambda pool: pool.hold_prefix("a"),
    "export_request": lambda pool: pool.export_request("a"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_layer_that_did_not_run_is_found(
    make_serving: Any, draw_tokens: Any, refuses: Any, nothing_changes: Any, call: str
) -> None:
    """The error names request, layer and position."""
    serving = make_serving()
    pool = serving.pool
    pool._poison(range(40), range(6))
    for name in "ab":
        serving.open(name)
    serving.step({"a": draw_tokens(33), "b": draw_tokens(5)})
    serving.step({"a": draw_tokens(1, 1)})
    keys = pool.cache(7).k_pages
    before = keys.clone()
    serving.step({"a": draw_tokens(20, 2)})
    keys.copy_(torch.where(before.isnan(), before, keys))  # as if layer 7 had not run in the last step
    with nothing_changes(pool), refuses(
        ArgumentError, f"PagedPool.{call}", "request 'a'", "length 54", "layer 7", "k_pages at token 34"
    ):  # fmt: skip
        CALLS[call](pool)


def test_the_very_first_token_is_looked_at(make_serving: Any, refuses: Any) -> None:
    pool = make_serving().pool
    pool.open("a")
    pool.plan_step({"a": 1})
    with refuses(ArgumentError, "PagedPool.export_request", "request 'a'", "layer 3", "k_pages at token 0"):
        pool.export_request("a")


def test_a_step_that_is_taken_back_unwritten_is_no_fault(make_serving: Any, draw_tokens: Any) -> None:
    serving = make_serving()
    pool = serving.pool
    pool._poison(range(40), range(6))
    serving.open("a")
    serving.step({"a": draw_tokens(20)})
    pool.plan_step({"a": 30})
    pool.rollback("a", length=20)
    serving.step({"a": draw_tokens(3, 1)})
    serving.check_caches("a")


def test_rows_that_were_taken_back_have_to_be_written_again(make_serving: Any, draw_tokens: Any, refuses: Any) -> None:
    serving = make_serving()
    pool = serving.pool
    serving.open("a")
    serving.step({"a": draw_tokens(20)})
    serving.step({"a": draw_tokens(7, 1)})
    pool.hold_prefix("a")  # all 27 tokens have been looked at
    pool.rollback("a", rows=5)
    pool.plan_step({"a": 5})
    with refuses(ArgumentError, "PagedPool.export_request", "request 'a'", "layer 3", "token 22"):
        pool.export_request("a")


@pytest.mark.parametrize("tokens", [250, 5000])
def test_fault_23_a_dense_path_that_writes_no_block_keys_is_found(
    make_serving: Any, draw_tokens: Any, run_step: Any, refuses: Any, tokens: int
) -> None:
    """B takes A's pages and has K and V written by something else: A's block keys are not taken for its own."""
    serving = make_serving(pages=-(-tokens // 16) + 1)
    pool = serving.pool
    serving.open("a")
    run_step(pool.caches, pool.plan_step({"a": tokens}), torch.tensor(draw_tokens(tokens)))
    pages = pool.page_ids("a")
    serving.close("a")
    serving.open("b")
    plan = pool.plan_step({"b": 100})
    assert set(pool.page_ids("b")) <= set(pages)
    for cache in pool.caches:
        for tensor in (cache.k_pages, cache.v_pages):
            tensor.flatten(0, 1)[plan.slot_ids] = 1.0
    with refuses(ArgumentError, "PagedPool.plan_step", "request 'b'", "layer 3", "block_keys at token 0"):
        pool.plan_step({"b": 1})


def test_plans_that_are_not_owned_are_refused(make_serving: Any, draw_tokens: Any, refuses: Any) -> None:
    serving = make_serving()
    pool = serving.pool
    for name in "abc":
        serving.open(name)
    serving.step({"a": draw_tokens(30), "b": draw_tokens(20), "c": draw_tokens(3)})
    plan = pool.plan_step({"a": 1, "b": 1}, num_requests=3)
    pool.check_plan(plan)
    where = "PagedPool.check_plan"
    pool.rollback("b", rows=1)
    with refuses(ArgumentError, where, "seq_lens", "got 21", "'b' of 20 tokens"):
        pool.check_plan(plan)
    pool.rollback("a", rows=1)
    plan = pool.plan_step({"a": 1, "b": 1})
    page = pool.page_ids("c")[0]
    owned = pool.page_ids("b")[1]
    plan.page_table[1, 1] = page
    with refuses(ArgumentError, where, "'b'", f"page {page}", "position 16", f"page is {owned}"):
        pool.check_plan(plan)
    ring_id = pool.ring_id("a")
    pool.close("a")
    with refuses(ArgumentError, where, f"ring {ring_id} for request 0", "free"):
        pool.check_plan(plan)


def test_accounts_are_checked_after_every_call(make_serving: Any, draw_tokens: Any) -> None:
    serving = make_serving()
    serving.open("a")
    serving.step({"a": draw_tokens(5)})
    serving.pool._accounts.holders[serving.pool.page_ids("a")[0]] = 2
    with pytest.raises(AssertionError, match="reference counts"):
        serving.pool.open("b")


def test_memory_can_be_poisoned_without_the_checks(tiny_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHQSA_DEBUG")
    pool = PagedPool.from_config(
        tiny_config, page_tokens=16, num_pages=5, num_rings=2, dtype=torch.float32, poison=True
    )
    assert_free_memory_is_nan(pool)
    pool.open("a")
    plan = pool.plan_step({"a": 40})
    for cache in pool.caches:
        cache.k_pages.flatten(0, 1)[plan.slot_ids] = 1.0
    pool.plan_step({"a": 1})  # values and block keys were never written, and nobody looks
    pool.rollback("a", length=20)
    last = pool.page_ids("a")[-1]
    assert pool.caches[1].k_pages[last, 4:].isnan().all()
    assert not pool.caches[1].k_pages[last, :4].isnan().any()
    assert_free_memory_is_nan(pool)
    pool.close("a")
    assert_free_memory_is_nan(pool)


@pytest.mark.parametrize("call", ["plan_step", "extend", "import_request"])
def test_a_step_that_runs_after_its_request_was_closed_is_found(
    make_serving: Any, draw_tokens: Any, run_step: Any, refuses: Any, nothing_changes: Any, call: str
) -> None:
    """Its pages were free, and are looked at before anybody gets them: the error names whose token was written."""
    serving = make_serving(page_tokens=8)
    pool = serving.pool
    for name in "ab":
        serving.open(name)
        serving.step({name: draw_tokens(20)})
    exported = pool.export_request("b")
    plan = pool.plan_step({"a": 3})
    page = pool.page_ids("a")[-1]
    pool.close("a")
    run_step(pool.caches[1:], plan, torch.tensor(draw_tokens(3, 1)))
    pool._accounts.free_page_ids.remove(page)
    pool._accounts.free_page_ids.append(page)
    calls = {
        "plan_step": lambda: pool.plan_step({"b": 9}),
        "extend": lambda: pool.extend("b", 9),
        "import_request": lambda: pool.import_request("c", exported),
    }
    for _ in range(2):  # nothing is forgotten by being refused
        with nothing_changes(pool), refuses(
            ArgumentError, f"PagedPool.{call}", "k_pages of layer 7", f"row 4 of page {page}",
            "token 20 of request 'a'",
        ):  # fmt: skip
            calls[call]()


def test_a_step_that_runs_after_a_rollback_is_found(
    make_serving: Any, draw_tokens: Any, run_step: Any, refuses: Any
) -> None:
    serving = make_serving(page_tokens=8)
    pool = serving.pool
    serving.open("a")
    serving.step({"a": draw_tokens(20)})
    plan = pool.plan_step({"a": 7})
    page = pool.page_ids("a")[-1]
    pool.rollback("a", rows=7)
    run_step(pool.caches, plan, torch.tensor(draw_tokens(7, 1)))
    with refuses(ArgumentError, "PagedPool.plan_step", "layer 3", f"row 0 of page {page}", "token 24 of request 'a'"):
        pool.plan_step({"a": 7})


@pytest.mark.parametrize("call", ["open", "fork"])
@pytest.mark.parametrize("part", ["ring", "ring_positions"])
def test_a_ring_that_is_written_while_it_is_free_is_found(
    make_serving: Any, draw_tokens: Any, refuses: Any, nothing_changes: Any, call: str, part: str
) -> None:
    serving = make_serving()
    pool = serving.pool
    for name in "ab":
        serving.open(name)
    serving.step({"a": draw_tokens(20), "b": draw_tokens(3)})
    ring_id = pool.ring_id("a")
    pool.close("a")
    getattr(pool.caches[0], part)[ring_id, 5] = 2
    calls = {"open": lambda: pool.open("c"), "fork": lambda: pool.fork("b", "c")}
    with nothing_changes(pool), refuses(
        ArgumentError, f"PagedPool.{call}", "layer 3", f"place 5 of ring {ring_id}", "request 'a'"
    ):  # fmt: skip
        calls[call]()


def test_memory_that_was_free_before_the_checks_were_on_is_not_looked_at(
    make_serving: Any, draw_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also pages into which an import was writing when it was stopped."""
    monkeypatch.setenv("FLASHQSA_DEBUG", "0")
    serving = make_serving(pages=12)
    serving.open("a")
    serving.step({"a": draw_tokens(60)})
    exported = serving.pool.export_request("a")
    serving.close("a")
    for cache in serving.pool.caches:
        cache.k_pages.fill_(1.0)
        cache.ring_positions.fill_(1)
    monkeypatch.setenv("FLASHQSA_DEBUG", "1")
    serving.open("b")
    serving.step({"b": draw_tokens(180)})
    serving.close("b")

    def stops(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(serving.pool._accounts), "add_fresh", stops)
        with pytest.raises(KeyboardInterrupt):
            serving.pool.import_request("c", exported)
    serving.pool.import_request("d", exported)
    serving.tokens["d"] = draw_tokens(60)
    serving.step({"d": draw_tokens(100, 2)})
    serving.check_caches("d")


@pytest.mark.parametrize(
    "options", [{}, {"kv_dtype": FP8, "index_dtype": FP8, "scales": (0.5, 2.0)}], ids=["fp32", "fp8"]
)
def test_a_step_on_pages_that_have_another_owner_is_found(
    make_serving: Any, draw_tokens: Any, run_step: Any, refuses: Any, nothing_changes: Any, options: Any
) -> None:
    """A plan of A runs after A was closed and B has its pages: B's next call names the layer and the tokens."""
    serving = make_serving(page_tokens=8, pages=8, **options)
    pool = serving.pool
    serving.open("a")
    serving.step({"a": draw_tokens(18)})
    plan = pool.plan_step({"a": 3})
    page = pool.page_ids("a")[2]
    serving.close("a")
    serving.open("b")
    serving.step({"b": draw_tokens(60, 1)})
    pool.export_request("b")  # what B has is looked at
    first = pool.page_ids("b").index(page) * 8
    tokens = f"tokens {first} to {first + 7}"
    calls = {
        "plan_step": lambda: pool.plan_step({"b": 1}),
        "fork": lambda: pool.fork("b", "c"),
        "export_request": lambda: pool.export_request("b"),
    }
    for layer, cache in zip((3, 7), pool.caches, strict=True):
        kept = [x.view(torch.uint8).clone() for x in (cache.k_pages, cache.v_pages, cache.block_keys)]
        run_step([cache], plan, torch.tensor(draw_tokens(3, 2)))
        for where, call in calls.items():
            with nothing_changes(pool), refuses(
                ArgumentError, f"PagedPool.{where}", "'b'", f"k_pages of layer {layer}", tokens
            ):  # fmt: skip
                call()
        for tensor, was in zip((cache.k_pages, cache.v_pages, cache.block_keys), kept, strict=True):
            tensor.view(torch.uint8).copy_(was)
    for part, name in ((pool.caches[1].v_pages, "v_pages"), (pool.caches[1].block_keys, "block_keys")):
        rows = part.view(torch.uint8)[page]
        was = rows.clone()
        rows[1] = was[0]
        with refuses(ArgumentError, "PagedPool.plan_step", f"{name} of layer 7", tokens):
            pool.plan_step({"b": 1})
        rows.copy_(was)
    pool.plan_step({"b": 1})


def test_what_was_taken_back_may_be_written_again(make_serving: Any, draw_tokens: Any) -> None:
    """Also full pages, and the same pages shared with a fork that keeps its own."""
    serving = make_serving(page_tokens=8)
    serving.open("a")
    serving.step({"a": draw_tokens(61)})
    serving.fork("a", "b")
    for number, length in enumerate((60, 56, 52, 40, 16)):
        serving.rollback("a", length)
        serving.step({"a": draw_tokens(61 - length, 10 + number), "b": [number]})
        for name in "ab":
            serving.check_caches(name)
