"""Preparation by columns cross-compiles for every architecture, at released shapes, without spills."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

import triton

from flashqsa.preparation.triton_context import prepare_context_triton
from flashqsa.testing.compiling import ARCHS, SHARED_BYTES, compile_launch, recorded_launches

PINNED = "3.9"
"""Another Triton allocates registers in its own way."""


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("rows", "on_device"), [(1, True), (4, False), (2048, False)])
def test_it_compiles(arch: int, rows: int, on_device: bool) -> None:
    heads, kv_heads, dim, index_heads, index_dim, columns = 24, 2, 256, 4, 128, 256

    def zeros(*size: int) -> torch.Tensor:
        return torch.zeros(*size, dtype=torch.bfloat16)

    norms = [(zeros(n), 1e-6) for n in (dim, dim, index_dim, index_dim)]
    caches = (zeros(1, columns, kv_heads, dim), zeros(1, columns, kv_heads, dim), zeros(1, columns, index_dim))
    with recorded_launches() as launches:
        prepare_context_triton(
            (zeros(rows, heads, 2 * dim), zeros(rows, kv_heads, dim), zeros(rows, kv_heads, dim),
             zeros(rows, index_heads + 1, index_dim)),
            zeros(1, rows + 3, 32), zeros(1, rows + 3, 32), norms, (*caches, zeros(1, columns // 4, index_dim)),
            query_tokens=rows, past=torch.zeros(1, dtype=torch.int32) if on_device else 7, row_angle=3,
            closed_block_slot_ids=torch.zeros(rows, dtype=torch.int64), block_tokens=4,
        )  # fmt: skip
    assert len(launches) == 1
    compiled = compile_launch(launches[0], arch)
    assert compiled.shared_bytes <= SHARED_BYTES[arch]
    if triton.__version__.startswith(PINNED):
        assert compiled.spill_bytes == 0
