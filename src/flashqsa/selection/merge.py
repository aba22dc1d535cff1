"""`merge_selections`: one selection from the selections of shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashqsa.errors import ArgumentError, SelectionError, ShapeError
from flashqsa.results import Selection
from flashqsa.selection.ordering import UNSEEN, best_keys, order_keys, unpack_keys


def merge_selections(
    selections: Sequence[Selection], *, first_blocks: Sequence[int | torch.Tensor] | None = None
) -> Selection:
    """Join selections of the same rows made over shards of the context, or over shards of the rows.

    Shards of the context: each shard selected among its own blocks; `first_blocks` says where they start. Shards of
    the rows: each shard has all T rows, and a count of 0 for those that it does not own. Either way the result is the
    exact top-K of everything that was scored, under the same tie rule as one selection over the whole.

    Args:
        selections: One selection a shard, with scores, equal in T and layer.
        first_blocks: Global id of each shard's block 0, one number or a [T] tensor a shard; zeros by default (ids are
            global already).

    Returns:
        The merged selection with scores; its `visible_blocks` are the sums over the shards.

    Raises:
        ArgumentError: No selection, one without scores, or `first_blocks` of another length.
        ShapeError: The shards differ in rows or in K.
        SelectionError: The shards are of different layers.
    """
    where = "merge_selections"
    if not selections:
        raise ArgumentError(f"{where}: selections must not be empty. Pass one selection a shard.")
    starts: list[int | torch.Tensor] = [0] * len(selections) if first_blocks is None else list(first_blocks)
    if len(starts) != len(selections):
        raise ArgumentError(
            f"{where}: first_blocks must have one entry for each of {len(selections)} selections, got {len(starts)}."
        )
    first = selections[0]
    keys = []
    for shard, start in zip(selections, starts, strict=True):
        if shard.scores is None:
            raise ArgumentError(f"{where}: selections must have scores, got none. Select with return_scores=True.")
        if shard.block_ids.shape != first.block_ids.shape:
            raise ShapeError(
                f"{where}: selections must be alike in [T, K] = {list(first.block_ids.shape)}, got "
                f"{list(shard.block_ids.shape)}. Give every shard all rows; count 0 means that it owns none of a row."
            )
        if shard.layer_id != first.layer_id:
            raise SelectionError(
                f"{where}: selections must be of one layer, got layers {first.layer_id} and {shard.layer_id}."
            )
        valid = torch.arange(shard.block_ids.shape[1], device=first.block_ids.device)[None] < shard.block_counts[:, None]
        offset = start.to(torch.int64)[:, None] if isinstance(start, torch.Tensor) else start
        ids = torch.where(valid, shard.block_ids.to(torch.int64) + offset, 0)
        keys.append(torch.where(valid, order_keys(shard.scores, ids), UNSEEN))
    best = best_keys(torch.cat(keys, dim=-1), first.block_ids.shape[1])
    block_ids, scores = unpack_keys(best)
    request_ids = torch.stack([shard.request_ids for shard in selections]).amax(dim=0)
    visible = torch.stack([shard.visible_blocks for shard in selections]).sum(dim=0).to(torch.int32)
    counts = (block_ids >= 0).sum(dim=-1).to(torch.int32)
    return Selection(block_ids, counts, scores, visible, request_ids, first.layer_id)
