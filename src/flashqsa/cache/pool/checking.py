"""What ``FLASHQSA_DEBUG=1`` looks at: rows that were planned but never written, and plans that are not the pool's."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from flashqsa.cache.pool.accounts import Account, PoolAccounts
from flashqsa.cache.pool.memory import FP8_NAN, PoolMemory
from flashqsa.checks import FP8
from flashqsa.errors import ArgumentError

if TYPE_CHECKING:
    from flashqsa.plan import StepPlan


def debugging() -> bool:
    """Whether freed memory is poisoned and values are read back."""
    return os.environ.get("FLASHQSA_DEBUG") == "1"


def check_written(where: str, account: Account, accounts: PoolAccounts, memory: PoolMemory) -> None:
    """Raise unless every layer has written the tokens that were planned since the last check. Waits for the device.

    Raises:
        ArgumentError: A key, a value or a block key is NaN: the poison of free memory, or one that the model made.
    """
    page_tokens, r = accounts.page_tokens, accounts.block_tokens
    for column in range(account.checked // page_tokens, accounts.pages_of(account.length)):
        page, began = account.page_ids[column], column * page_tokens
        first, end = max(account.checked - began, 0), min(account.length - began, page_tokens)
        for name, tensor, tokens, rows in (
            ("k_pages", memory.k, 1, slice(first, end)),
            ("v_pages", memory.v, 1, slice(first, end)),
            ("block_keys", memory.block_keys, r, slice(first // r, end // r)),
        ):
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
