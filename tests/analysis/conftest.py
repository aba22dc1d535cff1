"""Random recordings, as several prompts of a batch would leave them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashqsa.analysis import LayerRows
from flashqsa.recording import LayerRecord, Recording, StepRecord

R = 4


def _layer_record(visible: list[int], topk: int, generator: torch.Generator) -> LayerRecord:
    ids = torch.full((len(visible), topk), -1, dtype=torch.int32)
    for row, blocks in enumerate(visible):
        chosen = torch.randperm(blocks, generator=generator)[:topk].sort().values
        ids[row, : chosen.shape[0]] = chosen.to(torch.int32)
    counts = torch.tensor([min(blocks, topk) for blocks in visible], dtype=torch.int32)
    return LayerRecord(ids, counts, torch.tensor(visible, dtype=torch.int32))


@pytest.fixture
def make_recording() -> Callable[..., Recording]:
    """A recording of two requests: a prefill of the given tokens each, then decode steps; padding rows in between."""

    def make(tokens: tuple[int, int] = (70, 45), decode: int = 5, topk: int = 6, layers: int = 3) -> Recording:
        generator = torch.Generator().manual_seed(11)
        rows = [[(request, p) for request, n in enumerate(tokens) for p in range(n)] + [(-1, -1)] * 2]
        rows += [[(request, n + step) for request, n in enumerate(tokens)] for step in range(decode)]
        recording = Recording(R, tuple(range(3, 3 + 4 * layers, 4)))
        for step in rows:
            requests, positions = torch.tensor(step, dtype=torch.int64).T
            visible = [(p + 1) // R for _, p in step]
            records = {layer_id: _layer_record(visible, topk, generator) for layer_id in recording.layer_ids}
            recording.steps.append(StepRecord(requests.to(torch.int32), positions.contiguous(), records))
        return recording

    return make


@pytest.fixture
def make_rows() -> Callable[..., LayerRows]:
    """Rows of given positions and chosen blocks."""

    def make(chosen: list[list[int]], positions: list[int], layer_id: int = 3) -> LayerRows:
        width = max(map(len, chosen), default=0)
        ids = torch.tensor([ids + [-1] * (width - len(ids)) for ids in chosen], dtype=torch.int32)
        return LayerRows(
            layer_id,
            R,
            torch.tensor(positions, dtype=torch.int64),
            ids.view(len(chosen), width),
            torch.tensor([len(ids) for ids in chosen], dtype=torch.int32),
            torch.tensor([(p + 1) // R for p in positions], dtype=torch.int32),
        )

    return make
