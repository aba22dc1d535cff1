"""Rotary angles of what a forward rotates, in place of tables over the whole key history.

transformers computes cosines and sines of every cached position in every forward, because its indexer rotates every
block key anew. Here the new rows and the first tokens of new blocks are all that rotates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import torch

from flashqsa.integrations.hf.replacing import own_forward

Pair = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, of the rotary_dim / 2 frequencies in the model dtype."""


class WholeTables:
    """Tables over the whole history, as transformers' rotary module makes them: for layers that are called alone.

    Args:
        cos: [B, KV, rotary_dim].
        sin: [B, KV, rotary_dim].
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self.half = cos.shape[-1] // 2
        self.whole = cos, sin
        self.batch_rows, self.columns = cos.shape[:2]

    @cached_property
    def cos(self) -> torch.Tensor:
        """[B, KV, half]."""
        return self.whole[0][..., : self.half]

    @cached_property
    def sin(self) -> torch.Tensor:
        """[B, KV, half]."""
        return self.whole[1][..., : self.half]

    def of_rows(self, query_tokens: int) -> Pair:
        """Angles of the last tokens of each batch row, [B * Q, half] each."""
        return self.cos[:, -query_tokens:].flatten(0, 1), self.sin[:, -query_tokens:].flatten(0, 1)

    def of_columns(self, batch_rows: tuple[int, ...], columns: slice) -> Pair:
        """Angles of some columns of some batch rows, [rows, columns, half] each."""
        rows = list(batch_rows)
        return self.cos[:, columns][rows], self.sin[:, columns][rows]

    def of_span(self, first_column: int, end_column: int) -> Pair:
        """Angles of consecutive columns of every batch row, [B, columns, half] each."""
        return self.cos[:, first_column:end_column], self.sin[:, first_column:end_column]

    def packed(self, first_column: int, end_column: int) -> torch.Tensor:
        """Cosines, then sines of consecutive columns, side by side: [B, columns, 2 * half]."""
        count = end_column - first_column
        halves = [x.narrow(1, first_column, count).narrow(2, 0, self.half) for x in self.whole]
        return torch.cat(halves, dim=-1)


class NeededAngles:
    """What the rotary module of an enabled model returns: angles by demand, each computed once a forward.

    It unpacks to the tables of transformers, for whoever else asks.

    Args:
        tables: The model's own rotary forward, from a tensor (for dtype and device) and positions to two tables.
        like: A tensor of the model dtype.
        position_ids: [3, B, KV] rotary positions of the whole history.
        device: Where the layer runs that asks.
        known: Angles computed so far in this forward.
    """

    def __init__(
        self,
        tables: Callable[[torch.Tensor, torch.Tensor], Pair],
        like: torch.Tensor,
        position_ids: torch.Tensor,
        device: torch.device | None = None,
        known: dict[Any, Pair] | None = None,
    ) -> None:
        self.tables = tables
        self.like = like
        self.position_ids = position_ids
        self.batch_rows, self.columns = position_ids.shape[1:]
        self.device = like.device if device is None else device
        self.known = {} if known is None else known

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> NeededAngles:
        """The same for a layer on another device, as accelerate asks; angles are computed once and copied once."""
        if device == self.device:
            return self
        device = torch.empty(0, device=device).device
        if device == self.device:
            return self
        return NeededAngles(self.tables, self.like, self.position_ids, device, self.known)

    def of_rows(self, query_tokens: int) -> Pair:
        """As `WholeTables.of_rows`."""
        return self._once(("rows", query_tokens), lambda: self._compute(self.position_ids[..., -query_tokens:], (0, 1)))

    def of_columns(self, batch_rows: tuple[int, ...], columns: slice) -> Pair:
        """As `WholeTables.of_columns`."""
        whole = len(batch_rows) == self.position_ids.shape[1]

        def compute() -> Pair:
            positions = self.position_ids[..., columns]
            return self._compute(positions if whole else positions[:, list(batch_rows)])

        return self._once((batch_rows, columns.start, columns.stop, columns.step), compute)

    def of_span(self, first_column: int, end_column: int) -> Pair:
        """As `WholeTables.of_span`."""
        return self._once(
            ("span", first_column, end_column), lambda: self._compute(self.position_ids[..., first_column:end_column])
        )

    def packed(self, first_column: int, end_column: int) -> torch.Tensor:
        """As `WholeTables.packed`."""
        key = ("packed", first_column, end_column, self.device)
        if key not in self.known:
            both = torch.cat(self.of_span(first_column, end_column), dim=-1)
            self.known[key] = (both, both)
        return self.known[key][0]

    @property
    def half(self) -> int:
        """Half of rotary_dim."""
        return self.of_rows(1)[0].shape[-1]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.tables(self.like, self.position_ids))

    def _compute(self, positions: torch.Tensor, flatten: tuple[int, int] | None = None) -> Pair:
        cos, sin = self.tables(self.like, positions)
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half], sin[..., :half]
        return (cos.flatten(*flatten), sin.flatten(*flatten)) if flatten else (cos, sin)

    def _once(self, key: Any, compute: Callable[[], Pair]) -> Pair:
        origin, here = (key, self.like.device), (key, self.device)
        if origin not in self.known:
            self.known[origin] = compute()
        if here not in self.known:
            cos, sin = self.known[origin]
            self.known[here] = (cos.to(self.device), sin.to(self.device))
        return self.known[here]


Angles = WholeTables | NeededAngles


@torch.compiler.disable  # type: ignore[untyped-decorator]  # an object that layers outside the graphs read
def rotary_forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> NeededAngles:
    """The forward of an enabled model's rotary module.

    Args:
        self: A `Qwen4ExpTextRotaryEmbedding`.
        x: A tensor of the model dtype.
        position_ids: [3, B, KV] (or [1, B, KV]) rotary positions of the whole history.
    """
    return NeededAngles(own_forward(self), x.new_empty(0), position_ids.expand(3, -1, -1))
