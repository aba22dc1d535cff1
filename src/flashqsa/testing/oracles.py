"""A second, slow definition of Qwen Sparse Attention, one request at a time, on contiguous tensors.

Written from the model's mathematics alone, so that the library's own references have something to be compared with.
Everything is float64. Where the model rounds to its dtype, `round_to` says whether to do the same (then a result can
be compared nearly bit by bit) or not (then it is the exact value).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from flashqsa.testing.steps import Step

F64 = torch.float64


def rounded(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """`x` rounded to a dtype and back to float64; float8 saturates at 448. None: as it is."""
    if dtype is None:
        return x
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-448.0, 448.0)
    return x.to(dtype).to(F64)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, round_to: torch.dtype | None = None) -> torch.Tensor:
    """RMSNorm in its Gemma form over the last dimension: x / rms * (1 + weight), float64."""
    x = x.to(F64)
    mean_square = (x * x).mean(dim=-1, keepdim=True)
    return rounded(x / torch.sqrt(mean_square + eps) * (1.0 + weight.to(F64)), round_to)


def position_axis(frequency: int, mrope_section: Sequence[int] | None) -> int:
    """Which of the three position axes a frequency takes in the interleaved composition."""
    if mrope_section is not None:
        for axis in (1, 2):
            if frequency % 3 == axis and frequency < 3 * mrope_section[axis]:
                return axis
    return 0


def rotate(
    x: torch.Tensor,
    rope_positions: torch.Tensor,
    cos_sin: torch.Tensor,
    mrope_section: Sequence[int] | None,
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """NeoX rotation of the leading dimensions: dimension j pairs with j + rotary / 2.

    Args:
        x: [N, heads, dim] or [N, dim].
        rope_positions: [3, N] int64.
        cos_sin: [positions, rotary] table, cosines then sines.
        mrope_section: Frequencies of each axis, or None for one axis.
        round_to: Dtype of the result's rounding.

    Returns:
        float64 of the shape of x.
    """
    out = x.to(F64).clone()
    half = cos_sin.shape[1] // 2
    for j in range(half):
        rows = cos_sin[rope_positions[position_axis(j, mrope_section)]].to(F64)
        cos, sin = rows[:, j], rows[:, half + j]
        if x.dim() == 3:
            cos, sin = cos[:, None], sin[:, None]
        first, second = x[..., j].to(F64), x[..., half + j].to(F64)
        out[..., j] = first * cos - second * sin
        out[..., half + j] = second * cos + first * sin
    return rounded(out, round_to)


def pool_block_keys(
    raw_keys: torch.Tensor,
    rope_positions: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    mrope_section: Sequence[int] | None,
    block_tokens: int,
    round_to: torch.dtype | None = None,
) -> torch.Tensor:
    """Keys of the complete blocks of one request.

    Args:
        raw_keys: [N, Di] raw index keys of all its tokens.
        rope_positions: [3, N] int64 positions of its tokens.
        weight: [Di] weight of `k_layernorm`.
        eps: Epsilon of the norm.
        cos_sin: [positions, rotary] table.
        mrope_section: Frequencies of each axis, or None.
        block_tokens: Tokens of a block.
        round_to: Model dtype, rounded to after the mean, the norm and the rotation; None for no rounding.

    Returns:
        [N // block_tokens, Di] float64.
    """
    blocks = raw_keys.shape[0] // block_tokens
    members = raw_keys[: blocks * block_tokens].to(F64).view(blocks, block_tokens, raw_keys.shape[1])
    mean = rounded(members.mean(dim=1), round_to)
    normed = rms_norm(mean, weight, eps, round_to)
    first_positions = rope_positions[:, : blocks * block_tokens : block_tokens]
    return rotate(normed, first_positions, cos_sin, mrope_section, round_to)


def score_blocks(index_q: torch.Tensor, block_keys: torch.Tensor) -> torch.Tensor:
    """Scores of blocks for one row: sum over heads of relu(index_q . block_key).

    Args:
        index_q: [Hi, Di] index query of the row.
        block_keys: [M, Di] keys of the blocks that the row sees.

    Returns:
        [M] float64.
    """
    total = torch.zeros(block_keys.shape[0], dtype=F64, device=block_keys.device)
    for head in index_q.to(F64):
        dots = block_keys.to(F64) @ head
        total += torch.where(dots < 0, torch.zeros_like(dots), dots)  # NaN stays NaN
    return total


def select_best(scores: Sequence[float] | torch.Tensor, topk_blocks: int) -> list[int]:
    """Ids of the best blocks, ascending: score descending, lower id first among equals, NaN after everything."""
    values = scores.tolist() if isinstance(scores, torch.Tensor) else list(scores)
    order = sorted(
        range(len(values)), key=lambda g: (True, 0.0, g) if math.isnan(values[g]) else (False, -values[g], g)
    )
    return sorted(order[:topk_blocks])


def selected_tokens(block_ids: Sequence[int], visible_blocks: int, position: int, block_tokens: int) -> list[int]:
    """Tokens that a row attends: those of its blocks, then the tail of the open block, up to the row itself."""
    tokens = [g * block_tokens + i for g in block_ids for i in range(block_tokens)]
    return tokens + list(range(visible_blocks * block_tokens, position + 1))


def attend_row(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    token_ids: Sequence[int],
    *,
    softmax_scale: float | None = None,
    gate: torch.Tensor | None = None,
    round_to: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one row over the tokens given.

    Args:
        q: [Hq, D].
        k: [N, Hkv, D] of the row's request.
        v: [N, Hkv, D].
        token_ids: Tokens to attend; none gives zeros and -inf.
        softmax_scale: D ** -0.5 by default.
        gate: [Hq, D] gate logits, or None.
        round_to: Model dtype that the result is rounded to, before the gate and after it; None for no rounding.

    Returns:
        [Hq, D] float64, and the log-sum-exp of the scaled scores [Hq] float64.
    """
    q_heads, dim = q.shape
    out = torch.zeros(q_heads, dim, dtype=F64, device=q.device)
    lse = torch.full((q_heads,), -math.inf, dtype=F64, device=q.device)
    if not len(token_ids):
        return out, lse
    chosen = torch.as_tensor(token_ids, dtype=torch.int64, device=q.device)
    keys, values = k[chosen].to(F64), v[chosen].to(F64)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    group = q_heads // k.shape[1]
    for head in range(q_heads):
        logits = keys[:, head // group] @ q[head].to(F64) * scale
        lse[head] = torch.logsumexp(logits, dim=0)
        out[head] = torch.softmax(logits, dim=0) @ values[:, head // group]
    out = rounded(out, round_to)
    if gate is not None:
        out = rounded(out * torch.sigmoid(gate.to(F64)), round_to)
    return out, lse


def step_scores(step: Step) -> list[torch.Tensor]:
    """Exact scores of every row of a step, [visible blocks] float64 each; empty for padding rows."""
    scores = [torch.zeros(0, dtype=F64, device=step.index_q.device) for _ in range(step.num_rows)]
    for request in step.requests:
        for row, position in request.rows():
            visible = (position + 1) // step.case.block_tokens
            scores[row] = score_blocks(step.index_q[row], request.block_keys[:visible])
    return scores


def step_selection(step: Step) -> list[list[int]]:
    """Exact selection of every row of a step: ascending block ids, none for padding."""
    return [select_best(scores, step.case.topk_blocks) for scores in step_scores(step)]


def step_attention(
    step: Step,
    block_ids: Sequence[Sequence[int]] | None = None,
    *,
    gated: bool = True,
    include_tail: bool = True,
    softmax_scale: float | None = None,
    round_to: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every row of a step.

    Args:
        step: The step, caches written.
        block_ids: Selected blocks of each row; all visible ones (dense causal attention) by default.
        gated: Whether to apply the step's gate.
        include_tail: Whether the tail of the open block is attended too.
        softmax_scale: D ** -0.5 by default.
        round_to: As in `attend_row`.

    Returns:
        [T, Hq, D] float64 and the log-sum-exp [T, Hq] float64; zeros and -inf in padding rows.
    """
    out = torch.zeros(step.q.shape, dtype=F64, device=step.q.device)
    lse = torch.full(step.q.shape[:2], -math.inf, dtype=F64, device=step.q.device)
    for request in step.requests:
        for row, position in request.rows():
            visible = (position + 1) // step.case.block_tokens
            chosen = range(visible) if block_ids is None else block_ids[row]
            tokens = selected_tokens(list(chosen), visible, position, step.case.block_tokens)
            if not include_tail:
                tokens = tokens[: len(list(chosen)) * step.case.block_tokens]
            out[row], lse[row] = attend_row(
                step.q[row], request.k, request.v, tokens,
                softmax_scale=softmax_scale, gate=step.gate[row] if gated else None, round_to=round_to,
            )  # fmt: skip
    return out, lse
