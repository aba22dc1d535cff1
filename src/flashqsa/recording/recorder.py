"""Recording a model while it runs, and putting a recording in the place of its selection."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch

from flashqsa.errors import ArgumentError
from flashqsa.recording.contents import LayerRecord, Recording, StepRecord
from flashqsa.results import Selection

ENGINE = "flashqsa.integrations.hf"  # named, not imported: the library knows no engine until one is asked for


@contextmanager
def record(model: Any, *, scores: bool = False) -> Iterator[Recording]:
    """Record which blocks a transformers model selects inside the block.

    A model that does not run on FlashQSA yet does so inside the block. What is recorded is copied to the CPU, which
    waits for the device in every layer.

    Args:
        model: A `Qwen4Exp` model.
        scores: Also record the scores of the selected blocks, which are then computed for rows within the budget too.

    Yields:
        The recording, which grows with every forward.

    Raises:
        ArgumentError: The model has no QSA layer; or scores are asked for and the model's selector gives none.
        UnsupportedError: As `flashqsa.integrations.hf.enable`.
    """
    engine = import_module(ENGINE)
    block_tokens, layer_ids = engine.qsa_layers(model)
    recording = Recording(block_tokens, layer_ids)
    with engine.observed(model, _Recorder(recording, scores), scores=scores):
        yield recording


@contextmanager
def replay(recording: Recording, model: Any) -> Iterator[Any]:
    """As `Recording.replay`."""
    engine = import_module(ENGINE)
    block_tokens, layer_ids = engine.qsa_layers(model)
    if (block_tokens, layer_ids) != (recording.block_tokens, recording.layer_ids):
        raise ArgumentError(
            f"Recording.replay: model must have blocks of {recording.block_tokens} tokens in layers "
            f"{list(recording.layer_ids)}, got blocks of {block_tokens} in {list(layer_ids)}. "
            "Replay on a model of the shape that was recorded."
        )
    with engine.enabled(model, selector=_Replayer(recording)):
        yield model


@dataclass
class _Steps:
    """Numbers forwards in the order in which they are first seen."""

    numbers: dict[int, int] = field(default_factory=dict)

    def number(self, forward_id: int) -> int:
        return self.numbers.setdefault(forward_id, len(self.numbers))


@dataclass
class _Recorder:
    """Adds to a recording what layers select."""

    recording: Recording
    scores: bool
    steps: _Steps = field(default_factory=_Steps)

    def __call__(self, context: Any, selection: Selection) -> None:
        number, steps = self.steps.number(context.forward_id), self.recording.steps
        if number == len(steps):
            steps.append(StepRecord(_copy(context.plan.request_ids), _copy(context.plan.positions)))
        layers = steps[number].layers
        if context.layer_id in layers:
            return  # gradient checkpointing runs a layer again
        if self.scores and selection.scores is None:
            raise ArgumentError(
                f"record: scores must come from the selection, got one of layer {context.layer_id} without. "
                "Record without scores, or return a Selection with them from the selector."
            )
        layers[context.layer_id] = LayerRecord(
            _copy(selection.block_ids),
            _copy(selection.block_counts),
            _copy(selection.visible_blocks),
            _copy(selection.scores) if self.scores and selection.scores is not None else None,
        )


@dataclass
class _Replayer:
    """A selector that gives back what was recorded."""

    recording: Recording
    steps: _Steps = field(default_factory=_Steps)

    def __call__(self, context: Any) -> Selection:
        step = self.steps.number(context.forward_id)
        self.recording.check_rows(step, context.plan.request_ids, context.plan.positions)
        return self.recording.selection(step, context.layer_id, context.plan.device)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)
