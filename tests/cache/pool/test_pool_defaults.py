"""What a pool does unasked: nothing is poisoned, no draft row, the model's dtype, the config's layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa import CacheLayout, PagedPool


@pytest.mark.parametrize("made", ["from a layout", "from a config"])
def test_freed_memory_keeps_its_bytes(tiny_config: Any, monkeypatch: pytest.MonkeyPatch, made: str) -> None:
    """Filling it costs launches; only poison=True or FLASHQSA_DEBUG=1 do."""
    monkeypatch.delenv("FLASHQSA_DEBUG", raising=False)
    if made == "from a config":
        pool = PagedPool.from_config(tiny_config, page_tokens=8, num_pages=3, num_rings=2)
    else:
        layout = CacheLayout(page_tokens=8, block_tokens=4, kv_heads=1, head_dim=8, index_head_dim=8, ring_tokens=8)
        pool = PagedPool(layout, topk_blocks=2, num_pages=3, num_rings=2, layer_ids=[0])
    for listed in pool.tensors():
        listed.tensor.fill_(3)
    pool.open("a")
    pool.plan_step({"a": 11})
    pool.rollback("a", rows=3)
    pool.close("a")
    for listed in pool.tensors():
        if not listed.name.endswith("ring_positions"):
            assert bool((listed.tensor == 3).all()), listed.name


def test_the_defaults_of_a_pool_from_a_config(tiny_config: Any) -> None:
    pool = PagedPool.from_config(tiny_config, page_tokens=8, num_pages=3, num_rings=2)
    assert pool.speculative_rows == 0
    assert pool.layer_ids == tuple(tiny_config.qsa_layer_ids)
    assert pool.layout.kv_dtype == pool.layout.index_dtype == pool.layout.ring_dtype == torch.bfloat16
    assert {cache.k_scale for cache in pool.caches} == {cache.v_scale for cache in pool.caches} == {None}
    assert pool.caches[0].device == torch.device("cpu")
