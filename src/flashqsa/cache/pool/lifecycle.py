"""The requests of a pool: opened, forked, rolled back, closed, and what they share."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from numbers import Integral

from flashqsa.cache.pool import checking
from flashqsa.cache.pool.accounts import Account, PoolAccounts, Prefix
from flashqsa.cache.pool.memory import PoolMemory
from flashqsa.checks import expect_int, expect_type
from flashqsa.errors import ArgumentError


class PoolLifecycle:
    """What `PagedPool` does with requests between steps. Arguments and errors of a call are checked before it writes.

    Args:
        memory: The tensors.
        accounts: Who owns what in them.
        poison: Whether free memory is filled with NaN, also without ``FLASHQSA_DEBUG=1``.
    """

    def __init__(self, memory: PoolMemory, accounts: PoolAccounts, *, poison: bool) -> None:
        self._memory, self._accounts, self._poison_free = memory, accounts, poison
        self._free_memory, self._written_pages = checking.FreeMemory(memory), checking.WrittenPages(memory)
        self._freed(range(len(accounts.holders)), accounts.free_ring_ids)

    @property
    def num_pages(self) -> int:
        """Pages in all."""
        return len(self._accounts.holders)

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._accounts.free_page_ids)

    @property
    def free_rings(self) -> int:
        """Requests that can still be opened."""
        return len(self._accounts.free_ring_ids)

    @property
    def requests(self) -> tuple[Hashable, ...]:
        """Names of the open requests, oldest first."""
        return tuple(self._accounts.accounts)

    def length(self, request: Hashable) -> int:
        """Tokens of a request, those of the step planned last included.

        Raises:
            ArgumentError: It is not open.
        """
        return self._accounts.account("PagedPool.length", request).length

    def page_ids(self, request: Hashable) -> list[int]:
        """Pages of a request, in the order of its tokens; the last ones may be reserved for tokens to come.

        Raises:
            ArgumentError: It is not open.
        """
        return list(self._accounts.account("PagedPool.page_ids", request).page_ids)

    def ring_id(self, request: Hashable) -> int:
        """Ring of a request.

        Raises:
            ArgumentError: It is not open.
        """
        return self._accounts.account("PagedPool.ring_id", request).ring_id

    def open(self, request: Hashable, *, prefix_of: Hashable | Prefix | None = None, tokens: int | None = None) -> int:
        """Open a request, empty or with the first tokens of another one: a prefix hit.

        The pages of the prefix are shared. The ring is not, because it belongs to one request: where the open block at
        `tokens` began before it, its raw keys are copied from the ring of `prefix_of` if that still holds them;
        otherwise the hit is cut to whole blocks and the remaining tokens have to be run again.

        Args:
            request: Its name, any hashable value.
            prefix_of: An open request, or a `Prefix` from `hold_prefix`, whose first tokens are the same.
            tokens: How many of them, all that `prefix_of` has by default.

        Returns:
            Tokens that the request has now, 0 without a prefix: the first row to run.

        Raises:
            ArgumentError: The name is taken, the prefix is not open or not held, or is shorter than `tokens`.
            PoolFullError: No ring is free.
        """
        where, accounts = "PagedPool.open", self._accounts
        accounts.expect_new(where, request)
        if prefix_of is None:
            if tokens is not None:
                raise ArgumentError(f"{where}: tokens must come with prefix_of, got {tokens!r} alone. Name the prefix.")
            return self._add(where, request, None, 0)
        if isinstance(prefix_of, Prefix):
            self._expect_held(where, prefix_of)
            has: int = prefix_of.tokens
        else:
            has = accounts.account(where, prefix_of, "prefix_of").length
        length = _tokens(where, tokens, has)
        source = prefix_of if isinstance(prefix_of, Prefix) else accounts.accounts[prefix_of]
        if isinstance(source, Prefix) or not accounts.ring_holds(source, length):
            length = accounts.block_start(length)
        return self._add(where, request, source, length)

    def fork(self, request: Hashable, new_request: Hashable) -> None:
        """Open a second request with all that a first one has: pages shared until one of them writes, the ring copied.

        Args:
            request: The request.
            new_request: Name of the second one.

        Raises:
            ArgumentError: The first is not open, or the name is taken.
            PoolFullError: No ring is free.
        """
        where = "PagedPool.fork"
        account = self._accounts.account(where, request)
        self._accounts.expect_new(where, new_request, "new_request")
        self._add(where, new_request, account, account.length)

    def close(self, request: Hashable) -> None:
        """Close a request. Pages that nobody else holds are free again, and so is its ring.

        Raises:
            ArgumentError: It is not open.
        """
        account = self._accounts.account("PagedPool.close", request)
        self._freed(self._accounts.remove(account), [account.ring_id], account, account.page_ids)
        self._written_pages.forget(account)

    def hold_prefix(self, request: Hashable, tokens: int | None = None) -> Prefix:
        """Keep the first tokens of a request in the pool after it is closed, for later requests with that prefix.

        Args:
            request: The request.
            tokens: How many, all by default; cut to whole blocks, because a prefix has no ring.

        Returns:
            The prefix. It holds its pages until `release_prefix`.

        Raises:
            ArgumentError: The request is not open, or shorter than `tokens`.
        """
        where, accounts = "PagedPool.hold_prefix", self._accounts
        account = accounts.account(where, request)
        length = accounts.block_start(_tokens(where, tokens, account.length))
        self._expect_written(where, account)
        prefix = Prefix(length, tuple(account.page_ids[: accounts.pages_of(length)]))
        accounts.hold(prefix)
        self._freed([], [])
        return prefix

    def release_prefix(self, prefix: Prefix) -> None:
        """Give a held prefix back. Pages that nobody else holds are free again.

        Raises:
            ArgumentError: It is not held, or not by this pool.
        """
        self._expect_held("PagedPool.release_prefix", prefix)
        self._freed(self._accounts.release(prefix), [])

    def rollback(self, request: Hashable, *, length: int | None = None, rows: int | None = None) -> None:
        """Take rows of a request back: rejected drafts, an aborted step, a conversation cut short.

        Up to `speculative_rows` rows behind the longest length that the request had can always be taken back, at once
        or bit by bit. Beyond, it may go to any multiple of the block size, and to other lengths as long as the ring
        holds the block that is open there.

        Args:
            request: The request.
            length: Tokens that remain; give this or `rows`.
            rows: How many of the last tokens go.

        Raises:
            ArgumentError: The request is not open, the length is out of range, or the ring has lost the block that
                would be open.
        """
        where, accounts = "PagedPool.rollback", self._accounts
        account = accounts.account(where, request)
        if (length is None) == (rows is None):
            both = "neither" if length is None else "both"
            raise ArgumentError(f"{where}: exactly one of length and rows must be given, got {both}. Give one of them.")
        name, number = ("length", length) if rows is None else ("rows", rows)
        if not isinstance(number, Integral) or isinstance(number, bool) or not 0 <= number <= account.length:
            raise ArgumentError(
                f"{where}: {name} must be in [0, {account.length}] for request {request!r}, got {number!r}. "
                "A request only becomes shorter."
            )
        target = int(number) if rows is None else account.length - int(number)
        if not accounts.ring_holds(account, target):
            r, began = accounts.block_tokens, accounts.block_start(target)
            least = -(-account.ring_start // r) * r
            raise ArgumentError(
                f"{where}: length must be at least {least} or a multiple of {r} for request {request!r}, got {target}. "
                f"The ring holds raw index keys from token {account.ring_start} on only; roll back to {began} and run "
                "the tokens after it again."
            )
        was, had = account.length, account.page_ids[:]
        freed = accounts.cut(account, target)
        if self._poisons():
            self._poison_cut(account, was)
        self._freed(freed, [], account, had)

    def _add(self, where: str, request: Hashable, source: Account | Prefix | None, length: int) -> int:
        """Open a request with the first tokens of a source."""
        accounts = self._accounts
        accounts.expect_ring(where)
        ring_id, page_ids, ring_start, checked = accounts.free_ring_ids[-1], array("i"), length, 0
        if source is not None:
            page_ids, checked = array("i", source.page_ids[: accounts.pages_of(length)]), length
        if isinstance(source, Account):
            self._expect_written(where, source)
            checked = min(source.checked, length)
        self._free_memory.take(where, [], [ring_id])
        if isinstance(source, Account) and accounts.ring_holds(source, length):
            ring_start = min(source.ring_start, length)
            self._memory.copy_ring(source.ring_id, ring_id)
        else:
            self._memory.forget_ring(ring_id)
        accounts.add(request, page_ids, length, ring_start, checked)
        self._freed([], [])
        return length

    def _expect_held(self, where: str, prefix: Prefix) -> None:
        expect_type(where, "prefix", prefix, Prefix, hint="hold_prefix gives one.")
        if prefix not in self._accounts.prefixes:
            raise ArgumentError(f"{where}: prefix must be held by this pool, got {prefix}. It may have been released.")

    def _expect_written(self, where: str, account: Account) -> None:
        if checking.debugging():
            self._written_pages.check(where, account, self._accounts)

    def _freed(
        self, page_ids: Sequence[int], ring_ids: Sequence[int], account: Account | None = None, had: Sequence[int] = ()
    ) -> None:
        """After every change: poison what became free, with the pages that its owner had, and check the accounts."""
        if self._poisons():
            self._poison(page_ids, ring_ids, account, had)
        if checking.debugging():
            self._accounts.check()

    def _poisons(self) -> bool:
        return self._poison_free or checking.debugging()

    def _poison(
        self, page_ids: Sequence[int], ring_ids: Sequence[int], account: Account | None = None, had: Sequence[int] = ()
    ) -> None:
        self._free_memory.poison(page_ids, ring_ids, account, had, self._accounts.page_tokens)

    def _poison_cut(self, account: Account, was: int) -> None:
        """Poison the rows that a rollback took back, where nobody else reads them."""
        page_tokens = self._accounts.page_tokens
        if account.length % page_tokens and self._accounts.holders[account.page_ids[-1]] == 1:
            self._memory.poison_rows(account.page_ids[-1], account.length % page_tokens)
        tokens = range(max(account.length, was - self._accounts.ring_tokens), was)
        self._memory.poison_ring(account.ring_id, tokens)


def _tokens(where: str, tokens: int | None, has: int) -> int:
    """How much of a prefix is meant."""
    if tokens is None:
        return has
    expect_int(where, "tokens", tokens)
    if tokens > has:
        raise ArgumentError(f"{where}: tokens must be at most the {has} that are there, got {tokens}. Ask for fewer.")
    return int(tokens)
