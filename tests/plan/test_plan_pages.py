"""Caches whose pages are larger or smaller than the plan's are refused, each tensor on its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.cache import LayerCache
from flashqsa.errors import ShapeError
from flashqsa.plan import StepPlan, plan_step


@pytest.fixture
def plan() -> StepPlan:
    one = torch.ones(1, dtype=torch.int32)
    return plan_step(
        torch.cat([one - 1, one]), one * 9, one[None] - 1, page_tokens=16, block_tokens=4, topk_blocks=8,
        max_query_len=1, max_seq_len=9, ring_ids=one, ring_tokens=8,
    )  # fmt: skip


def cache(*, tokens: int = 16, blocks: int = 4) -> LayerCache:
    kv = torch.zeros(2, tokens, 1, 8)
    return LayerCache(kv, kv.clone(), torch.zeros(2, blocks, 8), None, None)


def test_pages_that_fit(plan: StepPlan) -> None:
    plan.check_cache("somewhere", cache())


@pytest.mark.parametrize("sizes", [{"tokens": 15}, {"tokens": 17}, {"blocks": 3}, {"blocks": 5}])
def test_pages_of_another_size(refuses: Any, plan: StepPlan, sizes: dict[str, int]) -> None:
    with refuses(ShapeError, "somewhere", str(next(iter(sizes.values())))):
        plan.check_cache("somewhere", cache(**sizes))
