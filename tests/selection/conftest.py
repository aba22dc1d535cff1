"""Steps whose scores are chosen: exact integers, or one score a block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from flashqsa.cache import LayerCache
from flashqsa.plan import StepPlan, plan_step
from flashqsa.results import Selection
from flashqsa.selection import select_blocks
from flashqsa.testing import (
    Step,
    StepCase,
    assert_selection_form,
    assert_unchanged,
    make_step,
    snapshot,
    stream,
)

BACKENDS = ("reference", "torch")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Both backends that need no kernel."""
    return str(request.param)


def _store(pages: torch.Tensor, slot_ids: torch.Tensor, rows: torch.Tensor) -> None:
    stored = rows.to(pages.dtype)
    assert torch.equal(stored.to(torch.float64), rows.to(torch.float64)), "the values must be exact in their dtype"
    places = (slot_ids // pages.shape[1], slot_ids % pages.shape[1])
    if pages.dtype == torch.float8_e4m3fn:
        pages.view(torch.uint8)[places] = stored.view(torch.uint8)
    else:
        pages[places] = stored


def _integer_step(case: StepCase, *, seed: int, largest: int = 3) -> Step:
    """A step whose index queries and block keys are integers in [-largest, largest], exact in every dtype.

    Products and sums of them are exact too, so every correct order of summation gives the same score, and ties are
    many. Values are functions of request, position and block alone.
    """
    step = make_step(case, seed=seed)
    requests = []
    for truth in step.requests:
        own = case.request_seed(truth.request_id)
        blocks, wide = truth.block_keys.shape[0], 2 * largest + 1
        keys = torch.randint(wide, (blocks, case.index_head_dim), generator=stream(seed, own, 90)) - largest
        for row, position in truth.rows():
            shape = (case.index_heads, case.index_head_dim)
            query = torch.randint(wide, shape, generator=stream(seed, own, 91, position)) - largest
            step.index_q[row] = query.to(step.index_q.dtype)
        _store(step.cache.block_keys, truth.block_slot_ids, keys)
        requests.append(dataclasses.replace(truth, block_keys=keys.to(torch.float64)))
    return dataclasses.replace(step, requests=requests)


@pytest.fixture
def integer_step() -> Callable[..., Step]:
    return _integer_step


@dataclasses.dataclass(frozen=True)
class KeyRows:
    """Rows over block keys given outright, in pages dealt out at random; nothing else about them is made up.

    Attributes:
        index_q: [T, Hi, Di].
        cache: The block keys; K and V hold one number.
        plan: The step.
        keys: [M, Di] block keys of each request.
    """

    index_q: torch.Tensor
    cache: LayerCache
    plan: StepPlan
    keys: list[torch.Tensor]


def _key_rows(
    keys: Sequence[torch.Tensor],
    queries: Sequence[torch.Tensor],
    *,
    seed: int,
    topk_blocks: int = 512,
    block_tokens: int = 4,
    page_blocks: int = 16,
    fill: float = torch.nan,
    dtype: torch.dtype = torch.float32,
) -> KeyRows:
    """Requests whose last row is the token that closes their last block.

    Args:
        keys: [M, Di] block keys of each request, one block at least.
        queries: [rows, Hi, Di] index queries of its last rows.
        seed: Seed of the page table.
        topk_blocks: `K`.
        block_tokens: `r`.
        page_blocks: Blocks of a page.
        fill: What free pages and the rest of last pages hold.
        dtype: Dtype of keys and queries.
    """
    blocks = [len(each) for each in keys]
    pages = [-(-count // page_blocks) for count in blocks]
    free = torch.randperm(sum(pages) + 2, generator=stream(seed, 92)).tolist()
    block_keys = torch.full((len(free), page_blocks, keys[0].shape[1]), fill, dtype=torch.float32)
    table = torch.full((len(keys), max(pages) + 1), 2**31 - 1, dtype=torch.int32)
    for request, each in enumerate(keys):
        for column in range(pages[request]):
            table[request, column] = page = free.pop()
            part = each[column * page_blocks : (column + 1) * page_blocks]
            block_keys[page, : len(part)] = part
    rows = torch.tensor([0] + [len(each) for each in queries])
    lens = [count * block_tokens for count in blocks]
    plan = plan_step(
        rows.cumsum(0).to(torch.int32),
        torch.tensor(lens, dtype=torch.int32),
        table,
        page_tokens=page_blocks * block_tokens,
        block_tokens=block_tokens,
        topk_blocks=topk_blocks,
        max_query_len=int(rows.max()),
        max_seq_len=max(lens),
        num_pages=len(block_keys),
    )
    kv = torch.zeros(1, 1, 1, 1).expand(len(block_keys), page_blocks * block_tokens, 1, 1)
    return KeyRows(
        torch.cat([each.to(dtype) for each in queries]),
        LayerCache(kv, kv, block_keys.to(dtype), None, None),
        plan,
        [each.to(dtype) for each in keys],
    )


@pytest.fixture
def key_rows() -> Callable[..., KeyRows]:
    return _key_rows


def _scored_rows(scores: Sequence[float] | torch.Tensor, *, rows: int = 1, seed: int, **options: Any) -> KeyRows:
    """One request whose rows score its blocks with given numbers, times a power of two of the row's own.

    A score must not be negative (ReLU). An index query is its factor in the first dimension, where the keys hold the
    scores; the keys' other dimensions hold noise that it ignores.
    """
    numbers = torch.as_tensor(scores, dtype=torch.float32)
    keys = torch.randn(len(numbers), 8, generator=stream(seed, 93))
    keys[:, 0] = numbers
    queries = torch.zeros(rows, 1, 8)
    queries[:, 0, 0] = 2.0 ** (torch.arange(rows) % 7 - 3)
    return _key_rows([keys], [queries], seed=seed, **options)


@pytest.fixture
def scored_rows() -> Callable[..., KeyRows]:
    return _scored_rows


def _select(inputs: Step | KeyRows, **options: Any) -> Selection:
    """`select_blocks` of a step, with what every call promises checked: inputs untouched, ids in their form."""
    before = snapshot(inputs.cache, inputs.plan, inputs.index_q)
    selection = select_blocks(inputs.index_q, inputs.cache, inputs.plan, **options)
    assert_unchanged(before)
    assert_selection_form(selection, inputs.plan.topk_blocks)
    if isinstance(inputs, Step):
        inputs.assert_guards_intact()
    return selection


@pytest.fixture
def select() -> Callable[..., Selection]:
    return _select
