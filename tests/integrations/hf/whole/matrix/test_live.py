"""A few shapes at a time against a live oracle, row by row: so stored results cannot rot, and differences can be seen.

FLASHQSA_ORACLE_DAY, any integer, decides which; six in a row reach all shapes. Without it they are always the same, so
that a change passes or fails on any date.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from flashqsa.testing import error_budget

A_DAY = 4
USUAL_DAY = 8
SLACK = 1.5
"""How far one run may exceed its budget: the largest error of one stock run, which the budget doubles, is a draw."""


@pytest.fixture
def shape(turn: int, all_shapes: Any) -> Any:
    day = int(os.environ.get("FLASHQSA_ORACLE_DAY", USUAL_DAY))
    return all_shapes[(day + turn * len(all_shapes) // A_DAY) % len(all_shapes)]


@torch.no_grad()
@pytest.mark.parametrize("turn", range(A_DAY))
def test_the_oracle_says_what_is_stored(
    shape: Any, oracle_runs: Any, make_model: Any, make_runs: Any, store: Any, exactly: Any, truth_of: Any
) -> None:
    model, runs, stored = make_model(shape), make_runs(shape), store.read(shape)
    assert list(stored) == list(oracle_runs)
    for name, truth in stored.items():
        said = getattr(runs, name)(model)
        truth.check(said)
        with exactly(model) as exact_model:
            fresh = truth_of(said, runs.exact(said, exact_model))
        moved = (torch.tensor(fresh.exact) - torch.tensor(truth.exact)).abs().max()
        assert moved < truth.budget / 2, f"{name}: the float64 logits are not those that are stored"
        assert 0.25 < fresh.budget / truth.budget < 4, f"{name}: the error budget is not the one that is stored"


@torch.no_grad()
@pytest.mark.parametrize("way", ["single", "left", "right", "beams", "turns", "static", "chunked"])
@pytest.mark.parametrize("turn", range(A_DAY))
def test_row_by_row(
    shape: Any, way: str, make_model: Any, make_runs: Any, on: Any, exactly: Any, assert_same_sets: Any
) -> None:
    model, runs = make_model(shape), make_runs(shape)
    stock = getattr(runs, way)(model)
    with on(model):
        ours = getattr(runs, way)(model)
    assert torch.equal(ours.text, stock.text)
    assert torch.equal(ours.tokens, stock.tokens)
    left_out = assert_same_sets(ours.selected, stock.selected, None if way == "beams" else ours.real)
    rows = sum(s.close.numel() for s in stock.selected)
    assert left_out <= rows // 200, f"{left_out} of {rows} rows are tied by rounding: the shape shows too little"
    assert 2 * sum(s.sparse_rows for s in stock.selected) > rows, "most rows must have something to leave out"
    with exactly(model) as exact_model:
        exact = runs.exact(stock, exact_model)
    error = float((ours.logits.double() - exact).abs().max())
    budget = SLACK * error_budget(stock.logits, exact)
    assert error <= budget, f"{shape} {way}: a logit is off by {error:.3e}, {budget:.3e} are allowed"
