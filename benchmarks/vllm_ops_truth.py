"""What operators of the vLLM plugin should make of a step, in float64 or rounded as the definition rounds."""

from __future__ import annotations

import torch

from benchmarks.gpu_workload import BLOCK, HEAD_DIM, INDEX_DIM, INDEX_HEADS, KV_HEADS, Q_HEADS
from benchmarks.vllm_ops_cases import BF16, EPS, Call, Engine
from flashqsa.cache.state import read_slots
from flashqsa.preparation.plain import cast_saturating, mean_of_blocks, rms_norm, rotate

F64 = torch.float64


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers of the same bits, a view."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def largest(difference: torch.Tensor) -> float:
    """Largest absolute value; NaN where there is one."""
    return float(difference.abs().max()) if difference.numel() else 0.0


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """float64, by fp32, since float8 is not converted to every dtype everywhere."""
    return tensor.float().to(F64)


def pair_magnitude(exact: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Size of the pair that each number was rotated in; its own where it was not."""
    half = rotary_dim // 2
    pair = torch.hypot(exact[..., :half], exact[..., half:rotary_dim])
    return torch.cat([pair, pair, exact[..., rotary_dim:].abs()], dim=-1)


def closing_members(engine: Engine) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows [C] that close a block, the raw keys [C, r, Di] of its tokens, and the place [C] of its first token."""
    rows = (engine.closed_slots >= 0).nonzero()[:, 0]
    starts = engine.query_starts.to(torch.int64)
    member = rows[:, None] - torch.arange(BLOCK - 1, -1, -1, device=rows.device)
    request = engine.row_requests[rows][:, None].expand(-1, BLOCK)
    older = member - starts[request]  # negative: so many tokens before the step
    raw = torch.where(
        (older >= 0)[..., None],
        engine.index_k[member.clamp(min=0)],
        engine.older_keys[request, older.clamp(max=-1)],
    )
    return rows, raw, engine.logical[rows] - (BLOCK - 1)


def prepared(engine: Engine, exact: bool) -> dict[str, torch.Tensor]:
    """What preparation makes, by name: in float64 throughout, or rounded as the definition rounds."""

    def given(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(F64) if exact else tensor

    def stored(tensor: torch.Tensor, dtype: torch.dtype, scale: float | None = None) -> torch.Tensor:
        if exact:
            return tensor / (scale or 1.0)
        return cast_saturating(tensor, dtype, scale)

    weights = {name: given(weight) for name, weight in engine.norms.items()}
    cos, sin = engine.rope.lookup(engine.rope_of(engine.logical))
    heads = given(engine.qkv).view(engine.rows, -1, HEAD_DIM)
    q, keys = heads[:, : 2 * Q_HEADS : 2], heads[:, 2 * Q_HEADS : 2 * Q_HEADS + KV_HEADS]
    index_q = given(engine.index_q).reshape(engine.rows, INDEX_HEADS, INDEX_DIM)
    _, raw, first = closing_members(engine)
    pooled = mean_of_blocks(given(raw))[:, None]
    first_cos, first_sin = engine.rope.lookup(engine.rope_of(first))
    scaled = engine.case.fp8
    return {
        "index_q": stored(rotate(rms_norm(index_q, weights["index_q"], EPS), cos, sin), engine.index_dtype),
        "q": stored(rotate(rms_norm(q, weights["q"], EPS), cos, sin), BF16),
        "K": stored(
            rotate(rms_norm(keys, weights["k"], EPS), cos, sin), engine.kv.dtype, engine.k_scale if scaled else None
        ),
        "V": stored(heads[:, 2 * Q_HEADS + KV_HEADS :].to(F64 if exact else torch.float32), engine.kv.dtype,
                    engine.v_scale if scaled else None),
        "pooled keys": stored(
            rotate(rms_norm(pooled, weights["index_k"], EPS), first_cos, first_sin)[:, 0], engine.index_dtype
        ),
    }  # fmt: skip


def attended(call: Call, row: int) -> torch.Tensor:
    """[Hq, D] gated attention of one row over its listed tokens, in float64 throughout."""
    arguments = call.arguments
    listed = arguments["logical_indices"][row]
    tokens = listed[: int(listed[-1])].to(torch.int64)
    page_tokens = arguments["k_cache"].shape[1]
    pages = arguments["block_table"][int(arguments["token_to_req"][row])][tokens // page_tokens].to(torch.int64)
    slots = pages * page_tokens + tokens % page_tokens
    k = wide(read_slots(arguments["k_cache"], slots)) * arguments["k_scale"]
    v = wide(read_slots(arguments["v_cache"], slots)) * arguments["v_scale"]
    q = wide(arguments["q"][row]).view(k.shape[1], -1, k.shape[2])
    weights = torch.softmax(torch.einsum("hgd,nhd->hgn", q, k) * k.shape[2] ** -0.5, dim=-1)
    out = torch.einsum("hgn,nhd->hgd", weights, v).reshape(-1, k.shape[2])
    return out * torch.sigmoid(wide(arguments["output_gate"][row]))
