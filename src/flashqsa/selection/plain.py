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


def least_workspace_bytes(index_heads: int, index_head_dim: int, topk_blocks: int) -> int:
    """Bytes that one tile of scores needs: the smallest workspace."""
    return _workspace_bytes(ROW_TILE, BLOCK_TILE, index_heads, index_head_dim, topk_blocks)


def _workspace_bytes(rows: int, blocks: int, index_heads: int, index_head_dim: int, topk_blocks: int) -> int:
    keys = 2 * blocks * index_head_dim * 4
    tile = 2 * ROW_TILE * BLOCK_TILE * index_heads * 4
    return keys + tile + rows * (blocks * _PAIR_BYTES + topk_blocks * _CANDIDATE_BYTES + index_heads * index_head_dim * 8)


def _chunk_shape(
    rows: int, blocks: int, index_heads: int, index_head_dim: int, topk_blocks: int, workspace_bytes: int
) -> tuple[int, int]:
    """Rows and blocks to hold at once, multiples of the tiles: the whole context first, then as many rows as fit."""

    def fits(chunk_rows: int, chunk_blocks: int) -> bool:
        needed = _workspace_bytes(chunk_rows, chunk_blocks, index_heads, index_head_dim, topk_blocks)
        return needed <= workspace_bytes

    chunk_blocks = BLOCK_TILE
    while chunk_blocks < blocks and fits(ROW_TILE, chunk_blocks + BLOCK_TILE):
        chunk_blocks += BLOCK_TILE
    chunk_rows = ROW_TILE
    while chunk_rows < min(rows, MAX_ROWS) and fits(chunk_rows + ROW_TILE, chunk_blocks):
        chunk_rows += ROW_TILE
    return chunk_rows, chunk_blocks


def select_blocks_torch(
    index_q: torch.Tensor, cache: LayerCache, plan: StepPlan, out: Selection, *, workspace_bytes: int
) -> None:
    """Fill `out` (counts set, ids -1) with the selection of every row. Arguments as in `select_blocks`."""
    topk = plan.topk_blocks
    column = torch.arange(topk, dtype=torch.int32, device=cache.device)
    if out.scores is None:
        within = plan.visible_blocks <= topk
        everything = torch.where(column[None] < plan.visible_blocks[:, None], column[None], -1)
        out.block_ids.copy_(torch.where(within[:, None], everything, out.block_ids))
        if plan.all_visible:
            return
    with torch.no_grad(), exact_fp32_matmul():
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
    """Score and select the rows of one request that see more than they may select (all rows when scores are asked)."""
    visible = plan.visible_blocks[group.first_row : group.end_row].to(torch.int64)
    scored = visible > (plan.topk_blocks if out.scores is None else 0)
    if not bool(scored.any()):
        return
    first = int(scored.to(torch.int8).argmax())  # visible counts never fall within a request
    most = int(visible.max())
    chunk_rows, chunk_blocks = _chunk_shape(
        group.num_rows - first, most, index_q.shape[1], index_q.shape[2], plan.topk_blocks, workspace_bytes
    )
    position = group.first_position + first
    while position < group.end_position:
        end = min(position // ROW_TILE * ROW_TILE + chunk_rows, group.end_position)
        rows = slice(group.first_row + position - group.first_position, group.first_row + end - group.first_position)
        seen = plan.visible_blocks[rows].to(torch.int64)
        keys = _best_of_rows(index_q[rows], position, seen, cache, plan, group.request_id, chunk_blocks)
        block_ids, scores = unpack_keys(keys)
        out.block_ids[rows, : block_ids.shape[1]] = block_ids
        if out.scores is not None:
            out.scores[rows, : scores.shape[1]] = scores
        position = end


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
    assert cache.block_keys is not None
    tiles = _row_tiles(index_q, first_position)
    skipped = first_position % ROW_TILE
    most = int(visible.max())
    best: torch.Tensor | None = None
    for start in range(0, most, chunk_blocks):
        end = min(start + chunk_blocks, most)
        block_ids = torch.arange(start, end, device=cache.device)
        keys = read_slots(cache.block_keys, plan.block_slots(request_id, block_ids)).to(torch.float32)
        scores = _score_tiles(tiles, keys)[skipped : skipped + index_q.shape[0], : end - start]
        order = order_keys(scores, block_ids[None]).masked_fill_(block_ids[None] >= visible[:, None], UNSEEN)
        best = best_keys(order if best is None else torch.cat([best, order], dim=-1), plan.topk_blocks)
    assert best is not None
    return best


def _row_tiles(index_q: torch.Tensor, first_position: int) -> torch.Tensor:
    """Queries as fp32 tiles [tiles, Hi * ROW_TILE, Di], each row at its absolute place, zeros elsewhere."""
    rows, heads, dim = index_q.shape
    skipped = first_position % ROW_TILE
    count = -(-(skipped + rows) // ROW_TILE)
    padded = torch.zeros(count * ROW_TILE, heads, dim, device=index_q.device)
    padded[skipped : skipped + rows] = index_q.to(torch.float32)
    by_head = padded.view(count, ROW_TILE, heads, dim).transpose(1, 2)
    return by_head.reshape(count, heads * ROW_TILE, dim)


def _score_tiles(tiles: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Scores [tiles * ROW_TILE, padded blocks] fp32, one product of the fixed shape at a time."""
    count, width, dim = tiles.shape
    heads = width // ROW_TILE
    block_tiles = -(-keys.shape[0] // BLOCK_TILE)
    padded = torch.zeros(block_tiles * BLOCK_TILE, dim, device=keys.device)
    padded[: keys.shape[0]] = keys
    scores = torch.empty(count, ROW_TILE, block_tiles * BLOCK_TILE, device=keys.device)
    products = torch.empty(width, BLOCK_TILE, device=keys.device)
    for block_tile in range(block_tiles):
        columns = slice(block_tile * BLOCK_TILE, (block_tile + 1) * BLOCK_TILE)
        transposed = padded[columns].t()
        for tile in range(count):
            torch.mm(tiles[tile], transposed, out=products)
            by_head = products.relu_().view(heads, ROW_TILE, BLOCK_TILE)
            total = by_head[0]
            for head in range(1, heads):
                total += by_head[head]
            scores[tile, :, columns] = total
    return scores.view(count * ROW_TILE, -1)
