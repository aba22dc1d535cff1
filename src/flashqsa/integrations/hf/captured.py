"""Decode steps of one layer as a CUDA graph: launching kernels one by one takes the host longer than they run.

Once a growing cache has served a few steps of one row a batch row, everything between the projections and the output
projection is captured, and then replayed until the cache moves to larger buffers. Lengths live on the device and grow
there by one a replay; the host keeps count and sets them anew where the cache was changed in between. What is captured
are the same kernels over the same caches, so results do not change by a bit.
"""

from __future__ import annotations

from typing import Any

import torch

from flashqsa.attention import attend
from flashqsa.checks import values_are_checked
from flashqsa.integrations.hf.angles import Angles
from flashqsa.integrations.hf.growing import Buffers, buffers_behind, show
from flashqsa.integrations.hf.kernels import Norms, Projected
from flashqsa.integrations.hf.masks import HFStep
from flashqsa.integrations.hf.pooled import PooledKeys, known_state, remember
from flashqsa.integrations.hf.report import count_rows, counts_of
from flashqsa.plan import plan_step
from flashqsa.selection import select_blocks

STEPS_BEFORE = 3
"""Steps that run kernel by kernel first: a short answer is not worth a capture."""


class CapturedStep:
    """The graph of a layer's decode step over some buffers, and the memory that it reads and writes.

    Args:
        attention: The layer.
        rows: Projections of the first step that it serves.
        norms: The layer's norms.
        angles: Of that step.
        step: That step.
        buffers: The cache's buffers.
        state: Its pooled keys.
    """

    def __init__(
        self,
        attention: Any,
        rows: Projected,
        norms: Norms,
        angles: Angles,
        step: HFStep,
        buffers: Buffers,
        state: PooledKeys,
    ) -> None:
        device, batch = rows.k.device, rows.batch
        self.block_tokens, self.norms, self.scale = step.plan.block_tokens, norms, attention.scaling
        self.key = _key(step, norms, state, attention)
        self.starts, self.half = step.starts, angles.half
        self.inputs = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in self._given(rows, angles)]
        self.lengths = torch.zeros(batch + 1, dtype=torch.int32, device=device)
        self.tokens = -1  # that the lengths stand for; -1 for none yet
        columns = buffers.k.shape[1]
        each = torch.arange(batch + 1, device=device)
        starts = torch.tensor(step.starts, dtype=torch.int64, device=device)
        self.plan_arguments: dict[str, Any] = {
            "query_starts": each.to(torch.int32), "seq_lens": self.lengths[:batch], "page_table": None,
            "page_tokens": None, "block_tokens": self.block_tokens, "topk_blocks": step.plan.topk_blocks,
            "max_query_len": 1, "max_seq_len": columns, "first_slots": each[:batch] * columns + starts,
            "first_block_slots": each[:batch] * step.block_capacity, "num_rows": batch,
        }  # fmt: skip
        self.plan = plan_step(**self.plan_arguments)
        self.buffers_of = (*buffers.all, state.keys)
        self.cache = buffers.pages(state.keys, attention.layer_idx)
        self.counts = counts_of(attention, device)  # the graph adds to it
        self.graph: torch.cuda.CUDAGraph | None = None
        self.out: torch.Tensor | None = None

    def run_and_capture(self, attention: Any, rows: Projected, angles: Angles, past: int) -> torch.Tensor:
        """Attended rows [B, Hq, D] of a step that runs kernel by kernel, which also compiles what it needs."""
        self._take(self._given(rows, angles), past)
        attended = self._run(attention)
        self._capture(attention)
        return attended

    def _capture(self, attention: Any) -> None:
        device = self.lengths.device
        here = torch.cuda.current_stream(device)
        apart = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        apart.wait_stream(here)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(apart):
            self.graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.out = self._run(attention)
            finally:
                self.graph.capture_end()
        here.wait_stream(apart)

    def serves(self, attention: Any, norms: Norms, step: HFStep, state: PooledKeys) -> bool:
        """Whether a step differs from the captured one by its length alone."""
        return self.key == _key(step, norms, state, attention)

    def replay(self, rows: Projected, angles: Angles, past: int) -> torch.Tensor:
        """Attended rows [B, Hq, D], gated; to be used before the next replay."""
        self._take(self._given(rows, angles), past)
        assert self.graph is not None
        assert self.out is not None
        self.graph.replay()
        return self.out

    def _given(self, rows: Projected, angles: Angles) -> list[torch.Tensor]:
        packed = angles.packed(angles.columns - self.block_tokens, angles.columns)
        return [rows.q_gate, rows.k, rows.v, rows.index_qk, packed]

    def _take(self, given: list[torch.Tensor], past: int) -> None:
        """Bring a step's rows to where the graph reads them, and set lengths that did not follow by themselves."""
        torch._foreach_copy_(self.inputs, given)
        if self.tokens != past:
            before = [past - start for start in self.starts]
            lengths = torch.tensor([*before, past - 1], dtype=torch.int32, pin_memory=self.lengths.is_cuda)
            self.lengths.copy_(lengths, non_blocking=True)
        self.tokens = past + 1

    def _run(self, attention: Any) -> torch.Tensor:
        from flashqsa.preparation.triton_context import prepare_context_triton

        self.lengths.add_(1)
        plan = plan_step(**self.plan_arguments, out=self.plan)
        *rows, packed = self.inputs
        q, index_q = prepare_context_triton(
            rows, packed[..., : self.half], packed[..., self.half :], self.norms, self.buffers_of, query_tokens=1,
            past=self.lengths[-1:], row_angle=self.block_tokens - 1,
            closed_block_slot_ids=plan.closed_block_slot_ids, block_tokens=self.block_tokens,
        )  # fmt: skip
        selection = select_blocks(index_q, self.cache, plan)
        count_rows(attention, selection)
        gate = rows[0][..., q.shape[2] :]
        attended = attend(q, self.cache, selection, plan, gate=gate, softmax_scale=self.scale)
        assert isinstance(attended, torch.Tensor)
        return attended


def _key(step: HFStep, norms: Norms, state: PooledKeys, attention: Any) -> tuple[Any, ...]:
    weights = tuple((weight.data_ptr(), eps) for weight, eps in norms)
    return step.starts, step.plan.topk_blocks, state.keys.data_ptr(), weights, attention.scaling, attention.layer_idx


def captures(device: torch.device) -> bool:
    """Whether steps on a device may be captured: not where values are read, nor inside a capture of the caller's."""
    return device.type == "cuda" and not values_are_checked(device) and not torch.cuda.is_current_stream_capturing()


def decode_by_graph(
    attention: Any, rows: Projected, norms: Norms, angles: Angles, step: HFStep, cache: Any
) -> torch.Tensor | None:
    """Attended rows [B, Hq, D] of a decode step, or None where it runs kernel by kernel.

    Args:
        attention: The layer, with neither a selector nor observers.
        rows: Its projections.
        norms: Its norms.
        angles: Rotary angles of the whole context.
        step: The step.
        cache: A transformers cache.
    """
    if rows.query_tokens != 1 or not captures(rows.k.device) or attention.layer_idx >= len(cache.layers):
        return None
    layer = cache.layers[attention.layer_idx]
    buffers = buffers_behind(layer, type(cache))
    total, r = step.kv_tokens, step.plan.block_tokens
    if buffers is None or buffers.tokens != total - 1 or buffers.k.shape[:2] != (rows.batch, step.block_capacity * r):
        return None
    if not step.grows_everywhere or total < r or buffers.k.dtype != rows.k.dtype:
        return None
    state = known_state(layer, step, total - 1)
    if state is None or state.keys.shape[1] != step.block_capacity:
        return None
    if any(count < (total - 1 - start) // r for count, start in zip(state.counts, state.starts, strict=True)):
        return None
    buffers.steps += 1
    if buffers.steps <= STEPS_BEFORE:
        return None
    captured: CapturedStep | None = buffers.captured
    if captured is not None and captured.serves(attention, norms, step, state):
        out = captured.replay(rows, angles, total - 1)
    else:
        with torch.inference_mode(False), torch.no_grad():
            captured = CapturedStep(attention, rows, norms, angles, step, buffers, state)
            out = captured.run_and_capture(attention, rows, angles, total - 1)
            buffers.captured = captured
    show(layer, buffers, total, type(cache))
    state.counts = [(total - start) // r for start in state.starts]
    remember(layer, state, total)
    return out
