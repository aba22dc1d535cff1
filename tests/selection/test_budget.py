"""Workspace budgets, and work that follows what a row sees, not what the step allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa import LayerCache, attend, plan_step, select_blocks
from flashqsa.attention.slots import SlotReader
from flashqsa.selection import api, plain
from flashqsa.testing import stream


def test_the_default_budgets() -> None:
    assert api.DEFAULT_WORKSPACE_BYTES == {"cpu": 64 * 2**20}
    assert api.OTHER_WORKSPACE_BYTES == 256 * 2**20


@pytest.mark.parametrize("seq_len", [37, 300, 2051])
def test_fault_46_work_follows_the_row(monkeypatch: pytest.MonkeyPatch, seq_len: int) -> None:
    """A decode row of a step whose bounds allow 1,048,576 tokens reads the block keys that it sees and its tokens."""
    dim, page_tokens, topk = 16, 16, 32
    pages = -(-seq_len // page_tokens)
    table = torch.full((1, 65_536), 2**31 - 1, dtype=torch.int32)
    table[0, :pages] = torch.randperm(pages, generator=stream(1)).to(torch.int32)
    one = torch.tensor([1], dtype=torch.int32)
    plan = plan_step(
        torch.cat([one - 1, one]), one * seq_len, table, page_tokens=page_tokens, block_tokens=4, topk_blocks=topk,
        max_query_len=8, max_seq_len=2**20, num_pages=pages,
    )  # fmt: skip
    kv = torch.randn(2, pages, page_tokens, 1, dim, generator=stream(2))
    cache = LayerCache(kv[0], kv[1], torch.randn(pages, page_tokens // 4, dim, generator=stream(3)), None, None)
    read: dict[str, int] = {"blocks": 0, "tokens": 0}
    read_slots, read_tokens = plain.read_slots, SlotReader.read

    def count_blocks(pages: torch.Tensor, slot_ids: torch.Tensor) -> torch.Tensor:
        read["blocks"] += slot_ids.shape[0]
        return read_slots(pages, slot_ids)

    def count_tokens(reader: SlotReader, places: torch.Tensor) -> torch.Tensor:
        rows: Any = read_tokens(reader, places)
        read["tokens"] += rows.shape[1]
        return rows

    monkeypatch.setattr(plain, "read_slots", count_blocks)
    monkeypatch.setattr(SlotReader, "read", count_tokens)
    selection = select_blocks(torch.randn(1, 2, dim, generator=stream(4)), cache, plan, backend="torch")
    attend(torch.randn(1, 2, dim, generator=stream(5)), cache, selection, plan, backend="torch")
    visible = seq_len // 4
    valid = min(visible, topk) * 4 + seq_len % 4
    assert read == {"blocks": visible if visible > topk else 0, "tokens": 2 * valid}


def test_rows_of_a_request_share_a_pass_over_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of as many rows as are scored together reads every block key once; one row more, and it is twice."""
    seq_len, dim = 2400, 8
    one = torch.tensor([1], dtype=torch.int32)
    cache = LayerCache(
        torch.zeros(1, seq_len, 1, dim), torch.zeros(1, seq_len, 1, dim),
        torch.randn(1, seq_len // 4, dim, generator=stream(6)), None, None,
    )  # fmt: skip
    read, read_slots = [], plain.read_slots

    def count(pages: torch.Tensor, slot_ids: torch.Tensor) -> torch.Tensor:
        read.append(slot_ids.shape[0])
        return read_slots(pages, slot_ids)

    monkeypatch.setattr(plain, "read_slots", count)
    for rows, passes in ((plain.MAX_ROWS, 1), (plain.MAX_ROWS + plain.ROW_TILE, 2)):
        read.clear()
        plan = plan_step(
            torch.cat([one - 1, one * rows]), one * seq_len, None, page_tokens=None, block_tokens=4, topk_blocks=16,
            max_query_len=rows, max_seq_len=seq_len, first_slots=torch.zeros(1, dtype=torch.int64),
        )  # fmt: skip
        select_blocks(torch.randn(rows, 2, dim, generator=stream(7)), cache, plan, backend="torch")
        assert len(read) == passes
        assert read[-1] == seq_len // 4
