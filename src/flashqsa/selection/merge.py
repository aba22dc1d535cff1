"""`merge_selections`: one selection from the selections of shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashqsa.checks import expect, expect_int, expect_type, values_are_checked
from flashqsa.errors import ArgumentError, SelectionError
from flashqsa.results import Selection
from flashqsa.selection.ordering import UNSEEN, best_keys, order_keys, unpack_keys

MAX_BLOCKS = 2**31


def merge_selections(
    selections: Sequence[Selection], *, first_blocks: Sequence[int | torch.Tensor] | None = None
) -> Selection:
    """Join selections of the same rows made over shards of the context, or over shards of the rows.

    Shards of the context: each shard selected among its own blocks; `first_blocks` says where they start. Shards of
    the rows: each shard has all T rows, and a count of 0 for those that it does not own. Either way the result is the
    exact top-K of everything that was scored, under the same tie rule as one selection over the whole.

    Args:
        selections: One selection a shard, with scores, equal in T and layer.
        first_blocks: Global id of each shard's block 0: one number, or an int64 or int32 tensor [T], a shard; zeros by
            default (ids are global already).

    Returns:
        The merged selection with scores; its `visible_blocks` are the sums over the shards.

    Raises:
        ArgumentError: No selection, one without scores, `first_blocks` of another length or out of range, or shards
            that share a block (values of tensors are read on the CPU, or with FLASHQSA_DEBUG=1).
        ShapeError, DTypeError, DeviceError: The shards differ in rows or in K, or a tensor does not fit them.
        SelectionError: The shards are of different layers.
    """
    where = "merge_selections"
    if not selections:
        raise ArgumentError(f"{where}: selections must not be empty, got none. Pass one selection a shard.")
    starts: list[int | torch.Tensor] = [0] * len(selections) if first_blocks is None else list(first_blocks)
    if len(starts) != len(selections):
        raise ArgumentError(
            f"{where}: first_blocks must have one entry for each of {len(selections)} selections, got {len(starts)}. "
            "Say where every shard begins."
        )
    expect_type(where, "selections[0]", selections[0], Selection)
    first, dims = selections[0], dict[str, int]()
    keys = []
    for shard, start in zip(selections, starts, strict=True):
        _check_shard(where, shard, start, dims, first)
        assert shard.scores is not None
        valid = torch.arange(dims["K"], device=first.block_ids.device)[None] < shard.block_counts[:, None]
        offset = start.to(torch.int64)[:, None] if isinstance(start, torch.Tensor) else start
        ids = torch.where(valid, shard.block_ids.to(torch.int64) + offset, 0)
        if values_are_checked(ids.device) and ids.numel() and int(ids.max()) >= MAX_BLOCKS:
            raise ArgumentError(
                f"{where}: first_blocks must keep block ids below 2**31, got one that makes {int(ids.max())}. "
                "Count blocks from the start of the request."
            )
        keys.append(torch.where(valid, order_keys(shard.scores, ids), UNSEEN))
    best = best_keys(torch.cat(keys, dim=-1), dims["K"])
    block_ids, scores = unpack_keys(best)
    if values_are_checked(block_ids.device):
        _check_shared(where, block_ids)
    request_ids = torch.stack([shard.request_ids for shard in selections]).amax(dim=0)
    owned = [torch.where(shard.block_counts > 0, shard.visible_blocks, 0) for shard in selections]
    counts = (block_ids >= 0).sum(dim=-1).to(torch.int32)
    visible = torch.stack(owned).sum(dim=0).to(torch.int32)
    return Selection(block_ids, counts, scores, visible, request_ids, first.layer_id)


def _check_shard(
    where: str, shard: Selection, start: int | torch.Tensor, dims: dict[str, int], first: Selection
) -> None:
    """One shard has scores, and rows, layer and device of the first one; its blocks begin at valid ids."""
    expect_type(where, "selections", shard, Selection)
    device = first.block_ids.device
    if shard.scores is None:
        raise ArgumentError(f"{where}: selections must have scores, got none. Select with return_scores=True.")
    expect(
        where, "block_ids", shard.block_ids, "T K", dims, dtypes=(torch.int32,), device=device,
        hint="Give every shard all rows; a count of 0 means that it owns none of a row.",
    )  # fmt: skip
    expect(where, "scores", shard.scores, "T K", dims, dtypes=(torch.float32,), device=device)
    for name in ("block_counts", "visible_blocks", "request_ids"):
        expect(where, name, getattr(shard, name), "T", dims, dtypes=(torch.int32,), device=device)
    if shard.layer_id != first.layer_id:
        raise SelectionError(
            f"{where}: selections must be of one layer, got layers {first.layer_id} and {shard.layer_id}. "
            "Merge the shards of each layer on their own."
        )
    if isinstance(start, torch.Tensor):
        expect(where, "first_blocks", start.contiguous(), "T", dims, dtypes=(torch.int64, torch.int32), device=device)
        if not start.numel() or not values_are_checked(device):
            return
        least, most = int(start.min()), int(start.max())
    else:
        expect_int(where, "first_blocks", start, least=None, hint="Count blocks from the start of the request.")
        least = most = start
    if least < 0 or most >= MAX_BLOCKS:
        raise ArgumentError(
            f"{where}: first_blocks must be in [0, 2**31), got {least if least < 0 else most}. "
            "Count blocks from the start of the request."
        )


def _check_shared(where: str, block_ids: torch.Tensor) -> None:
    twice = (block_ids[:, 1:] == block_ids[:, :-1]) & (block_ids[:, 1:] >= 0)
    if bool(twice.any()):
        row, column = (int(x) for x in twice.nonzero()[0])
        raise ArgumentError(
            f"{where}: selections must not share blocks, got block {int(block_ids[row, column])} of row {row} twice. "
            "Say with first_blocks where each shard begins."
        )
