"""`StepPlan`: the integers of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flashqsa.cache.state import LayerCache
from flashqsa.checks import values_are_checked
from flashqsa.errors import ArgumentError, DeviceError, ShapeError


@dataclass(frozen=True)
class RowGroup:
    """The rows of one request in a step, as host integers.

    Attributes:
        request_id: Row of `seq_lens` and `page_table`.
        first_row: First packed row.
        end_row: One past the last packed row.
        first_position: Token position of the first row; the others follow one by one.
    """

    request_id: int
    first_row: int
    end_row: int
    first_position: int

    @property
    def num_rows(self) -> int:
        """Rows of the group."""
        return self.end_row - self.first_row

    @property
    def end_position(self) -> int:
        """One past the token position of the last row."""
        return self.first_position + self.num_rows


@dataclass
class StepPlan:
    """Everything integer about one step. Built by `plan_step` or `from_tensors`, used by every layer.

    Padding rows have request -1, position -1, no visible block and no slot.

    Attributes:
        query_starts: [R + 1] int32, first packed row of each request, from 0.
        seq_lens: [R] int32, tokens of each request after this step; 0 for a padding request.
        page_table: [R, pages] int32 page ids, or None when requests are contiguous.
        first_slots: [R] int64, slot of each request's token 0, or None with a page table.
        first_block_slots: [R] int64, block slot of each request's block 0, or None with a page table.
        ring_ids: [R] int32 ring of each request, -1 for none; None when nothing is prepared through this plan.
        request_ids: [T] int32, request of each row.
        positions: [T] int64, token position of each row in its request.
        visible_blocks: [T] int32, complete blocks that each row sees: (position + 1) // block_tokens.
        slot_ids: [T] int64, slot that each row's K and V go to, -1 for none.
        closed_block_slot_ids: [T] int64, block slot of the block that the row closes, -1 when it closes none.
        ring_slot_ids: [T] int64, ring * ring_tokens + position % ring_tokens, -1 when the row is not kept.
        page_tokens: Tokens of a page; None when requests are contiguous.
        block_tokens: Tokens of a block.
        topk_blocks: Blocks that a row selects at most.
        max_query_len: Host bound on the rows of a request.
        max_seq_len: Host bound on `seq_lens`.
        num_pages: Pages of the pool, or None when not told.
        ring_tokens: Raw keys of a ring, or None.
    """

    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    page_table: torch.Tensor | None
    first_slots: torch.Tensor | None
    first_block_slots: torch.Tensor | None
    ring_ids: torch.Tensor | None
    request_ids: torch.Tensor
    positions: torch.Tensor
    visible_blocks: torch.Tensor
    slot_ids: torch.Tensor
    closed_block_slot_ids: torch.Tensor
    ring_slot_ids: torch.Tensor
    page_tokens: int | None
    block_tokens: int
    topk_blocks: int
    max_query_len: int
    max_seq_len: int
    num_pages: int | None = None
    ring_tokens: int | None = None
    _scratch: dict[tuple[str, tuple[int, ...], torch.dtype], torch.Tensor] = field(
        default_factory=dict, init=False, repr=False
    )
    _row_groups: list[RowGroup] | None = field(default=None, init=False, repr=False)
    _end_slots: tuple[int, int] | None = field(default=None, init=False, repr=False)

    @classmethod
    def from_tensors(
        cls,
        *,
        query_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        page_table: torch.Tensor,
        request_ids: torch.Tensor,
        positions: torch.Tensor,
        visible_blocks: torch.Tensor,
        slot_ids: torch.Tensor,
        page_tokens: int,
        block_tokens: int,
        topk_blocks: int,
        max_query_len: int,
        max_seq_len: int,
        closed_block_slot_ids: torch.Tensor | None = None,
        ring_slot_ids: torch.Tensor | None = None,
        ring_ids: torch.Tensor | None = None,
        ring_tokens: int | None = None,
        num_pages: int | None = None,
    ) -> StepPlan:
        """A plan from tensors that an engine already has; nothing is copied.

        Args:
            query_starts: [R + 1] int32, first row of each request, from 0.
            seq_lens: [R] int32, tokens of each request after this step.
            page_table: [R, pages] int32.
            request_ids: [T] int32, -1 for padding rows.
            positions: [T] int64 positions in the request; rows of a request are consecutive and are its last tokens.
            visible_blocks: [T] int32.
            slot_ids: [T] int64, -1 for "do not write".
            page_tokens: Tokens of a page.
            block_tokens: Tokens of a block.
            topk_blocks: Blocks that a row selects at most.
            max_query_len: Host bound on the rows of a request.
            max_seq_len: Host bound on `seq_lens`.
            closed_block_slot_ids: [T] int64, or None when nothing is prepared through this plan.
            ring_slot_ids: [T] int64, or None when nothing is prepared through this plan.
            ring_ids: [R] int32, or None when nothing is prepared through this plan.
            ring_tokens: Raw keys of a ring, with `ring_ids`.
            num_pages: Pages of the pool, if known.

        Raises:
            ShapeError, DTypeError, DeviceError: A tensor does not fit the others.
            ArgumentError: A value breaks a rule (values are read on the CPU, or with FLASHQSA_DEBUG=1).
        """
        from flashqsa.plan.build import check_tensors

        nowhere = torch.full_like(slot_ids, -1)
        plan = cls(
            query_starts=query_starts,
            seq_lens=seq_lens,
            page_table=page_table,
            first_slots=None,
            first_block_slots=None,
            ring_ids=ring_ids,
            request_ids=request_ids,
            positions=positions,
            visible_blocks=visible_blocks,
            slot_ids=slot_ids,
            closed_block_slot_ids=nowhere if closed_block_slot_ids is None else closed_block_slot_ids,
            ring_slot_ids=nowhere if ring_slot_ids is None else ring_slot_ids,
            page_tokens=page_tokens,
            block_tokens=block_tokens,
            topk_blocks=topk_blocks,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            num_pages=num_pages,
            ring_tokens=ring_tokens,
        )
        check_tensors(plan)
        return plan

    @property
    def num_rows(self) -> int:
        """Packed rows, padding included (`T`)."""
        return self.request_ids.shape[0]

    @property
    def num_requests(self) -> int:
        """Requests, padding included (`R`)."""
        return self.seq_lens.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the plan's tensors live."""
        return self.request_ids.device

    @property
    def all_visible(self) -> bool:
        """Whether no row can see more blocks than it may select: attention is dense and causal, nothing is scored."""
        return self.max_seq_len // self.block_tokens <= self.topk_blocks

    def row_groups(self) -> list[RowGroup]:
        """Rows by request as host integers, padding left out. Read from the device once a step, then kept."""
        if self._row_groups is None:
            requests, positions = self.request_ids.tolist(), self.positions.tolist()
            groups: list[RowGroup] = []
            row = 0
            while row < len(requests):
                end = row + 1
                while end < len(requests) and requests[end] == requests[row]:
                    end += 1
                if requests[row] >= 0:
                    groups.append(RowGroup(requests[row], row, end, positions[row]))
                row = end
            self._row_groups = groups
        return self._row_groups

    def scratch(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, *, zeroed: bool = False) -> torch.Tensor:
        """A tensor that kernels of this step share, allocated once a plan and shape.

        Args:
            name: Who uses it.
            shape: Its shape.
            dtype: Its dtype.
            zeroed: Whether it starts as zeros; kernels leave it so.
        """
        key = (name, shape, dtype)
        known = self._scratch.get(key)
        if known is None:  # never replaced: a captured graph may point at it
            make = torch.zeros if zeroed else torch.empty
            known = self._scratch[key] = make(shape, dtype=dtype, device=self.device)
        return known

    def token_slots(self, request_id: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Slots of tokens of one request, int64 of the same shape."""
        if self.page_table is None:
            assert self.first_slots is not None
            return self.first_slots[request_id] + token_ids
        assert self.page_tokens is not None
        pages = self.page_table[request_id][token_ids // self.page_tokens].to(torch.int64)
        return pages * self.page_tokens + token_ids % self.page_tokens

    def block_slots(self, request_id: int, block_ids: torch.Tensor) -> torch.Tensor:
        """Block slots of blocks of one request, int64 of the same shape."""
        if self.page_table is None:
            assert self.first_block_slots is not None
            return self.first_block_slots[request_id] + block_ids
        assert self.page_tokens is not None
        page_blocks = self.page_tokens // self.block_tokens
        pages = self.page_table[request_id][block_ids // page_blocks].to(torch.int64)
        return pages * page_blocks + block_ids % page_blocks

    def forget_host_copies(self) -> None:
        """Drop what was read to the host; called when the tensors are refilled."""
        self._row_groups = None
        self._end_slots = None

    def end_slots(self) -> tuple[int, int]:
        """One past the last slot and block slot that this step may touch. Read from the device once, then kept."""
        if self._end_slots is None:
            ends, block_ends = [self.slot_ids + 1], [self.closed_block_slot_ids + 1]
            live = self.seq_lens > 0
            if self.page_table is None:
                assert self.first_slots is not None
                assert self.first_block_slots is not None
                ends.append(torch.where(live, self.first_slots + self.seq_lens, 0))
                block_lens = self.seq_lens // self.block_tokens
                block_ends.append(torch.where(live, self.first_block_slots + block_lens, 0))
            else:
                assert self.page_tokens is not None
                longest = int(self.seq_lens.max()) if self.num_requests else 0
                width = min(self.page_table.shape[1], -(-longest // self.page_tokens))
                used = torch.arange(width, device=self.device)[None] * self.page_tokens < self.seq_lens[:, None]
                page_ends = torch.where(used, self.page_table[:, :width].to(torch.int64) + 1, 0).flatten()
                ends.append(page_ends * self.page_tokens)
                block_ends.append(page_ends * (self.page_tokens // self.block_tokens))
            nothing = torch.zeros(1, dtype=torch.int64, device=self.device)
            self._end_slots = (int(torch.cat([nothing, *ends]).max()), int(torch.cat([nothing, *block_ends]).max()))
        return self._end_slots

    def check_cache(self, where: str, cache: LayerCache) -> None:
        """Raise unless a layer's caches have the shape that this plan addresses.

        Raises:
            ShapeError: Page sizes differ.
            DeviceError: Plan and caches are on different devices.
            ArgumentError: The pool is smaller than the plan was told, or than its slots need (read on the CPU, or with
                FLASHQSA_DEBUG=1).
        """
        if self.device != cache.device:
            raise DeviceError(
                f"{where}: plan must be on {cache.device}, like the caches, got {self.device}. Plan there."
            )
        pages, page_tokens = cache.k_pages.shape[:2]
        if self.page_table is not None:
            self._check_page_sizes(where, cache)
        if self.num_pages is not None and pages < self.num_pages:
            raise ArgumentError(
                f"{where}: k_pages must hold num_pages = {self.num_pages} pages as planned, got {pages}. "
                "Plan the step with the pool's page count."
            )
        if not values_are_checked(self.device):
            return
        end_slot, end_block = self.end_slots()
        if end_slot > pages * page_tokens:
            raise ArgumentError(
                f"{where}: k_pages must hold the {end_slot} slots that the step reaches, got {pages} pages of "
                f"{page_tokens} tokens. Pass the caches that the page table or the first slots were made for."
            )
        if cache.block_keys is not None and end_block > cache.block_keys.shape[0] * cache.block_keys.shape[1]:
            raise ArgumentError(
                f"{where}: block_keys must hold the {end_block} block slots that the step reaches, got "
                f"{list(cache.block_keys.shape[:2])}. Allocate as many blocks as K and V have tokens / block_tokens."
            )

    def _check_page_sizes(self, where: str, cache: LayerCache) -> None:
        page_tokens = cache.k_pages.shape[1]
        if page_tokens != self.page_tokens:
            raise ShapeError(
                f"{where}: k_pages must have pages of page_tokens = {self.page_tokens} as planned, got {page_tokens}. "
                "Plan the step with the pool's page size."
            )
        page_blocks = page_tokens // self.block_tokens
        if cache.block_keys is not None and cache.block_keys.shape[1] != page_blocks:
            raise ShapeError(
                f"{where}: block_keys must have pages of page_tokens / block_tokens = "
                f"{page_blocks} blocks, got {cache.block_keys.shape[1]}. Allocate block keys on the page table "
                "of K/V."
            )
