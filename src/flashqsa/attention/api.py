"""`attend` and `attend_tokens`: checks and dispatch."""

from __future__ import annotations

import torch

from flashqsa.attention.differentiable import attend_rows_differentiable
from flashqsa.attention.gating import check_out_dtype, gate_output
from flashqsa.attention.plain import StepRows, attend_rows_torch, wide_dtype
from flashqsa.attention.reference import attend_rows_reference
from flashqsa.attention.support import attend_refusal
from flashqsa.attention.tokens import RowTokens
from flashqsa.attention.values import check_token_values
from flashqsa.backends import resolve_backend
from flashqsa.cache.state import LayerCache
from flashqsa.checks import FLOAT_DTYPES, expect, expect_number, expect_type, values_are_checked
from flashqsa.errors import ShapeError
from flashqsa.ops.tracing import is_traced
from flashqsa.plan import StepPlan
from flashqsa.plan.selected import check_selection
from flashqsa.results import Selection

Attended = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def attend(
    q: torch.Tensor,
    cache: LayerCache,
    selection: Selection,
    plan: StepPlan,
    *,
    gate: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    include_tail: bool = True,
    row_exact: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Attended:
    """Attend each row's selected blocks and its tail, exactly those tokens, with grouped queries.

    The tail of a row are the tokens from ``selection.visible_blocks * block_tokens`` to its own: 0 to r - 1 of them for
    a fresh selection, more for a reused one.

    Args:
        q: [T, Hq, D] normed and rotated queries; Hq is a multiple of the cache's KV heads.
        cache: Caches of the layer; K and V are read.
        selection: What each row attends, row for row of the plan.
        plan: The step.
        gate: [T, Hq, D] gate logits: the output is rounded to the dtype of q, then multiplied by their sigmoid in fp32.
        softmax_scale: ``D ** -0.5`` by default.
        include_tail: False on a shard of the tokens that does not own the tail.
        row_exact: Attend every row alone, so that it equals its decode form bit for bit. Slower.
        out_dtype: Dtype of the output, the dtype of q by default; float32 for partial outputs.
        return_lse: Also return the natural-log sum of exponentials.
        out: [T, Hq, D] buffer of `out_dtype`.
        backend: "auto", "reference", "torch" or "triton".

    Returns:
        Output [T, Hq, D], or (output, lse [T, Hq] fp32). Rows without a token: output 0, lse -inf, nothing read.

    Raises:
        ShapeError, DTypeError, DeviceError: A tensor does not fit the caches or the plan.
        SelectionError: The selection is of another layer, or its ids do not fit the rows.
        UnsupportedError: The named backend does not serve this device.

    Source: transformers 5.24.0, Qwen4ExpTextAttention.
    """
    where = "attend"
    if is_traced(q):
        from flashqsa.ops.attention import attend_traced

        return attend_traced(
            q, cache, selection, plan, gate=gate, softmax_scale=softmax_scale, include_tail=include_tail,
            row_exact=row_exact, out_dtype=out_dtype, return_lse=return_lse, out=out, backend=backend,
        )  # fmt: skip
    _check_q(where, q, cache, plan, gate, softmax_scale)
    check_selection(where, selection, plan, layer_id=cache.layer_id)
    visible_units = selection.visible_blocks if include_tail else None
    tokens = RowTokens(selection.block_ids, selection.block_counts, plan.block_tokens, visible_units, plan.positions)
    step = _step_rows(cache, plan, tokens, softmax_scale, row_exact)
    return _attend_rows(where, q, cache, step, gate, out_dtype, return_lse, out, backend)


def attend_tokens(
    q: torch.Tensor,
    cache: LayerCache,
    token_ids: torch.Tensor,
    plan: StepPlan,
    *,
    gate: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    row_exact: bool = False,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Attended:
    """The same over token lists that the caller made, as `expand_tokens` lays them out.

    Args:
        q: [T, Hq, D] queries.
        cache: Caches of the layer.
        token_ids: [T, W + 1] int32 logical tokens in any order, each at most once; the last column is the number of
            valid ids, the rest is never read.
        plan: The step.
        gate: As in `attend`, like the other arguments.
        softmax_scale: As in `attend`.
        row_exact: As in `attend`.
        out_dtype: As in `attend`.
        return_lse: As in `attend`.
        out: As in `attend`.
        backend: As in `attend`.

    Returns:
        As `attend`.

    Raises:
        ShapeError, DTypeError, DeviceError, UnsupportedError: As in `attend`.
        ArgumentError: An id is invalid, not yet visible, or given twice (read on the CPU, or with FLASHQSA_DEBUG=1).
    """
    where = "attend_tokens"
    if is_traced(q):
        from flashqsa.ops.attention import attend_tokens_traced

        return attend_tokens_traced(
            q, cache, token_ids, plan, gate=gate, softmax_scale=softmax_scale, row_exact=row_exact,
            out_dtype=out_dtype, return_lse=return_lse, out=out, backend=backend,
        )  # fmt: skip
    _check_q(where, q, cache, plan, gate, softmax_scale)
    dims = {"T": plan.num_rows}
    expect(where, "token_ids", token_ids, "T W+1", dims, dtypes=(torch.int32,), device=cache.device)
    if dims["W+1"] < 1:
        raise ShapeError(
            f"{where}: token_ids must have at least the column of counts, got {list(token_ids.shape)}. "
            "Lay the list out as expand_tokens does."
        )
    if values_are_checked(cache.device):
        check_token_values(where, token_ids, plan)
    tokens = RowTokens(token_ids[:, :-1], token_ids[:, -1], 1, None, plan.positions)
    step = _step_rows(cache, plan, tokens, softmax_scale, row_exact)
    return _attend_rows(where, q, cache, step, gate, out_dtype, return_lse, out, backend)


def _check_q(
    where: str,
    q: torch.Tensor,
    cache: LayerCache,
    plan: StepPlan,
    gate: torch.Tensor | None,
    softmax_scale: float | None,
) -> None:
    expect_type(where, "cache", cache, LayerCache)
    expect_type(where, "plan", plan, StepPlan)
    if softmax_scale is not None:
        expect_number(where, "softmax_scale", softmax_scale, hint="Leave it out for D ** -0.5.")
    dims = {"T": plan.num_rows, "D": cache.head_dim}
    expect(where, "q", q, "T Hq D", dims, dtypes=FLOAT_DTYPES, device=cache.device,
           hint="One row of queries a row of the plan.")  # fmt: skip
    if q.shape[1] % cache.kv_heads:
        raise ShapeError(
            f"{where}: q must have a multiple of {cache.kv_heads} heads, the KV heads of the cache, got {q.shape[1]}. "
            "Every KV head serves as many query heads."
        )
    if gate is not None:
        expect(where, "gate", gate, "T Hq D", dims, dtypes=FLOAT_DTYPES, device=cache.device,
               hint="Pass the gate half of q_proj.")  # fmt: skip
    plan.check_cache(where, cache)


def _step_rows(
    cache: LayerCache, plan: StepPlan, tokens: RowTokens, softmax_scale: float | None, row_exact: bool
) -> StepRows:
    scale = cache.head_dim**-0.5 if softmax_scale is None else softmax_scale
    return StepRows(plan, tokens, scale, cache.k_scale, cache.v_scale, row_exact)


def _attend_rows(
    where: str,
    q: torch.Tensor,
    cache: LayerCache,
    step: StepRows,
    gate: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    return_lse: bool,
    out: torch.Tensor | None,
    backend: str,
) -> Attended:
    if out_dtype is None:
        out_dtype = q.dtype if out is None else out.dtype
    check_out_dtype(where, out_dtype)
    if out is not None:
        dims = {"T": q.shape[0], "Hq": q.shape[1], "D": q.shape[2]}
        expect(where, "out", out, "T Hq D", dims, dtypes=(out_dtype,), device=q.device)
    needs_gradients = _needs_gradients(q, cache, gate)
    backend = resolve_backend("attend", backend, cache.device, attend_refusal(q, cache, gate, needs_gradients))
    if backend == "triton":
        from flashqsa.attention.triton_attend import attend_triton

        result = torch.empty(q.shape, dtype=out_dtype, device=q.device) if out is None else out
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        attend_triton(
            q,
            cache,
            step.plan,
            step.tokens,
            step.softmax_scale,
            row_exact=step.row_exact,
            gate=gate,
            out=result,
            lse=lse,
        )
        return result if lse is None else (result, lse)
    if backend == "reference":
        attended, lse = attend_rows_reference(q, cache, step.plan, step.tokens, step.softmax_scale)
    elif needs_gradients:
        attended, lse = attend_rows_differentiable(q, cache.k_pages, cache.v_pages, step)
    else:  # straight into the result: no intermediate of its size
        result = torch.empty(q.shape, dtype=out_dtype, device=q.device) if out is None else out
        lse = torch.empty(q.shape[:2], dtype=wide_dtype(q), device=q.device)
        attend_rows_torch(q, cache.k_pages, cache.v_pages, step, result, lse, gate=gate)
        return (result, lse) if return_lse else result
    result = gate_output(attended, lse, gate, q.dtype, out_dtype)
    if out is not None:
        result = out.copy_(result)
    return (result, lse) if return_lse else result


def _needs_gradients(q: torch.Tensor, cache: LayerCache, gate: torch.Tensor | None) -> bool:
    tensors = (q, cache.k_pages, cache.v_pages, *(() if gate is None else (gate,)))
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
