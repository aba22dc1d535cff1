"""Rows of a batch stay themselves: beside longer ones, behind padding, and when batches are merged and split."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flashqsa.testing import assert_within_budget

BUDGET = 2048


def _padded(tokens: torch.Tensor, pads: tuple[int, ...]) -> dict[str, torch.Tensor]:
    mask = (torch.arange(tokens.shape[1])[None] >= torch.tensor(pads)[:, None]).long()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return {"input_ids": tokens.masked_fill(mask == 0, 301), "attention_mask": mask, "position_ids": positions}


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "pads",
    [
        pytest.param((2048, 2, 0), id="fault_25_contexts_1_2047_2049"),
        pytest.param((7, 4, 3, 1, 0), id="fault_27_pads_before_2055_tokens"),
    ],
)
def test_fault_25_27_rows_across_a_budget_of_2048(
    only_qsa: Any,
    make_model: Any,
    make_tokens: Any,
    watch: Any,
    on: Any,
    assert_same_sets: Any,
    exactly: Any,
    pads: tuple[int, ...],
) -> None:
    """As transformers selects them, and each row as it is alone."""
    model = make_model(only_qsa, num_hidden_layers=1, layer_types=["full_attention"], indexer_budget=BUDGET)
    length = 2049 if max(pads) == BUDGET else 2055 + max(pads)
    inputs = _padded(make_tokens(len(pads), length), pads)
    with watch() as stock:
        expected = model(**inputs).logits
    singles = []
    with on(model):
        with watch() as ours:
            logits = model(**inputs).logits
        for row, pad in enumerate(pads):
            with watch() as alone:
                singles.append(model(inputs["input_ids"][row : row + 1, pad:]).logits)
            tokens = ours[0].tokens[row]
            assert not bool(tokens[:, :pad].any()), "padding is never attended"
            differs = (tokens[pad:, pad:] != alone[0].tokens[0]).any(dim=1) & ~alone[0].close[0]
            assert not bool(differs.any()), f"row {row}: padding moves the blocks"
            open_block = (torch.arange(length - pad) + 1) % only_qsa.ratio != 0
            assert bool(tokens[pad:, pad:].diagonal()[open_block].all()), "a row attends its own token"
    assert assert_same_sets(ours, stock, inputs["attention_mask"].bool()) <= 1
    assert ours[0].sparse_rows or max(pads) == BUDGET, "some rows must have something to leave out"
    with exactly(model) as exact_model:
        for row, pad in enumerate(pads):
            exact, stock_row = (
                exact_model(inputs["input_ids"][row : row + 1, pad:]).logits,
                expected[row : row + 1, pad:],
            )
            assert_within_budget(singles[row], stock_row, exact, f"row {row} alone")
            assert_within_budget(logits[row : row + 1, pad:], stock_row, exact, f"row {row}")


def _merged(caches: list[Any]) -> Any:
    """One cache of what several hold, made from tensors alone, as a server that batches requests does it."""
    merged = copy.deepcopy(caches[0])
    for layer_id, layer in enumerate(merged.layers):
        sources = [cache.layers[layer_id] for cache in caches]
        for name in ("keys", "values", "indexer_keys"):
            setattr(layer, name, torch.cat([getattr(source, name) for source in sources]))
        if layer.indexer_position_ids is not None:
            layer.indexer_position_ids = torch.cat([source.indexer_position_ids for source in sources], dim=1)
    return merged


@torch.no_grad()
def test_fault_26_merge_four_remove_one_extend_and_split(
    only_qsa: Any, make_model: Any, make_tokens: Any, on: Any, exactly: Any
) -> None:
    """The pooled keys beside a cache follow, or are made anew; nobody gets those of a neighbour."""
    model = make_model(only_qsa)
    texts, pieces = make_tokens(4, 180), [(0, 130), (130, 139), *((t, t + 1) for t in range(139, 180))]
    merged_from, split_from = 2, 12
    rows = torch.tensor([0, 2, 3])
    with on(model):
        caches, logits = [], []
        for row in range(4):
            cache, said = None, []
            for start, end in pieces[:merged_from]:
                out = model(texts[row : row + 1, start:end], cache=cache, use_cache=True)
                cache = out.cache
                said.append(out.logits)
            caches.append(cache)
            logits.append(said)
        cache = _merged(caches)
        model(texts[:, 139:140], cache=copy.deepcopy(cache))  # pooled for four, then left
        cache.batch_select_indices(rows)
        for start, end in pieces[merged_from:split_from]:
            out = model(texts[rows, start:end], cache=cache)
            for index, row in enumerate(rows.tolist()):
                logits[row].append(out.logits[index : index + 1])
        for index, row in enumerate(rows.tolist()):
            alone = copy.deepcopy(cache)
            alone.batch_select_indices(torch.tensor([index]))
            for start, end in pieces[split_from:]:
                logits[row].append(model(texts[row : row + 1, start:end], cache=alone).logits)
        whole = model(texts, use_cache=False).logits
    with exactly(model) as exact_model:
        exact = exact_model(texts, use_cache=False).logits
    for row in rows.tolist():
        assert_within_budget(torch.cat(logits[row], dim=1)[0], whole[row], exact[row], f"row {row}")
