"""Who owns which page and which ring, and how long every request is: host integers, no tensors."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from flashqsa.cache.pool.undo import AtOnce
from flashqsa.errors import ArgumentError, FlashQSAError


class PoolFullError(FlashQSAError, MemoryError):
    """The pool has too few free pages or rings for a call; nothing was changed."""


@dataclass(eq=False)
class Account:
    """What one open request owns.

    Attributes:
        request: Its name.
        ring_id: Its ring, private to it.
        page_ids: int32 pages of its tokens, in order; some may be shared with others.
        length: Tokens, those of the step planned last included.
        ring_start: The ring holds the raw index keys of tokens [ring_start, length).
        checked: Tokens known to be written in every layer; kept up with ``FLASHQSA_DEBUG=1`` only.
    """

    request: Hashable
    ring_id: int
    page_ids: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    ring_start: int = 0
    checked: int = 0


@dataclass(frozen=True, eq=False)
class Prefix:
    """Pages that stay without a request. Made by `PagedPool.hold_prefix`, given back by `PagedPool.release_prefix`.

    Attributes:
        tokens: Tokens that it holds, a multiple of the block size.
        page_ids: Pages of those tokens, in order.
    """

    tokens: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True)
class Taken:
    """A page that a request gets.

    Attributes:
        account: The request.
        column: Place in its page list.
        source: The shared page that it replaces and copies, or None for a fresh one.
        page_id: The page.
    """

    account: Account
    column: int
    source: int | None
    page_id: int


class PoolAccounts:
    """Page reference counts, free lists, requests and held prefixes of one pool.

    Attributes:
        free_page_ids: Pages that nobody holds; the last one is taken first.
        free_ring_ids: Rings that nobody has; the last one is taken first.
        holders: How many requests and prefixes hold each page.
        accounts: Open requests by name.
        prefixes: Held prefixes.
    """

    def __init__(self, num_pages: int, num_rings: int, *, page_tokens: int, block_tokens: int, ring_tokens: int):
        self.page_tokens, self.block_tokens, self.ring_tokens = page_tokens, block_tokens, ring_tokens
        self.free_page_ids = list(range(num_pages - 1, -1, -1))
        self.free_ring_ids = list(range(num_rings - 1, -1, -1))
        self.holders = [0] * num_pages
        self.accounts: dict[Hashable, Account] = {}
        self.prefixes: set[Prefix] = set()

    def account(self, where: str, request: Hashable, name: str = "request") -> Account:
        """The account of an open request.

        Raises:
            ArgumentError: No such request is open.
        """
        account = self.accounts.get(request) if _is_name(request) else None
        if account is None:
            raise ArgumentError(
                f"{where}: {name} must be open, got {request!r}. Open it first; it may have been closed."
            )
        return account

    def expect_new(self, where: str, request: Hashable, name: str = "request") -> None:
        """Raise unless a name is free.

        Raises:
            ArgumentError: It is taken, or cannot be a key; or it is None, which means no request elsewhere.
        """
        if request is None or not _is_name(request):
            raise ArgumentError(
                f"{where}: {name} must be hashable and not None, got {request!r}. Name requests by numbers or strings."
            )
        if request in self.accounts:
            raise ArgumentError(
                f"{where}: {name} must not be open yet, got {request!r}. Close it first, or choose another name."
            )

    def pages_of(self, tokens: int) -> int:
        """Pages that hold some tokens."""
        return -(-tokens // self.page_tokens)

    def block_start(self, tokens: int) -> int:
        """First token of the block that is open after some tokens; `tokens` itself when none is."""
        return tokens - tokens % self.block_tokens

    def expect_ring(self, where: str) -> None:
        """Raise unless a ring is free.

        Raises:
            PoolFullError: All rings are taken.
        """
        if not self.free_ring_ids:
            raise PoolFullError(
                f"{where}: num_rings must allow one more request, got {len(self.accounts)} open requests and no free "
                "ring. Close a request, or make a pool with more rings."
            )

    def expect_pages(self, where: str, needed: int) -> None:
        """Raise unless some pages are free.

        Raises:
            PoolFullError: There are fewer.
        """
        if needed > len(self.free_page_ids):
            raise PoolFullError(
                f"{where}: free pages must cover the {needed} that the call takes, got {len(self.free_page_ids)}. "
                "Close, roll back or release something first, or make a larger pool."
            )

    def pages_needed(self, work: Sequence[tuple[Account, int]]) -> int:
        """Free pages that new rows take: fresh ones, and copies of shared ones that they would write to.

        Args:
            work: Requests and how many rows each adds, however many.
        """
        return _pages_of(self._needs(work))

    def _needs(self, work: Iterable[tuple[Account, int]]) -> list[tuple[list[int], int]]:
        """For each request, places of its page list whose page is shared and would be written to, and fresh pages."""
        left: dict[int, int] = {}  # pages that this very step stops sharing
        needs: list[tuple[list[int], int]] = []
        for account, rows in work:
            has, shared = len(account.page_ids), list[int]()
            end = self.pages_of(account.length + rows) if rows else 0
            for column in range(account.length // self.page_tokens, min(end, has)):
                page = account.page_ids[column]
                if self.holders[page] - left.get(page, 0) > 1:
                    left[page] = left.get(page, 0) + 1
                    shared.append(column)
            needs.append((shared, max(end - has, 0)))
        return needs

    def choose(self, where: str, work: Sequence[tuple[Account, int]]) -> list[Taken]:
        """Pages for new rows, in the order of `work`. Nothing changes until `take`.

        Raises:
            PoolFullError: There are too few.
        """
        needs = self._needs(work)
        self.expect_pages(where, _pages_of(needs))
        free, chosen = reversed(self.free_page_ids), []
        for (account, _), (shared, fresh) in zip(work, needs, strict=True):
            chosen += [Taken(account, column, account.page_ids[column], next(free)) for column in shared]
            first = len(account.page_ids)
            chosen += [Taken(account, column, None, next(free)) for column in range(first, first + fresh)]
        return chosen

    def take(self, chosen: Sequence[Taken], work: Sequence[tuple[Account, int]] = ()) -> None:
        """Give chosen pages to their requests, and count new rows; a ring keeps the last of them.

        Args:
            chosen: What `choose` gave.
            work: Requests and how many rows each adds.
        """
        touched = [page for taken in chosen for page in (taken.page_id, taken.source) if page is not None]
        changed = [*(taken.account for taken in chosen), *(account for account, _ in work)]
        with AtOnce(self, touched, taken=len(chosen), changed=list(dict.fromkeys(changed))):
            del self.free_page_ids[len(self.free_page_ids) - len(chosen) :]
            for taken in chosen:
                self.holders[taken.page_id] = 1
                if taken.source is None:
                    taken.account.page_ids.append(taken.page_id)
                else:
                    taken.account.page_ids[taken.column] = taken.page_id
                    self.holders[taken.source] -= 1
            for account, rows in work:
                account.length += rows
                account.ring_start = max(account.ring_start, account.length - self.ring_tokens)

    def add(self, request: Hashable, page_ids: Sequence[int], length: int, ring_start: int, checked: int) -> None:
        """Open a request on pages that it joins in holding, with the ring that is next. A ring is free."""
        with AtOnce(self, page_ids):
            self._add(request, page_ids, length, ring_start, checked)

    def _add(self, request: Hashable, page_ids: Sequence[int], length: int, ring_start: int, checked: int) -> None:
        self.accounts[request] = Account(request, self.free_ring_ids.pop(), array("i", page_ids), length, ring_start,
                                         checked)  # fmt: skip
        for page in page_ids:
            self.holders[page] += 1

    def next_pages(self, count: int) -> list[int]:
        """The pages that are taken next. As many are free."""
        return self.free_page_ids[len(self.free_page_ids) - count :][::-1]

    def add_fresh(self, request: Hashable, length: int, ring_start: int) -> None:
        """Open a request on the pages and the ring that are next. They are free."""
        page_ids = self.next_pages(self.pages_of(length))
        with AtOnce(self, page_ids, taken=len(page_ids)):
            del self.free_page_ids[len(self.free_page_ids) - len(page_ids) :]
            self._add(request, page_ids, length, ring_start, length)

    def remove(self, account: Account) -> list[int]:
        """Close a request. Returns the pages that nobody holds any more."""
        with AtOnce(self, account.page_ids):
            del self.accounts[account.request]
            self.free_ring_ids.append(account.ring_id)
            return self._drop(account.page_ids)

    def _drop(self, page_ids: Sequence[int]) -> list[int]:
        """Let go of pages. Returns those that nobody holds any more, free now."""
        freed = []
        for page in reversed(page_ids):
            self.holders[page] -= 1
            if not self.holders[page]:
                freed.append(page)
        self.free_page_ids += freed
        return freed

    def hold(self, prefix: Prefix) -> None:
        """Hold the pages of a prefix."""
        with AtOnce(self, prefix.page_ids):
            self.prefixes.add(prefix)
            for page in prefix.page_ids:
                self.holders[page] += 1

    def release(self, prefix: Prefix) -> list[int]:
        """Let go of a prefix. Returns the pages that nobody holds any more."""
        with AtOnce(self, prefix.page_ids):
            self.prefixes.remove(prefix)
            return self._drop(prefix.page_ids)

    def cut(self, account: Account, length: int) -> list[int]:
        """Shorten a request. Returns the pages that nobody holds any more."""
        kept = self.pages_of(length)
        released = account.page_ids[kept:]
        with AtOnce(self, released, changed=[account]):
            account.length = length
            account.ring_start = min(account.ring_start, length)
            account.checked = min(account.checked, length)
            del account.page_ids[kept:]
            return self._drop(released)

    def ring_holds(self, account: Account, length: int) -> bool:
        """Whether the ring still holds the raw keys of the block that would be open at a length."""
        return length % self.block_tokens == 0 or account.ring_start <= self.block_start(length)

    def check(self) -> None:
        """Raise AssertionError when the accounts contradict themselves: a page lost, held twice, or never freed."""
        counted = [0] * len(self.holders)
        lists: list[Sequence[int]] = [account.page_ids for account in self.accounts.values()]
        lists += [prefix.page_ids for prefix in self.prefixes]
        for page_ids in lists:
            assert len(set(page_ids)) == len(page_ids), f"a page is listed twice: {list(page_ids)}"
            for page in page_ids:
                counted[page] += 1
        assert counted == self.holders, "reference counts differ from who holds the pages"
        assert sorted(self.free_page_ids) == [page for page, n in enumerate(counted) if not n], "free pages differ"
        rings = [account.ring_id for account in self.accounts.values()]
        assert sorted(self.free_ring_ids + rings) == list(range(len(rings) + len(self.free_ring_ids))), "rings differ"
        for name, account in self.accounts.items():
            assert name == account.request
            assert 0 <= account.ring_start <= account.length, f"{name!r}: ring from {account.ring_start}"
            assert account.length - account.ring_start <= self.ring_tokens, f"{name!r}: more than the ring holds"
            assert self.ring_holds(account, account.length), f"{name!r}: the open block is not in the ring"
            assert len(account.page_ids) >= self.pages_of(account.length), f"{name!r}: pages are missing"


def _pages_of(needs: Iterable[tuple[list[int], int]]) -> int:
    return sum(len(shared) + fresh for shared, fresh in needs)


def _is_name(request: object) -> bool:
    """Whether something can be a key: a tuple that holds a list says only when it is hashed that it cannot."""
    try:
        hash(request)
    except TypeError:
        return False
    return True
