"""A change of the accounts that happens at once: stopped anywhere by a signal, it is taken back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashqsa.cache.pool.accounts import Account, PoolAccounts


class AtOnce:
    """``with AtOnce(...):`` what the block changed is taken back when it raises.

    It notes what may change before anything does. Free pages are only taken from the end of their list and only added
    there, so that the end is all that is noted of a list of perhaps a million.

    Args:
        accounts: What changes.
        page_ids: Pages whose holders may change.
        taken: Free pages that are taken at most.
        changed: Requests whose length, ring or pages may change.
    """

    def __init__(
        self, accounts: PoolAccounts, page_ids: Iterable[int], *, taken: int = 0, changed: Sequence[Account] = ()
    ) -> None:
        self._accounts = accounts
        self._kept = len(accounts.free_page_ids) - taken
        self._end = accounts.free_page_ids[self._kept :]
        self._holders = [(page, accounts.holders[page]) for page in page_ids]
        self._ring_ids = accounts.free_ring_ids[:]
        self._requests, self._prefixes = dict(accounts.accounts), set(accounts.prefixes)
        self._changed = [(a, a.page_ids[:], a.length, a.ring_start, a.checked) for a in changed]

    def __enter__(self) -> None:
        """Nothing to do: all has been noted."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            return
        accounts = self._accounts
        accounts.free_page_ids[self._kept :] = self._end
        accounts.free_ring_ids[:] = self._ring_ids
        for page, holders in self._holders:
            accounts.holders[page] = holders
        accounts.accounts, accounts.prefixes = self._requests, self._prefixes
        for account, page_ids, length, ring_start, checked in self._changed:
            account.page_ids, account.length = page_ids, length
            account.ring_start, account.checked = ring_start, checked
