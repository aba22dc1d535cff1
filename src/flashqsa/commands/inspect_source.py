"""Where `flashqsa inspect` takes selections from: a recorded file, or a checkpoint that runs over a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashqsa import record
from flashqsa.analysis import LayerRows, iterate_block_mass, kept_mass, layer_rows
from flashqsa.commands.generate_engine import RunRequest
from flashqsa.commands.inspect_model import run_prompt
from flashqsa.errors import ArgumentError
from flashqsa.integrations import hf
from flashqsa.recording import Recording
from flashqsa.results import Selection

MASS_BINS = 256
"""Bins of blocks that dense attention mass is summed into, at most."""

_STEPS = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class MassRows:
    """Dense attention of some rows of one layer, by position.

    Attributes:
        positions: [n] int64.
        kept: [n] share that falls on what the row attends.
        best: [n] share that the heaviest blocks would keep, as many as it selected.
        recent: [n] share that the newest blocks would keep, as many as it selected.
        by_bin: [n, W] share that falls on each bin of blocks; the tail is left out.
        block_edges: [W + 1] int64 edges of these bins.
    """

    positions: torch.Tensor
    kept: torch.Tensor
    best: torch.Tensor
    recent: torch.Tensor
    by_bin: torch.Tensor
    block_edges: torch.Tensor


@dataclass
class _MassSeen:
    """The same while it is collected."""

    positions: list[torch.Tensor] = field(default_factory=list)
    shares: list[torch.Tensor] = field(default_factory=list)
    by_bin: list[torch.Tensor] = field(default_factory=list)


def record_prompt(
    model: Any,
    request: RunRequest,
    *,
    topk_blocks: int,
    mass_rows: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Recording, dict[int, MassRows]]:
    """Runs a prompt, records what it selects and weighs some of its rows against dense attention.

    Args:
        model: A causal language model of transformers.
        request: The prompt, and how it enters.
        topk_blocks: Blocks that a row selects at most.
        mass_rows: Rows to weigh, evenly spread over those that see more blocks; 0 for none.
        on_progress: Called with (tokens done, tokens in all).

    Returns:
        The recording, and the weighed rows by layer; none where no row sees more blocks than it selects.
    """
    block_tokens, _ = hf.qsa_layers(model)
    tokens = len(request.prompt_ids)
    sample = sample_positions((topk_blocks + 1) * block_tokens - 1, tokens, mass_rows)
    blocks = max(1, tokens // block_tokens)
    bins = min(MASS_BINS, blocks)
    edges = torch.arange(bins + 1) * blocks // bins
    seen: dict[int, _MassSeen] = {}

    def observe(context: Any, selection: Selection) -> None:
        rows = torch.isin(context.plan.positions, sample.to(context.plan.device)).nonzero().flatten()
        if rows.shape[0]:
            _weigh(context, selection, rows, edges, seen.setdefault(context.layer_id, _MassSeen()))

    with record(model) as recording, hf.observed(model, observe):
        run_prompt(model, request.prompt_ids, prefill_chunk=request.prefill_chunk, on_progress=on_progress)
    return recording, {layer_id: _joined(of_layer, edges) for layer_id, of_layer in seen.items()}


def _joined(seen: _MassSeen, edges: torch.Tensor) -> MassRows:
    kept, best, recent = torch.cat(seen.shares, dim=1)
    return MassRows(torch.cat(seen.positions), kept, best, recent, torch.cat(seen.by_bin), edges)


def sample_positions(first: int, end: int, count: int) -> torch.Tensor:
    """Up to `count` positions in [first, end), evenly spread, the last one among them; int64."""
    if first >= end or not count:
        return torch.zeros(0, dtype=torch.int64)
    return torch.linspace(end - 1, first, min(count, end - first), dtype=torch.float64).round().to(torch.int64).flip(0)


def _weigh(context: Any, selection: Selection, rows: torch.Tensor, edges: torch.Tensor, seen: _MassSeen) -> None:
    how = {"rows": rows, "softmax_scale": context.softmax_scale}
    mass = kept_mass(context.q, context.cache, context.plan, selection, **how)
    seen.positions.append(context.plan.positions[rows].cpu())
    seen.shares.append(torch.stack([mass.kept, mass.best, mass.recent]).float().cpu())
    for part in iterate_block_mass(context.q, context.cache, context.plan, **how):
        blocks = torch.arange(part.blocks.shape[1], device=part.blocks.device)
        bins = torch.bucketize(blocks, edges[1:-1].to(blocks.device), right=True)
        by_bin = part.blocks.new_zeros(part.blocks.shape[0], edges.shape[0] - 1)
        seen.by_bin.append(by_bin.index_add_(1, bins, part.blocks).float().cpu())


def load_recording(path: Path) -> Recording:
    """A recorded file.

    Raises:
        ArgumentError: It is no recording, damaged, or cannot be read.
        UnsupportedError: It is of a later version.
    """
    try:
        return Recording.load(path)
    except OSError as error:
        told = error.strerror or str(error)
        raise ArgumentError(
            f"inspect: source must be a recording that can be read, got {path} ({told}). Check its permissions."
        ) from error


def parse_steps(text: str | None, recording: Recording) -> range | None:
    """Steps such as `0-12` or `3`, both ends included; None for all.

    Raises:
        ArgumentError: They are no such numbers, or not in the recording.
    """
    if text is None:
        return None
    match = _STEPS.fullmatch(text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
    if not first <= last < len(recording.steps):
        raise ArgumentError(
            f"inspect: steps must be such as 0-12, within the recording's {len(recording.steps)}, got {text}. "
            "Count them from 0."
        )
    return range(first, last + 1)


def recorded_rows(recording: Recording, layer_id: int, request_id: int, steps: range | None) -> LayerRows:
    """The rows of one prompt in one layer.

    Raises:
        ArgumentError: There are none, or they belong to several prompts.
        SelectionError: A step lacks the layer.
    """
    rows = layer_rows(recording, layer_id, request_id=request_id, steps=steps)
    falls = (rows.positions.diff() <= 0).nonzero().flatten()
    if falls.shape[0]:
        position = int(rows.positions[int(falls[0]) + 1])
        raise ArgumentError(
            f"inspect: steps must hold one prompt of request {request_id}, got positions that go back to {position}. "
            "Pass --steps with those of one prompt."
        )
    return rows
