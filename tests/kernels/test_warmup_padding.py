"""`warmup` launches kernels on padding alone: caches that serve already are neither read nor written."""

from __future__ import annotations

import pytest
import torch

from flashqsa import LayerCache, QSAConfig, warmup
from flashqsa.testing import assert_unchanged, poison, snapshot
from flashqsa.warming import api

CONFIG = QSAConfig(
    hidden_size=64, q_heads=2, kv_heads=1, head_dim=16, index_heads=2, index_head_dim=16, budget_tokens=16,
    block_tokens=4, rotary_dim=8, mrope_section=(2, 1, 1), max_positions=64,
)  # fmt: skip


@pytest.mark.parametrize("paged", [True, False], ids=["paged", "contiguous"])
def test_caches_in_use_stay_as_they_are(paged: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "takes_kernels", lambda device: True)
    kv = torch.randn(2, 3, 8, 1, 16, dtype=torch.float16, device=device)
    poison(kv[:, 2])
    cache = LayerCache(
        kv[0], kv[1], torch.randn(3, 2, 16, device=device).to(torch.float16),
        torch.randn(2, 8, 16, device=device).to(torch.float16),
        torch.arange(48, device=device).view(2, 8, 3),
    )  # fmt: skip
    before = snapshot(cache)
    report = warmup(
        CONFIG, cache=cache, paged=paged, max_requests=2, max_rows=3, max_seq_len=64,
        forms=("row_exact", "shards", "token_lists"),
    )  # fmt: skip
    assert_unchanged(before)
    assert report.refusals == {}
    assert report.steps > 10
