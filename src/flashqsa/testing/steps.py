"""`make_step`: a random step in hostile memory, beside the contiguous truth of every request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashqsa.cache.state import LayerCache
from flashqsa.plan import StepPlan, plan_step
from flashqsa.preparation.weights import NormWeights
from flashqsa.rope import RopeTable
from flashqsa.testing import oracles
from flashqsa.testing.cases import StepCase
from flashqsa.testing.hostile import Guarded, guarded
from flashqsa.testing.memory import CacheMemory, make_cache_memory, make_ring_memory
from flashqsa.testing.truth import RequestTruth, make_truth, randn, stream

NORM_EPS = 1e-6


@dataclass(frozen=True)
class Step:
    """A random step. Inputs of padding rows are NaN.

    Attributes:
        case: Its shape.
        plan: The plan.
        cache: Caches in guarded memory; unused slots, rings and pages are NaN.
        q: [T, Hq, D] prepared attention queries.
        gate: [T, Hq, D] gate logits, the second half of `q_gate`.
        index_q: [T, Hi, Di] prepared index queries.
        q_gate: [T, Hq, 2 D] projected queries and gates.
        k: [T, Hkv, D] projected keys.
        v: [T, Hkv, D] projected values.
        index_qk: [T, Hi + 1, Di] projected index queries, then the index key.
        rope_positions: [T] int64, or [3, T] with a row stride above T.
        rope: Rope table.
        norms: Norm weights.
        requests: The live requests, padding left out.
        guards: Every guarded allocation.
    """

    case: StepCase
    plan: StepPlan
    cache: LayerCache
    q: torch.Tensor
    gate: torch.Tensor
    index_q: torch.Tensor
    q_gate: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index_qk: torch.Tensor
    rope_positions: torch.Tensor
    rope: RopeTable
    norms: NormWeights
    requests: list[RequestTruth]
    guards: list[Guarded]

    @property
    def num_rows(self) -> int:
        """Packed rows, padding included."""
        return self.case.num_rows

    @property
    def live_rows(self) -> torch.Tensor:
        """[T] bool, rows that belong to a request."""
        return self.plan.request_ids >= 0

    def unattended_slots(self, block_ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Slots of cached tokens that no row of their request attends: their values may be anything.

        Args:
            block_ids: Selected blocks of each row.

        Returns:
            [N] int64, to hand to `poison_slots`.
        """
        slots = []
        for request in self.requests:
            unseen = torch.ones(request.seq_len, dtype=torch.bool, device=request.slot_ids.device)
            for row, position in request.rows():
                visible = (position + 1) // self.case.block_tokens
                unseen[oracles.selected_tokens(block_ids[row], visible, position, self.case.block_tokens)] = False
            slots.append(request.slot_ids[unseen])
        return torch.cat(slots) if slots else torch.zeros(0, dtype=torch.int64, device=self.plan.device)

    def assert_guards_intact(self) -> None:
        """Raise AssertionError when memory beside any input or cache was written."""
        for guard in self.guards:
            guard.assert_intact()


def make_step(case: StepCase, *, seed: int, device: torch.device | str = "cpu", written: bool = True) -> Step:
    """Make a random step.

    Page ids are a random permutation of the pool, table entries past a length are garbage, free memory is NaN, caches
    are views of larger buffers full of canaries. Token i of a request is a function of `seed`, its request seed and
    i alone: other lengths, cuts, batches, pages, layouts and `written` give the same values.

    Args:
        case: Its shape.
        seed: Seed of all random choices.
        device: Where its tensors live.
        written: Whether the step's own rows are in the caches already, as selection and attention need; otherwise the
            caches are as preparation finds them: new slots NaN, the ring left by a rejected draft.
    """
    weights, places = stream(seed), stream(seed, 0)
    rope = _rope_table(case, device)
    widths = (case.head_dim, case.head_dim, case.index_head_dim, case.index_head_dim)
    q, k, index_q, index_k = (randn(weights, case.dtype, n, std=0.2).to(device) for n in widths)
    norms = NormWeights(q=q, k=k, index_q=index_q, index_k=index_k, eps=NORM_EPS)
    memory = make_cache_memory(case, generator=places, device=device)
    rings = make_ring_memory(case, generator=places, device=device)
    inputs = _Inputs(case, device)
    requests, first_row = [], 0
    for request_id, (before, new) in enumerate(case.requests):
        if before + new:
            truth = make_truth(
                case, request_id, first_row, rings.ring_ids[request_id],
                seed=seed, rope=rope, norms=norms, memory=memory,
            )  # fmt: skip
            inputs.fill(truth, seed)
            memory.store(truth, before + new if written else before, case)
            rings.store(truth, case, written=written, generator=places)
            requests.append(truth)
        first_row += new
    inputs.prepare_queries(rope, norms, requests)
    k_scale, v_scale = (torch.tensor([s], dtype=torch.float32, device=device) for s in case.scales)
    cache = LayerCache(
        memory.k_pages,
        memory.v_pages,
        memory.block_keys,
        rings.ring,
        rings.ring_positions,
        k_scale=k_scale if case.kv_is_fp8 else None,
        v_scale=v_scale if case.kv_is_fp8 else None,
        layer_id=3,
    )
    return Step(
        case=case,
        plan=_plan(case, memory, rings.ring_ids, device),
        cache=cache,
        q=inputs.q,
        gate=inputs.q_gate[..., case.head_dim :],
        index_q=inputs.index_q,
        q_gate=inputs.q_gate,
        k=inputs.k,
        v=inputs.v,
        index_qk=inputs.index_qk,
        rope_positions=inputs.rope_positions if case.mrope else inputs.rope_positions[0],
        rope=rope,
        norms=norms,
        requests=requests,
        guards=[*memory.guards, rings.guard, *inputs.guards],
    )


class _Inputs:
    """Per-row tensors of a step in guarded memory, NaN until filled."""

    def __init__(self, case: StepCase, device: torch.device | str) -> None:
        self.case = case
        self.guards: list[Guarded] = []
        self.device = device
        rows, dim, index_dim = case.num_rows, case.head_dim, case.index_head_dim
        self.q_gate = self._add((rows, case.q_heads, 2 * dim), case.dtype)
        self.k = self._add((rows, case.kv_heads, dim), case.dtype)
        self.v = self._add((rows, case.kv_heads, dim), case.dtype)
        self.index_qk = self._add((rows, case.index_heads + 1, index_dim), case.dtype)
        self.q = self._add((rows, case.q_heads, dim), case.dtype)
        self.index_q = self._add((rows, case.index_heads, index_dim), case.index_q_dtype or case.dtype)
        self.rope_positions = self._add((3, rows), torch.int64, padding=(0, 4))
        self.rope_positions.fill_(1)  # padding rows keep a position from some earlier step

    def _add(self, shape: tuple[int, ...], dtype: torch.dtype, padding: int | tuple[int, ...] = 1) -> torch.Tensor:
        guard = guarded(shape, dtype, padding=padding, device=self.device)
        self.guards.append(guard)
        return guard.view

    def fill(self, truth: RequestTruth, seed: int) -> None:
        """Put the projections of a request's rows in place; queries and gates are drawn row by row."""
        case, before = self.case, truth.context_before
        rows = slice(truth.first_row, truth.first_row + truth.new_rows)
        own = case.request_seed(truth.request_id)
        drawn = [self._draw_row(stream(seed, own, 4, position)) for _, position in truth.rows()]
        if drawn:
            q_gate, index_q = (torch.stack(tensors).to(self.device) for tensors in zip(*drawn, strict=True))
            self.q_gate[rows], self.index_qk[rows, : case.index_heads] = q_gate, index_q
        self.index_qk[rows, case.index_heads] = truth.raw_index_keys[before:]
        self.k[rows], self.v[rows] = truth.raw_k[before:], truth.raw_v[before:]
        self.rope_positions[:, rows] = truth.rope_positions[:, before:]

    def _draw_row(self, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        case = self.case
        q_gate = randn(generator, case.dtype, case.q_heads, 2 * case.head_dim)
        return q_gate, randn(generator, case.dtype, case.index_heads, case.index_head_dim)

    def prepare_queries(self, rope: RopeTable, norms: NormWeights, requests: list[RequestTruth]) -> None:
        """Fill q and index_q of live rows with what preparation makes of the projections, rounded as it rounds."""
        for request in requests:
            if not request.new_rows:
                continue
            rows = slice(request.first_row, request.first_row + request.new_rows)
            positions = request.rope_positions[:, request.context_before :]
            q = self.q_gate[rows, :, : self.case.head_dim]
            index_q = self.index_qk[rows, : self.case.index_heads]
            self.q[rows] = self._prepared(q, norms.q, norms, positions, rope).to(self.q.dtype)
            index = self._prepared(index_q, norms.index_q, norms, positions, rope)
            self.index_q[rows] = oracles.rounded(index, self.index_q.dtype).to(self.index_q.dtype)

    def _prepared(
        self, x: torch.Tensor, weight: torch.Tensor, norms: NormWeights, positions: torch.Tensor, rope: RopeTable
    ) -> torch.Tensor:
        normed = oracles.rms_norm(x, weight, norms.eps, self.case.dtype)
        return oracles.rotate(normed, positions, rope.cos_sin, rope.mrope_section, self.case.dtype)


def _rope_table(case: StepCase, device: torch.device | str) -> RopeTable:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    return RopeTable.build(
        parameters,
        rotary_dim=case.rotary_dim,
        num_positions=case.rope_rows,
        mrope_section=case.mrope_section,
        dtype=case.rope_dtype,
        device=device,
    )


def _plan(case: StepCase, memory: CacheMemory, ring_ids: list[int], device: torch.device | str) -> StepPlan:
    lens, rows = case.seq_lens, case.query_lens
    starts = torch.tensor([0, *rows]).cumsum(0)
    return plan_step(
        starts.to(device=device, dtype=torch.int32),
        torch.tensor(lens, dtype=torch.int32, device=device),
        memory.page_table,
        page_tokens=None if case.contiguous else case.page_tokens,
        block_tokens=case.block_tokens,
        topk_blocks=case.topk_blocks,
        max_query_len=max(rows, default=0) if case.max_query_len is None else case.max_query_len,
        max_seq_len=max(lens, default=0) if case.max_seq_len is None else case.max_seq_len,
        num_pages=None if case.contiguous else memory.k_pages.shape[0],
        first_slots=memory.first_slots,
        first_block_slots=memory.first_block_slots,
        ring_ids=torch.tensor(ring_ids, dtype=torch.int32, device=device),
        ring_tokens=case.ring_tokens,
        speculative_rows=case.speculative_rows,
        num_rows=case.num_rows,
    )
