"""`make_step`: a random step in hostile memory, beside the contiguous truth of every request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashqsa.cache.state import LayerCache
from flashqsa.plan import StepPlan, plan_step
from flashqsa.rope import RopeTable
from flashqsa.testing import oracles
from flashqsa.testing.cases import StepCase
from flashqsa.testing.hostile import Guarded, guarded
from flashqsa.testing.memory import CacheMemory, make_cache_memory, make_ring_memory

F64 = torch.float64
NORM_EPS = 1e-6


@dataclass(frozen=True)
class NormWeights:
    """Weights of the four norms, in the model dtype, and their epsilon.

    Attributes:
        q_norm: [D] weight on attention queries.
        k_norm: [D] weight on attention keys.
        q_layernorm: [Di] weight on index queries.
        k_layernorm: [Di] weight on pooled index keys.
        eps: Epsilon of all four.
    """

    q_norm: torch.Tensor
    k_norm: torch.Tensor
    q_layernorm: torch.Tensor
    k_layernorm: torch.Tensor
    eps: float = NORM_EPS


@dataclass(frozen=True)
class RequestTruth:
    """One live request without paging: what the caches hold of it, exactly, and what it came from.

    Attributes:
        request_id: Its number in the plan.
        context_before: Tokens before the step.
        new_rows: Tokens that the step adds.
        first_row: Its first packed row.
        k: [N, Hkv, D] float64 keys as the cache represents them after the step (rounded, scale applied).
        v: [N, Hkv, D] float64 values, likewise.
        block_keys: [N // r, Di] float64 block keys, likewise.
        raw_k: [N, Hkv, D] keys as projected, model dtype.
        raw_index_keys: [N, Di] index keys as projected, model dtype.
        rope_positions: [3, N] int64.
        slot_ids: [N] int64 slots of its tokens.
        block_slot_ids: [N // r] int64 slots of its complete blocks.
        ring_id: Its ring.
    """

    request_id: int
    context_before: int
    new_rows: int
    first_row: int
    k: torch.Tensor
    v: torch.Tensor
    block_keys: torch.Tensor
    raw_k: torch.Tensor
    raw_index_keys: torch.Tensor
    rope_positions: torch.Tensor
    slot_ids: torch.Tensor
    block_slot_ids: torch.Tensor
    ring_id: int

    @property
    def seq_len(self) -> int:
        """Tokens after the step."""
        return self.context_before + self.new_rows

    def rows(self) -> Iterator[tuple[int, int]]:
        """(packed row, token position) of each row in the step."""
        for i in range(self.new_rows):
            yield self.first_row + i, self.context_before + i


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

    def assert_guards_intact(self) -> None:
        """Raise AssertionError when memory beside any input or cache was written."""
        for guard in self.guards:
            guard.assert_intact()


def make_step(case: StepCase, *, seed: int, device: torch.device | str = "cpu", written: bool = True) -> Step:
    """Make a random step.

    Page ids are a random permutation of the pool, table entries past a length are garbage, free memory is NaN, caches
    are views of larger buffers full of canaries. The same case and seed give the same truth whatever `written`,
    `layout`, `page_tokens` and `contiguous` are.

    Args:
        case: Its shape.
        seed: Seed of all random choices.
        device: Where its tensors live.
        written: Whether the step's own rows are in the caches already, as selection and attention need; otherwise the
            caches are as preparation finds them: new slots NaN, the ring left by a rejected draft.
    """
    values = torch.Generator().manual_seed(seed)
    places = torch.Generator().manual_seed(seed + 1)
    rope = _rope_table(case, device)
    widths = (case.head_dim, case.head_dim, case.index_head_dim, case.index_head_dim)
    q_norm, k_norm, q_layernorm, k_layernorm = (randn(values, case.dtype, n, std=0.2).to(device) for n in widths)
    norms = NormWeights(q_norm, k_norm, q_layernorm, k_layernorm)
    memory = make_cache_memory(case, generator=places, device=device)
    rings = make_ring_memory(case, generator=places, device=device)
    inputs = _Inputs(case, device)
    requests, first_row = [], 0
    for request_id, (before, new) in enumerate(case.requests):
        if before + new:
            truth = _make_request(
                case, request_id, first_row, values, rope, norms, memory, rings.ring_ids[request_id], inputs
            )
            memory.store(truth, before + new if written else before, case)
            rings.store(truth, case, written=written, generator=places)
            requests.append(truth)
        first_row += new
    inputs.prepare_queries(rope, norms, requests)
    fp8 = (case.kv_dtype or case.dtype) == torch.float8_e4m3fn
    cache = LayerCache(
        memory.k_pages,
        memory.v_pages,
        memory.block_keys,
        rings.ring,
        rings.ring_positions,
        k_scale=_scale(case.k_scale, device) if fp8 else None,
        v_scale=_scale(case.v_scale, device) if fp8 else None,
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


def randn(generator: torch.Generator, dtype: torch.dtype, *shape: int, std: float = 1.0) -> torch.Tensor:
    """Normal numbers on the CPU, rounded to a dtype (float8 saturates)."""
    return oracles.rounded(torch.randn(shape, generator=generator) * std, dtype).to(dtype)


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

    def prepare_queries(self, rope: RopeTable, norms: NormWeights, requests: list[RequestTruth]) -> None:
        """Fill q and index_q of live rows with what preparation makes of the projections, rounded as it rounds."""
        for request in requests:
            if not request.new_rows:
                continue
            rows = slice(request.first_row, request.first_row + request.new_rows)
            positions = request.rope_positions[:, request.context_before :]
            q = self.q_gate[rows, :, : self.case.head_dim]
            index_q = self.index_qk[rows, : self.case.index_heads]
            self.q[rows] = self._prepared(q, norms.q_norm, norms, positions, rope).to(self.q.dtype)
            index = self._prepared(index_q, norms.q_layernorm, norms, positions, rope)
            self.index_q[rows] = oracles.rounded(index, self.index_q.dtype).to(self.index_q.dtype)

    def _prepared(
        self, x: torch.Tensor, weight: torch.Tensor, norms: NormWeights, positions: torch.Tensor, rope: RopeTable
    ) -> torch.Tensor:
        normed = oracles.rms_norm(x, weight, norms.eps, self.case.dtype)
        return oracles.rotate(normed, positions, rope.cos_sin, rope.mrope_section, self.case.dtype)


def _make_request(
    case: StepCase,
    request_id: int,
    first_row: int,
    generator: torch.Generator,
    rope: RopeTable,
    norms: NormWeights,
    memory: CacheMemory,
    ring_id: int,
    inputs: _Inputs,
) -> RequestTruth:
    before, new = case.requests[request_id]
    tokens, device = before + new, inputs.device
    raw_k = randn(generator, case.dtype, tokens, case.kv_heads, case.head_dim).to(device)
    raw_v = randn(generator, case.dtype, tokens, case.kv_heads, case.head_dim).to(device)
    raw_index_keys = randn(generator, case.dtype, tokens, case.index_head_dim).to(device)
    positions = _rope_positions(case, tokens, generator).to(device)
    rows = slice(first_row, first_row + new)
    inputs.q_gate[rows] = randn(generator, case.dtype, new, case.q_heads, 2 * case.head_dim).to(device)
    inputs.k[rows], inputs.v[rows] = raw_k[before:], raw_v[before:]
    index_q = randn(generator, case.dtype, new, case.index_heads, case.index_head_dim).to(device)
    inputs.index_qk[rows] = torch.cat([index_q, raw_index_keys[before:, None]], dim=1)
    inputs.rope_positions[:, rows] = positions[:, before:]
    table, section = rope.cos_sin, rope.mrope_section
    k = oracles.rotate(
        oracles.rms_norm(raw_k, norms.k_norm, norms.eps, case.dtype), positions, table, section, case.dtype
    )
    block_keys = oracles.pool_block_keys(
        raw_index_keys, positions, norms.k_layernorm, norms.eps, table, section, case.block_tokens, case.dtype
    )
    kv_dtype = case.kv_dtype or case.dtype
    fp8 = kv_dtype == torch.float8_e4m3fn
    k_scale = float(_scale(case.k_scale, "cpu")) if fp8 else 1.0
    v_scale = float(_scale(case.v_scale, "cpu")) if fp8 else 1.0
    return RequestTruth(
        request_id=request_id,
        context_before=before,
        new_rows=new,
        first_row=first_row,
        k=oracles.rounded(k / k_scale, kv_dtype) * k_scale,
        v=oracles.rounded(raw_v.to(F64) / v_scale, kv_dtype) * v_scale,
        block_keys=oracles.rounded(block_keys, case.index_dtype or case.dtype),
        raw_k=raw_k,
        raw_index_keys=raw_index_keys,
        rope_positions=positions,
        slot_ids=memory.token_slots(request_id, tokens),
        block_slot_ids=memory.block_slots(request_id, tokens // case.block_tokens),
        ring_id=ring_id,
    )


def _rope_positions(case: StepCase, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """[3, N] positions that differ from token positions: shifted, and with three different axes under MRoPE."""
    shift = int(torch.randint(1, 8, (), generator=generator))
    time = torch.arange(shift, shift + tokens)
    if not case.mrope:
        return time.expand(3, -1).contiguous()
    limit = _table_rows(case)
    height, width = (torch.randint(0, limit, (tokens,), generator=generator) for _ in range(2))
    return torch.stack([time, height, width])


def _table_rows(case: StepCase) -> int:
    return max(case.seq_lens, default=0) + 16


def _rope_table(case: StepCase, device: torch.device | str) -> RopeTable:
    parameters = {"rope_type": "default", "rope_theta": 10_000.0}
    return RopeTable.build(
        parameters,
        rotary_dim=case.rotary_dim,
        num_positions=_table_rows(case),
        mrope_section=case.mrope_section,
        dtype=case.rope_dtype,
        device=device,
    )


def _scale(value: float, device: torch.device | str) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32, device=device)


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
