# mypy: ignore-errors
"""Levels of a row of scores: blocks, groups of blocks, groups of groups, each known by its largest score.

A top-K program holds BLOCK numbers. Of a longer row it searches the level that it can hold first, then goes down. The
score kernel writes the levels whose groups fit into one of its tiles, while it has the scores at hand.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

LEAST_BLOCK = 2048
"""Numbers that a program holds at least of a row that is so long."""

MOST_BLOCK = 16384
"""Numbers that a program holds at most, if that is two budgets."""

MOST_GROUP = 4
"""Numbers of one level in a group of the next, at most: the levels of few keys fit into a tile of the score kernel."""

SPAN = 64
"""Blocks that a row is rounded up to: the score kernel writes whole tiles."""


@triton.jit
def level_numbers(span, size):
    """Numbers of a level whose groups hold `size` blocks, as they lie in a row's scratch: a multiple of 16."""
    return tl.cdiv(span, 16 * size) * 16


@dataclass(frozen=True)
class RowLevels:
    """Levels of rows of one width.

    Attributes:
        block: Numbers that a top-K program holds.
        group: Numbers of a level in a group of the next.
        levels: Levels, blocks included: 1 where a row is no longer than `block`.
        given: Levels that the score kernel writes beside the scores.
        span: Blocks of a row, rounded up.
    """

    block: int
    group: int
    levels: int
    given: int
    span: int

    @classmethod
    def of(cls, width, topk, tile_blocks, least_block=None):
        """Levels of rows that see up to `width` blocks.

        Args:
            width: Blocks of the longest row.
            topk: Blocks to select.
            tile_blocks: Keys of a tile of the score kernel.
            least_block: In place of LEAST_BLOCK, a power of two.
        """
        budget = triton.next_power_of_2(topk)
        block = max(least_block or LEAST_BLOCK, 2 * budget, min(MOST_BLOCK, MOST_GROUP * budget))
        block = min(triton.next_power_of_2(max(width, 64)), block)
        group = max(2, min(MOST_GROUP, block // budget))
        levels, reach = 1, block
        while reach < width:
            levels, reach = levels + 1, reach * group
        given = 0
        while given + 1 < levels and tile_blocks % group ** (given + 1) == 0:
            given += 1
        return cls(block, group, levels, given, -(-width // SPAN) * SPAN)

    @property
    def parents(self):
        """Groups whose numbers a program holds: as many may be chosen of a level that is searched."""
        return self.block // self.group

    def numbers(self):
        """Numbers of a row's scratch that hold the levels above blocks."""
        sizes = [self.group**level for level in range(1, self.levels)]
        return sum(-(-self.span // (16 * size)) * 16 for size in sizes)
