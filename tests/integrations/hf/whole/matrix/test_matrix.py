"""Every shape, run in every way: sets, 48 greedy tokens and logits are those that the oracle is known to say."""

from __future__ import annotations

from typing import Any

import pytest

from flashqsa.integrations import hf

WAYS = {
    "single": "single",
    "left": "left",
    "right": "right",
    "beams": "beams",
    "turns": "turns",
    "static": "single",
    "chunked": "single",
    "switched": "single",
}
"""Ways of running a model, and the oracle's run that says the same."""


@pytest.mark.parametrize("way", WAYS)
def test_it_says_what_the_oracle_said(
    shape: Any, way: str, make_model: Any, make_runs: Any, on: Any, store: Any
) -> None:
    model, runs, truth = make_model(shape), make_runs(shape), store.read(shape)[WAYS[way]]
    if way == "switched":
        said = runs.switched(model, on)
    else:
        with on(model):
            said = getattr(runs, way)(model)
    truth.check(said)
    ran = {layer.layer_id: layer for layer in hf.report(model)}
    assert list(ran) == [s.layer_id for s in said.selected]
    for layer in ran.values():
        assert layer.rows > layer.dense_rows, "rows beyond the budget"
        assert layer.dense_rows or way == "switched", "rows below it; there is no prefill since enabled last"


def test_shapes_are_of_every_kind(all_shapes: Any) -> None:
    assert len(all_shapes) >= 24
    assert {shape.ratio for shape in all_shapes} == {2, 4, 8}
    assert {shape.index[0] for shape in all_shapes} == set(range(1, 9))
    assert {shape.heads[1] for shape in all_shapes} == {1, 2, 3}
    assert {bool(shape.ngram) for shape in all_shapes} == {False, True}
    assert all(shape.budget & (shape.budget - 1) for shape in all_shapes), "budgets that are no power of two"
    assert all(shape.layers.count("full_attention") >= 2 for shape in all_shapes)
    for dims in ([shape.heads[2] for shape in all_shapes], [shape.index[1] for shape in all_shapes]):
        assert min(dims) == 32
        assert max(dims) == 128
    heads = [shape.heads[0] for shape in all_shapes]
    assert min(heads) == 2
    assert max(heads) == 15
