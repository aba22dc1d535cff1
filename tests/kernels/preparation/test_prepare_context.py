"""Preparation by columns of a batch, where all raw index keys are kept, against the torch pieces of a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from flashqsa.preparation.plain import pool_block_keys, rms_norm, rotate
from flashqsa.preparation.triton_context import prepare_context_triton
from flashqsa.testing import stream

EPS = 1e-6


class Context:
    """Random rows of a batch and its caches, NaN where nothing was written yet.

    Args:
        heads: Query heads, KV heads, index heads.
        dims: Head dimension, index dimension, half of what rotates.
        batch: Batch rows.
        columns: Columns of the caches.
        block_tokens: Tokens of a block.
        starts: First token of each batch row.
    """

    def __init__(
        self,
        heads: tuple[int, int, int],
        dims: tuple[int, int, int],
        starts: tuple[int, ...],
        columns: int,
        block_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        generator = stream(71)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(dtype).to(device)

        (q_heads, kv_heads, index_heads), (dim, index_dim, half), batch = heads, dims, len(starts)
        self.starts, self.block_tokens, self.heads, self.dims = starts, block_tokens, heads, dims
        self.q_gate = randn(batch, columns, q_heads, 2 * dim)
        self.k, self.v = randn(batch, columns, kv_heads, dim), randn(batch, columns, kv_heads, dim)
        self.index_qk = randn(batch, columns, index_heads + 1, index_dim)
        angles = torch.rand(batch, columns, half, generator=generator) * 6
        self.cos, self.sin = (f(angles).to(dtype).to(device) for f in (torch.cos, torch.sin))
        self.norms = [(randn(n) * 0.1, EPS) for n in (dim, dim, index_dim, index_dim)]
        shapes = ((columns, kv_heads, dim), (columns, kv_heads, dim), (columns, index_dim))
        blocks = (columns // block_tokens, index_dim)
        self.caches = [torch.full((batch, *s), torch.nan, dtype=dtype, device=device) for s in (*shapes, blocks)]

    def run(self, past: int, end: int, *, pools: bool = True, on_device: bool = False) -> tuple[Any, Any]:
        """Prepare the columns from `past` to `end` of all batch rows."""
        batch, new, r = len(self.starts), slice(past, end), self.block_tokens
        device, first_angle = self.k.device, max(0, past - r + 1)
        columns = torch.arange(past, end, device=device)
        starts = torch.tensor(self.starts, device=device)[:, None]
        closes = (columns >= starts) & ((columns - starts + 1) % r == 0)
        slots = torch.arange(batch, device=device)[:, None] * self.caches[3].shape[1] + (columns - starts) // r
        rows = [x[:, new].flatten(0, 1) for x in (self.q_gate, self.k, self.v, self.index_qk)]
        return prepare_context_triton(
            rows, self.cos[:, first_angle:end], self.sin[:, first_angle:end], self.norms,
            (*self.caches[:3], self.caches[3] if pools else None), query_tokens=end - past,
            past=torch.tensor([past], dtype=torch.int32, device=device) if on_device else past,
            row_angle=past - first_angle, closed_block_slot_ids=torch.where(closes, slots, -1).flatten(),
            block_tokens=r,
        )  # fmt: skip

    def rotated(self, x: torch.Tensor, norm: int) -> torch.Tensor:
        """[B, columns, heads, d] normed and rotated by torch."""
        normed = rms_norm(x, *self.norms[norm]).flatten(0, 1)
        return rotate(normed, self.cos.flatten(0, 1), self.sin.flatten(0, 1)).to(x.dtype).view(x.shape)


SHAPES = {
    "grouped": ((6, 2, 4), (64, 32, 8), (0, 3, 5), 4),
    "odd": ((5, 1, 3), (40, 24, 5), (0, 1), 2),
    "all rotates, blocks of 16": ((2, 2, 1), (32, 32, 16), (7,), 16),
}


@pytest.fixture(params=list(SHAPES))
def make(request: pytest.FixtureRequest, dtype: torch.dtype, device: torch.device) -> Callable[[], Context]:
    heads, dims, starts, r = SHAPES[request.param]
    return lambda: Context(heads, dims, starts, 64, r, dtype, device)


def _assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Within a few units in the last place of the head's largest, and in half precision hardly ever apart at all."""
    assert torch.isfinite(found).all()
    largest = expected.float().abs().amax(dim=-1, keepdim=True)
    apart = (found.float() - expected.float()).abs()
    assert bool((apart <= 4 * torch.finfo(expected.dtype).eps * largest).all())
    if expected.dtype != torch.float32:  # whose sums are added in another order
        assert (apart > 0).float().mean() <= 1e-3


def test_rows_and_caches_are_those_of_torch(make: Callable[[], Context]) -> None:
    context = make()
    q, index_q = context.run(0, 21)
    dim = context.dims[0]
    _assert_same(q, context.rotated(context.q_gate[..., :dim], 0)[:, :21].flatten(0, 1))
    _assert_same(index_q, context.rotated(context.index_qk[:, :, :-1], 2)[:, :21].flatten(0, 1))
    k, v, raw_keys, block_keys = context.caches
    _assert_same(k[:, :21], context.rotated(context.k, 1)[:, :21])
    assert torch.equal(v[:, :21], context.v[:, :21])
    assert torch.equal(raw_keys[:, :21], context.index_qk[:, :21, -1])
    for cache in (k, v, raw_keys):
        assert cache[:, 21:].isnan().all(), "nothing is written behind the rows"
    r = context.block_tokens
    for batch_row, start in enumerate(context.starts):
        blocks = (21 - start) // r
        firsts = slice(start, start + blocks * r, r)
        raw = context.index_qk[batch_row, start : start + blocks * r, -1]
        members = raw.reshape(blocks, r, context.dims[1])
        angles = (context.cos[batch_row, firsts], context.sin[batch_row, firsts])
        if blocks:
            expected = pool_block_keys(members, *context.norms[3], *angles).to(block_keys.dtype)
            _assert_same(block_keys[batch_row, :blocks], expected)
        assert block_keys[batch_row, blocks:].isnan().all()


@pytest.mark.parametrize("on_device", [False, True], ids=["past told", "past on the device"])
def test_steps_write_the_bits_of_one_prompt(make: Callable[[], Context], on_device: bool) -> None:
    """Blocks that close with members of earlier steps too, wherever the cuts are."""
    whole, cut = make(), make()
    q, index_q = whole.run(0, 40)
    bounds = [0, 3, 4, 5, 17, 18, 23, 40]
    for past, end in itertools.pairwise(bounds):
        q_rows, index_rows = cut.run(past, end, on_device=on_device)
        for rows, all_rows in ((q_rows, q), (index_rows, index_q)):
            batch = len(whole.starts)
            assert torch.equal(
                rows.view(batch, end - past, *rows.shape[1:]), all_rows.view(batch, 40, *rows.shape[1:])[:, past:end]
            )
    for place, (one, other) in enumerate(zip(whole.caches, cut.caches, strict=True)):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7)), f"cache {place}"


def test_without_pooling_no_block_is_written(make: Callable[[], Context]) -> None:
    context = make()
    context.run(0, 24, pools=False)
    assert context.caches[3].isnan().all()
    assert not context.caches[2][:, :24].isnan().any()
