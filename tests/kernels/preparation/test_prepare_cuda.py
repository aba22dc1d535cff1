"""What only a device shows of preparation: one graph, no synchronisation, pools beyond 2^31, many programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.attention import attend
from flashqsa.cache import LayerCache
from flashqsa.cache.state import read_slots
from flashqsa.plan import StepPlan, plan_step
from flashqsa.preparation import NormWeights, prepare
from flashqsa.results import Prepared
from flashqsa.rope import RopeTable
from flashqsa.selection import expand_tokens, select_blocks
from flashqsa.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
R, TOPK = 4, 512
Q_HEADS, KV_HEADS, HEAD_DIM, INDEX_HEADS, INDEX_DIM, ROTARY = 24, 2, 256, 4, 128, 64
STORED = ("k_pages", "v_pages", "block_keys", "ring", "ring_positions")


@dataclasses.dataclass
class Layer:
    """Projections of some rows, and pools filled with numbers, at the released shapes; pages dealt out at random."""

    rows: list[torch.Tensor]
    positions: torch.Tensor
    rope: RopeTable
    norms: NormWeights
    cache: LayerCache
    table: torch.Tensor
    ring_ids: torch.Tensor
    page_tokens: int = 64

    @classmethod
    def make(cls, requests: int, context: int, rows: int, *, seed: int, kv_dtype: torch.dtype = BF16) -> Layer:
        generator = torch.Generator("cuda").manual_seed(seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=BF16, device="cuda", generator=generator)

        columns = -(-context // 64)
        pages = requests * columns + 1
        order = torch.randperm(pages, device="cuda", generator=generator)[: requests * columns]
        pool = [randn(pages, 64, KV_HEADS, HEAD_DIM).to(kv_dtype) for _ in range(2)]
        ring_positions = torch.randint(0, context, (requests, 8, 3), device="cuda", generator=generator)
        cache = LayerCache(*pool, randn(pages, 64 // R, INDEX_DIM), randn(requests, 8, INDEX_DIM), ring_positions)
        rope = RopeTable.build(
            {"rope_theta": 1e7}, rotary_dim=ROTARY, num_positions=context, mrope_section=(11, 11, 10), device="cuda"
        )
        norms = NormWeights(randn(HEAD_DIM), randn(HEAD_DIM), randn(INDEX_DIM), randn(INDEX_DIM))
        projected = [randn(rows, Q_HEADS, 2 * HEAD_DIM), randn(rows, KV_HEADS, HEAD_DIM),
                     randn(rows, KV_HEADS, HEAD_DIM), randn(rows, INDEX_HEADS + 1, INDEX_DIM)]  # fmt: skip
        positions = torch.randint(0, context, (3, rows + 5), device="cuda", generator=generator)[:, :rows]
        ring_ids = torch.randperm(requests, device="cuda", generator=generator).to(torch.int32)
        table = order.view(requests, columns).to(torch.int32).contiguous()
        return cls(projected, positions, rope, norms, cache, table, ring_ids)

    def plan(self, seq_lens: list[int], rows: list[int], *, max_seq_len: int) -> StepPlan:
        starts = torch.tensor([0, *rows]).cumsum(0).to(device="cuda", dtype=torch.int32)
        return plan_step(
            starts, torch.tensor(seq_lens, dtype=torch.int32).cuda(), self.table, page_tokens=self.page_tokens,
            block_tokens=R, topk_blocks=TOPK, max_query_len=max(rows), max_seq_len=max_seq_len,
            num_pages=self.cache.k_pages.shape[0], ring_ids=self.ring_ids, ring_tokens=8,
            num_rows=self.rows[0].shape[0],
        )  # fmt: skip

    def run(self, plan: StepPlan, cache: LayerCache | None = None, backend: str = "triton", **options: Any) -> Prepared:
        inputs = (*self.rows, self.positions, self.rope, self.norms, cache or self.cache, plan)
        return prepare(*inputs, backend=backend, **options)

    def fresh_cache(self) -> LayerCache:
        return dataclasses.replace(self.cache, **{name: getattr(self.cache, name).clone() for name in STORED})


def assert_same_result(
    assert_same_rows: Any, got: tuple[Prepared, LayerCache], wanted: tuple[Prepared, LayerCache]
) -> None:
    for name in ("q", "index_q"):
        assert_same_rows(getattr(got[0], name), getattr(wanted[0], name), BF16, name)
    for name in STORED:
        assert_same_rows_or_bits(assert_same_rows, name, getattr(got[1], name), getattr(wanted[1], name))


def assert_same_rows_or_bits(assert_same_rows: Any, name: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    if name.startswith("ring"):
        assert_bitwise_equal(got, wanted, name)
    else:
        assert_same_rows(got, wanted, BF16, name)


def test_fault_41_a_prefill_of_4096_tokens(assert_same_rows: Any) -> None:
    """Pooled keys as torch makes them; a key on the other side of a rounding hardly moves a selection."""
    layer = Layer.make(1, 4096, 4096, seed=80)
    plan = layer.plan([4096], [4096], max_seq_len=4096)
    caches = [layer.fresh_cache() for _ in range(2)]
    results = [layer.run(plan, cache, backend) for cache, backend in zip(caches, ("triton", "torch"), strict=True)]
    assert_same_result(assert_same_rows, (results[0], caches[0]), (results[1], caches[1]))
    ids = [select_blocks(r.index_q, c, plan).block_ids for r, c in zip(results, caches, strict=True)]
    assert int((ids[0] != ids[1]).any(dim=1).sum()) <= 40, "selected ids"


def test_fault_12_pieces_have_the_bits_of_one_long_prefill() -> None:
    """Few rows and many are prepared in tiles of different height: nothing that is written or returned shows it."""
    rows, layer = 1501, Layer.make(1, 1600, 1501, seed=84)
    whole, caches = layer.plan([rows], [rows], max_seq_len=1600), [layer.fresh_cache() for _ in range(2)]
    wanted = layer.run(whole, caches[0])
    at = 0
    for count in (1, 2, 3, 5, 842, 600, 48):
        piece = dataclasses.replace(
            layer, rows=[x[at : at + count] for x in layer.rows], positions=layer.positions[:, at : at + count]
        )
        at += count
        got = piece.run(piece.plan([at], [count], max_seq_len=1600), caches[1])
        for name in ("q", "index_q"):
            assert_bitwise_equal(getattr(got, name), getattr(wanted, name)[at - count : at], f"{name} to row {at}")
    assert at == rows
    for name in STORED:
        assert_bitwise_equal(getattr(caches[1], name), getattr(caches[0], name), name)


@pytest.mark.parametrize("kv_dtype", [BF16, E4M3], ids=str)
def test_a_mixed_step_of_many_requests(assert_same_rows: Any, kv_dtype: torch.dtype) -> None:
    """Decode, verification and chunks of 300 requests, rows past them, e4m3 pages without scales."""
    lens = [(37 * i) % 1990 + 9 for i in range(300)]
    rows = [(1, 1, 3, 1, 9)[i % 5] for i in range(300)]
    layer = Layer.make(300, 2000, sum(rows) + 3, seed=81, kv_dtype=kv_dtype)
    plan = layer.plan(lens, rows, max_seq_len=2000)
    caches = [layer.fresh_cache() for _ in range(2)]
    results = [layer.run(plan, cache, backend) for cache, backend in zip(caches, ("triton", "torch"), strict=True)]
    assert_same_result(assert_same_rows, (results[0], caches[0]), (results[1], caches[1]))
    for _ in range(5):
        again = layer.fresh_cache()
        repeated = layer.run(plan, again)
        assert_bitwise_equal(repeated.q, results[0].q, "q again")
        for name in STORED:
            assert_bitwise_equal(getattr(again, name), getattr(caches[0], name), f"{name} again")


def test_fault_42_page_ids_whose_offsets_pass_32_bits() -> None:
    """Caches that are views of one pool of pages of 1,077,120 bytes, page ids to 6,000: offsets beyond 2^31."""
    layer = Layer.make(2, 640, 7, seed=82)
    stride, pages, dim = 1_077_120 // 2, 6000, KV_HEADS * HEAD_DIM
    pool = torch.zeros(pages * stride, dtype=BF16, device="cuda")

    def view(offset: int, *shape: int) -> torch.Tensor:
        inner = [shape[1] * shape[2], shape[2], 1] if len(shape) == 3 else [shape[1], 1]
        return pool.as_strided((pages, *shape), [stride, *inner], offset)

    near = layer.plan([640, 301], [4, 3], max_seq_len=640)
    wanted = layer.run(near)
    far = dataclasses.replace(
        layer.cache, k_pages=view(0, 64, KV_HEADS, HEAD_DIM), v_pages=view(64 * dim, 64, KV_HEADS, HEAD_DIM),
        block_keys=view(2 * 64 * dim, 64 // R, INDEX_DIM),
    )  # fmt: skip
    moved = dataclasses.replace(layer, table=layer.table + 5900, cache=far)
    assert int(moved.table.max()) < pages
    plan = moved.plan([640, 301], [4, 3], max_seq_len=640)
    assert_bitwise_equal(moved.run(plan).q, wanted.q)
    for name, slots, there in (
        ("k_pages", near.slot_ids, plan.slot_ids), ("v_pages", near.slot_ids, plan.slot_ids),
        ("block_keys", near.closed_block_slot_ids, plan.closed_block_slot_ids),
    ):  # fmt: skip
        old = read_slots(getattr(layer.cache, name), slots[slots >= 0])
        assert_bitwise_equal(read_slots(getattr(far, name), there[there >= 0]), old, name)
    assert int(pool.count_nonzero()) <= 7 * 2 * dim + 2 * INDEX_DIM


def test_fault_47_no_synchronisation(no_synchronisation: Any) -> None:
    """Planning, refilling, preparing and expanding read nothing back, with scales as tensors on the device."""
    layer = Layer.make(3, 900, 6, seed=83, kv_dtype=E4M3)
    scales = {name: torch.tensor([0.5], device="cuda") for name in ("k_scale", "v_scale")}
    cache = dataclasses.replace(layer.cache, **scales)
    starts = torch.tensor([0, 1, 4, 6], dtype=torch.int32, device="cuda")
    lens = torch.tensor([900, 800, 10], dtype=torch.int32, device="cuda")

    def step(out: StepPlan | None = None) -> tuple[StepPlan, Prepared]:
        plan = plan_step(
            starts, lens, layer.table, page_tokens=64, block_tokens=R, topk_blocks=16, max_query_len=3,
            max_seq_len=900, num_pages=cache.k_pages.shape[0], ring_ids=layer.ring_ids, ring_tokens=8, num_rows=6,
            out=out,
        )  # fmt: skip
        prepared = layer.run(plan, cache)
        expand_tokens(select_blocks(prepared.index_q, cache, plan), plan)
        return plan, prepared

    plan, first = step()
    with no_synchronisation():
        _, second = step(plan)
    assert_bitwise_equal(second.q, first.q)


def test_fault_17_plan_prepare_select_and_attend_in_one_graph() -> None:
    """Lengths, rings and page table are edited in place between replays; padding requests hold garbage."""
    layer = Layer.make(8, 4000, 16, seed=84)
    starts = (torch.arange(9) * 2).to(device="cuda", dtype=torch.int32)
    lens = torch.full((8,), 4000, dtype=torch.int32, device="cuda")
    table, rings = layer.table.clone(), layer.ring_ids.clone()
    captured = layer.fresh_cache()

    def planned(out: StepPlan | None = None) -> StepPlan:
        return plan_step(
            starts, lens, table, page_tokens=64, block_tokens=R, topk_blocks=TOPK, max_query_len=2, max_seq_len=4000,
            num_pages=captured.k_pages.shape[0], ring_ids=rings, ring_tokens=8, num_rows=16, out=out,
        )  # fmt: skip

    def run(plan: StepPlan, cache: LayerCache, prepared: Prepared | None, out: torch.Tensor | None) -> torch.Tensor:
        made = layer.run(plan, cache, out=prepared)
        selection = select_blocks(made.index_q, cache, plan, backend="triton")
        return attend(made.q, cache, selection, plan, gate=made.gate, out=out, backend="triton")

    plan = planned()
    gate = layer.rows[0][..., HEAD_DIM:]
    prepared = Prepared(torch.empty_like(layer.rows[3][:, :-1]), torch.empty_like(gate), gate)
    out = run(plan, captured, prepared, None)
    run(planned(plan), captured, prepared, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(planned(plan), captured, prepared, out)
    for turn, live in enumerate((8, 1, 3, 0, 5)):
        generator = torch.Generator("cuda").manual_seed(turn)
        seq_lens = torch.randint(2, 4000, (8,), generator=generator, device="cuda", dtype=torch.int32)
        seq_lens[live:] = 0
        shuffled = layer.table[torch.randperm(8, generator=generator, device="cuda")].clone()
        shuffled[live:] = (-1, 2**31 - 1, -(2**31))[turn % 3]
        lens.copy_(seq_lens)
        table.copy_(shuffled)
        rings.copy_(layer.ring_ids[torch.randperm(8, generator=generator, device="cuda")])
        for name in STORED:
            getattr(captured, name).copy_(getattr(layer.cache, name))
        out.fill_(torch.nan)
        prepared.q.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        eager = layer.fresh_cache()
        wanted = run(planned(), eager, None, None)
        assert_bitwise_equal(out, wanted, f"output, {live} live")
        for name in STORED:
            assert_bitwise_equal(getattr(captured, name), getattr(eager, name), f"{name}, {live} live")
        assert not bool(prepared.q[2 * live :].any())


def test_more_programs_than_65535() -> None:
    """70,000 decode rows, each of a request and on a page of its own: the last ones are prepared like the first."""
    requests = 70_000
    layer = Layer.make(1, 64, requests, seed=85)
    pages = [torch.zeros(requests, R, KV_HEADS, HEAD_DIM, dtype=BF16, device="cuda") for _ in range(2)]
    keys = torch.zeros(requests, 1, INDEX_DIM, dtype=BF16, device="cuda")
    layer.cache = LayerCache(*pages, keys, None, None)
    starts = torch.arange(requests + 1, dtype=torch.int32, device="cuda")
    table = torch.randperm(requests, device="cuda").to(torch.int32)[:, None]

    def planned(count: int) -> StepPlan:
        lens = torch.ones(count, dtype=torch.int32, device="cuda")
        return plan_step(
            starts[: count + 1], lens, table[-count:], page_tokens=R, block_tokens=R, topk_blocks=TOPK,
            max_query_len=1, max_seq_len=R, num_pages=requests, num_rows=count,
        )  # fmt: skip

    plan = planned(requests)
    assert torch.equal(plan.request_ids.to(torch.int64), torch.arange(requests, device="cuda"))
    prepared = layer.run(plan)
    written = read_slots(pages[0], plan.slot_ids[-40:])
    tail = dataclasses.replace(layer, rows=[x[-40:] for x in layer.rows], positions=layer.positions[:, -40:])
    alone = tail.run(planned(40))
    assert_bitwise_equal(prepared.q[-40:], alone.q, "the last queries")
    assert_bitwise_equal(written, read_slots(pages[0], plan.slot_ids[-40:]), "the last keys")
    assert bool(read_slots(pages[1], plan.slot_ids).any(dim=2).all())
