"""`StepCase`: the shape of a random step, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

GRID = 64
"""Bound on the height and width positions of MRoPE tokens."""


@dataclass(frozen=True)
class StepCase:
    """Shape of one step. Small by default; every number may be odd.

    Attributes:
        name: For test ids and messages.
        requests: (context_before, new_rows) of each request: tokens before the step, tokens that the step adds. (0, 0)
            is a request of length zero.
        q_heads: `Hq`.
        kv_heads: `Hkv`.
        head_dim: `D`.
        index_heads: `Hi`.
        index_head_dim: `Di`, a multiple of 8.
        rotary_dim: Leading dimensions that rotate.
        block_tokens: `r`.
        topk_blocks: `K`.
        page_tokens: Tokens of a page, a multiple of `block_tokens`.
        dtype: Model dtype: projections, queries, ring.
        kv_dtype: Dtype of K and V, the model dtype by default. float8_e4m3fn comes with scales.
        index_dtype: Dtype of block keys, the model dtype by default.
        index_q_dtype: Dtype of the prepared index queries, the model dtype by default.
        rope_dtype: Dtype of the rope table.
        k_scale: What stored float8 keys are multiplied by; used with a float8 `kv_dtype` only.
        v_scale: The same for values.
        speculative_rows: Draft rows that a step may add beyond the accepted one.
        padding_rows: Rows past the last request.
        padding_requests: Requests of length 0 after the others, each with one row and garbage left over.
        max_query_len: Host bound on rows of a request; the exact one by default.
        max_seq_len: Host bound on lengths; the exact one by default.
        mrope: Whether positions have three axes, all different.
        layout: ``split``: K and V in two buffers, padded in every dimension. ``packed``: K and V side by side in one
            last dimension of 2 D. ``hnd``: heads before tokens. ``dense``: no padding anywhere.
        contiguous: Requests contiguous in the caches (first slots) instead of paged.
        request_seeds: What decides the content of each request; its place in `requests` by default.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    q_heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    index_heads: int = 4
    index_head_dim: int = 16
    rotary_dim: int = 8
    block_tokens: int = 4
    topk_blocks: int = 8
    page_tokens: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    index_dtype: torch.dtype | None = None
    index_q_dtype: torch.dtype | None = None
    rope_dtype: torch.dtype = torch.float32
    k_scale: float = 0.37
    v_scale: float = 1.9
    speculative_rows: int = 0
    padding_rows: int = 0
    padding_requests: int = 0
    max_query_len: int | None = None
    max_seq_len: int | None = None
    mrope: bool = False
    layout: Literal["split", "packed", "hnd", "dense"] = "split"
    contiguous: bool = False
    request_seeds: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return self.name

    def request_seed(self, request_id: int) -> int:
        """What decides the content of a request."""
        return request_id if self.request_seeds is None else self.request_seeds[request_id]

    @property
    def num_requests(self) -> int:
        """Requests, padding included (`R`)."""
        return len(self.requests) + self.padding_requests

    @property
    def seq_lens(self) -> list[int]:
        """Length of each request after the step, 0 for padding requests."""
        return [before + new for before, new in self.requests] + [0] * self.padding_requests

    @property
    def query_lens(self) -> list[int]:
        """Rows of each request, padding requests included."""
        return [new for _, new in self.requests] + [1] * self.padding_requests

    @property
    def num_rows(self) -> int:
        """Packed rows, padding included (`T`)."""
        return sum(self.query_lens) + self.padding_rows

    @property
    def ring_tokens(self) -> int:
        """Capacity of a ring: block_tokens + speculative_rows in whole blocks."""
        return -(-(self.block_tokens + self.speculative_rows) // self.block_tokens) * self.block_tokens

    @property
    def mrope_section(self) -> tuple[int, int, int] | None:
        """Frequencies of each position axis, shared out evenly."""
        half = self.rotary_dim // 2
        return (-(-half // 3), -(-(half - 1) // 3), -(-(half - 2) // 3)) if self.mrope else None

    @property
    def rope_rows(self) -> int:
        """Positions of the rope table."""
        return max(self.seq_lens, default=0) + GRID

    @property
    def kv_is_fp8(self) -> bool:
        """Whether K and V are float8, hence scaled."""
        return (self.kv_dtype or self.dtype) == torch.float8_e4m3fn

    @property
    def scales(self) -> tuple[float, float]:
        """(k_scale, v_scale) as fp32 has them; ones when K and V are not float8."""
        if not self.kv_is_fp8:
            return 1.0, 1.0
        return float(torch.tensor(self.k_scale)), float(torch.tensor(self.v_scale))
