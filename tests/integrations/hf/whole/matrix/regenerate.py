"""Writes the stored oracle results anew, from transformers alone (about four seconds a shape):

python -m pytest -n 2 tests/integrations/hf/whole/matrix/regenerate.py

Shapes are numbers, see `SEEDS`: those of the first hundred for which the oracle leaves no row tied by rounding, so that
another processor's last bits change nothing here.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.no_grad()
def test_store_what_the_oracle_says(
    shape: Any, oracle_runs: Any, make_model: Any, make_runs: Any, exactly: Any, truth_of: Any, store: Any
) -> None:
    model, runs, truths = make_model(shape), make_runs(shape), {}
    for name in oracle_runs:
        said = getattr(runs, name)(model)
        with exactly(model) as exact_model:
            truths[name] = truth_of(said, runs.exact(said, exact_model))
    store.write(shape, truths)
    assert store.read(shape) == truths
