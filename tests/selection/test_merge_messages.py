"""The first block that breaks the rule is the one that is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa import Selection, merge_selections
from flashqsa.errors import ArgumentError


@pytest.mark.parametrize(
    ("starts", "named"), [([5, -3], "got -3"), ([4, 2**31], f"got {2**31}"), ([-1, 2**31], "got -1")]
)
def test_the_start_out_of_range_is_named(refuses: Any, starts: list[int], named: str) -> None:
    rows = torch.zeros(2, dtype=torch.int32)
    shard = Selection(torch.zeros(2, 1, dtype=torch.int32), rows + 1, torch.zeros(2, 1), rows + 1, rows)
    with refuses(ArgumentError, "merge_selections", "first_blocks", named):
        merge_selections([shard], first_blocks=[torch.tensor(starts)])
