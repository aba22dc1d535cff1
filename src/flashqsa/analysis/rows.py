"""The rows of one request in one layer, from a recording of any number of steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from flashqsa.checks import expect, expect_int, expect_type
from flashqsa.errors import ArgumentError
from flashqsa.recording import Recording

CHUNK_PAIRS = 1 << 21
"""Pairs of a row and a block that are looked at together: what bounds the memory of everything here."""


@dataclass(frozen=True)
class LayerRows:
    """What the rows of one request selected in one layer, on the CPU.

    Attributes:
        layer_id: Index of the layer.
        block_tokens: Tokens of a block (`r`).
        positions: [N] int64 position of each row in its request.
        block_ids: [N, K] int32, ascending and unique in a row, -1 past its count.
        block_counts: [N] int32.
        visible_blocks: [N] int32, blocks that the row saw.

    Raises:
        ShapeError, DTypeError, DeviceError: A tensor is of another form, or not on the CPU.
        ArgumentError: The block has no token.
    """

    layer_id: int
    block_tokens: int
    positions: torch.Tensor
    block_ids: torch.Tensor
    block_counts: torch.Tensor
    visible_blocks: torch.Tensor

    def __post_init__(self) -> None:
        where, cpu = "LayerRows", torch.device("cpu")
        dims: dict[str, int] = {}
        expect_int(where, "block_tokens", self.block_tokens, least=1)
        expect(where, "positions", self.positions, "N", dims, dtypes=(torch.int64,), device=cpu)
        expect(where, "block_ids", self.block_ids, "N K", dims, dtypes=(torch.int32,), device=cpu)
        for name in ("block_counts", "visible_blocks"):
            expect(where, name, getattr(self, name), "N", dims, dtypes=(torch.int32,), device=cpu)

    def __len__(self) -> int:
        """Rows."""
        return self.positions.shape[0]

    @property
    def sparse(self) -> torch.Tensor:
        """[N] bool, rows that saw more blocks than they selected."""
        return self.block_counts < self.visible_blocks

    @property
    def block_share(self) -> torch.Tensor:
        """[N] fp32 share of the visible blocks that was selected, NaN where none was visible.

        It is also the overlap that two rows would have on average if both selected at random.
        """
        return self.block_counts / self.visible_blocks  # 0 / 0 is NaN

    @property
    def valid(self) -> torch.Tensor:
        """[N, K] bool, which of `block_ids` are ids."""
        return torch.arange(self.block_ids.shape[1])[None] < self.block_counts[:, None]

    def take(self, rows: torch.Tensor | slice) -> LayerRows:
        """Some of the rows.

        Args:
            rows: [M] int64 row numbers, [N] bool, or a slice.
        """
        names = ("positions", "block_ids", "block_counts", "visible_blocks")
        return LayerRows(self.layer_id, self.block_tokens, *(getattr(self, name)[rows] for name in names))

    def chunks(self, width: int) -> Iterator[LayerRows]:
        """The rows, some at a time, so that no more than `CHUNK_PAIRS` pairs of a row and one of `width` exist."""
        step = max(1, CHUNK_PAIRS // max(1, width, self.block_ids.shape[1]))
        for start in range(0, len(self), step):
            yield self.take(slice(start, start + step))


def layer_rows(
    recording: Recording, layer_id: int, *, request_id: int = 0, steps: Sequence[int] | None = None
) -> LayerRows:
    """The rows of one request in one layer, in the order in which they ran.

    Args:
        recording: What a model selected.
        layer_id: Index of the layer.
        request_id: Which request; a row of the batch.
        steps: Numbers of the steps to take, all by default. Where one recording holds several prompts, take the steps
            of one of them.

    Raises:
        ArgumentError: The recording has no such layer or step, or no row of the request.
        SelectionError: A step lacks the layer, since its forward failed.
    """
    where = "layer_rows"
    expect_type(where, "recording", recording, Recording)
    if layer_id not in recording.layer_ids:
        raise ArgumentError(
            f"{where}: layer_id must be one of {list(recording.layer_ids)}, got {layer_id}. Choose a QSA layer."
        )
    selections = [
        (recording.steps[step].positions, recording.selection(step, layer_id, torch.device("cpu")))
        for step in (range(len(recording.steps)) if steps is None else _checked_steps(where, recording, steps))
    ]
    of_request = [(selection.request_ids == request_id) for _, selection in selections]
    if not any(bool(rows.any()) for rows in of_request):
        known = sorted({i for _, selection in selections for i in selection.request_ids.tolist() if i >= 0})
        raise ArgumentError(f"{where}: request_id must be one of {known}, got {request_id}. Choose a recorded request.")
    width = max(selection.block_ids.shape[1] for _, selection in selections)
    parts = [
        (
            positions[rows],
            torch.nn.functional.pad(s.block_ids[rows], (0, width - s.block_ids.shape[1]), value=-1),
            s.block_counts[rows],
            s.visible_blocks[rows],
        )
        for (positions, s), rows in zip(selections, of_request, strict=True)
    ]
    return LayerRows(layer_id, recording.block_tokens, *(torch.cat(part) for part in zip(*parts, strict=True)))


def context_share(rows: LayerRows) -> torch.Tensor:
    """Share of the tokens in sight that each row attends: its blocks and its tail over all tokens up to itself.

    Args:
        rows: Rows of one layer.

    Returns:
        [N] fp32 in (0, 1].
    """
    tail = rows.positions + 1 - rows.visible_blocks * rows.block_tokens
    attended = rows.block_counts * rows.block_tokens + tail
    return (attended / (rows.positions + 1)).to(torch.float32)


def _checked_steps(where: str, recording: Recording, steps: Sequence[int]) -> Sequence[int]:
    for step in steps:
        if not 0 <= step < len(recording.steps):
            raise ArgumentError(
                f"{where}: steps must be in [0, {len(recording.steps)}), got {step}. Choose steps of the recording."
            )
    return steps
