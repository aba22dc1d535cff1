"""What a recording holds, and how a step of a model is found in it again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch

from flashqsa.errors import ArgumentError, SelectionError
from flashqsa.results import Selection


@dataclass(frozen=True)
class LayerRecord:
    """What one layer selected in one step, on the CPU.

    Attributes:
        block_ids: [T, K] int32, ascending, -1 past the row's count.
        block_counts: [T] int32.
        visible_blocks: [T] int32, complete blocks that the row could see; its tail starts behind them.
        scores: [T, K] fp32 scores of the blocks, -inf past the count; None where they were not asked for.
    """

    block_ids: torch.Tensor
    block_counts: torch.Tensor
    visible_blocks: torch.Tensor
    scores: torch.Tensor | None = None


@dataclass(frozen=True)
class StepRecord:
    """One forward of the model.

    Attributes:
        request_ids: [T] int32, request of each row, -1 for padding rows.
        positions: [T] int64, token position of each row in its request, -1 for padding rows.
        layers: What each layer selected, by layer id.
    """

    request_ids: torch.Tensor
    positions: torch.Tensor
    layers: dict[int, LayerRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """The selections of some steps of one model.

    Attributes:
        block_tokens: Tokens of a block.
        layer_ids: The model's QSA layers.
        steps: Its forwards, in order.
    """

    block_tokens: int
    layer_ids: tuple[int, ...]
    steps: list[StepRecord] = field(default_factory=list)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file.

        Its metadata has ``format`` = ``flashqsa.recording``, ``version`` = ``1`` and ``recording``, a JSON object
        with ``block_tokens``, ``layer_ids``, ``steps`` (their number) and ``flashqsa`` (the version that wrote it).
        Its tensors are named ``step.3.positions``, ``step.3.request_ids``, ``step.3.layer.7.block_ids``,
        ``...block_counts``, ``...visible_blocks`` and, where recorded, ``...scores``.

        Args:
            path: File to write.

        Raises:
            UnsupportedError: safetensors is not installed.
        """
        from flashqsa.recording.files import save_recording

        save_recording(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Recording:
        """Read what `save` wrote.

        Args:
            path: File to read.

        Raises:
            ArgumentError: The file is no recording, or an incomplete one.
            UnsupportedError: safetensors is not installed, or the file is of a later version.
        """
        from flashqsa.recording.files import load_recording

        return load_recording(path)

    def replay(self, model: Any) -> AbstractContextManager[Any]:
        """The model, selecting inside the block what was recorded.

        Its n-th forward inside the block takes the n-th step. The same inputs give the same logits, bit for bit, on
        the device and with the versions that recorded them.

        Args:
            model: A model of the recorded shape.

        Returns:
            A context manager that gives the model.

        Raises:
            ArgumentError: The model has other blocks or other layers; or, while it runs, a forward has no step left.
            SelectionError: While it runs: a forward has other rows than its step, or the step lacks a layer (the
                forward that was recorded had failed).
        """
        from flashqsa.recording.recorder import replay

        return replay(self, model)

    def selection(self, step: int, layer_id: int, device: torch.device) -> Selection:
        """What one layer selected in one step.

        Args:
            step: Number of the step.
            layer_id: Index of the layer.
            device: Where to put it.

        Raises:
            ArgumentError: There is no such step.
            SelectionError: The step has no such layer.
        """
        recorded = self._step(step)
        layer = recorded.layers.get(layer_id)
        if layer is None:
            raise SelectionError(
                f"Recording: layer_id must be one of {sorted(recorded.layers)} in step {step}, got {layer_id}. "
                "Record a forward that ends without an error."
            )
        return Selection(
            block_ids=layer.block_ids.to(device),
            block_counts=layer.block_counts.to(device),
            scores=None if layer.scores is None else layer.scores.to(device),
            visible_blocks=layer.visible_blocks.to(device),
            request_ids=recorded.request_ids.to(device),
            layer_id=layer_id,
        )

    def check_rows(self, step: int, request_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Raise unless a step has these rows.

        Args:
            step: Number of the step.
            request_ids: [T] int32 requests of the rows at hand.
            positions: [T] int64 positions of the rows at hand.

        Raises:
            ArgumentError: There is no such step.
            SelectionError: Its rows are others.
        """
        recorded = self._step(step)
        if recorded.positions.shape != positions.shape:
            raise SelectionError(
                f"Recording: step {step} must have the rows of the forward, {positions.shape[0]}, got "
                f"{recorded.positions.shape[0]}. Replay the forwards that were recorded, in their order."
            )
        differs = (recorded.request_ids != request_ids.cpu()) | (recorded.positions != positions.cpu())
        if bool(differs.any()):
            row = int(differs.nonzero()[0, 0])
            raise SelectionError(
                f"Recording: step {step} must have the rows of the forward, request {int(request_ids[row])} at "
                f"position {int(positions[row])} in row {row}, got request {int(recorded.request_ids[row])} at "
                f"{int(recorded.positions[row])}. Replay the forwards that were recorded, with their padding and cache."
            )

    def _step(self, step: int) -> StepRecord:
        if not 0 <= step < len(self.steps):
            raise ArgumentError(
                f"Recording: step must be in [0, {len(self.steps)}), got {step}. "
                "Replay no more forwards than were recorded."
            )
        return self.steps[step]
