"""Steps at the released shapes on the device, too large for the interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch

from flashqsa.attention import attend
from flashqsa.cache import LayerCache
from flashqsa.cache.state import read_slots
from flashqsa.plan import StepPlan, plan_step
from flashqsa.results import Selection
from flashqsa.selection import select_blocks
from flashqsa.testing import (
    assert_best_selection,
    assert_bitwise_equal,
    assert_scores_within,
    assert_within_budget,
    oracles,
    score_bounds,
)

BF16 = torch.bfloat16
R, TOPK = 4, 512
Q_HEADS, KV_HEADS, HEAD_DIM, INDEX_HEADS, INDEX_DIM = 12, 1, 256, 4, 128

Result = tuple[Selection, torch.Tensor, torch.Tensor]


@dataclasses.dataclass
class Device:
    """Random caches and queries on the device at the released shapes, one rank of two; pages dealt out at random."""

    cache: LayerCache
    q: torch.Tensor
    gate: torch.Tensor
    index_q: torch.Tensor
    table: torch.Tensor
    page_tokens: int

    @classmethod
    def make(
        cls, requests: int, context: int, rows: int, *, page_tokens: int = 64, seed: int, device: str = "cuda",
        noise: float | None = None,
    ) -> Device:  # fmt: skip
        """Index queries of all rows are unrelated, or one query and this much noise."""
        generator = torch.Generator(device).manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=BF16, device=device, generator=generator)

        columns = -(-context // page_tokens)
        total = requests * columns + 1
        order = torch.randperm(total, device=device, generator=generator)[: requests * columns]
        cache = LayerCache(
            randn(total, page_tokens, KV_HEADS, HEAD_DIM), randn(total, page_tokens, KV_HEADS, HEAD_DIM),
            randn(total, page_tokens // R, INDEX_DIM), None, None,
        )  # fmt: skip
        index_q = randn(rows, INDEX_HEADS, INDEX_DIM)
        if noise is not None:
            index_q = randn(1, INDEX_HEADS, INDEX_DIM) + noise * index_q
        return cls(
            cache, randn(rows, Q_HEADS, HEAD_DIM), randn(rows, Q_HEADS, HEAD_DIM), index_q,
            order.view(requests, columns).to(torch.int32).contiguous(), page_tokens,
        )  # fmt: skip

    def plan(
        self, seq_lens: Sequence[int], rows: Sequence[int], *, max_seq_len: int | None = None,
        table: torch.Tensor | None = None,
    ) -> StepPlan:  # fmt: skip
        """The plan of these requests; the bound of the lengths is the longest one by default."""
        device = self.q.device
        starts = torch.tensor([0, *rows]).cumsum(0).to(device=device, dtype=torch.int32)
        lens = torch.tensor(seq_lens, dtype=torch.int32).to(device)
        return plan_step(
            starts, lens, self.table if table is None else table, page_tokens=self.page_tokens, block_tokens=R,
            topk_blocks=TOPK, max_query_len=max(rows), max_seq_len=max_seq_len or max(seq_lens),
            num_pages=self.cache.k_pages.shape[0], num_rows=self.q.shape[0],
        )  # fmt: skip

    def only(self, rows: slice, requests: slice) -> Device:
        """These rows of these requests."""
        return dataclasses.replace(
            self, q=self.q[rows], gate=self.gate[rows], index_q=self.index_q[rows], table=self.table[requests]
        )

    def repaged(self, seed: int) -> Device:
        """The same tokens on other pages."""
        total = self.cache.k_pages.shape[0]
        moved = torch.randperm(total, device=self.q.device, generator=torch.Generator(self.q.device).manual_seed(seed))
        pools = {}
        for name in ("k_pages", "v_pages", "block_keys"):
            pools[name] = torch.empty_like(getattr(self.cache, name))
            pools[name][moved] = getattr(self.cache, name)
        return dataclasses.replace(
            self, cache=dataclasses.replace(self.cache, **pools), table=moved[self.table.long()].to(torch.int32)
        )

    def fill_past(self, seq_lens: Sequence[int], value: float) -> None:
        """Write this into K, V and block keys past each request's last token and last complete block."""
        for pages, unit in ((self.cache.k_pages, 1), (self.cache.v_pages, 1), (self.cache.block_keys, R)):
            on_page = self.page_tokens // unit
            for request, length in enumerate(seq_lens):
                places = torch.arange(length // unit, self.table.shape[1] * on_page, device=pages.device)
                pages[self.table[request].long()[places // on_page], places % on_page] = value

    def run(self, plan: StepPlan, **options: Any) -> Result:
        """Selection with its scores, output and lse by kernels."""
        selection = select_blocks(self.index_q, self.cache, plan, return_scores=True, backend="triton")
        return (selection, *self.attend(selection, plan, **options))

    def attend(self, selection: Selection, plan: StepPlan, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and lse by kernels."""
        return attend(self.q, self.cache, selection, plan, gate=self.gate, return_lse=True, backend="triton", **options)

    def check_rows(self, plan: StepPlan, result: Result, rows: Iterable[int]) -> None:
        """Sample rows against float64: scores in bounds, the best blocks, attention over exactly those tokens."""
        selection = result[0]
        for row in rows:
            visible, count = (int(plan.positions[row]) + 1) // R, int(selection.block_counts[row])
            ids = selection.block_ids[row, :count].to(torch.int64)
            blocks = torch.arange(visible, device=ids.device)
            keys = read_slots(self.cache.block_keys, plan.block_slots(int(plan.request_ids[row]), blocks))
            exact, bounds = oracles.score_blocks(self.index_q[row], keys), score_bounds(self.index_q[row], keys)
            assert_best_selection(ids.tolist(), exact, bounds, TOPK, f"row {row}")
            if selection.scores is not None:
                assert_scores_within(selection.scores[row, :count], exact[ids], bounds[ids], f"row {row}")
            self.check_attention(plan, result, [row])

    def check_attention(self, plan: StepPlan, result: Result, rows: Iterable[int]) -> None:
        """Sample rows attend the blocks of the selection and all tokens past those that it could see."""
        selection, out, lse = result
        for row in rows:
            position, count = int(plan.positions[row]), int(selection.block_counts[row])
            ids = selection.block_ids[row, :count].to(torch.int64)
            tail = torch.arange(int(selection.visible_blocks[row]) * R, position + 1, device=ids.device)
            tokens = torch.cat([(ids[:, None] * R + torch.arange(R, device=ids.device)).flatten(), tail])
            slots = plan.token_slots(int(plan.request_ids[row]), tokens)
            k, v = read_slots(self.cache.k_pages, slots), read_slots(self.cache.v_pages, slots)
            every = list(range(len(tokens)))
            wanted, wanted_lse = oracles.attend_row(self.q[row], k, v, every, gate=self.gate[row])
            low, _ = oracles.attend_row(self.q[row], k, v, every, gate=self.gate[row], round_to=BF16)
            assert_within_budget(out[row], low.to(BF16), wanted, f"row {row}")
            assert float((lse[row] - wanted_lse).abs().max()) < 1e-5, f"lse of row {row}"


@pytest.fixture
def released() -> Callable[..., Device]:
    """`released(requests, context, rows, seed=..., page_tokens=64, noise=None)`: caches and queries on the device."""
    return Device.make


def _assert_same(got: Result, wanted: Result, label: str, rows: slice = slice(None)) -> None:
    for name in ("block_ids", "block_counts", "scores"):
        one, other = getattr(got[0], name), getattr(wanted[0], name)
        if one is not None and other is not None:
            assert_bitwise_equal(one, other[rows], f"{label}: {name}")
    assert_bitwise_equal(got[1], wanted[1][rows], f"{label}: output")
    assert_bitwise_equal(got[2], wanted[2][rows], f"{label}: lse")


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """`assert_same(got, wanted, label, rows=all)`: ids, counts, scores, output and lse equal those rows bit by bit."""
    return _assert_same
