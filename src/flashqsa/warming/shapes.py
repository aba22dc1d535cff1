"""Which shapes of steps meet every form of the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from flashqsa.config import QSAConfig

FEW_ROWS = 16
"""Rows of a request up to which every number of them is tried: verification, and the ends of prompts."""


@dataclass(frozen=True)
class StepShape:
    """Shape of a step and its bounds.

    Attributes:
        requests: Requests.
        rows: Rows of each.
        max_seq_len: Bound on lengths, in tokens.
        padding: Rows of no request.
    """

    requests: int
    rows: int
    max_seq_len: int
    padding: int = 0


def _powers(most: int) -> list[int]:
    """Powers of two below a number, and the number."""
    return [1 << i for i in range((most - 1).bit_length())] + [most]


def _sizes(most: int) -> list[int]:
    """Numbers up to `most`, no two neighbours further apart than half the lower one: 1, 2, 3, 4, 6, 8, 12, ..."""
    halves = {3 << i for i in range(most.bit_length())}
    return sorted({*_powers(most), *(number for number in halves if number < most)})


def step_shapes(
    config: QSAConfig, max_requests: int, max_rows: int, max_seq_len: int, *, all_contexts: bool
) -> Iterator[StepShape]:
    """Shapes from every range that a form of a kernel can have, within bounds.

    Ranges of contexts end at powers of two of blocks; those of rows and of rows of a request are wider than the steps
    of `_sizes`. Every pair of the three is met, and at two contexts every combination.

    Args:
        config: The checkpoint's constants.
        max_requests: Requests at most.
        max_rows: Rows at most.
        max_seq_len: Bound on lengths at most, in tokens.
        all_contexts: Whether contexts within the budget are scored too.
    """
    r, topk = config.block_tokens, config.topk_blocks
    within = min(max_seq_len, topk * r)
    least = 1 if all_contexts else topk + 1
    beyond = {min(blocks * r, max_seq_len) for blocks in _powers(-(-max_seq_len // r)) if blocks >= least}
    contexts = sorted({within, max_seq_len, *beyond})
    few = [rows for rows in range(2, FEW_ROWS + 1) if rows <= max_rows]
    decode = {(requests, 1) for requests in _sizes(min(max_requests, max_rows))}
    alone = {(1, rows) for rows in (*few, *_sizes(max_rows))}
    coarse = {(requests, rows) for requests in _powers(max_requests) for rows in _powers(max_rows)}
    fine = {(requests, rows) for requests in _sizes(max_requests) for rows in few}
    for context in contexts:
        shapes = decode | alone | coarse
        if context in (within, max_seq_len):
            shapes |= fine
        for requests, rows in sorted(shapes):
            if requests * rows <= max_rows:
                yield StepShape(requests, rows, context)
        for rows in _sizes(max_rows)[1:]:  # decode that is padded, beyond the requests there can be
            yield StepShape(1, 1, context, padding=rows - 1)
