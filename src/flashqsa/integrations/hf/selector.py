"""What a caller's selector is given, and the checks of what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from flashqsa.cache import LayerCache
from flashqsa.cache.state import read_slots
from flashqsa.checks import expect
from flashqsa.errors import ArgumentError, DTypeError, SelectionError
from flashqsa.plan import StepPlan, plan_step
from flashqsa.results import Selection
from flashqsa.selection import select_blocks


@dataclass(frozen=True)
class SelectorContext:
    """What one layer selects from in one forward. Rows are [B, Q] flattened, padding included (`T` rows).

    Attributes:
        layer_id: Index of the layer.
        forward_id: Number of the forward in this process: one for all layers of a forward, also where gradient
            checkpointing runs a layer again.
        plan: The step: request, position and visible blocks of each row. A request is a batch row's sequence without
            its padding; `plan.row_groups()` lists their rows.
        cache: Keys, values and pooled block keys of the layer, this forward's included; to read, not to write.
        q: [T, Hq, D] attention queries, normed and rotated.
        index_q: [T, Hi, Di] index queries, normed and rotated.
        softmax_scale: What products of q and keys are multiplied by.
    """

    layer_id: int
    forward_id: int
    plan: StepPlan
    cache: LayerCache
    q: torch.Tensor
    index_q: torch.Tensor
    softmax_scale: float

    @cached_property
    def selection(self) -> Selection:
        """The model's own selection within the budget, computed when first asked for."""
        return select_blocks(self.index_q, self.cache, self.plan)

    def block_scores(self, first_row: int = 0, end_row: int | None = None) -> torch.Tensor:
        """The model's scores of the blocks that some rows see.

        Args:
            first_row: First of the rows.
            end_row: One past the last of them; all that follow by default. Memory grows with rows times blocks: ask
                for few rows at a time in long contexts.

        Returns:
            [rows, M] fp32 by block id, M being the most blocks that one of the rows sees; -inf where a row does not
            see a block, and in padding rows.
        """
        rows = slice(first_row, self.plan.num_rows if end_row is None else end_row)
        plan = _plan_of_rows(self.plan, rows)
        if not plan.topk_blocks:
            return self.index_q.new_empty(plan.num_rows, 0, dtype=torch.float32)
        scores = select_blocks(self.index_q[rows], self.cache, plan, return_scores=True).scores
        assert scores is not None
        return scores

    def keys(self, request_id: int) -> torch.Tensor:
        """Keys [tokens, Hkv, D] of one request of `plan`, from its first real token on, in the cache's dtype."""
        return self._tokens(self.cache.k_pages, request_id)

    def values(self, request_id: int) -> torch.Tensor:
        """Values [tokens, Hkv, D] of one request of `plan`, as `keys`."""
        return self._tokens(self.cache.v_pages, request_id)

    def _tokens(self, pages: torch.Tensor, request_id: int) -> torch.Tensor:
        ends = {group.request_id: group.end_position for group in self.plan.row_groups()}
        if request_id not in ends:
            raise ArgumentError(
                f"SelectorContext: request_id must be one of {sorted(ends)}, got {request_id}. "
                "Take it from plan.row_groups()."
            )
        token_ids = torch.arange(ends[request_id], device=pages.device)
        return read_slots(pages, self.plan.token_slots(request_id, token_ids))


def _plan_of_rows(plan: StepPlan, rows: slice) -> StepPlan:
    """The step of some of the rows, in which every row may select all that it sees; 0 blocks where none is seen."""
    assert plan.first_slots is not None
    assert plan.first_block_slots is not None
    starts, lens, requests = [0], [], []
    for request_id, count, seq_len in _runs(plan, rows):
        starts.append(starts[-1] + count)
        lens.append(seq_len)
        requests.append(request_id)
    longest, device = max(lens, default=0), plan.device
    of = torch.tensor(requests, dtype=torch.int64, device=device)
    planned = plan_step(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(lens, dtype=torch.int32, device=device),
        None,
        page_tokens=None,
        block_tokens=plan.block_tokens,
        topk_blocks=max(longest // plan.block_tokens, 1),
        max_query_len=max(starts[-1], 1),
        max_seq_len=longest,
        first_slots=plan.first_slots[of],
        first_block_slots=plan.first_block_slots[of],
        num_rows=starts[-1],
    )
    return planned if longest >= plan.block_tokens else replace(planned, topk_blocks=0)


def _runs(plan: StepPlan, rows: slice) -> Iterator[tuple[int, int, int]]:
    """Request, rows and length of the consecutive runs in some rows; padding rows have length 0."""
    row = rows.start
    for group in plan.row_groups():
        first, end = max(group.first_row, rows.start), min(group.end_row, rows.stop)
        if first >= end:
            continue
        if first > row:
            yield 0, first - row, 0
        yield group.request_id, end - first, group.first_position + end - group.first_row
        row = end
    if rows.stop > row:
        yield 0, rows.stop - row, 0


def checked_selection(context: SelectorContext, chosen: Any) -> Selection:
    """What a selector returned, as a selection that attention can follow.

    Raises:
        DTypeError: It is neither a tensor nor a Selection, or a tensor of another dtype.
        ShapeError, DeviceError: A tensor is of other rows, or elsewhere.
        SelectionError: Ids are not ascending, unique and visible with -1 behind them, or of another layer.
    """
    where, plan = "selector", context.plan
    if not isinstance(chosen, (torch.Tensor, Selection)):
        raise DTypeError(
            f"{where}: block_ids must be a tensor [T, K] or a Selection, got {type(chosen).__name__}. "
            "Return int32 ids, -1 behind the last of each row."
        )
    ids = chosen if isinstance(chosen, torch.Tensor) else chosen.block_ids
    dims = {"T": plan.num_rows}
    expect(where, "block_ids", ids, "T K", dims, dtypes=(torch.int32, torch.int64), device=plan.device,
           hint="Return int32 ids of every row, on the device of context.plan.")  # fmt: skip
    live = plan.request_ids >= 0
    if isinstance(chosen, torch.Tensor):
        counts = (ids >= 0).sum(dim=1)
        visible, scores = plan.visible_blocks, None
        _refuse(context, live & (ids < -1).any(dim=1), ids, "block_ids", "at least -1")
    else:
        for name in ("block_counts", "visible_blocks"):
            expect(where, name, getattr(chosen, name), "T", dims, dtypes=(torch.int32,), device=plan.device)
        if chosen.layer_id not in (None, context.layer_id):
            raise SelectionError(
                f"{where}: selection must be of layer {context.layer_id}, got one of layer {chosen.layer_id}. "
                "Select with the context's own queries and keys."
            )
        counts, visible, scores = chosen.block_counts, chosen.visible_blocks, chosen.scores
        _refuse(context, live & ((counts < 0) | (counts > ids.shape[1])), counts, "block_counts", "in [0, K]")
        later = live & ((visible < 0) | (visible > plan.visible_blocks))
        _refuse(context, later, visible, "visible_blocks", "at most those of the plan")
    column = torch.arange(ids.shape[1], device=ids.device)[None]
    valid = live[:, None] & (column < counts[:, None])
    outside = (valid & ((ids < 0) | (ids >= visible[:, None]))).any(dim=1)
    _refuse(context, outside, ids, "block_ids", "in [0, visible blocks of the row), -1 only behind them")
    falling = (valid[:, 1:] & (ids[:, 1:] <= ids[:, :-1])).any(dim=1)
    _refuse(context, falling, ids, "block_ids", "ascending and unique in a row")
    return Selection(
        block_ids=torch.where(valid, ids, -1).to(torch.int32),
        block_counts=torch.where(live, counts, 0).to(torch.int32),
        scores=scores,
        visible_blocks=torch.where(live, visible, 0).to(torch.int32),
        request_ids=plan.request_ids,
        layer_id=context.layer_id,
    )


def _refuse(context: SelectorContext, bad: torch.Tensor, values: torch.Tensor, name: str, rule: str) -> None:
    """Values are read on every device: a selector is for study, and what it chose wrongly must not be attended."""
    if not bool(bad.any()):
        return
    row = int(bad.nonzero()[0, 0])
    got = values[row].tolist()
    shown = f"{got[:8]}..." if isinstance(got, list) and len(got) > 8 else got
    raise SelectionError(
        f"selector: {name} must be {rule}, got {shown} in row {row} of layer {context.layer_id}, which sees "
        f"{int(context.plan.visible_blocks[row])} blocks. Correct the selector."
    )
