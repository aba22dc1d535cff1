"""Selections of known content, attention in hostile memory, and what it must be within."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from flashqsa.attention import attend, attend_tokens
from flashqsa.results import Selection
from flashqsa.testing import (
    Step,
    assert_unchanged,
    assert_within_budget,
    guarded,
    oracles,
    poison,
    snapshot,
    stream,
)

BACKENDS = ("reference", "torch")

Chosen = Callable[..., Selection]
Attended = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Both backends that need no kernel."""
    return str(request.param)


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    return scores.topk(count).indices.sort().values.to(torch.int32)


def _choose(
    step: Step, *, seed: int = 0, noise: float = 0.3, topk: int | None = None, counts: Sequence[int] | None = None
) -> Selection:
    """A random selection. What a row selects is a function of seed, request seed and position alone.

    Args:
        step: The step.
        seed: Seed of the choice.
        noise: How much neighbours differ: 0 for the same blocks as far as they see them, large for unrelated ones.
        topk: Blocks of a row at most, those of the plan by default.
        counts: Blocks of each row instead of min(topk, visible).
    """
    plan, topk = step.plan, step.plan.topk_blocks if topk is None else topk
    block_ids = torch.full((plan.num_rows, topk), -1, dtype=torch.int32)
    block_counts = torch.zeros(plan.num_rows, dtype=torch.int32)
    for request in step.requests:
        own = step.case.request_seed(request.request_id)
        common = torch.rand(1 << 16, generator=stream(seed, own, 70))
        for row, position in request.rows():
            visible = (position + 1) // plan.block_tokens
            count = min(topk, visible) if counts is None else counts[row]
            scores = common[:visible] + noise * torch.rand(visible, generator=stream(seed, own, 71, position))
            block_ids[row, :count] = _best(scores, count)
            block_counts[row] = count
    block_ids[plan.request_ids < 0] = 2**31 - 1  # what padding rows carry is never looked at
    return Selection(
        block_ids, block_counts, None, plan.visible_blocks.clone(), plan.request_ids.clone(), step.cache.layer_id
    )


@pytest.fixture
def choose() -> Chosen:
    """`choose(step, *, seed, noise, topk, counts)`: a random selection that follows rows through cuts and batches."""
    return _choose


def _attend_hostile(
    step: Step, chosen: Selection | torch.Tensor, *, gated: bool = True, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend into a poisoned strided output between canaries, and check that nothing else was written."""
    options.setdefault("cache", step.cache)
    plan = options.setdefault("plan", step.plan)
    dtype = options.get("out_dtype") or step.q.dtype
    target = guarded((*step.q.shape[:2], step.q.shape[2]), dtype, padding=(1, 1, 8))
    poison(target.view)
    before = snapshot(step.q, step.gate, options["cache"], plan, chosen)
    call = attend if isinstance(chosen, Selection) else attend_tokens
    out, lse = call(
        step.q, options.pop("cache"), chosen, options.pop("plan"),
        gate=step.gate if gated else None, return_lse=True, out=target.view, **options,
    )  # fmt: skip
    assert out is target.view
    target.assert_intact()
    step.assert_guards_intact()
    assert_unchanged(before)
    return out.clone(), lse


@pytest.fixture
def attend_hostile() -> Attended:
    """`attend_hostile(step, selection_or_token_ids, *, gated, ...)` -> output, lse; other arguments as `attend`."""
    return _attend_hostile


def _row_lists(step: Step, selection: Selection, include_tail: bool = True) -> list[list[int]]:
    """Tokens that each row attends, by the words of the contract."""
    r, lists = step.plan.block_tokens, []
    for row, position in enumerate(step.plan.positions.tolist()):
        if position < 0:
            lists.append([])
            continue
        ids = selection.block_ids[row, : int(selection.block_counts[row])].tolist()
        tokens = oracles.selected_tokens(ids, int(selection.visible_blocks[row]), position, r)
        lists.append(tokens if include_tail else tokens[: len(ids) * r])
    return lists


@pytest.fixture
def row_lists() -> Callable[..., list[list[int]]]:
    """`row_lists(step, selection, include_tail=True)`: token ids of each row."""
    return _row_lists


def _exact(
    step: Step, lists: Sequence[Sequence[int]], *, gated: bool = True, softmax_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and lse of every row in float64, nothing rounded."""
    out = torch.zeros(step.q.shape, dtype=torch.float64)
    lse = torch.full(step.q.shape[:2], -torch.inf, dtype=torch.float64)
    for request in step.requests:
        for row, _ in request.rows():
            gate = step.gate[row] if gated else None
            out[row], lse[row] = oracles.attend_row(
                step.q[row], request.k, request.v, lists[row], gate=gate, softmax_scale=softmax_scale
            )
    return out, lse


@pytest.fixture
def exact() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`exact(step, token_lists, *, gated, softmax_scale)`: float64 output and lse."""
    return _exact


def _textbook(
    step: Step, lists: Sequence[Sequence[int]], *, gated: bool = True, softmax_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as anybody would write it in fp32 (float64 for float64): what the definition is measured by."""
    wide = torch.float64 if step.q.dtype == torch.float64 else torch.float32
    out = torch.zeros(step.q.shape, dtype=step.q.dtype)
    lse = torch.full(step.q.shape[:2], -torch.inf, dtype=wide)
    scale = step.q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    for request in step.requests:
        for row, _ in request.rows():
            if not len(lists[row]):
                continue
            k, v = (x[lists[row]].to(wide).transpose(0, 1) for x in (request.k, request.v))
            q = step.q[row].to(wide).reshape(k.shape[0], -1, k.shape[2])
            scores = q @ k.transpose(1, 2) * scale
            lse[row] = scores.logsumexp(dim=-1).flatten()
            attended = (scores.softmax(dim=-1) @ v).reshape(step.q.shape[1:]).to(step.q.dtype)
            out[row] = attended.to(wide) * torch.sigmoid(step.gate[row].to(wide)) if gated else attended
    return out, lse


def _assert_attends(
    step: Step,
    lists: Sequence[Sequence[int]],
    got: tuple[torch.Tensor, torch.Tensor],
    backend: str,
    *,
    gated: bool = True,
    softmax_scale: float | None = None,
    definition: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Output and lse within the error budget; `definition` is what the reference returned, for other backends."""
    options: dict[str, Any] = {"gated": gated, "softmax_scale": softmax_scale}
    out, lse = _exact(step, lists, **options)
    low = definition if definition is not None else _textbook(step, lists, **options)
    assert_within_budget(got[0], low[0].to(got[0].dtype), out, f"{backend} output")
    assert_within_budget(got[1], low[1], lse, f"{backend} lse")


@pytest.fixture
def assert_attends() -> Callable[..., None]:
    """Compare a result with float64, within twice the error of the reference (or of a textbook form for itself)."""
    return _assert_attends


@pytest.fixture
def check() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`check(step, selection, backend, **options)`: attend in hostile memory, compare with float64, return the result.

    The torch backend is held to twice the error of the reference, the reference to twice that of a textbook form.
    """

    def checking(step: Step, selection: Selection, backend: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        lists = _row_lists(step, selection, options.get("include_tail", True))
        got = _attend_hostile(step, selection, backend=backend, **options)
        compared = {name: options[name] for name in ("gated", "softmax_scale") if name in options}
        definition = None
        if backend != "reference":
            definition = _attend_hostile(step, selection, backend="reference", **options)
        _assert_attends(step, lists, got, backend, definition=definition, **compared)
        return got

    return checking
