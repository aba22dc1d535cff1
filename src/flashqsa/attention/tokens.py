"""What rows attend, as lists: units (blocks or single tokens) and a tail."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowTokens:
    """What some rows attend: the tokens of the units that they name, and a tail.

    Attributes:
        unit_ids: [n, W] integer ids of units (blocks or tokens), valid up to the row's count.
        unit_counts: [n] integer.
        unit_tokens: Tokens of a unit.
        visible_units: [n] int32 units before the tail, above all ids; None where lists have no tail.
        positions: [n] int64 position of each row, the last token of its tail.
    """

    unit_ids: torch.Tensor
    unit_counts: torch.Tensor
    unit_tokens: int
    visible_units: torch.Tensor | None
    positions: torch.Tensor

    @property
    def tail_starts(self) -> torch.Tensor | None:
        """[n] int64 first tail token of each row, or None without a tail."""
        return None if self.visible_units is None else self.visible_units.to(torch.int64) * self.unit_tokens

    def rows(self, first_row: int, end_row: int) -> RowTokens:
        """The lists of some consecutive rows, as views."""
        rows = slice(first_row, end_row)
        visible_units = None if self.visible_units is None else self.visible_units[rows]
        return RowTokens(
            self.unit_ids[rows], self.unit_counts[rows], self.unit_tokens, visible_units, self.positions[rows]
        )

    def token_ids(self, row: int) -> torch.Tensor:
        """[N] int64 tokens of one row: its units in their own order, then its tail."""
        members = torch.arange(self.unit_tokens, device=self.unit_ids.device)
        units = self.unit_ids[row, : int(self.unit_counts[row])].to(torch.int64)
        tokens = (units[:, None] * self.unit_tokens + members).flatten()
        if self.visible_units is None:
            return tokens
        tail = torch.arange(
            int(self.visible_units[row]) * self.unit_tokens, int(self.positions[row]) + 1, device=tokens.device
        )
        return torch.cat([tokens, tail])
