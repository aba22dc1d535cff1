"""Fault 43: score memory stays within its budget, and nothing of rows x context x heads exists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashqsa.results import Selection
from flashqsa.selection import select_blocks
from flashqsa.selection.plain import least_workspace_bytes
from flashqsa.testing import StepCase, assert_bitwise_equal, make_step, stream

MIB = 1 << 20


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that come to be inside it and are still alive.

    Attributes:
        peak: The most that was alive at once.
        largest: The largest single tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        out = func(*args, **(kwargs or {}))
        self._live = {at: held for at, held in self._live.items() if not held[0].expired()}
        for leaf in tree_leaves(out):
            if torch.is_tensor(leaf):
                storage = leaf.untyped_storage()
                if storage.data_ptr() not in given:
                    self._live[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
                    self.largest = max(self.largest, storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


def live_bytes(work: Callable[[], Selection]) -> tuple[LiveBytes, Selection]:
    counter = LiveBytes()
    with counter:
        selection = work()
    return counter, selection


def result_bytes(selection: Selection) -> int:
    """The result, and the room to write ids of rows that select everything."""
    lanes = (selection.block_ids, selection.block_counts, selection.visible_blocks, selection.request_ids)
    own = sum(lane.nbytes for lane in lanes) + (0 if selection.scores is None else selection.scores.nbytes)
    return own + 3 * selection.block_ids.nbytes


def test_live_bytes_counts_what_is_alive_at_once() -> None:
    def work() -> torch.Tensor:
        first = torch.zeros(1000)
        second = first[::2] + 1  # 2,000 bytes beside 4,000
        del first
        return torch.zeros(300, dtype=torch.int64) + second[0].long()  # twice 2,400 beside 2,000

    counter = LiveBytes()
    with counter:
        work()
    assert counter.largest == 4000
    assert 6800 <= counter.peak <= 6900


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "topk"), [(4, 128, 512), (1, 8, 16), (16, 24, 900)], ids=["released", "narrow", "wide"]
)
def test_fault_43_scores_stay_within_the_workspace(
    key_rows: Any, dtype: torch.dtype, heads: int, dim: int, topk: int
) -> None:
    generator = stream(60)
    keys = torch.randn(12_000, dim, generator=generator)
    queries = torch.randn(40, heads, dim, generator=generator)
    inputs = key_rows([keys], [queries], seed=60, topk_blocks=topk, page_blocks=64, dtype=dtype)
    least = least_workspace_bytes(inputs.index_q, inputs.cache.block_keys, topk)
    inputs.plan.end_slots()  # what the plan reads once a step is not selection's
    first = None
    for workspace in (least, least + 64 * 1024, 3 * least, 16 * MIB, 1 << 40):
        counter, selection = live_bytes(
            lambda workspace=workspace: select_blocks(
                inputs.index_q, inputs.cache, inputs.plan, workspace_bytes=workspace, backend="torch"
            )
        )
        assert counter.peak <= workspace + result_bytes(selection), f"workspace {workspace}"
        if first is None:
            first = selection
        assert_bitwise_equal(selection.block_ids, first.block_ids, f"workspace {workspace}")


def test_fault_43_a_long_context_stays_within_the_default_budget(key_rows: Any) -> None:
    """262,144 tokens: the keys alone, in fp32, would be twice the budget."""
    generator = stream(61)
    keys = torch.randn(65_536, 512, generator=generator).to(torch.bfloat16)
    queries = torch.randn(24, 1, 512, generator=generator)
    inputs = key_rows([keys], [queries], seed=61, page_blocks=4096, dtype=torch.bfloat16)
    results = []
    for workspace in (None, 8 * MIB, 1 << 40):
        counter, selection = live_bytes(
            lambda workspace=workspace: select_blocks(
                inputs.index_q, inputs.cache, inputs.plan, workspace_bytes=workspace, return_scores=True
            )
        )
        if workspace is None or workspace == 8 * MIB:
            assert counter.peak <= (workspace or 64 * MIB) + result_bytes(selection) + 2 * MIB
        results.append(selection)
    for other in results[1:]:
        assert_bitwise_equal(other.block_ids, results[0].block_ids)
        assert_bitwise_equal(other.scores, results[0].scores)


def test_fault_43_memory_of_a_prefill_grows_with_its_rows_only() -> None:
    """Beyond the workspace there are the results; no mask or score matrix of rows x context."""
    peaks = {}
    for tokens in (1_024, 4_096):
        case = StepCase(
            "prefill", ((0, tokens),), q_heads=1, kv_heads=1, head_dim=8, index_heads=2, index_head_dim=8,
            topk_blocks=16, page_tokens=64,
        )  # fmt: skip
        step = make_step(case, seed=62)
        step.plan.row_groups()
        workspace = 1 * MIB
        counter, selection = live_bytes(
            lambda step=step: select_blocks(step.index_q, step.cache, step.plan, workspace_bytes=1 * MIB)
        )
        assert counter.peak <= workspace + result_bytes(selection) + 64 * tokens
        peaks[tokens] = counter.peak
    assert peaks[4_096] - peaks[1_024] < 3_072 * 3_072, "something grew with rows x context"


def test_within_the_budget_of_selected_tokens_nothing_is_scored(integer_step: Any) -> None:
    """No score, no key: a step whose rows see at most K blocks reads no block key at all."""
    step = integer_step(StepCase("short", ((0, 30), (28, 4)), topk_blocks=8), seed=63)
    step.cache.block_keys.fill_(float("nan"))
    counter, selection = live_bytes(lambda: select_blocks(step.index_q, step.cache, step.plan, backend="torch"))
    assert counter.largest <= 4 * selection.block_ids.nbytes
    for row, visible in enumerate(step.plan.visible_blocks.tolist()):
        assert selection.block_ids[row].tolist() == [*range(visible)] + [-1] * (8 - visible)
