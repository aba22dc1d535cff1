"""`RequestTruth`: one request without paging, the contiguous truth that oracles work on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flashqsa.preparation.weights import NormWeights
from flashqsa.rope import RopeTable
from flashqsa.testing import oracles
from flashqsa.testing.cases import GRID, StepCase
from flashqsa.testing.memory import CacheMemory


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
        raw_v: [N, Hkv, D] values as projected, model dtype.
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
    raw_v: torch.Tensor
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


def randn(generator: torch.Generator, dtype: torch.dtype, *shape: int, std: float = 1.0) -> torch.Tensor:
    """Normal numbers on the CPU, rounded to a dtype (float8 saturates)."""
    values = torch.randn(shape, generator=generator).mul_(std)
    return (values.clamp_(-448, 448) if dtype == torch.float8_e4m3fn else values).to(dtype)


def stream(*numbers: int) -> torch.Generator:
    """A CPU generator that is a function of some numbers."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**62
    return torch.Generator().manual_seed(seed)


def _token_values(generator: torch.Generator, dtype: torch.dtype, tokens: int, *shape: int) -> torch.Tensor:
    """[tokens, *shape] normal numbers of which a prefix does not depend on the number of tokens."""
    whole = -(-tokens // 16) * 16  # torch fills multiples of 16 numbers in order, and other sizes not quite
    return randn(generator, dtype, whole, *shape)[:tokens]


def make_truth(
    case: StepCase,
    request_id: int,
    first_row: int,
    ring_id: int,
    *,
    seed: int,
    rope: RopeTable,
    norms: NormWeights,
    memory: CacheMemory,
) -> RequestTruth:
    """Draw one request at random and compute what the caches must hold of it.

    Token i of it is a function of `seed`, of the request's own seed and of i: not of its length, of where the step
    cuts it, or of the other requests.
    """
    before, new = case.requests[request_id]
    own = case.request_seed(request_id)
    tokens, device = before + new, rope.cos_sin.device
    heads, dim = case.kv_heads, case.head_dim
    raw_k = _token_values(stream(seed, own, 0), case.dtype, tokens, heads, dim).to(device)
    raw_v = _token_values(stream(seed, own, 1), case.dtype, tokens, heads, dim).to(device)
    raw_index_keys = _token_values(stream(seed, own, 2), case.dtype, tokens, case.index_head_dim).to(device)
    positions = _rope_positions(case, tokens, stream(seed, own, 3)).to(device)
    table, section = rope.cos_sin, rope.mrope_section
    normed = oracles.rms_norm(raw_k, norms.k, norms.eps, case.dtype)
    k = oracles.rotate(normed, positions, table, section, case.dtype)
    block_keys = oracles.pool_block_keys(
        raw_index_keys, positions, norms.index_k, norms.eps, table, section, case.block_tokens, case.dtype
    )
    kv_dtype, (k_scale, v_scale) = case.kv_dtype or case.dtype, case.scales
    return RequestTruth(
        request_id=request_id,
        context_before=before,
        new_rows=new,
        first_row=first_row,
        k=oracles.rounded(k / k_scale, kv_dtype) * k_scale,
        v=oracles.rounded(raw_v.to(torch.float64) / v_scale, kv_dtype) * v_scale,
        block_keys=oracles.rounded(block_keys, case.index_dtype or case.dtype),
        raw_k=raw_k,
        raw_v=raw_v,
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
    grid = torch.randint(0, GRID, (tokens, 2), generator=generator)
    return torch.stack([time, grid[:, 0], grid[:, 1]])
