"""Proof that the sparse path ran: counted where the rows are, summed only when read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from flashqsa.results import Selection

_counts: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()
"""By attention module: [4] int64, as `LayerReport` has them. Kept beside the model, so that it carries no trace."""


@dataclass(frozen=True)
class LayerReport:
    """What one QSA layer has attended since FlashQSA was enabled.

    Attributes:
        layer_id: Index of the layer.
        rows: Rows attended, padding left out.
        dense_rows: Those of them that saw no more blocks than they may select.
        blocks_visible: Complete blocks that the rows saw, summed.
        blocks_selected: Blocks that they attended, summed.
    """

    layer_id: int
    rows: int
    dense_rows: int
    blocks_visible: int
    blocks_selected: int

    @property
    def share_selected(self) -> float:
        """Share of the visible blocks that was attended; 1 when nothing was visible."""
        return self.blocks_selected / self.blocks_visible if self.blocks_visible else 1.0


def count_rows(attention: Any, selection: Selection) -> None:
    """Add one forward to the counts of a layer."""
    live = selection.request_ids >= 0
    dense = live & (selection.block_counts >= selection.visible_blocks)
    step = torch.stack([live, dense, selection.visible_blocks, selection.block_counts]).sum(dim=1)
    counts_of(attention, step.device).add_(step)  # in place, because a captured graph adds to it as well


def counts_of(attention: Any, device: torch.device) -> torch.Tensor:
    """The counts of a layer, on the device where it runs."""
    counts = _counts.get(attention)
    if counts is None or counts.device != device:
        with torch.inference_mode(False):
            zeros = torch.zeros(4, dtype=torch.int64, device=device)
            counts = _counts[attention] = zeros if counts is None else zeros.copy_(counts)
    return counts


def forget_counts(attention: Any) -> None:
    """Start counting from zero."""
    if attention in _counts:
        _counts[attention].zero_()


def report(model: Any) -> list[LayerReport]:
    """What each QSA layer of a model has attended since FlashQSA was enabled on it.

    Args:
        model: A transformers model.

    Returns:
        One entry a layer that ran on FlashQSA, by layer.
    """
    from flashqsa.integrations.hf.patch import qsa_attentions

    reports = []
    for attention in qsa_attentions(model):
        counts = _counts.get(attention)
        rows, dense_rows, visible, selected = [0] * 4 if counts is None else counts.tolist()
        if rows:
            reports.append(LayerReport(attention.layer_idx, rows, dense_rows, visible, selected))
    return reports
