"""`LayerCache`: the tensors of one layer, and how flat slots address them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.checks import CACHE_DTYPES, FLOAT_DTYPES, FP8, expect, expect_int, expect_number
from flashqsa.errors import ArgumentError, DTypeError, ShapeError


@dataclass(frozen=True)
class LayerCache:
    """The caches of one layer. Any strides with a contiguous last dimension: views of one big pool are welcome.

    A *slot* is one physical token row: ``page * page_tokens + offset``; a block slot is the same with blocks.

    Attributes:
        k_pages: [P, page_tokens, Hkv, D] keys, a float dtype or float8_e4m3fn.
        v_pages: [P, page_tokens, Hkv, D] values, same dtype.
        block_keys: [P, page_tokens / block_tokens, Di] pooled index keys on the page table of K/V, or None where only
            attention runs.
        ring: [rings, ring_tokens, Di] raw index keys by ``position % ring_tokens``, or None where nothing is prepared.
        ring_positions: [rings, ring_tokens, 3] int64 rotary positions of those keys, or None with `ring`.
        k_scale: What stored float8 keys are multiplied by: a float, or an fp32 tensor [1] that stays on its device.
        v_scale: The same for values.
        layer_id: Index of the layer; selections carry it, and attention refuses one of another layer.
    """

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    block_keys: torch.Tensor | None
    ring: torch.Tensor | None
    ring_positions: torch.Tensor | None
    k_scale: float | torch.Tensor | None = None
    v_scale: float | torch.Tensor | None = None
    layer_id: int | None = None

    def __post_init__(self) -> None:
        where = "LayerCache"
        dims: dict[str, int] = {}
        expect(where, "k_pages", self.k_pages, "P page_tokens Hkv D", dims, dtypes=CACHE_DTYPES)
        device = self.k_pages.device
        if self.layer_id is not None:
            expect_int(where, "layer_id", self.layer_id)
        expect(where, "v_pages", self.v_pages, "P page_tokens Hkv D", dims, dtypes=CACHE_DTYPES, device=device)
        if self.v_pages.dtype != self.k_pages.dtype:
            raise DTypeError(
                f"{where}: v_pages must have the dtype of k_pages, {self.k_pages.dtype}, got {self.v_pages.dtype}. "
                "Allocate both alike."
            )
        if self.block_keys is not None:
            expect(
                where, "block_keys", self.block_keys, "P page_blocks Di", dims, dtypes=CACHE_DTYPES, device=device,
                hint="Block keys live on the page table of K/V: allocate as many pages.",
            )  # fmt: skip
        if (self.ring is None) != (self.ring_positions is None):
            given = "ring" if self.ring_positions is None else "ring_positions"
            raise ArgumentError(
                f"{where}: ring and ring_positions must come together, got {given} alone. Give both or neither."
            )
        if self.ring is not None and self.ring_positions is not None:
            expect(where, "ring", self.ring, "rings ring_tokens Di", dims, dtypes=FLOAT_DTYPES, device=device)
            expect(
                where, "ring_positions", self.ring_positions, "rings ring_tokens 3", dims, dtypes=(torch.int64,),
                device=device,
            )  # fmt: skip
        for name in ("k_scale", "v_scale"):
            scale = getattr(self, name)
            if scale is None:
                continue
            if not isinstance(scale, torch.Tensor):
                expect_number(where, name, scale, above=0.0, hint="Pass what stored values are multiplied by.")
                continue
            if scale.numel() != 1:
                raise ShapeError(
                    f"{where}: {name} must be a float or an fp32 tensor [1], got {list(scale.shape)}. "
                    "Scales are per tensor."
                )
            expect(where, name, scale.reshape(1), "1", {}, dtypes=(torch.float32,), device=device)

    @property
    def device(self) -> torch.device:
        """Where the caches live."""
        return self.k_pages.device

    @property
    def kv_heads(self) -> int:
        """Key/value heads of this rank."""
        return self.k_pages.shape[2]

    @property
    def head_dim(self) -> int:
        """Dimension of a main head."""
        return self.k_pages.shape[3]


def read_slots(pages: torch.Tensor, slot_ids: torch.Tensor) -> torch.Tensor:
    """Rows of a paged tensor by flat slot, [N, ...]: one copy, whatever the strides.

    Args:
        pages: [P, page_rows, ...] tensor.
        slot_ids: [N] int64 flat slots, all valid.
    """
    if pages.dtype == FP8:  # indexing has no kernel for float8 on every device: move bytes
        return read_slots(pages.view(torch.uint8), slot_ids).view(FP8)
    page_rows = pages.shape[1]
    if pages.shape[0] == 1 or pages.stride(0) == page_rows * pages.stride(1):
        flat = pages.view(pages.shape[0] * page_rows, *pages.shape[2:])
        return flat.index_select(0, slot_ids) if flat.is_contiguous() else flat[slot_ids]
    return pages[slot_ids // page_rows, slot_ids % page_rows]


def write_slots(pages: torch.Tensor, slot_ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows at flat slots; a negative slot means "do not write".

    Args:
        pages: [P, page_rows, ...] tensor, written in place.
        slot_ids: [N] int64 flat slots, unique where not negative.
        rows: [N, ...] values in the dtype of `pages`.
    """
    if pages.dtype == FP8:
        pages, rows = pages.view(torch.uint8), rows.view(torch.uint8)
    if slot_ids.is_cuda:
        slot_ids, rows = without_gaps(pages, slot_ids, rows)
    else:
        live = slot_ids >= 0
        if not bool(live.all()):
            slot_ids, rows = slot_ids[live], rows[live]
    pages.index_put_((slot_ids // pages.shape[1], slot_ids % pages.shape[1]), rows)


def without_gaps(pages: torch.Tensor, slot_ids: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots and rows whose writing does the same, with no negative slot among them, found without asking the device.

    A row that is not to be written writes what another one does, once more; where there is no other, slot 0 gets what
    it holds. So a CUDA graph can hold the writing.

    Args:
        pages: [P, page_rows, ...] tensor that is to be written.
        slot_ids: [N] int64 flat slots, unique where not negative.
        rows: [N, ...] values in the dtype of `pages`.
    """
    if slot_ids.shape[0] == 0:
        return slot_ids, rows
    live = slot_ids >= 0
    some_row = live.to(torch.int32).argmax(dim=0, keepdim=True)
    slot = slot_ids.index_select(0, some_row).clamp(min=0)
    held = pages[slot // pages.shape[1], slot % pages.shape[1]]
    each = (-1,) + (1,) * (rows.dim() - 1)
    row = torch.where(live.index_select(0, some_row).view(each), rows.index_select(0, some_row), held)
    return torch.where(live, slot_ids, slot), torch.where(live.view(each), rows, row)
