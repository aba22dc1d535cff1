"""Fault 43: attention needs memory for its rows and selections, never for rows x context."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashqsa.attention import attend, attend_tokens
from flashqsa.attention.tiles import TILE_ROWS
from flashqsa.cache import LayerCache
from flashqsa.plan import StepPlan, plan_step
from flashqsa.results import Selection
from flashqsa.selection import expand_tokens

PAGE_TOKENS = 64
Q_HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


class Allocations(TorchDispatchMode):
    """Bytes of tensors made inside it: of the largest, of all that lived at once, and of all together."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.peak = self.total = 0
        self._alive: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() in known:
            return out
        self._alive = [(storage, size) for storage, size in self._alive if not storage.expired()]
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
                storage = made.untyped_storage()
                known.add(storage.data_ptr())
                self._alive.append((StorageWeakRef(storage), storage.nbytes()))
                self.largest = max(self.largest, storage.nbytes())
                self.total += storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._alive))
        return out


class Long:
    """One request of a length with its last rows in the step; a row selects one block in each of K ranges of its past.

    Related rows that see the same ranges select the same blocks, unrelated ones any.
    """

    def __init__(self, context: int, rows: int, topk: int, *, related: bool = False, gradients: bool = False) -> None:
        generator = torch.Generator().manual_seed(43)
        pages = -(-context // PAGE_TOKENS)
        table = torch.randperm(pages, generator=generator).to(torch.int32)[None]
        k, v = (torch.randn(pages, PAGE_TOKENS, KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2))
        self.q = torch.randn(rows, Q_HEADS, HEAD_DIM, generator=generator).requires_grad_(gradients)
        self.cache = LayerCache(k.requires_grad_(gradients), v.requires_grad_(gradients), None, None, None)
        self.plan: StepPlan = plan_step(
            torch.tensor([0, rows], dtype=torch.int32), torch.tensor([context], dtype=torch.int32), table,
            page_tokens=PAGE_TOKENS, block_tokens=4, topk_blocks=topk, max_query_len=rows, max_seq_len=context,
        )  # fmt: skip
        self.plan.check_cache("test", self.cache)
        visible, column = self.plan.visible_blocks.long(), torch.arange(topk)[None]
        counts = visible.clamp(max=topk)
        step = (visible // counts.clamp(min=1))[:, None]
        places = torch.rand(1 if related else rows, topk, generator=generator)
        spread = column * step + (places * step).long()
        block_ids = torch.where(column < counts[:, None], spread, -1).to(torch.int32)
        self.selection = Selection(
            block_ids, counts.to(torch.int32), None, visible.to(torch.int32), self.plan.request_ids.clone()
        )


def _measured(work: Callable[[], Any]) -> Allocations:
    allocations = Allocations()
    with allocations:
        kept = work()
    del kept
    return allocations


def test_allocations_counts_what_is_alive_at_once() -> None:
    def work() -> torch.Tensor:
        first = torch.zeros(1000)
        second = first[::2] + 1
        del first
        return second.view(-1, 2) * 2

    allocations = _measured(work)
    assert (allocations.largest, allocations.peak, allocations.total) == (4000, 6000, 8000)


@pytest.mark.parametrize("rows", [1, 4], ids=["decode", "verify"])
@pytest.mark.parametrize("row_exact", [False, True])
def test_fault_43_short_steps_need_the_same_at_any_context(rows: int, row_exact: bool) -> None:
    peaks = []
    for context in (16384, 65536, 262144):
        long = Long(context, rows, 64)
        peaks.append(
            _measured(lambda s=long: attend(s.q, s.cache, s.selection, s.plan, row_exact=row_exact)).peak  # type: ignore[misc]
        )
    assert max(peaks) <= 1.2 * min(peaks), peaks


def test_fault_43_chunks_need_no_rows_times_context(choose: Any) -> None:
    """A tile of unrelated rows: at most what its rows selected, whatever the context."""
    rows, topk = 4 * TILE_ROWS, 16
    selected = TILE_ROWS * (topk + 1) * 4
    for context in (16384, 262144):
        long = Long(context, rows, topk)
        use = _measured(lambda s=long: attend(s.q, s.cache, s.selection, s.plan))  # type: ignore[misc]
        token_bytes = 8 * 8 + 2 * KV_HEADS * HEAD_DIM * 4 + 3 * TILE_ROWS  # integers, a key and a value, masks
        piece_bytes = 3 * 1024 * TILE_ROWS * Q_HEADS * 4
        values = 8 * rows * topk * 8 + 4 * rows * Q_HEADS * HEAD_DIM * 4  # checks of the ids, and the result
        assert use.peak <= selected * token_bytes + piece_bytes + values, f"{use.peak} bytes at {context}"
        assert use.largest < rows * context // 8, f"{use.largest} bytes in one tensor at {context}"


def test_fault_43_token_lists_need_no_rows_times_context() -> None:
    uses = []
    for context in (16384, 262144):
        long = Long(context, 2 * TILE_ROWS, 16)
        token_ids = expand_tokens(long.selection, long.plan)
        uses.append(_measured(lambda s=long, t=token_ids: attend_tokens(s.q, s.cache, t, s.plan)).peak)  # type: ignore[misc]
    assert uses[1] <= 1.6 * uses[0], uses


def test_fault_43_a_long_prefill_stays_linear() -> None:
    """32,768 rows on the CPU: beside the result no more memory than 8,192 need, and four times the traffic."""
    uses = {}
    for rows in (8192, 32768):
        long = Long(rows, rows, 16, related=True)
        uses[rows] = _measured(lambda s=long: attend(s.q, s.cache, s.selection, s.plan))  # type: ignore[misc]
        whole = 8 * rows * 16 + rows * Q_HEADS * (HEAD_DIM + 1) * 4  # checks of the ids, output and lse
        assert uses[rows].peak <= 12 * whole, f"{uses[rows].peak} bytes for {rows} rows"
    assert uses[32768].peak <= 4.2 * uses[8192].peak
    assert uses[32768].total <= 5 * uses[8192].total, (uses[32768].total, uses[8192].total)
    assert uses[32768].largest < 32768 * 32768 // 64


def test_fault_43_gradients_stay_linear() -> None:
    """Four times the rows: four times the traffic forward and backward, and nothing kept per tile."""
    uses = {}
    for rows in (2048, 8192):
        long = Long(rows, rows, 16, related=True, gradients=True)
        uses[rows] = _measured(lambda s=long: attend(s.q, s.cache, s.selection, s.plan).sum().backward())  # type: ignore[misc,union-attr]
    assert uses[8192].total <= 5.5 * uses[2048].total, (uses[8192].total, uses[2048].total)
    assert uses[8192].peak <= 4.5 * uses[2048].peak, (uses[8192].peak, uses[2048].peak)
