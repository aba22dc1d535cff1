"""The accounts of a pool find every way in which they can contradict themselves."""

from __future__ import annotations

from typing import Any

import pytest

from flashqsa.cache import ExportedRequest, PoolTensor, Prefix
from flashqsa.cache.pool.accounts import Account, PoolAccounts, Taken
from flashqsa.cache.pool.steps import PlannedRequest, StepNumbers, StepShape


@pytest.fixture
def accounts() -> PoolAccounts:
    """Two requests of 13 and 8 tokens, one of 4 tokens that shares a page, and a held prefix; pages of 8 tokens."""
    accounts = PoolAccounts(9, 4, page_tokens=8, block_tokens=4, ring_tokens=8)
    accounts.add_fresh("a", 13, 5)
    accounts.add_fresh("b", 8, 3)
    accounts.add("c", [accounts.accounts["a"].page_ids[0]], 4, 4, 0)
    accounts.hold(Prefix(8, (accounts.accounts["b"].page_ids[0],)))
    accounts.check()
    return accounts


CORRUPT: dict[str, tuple[Any, str]] = {
    "a page listed twice": (lambda x: x.accounts["a"].page_ids.append(x.accounts["a"].page_ids[0]), "listed twice"),
    "a holder too many": (lambda x: x.holders.__setitem__(0, x.holders[0] + 1), "reference counts differ"),
    "a prefix that holds nothing": (lambda x: x.holders.__setitem__(2, 1), "reference counts differ"),
    "a page both free and held": (lambda x: x.free_page_ids.append(0), "free pages differ"),
    "a page lost": (lambda x: x.free_page_ids.pop(), "free pages differ"),
    "a ring both free and held": (lambda x: x.free_ring_ids.append(x.accounts["a"].ring_id), "rings differ"),
    "a ring lost": (lambda x: x.free_ring_ids.__setitem__(0, 7), "rings differ"),
    "a request under another name": (lambda x: setattr(x.accounts["a"], "request", "b"), "^$"),
    "a ring that begins before the request": (lambda x: setattr(x.accounts["c"], "ring_start", -1), "ring from -1"),
    "a ring that begins after the end": (lambda x: setattr(x.accounts["b"], "ring_start", 9), "ring from 9"),
    "more than a ring holds": (lambda x: setattr(x.accounts["a"], "ring_start", 4), "more than the ring holds"),
    "an open block that is not in the ring": (lambda x: setattr(x.accounts["a"], "ring_start", 13), "open block"),
    "a length without a page": (
        lambda x: (setattr(x.accounts["b"], "length", 9), setattr(x.accounts["b"], "ring_start", 8)), "pages are miss",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", CORRUPT)
def test_a_contradiction_is_found(accounts: PoolAccounts, what: str) -> None:
    corrupt, message = CORRUPT[what]
    corrupt(accounts)
    with pytest.raises(AssertionError, match=message):
        accounts.check()


def test_a_row_that_is_missing_at_the_start_of_a_page_is_found(
    make_serving: Any, draw_tokens: Any, refuses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token of a later page, and the first and last token of a step, one at a time."""
    from flashqsa.errors import ArgumentError

    monkeypatch.setenv("FLASHQSA_DEBUG", "1")
    for name, column, row, token in (("k_pages", 1, 0, 16), ("v_pages", 0, 0, 0), ("k_pages", 2, 3, 35)):
        serving = make_serving()
        serving.open("a")
        serving.step({"a": draw_tokens(36)})
        page = serving.pool.page_ids("a")[column]
        getattr(serving.pool.caches[1], name)[page, row, 0, 3] = float("nan")
        with refuses(ArgumentError, "PagedPool.plan_step", "'a'", "layer 7", f"{name} at token {token}"):
            serving.pool.plan_step({"a": 1})


def test_what_is_handed_around_cannot_change() -> None:
    for kind in (Prefix, Taken, PlannedRequest, StepNumbers, StepShape, PoolTensor, ExportedRequest):
        assert kind.__dataclass_params__.frozen, kind  # type: ignore[attr-defined]


def test_a_new_account_has_nothing() -> None:
    account = Account("a", 3)
    assert (account.ring_id, list(account.page_ids), account.length, account.ring_start, account.checked) == (
        3,
        [],
        0,
        0,
        0,
    )


def test_a_shared_page_before_reserved_ones(make_serving: Any, draw_tokens: Any) -> None:
    """Pages were reserved, then the last written one was shared: its copy takes its place, the reserved ones stay."""
    for length in (12, 20, 36):
        serving = make_serving()
        serving.open("a")
        serving.step({"a": draw_tokens(length)})
        serving.pool.extend("a", 40)
        serving.fork("a", "b")
        reserved = serving.pool.page_ids("a")[-1]
        serving.step({"a": draw_tokens(25, 1)})
        assert reserved in serving.pool.page_ids("a")
        serving.step({"b": draw_tokens(25, 2), "a": draw_tokens(3, 3)})
        for name in "ab":
            serving.check_caches(name)
