"""Selection in plain torch, on any device: fixed score tiles, exact top-K, memory within a budget.

A row's scores must not depend on what else is in the batch, and a matrix product promises the same bits only for the
same shape. So every product here has one shape: ROW_TILE rows at absolute multiples of ROW_TILE in their request times
BLOCK_TILE blocks at absolute multiples of BLOCK_TILE, padded with zeros. A row sits at the same place of the same
product in decode, verification and prefill, whatever the chunk, the batch and the workspace.
"""

from __future__ import annotations

import torch

from flashqsa.cache.state import LayerCache, read_slots
from flashqsa.matmul import exact_fp32_matmul
from flashqsa.plan import RowGroup, StepPlan
from flashqsa.results import Selection
from flashqsa.selection.ordering import UNSEEN, best_keys, order_keys, unpack_keys

ROW_TILE = 8
BLOCK_TILE = 1024
MAX_ROWS = 128  # rows scored together: enough to share one pass over the keys, little enough to stay in cache

_PAIR_BYTES = 4 + 4 + 8 + 8 + 8  # a score, its bits, and keys while they are built and compared
_CANDIDATE_BYTES = 5 * 8  # running keys, their concatenation, and unpacking
_SHARED_TILES = 8  # block tiles that suit many rows: more rows share a pass over the keys, topk sees enough at once


def least_workspace_bytes(index_q: torch.Tensor, block_keys: torch.Tensor, topk_blocks: int) -> int:
    """Bytes that one tile of scores needs: the smallest workspace."""
    return _workspace_bytes(ROW_TILE, BLOCK_TILE, index_q, block_keys, topk_blocks)


def _workspace_bytes(rows: int, blocks: int, index_q: torch.Tensor, block_keys: torch.Tensor, topk_blocks: int) -> int:
    heads, dim = index_q.shape[1:]
    keys = blocks * dim * (block_keys.element_size() + 4)  # as stored, and in fp32
    products = 2 * ROW_TILE * BLOCK_TILE * heads * 4
    return keys + products + rows * (blocks * _PAIR_BYTES + topk_blocks * _CANDIDATE_BYTES + heads * dim * 8)


def _chunk_shape(
    rows: int,
    blocks: int,
    index_q: torch.Tensor,
    block_keys: torch.Tensor,
    topk_blocks: int,
    workspace_bytes: int,
) -> tuple[int, int]:
    """Rows and blocks to hold at once, multiples of the tiles: some blocks, then as many rows, then more blocks."""

    def fits(chunk_rows: int, chunk_blocks: int) -> bool:
        return _workspace_bytes(chunk_rows, chunk_blocks, index_q, block_keys, topk_blocks) <= workspace_bytes

    chunk_rows, chunk_blocks = ROW_TILE, BLOCK_TILE
    while chunk_blocks < min(blocks, _SHARED_TILES * BLOCK_TILE) and fits(chunk_rows, chunk_blocks + BLOCK_TILE):
        chunk_blocks += BLOCK_TILE
    while chunk_rows < min(rows, MAX_ROWS) and fits(chunk_rows + ROW_TILE, chunk_blocks):
        chunk_rows += ROW_TILE
    while chunk_blocks < blocks and fits(chunk_rows, chunk_blocks + BLOCK_TILE):
        chunk_blocks += BLOCK_TILE
    return chunk_rows, chunk_blocks


def select_blocks_torch(
    index_q: torch.Tensor, cache: LayerCache, plan: StepPlan, out: Selection, *, workspace_bytes: int
) -> None:
    """Fill `out` (counts and visible blocks set, ids -1) with the selection of every row, as `select_blocks` does."""
    topk, visible = plan.topk_blocks, out.visible_blocks
    if out.scores is None:
        column = torch.arange(topk, dtype=torch.int32, device=cache.device)
        everything = torch.where(column[None] < visible[:, None], column[None], -1)
        out.block_ids.copy_(torch.where(visible[:, None] <= topk, everything, out.block_ids))
        if plan.all_visible:
            return
    with exact_fp32_matmul():
        for group in plan.row_groups():
            _select_group(index_q, cache, plan, group, out, workspace_bytes)


def _select_group(
    index_q: torch.Tensor,
    cache: LayerCache,
    plan: StepPlan,
    group: RowGroup,
    out: Selection,
    workspace_bytes: int,
) -> None:
    """Select for the rows of one request, from the first on whose scores are needed.

    Those are the scores of rows that see more than they may select, or any block when scores are asked for.
    """
    assert cache.block_keys is not None
    visible = out.visible_blocks[group.first_row : group.end_row].to(torch.int64)
    scored = visible > (plan.topk_blocks if out.scores is None else 0)
    if not bool(scored.any()):
        return
    first = int(scored.to(torch.int8).argmax())
    chunk_rows, chunk_blocks = _chunk_shape(
        group.num_rows - first, int(visible.max()), index_q, cache.block_keys, plan.topk_blocks, workspace_bytes
    )
    start = group.first_position + first
    while start < group.end_position:
        end = min(start // ROW_TILE * ROW_TILE + chunk_rows, group.end_position)
        rows = slice(group.first_row + start - group.first_position, group.first_row + end - group.first_position)
        seen = out.visible_blocks[rows].to(torch.int64)
        keys = _best_of_rows(index_q[rows], start, seen, cache, plan, group.request_id, chunk_blocks)
        block_ids, scores = unpack_keys(keys)
        out.block_ids[rows, : block_ids.shape[1]] = block_ids
        if out.scores is not None:
            out.scores[rows, : scores.shape[1]] = scores
        start = end


def _best_of_rows(
    index_q: torch.Tensor,
    first_position: int,
    visible: torch.Tensor,
    cache: LayerCache,
    plan: StepPlan,
    request_id: int,
    chunk_blocks: int,
) -> torch.Tensor:
    """Order keys of the best blocks of some consecutive rows of one request, [rows, <= K]."""
    tiles = _row_tiles(index_q, first_position)
    most = int(visible.max())
    best = torch.empty(index_q.shape[0], 0, dtype=torch.int64, device=cache.device)
    for start in range(0, most, chunk_blocks):
        block_ids = torch.arange(start, min(start + chunk_blocks, most), device=cache.device)
        slot_ids = plan.block_slots(request_id, block_ids)
        # no name for what a chunk scored: it must be gone before the next one is
        best = _merge_best(best, _order_chunk(tiles, first_position, visible, cache, block_ids, slot_ids), plan)
    return best


def _order_chunk(
    tiles: torch.Tensor,
    first_position: int,
    visible: torch.Tensor,
    cache: LayerCache,
    block_ids: torch.Tensor,
    slot_ids: torch.Tensor,
) -> torch.Tensor:
    """Order keys of some blocks for some consecutive rows, [rows, blocks]."""
    skipped = first_position % ROW_TILE
    scores = _score_tiles(tiles, _block_tiles(cache, slot_ids))
    scores = scores[skipped : skipped + visible.shape[0], : block_ids.shape[0]]
    return order_keys(scores, block_ids[None]).masked_fill_(block_ids[None] >= visible[:, None], UNSEEN)


def _merge_best(best: torch.Tensor, order: torch.Tensor, plan: StepPlan) -> torch.Tensor:
    return best_keys(torch.cat([best, order], dim=-1) if best.shape[1] else order, plan.topk_blocks)


def _row_tiles(index_q: torch.Tensor, first_position: int) -> torch.Tensor:
    """Queries as fp32 tiles [tiles, Hi * ROW_TILE, Di], each row at its absolute place, zeros elsewhere."""
    rows, heads, dim = index_q.shape
    skipped = first_position % ROW_TILE
    count = -(-(skipped + rows) // ROW_TILE)
    padded = torch.zeros(count * ROW_TILE, heads, dim, dtype=torch.float32, device=index_q.device)
    padded[skipped : skipped + rows] = index_q
    by_head = padded.view(count, ROW_TILE, heads, dim).transpose(1, 2)
    return by_head.reshape(count, heads * ROW_TILE, dim)


def _block_tiles(cache: LayerCache, slot_ids: torch.Tensor) -> torch.Tensor:
    """Block keys as fp32 tiles [tiles, BLOCK_TILE, Di], zeros past the last block."""
    assert cache.block_keys is not None
    count, dim = -(-slot_ids.shape[0] // BLOCK_TILE), cache.block_keys.shape[2]
    padded = torch.zeros(count * BLOCK_TILE, dim, dtype=torch.float32, device=cache.device)
    padded[: slot_ids.shape[0]] = read_slots(cache.block_keys, slot_ids)
    return padded.view(count, BLOCK_TILE, dim)


def _score_tiles(row_tiles: torch.Tensor, block_tiles: torch.Tensor) -> torch.Tensor:
    """Scores [rows, blocks] fp32 of whole tiles, one product of the fixed shape at a time."""
    width, device = row_tiles.shape[1], row_tiles.device
    heads = width // ROW_TILE
    scores = torch.empty(
        row_tiles.shape[0], ROW_TILE, block_tiles.shape[0], BLOCK_TILE, dtype=torch.float32, device=device
    )
    products = torch.empty(width, BLOCK_TILE, dtype=torch.float32, device=device)
    for column, block_keys in enumerate(block_tiles):
        for row, queries in enumerate(row_tiles):
            torch.mm(queries, block_keys.t(), out=products)
            by_head = products.relu_().view(heads, ROW_TILE, BLOCK_TILE)
            total = by_head[0]
            for head in range(1, heads):
                total += by_head[head]
            scores[row, :, column] = total
    return scores.view(row_tiles.shape[0] * ROW_TILE, -1)
