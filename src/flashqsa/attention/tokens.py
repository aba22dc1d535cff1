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
        tail_starts: [n] int64 first tail token, a multiple of `unit_tokens` above all units; None without a tail.
        positions: [n] int64 position of each row, the last token of its tail.
    """

    unit_ids: torch.Tensor
    unit_counts: torch.Tensor
    unit_tokens: int
    tail_starts: torch.Tensor | None
    positions: torch.Tensor

    def rows(self, first_row: int, end_row: int) -> RowTokens:
        """The lists of some consecutive rows, as views."""
        rows = slice(first_row, end_row)
        tail_starts = None if self.tail_starts is None else self.tail_starts[rows]
        return RowTokens(
            self.unit_ids[rows], self.unit_counts[rows], self.unit_tokens, tail_starts, self.positions[rows]
        )

    def token_ids(self, row: int) -> torch.Tensor:
        """[N] int64 tokens of one row: its units in their own order, then its tail."""
        members = torch.arange(self.unit_tokens, device=self.unit_ids.device)
        units = self.unit_ids[row, : int(self.unit_counts[row])].to(torch.int64)
        tokens = (units[:, None] * self.unit_tokens + members).flatten()
        if self.tail_starts is None:
            return tokens
        tail = torch.arange(int(self.tail_starts[row]), int(self.positions[row]) + 1, device=tokens.device)
        return torch.cat([tokens, tail])
