"""What `flashqsa needle` prints: a table for each context, or one JSON object for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashqsa import __version__
from flashqsa.commands.generate_engine import RunRequest
from flashqsa.commands.needle_prompt import Haystack
from flashqsa.commands.needle_search import Search
from flashqsa.config import QSAConfig


@dataclass(frozen=True, kw_only=True)
class NeedleOutcome:
    """Everything there is to tell.

    Attributes:
        request: What was run, but for its prompts.
        dtype: The dtype that the model ran in.
        config: Constants of its QSA layers.
        haystack: What the prompts were made of.
        seed: What decided the filler.
        final_rows: How many of the last rows were looked at.
        searches: All contexts and depths, in the order in which they ran.
    """

    request: RunRequest
    dtype: str
    config: QSAConfig
    haystack: Haystack
    seed: int
    final_rows: int
    searches: tuple[Search, ...]


def as_json(outcome: NeedleOutcome) -> dict[str, Any]:
    """The outcome as plain values, under the names that the documentation lists."""
    import transformers

    request, haystack = outcome.request, outcome.haystack
    return {
        "checkpoint": str(request.checkpoint),
        "device": request.device,
        "threads": request.threads,
        "dtype": outcome.dtype,
        "prefill_chunk": request.prefill_chunk,
        "versions": {
            "flashqsa": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "block_tokens": outcome.config.block_tokens,
        "budget_tokens": outcome.config.budget_tokens,
        "filler": haystack.source,
        "seed": outcome.seed,
        "needle_tokens": len(haystack.needle),
        "question_tokens": len(haystack.question),
        "final_rows": outcome.final_rows,
        "searches": [
            asdict(search)
            | {"needle_tokens": list(search.needle_tokens), "needle_blocks": list(search.needle_blocks)}
            | {"layers": [asdict(layer) for layer in search.layers]}
            for search in outcome.searches
        ],
    }


def print_outcome(outcome: NeedleOutcome, console: Console) -> None:
    """Prints the outcome for people."""
    request, haystack = outcome.request, outcome.haystack
    threads = f"{request.threads} thread{'' if request.threads == 1 else 's'}"
    for line in (
        f"{request.checkpoint} on {request.device}, {outcome.dtype}, {threads}",
        f"needle: {len(haystack.needle)} tokens in filler from {haystack.source}, seed {outcome.seed}; "
        f"question: {len(haystack.question)} tokens, its last {outcome.final_rows} rows looked at",
        f"budget: {outcome.config.topk_blocks:,} blocks of {outcome.config.block_tokens} tokens",
    ):
        console.out(line, highlight=False)
    for context in dict.fromkeys(search.context for search in outcome.searches):
        searches = [search for search in outcome.searches if search.context == context]
        console.print()
        console.out(_headline(searches[0], outcome.config), highlight=False)
        console.print(_table(searches))
    console.print()
    for line in _legend(outcome):
        console.out(line, highlight=False)


def _headline(search: Search, config: QSAConfig) -> str:
    visible = search.visible_blocks
    how = "all of them selected" if visible <= config.topk_blocks else f"{config.topk_blocks / visible:.1%} selected"
    return f"{search.context:,} tokens: {visible:,} blocks in sight, {how}"


def _table(searches: list[Search]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("QSA layer", justify="right")
    for search in searches:
        table.add_column(f"depth {search.depth:g}%", justify="right", no_wrap=True)
    for layers in zip(*(search.layers for search in searches), strict=True):
        cells = (f"{layer.selected_share:.0%} #{layer.best_rank:,} {layer.dense_mass:.0%}" for layer in layers)
        table.add_row(str(layers[0].layer_id), *cells)
    return table


def _legend(outcome: NeedleOutcome) -> Iterator[str]:
    yield "in a cell: share of the pairs of a final row and a needle's block that are selected,"
    yield "  # best rank of such a block by score, share of dense attention that falls on them"
    pairs = [(search, layer) for search in outcome.searches for layer in search.layers]
    sparse = [(search, layer) for search, layer in pairs if search.visible_blocks > outcome.config.topk_blocks]
    if not sparse:
        yield "found: in every layer and depth, since no context exceeds the budget"
        return
    found = sum(layer.rows_found > 0 for _, layer in sparse)
    yield (
        f"found: in {found} of {len(sparse)} pairs of a layer and a prompt beyond the budget, "
        f"at least one block by at least one row"
    )
