"""Whether the final rows of a prompt select the blocks of the needle: measured layer by layer while it runs."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch

from flashqsa.analysis import iterate_block_mass
from flashqsa.commands.inspect_model import run_prompt
from flashqsa.commands.needle_prompt import Plant
from flashqsa.integrations import hf
from flashqsa.results import Selection


@dataclass(frozen=True, kw_only=True)
class LayerFinding:
    """What the final rows of one layer made of the needle.

    Attributes:
        layer_id: Index of the layer.
        rows: Final rows looked at.
        rows_found: Those of them that select at least one block of the needle.
        blocks_found: Blocks of the needle that at least one of them selects.
        selected_share: Share of the pairs of a final row and a block of the needle that are selected.
        chance: That share for a random selection of as many blocks.
        best_rank: Best rank of a block of the needle by score in any of these rows, 1 being the highest score.
        dense_mass: Share of the dense attention of these rows that falls on the needle's blocks, on average.
    """

    layer_id: int
    rows: int
    rows_found: int
    blocks_found: int
    selected_share: float
    chance: float
    best_rank: int
    dense_mass: float


@dataclass(frozen=True, kw_only=True)
class Search:
    """One prompt and what became of its needle.

    Attributes:
        context: Tokens of the prompt.
        depth: Where the needle lies, in percent.
        needle_tokens: Position of the needle's first token, and one past its last.
        needle_blocks: Its first block, and one past its last.
        visible_blocks: Blocks that the last row sees.
        layers: What each QSA layer found.
    """

    context: int
    depth: float
    needle_tokens: tuple[int, int]
    needle_blocks: tuple[int, int]
    visible_blocks: int
    layers: tuple[LayerFinding, ...]


@dataclass
class _Seen:
    """Of one layer, by final row: which blocks of the needle are selected, and more."""

    selected: list[torch.Tensor] = field(default_factory=list)
    chance: list[torch.Tensor] = field(default_factory=list)
    ranks: list[torch.Tensor] = field(default_factory=list)
    mass: list[torch.Tensor] = field(default_factory=list)


def search_needle(
    model: Any,
    planted: Plant,
    *,
    needle_tokens: int,
    final_rows: int,
    block_tokens: int,
    prefill_chunk: int,
    on_progress: Any = lambda done, total: None,
) -> Search:
    """Runs one prompt and looks at what its final rows select.

    Args:
        model: A causal language model of transformers.
        planted: The prompt.
        needle_tokens: Tokens of the needle.
        final_rows: How many of the last rows to look at, all of them behind the needle.
        block_tokens: Tokens of a block.
        prefill_chunk: Tokens that enter at once.
        on_progress: Called with (tokens done, tokens in all).
    """
    end = planted.first_token + needle_tokens
    first_block, end_block = planted.first_token // block_tokens, -(-end // block_tokens)
    blocks = torch.arange(first_block, end_block)
    seen: dict[int, _Seen] = {}

    def observe(context: Any, selection: Selection) -> None:
        rows = (context.plan.positions >= planted.context - final_rows).nonzero().flatten()
        if rows.shape[0]:
            _look(context, selection, rows, blocks.to(rows.device), seen.setdefault(context.layer_id, _Seen()))

    with hf.observed(model, observe):
        run_prompt(model, planted.token_ids, prefill_chunk=prefill_chunk, on_progress=on_progress)
    return Search(
        context=planted.context,
        depth=planted.depth,
        needle_tokens=(planted.first_token, end),
        needle_blocks=(first_block, end_block),
        visible_blocks=planted.context // block_tokens,
        layers=tuple(_finding(layer_id, of_layer) for layer_id, of_layer in sorted(seen.items())),
    )


def _look(context: Any, selection: Selection, rows: torch.Tensor, blocks: torch.Tensor, seen: _Seen) -> None:
    """Adds some of the final rows, a few at a time: scores and masses are rows by blocks of the context."""
    chosen = selection.take(rows)
    valid = chosen.block_ids >= 0
    hits = (chosen.block_ids[:, :, None] == blocks) & valid[:, :, None]
    seen.selected.append(hits.any(dim=1).cpu())
    seen.chance.append((chosen.block_counts / chosen.visible_blocks.clamp(min=1)).cpu())
    with warnings.catch_warnings():
        # On a GPU plain torch ranks all blocks of a long context, more than the kernels keep; it need not be told.
        warnings.filterwarnings("ignore", message=".*topk_blocks is ")
        for row in rows.tolist():
            scores = context.block_scores(row, row + 1)[0]
            seen.ranks.append(_best_rank(scores, blocks[blocks < scores.shape[0]]).cpu())
    for part in iterate_block_mass(
        context.q, context.cache, context.plan, rows=rows, softmax_scale=context.softmax_scale
    ):
        inside = blocks[blocks < part.blocks.shape[1]]
        seen.mass.append(part.blocks[:, inside].sum(dim=1).cpu())


def _best_rank(scores: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Rank of the best of some blocks: higher scores first, then lower ids, as the selection has it; NaN last."""
    ids = torch.arange(scores.shape[0], device=scores.device)
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    ahead = (scores > scores[blocks, None]) | ((scores == scores[blocks, None]) & (ids < blocks[:, None]))
    return ahead.sum(dim=1).min() + 1


def _finding(layer_id: int, seen: _Seen) -> LayerFinding:
    selected = torch.cat(seen.selected)
    return LayerFinding(
        layer_id=layer_id,
        rows=selected.shape[0],
        rows_found=int(selected.any(dim=1).sum()),
        blocks_found=int(selected.any(dim=0).sum()),
        selected_share=float(selected.double().mean()),
        chance=float(torch.cat(seen.chance).double().mean()),
        best_rank=int(torch.stack(seen.ranks).min()),
        dense_mass=float(torch.cat(seen.mass).double().mean()),
    )
