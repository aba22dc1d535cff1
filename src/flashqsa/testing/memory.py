"""Hostile cache memory: shuffled pages, strided views in guarded buffers, rings with leftovers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flashqsa.testing.cases import StepCase
from flashqsa.testing.hostile import FLOAT_CANARY, Guarded, guarded, poison

if TYPE_CHECKING:
    from flashqsa.testing.truth import RequestTruth

SPARE_PAGES = 3
TABLE_MARGIN = 2


@dataclass(frozen=True)
class CacheMemory:
    """Main K/V and block keys of all requests, and where each request's tokens are.

    Attributes:
        k_pages: [P, page_tokens, Hkv, D] view; [R, longest, Hkv, D] when requests are contiguous.
        v_pages: The same for values.
        block_keys: [P, page_tokens / r, Di] view; [R, blocks, Di] when requests are contiguous.
        page_table: [R, pages] int32 view, or None.
        first_slots: [R] int64, or None with a page table.
        first_block_slots: [R] int64, or None with a page table.
        guards: The allocations.
        block_tokens: Tokens of a block.
    """

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_keys: torch.Tensor
    page_table: torch.Tensor | None
    first_slots: torch.Tensor | None
    first_block_slots: torch.Tensor | None
    guards: list[Guarded]
    block_tokens: int

    def token_slots(self, request_id: int, tokens: int) -> torch.Tensor:
        """[tokens] int64 slots of a request's first tokens."""
        return self._slots(request_id, tokens, self.k_pages.shape[1], self.first_slots)

    def block_slots(self, request_id: int, blocks: int) -> torch.Tensor:
        """[blocks] int64 block slots of a request's first blocks."""
        return self._slots(request_id, blocks, self.block_keys.shape[1], self.first_block_slots)

    def _slots(self, request_id: int, count: int, page_rows: int, first: torch.Tensor | None) -> torch.Tensor:
        if self.page_table is None:
            assert first is not None
            return torch.arange(count, device=first.device) + first[request_id]
        pages = self.page_table[request_id].tolist()
        slots = [pages[i // page_rows] * page_rows + i % page_rows for i in range(count)]
        return torch.tensor(slots, dtype=torch.int64, device=self.page_table.device)

    def store(self, truth: RequestTruth, tokens: int, case: StepCase) -> None:
        """Write the first `tokens` tokens of a request, and the blocks that they complete."""
        k_scale, v_scale = case.scales
        blocks = tokens // self.block_tokens
        for pages, slots, rows in (
            (self.k_pages, truth.slot_ids[:tokens], truth.k[:tokens] / k_scale),
            (self.v_pages, truth.slot_ids[:tokens], truth.v[:tokens] / v_scale),
            (self.block_keys, truth.block_slot_ids[:blocks], truth.block_keys[:blocks]),
        ):
            stored, target = rows.to(pages.dtype), pages
            if pages.dtype == torch.float8_e4m3fn:
                stored, target = stored.view(torch.uint8), pages.view(torch.uint8)
            target[slots // pages.shape[1], slots % pages.shape[1]] = stored


def make_cache_memory(case: StepCase, *, generator: torch.Generator, device: torch.device | str) -> CacheMemory:
    """Allocate the pool of a case and deal its pages out at random; everything is NaN until stored."""
    lens = case.seq_lens
    if case.contiguous:
        page_tokens = -(-max([*lens, 1]) // case.block_tokens) * case.block_tokens + 2 * case.block_tokens
        num_pages, table = max(len(lens), 1), None
    else:
        page_tokens = case.page_tokens
        needed = [-(-n // page_tokens) for n in lens]
        num_pages = sum(needed) + SPARE_PAGES
        table = _page_table(needed, num_pages, generator)
    k_pages, v_pages, guards = _kv_pages(case, num_pages, page_tokens, device)
    pads = (0, 0, 0) if case.layout == "dense" else (1, 1, 8)
    index_dtype = case.index_dtype or case.dtype
    shape = (num_pages, page_tokens // case.block_tokens, case.index_head_dim)
    guards.append(guarded(shape, index_dtype, padding=pads, device=device))
    block_keys = poison(guards[-1].view)
    if table is not None:
        guards.append(guarded(table.shape, torch.int32, padding=(1, 1), device=device))
        guards[-1].view.copy_(table)
        return CacheMemory(k_pages, v_pages, block_keys, guards[-1].view, None, None, guards, case.block_tokens)
    # A left pad that is no multiple of a block: slots of tokens and of blocks start at unrelated places.
    left = torch.randint(1, 2 * case.block_tokens, (num_pages,), generator=generator)
    order = torch.randperm(num_pages, generator=generator)
    first_slots = (order * page_tokens + left)[: len(lens)].to(device)
    first_block_slots = (order * block_keys.shape[1])[: len(lens)].to(device)
    return CacheMemory(k_pages, v_pages, block_keys, None, first_slots, first_block_slots, guards, case.block_tokens)


def _page_table(needed: list[int], num_pages: int, generator: torch.Generator) -> torch.Tensor:
    """[R, pages] int32: pages of all requests interleaved, garbage past a request's own."""
    free = torch.randperm(num_pages, generator=generator).tolist()
    width = max([*needed, 0]) + TABLE_MARGIN
    garbage = torch.tensor([-1, 2**31 - 1, -(2**31), num_pages, 0])
    picks = torch.randint(0, len(garbage), (len(needed), width), generator=generator)
    table = garbage[picks].to(torch.int32)
    for column in range(max([*needed, 0])):  # dealing by column interleaves the requests
        for request, pages in enumerate(needed):
            if column < pages:
                table[request, column] = free.pop()
    return table


def _kv_pages(
    case: StepCase, num_pages: int, page_tokens: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor, list[Guarded]]:
    dtype, heads, dim = case.kv_dtype or case.dtype, case.kv_heads, case.head_dim
    if case.layout == "packed":
        guard = guarded((num_pages, page_tokens, heads, 2 * dim), dtype, padding=(1, 1, 0, 0), device=device)
        both = poison(guard.view)
        return both[..., :dim], both[..., dim:], [guard]
    if case.layout == "hnd":
        guard = guarded((num_pages, 2, heads, page_tokens, dim), dtype, padding=(1, 0, 0, 1, 8), device=device)
        both = poison(guard.view).transpose(2, 3)
        return both[:, 0], both[:, 1], [guard]
    pads = (0, 0, 0, 0) if case.layout == "dense" else (1, 1, 1, 8)
    guards = [guarded((num_pages, page_tokens, heads, dim), dtype, padding=pads, device=device) for _ in range(2)]
    return poison(guards[0].view), poison(guards[1].view), guards


@dataclass(frozen=True)
class RingMemory:
    """Rings and ring positions, packed side by side in one buffer of bytes.

    Attributes:
        ring: [rings, ring_tokens, Di] view, model dtype.
        ring_positions: [rings, ring_tokens, 3] int64 view.
        ring_ids: Ring of each request, padding included (which point at rings in use, as leftovers do).
        guard: The allocation.
    """

    ring: torch.Tensor
    ring_positions: torch.Tensor
    ring_ids: list[int]
    guard: Guarded

    def store(self, truth: RequestTruth, case: StepCase, *, written: bool, generator: torch.Generator) -> None:
        """Fill the ring of a request: as rejected drafts left it, then with the step's own rows if `written`."""
        before, capacity = truth.context_before, case.ring_tokens
        drafts = case.speculative_rows
        for position in range(before, before + drafts):  # rejected rows of the step before
            values = torch.randn(case.index_head_dim, generator=generator).to(self.ring)
            self._put(truth.ring_id, position % capacity, values, torch.tensor([2**40, -5, 2**40]))
        kept = list(range(max(0, before - (capacity - drafts)), before))
        if written:
            kept += range(max(before, truth.seq_len - capacity), truth.seq_len)
        for position in kept:
            keys, positions = truth.raw_index_keys[position], truth.rope_positions[:, position]
            self._put(truth.ring_id, position % capacity, keys, positions)

    def _put(self, ring_id: int, place: int, keys: torch.Tensor, positions: torch.Tensor) -> None:
        self.ring[ring_id, place] = keys
        self.ring_positions[ring_id, place] = positions.to(self.ring_positions.device)


def make_ring_memory(case: StepCase, *, generator: torch.Generator, device: torch.device | str) -> RingMemory:
    """Allocate rings for all requests and two more, full of NaN and impossible positions."""
    num_rings = case.num_requests + 2
    key_bytes = case.index_head_dim * case.dtype.itemsize
    assert key_bytes % 8 == 0, "index_head_dim must fill whole 8-byte words"
    row_bytes = key_bytes + 3 * 8
    guard = Guarded((num_rings + 2) * (case.ring_tokens + 1) * row_bytes, FLOAT_CANARY, device)
    rows = guard.inner.view(num_rings + 2, case.ring_tokens + 1, row_bytes)[1:-1, : case.ring_tokens]
    ring = guard.cut(rows[..., :key_bytes].view(case.dtype))
    ring_positions = guard.cut(rows[..., key_bytes:].view(torch.int64))
    ring.fill_(float("nan"))
    ring_positions.fill_(2**40)
    order = torch.randperm(num_rings, generator=generator).tolist()
    live = len(case.requests)
    return RingMemory(ring, ring_positions, order[:live] + [order[0]] * case.padding_requests, guard)
