"""`merge_selections`: shards of the context and of the rows equal one selection over the whole."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flashqsa.errors import ArgumentError, DeviceError, DTypeError, SelectionError, ShapeError
from flashqsa.results import Selection
from flashqsa.selection import merge_selections
from flashqsa.testing import (
    StepCase,
    assert_bitwise_equal,
    assert_same_selection,
    assert_selection_form,
    assert_unchanged,
    oracles,
    snapshot,
    stream,
)

TOPK = 20


def assert_same(merged: Selection, whole: Selection) -> None:
    for name in ("block_ids", "block_counts", "scores", "visible_blocks", "request_ids"):
        assert_bitwise_equal(getattr(merged, name), getattr(whole, name), name)
    assert merged.layer_id == whole.layer_id


def integers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=stream(seed, *shape)).float()


@pytest.mark.parametrize("shards", range(1, 9))
def test_fault_20_shards_of_the_context_equal_the_whole(key_rows: Any, select: Any, backend: str, shards: int) -> None:
    """Each request is cut at places of its own; one shard has nothing of any of them."""
    blocks = [150, 512, 7, 1, 64]
    keys = [integers(m, 16, seed=90 + i) for i, m in enumerate(blocks)]
    queries = [integers(1, 4, 16, seed=95 + i) for i in range(len(blocks))]
    whole = select(key_rows(keys, queries, seed=90, topk_blocks=TOPK), backend=backend, return_scores=True)
    cuts = torch.stack([torch.randint(0, m + 1, (shards + 1,), generator=stream(91, m)) for m in blocks])
    cuts = cuts.sort(dim=1).values
    cuts[:, 0], cuts[:, -1] = 0, torch.tensor(blocks)
    if shards > 1:
        cuts[:, 1] = 0
    parts, starts = [], []
    for shard in range(shards):
        own = [each[a:b] for each, a, b in zip(keys, cuts[:, shard], cuts[:, shard + 1], strict=True)]
        parts.append(
            select(key_rows(own, queries, seed=92 + shard, topk_blocks=TOPK), backend=backend, return_scores=True)
        )
        starts.append(cuts[:, shard].to(torch.int64 if shard % 2 else torch.int32))
    before = snapshot(parts, starts)
    merged = merge_selections(parts, first_blocks=starts)
    assert_unchanged(before)
    assert_selection_form(merged, TOPK)
    assert_same(merged, dataclasses.replace(whole, layer_id=None))


def test_fault_20_a_context_of_2050_tokens_cut_inside_a_block(key_rows: Any, select: Any, backend: str) -> None:
    """The cut at token 1,025 lies inside block 256, which one of the shards then has whole."""
    keys, query = integers(512, 16, seed=100), integers(1, 4, 16, seed=101)
    options = dict(topk_blocks=300, seed=100)
    whole = select(key_rows([keys], [query], **options), backend=backend, return_scores=True)
    parts = [
        select(key_rows([own], [query], **options), backend=backend, return_scores=True)
        for own in (keys[:256], keys[256:])
    ]
    assert_same(merge_selections(parts, first_blocks=[0, 1025 // 4]), whole)


def test_fault_02_the_lower_id_wins_across_shards(scored_rows: Any, select: Any, backend: str) -> None:
    scores = torch.tensor([1.0, 0.0, -0.0, 2.0]).repeat(300)
    options = dict(rows=1, topk_blocks=500, seed=102)
    whole = select(scored_rows(scores, **options), backend=backend, return_scores=True)
    bounds = [0, 1, 400, 401, 1200]
    parts = [
        select(scored_rows(scores[a:b], **options), backend=backend, return_scores=True)
        for a, b in itertools.pairwise(bounds)
    ]
    order = [2, 0, 3, 1]  # which shard comes first decides nothing
    merged = merge_selections([parts[i] for i in order], first_blocks=[bounds[i] for i in order])
    assert_same(merged, whole)
    assert merged.block_ids[0].tolist() == oracles.select_best(scores, 500)


def hide_rows(selection: Selection, hidden: torch.Tensor, *, visible: bool = True) -> Selection:
    """What a shard of the rows has: nothing of the rows hidden."""
    assert selection.scores is not None
    return dataclasses.replace(
        selection,
        block_ids=selection.block_ids.masked_fill(hidden[:, None], -1),
        block_counts=selection.block_counts.masked_fill(hidden, 0),
        scores=selection.scores.masked_fill(hidden[:, None], -torch.inf),
        visible_blocks=selection.visible_blocks.masked_fill(hidden, 0) if visible else selection.visible_blocks,
        request_ids=selection.request_ids.masked_fill(hidden, -1),
    )


@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_shards_of_the_rows_equal_the_whole(integer_step: Any, select: Any, shards: int) -> None:
    case = StepCase("rows", ((0, 37), (200, 9), (50, 1), (0, 0), (0, 2)), padding_rows=2)
    whole = select(integer_step(case, seed=103), return_scores=True)
    owner = torch.randint(0, shards, (case.num_rows,), generator=stream(103, shards))
    parts = [hide_rows(whole, owner != shard, visible=bool(shard % 2)) for shard in range(shards)]
    assert_same(merge_selections(parts), whole)


def lone(scores: Sequence[float], topk: int, *, first: int = 0, garbage: int = -1) -> Selection:
    """One row that selected among blocks of given scores; what lies past its count is garbage."""
    ids = oracles.select_best(scores, topk)
    rest = topk - len(ids)
    return Selection(
        block_ids=torch.tensor([[g + first for g in ids] + [garbage] * rest], dtype=torch.int32),
        block_counts=torch.tensor([len(ids)], dtype=torch.int32),
        scores=torch.tensor([[scores[g] for g in ids] + [math.nan if garbage >= 0 else -math.inf] * rest]),
        visible_blocks=torch.tensor([len(scores)], dtype=torch.int32),
        request_ids=torch.zeros(1, dtype=torch.int32),
    )


@example(parts=[[-0.0], [0.0], [-0.0]], topk=2, garbage=-1, global_ids=False)
@given(
    parts=st.lists(
        st.lists(st.one_of(st.sampled_from([0.0, -0.0, 1.0, math.inf, math.nan]), st.floats(width=32)), max_size=9),
        min_size=1, max_size=8,
    ),
    topk=st.integers(1, 12),
    garbage=st.sampled_from([-1, 0, 2**31 - 1]),
    global_ids=st.booleans(),
)  # fmt: skip
def test_merged_scores_of_any_kind_rank_as_one_list(
    parts: list[list[float]], topk: int, garbage: int, global_ids: bool
) -> None:
    starts = [sum(len(part) for part in parts[:i]) for i in range(len(parts))]
    shards = [
        lone(part, topk, first=start if global_ids else 0, garbage=garbage)
        for part, start in zip(parts, starts, strict=True)
    ]
    merged = merge_selections(shards, first_blocks=None if global_ids else starts)
    everything = [score for part in parts for score in part]
    assert_same_selection(merged, [oracles.select_best(everything, topk)])
    assert merged.visible_blocks.tolist() == [len(everything)]
    merged_again = merge_selections([merged])
    assert_bitwise_equal(merged_again.block_ids, merged.block_ids)


def test_merging_selections_without_rows() -> None:
    nothing = lone([1.0], 3).take(torch.zeros(0, dtype=torch.int64))
    merged = merge_selections([nothing, nothing])
    assert merged.block_ids.tolist() == []
    assert merged.scores is not None


def test_merging_leaves_ids_up_to_the_last_int32() -> None:
    merged = merge_selections([lone([1.0, 2.0], 3), lone([2.0], 3)], first_blocks=[2**31 - 3, 2**31 - 1])
    assert merged.block_ids.tolist() == [[2**31 - 3, 2**31 - 2, 2**31 - 1]]


def test_merge_selections_refuses_shards_that_do_not_fit(refuses: Any) -> None:
    shard = dataclasses.replace(lone([1.0, 2.0], 3), layer_id=5)
    where = "merge_selections"
    with refuses(ArgumentError, where, "selections must not be empty"):
        merge_selections([])
    with refuses(ArgumentError, where, "selections must have scores"):
        merge_selections([shard, dataclasses.replace(shard, scores=None)])
    with refuses(SelectionError, where, "one layer", "5 and 6"):
        merge_selections([shard, dataclasses.replace(shard, layer_id=6)])
    with refuses(ShapeError, where, "block_ids must be [T, K] = [1, 3]", "[1, 4]"):
        merge_selections([shard, dataclasses.replace(lone([1.0], 4), layer_id=5)])
    with refuses(ShapeError, where, "block_ids", "[2, 3]"):
        merge_selections([shard, shard.take(torch.tensor([0, 0]))])
    with refuses(ShapeError, where, "scores", "[1, 2]"):
        merge_selections([dataclasses.replace(shard, scores=torch.zeros(1, 2))])
    with refuses(DTypeError, where, "scores", "float64"):
        merge_selections([dataclasses.replace(shard, scores=torch.zeros(1, 3, dtype=torch.float64))])
    with refuses(DTypeError, where, "block_counts", "int64"):
        merge_selections([dataclasses.replace(shard, block_counts=torch.zeros(1, dtype=torch.int64))])
    with refuses(DeviceError, where, "visible_blocks", "meta"):
        merge_selections([dataclasses.replace(shard, visible_blocks=shard.visible_blocks.to("meta"))])


def test_merge_selections_refuses_starts_that_do_not_fit(refuses: Any) -> None:
    one, two = lone([1.0, 2.0], 3), lone([3.0], 3)
    where = "merge_selections"
    with refuses(ArgumentError, where, "first_blocks must have one entry", "2 selections", "got 1"):
        merge_selections([one, two], first_blocks=[0])
    with refuses(ArgumentError, where, "first_blocks must be in [0, 2**31)", "got -1"):
        merge_selections([one, two], first_blocks=[0, -1])
    with refuses(ArgumentError, where, "first_blocks", f"got {2**31}"):
        merge_selections([one, two], first_blocks=[0, torch.tensor([2**31])])
    with refuses(ArgumentError, where, "first_blocks must be a whole number", "1.5"):
        merge_selections([one, two], first_blocks=[0, 1.5])
    with refuses(ArgumentError, where, "first_blocks must keep block ids below 2**31", f"makes {2**31}"):
        merge_selections([two, one], first_blocks=[0, 2**31 - 1])
    with refuses(ArgumentError, where, "selections must be a Selection", "NoneType"):
        merge_selections([one, None])
    with refuses(ShapeError, where, "first_blocks must be [T] = [1]", "[2]"):
        merge_selections([one, two], first_blocks=[0, torch.tensor([2, 2])])
    with refuses(DTypeError, where, "first_blocks", "float32"):
        merge_selections([one, two], first_blocks=[0, torch.tensor([2.0])])
    with refuses(ArgumentError, where, "must not share blocks", "block 0 of row 0 twice"):
        merge_selections([one, two])
