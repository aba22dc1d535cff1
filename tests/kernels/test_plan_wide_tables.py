"""The plan by kernel at the edges of its tiles: tables of whole tiles, and slots before the first one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.plan import build, plan_step
from flashqsa.plan.triton_plan import COPIED


@pytest.mark.parametrize("columns", [COPIED - 1, COPIED, COPIED + 1, 2 * COPIED])
def test_a_refill_copies_tables_of_any_width(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, columns: int
) -> None:
    def step(seed: int, **options: Any) -> Any:
        def int32(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        table = torch.randint(0, 40, (3, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
        return plan_step(
            int32(0, 1, 2, 3), int32(9, 8, 7), table.to(device), page_tokens=16, block_tokens=4, topk_blocks=8,
            max_query_len=1, max_seq_len=9, num_rows=3, **options,
        )  # fmt: skip

    monkeypatch.setattr(build, "takes_kernels", lambda _: True)
    monkeypatch.setattr(build, "values_are_checked", lambda _: False)  # checked plans are copied by torch
    plan = step(1)
    table = plan.page_table.clone()
    step(2, out=plan)
    assert not torch.equal(plan.page_table, table)
    assert plan.page_table.tolist() == step(2).page_table.tolist()


@pytest.mark.parametrize("first_slot", [-9, -8, -5, -4, -3, -1, 0, 5])
def test_the_first_block_slot_rounds_down(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, first_slot: int
) -> None:
    """As torch divides, also where a device does not check that slots are none below 0."""

    def step() -> Any:
        def int32(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        return plan_step(
            int32(0, 1), int32(20), None, page_tokens=None, block_tokens=4, topk_blocks=8, max_query_len=1,
            max_seq_len=20, num_rows=1, first_slots=torch.tensor([first_slot], device=device),
        )  # fmt: skip

    monkeypatch.setattr(build, "values_are_checked", lambda _: False)
    monkeypatch.setattr(build, "takes_kernels", lambda _: True)
    by_kernel = step()
    monkeypatch.setattr(build, "takes_kernels", lambda _: False)
    by_torch = step()
    assert by_kernel.first_block_slots.tolist() == by_torch.first_block_slots.tolist() == [first_slot // 4]
    assert by_kernel.closed_block_slot_ids.tolist() == by_torch.closed_block_slot_ids.tolist()


def test_a_table_without_columns_is_never_read(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Rows of live requests then go nowhere, whatever lies before an address that is not the table's."""
    monkeypatch.setattr(build, "takes_kernels", lambda _: True)
    monkeypatch.setattr(build, "values_are_checked", lambda _: False)
    starts = torch.tensor([3, 0, 1], dtype=torch.int32, device=device)[1:]
    plan = plan_step(
        starts, torch.tensor([4], dtype=torch.int32, device=device),
        torch.zeros(1, 0, dtype=torch.int32, device=device), page_tokens=16, block_tokens=4, topk_blocks=8,
        max_query_len=1, max_seq_len=4, num_rows=1,
    )  # fmt: skip
    assert plan.slot_ids.tolist() == plan.closed_block_slot_ids.tolist() == [-1]
    assert plan.positions.tolist() == [3]
