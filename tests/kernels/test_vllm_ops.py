"""Kernels of vLLM's operators give the bits of the torch forms, whatever padding and caches hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.integrations.vllm_plugin import ops
from flashqsa.testing import assert_bitwise_equal, assert_unchanged, guarded, snapshot, stream

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`by("kernel" or "torch", operator, *arguments)`: the operator in that form, on any device."""

    def call(form: str, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(ops, "takes_kernels", lambda device: form == "kernel")
            return operator(*args, **kwargs)

    return call


# Rows of a cache


@pytest.mark.parametrize(("width", "page", "rows"), [(128, 16, 40), (3, 8, 9), (1, 1, 5), (1500, 4, 3), (96, 5, 11)])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, E4M3, torch.int64], ids=str)
def test_store_cache_rows(by: Any, device: torch.device, dtype: torch.dtype, width: int, page: int, rows: int) -> None:
    """Bits move as they are, between canaries: no slot, slots beyond the cache, rows and pages with gaps."""
    generator = stream(300, width, rows)
    blocks = 2 * rows // page + 2
    cache = guarded((blocks, page, 1, width), dtype, padding=(1, 2, 1, 3), device=device)
    bits = torch.randint(-128, 128, (rows, 2, width * dtype.itemsize), generator=generator, dtype=torch.int8)
    given = bits.to(device).view(dtype)[:, 1]
    slots = torch.randperm(blocks * page, generator=generator)[:rows]
    slots[1::5] = -1
    slots[2::7] = blocks * page + torch.arange(len(slots[2::7]))
    slots[-1] = 2**62
    slots = torch.stack([slots, slots.flip(0)], 1).to(device)[:, 0]
    wanted = cache.view.view(torch.uint8).clone().view(dtype)
    before = snapshot(given, slots)
    by("kernel", ops.qsa_store_cache_rows, cache.view, slots, given)
    by("torch", ops.qsa_store_cache_rows, wanted, slots, given[:, None])
    assert_bitwise_equal(cache.view.contiguous(), wanted.contiguous())
    assert_unchanged(before)
    cache.assert_intact()


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_store_cache_rows_casts_as_torch_does(by: Any, device: torch.device, dtype: torch.dtype) -> None:
    rows = torch.randn(6, 40, generator=stream(301)).to(device) * 400
    rows[0, :3] = torch.tensor([torch.nan, torch.inf, -1e30])
    slots = torch.tensor([5, 0, -7, 11, 12, 3], device=device)
    caches = [torch.zeros(3, 4, 1, 40, device=device).to(dtype) for _ in range(2)]
    by("kernel", ops.qsa_store_cache_rows, caches[0], slots, rows)
    by("torch", ops.qsa_store_cache_rows, caches[1], slots, rows)
    assert_bitwise_equal(*caches)


@pytest.mark.parametrize("shape", [(0, 4, 1, 8), (2, 4, 1, 8)])
def test_store_cache_rows_with_nothing_to_write(by: Any, device: torch.device, shape: tuple[int, ...]) -> None:
    cache = torch.full(shape, 7.0, device=device)
    for rows in (0, 2):
        slots = torch.full((rows,), -1, device=device)
        by("kernel", ops.qsa_store_cache_rows, cache, slots, torch.zeros(rows, 8, device=device))
    assert bool((cache == 7).all())


def test_store_cache_rows_far_into_a_cache(by: Any, device: torch.device) -> None:
    """Pages that lie further apart than 32 bits count, by strides over memory that they share."""
    memory = torch.zeros(4096, dtype=torch.int16, device=device)
    slots, rows = torch.tensor([2**33 + 1, 2], device=device), torch.full((2, 8), 5, dtype=torch.int16, device=device)
    cache = memory.as_strided((2**33, 4, 1, 8), (0, 8, 8, 1))
    by("kernel", ops.qsa_store_cache_rows, cache, slots, rows)
    assert memory.nonzero()[:, 0].tolist() == list(range(8, 24))
