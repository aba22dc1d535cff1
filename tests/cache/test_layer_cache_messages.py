"""Which half of a pair is missing is what the message says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.cache import LayerCache
from flashqsa.errors import ArgumentError


@pytest.mark.parametrize("given", ["ring", "ring_positions"])
def test_the_half_that_was_given_is_named(refuses: Any, given: str) -> None:
    pair = {"ring": torch.zeros(3, 8, 8), "ring_positions": torch.zeros(3, 8, 3, dtype=torch.int64)}
    halves = {name: tensor if name == given else None for name, tensor in pair.items()}
    with refuses(ArgumentError, "LayerCache", f"got {given} alone"):
        LayerCache(torch.zeros(2, 16, 1, 8), torch.zeros(2, 16, 1, 8), None, **halves)
