"""What has to hold before anything is measured."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.single_layer import SingleLayer
from flashqsa.results import Selection
from flashqsa.selection import expand_tokens
from flashqsa.testing import assert_within_budget

MOST_DIFFERING_ROWS = 1e-3
"""Share of rows whose selection may differ by blocks that fp32 cannot tell apart."""


class GateError(Exception):
    """An engine's result is wrong; nothing is measured."""


@contextmanager
def stable_topk() -> Iterator[None]:
    """`Tensor.topk` as a stable descending sort inside the block: of equal scores, the lower block first."""
    original = torch.Tensor.topk

    def topk(self: torch.Tensor, k: int, dim: int = -1, **_: Any) -> Any:
        values, indices = self.sort(dim=dim, descending=True, stable=True)
        return torch.return_types.topk((values.narrow(dim, 0, k), indices.narrow(dim, 0, k)))

    torch.Tensor.topk = topk
    try:
        yield
    finally:
        torch.Tensor.topk = original


def check_layer(layer: SingleLayer) -> dict[str, Any]:
    """Compare the layer under FlashQSA with transformers', and both with transformers' in float64.

    Rows that all three select alike must be within the error budget; rows that differ must be few.

    Returns:
        What was found: worst errors, budget, and rows left out.

    Raises:
        GateError: The outputs are further apart than rounding explains.
    """
    wide = copy.copy(layer)
    wide.attention = copy.deepcopy(layer.attention).double()
    wide.hidden = layer.hidden.double()
    wide.position_embeddings = tuple(table.double() for table in layer.position_embeddings)
    with torch.no_grad(), stable_topk():
        theirs, their_tokens = _output(layer), _their_tokens(layer)
        exact, exact_tokens = _output(wide), _their_tokens(wide)
    step = layer.step()
    with torch.no_grad():
        with layer.index_projection_given() as index_qk:
            selection = layer.select(index_qk, step)
        with layer.flashqsa_layer() as call:
            ours = call()
    our_tokens = _token_mask(selection, step.plan, layer.tokens)
    alike = ((our_tokens == their_tokens) & (our_tokens == exact_tokens)).all(dim=1)
    differing = int((~alike).sum())
    if differing > max(1, MOST_DIFFERING_ROWS * layer.tokens):
        raise GateError(f"{differing} of {layer.tokens} rows are selected differently; rounding explains a few")
    ours, theirs, exact = (output[0, alike] for output in (ours, theirs, exact))
    try:
        assert_within_budget(ours, theirs, exact, f"layer output at {layer.tokens} tokens")
    except AssertionError as error:
        raise GateError(str(error)) from error
    return {
        "rows_compared": int(alike.sum()),
        "rows_selected_differently": differing,
        "flashqsa_error": _worst(ours, exact),
        "transformers_error": _worst(theirs, exact),
    }


def _worst(output: torch.Tensor, exact: torch.Tensor) -> float:
    return float(f"{float((output.double() - exact).abs().max()):.3g}")


def _output(layer: SingleLayer) -> torch.Tensor:
    with layer.transformers_layer() as call:
        output = call()
    assert isinstance(output, torch.Tensor)
    return output


def _their_tokens(layer: SingleLayer) -> torch.Tensor:
    """[tokens, tokens] bool, what each row attends in transformers."""
    with layer.transformers_indexer() as call:
        mask = call()
    assert isinstance(mask, torch.Tensor)
    return mask[0, 0]


def _token_mask(selection: Selection, plan: Any, tokens: int) -> torch.Tensor:
    """[tokens, tokens] bool, what each row attends here."""
    token_ids = expand_tokens(selection, plan)[:, :-1].to(torch.int64)
    mask = torch.zeros(tokens, tokens + 1, dtype=torch.bool)
    return mask.scatter_(1, torch.where(token_ids >= 0, token_ids, tokens), True)[:, :tokens]
