"""What one stage hands to the next: `Prepared` and `Selection`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.checks import expect, values_are_checked
from flashqsa.errors import ArgumentError


@dataclass(frozen=True)
class Prepared:
    """Normalised and rotated queries of one step and layer, in the layout of the later stages.

    Attributes:
        index_q: [T, Hi, Di] index queries, model dtype (or float8_e4m3fn when asked for through `out`).
        q: [T, Hq, D] attention queries, model dtype.
        gate: [T, Hq, D] gate logits as projected, a view of the caller's tensor.
    """

    index_q: torch.Tensor
    q: torch.Tensor
    gate: torch.Tensor


@dataclass(frozen=True)
class Selection:
    """The blocks that each row attends, for one layer.

    Attributes:
        block_ids: [T, K] int32 logical block ids, ascending and unique in a row, -1 past the row's count.
        block_counts: [T] int32, how many of a row's ids are valid: min(K, visible_blocks).
        scores: [T, K] fp32 scores of the selected blocks (-inf past the count), or None when not asked for.
        visible_blocks: [T] int32, complete blocks that the row could see when it was selected. The row's tail starts
            at token visible_blocks * block_tokens.
        request_ids: [T] int32, request of each row in the step that made the selection, -1 for padding rows.
        layer_id: The layer whose index keys were scored, or None when the cache was not told.
    """

    block_ids: torch.Tensor
    block_counts: torch.Tensor
    scores: torch.Tensor | None
    visible_blocks: torch.Tensor
    request_ids: torch.Tensor
    layer_id: int | None = None

    def take(self, rows: torch.Tensor) -> Selection:
        """The selection of some of the rows, in the order given: follows a batch that is filtered or merged.

        Args:
            rows: [N] int64 or int32 row numbers in [0, T).

        Raises:
            ShapeError, DTypeError, DeviceError: Rows are no list of numbers (a mask, say), or live elsewhere.
            ArgumentError: A row number is out of range (read on the CPU, or with FLASHQSA_DEBUG=1).
        """
        expect(
            "Selection.take", "rows", rows, "N", {}, dtypes=(torch.int64, torch.int32), device=self.block_ids.device,
            hint="Pass row numbers; mask.nonzero().flatten() turns a mask into them.",
        )  # fmt: skip
        num_rows = self.block_ids.shape[0]
        if values_are_checked(rows.device) and rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < num_rows:
            raise ArgumentError(
                f"Selection.take: rows must be in [0, {num_rows}), got {int(rows.min())} to {int(rows.max())}. "
                "Pass row numbers of the step that made the selection."
            )
        rows = rows.to(torch.int64)
        return Selection(
            block_ids=self.block_ids[rows],
            block_counts=self.block_counts[rows],
            scores=None if self.scores is None else self.scores[rows],
            visible_blocks=self.visible_blocks[rows],
            request_ids=self.request_ids[rows],
            layer_id=self.layer_id,
        )
