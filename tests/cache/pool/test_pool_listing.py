"""What a pool keeps and what it costs, listed and computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa import PagedPool


@pytest.fixture
def pool(tiny_config: Any) -> PagedPool:
    return PagedPool.from_config(
        tiny_config, page_tokens=16, num_pages=5, num_rings=3, speculative_rows=3, dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn, k_scale=[0.5, 0.25], v_scale=2.0,
    )  # fmt: skip


def test_fault_33_every_tensor_is_listed(pool: PagedPool) -> None:
    listed = {x.name: (list(x.tensor.shape), x.dtype, x.row_tokens, x.shareable) for x in pool.tensors()}
    fp8, bf16 = torch.float8_e4m3fn, torch.bfloat16
    assert listed == {
        f"layer.{layer_id}.{name}": expected
        for layer_id in (3, 7)
        for name, expected in {
            "k_pages": ([5, 16, 1, 8], fp8, 1, True),
            "v_pages": ([5, 16, 1, 8], fp8, 1, True),
            "block_keys": ([5, 4, 8], bf16, 4, True),
            "ring": ([3, 8, 8], bf16, 1, False),
            "ring_positions": ([3, 8, 3], torch.int64, 1, False),
        }.items()
    }
    in_caches = {
        x.data_ptr()
        for cache in pool.caches
        for x in vars(cache).values()
        if isinstance(x, torch.Tensor) and x.dim() > 1
    }
    assert {x.tensor.data_ptr() for x in pool.tensors()} == in_caches, "no cache is left out"


def test_bytes_are_those_of_the_tensors(pool: PagedPool) -> None:
    """Per layer: 2 x 8 float8 and a quarter of 8 bf16 a token; 8 raw keys of 8 bf16 with three int64 a request."""
    assert pool.token_bytes == 2 * (2 * 8 + 8 * 2 / 4) == sum(x.token_bytes for x in pool.tensors() if x.shareable)
    shared = sum(x.tensor.nbytes for x in pool.tensors() if x.shareable)
    private = sum(x.tensor.nbytes for x in pool.tensors() if not x.shareable)
    assert shared == 5 * 16 * pool.token_bytes
    assert private == 3 * 2 * 8 * (8 * 2 + 3 * 8)
    summary = pool.summary()
    assert "2 layers: 40.0 bytes a token, 640 B a page, 640 B a request besides" in summary
    assert "in all 5.0 KiB" in summary
    lines = [line.split() for line in summary.splitlines()[1:6]]
    assert [line[0] for line in lines] == ["k_pages", "v_pages", "block_keys", "ring", "ring_positions"]
    assert [line[-1] for line in lines] == ["page", "page", "page", "private", "private"]


def test_the_released_model_costs_what_the_design_says() -> None:
    """2 x 2 heads x 256 bf16 and a quarter of 128 bf16 a token and layer."""
    from flashqsa import CacheLayout

    layout = CacheLayout(page_tokens=64, block_tokens=4, kv_heads=2, head_dim=256, index_head_dim=128, ring_tokens=8)
    pool = PagedPool(layout, topk_blocks=512, num_pages=1, num_rings=1, layer_ids=range(3, 48, 4))
    assert pool.token_bytes == 12 * (2048 + 64)
    assert "12 layers: 25,344.0 bytes a token, 1.5 MiB a page" in pool.summary()


def test_caches_are_found_by_layer(pool: PagedPool) -> None:
    assert [pool.cache(layer_id) for layer_id in pool.layer_ids] == list(pool.caches)
    assert [cache.k_scale for cache in pool.caches] == [0.5, 0.25]
    assert [cache.v_scale for cache in pool.caches] == [2.0, 2.0]
    assert [cache.layer_id for cache in pool.caches] == [3, 7]
