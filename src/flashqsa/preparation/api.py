"""`prepare`: checks and dispatch."""

from __future__ import annotations

import torch

from flashqsa.backends import resolve_backend
from flashqsa.cache.state import CACHE_DTYPES, LayerCache
from flashqsa.checks import FLOAT_DTYPES, expect, values_are_checked
from flashqsa.errors import ArgumentError, DTypeError, ShapeError
from flashqsa.plan import StepPlan
from flashqsa.preparation.plain import prepare_torch
from flashqsa.preparation.reference import prepare_reference
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
    plan.check_cache(where, cache)
    _check_inputs(where, q_gate, k, v, index_qk, norms, cache, plan)
    rope_positions = _three_axes(where, rope_positions, rope, cache, plan)
    _check_ring(where, index_qk, cache, plan)
    if out is not None:
        _check_out(where, out, q_gate, index_qk, k.shape[2])
    if resolve_backend(where, backend, cache.device) == "torch":
        result = prepare_torch(q_gate, k, v, index_qk, rope_positions, rope, norms, cache, plan, out)
    else:
        dim = k.shape[2]
        result = out or Prepared(torch.empty_like(index_qk[:, :-1]), torch.empty_like(k[:, :1]).new_empty(
            q_gate.shape[0], q_gate.shape[1], dim), q_gate[..., dim:])  # fmt: skip
        with torch.no_grad():
            prepare_reference(q_gate, k, v, index_qk, rope_positions, rope, norms, cache, plan, result)
    if out is not None and out.gate.data_ptr() != q_gate[..., k.shape[2] :].data_ptr():
        out.gate.copy_(q_gate[..., k.shape[2] :])
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
            f"{where}: index_qk must hold at least one query head and the key head, got {index_qk.shape[1]} heads."
        )
    if q_gate.shape[1] % cache.kv_heads:
        raise ShapeError(
            f"{where}: q_gate must have a multiple of {cache.kv_heads} KV heads, got {q_gate.shape[1]} query heads."
        )
    for name, letter in (("q", "D"), ("k", "D"), ("index_q", "Di"), ("index_k", "Di")):
        expect(where, f"norms.{name}", getattr(norms, name), letter, dims, dtypes=FLOAT_DTYPES, device=cache.device)


def _three_axes(
    where: str, rope_positions: torch.Tensor, rope: RopeTable, cache: LayerCache, plan: StepPlan
) -> torch.Tensor:
    """Rotary positions as [3, T], checked against the table."""
    if rope_positions.dtype != torch.int64 or list(rope_positions.shape) not in ([plan.num_rows], [3, plan.num_rows]):
        raise ShapeError(
            f"{where}: rope_positions must be int64 [T] or [3, T] with T = {plan.num_rows}, got {rope_positions.dtype} "
            f"{list(rope_positions.shape)}. One rotary position, or three, a row."
        )
    if rope_positions.device != cache.device or rope.cos_sin.device != cache.device:
        raise DTypeError(f"{where}: rope_positions and rope must be on {cache.device}, like the caches.")
    index_dim = cache.block_keys.shape[2] if cache.block_keys is not None else cache.head_dim
    if rope.rotary_dim > min(cache.head_dim, index_dim):
        raise ShapeError(
            f"{where}: rope must rotate at most min(D, Di) = {min(cache.head_dim, index_dim)} dimensions, got "
            f"{rope.rotary_dim}."
        )
    rope_positions = rope_positions if rope_positions.dim() == 2 else rope_positions.expand(3, -1)
    live = plan.request_ids >= 0
    if values_are_checked(cache.device) and bool(live.any()):
        used = rope_positions[:, live]
        if int(used.min()) < 0 or int(used.max()) >= rope.cos_sin.shape[0]:
            raise ArgumentError(
                f"{where}: rope_positions must be in [0, {rope.cos_sin.shape[0]}), the rows of the table, got "
                f"{int(used.min())} to {int(used.max())}. Build a longer table."
            )
    return rope_positions


def _check_ring(where: str, index_qk: torch.Tensor, cache: LayerCache, plan: StepPlan) -> None:
    """The ring must have the planned size and dtype, and exist where a block began before this step."""
    if cache.ring is not None:
        if cache.ring.dtype != index_qk.dtype or cache.ring.shape[2] != index_qk.shape[2]:
            raise DTypeError(
                f"{where}: ring must hold raw index keys, {index_qk.dtype} of dimension {index_qk.shape[2]}, got "
                f"{cache.ring.dtype} of {cache.ring.shape[2]}. Allocate it in the model dtype."
            )
        if plan.ring_ids is not None and plan.ring_tokens != cache.ring.shape[1]:
            raise ShapeError(
                f"{where}: ring must have ring_tokens = {plan.ring_tokens} as planned, got {cache.ring.shape[1]}."
            )
    if not values_are_checked(cache.device):
        return
    if cache.ring is not None and plan.ring_ids is not None and plan.ring_ids.numel():
        largest = int(plan.ring_ids.max())
        if largest >= cache.ring.shape[0]:
            raise ArgumentError(
                f"{where}: ring_ids must be below the {cache.ring.shape[0]} rings of the cache, got {largest}."
            )
    for group in plan.row_groups():
        if group.first_position % plan.block_tokens == 0 or not _closes_older_block(group.first_row, plan):
            continue
        ring_id = -1 if plan.ring_ids is None else int(plan.ring_ids[group.request_id])
        if cache.ring is None or ring_id < 0:
            raise ArgumentError(
                f"{where}: request {group.request_id} must have a ring, because its step begins at token "
                f"{group.first_position}, inside a block. Give ring_ids to plan_step and a ring to the cache."
            )


def _closes_older_block(first_row: int, plan: StepPlan) -> bool:
    """Whether the block that is open at a request's first row gets its key in this step."""
    end = min(first_row + plan.block_tokens - 1, plan.num_rows)
    rows = slice(first_row, end)
    same = plan.request_ids[rows] == plan.request_ids[first_row]
    return bool((same & (plan.closed_block_slot_ids[rows] >= 0)).any())


def _check_out(where: str, out: Prepared, q_gate: torch.Tensor, index_qk: torch.Tensor, head_dim: int) -> None:
    dims = {"T": q_gate.shape[0], "Hq": q_gate.shape[1], "D": head_dim, "Hi": index_qk.shape[1] - 1,
            "Di": index_qk.shape[2]}  # fmt: skip
    expect(where, "out.index_q", out.index_q, "T Hi Di", dims, dtypes=CACHE_DTYPES, device=q_gate.device)
    expect(where, "out.q", out.q, "T Hq D", dims, dtypes=(q_gate.dtype,), device=q_gate.device)
    expect(where, "out.gate", out.gate, "T Hq D", dims, dtypes=(q_gate.dtype,), device=q_gate.device)
