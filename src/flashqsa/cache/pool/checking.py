"""What ``FLASHQSA_DEBUG=1`` looks at: rows never written, memory that somebody else wrote, plans that are not owned."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from flashqsa.cache.pool.accounts import Account, PoolAccounts
from flashqsa.cache.pool.memory import FP8_NAN, NO_POSITION, PoolMemory, raw
from flashqsa.checks import FP8, expect_type
from flashqsa.errors import ArgumentError

if TYPE_CHECKING:
    from flashqsa.plan import StepPlan

PAGED = ("k_pages", "v_pages", "block_keys")
Left = tuple[Hashable, int]
"""Who had a page last, and which of its tokens came first there."""


def debugging() -> bool:
    """Whether freed memory is poisoned and values are read back."""
    return os.environ.get("FLASHQSA_DEBUG") == "1"


class FreeMemory:
    """Free pages and rings that were filled with NaN: until they are taken again, nobody may write them.

    Args:
        memory: The tensors.
    """

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._pages: dict[int, Left | None] = {}
        self._rings: dict[int, Hashable] = {}

    def poison(self, page_ids: Iterable[int], ring_ids: Iterable[int], account: Account | None, had: Sequence[int],
               page_tokens: int) -> None:  # fmt: skip
        """Fill pages and rings that became free.

        Args:
            page_ids: The pages.
            ring_ids: The rings.
            account: Who had them, or None.
            had: The pages of `account` before, in order.
            page_tokens: Tokens of a page.
        """
        columns = {page: column for column, page in enumerate(had)}
        for page in page_ids:
            self._memory.poison_rows(page)
            self._pages[page] = None if account is None else (account.request, columns[page] * page_tokens)
        for ring_id in ring_ids:
            self._memory.poison_ring(ring_id)
            self._rings[ring_id] = None if account is None else account.request

    def take(self, where: str, page_ids: Sequence[int], ring_ids: Sequence[int]) -> None:
        """Before free pages and rings are written. With ``FLASHQSA_DEBUG=1`` waits for the device.

        Raises:
            ArgumentError: Somebody wrote there while they were free.
        """
        page_ids = [page for page in page_ids if page in self._pages]
        ring_ids = [ring_id for ring_id in ring_ids if ring_id in self._rings]
        if debugging():
            for page in page_ids:
                self._check_page(where, page)
            for ring_id in ring_ids:
                self._check_ring(where, ring_id)
        for page in page_ids:
            del self._pages[page]
        for ring_id in ring_ids:
            del self._rings[ring_id]

    def _check_page(self, where: str, page: int) -> None:
        memory, left = self._memory, self._pages[page]
        for name, tensor, tokens in zip(PAGED, memory.paged, (1, 1, memory.layout.block_tokens), strict=True):
            written = ~_is_nan(tensor[:, page]).flatten(2).all(dim=2)
            if bool(written.any()):
                layer, row = (int(i) for i in written.nonzero()[0])
                owner = "" if left is None else f", once token {left[1] + row * tokens} of request {left[0]!r}"
                raise ArgumentError(
                    f"{where}: free pages must not be written, got values in {name} of layer "
                    f"{memory.caches[layer].layer_id} in row {row} of page {page}{owner}. A step ran after its request "
                    "was closed or rolled back; check_plan before a step finds it."
                )

    def _check_ring(self, where: str, ring_id: int) -> None:
        positions = (self._memory.ring_positions[:, ring_id] != NO_POSITION).any(dim=2)
        written = positions | ~_is_nan(self._memory.ring[:, ring_id]).all(dim=2)
        if bool(written.any()):
            layer, place = (int(i) for i in written.nonzero()[0])
            owner = self._rings[ring_id]
            was = "" if owner is None else f", once that of request {owner!r}"
            raise ArgumentError(
                f"{where}: free rings must not be written, got values in layer {self._memory.caches[layer].layer_id} "
                f"at place {place} of ring {ring_id}{was}. A step ran after its request was closed; check_plan before "
                "a step finds it."
            )


class WrittenPages:
    """Full pages of open requests: once they have been looked at, nobody may write them.

    Args:
        memory: The tensors.
    """

    def __init__(self, memory: PoolMemory) -> None:
        self._memory = memory
        self._sums: dict[Account, torch.Tensor] = {}

    def check(self, where: str, account: Account, accounts: PoolAccounts) -> None:
        """Raise unless a request has all its rows, and has kept those that it had. Waits for the device.

        Raises:
            ArgumentError: As `check_written`; or a full page holds other bytes than before.
        """
        page_tokens = accounts.page_tokens
        sums = self._sums.get(account)
        if sums is not None:
            sums = sums[:, :, : account.checked // page_tokens]  # what was taken back may be written again
            changed = self._sums_of(account.page_ids[: sums.shape[2]]) != sums
            if bool(changed.any()):
                column, name, layer = (int(i) for i in changed.permute(2, 0, 1).nonzero()[0])
                first = column * page_tokens
                raise ArgumentError(
                    f"{where}: request {account.request!r} must keep what was written, got other bytes in "
                    f"{PAGED[name]} of layer {self._memory.caches[layer].layer_id} in tokens {first} to "
                    f"{first + page_tokens - 1}. A step ran on pages that were no longer its own; check_plan before a "
                    "step finds it."
                )
        check_written(where, account, accounts, self._memory)
        known = 0 if sums is None else sums.shape[2]
        new = self._sums_of(account.page_ids[known : account.length // page_tokens])
        self._sums[account] = new if sums is None else torch.cat([sums, new], dim=2)

    def forget(self, account: Account) -> None:
        """A request is closed."""
        self._sums.pop(account, None)

    def _sums_of(self, page_ids: Sequence[int]) -> torch.Tensor:
        """[3, layers, pages] weighted sums of all bytes."""
        sums = []
        pages = torch.tensor(page_ids, dtype=torch.int64, device=self._memory.k.device)
        for tensor in self._memory.paged:
            rows = raw(tensor)[:, pages].view(torch.uint8).sum(dim=-1).flatten(2)
            weights = torch.arange(1, rows.shape[2] + 1, device=rows.device)
            sums.append((rows * weights).sum(dim=2))
        return torch.stack(sums)


def check_written(where: str, account: Account, accounts: PoolAccounts, memory: PoolMemory) -> None:
    """Raise unless every layer has written the tokens that were planned since the last check. Waits for the device.

    Raises:
        ArgumentError: A key, a value or a block key is NaN: the poison of free memory, or one that the model made.
    """
    page_tokens, r = accounts.page_tokens, accounts.block_tokens
    for column in range(account.checked // page_tokens, accounts.pages_of(account.length)):
        page, began = account.page_ids[column], column * page_tokens
        first, end = max(account.checked - began, 0), min(account.length - began, page_tokens)
        for name, tensor, tokens in zip(PAGED, memory.paged, (1, 1, r), strict=True):
            rows = slice(first // tokens, end // tokens)
            bad = _is_nan(tensor[:, page, rows]).flatten(2).any(dim=2)
            if bool(bad.any()):
                layer, row = (int(i) for i in bad.nonzero()[0])
                token = began + (rows.start + row) * tokens
                raise ArgumentError(
                    f"{where}: request {account.request!r} must be written up to its length {account.length} in layer "
                    f"{memory.caches[layer].layer_id}, got NaN in {name} at token {token}. Run every layer of a "
                    "planned step before the next call; if they ran, the model made NaN there."
                )
    account.checked = account.length


def _is_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) & FP8_NAN == FP8_NAN if tensor.dtype == FP8 else tensor.isnan()


def check_plan(where: str, plan: StepPlan, accounts: PoolAccounts) -> None:
    """Raise unless a plan is the last one of its requests: lengths agree, and pages and rings are theirs.

    Raises:
        ArgumentError: It is not.
    """
    from flashqsa.plan import StepPlan  # at call time: the planner itself imports the cache layout

    expect_type(where, "plan", plan, StepPlan, hint="PagedPool.plan_step makes one.")
    if plan.page_table is None or plan.ring_ids is None:
        raise ArgumentError(f"{where}: plan must have a page table and rings, got one without. Pass a plan of a pool.")
    lens, rings, table = plan.seq_lens.tolist(), plan.ring_ids.tolist(), plan.page_table
    owners = {account.ring_id: account for account in accounts.accounts.values()}
    for number, (seq_len, ring_id) in enumerate(zip(lens, rings, strict=True)):
        if not seq_len:
            continue
        account = owners.get(ring_id)
        if account is None:
            raise ArgumentError(
                f"{where}: ring_ids must be rings of open requests, got ring {ring_id} for request {number} of the "
                "plan, which is free. The request was closed after the step was planned."
            )
        if account.length != seq_len:
            raise ArgumentError(
                f"{where}: seq_lens must be the lengths that the pool has, got {seq_len} for request "
                f"{account.request!r} of {account.length} tokens. Run a step before the next call for its requests."
            )
        pages = accounts.pages_of(seq_len)
        for column, page in enumerate(table[number, :pages].tolist()):
            if column >= len(account.page_ids) or account.page_ids[column] != page:
                owned = account.page_ids[column] if column < len(account.page_ids) else None
                raise ArgumentError(
                    f"{where}: page_table must hold the pages of request {account.request!r}, got page {page} for its "
                    f"tokens from position {column * accounts.page_tokens} on, whose page is {owned}. "
                    "Run a step before the next call for its requests."
                )
