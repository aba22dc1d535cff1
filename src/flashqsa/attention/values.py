"""Value checks of what a caller asks to attend, read on the host where that is allowed."""

from __future__ import annotations

import torch

from flashqsa.errors import ArgumentError
from flashqsa.plan import StepPlan


def check_token_values(where: str, token_ids: torch.Tensor, plan: StepPlan) -> None:
    """Counts within the width; ids valid, visible and unique up to the count.

    Raises:
        ArgumentError: Naming the first row that breaks a rule.
    """
    live = plan.request_ids >= 0
    ids, counts = token_ids[:, :-1], token_ids[:, -1]
    width = ids.shape[1]
    wrong = live & ((counts < 0) | (counts > width))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise ArgumentError(
            f"{where}: token_ids must hold a count in [0, {width}] in its last column, got {int(counts[row])} in row "
            f"{row}. Lay the list out as expand_tokens does."
        )
    valid = live[:, None] & (torch.arange(width, device=ids.device)[None] < counts[:, None])
    outside = valid & ((ids < 0) | (ids > plan.positions[:, None]))
    if bool(outside.any()):
        row, column = (int(x) for x in outside.nonzero()[0])
        raise ArgumentError(
            f"{where}: token_ids must be in [0, position of the row] up to the count, got {int(ids[row, column])} at "
            f"row {row} with position {int(plan.positions[row])}. A row attends itself and its past."
        )
    rises = ((ids[:, 1:] > ids[:, :-1]) | ~valid[:, 1:]).all(dim=1)  # as expand_tokens has them: nothing to sort
    fillers = torch.arange(-width, 0, device=ids.device)[None]
    ordered = torch.where(valid, ids, fillers)[~rises].sort(dim=1).values
    twice = torch.zeros_like(live)
    twice[~rises] = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)
    if bool(twice.any()):
        row = int(twice.nonzero()[0, 0])
        raise ArgumentError(
            f"{where}: token_ids must name each token once, got one twice in row {row}. Remove the duplicate."
        )
