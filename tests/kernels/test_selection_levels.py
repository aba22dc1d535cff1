"""The largest scores of groups that the score kernel writes beside the scores, in every layout of its product."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.functional import pad

from flashqsa.selection.row_levels import RowLevels
from flashqsa.selection.triton_scores import score_blocks_triton, score_kernel_config
from flashqsa.testing import StepCase, make_step

DTYPES = [
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16", marks=pytest.mark.gpu),
    pytest.param(torch.float8_e4m3fn, id="e4m3", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("paired", [None, True], ids=["own", "paired"])
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fault_3_levels_are_the_largest_of_their_groups(
    dtype: torch.dtype, rows: int, paired: bool | None, device: torch.device
) -> None:
    """NaN keys do not hide the numbers beside them; what a row does not see is in no group."""
    model = torch.bfloat16 if dtype.itemsize == 1 else dtype
    requests = ((0, 700), (900, rows)) if rows > 1 else ((899, 1), (1203, 1))
    case = StepCase(
        "levels", requests, index_head_dim=32, topk_blocks=7, dtype=model,
        index_dtype=dtype if dtype.itemsize == 1 else None, index_q_dtype=dtype if dtype.itemsize == 1 else None,
    )  # fmt: skip
    step = make_step(case, seed=31, device=device)
    blocks = step.plan.max_seq_len // 4
    config = score_kernel_config(step.index_q, step.cache, step.plan, step.num_rows)
    if paired is not None:
        if dtype == torch.float32 and step.index_q.is_cuda:
            pytest.skip("accumulators of fp32 products lie otherwise")
        config = dataclasses.replace(config, paired=paired)
    levels = dataclasses.replace(RowLevels.of(1 << 18, 512, config.block_m), span=-(-blocks // 64) * 64)
    assert levels.given == (2 if config.block_m == 32 else 3)
    scores = torch.full((step.num_rows, -(-blocks // 16) * 16), -1.0, device=device)[:, :blocks]
    largest = torch.full((step.num_rows, levels.numbers()), -7.0, device=device)
    score_blocks_triton(
        step.index_q, step.cache, step.plan, scores, 0, 0, config=config, multiprocessors=2, largest=largest,
        levels=levels,
    )  # fmt: skip
    seen = torch.arange(blocks, device=device) < step.plan.visible_blocks[:, None]
    scores = torch.where(seen, scores, -1.0)
    start = 0
    for level in range(1, levels.given + 1):
        size = levels.group**level
        count = -(-blocks // size)
        wanted = pad(scores, (0, count * size - blocks), value=-1.0).view(-1, count, size).amax(2)
        got = largest[:, start : start + count]
        assert torch.equal(torch.where(wanted >= 0, got, -1.0), wanted), f"level {level}"
        start += -(-levels.span // (16 * size)) * 16
