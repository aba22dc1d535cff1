"""A call that stops anywhere, for lack of memory or by a signal: it has not happened, or all of it has."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from flashqsa import PagedPool
from flashqsa.cache import pool as pool_package

MOST_CALLS = 3000
FOLDER = str(Path(pool_package.__file__).parent)


class StopsAt(TorchFunctionMode):
    """Raises in place of one call of torch."""

    def __init__(self, number: int, error: type[BaseException]) -> None:
        super().__init__()
        self.left, self.error = number, error

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch._C._set_grad_enabled:  # allocates nothing, and stopped it would stay set for other tests
            return function(*args, **kwargs or {})
        self.left -= 1
        if self.left == 0:
            raise self.error("CUDA out of memory. Tried to allocate 2.00 MiB")
        return function(*args, **kwargs or {})


def in_use(pool: PagedPool) -> dict[str, torch.Tensor]:
    """Every page and ring that a request or a prefix has."""
    accounts = pool._accounts
    pages = [page for page, holders in enumerate(accounts.holders) if holders]
    rings = [account.ring_id for account in accounts.accounts.values()]
    return {
        listed.name: listed.tensor[pages if listed.shareable else rings]  # a copy
        for listed in pool.tensors()
    }


def accounts_of(pool: PagedPool) -> Any:
    x = pool._accounts
    lists = {name: (list(a.page_ids), a.length, a.ring_id, a.ring_start) for name, a in x.accounts.items()}
    return copy.deepcopy((lists, x.free_page_ids, x.free_ring_ids, x.holders, len(x.prefixes)))


CALLS: dict[str, Callable[[PagedPool, Any], Any]] = {
    "a step on a shared page": lambda pool, _: pool.plan_step({"a": 9, "b": 1}),
    "a refilled step": lambda pool, held: pool.plan_step({"a": 1, "b": 2}, out=held["plan"]),
    "pages ahead": lambda pool, _: pool.extend("b", 40),
    "a prefix inside a block": lambda pool, _: pool.open("c", prefix_of="a", tokens=42),
    "a held prefix": lambda pool, held: pool.open("c", prefix_of=held["prefix"]),
    "a fork": lambda pool, _: pool.fork("a", "c"),
    "an export": lambda pool, _: pool.export_request("a"),
    "an import": lambda pool, held: pool.import_request("c", held["exported"]),
}


def fill(serving: Any, tokens: list[int]) -> dict[str, Any]:
    """A request, a fork of it, and what the calls need."""
    pool = serving.pool
    serving.open("a")
    serving.step({"a": tokens})
    serving.fork("a", "b")
    return {
        "plan": pool.plan_step({}, num_requests=3, num_rows=9, table_pages=6, max_query_len=8, max_seq_len=90),
        "prefix": pool.hold_prefix("a"),
        "exported": pool.export_request("a"),
    }


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("what", CALLS)
def test_a_call_that_stops_anywhere_changes_nothing(
    make_serving: Any, draw_tokens: Any, record_property: Any, what: str, error: type[BaseException]
) -> None:
    serving = make_serving(pages=30, rings=3)
    pool = serving.pool
    held = fill(serving, draw_tokens(43))
    for number in range(1, MOST_CALLS):
        kept, accounts = in_use(pool), accounts_of(pool)
        try:
            with StopsAt(number, error):
                CALLS[what](pool, held)
        except error:
            after = in_use(pool)
            assert all(torch.equal(after[n].view(torch.uint8), kept[n].view(torch.uint8)) for n in kept), number
            assert accounts_of(pool) == accounts, f"call {number} of torch"
            pool._accounts.check()
        else:
            break
    else:
        pytest.fail("the call never ends")
    assert number > 1, "nothing was ever stopped"
    record_property("calls that were stopped", number - 1)
    serving.tokens["a"] = draw_tokens(43)
    for name in ("a", "b"):
        if pool.length(name) == 43:
            serving.check_caches(name)


@contextmanager
def stopped_at_line(number: int) -> Iterator[None]:
    """A signal comes before the so manyth line that the pool's own code runs, as Ctrl-C may."""
    left, before = number, sys.gettrace()

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left == 0 and event == "line":
            left = -1
            raise KeyboardInterrupt
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code.co_filename.startswith(FOLDER) else None

    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)


MORE_CALLS: dict[str, Callable[[PagedPool, Any], Any]] = {
    "a request goes": lambda pool, _: pool.close("b"),
    "a request is new": lambda pool, _: pool.open("c"),
    "rows are taken back": lambda pool, _: pool.rollback("b", length=20),
    "a prefix is held": lambda pool, _: pool.hold_prefix("b", 30),
    "a prefix is released": lambda pool, held: pool.release_prefix(held["prefix"]),
}


CHECKED = ("a step on a shared page", "an import", "a request goes", "rows are taken back")


@pytest.mark.parametrize(
    ("what", "debug"), [*((what, "0") for what in CALLS | MORE_CALLS), *((what, "1") for what in CHECKED)]
)
def test_a_call_that_stops_at_any_line_has_happened_or_not(
    make_serving: Any, draw_tokens: Any, record_property: Any, monkeypatch: pytest.MonkeyPatch, what: str, debug: str
) -> None:
    """Accounts are those before the call or those after it, never in between, and what is in use keeps its bytes."""
    monkeypatch.setenv("FLASHQSA_DEBUG", debug)

    def make() -> tuple[PagedPool, dict[str, Any]]:
        serving = make_serving(pages=30, rings=3)
        return serving.pool, fill(serving, draw_tokens(43))

    call, (pool, held) = (CALLS | MORE_CALLS)[what], make()
    call(pool, held)
    after, (pool, held) = accounts_of(pool), make()
    before, happened = accounts_of(pool), 0
    for number in range(1, MOST_CALLS):
        kept = in_use(pool)
        try:
            with stopped_at_line(number):
                call(pool, held)
        except KeyboardInterrupt:
            pool._accounts.check()
            if accounts_of(pool) == before:
                now = in_use(pool)
                assert all(torch.equal(now[n].view(torch.uint8), kept[n].view(torch.uint8)) for n in kept), number
                continue
            assert accounts_of(pool) == after, f"line {number}: neither before nor after"
            happened += 1
            pool, held = make()
        else:
            break
    else:
        pytest.fail("the call never ends")
    assert number - happened > 10, "hardly ever stopped before it had happened"
    record_property("calls stopped at a line", number - 1)
