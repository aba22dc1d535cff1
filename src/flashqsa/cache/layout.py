"""Shapes and sizes of the caches: what one page and one request cost."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flashqsa.checks import CACHE_DTYPES, expect_int
from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError, DTypeError


def ring_capacity(block_tokens: int, speculative_rows: int = 0) -> int:
    """Raw index keys that a request's ring must hold: block_tokens + speculative_rows, in whole blocks.

    A rejected draft row then never overwrites a key that the open block still needs.

    Args:
        block_tokens: Tokens of a block.
        speculative_rows: Draft rows that a step may add beyond the accepted one.
    """
    where = "ring_capacity"
    expect_int(where, "block_tokens", block_tokens, least=1, hint="Count the tokens of a block.")
    expect_int(where, "speculative_rows", speculative_rows, hint="Count the draft rows of a step.")
    return -(-(block_tokens + speculative_rows) // block_tokens) * block_tokens


def check_page_tokens(where: str, page_tokens: int, block_tokens: int) -> None:
    """Raise unless a page holds whole blocks."""
    expect_int(where, "page_tokens", page_tokens, least=None)
    if page_tokens < 1 or page_tokens % block_tokens:
        raise ArgumentError(
            f"{where}: page_tokens must be a multiple of block_tokens = {block_tokens}, got {page_tokens}. "
            "Choose a page size that holds whole blocks."
        )


@dataclass(frozen=True)
class CacheLayout:
    """Shapes of one layer's caches. Memory only: no layout changes a result.

    Attributes:
        page_tokens: Tokens of a page, a multiple of `block_tokens`.
        block_tokens: Tokens of a block (`r`).
        kv_heads: Key/value heads on this rank.
        head_dim: Dimension of a main head.
        index_head_dim: Dimension of an index key.
        ring_tokens: Raw index keys that a request keeps.
        kv_dtype: Dtype of K and V.
        index_dtype: Dtype of block keys.
        ring_dtype: Dtype of raw index keys, the model dtype.
    """

    page_tokens: int
    block_tokens: int
    kv_heads: int
    head_dim: int
    index_head_dim: int
    ring_tokens: int
    kv_dtype: torch.dtype = torch.bfloat16
    index_dtype: torch.dtype = torch.bfloat16
    ring_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("block_tokens", "kv_heads", "head_dim", "index_head_dim", "ring_tokens"):
            expect_int("CacheLayout", name, getattr(self, name), least=None if name == "ring_tokens" else 1)
        check_page_tokens("CacheLayout", self.page_tokens, self.block_tokens)
        for name in ("page_tokens", "block_tokens", "kv_heads", "head_dim", "index_head_dim", "ring_tokens"):
            object.__setattr__(self, name, int(getattr(self, name)))  # numbers of numpy overflow, and JSON has none
        for name in ("kv_dtype", "index_dtype", "ring_dtype"):
            if getattr(self, name) not in CACHE_DTYPES:
                raise DTypeError(
                    f"CacheLayout: {name} must be a floating dtype of the caches, got {getattr(self, name)!r}. "
                    "Use the model dtype, or torch.float8_e4m3fn for K, V and block keys."
                )
        if self.ring_tokens < self.block_tokens or self.ring_tokens % self.block_tokens:
            raise ArgumentError(
                f"CacheLayout: ring_tokens must be a positive multiple of block_tokens = {self.block_tokens}, got "
                f"{self.ring_tokens}. Use ring_capacity(block_tokens, speculative_rows)."
            )

    @classmethod
    def from_config(
        cls,
        config: QSAConfig,
        *,
        page_tokens: int,
        speculative_rows: int = 0,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
    ) -> CacheLayout:
        """The layout that a checkpoint needs.

        Args:
            config: The checkpoint's constants.
            page_tokens: Tokens of a page.
            speculative_rows: Draft rows that a step may add.
            dtype: Model dtype.
            kv_dtype: Dtype of K and V, the model dtype by default.
            index_dtype: Dtype of block keys, the model dtype by default.
        """
        return cls(
            page_tokens=page_tokens,
            block_tokens=config.block_tokens,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            index_head_dim=config.index_head_dim,
            ring_tokens=ring_capacity(config.block_tokens, speculative_rows),
            kv_dtype=kv_dtype or dtype,
            index_dtype=index_dtype or dtype,
            ring_dtype=dtype,
        )

    @property
    def page_blocks(self) -> int:
        """Blocks of a page."""
        return self.page_tokens // self.block_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer: K, V and block keys."""
        kv = 2 * self.page_tokens * self.kv_heads * self.head_dim * self.kv_dtype.itemsize
        return kv + self.page_blocks * self.index_head_dim * self.index_dtype.itemsize

    @property
    def request_bytes(self) -> int:
        """Bytes that a request keeps besides its pages, in one layer: ring and ring positions."""
        return self.ring_tokens * (self.index_head_dim * self.ring_dtype.itemsize + 3 * 8)

    @property
    def token_bytes(self) -> float:
        """Bytes of one token of one layer in full pages."""
        return self.page_bytes / self.page_tokens
