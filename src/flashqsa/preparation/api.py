"""`prepare`: checks and dispatch."""

from __future__ import annotations

import torch

from flashqsa.backends import resolve_backend
from flashqsa.cache.state import LayerCache
from flashqsa.checks import CACHE_DTYPES, FLOAT_DTYPES, expect, expect_type, values_are_checked
from flashqsa.errors import ArgumentError, DTypeError, ShapeError
from flashqsa.ops.tracing import is_traced
from flashqsa.plan import StepPlan
from flashqsa.preparation.plain import prepare_torch
from flashqsa.preparation.reference import prepare_reference
from flashqsa.preparation.support import prepare_refusal
from flashqsa.preparation.weights import NormWeights
from flashqsa.results import Prepared
from flashqsa.rope import RopeTable


def prepare(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index_qk: torch.Tensor,
    rope_positions: torch.Tensor,
    rope: RopeTable,
    norms: NormWeights,
    cache: LayerCache,
    plan: StepPlan,
    *,
    out: Prepared | None = None,
    backend: str = "auto",
) -> Prepared:
    """Norm and rotate queries and keys, and write the caches: K, V, closed block keys, the ring.

    A block that a row of this step closes is pooled and written here, so its own row may select it. Members older than
    the step come from the ring. Only the last ``ring_tokens`` rows of a request enter the ring.

    Args:
        q_gate: [T, Hq, 2 * D] projected queries and gates, per head ``[q | gate]``, the model dtype.
        k: [T, Hkv, D] projected keys, same dtype.
        v: [T, Hkv, D] projected values, same dtype.
        index_qk: [T, Hi + 1, Di] projected index queries and, last, the raw index key, same dtype.
        rope_positions: [T] or [3, T] int64 rotary positions (time, height, width), each within the table.
        rope: The rotary table.
        norms: The layer's norm weights.
        cache: Caches of the layer, written in place.
        plan: The step.
        out: Buffers for `index_q` and `q` (and `gate`); `index_q` may be float8_e4m3fn, saturated at 448.
        backend: "auto", "reference", "torch" or "triton".

    Returns:
        Index queries, attention queries and gates; rows of padding are zero (their gates are as given).

    Raises:
        ShapeError, DTypeError, DeviceError: A tensor does not fit; nothing was written.
        ArgumentError: A value breaks a rule; nothing was written.
        UnsupportedError: The named backend does not serve this device.

    Source: transformers 5.24.0, Qwen4ExpTextAttention and Qwen4ExpTextQSAIndexer.
    """
    where = "prepare"
    if is_traced(q_gate):
        from flashqsa.ops.preparation import prepare_traced

        return prepare_traced(
            q_gate, k, v, index_qk, rope_positions, rope, norms, cache, plan, out=out, backend=backend
        )
    for name, value, kind in (("cache", cache, LayerCache), ("plan", plan, StepPlan), ("rope", rope, RopeTable),
                              ("norms", norms, NormWeights)):  # fmt: skip
        expect_type(where, name, value, kind)
    plan.check_cache(where, cache)
    _check_inputs(where, q_gate, k, v, index_qk, norms, cache, plan)
    rope_positions = _three_axes(where, rope_positions, rope, cache, plan)
    _check_ring(where, index_qk, rope, cache, plan)
    dim = cache.head_dim
    if out is not None:
        _check_out(where, out, q_gate, index_qk, dim)
    refusal = prepare_refusal(q_gate, k, v, index_qk, rope, norms, cache, out)
    backend = resolve_backend(where, backend, cache.device, refusal)
    arguments = (q_gate, k, v, index_qk, rope_positions, rope, norms, cache, plan)
    with torch.set_grad_enabled(torch.is_grad_enabled() and out is None and backend == "torch"):
        if backend == "torch":
            result = prepare_torch(*arguments, out)
        else:
            result = out or Prepared(
                index_q=index_qk.new_empty(index_qk[:, :-1].shape),
                q=q_gate.new_empty(q_gate[..., :dim].shape),
                gate=q_gate[..., dim:],
            )
            if backend == "triton":
                from flashqsa.preparation.triton_prepare import prepare_triton

                prepare_triton(*arguments, result)
                return result
            prepare_reference(*arguments, result)
        if out is not None and out.gate.data_ptr() != q_gate[..., dim:].data_ptr():
            out.gate.copy_(q_gate[..., dim:])
    return result


def _check_inputs(
    where: str,
    q_gate: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index_qk: torch.Tensor,
    norms: NormWeights,
    cache: LayerCache,
    plan: StepPlan,
) -> None:
    dims = {"T": plan.num_rows, "Hkv": cache.kv_heads, "D": cache.head_dim, "2D": 2 * cache.head_dim}
    if cache.block_keys is not None:
        dims["Di"] = cache.block_keys.shape[2]
    expect(where, "q_gate", q_gate, "T Hq 2D", dims, dtypes=FLOAT_DTYPES, device=cache.device)
    model_dtype = (q_gate.dtype,)
    expect(where, "k", k, "T Hkv D", dims, dtypes=model_dtype, device=cache.device)
    expect(where, "v", v, "T Hkv D", dims, dtypes=model_dtype, device=cache.device)
    expect(where, "index_qk", index_qk, "T Hi+1 Di", dims, dtypes=model_dtype, device=cache.device)
    if index_qk.shape[1] < 2:
        raise ShapeError(
            f"{where}: index_qk must hold at least one query head and the key head, got {index_qk.shape[1]} heads. "
            "Pass the whole projection."
        )
    if not q_gate.shape[1] or q_gate.shape[1] % cache.kv_heads:
        raise ShapeError(
            f"{where}: q_gate must have a multiple of {cache.kv_heads} KV heads, got {q_gate.shape[1]} query heads. "
            "Query heads come in groups of one KV head each."
        )
    for name, letter in (("q", "D"), ("k", "D"), ("index_q", "Di"), ("index_k", "Di")):
        expect(where, f"norms.{name}", getattr(norms, name), letter, dims, dtypes=FLOAT_DTYPES, device=cache.device)


def _three_axes(
    where: str, rope_positions: torch.Tensor, rope: RopeTable, cache: LayerCache, plan: StepPlan
) -> torch.Tensor:
    """Rotary positions as [3, T], checked against the table."""
    two = isinstance(rope_positions, torch.Tensor) and rope_positions.dim() == 2
    if two and rope_positions.shape[1] > 1 and rope_positions.stride(1) != 1:
        rope_positions = rope_positions.contiguous()
    expect(
        where, "rope_positions", rope_positions, "3 T" if two else "T", {"T": plan.num_rows}, dtypes=(torch.int64,),
        device=cache.device, hint="One rotary position, or three, a row.",
    )  # fmt: skip
    expect(where, "rope.cos_sin", rope.cos_sin, "positions rotary", {}, dtypes=FLOAT_DTYPES, device=cache.device)
    index_dim = cache.block_keys.shape[2] if cache.block_keys is not None else cache.head_dim
    if rope.rotary_dim > min(cache.head_dim, index_dim):
        raise ShapeError(
            f"{where}: rope must rotate at most min(D, Di) = {min(cache.head_dim, index_dim)} dimensions, got "
            f"{rope.rotary_dim}. Build the table with the checkpoint's rotary_dim."
        )
    rope_positions = rope_positions if two else rope_positions.expand(3, -1)
    if values_are_checked(cache.device) and bool((plan.request_ids >= 0).any()):
        used = rope_positions[:, plan.request_ids >= 0]
        if int(used.min()) < 0 or int(used.max()) >= rope.cos_sin.shape[0]:
            raise ArgumentError(
                f"{where}: rope_positions must be in [0, {rope.cos_sin.shape[0]}), the rows of the table, got "
                f"{int(used.min())} to {int(used.max())}. Build a longer table."
            )
    return rope_positions


def _check_ring(where: str, index_qk: torch.Tensor, rope: RopeTable, cache: LayerCache, plan: StepPlan) -> None:
    """The ring must be there when it is planned, and have the planned size, the model dtype and every ring named."""
    if cache.ring is None:
        if plan.ring_ids is not None and cache.block_keys is not None:
            raise ArgumentError(
                f"{where}: cache must have a ring, because the plan has ring_ids, got None. Allocate one, or plan "
                "without rings."
            )
    elif cache.ring.dtype != index_qk.dtype or cache.ring.shape[2] != index_qk.shape[2]:
        raise DTypeError(
            f"{where}: ring must hold raw index keys, {index_qk.dtype} of dimension {index_qk.shape[2]}, got "
            f"{cache.ring.dtype} of {cache.ring.shape[2]}. Allocate it in the model dtype."
        )
    elif plan.ring_ids is not None and plan.ring_tokens != cache.ring.shape[1]:
        raise ShapeError(
            f"{where}: ring must have ring_tokens = {plan.ring_tokens} as planned, got {cache.ring.shape[1]}. "
            "Plan the step with the ring's capacity."
        )
    if not values_are_checked(cache.device):
        return
    if cache.ring is not None and plan.num_rows:
        rings, ring_tokens = cache.ring.shape[:2]
        largest = int(plan.ring_slot_ids.masked_fill(plan.request_ids < 0, -1).max())
        if largest >= rings * ring_tokens:
            raise ArgumentError(
                f"{where}: ring_ids must be below the {rings} rings of the cache, got {largest // ring_tokens}. "
                "Allocate a ring for every request."
            )
    if cache.block_keys is not None:
        _check_open_blocks(where, rope, cache, plan)


def _check_open_blocks(where: str, rope: RopeTable, cache: LayerCache, plan: StepPlan) -> None:
    """Where a step closes a block that began before it, the block's older members must be in a ring."""
    r = plan.block_tokens
    closing = []
    for group in plan.row_groups():
        row = group.first_row + r - 1 - group.first_position % r
        if group.first_position % r and row < group.end_row and int(plan.closed_block_slot_ids[row]) >= 0:
            closing.append(group)
    ring_ids = [] if plan.ring_ids is None else plan.ring_ids.tolist()
    for group in closing:
        ring_id = ring_ids[group.request_id] if ring_ids else -1
        if cache.ring is None or cache.ring_positions is None or not 0 <= ring_id < cache.ring.shape[0]:
            raise ArgumentError(
                f"{where}: request {group.request_id} must have a ring, because its step begins at token "
                f"{group.first_position}, inside a block, got ring {ring_id}. Give ring_ids to plan_step and a ring to "
                "the cache."
            )
        began = group.first_position - group.first_position % r
        stored = cache.ring_positions[ring_id, began % cache.ring.shape[1]]
        if int(stored.min()) < 0 or int(stored.max()) >= rope.cos_sin.shape[0]:
            raise ArgumentError(
                f"{where}: ring_positions must be in [0, {rope.cos_sin.shape[0]}) for token {began} of request "
                f"{group.request_id}, got {stored.tolist()} in ring {ring_id}. Prepare that token through this cache "
                "before the block closes."
            )


def _check_out(where: str, out: Prepared, q_gate: torch.Tensor, index_qk: torch.Tensor, head_dim: int) -> None:
    expect_type(where, "out", out, Prepared)
    dims = {"T": q_gate.shape[0], "Hq": q_gate.shape[1], "D": head_dim, "Hi": index_qk.shape[1] - 1,
            "Di": index_qk.shape[2]}  # fmt: skip
    expect(where, "out.index_q", out.index_q, "T Hi Di", dims, dtypes=CACHE_DTYPES, device=q_gate.device)
    expect(where, "out.q", out.q, "T Hq D", dims, dtypes=(q_gate.dtype,), device=q_gate.device)
    expect(where, "out.gate", out.gate, "T Hq D", dims, dtypes=(q_gate.dtype,), device=q_gate.device)
