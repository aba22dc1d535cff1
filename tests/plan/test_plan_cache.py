"""`check_cache`: a plan only meets caches that hold every slot it reaches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashqsa.cache import LayerCache
from flashqsa.errors import ArgumentError, DeviceError, ShapeError
from flashqsa.plan import StepPlan, plan_step


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(**overrides: Any) -> StepPlan:
    """Requests of 20 tokens (decode) and 5 tokens (prefill) on pages 4, 1 and 2; page 9 is garbage past a length."""
    return plan_step(
        **{
            "query_starts": int32(0, 1, 6),
            "seq_lens": int32(20, 5),
            "page_table": torch.tensor([[4, 1, 9], [2, 9, -1]], dtype=torch.int32),
            "page_tokens": 16,
            "block_tokens": 4,
            "topk_blocks": 8,
            "max_query_len": 5,
            "max_seq_len": 64,
        }
        | overrides
    )


def contiguous() -> StepPlan:
    """Two requests of 20 and 41 tokens from slots 70 and 3, block slots 18 and 0."""
    return plan_step(
        int32(0, 1, 2), int32(20, 41), None, page_tokens=None, block_tokens=4, topk_blocks=8, max_query_len=1,
        max_seq_len=64, first_slots=torch.tensor([70, 3]), first_block_slots=torch.tensor([18, 0]),
    )  # fmt: skip


def cache_of(pages: int, page_tokens: int, page_blocks: int | None) -> LayerCache:
    k_pages = torch.zeros(pages, page_tokens, 2, 16)
    block_keys = None if page_blocks is None else torch.zeros(pages, page_blocks, 8)
    return LayerCache(k_pages, k_pages.clone(), block_keys, None, None)


def test_check_cache_takes_caches_that_just_hold_the_step() -> None:
    paged().check_cache("attend", cache_of(5, 16, 4))
    paged(num_pages=5).check_cache("attend", cache_of(6, 16, 4))
    contiguous().check_cache("attend", cache_of(2, 45, 12))
    contiguous().check_cache("attend", cache_of(2, 45, None))


def test_check_cache_refuses_another_page_size(refuses) -> None:
    with refuses(ShapeError, "attend", "k_pages", "page_tokens = 16", "got 32"):
        paged().check_cache("attend", cache_of(5, 32, 8))
    with refuses(ShapeError, "attend", "block_keys", "= 4 blocks", "got 8"):
        paged().check_cache("attend", cache_of(5, 16, 8))


def test_check_cache_refuses_a_pool_smaller_than_planned(refuses) -> None:
    with refuses(ArgumentError, "attend", "k_pages", "num_pages = 6", "got 5"):
        paged(num_pages=6).check_cache("attend", cache_of(5, 16, 4))


def test_check_cache_refuses_a_pool_without_the_pages_of_the_table(refuses) -> None:
    with refuses(ArgumentError, "attend", "k_pages", "80 slots", "4 pages of 16 tokens"):
        paged().check_cache("attend", cache_of(4, 16, 4))


def test_check_cache_fault_24_refuses_contiguous_caches_that_are_too_short(refuses) -> None:
    with refuses(ArgumentError, "attend", "k_pages", "90 slots", "2 pages of 44 tokens"):
        contiguous().check_cache("attend", cache_of(2, 44, 12))
    with refuses(ArgumentError, "attend", "block_keys", "23 block slots", "[2, 11]"):
        contiguous().check_cache("attend", cache_of(2, 45, 11))


def test_check_cache_refuses_another_device(refuses) -> None:
    k_pages = torch.zeros(5, 16, 2, 16, device="meta")
    with refuses(DeviceError, "attend", "plan must be on meta", "got cpu"):
        paged().check_cache("attend", LayerCache(k_pages, k_pages, None, None, None))


def test_check_cache_leaves_values_alone_off_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHQSA_DEBUG", raising=False)
    meta = {"device": "meta", "dtype": torch.int32}
    plan = paged(
        query_starts=torch.zeros(3, **meta),
        seq_lens=torch.zeros(2, **meta),
        page_table=torch.zeros(2, 3, **meta),
        num_rows=6,
    )
    k_pages = torch.zeros(1, 16, 2, 16, device="meta")
    plan.check_cache("attend", LayerCache(k_pages, k_pages, None, None, None))


def test_check_cache_follows_a_refill(refuses) -> None:
    plan, cache = paged(), cache_of(5, 16, 4)
    plan.check_cache("attend", cache)
    paged(page_table=torch.tensor([[4, 1, 9], [7, 9, -1]], dtype=torch.int32), out=plan)
    with refuses(ArgumentError, "attend", "k_pages", "128 slots"):
        plan.check_cache("attend", cache)


class ElementCount(TorchDispatchMode):
    """Largest result of any operation, in elements."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def test_check_cache_reads_the_live_part_of_a_wide_page_table() -> None:
    """Neither the table's width nor the bound on lengths decides what a check costs."""
    table = torch.full((2, 1 << 16), 9, dtype=torch.int32)
    table[:, :2] = torch.tensor([[4, 1], [2, 9]])
    plan, cache = paged(page_table=table, max_seq_len=1 << 20), cache_of(5, 16, 4)
    with ElementCount() as count:
        plan.check_cache("attend", cache)
    assert count.largest < 100
