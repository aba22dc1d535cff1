"""`CacheLayout` and ring capacity: what a page and a request cost, counted on the tensors themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.cache import CacheLayout, ring_capacity
from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError, DTypeError
from flashqsa.testing import tiny_config


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("drafts", range(17))
def test_ring_capacity_fault_9_holds_the_open_block_and_all_drafts(block_tokens: int, drafts: int) -> None:
    capacity = ring_capacity(block_tokens, drafts)
    assert capacity % block_tokens == 0
    assert block_tokens + drafts <= capacity < block_tokens + drafts + block_tokens


@pytest.mark.parametrize("drafts", range(17))
def test_ring_capacity_fault_9_no_rejected_draft_overwrites_the_open_block(drafts: int) -> None:
    """Drafts at every offset: the slots they take are not those of the block that is still open."""
    capacity = ring_capacity(4, drafts)
    for accepted in range(40, 44):
        open_block = {p % capacity for p in range(accepted // 4 * 4, accepted)}
        rejected = {p % capacity for p in range(accepted, accepted + drafts)}
        assert not open_block & rejected


@pytest.mark.parametrize(("block_tokens", "drafts"), [(0, 0), (-4, 2), (4, -1)])
def test_ring_capacity_refuses(refuses, block_tokens: int, drafts: int) -> None:
    bad = ("speculative_rows", drafts) if drafts < 0 else ("block_tokens", block_tokens)
    with refuses(ArgumentError, "ring_capacity", f"{bad[0]} must be a whole number", f"got {bad[1]}"):
        ring_capacity(block_tokens, drafts)


@pytest.mark.parametrize(("block_tokens", "drafts"), [(4.5, 1), (4.0, 1), (True, 1), (4, 1.0), (4, None)])
def test_ring_capacity_takes_whole_numbers_only(refuses, block_tokens: Any, drafts: Any) -> None:
    with refuses(ArgumentError, "ring_capacity", "must be a whole number"):
        ring_capacity(block_tokens, drafts)


@pytest.mark.parametrize(
    "name", ["page_tokens", "block_tokens", "kv_heads", "head_dim", "index_head_dim", "ring_tokens"]
)
@pytest.mark.parametrize("value", [16.0, True, None, "16"], ids=repr)
def test_layout_takes_whole_numbers_only(refuses, name: str, value: Any) -> None:
    sizes = {"page_tokens": 16, "block_tokens": 4, "kv_heads": 1, "head_dim": 16, "index_head_dim": 16}
    with refuses(ArgumentError, "CacheLayout", f"{name} must be a whole number", f"got {value!r}"):
        CacheLayout(**sizes | {"ring_tokens": 8, name: value})


def test_layout_takes_dtypes_of_caches_only(refuses) -> None:
    for name in ("kv_dtype", "index_dtype", "ring_dtype"):
        with refuses(DTypeError, "CacheLayout", name, "torch.int32"):
            CacheLayout(16, 4, 1, 16, 16, 8, **{name: torch.int32})


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "index_dtype"),
    [
        (torch.bfloat16, None, None),
        (torch.float32, torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e4m3fn, None),
    ],
    ids=str,
)
@pytest.mark.parametrize("page_tokens", [16, 80, 1616])
def test_layout_bytes_equal_those_of_allocated_tensors(
    page_tokens: int, dtype: torch.dtype, kv_dtype: torch.dtype | None, index_dtype: torch.dtype | None
) -> None:
    config = QSAConfig.from_dict(tiny_config())
    layout = CacheLayout.from_config(
        config, page_tokens=page_tokens, speculative_rows=3, dtype=dtype, kv_dtype=kv_dtype, index_dtype=index_dtype
    )
    kv = torch.zeros(2, page_tokens, config.kv_heads, config.head_dim, dtype=kv_dtype or dtype)
    block_keys = torch.zeros(page_tokens // 4, config.index_head_dim, dtype=index_dtype or dtype)
    ring = torch.zeros(8, config.index_head_dim, dtype=dtype)
    positions = torch.zeros(8, 3, dtype=torch.int64)
    assert layout.page_bytes == kv.nbytes + block_keys.nbytes
    assert layout.request_bytes == ring.nbytes + positions.nbytes
    assert layout.token_bytes == (kv.nbytes + block_keys.nbytes) / page_tokens
    assert layout.page_blocks == page_tokens // 4


def test_layout_of_the_released_model_counts_256_bytes_a_block() -> None:
    layout = CacheLayout(
        page_tokens=64, block_tokens=4, kv_heads=2, head_dim=256, index_head_dim=128, ring_tokens=ring_capacity(4)
    )
    kv_bytes = 2 * 2 * 256 * 2
    assert layout.token_bytes == kv_bytes + 256 / 4


@pytest.mark.parametrize("page_tokens", [0, -16, 2, 18, 81])
def test_layout_fault_16_refuses_pages_of_broken_blocks(refuses, page_tokens: int) -> None:
    with refuses(ArgumentError, "CacheLayout", "page_tokens", "multiple of block_tokens = 4", f"got {page_tokens}"):
        CacheLayout.from_config(QSAConfig.from_dict(tiny_config()), page_tokens=page_tokens)


@pytest.mark.parametrize("ring_tokens", [0, 3, 6])
def test_layout_refuses_rings_of_broken_blocks(refuses, ring_tokens: int) -> None:
    with refuses(ArgumentError, "CacheLayout", "ring_tokens", f"got {ring_tokens}", "ring_capacity"):
        CacheLayout(page_tokens=16, block_tokens=4, kv_heads=2, head_dim=64, index_head_dim=32, ring_tokens=ring_tokens)
