# mypy: ignore-errors
"""Selection on the GPU: scores into a bounded workspace, then exact top-K, some rows at a time."""

import torch

from flashqsa.backends import multiprocessors
from flashqsa.results import Selection
from flashqsa.selection.row_levels import RowLevels
from flashqsa.selection.triton_scores import score_blocks_triton, score_kernel_config
from flashqsa.selection.triton_topk import top_blocks_triton


def row_workspace_bytes(blocks, topk_blocks):
    """Bytes of workspace that one row of a step needs: scores, and the largest of groups."""
    levels = RowLevels.of(blocks, topk_blocks, 1)
    return 4 * (row_numbers(blocks) + (levels.numbers() + levels.parents if levels.levels > 1 else 0))


def row_numbers(blocks):
    """Numbers between two rows of scores: a multiple of 16, so that rows are read in long words."""
    return -(-blocks // 16) * 16


def select_blocks_triton(index_q, cache, plan, out, *, workspace_bytes):
    """Fill `out` with the selection of every row. Arguments as in `select_blocks`."""
    topk, scored_all = plan.topk_blocks, out.scores is not None
    blocks = max(1, plan.max_seq_len // plan.block_tokens)
    dense = plan.all_visible and not scored_all
    if dense:
        blocks = 1  # nothing is scored: the top-K kernel writes every block that a row sees
    processors = multiprocessors(cache.device)
    rows_at_once = max(1, min(plan.num_rows, workspace_bytes // row_workspace_bytes(blocks, topk)))
    if 4 < rows_at_once < plan.num_rows:
        rows_at_once -= rows_at_once % 4  # ids of later rows stay aligned
    all_scores = plan.scratch("select.scores", (rows_at_once, row_numbers(blocks)), torch.float32)[:, :blocks]
    config = score_kernel_config(index_q, cache, plan, rows_at_once)
    levels = RowLevels.of(blocks, topk, config.block_m)
    for first_row in range(0, plan.num_rows, rows_at_once):
        rows = slice(first_row, min(first_row + rows_at_once, plan.num_rows))
        count = rows.stop - first_row
        scores = all_scores[:count]
        largest = group_ids = None
        if levels.levels > 1:
            largest = plan.scratch("select.largest", (rows_at_once, levels.numbers()), torch.float32)[:count]
            group_ids = plan.scratch("select.group_ids", (rows_at_once, levels.parents), torch.int32)
        if not dense:
            score_blocks_triton(
                index_q, cache, plan, scores, first_row, 0 if scored_all else topk, config=config,
                multiprocessors=processors, largest=largest, levels=levels,
            )  # fmt: skip
        part = Selection(
            out.block_ids[rows], out.block_counts[rows], None if out.scores is None else out.scores[rows],
            out.visible_blocks[rows], out.request_ids[rows],
        )  # fmt: skip
        top_blocks_triton(
            scores, largest, group_ids, levels, plan, first_row, part, scored_all=scored_all, multiprocessors=processors
        )
