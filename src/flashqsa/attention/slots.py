"""Reading cache rows by slot, head by head, in the dtype that attention computes in."""

from __future__ import annotations

import functools
import math

import torch

from flashqsa.checks import FP8


class SlotReader:
    """Rows of a paged tensor by flat slot, at the speed of contiguous memory whatever the strides.

    The tensor is read as overlapping rows of D elements, one at every multiple of what its strides have in common. Each
    (slot, head) is one of these rows, so a single `index_select` fetches any of them.
    """

    def __init__(self, pages: torch.Tensor, dtype: torch.dtype) -> None:
        """Prepare to read.

        Args:
            pages: [P, page_rows, heads, D], any strides with a contiguous last dimension.
            dtype: What rows are converted to.
        """
        self.dtype = dtype
        self.page_rows, self.heads = pages.shape[1:3]
        self.is_fp8 = pages.dtype == FP8
        raw = pages.view(torch.uint8) if self.is_fp8 else pages
        strides = [stride if size > 1 else 0 for size, stride in zip(raw.shape[:3], raw.stride()[:3], strict=True)]
        unit = math.gcd(*strides) or 1
        self.page_units, self.row_units, head_units = (stride // unit for stride in strides)
        last = sum((size - 1) * stride // unit for size, stride in zip(raw.shape[:3], strides, strict=True))
        self.flat = raw.as_strided((last + 1 if raw.numel() else 0, raw.shape[3]), (unit, 1))
        self.head_offsets = head_units * torch.arange(self.heads, device=pages.device)[:, None]

    def places(self, slot_ids: torch.Tensor) -> torch.Tensor:
        """[heads, N] where to read N slots (int64, all valid)."""
        pages, rows = slot_ids // self.page_rows, slot_ids % self.page_rows
        return (pages * self.page_units).add_(rows, alpha=self.row_units) + self.head_offsets

    def read(self, places: torch.Tensor) -> torch.Tensor:
        """[heads, N, D] contiguous rows of some places."""
        rows = self.flat.index_select(0, places.flatten())
        return self._widened(rows).view(*places.shape, rows.shape[1])

    def _widened(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.is_fp8:
            return rows.to(self.dtype)
        if rows.device.type != "cpu":
            return rows.view(FP8).to(self.dtype)
        # torch converts float8 one element at a time there: looking values up is several times faster
        return _fp8_values(self.dtype).index_select(0, rows.flatten().to(torch.int64))


@functools.cache
def _fp8_values(dtype: torch.dtype) -> torch.Tensor:
    """[256] value of every float8_e4m3fn byte, on the CPU."""
    return torch.arange(256, dtype=torch.uint8).view(FP8).to(dtype)
