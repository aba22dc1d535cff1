"""Where values are not read (CUDA without FLASHQSA_DEBUG=1), lengths that are too small make rows of padding."""

from __future__ import annotations

import pytest
import torch

from flashqsa.plan import build, plan_step


@pytest.mark.parametrize("seq_len", [1, 2, 3])
def test_rows_before_the_first_token_are_padding(monkeypatch: pytest.MonkeyPatch, seq_len: int) -> None:
    monkeypatch.setattr(build, "values_are_checked", lambda _: False)
    one = torch.ones(1, dtype=torch.int32)
    plan = plan_step(
        torch.cat([one - 1, one * 4]), one * seq_len, one[None], page_tokens=16, block_tokens=4, topk_blocks=8,
        max_query_len=4, max_seq_len=16, ring_ids=one, ring_tokens=8, num_rows=4,
    )  # fmt: skip
    padding = 4 - seq_len
    assert plan.request_ids.tolist() == [-1] * padding + [0] * seq_len
    assert plan.positions.tolist() == [-1] * padding + list(range(seq_len))
    assert plan.slot_ids.tolist() == [-1] * padding + [16 + token for token in range(seq_len)]
    assert plan.ring_slot_ids.tolist() == [-1] * padding + [8 + token for token in range(seq_len)]
    assert plan.visible_blocks.tolist() == [0] * 4
