"""Kernels of vLLM's operators give the bits of the torch forms, whatever padding and caches hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.integrations.vllm_plugin import call_plans, ops, rings
from flashqsa.plan import StepPlan
from flashqsa.plan.build import REFILLED
from flashqsa.testing import assert_bitwise_equal, assert_unchanged, guarded, snapshot, stream

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`by("kernel" or "torch", operator, *arguments)`: the operator in that form, on any device."""

    def call(form: str, operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            for module in (ops, call_plans, rings):
                patch.setattr(module, "takes_kernels", lambda device: form == "kernel")
            return operator(*args, **kwargs)

    return call


def _assert_same(got: StepPlan, wanted: StepPlan) -> None:
    for name in REFILLED:
        one, other = getattr(got, name), getattr(wanted, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.dtype == other.dtype, name
            assert one.tolist() == other.tolist(), name
    for name in ("page_tokens", "block_tokens", "topk_blocks", "max_query_len", "max_seq_len", "ring_tokens"):
        assert getattr(got, name) == getattr(wanted, name), name


def _ints(device: torch.device, *numbers: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Numbers with a gap behind each."""
    return torch.tensor([[n, -77] for n in numbers], dtype=dtype, device=device).view(-1, 2)[:, 0]


# Plans of a call

ROWS = {
    "decode": [1] * 9,
    "one": [1],
    "verify": [4, 4, 4],
    "prefill": [37, 0, 1, 70, 0],
    "long": [1, 1500, 0, 2],
    "nobody first": [0, 0, 3],
    "many": [i % 3 for i in range(70)],
}


def _visible(rows: list[int], total: int, seed: int, *, at_most: int = 50) -> list[int]:
    """Mostly what a prefix and its rows see; a third of the requests is padding; leftovers in between."""
    generator = stream(310, seed)
    found: list[int] = []
    for request, count in enumerate(rows):
        begin = int(torch.randint(at_most, (), generator=generator))
        found += [0 if request % 3 == 1 else (begin + row) // 4 for row in range(count)]
    found += [int(torch.randint(at_most, (), generator=generator)) for _ in range(total - len(found))]
    found[::11] = [0] * len(found[::11])
    return found[:total]


@pytest.mark.parametrize("origin", [0, 13])
@pytest.mark.parametrize("extra", [0, 3, -1], ids=["exact", "rows past the end", "rows missing"])
@pytest.mark.parametrize("mix", ROWS)
def test_select_plan(by: Any, device: torch.device, mix: str, extra: int, origin: int) -> None:
    rows, total = ROWS[mix], max(sum(ROWS[mix]) + extra, 0)
    starts = (torch.tensor([0, *rows]).cumsum(0) + origin).to(device, torch.int32)
    table = torch.zeros(len(rows), 5, dtype=torch.int32, device=device)
    for seed, at_most in ((0, 50), (1, 2**31 - 2000)):
        visible = _ints(device, *_visible(rows, total, seed, at_most=at_most))
        before = snapshot(starts, visible)
        known = dict(rows=total, query_len=max(rows), page_tokens=16, block_tokens=4, topk_blocks=8, max_seq_len=80)
        plans = [by(form, call_plans.select_plan, visible, starts, table, **known) for form in ("kernel", "torch")]
        _assert_same(*plans)
        assert_unchanged(before)
        if len(set(rows)) == 1:
            known["query_len"] = rows[0]
            plans = [by(form, call_plans.select_plan, visible, None, table, **known) for form in ("kernel", "torch")]
            _assert_same(*plans)


@pytest.mark.parametrize("rows", [1, 5, 256, 700])
def test_expand_plan(by: Any, device: torch.device, rows: int) -> None:
    generator = stream(311, rows)
    positions = torch.randint(-1, 200, (rows,), generator=generator)
    positions[::4] = -1
    visible = (positions + 1) // 4
    visible[::3] = torch.randint(2**31 - 1, (len(visible[::3]),), generator=generator)  # leftovers
    given = (_ints(device, *positions.tolist(), dtype=torch.int64), _ints(device, *visible.tolist()))
    ids = torch.zeros(rows, 8, dtype=torch.int32, device=device)
    before = snapshot(given)
    (got, one), (wanted, other) = (
        by(form, call_plans.expand_plan, ids, *given, block_tokens=4, topk_blocks=8) for form in ("kernel", "torch")
    )
    _assert_same(got, wanted)
    for name in ("block_ids", "block_counts", "visible_blocks", "request_ids"):
        assert_bitwise_equal(getattr(one, name), getattr(other, name), name)
    assert_unchanged(before)


@pytest.mark.parametrize(
    ("mix", "width"), [*((mix, 5) for mix in ROWS if mix != "long"), ("long", 1), ("decode", 1500), ("verify", 2100)]
)
def test_attend_plan(by: Any, device: torch.device, mix: str, width: int) -> None:
    """Padding of request 0, requests out of range, counts out of range, ids in any order, rows that are scattered."""
    rows, generator = ROWS[mix], stream(312, width)
    requests = torch.tensor([r for r, count in enumerate(rows) for _ in range(count)] + [0, 0], dtype=torch.int32)
    total = len(requests)
    for hostile in (False, True):
        tokens = torch.randint(-1, 5000, (total, width + 1), generator=generator, dtype=torch.int32)
        tokens[:, -1] = torch.randint(1, width + 1, (total,), generator=generator)
        tokens[-2:, -1] = 0
        tokens[::5, 0] = 2**31 - 1
        if hostile:
            tokens[::3, -1] = torch.tensor([0, -4, 2**31 - 1, -(2**31), width + 1])[torch.arange(total)[::3] % 5].int()
            requests = requests[torch.randperm(total, generator=generator)]
            requests[1::6] = torch.tensor([-1, len(rows), 2**31 - 1, -(2**31)])[torch.arange(total)[1::6] % 4].int()
        wide = torch.full((total, width + 4), 2**31 - 1, dtype=torch.int32, device=device)
        wide[:, 2:-1] = tokens.to(device)
        table = torch.zeros(len(rows), 3, dtype=torch.int32, device=device)
        of_row = _ints(device, *requests.tolist())
        before = snapshot(wide, of_row)
        given = (wide[:, 2:-1], of_row, table)
        _assert_same(*(by(form, call_plans.attend_plan, *given, page_tokens=16) for form in ("kernel", "torch")))
        assert_unchanged(before)


@pytest.mark.parametrize("keeps_positions", [True, False])
@pytest.mark.parametrize(
    ("mix", "extra", "dtype"),
    [*((mix, 3, BF16) for mix in ROWS if mix != "long"), ("verify", 0, FP32), ("one", 0, BF16), ("verify", 3, FP16)],
)
def test_prepare_plan(
    by: Any, device: torch.device, mix: str, extra: int, keeps_positions: bool, dtype: torch.dtype
) -> None:
    """Rings of NaN among them, requests without one, padding rows; what is copied goes back and nothing else does."""
    counts, generator = ROWS[mix], stream(313, extra)
    total, requests, ring_tokens, dim = sum(counts) + extra, len(counts), 6, 20
    begin = torch.randint(30, (requests,), generator=generator).tolist()
    logical = [begin[r] + i for r, count in enumerate(counts) for i in range(count)] + [-1, 7, -1][:extra]
    logical[::5] = [-1] * len(logical[::5])
    blocks = (torch.randperm(requests + 3, generator=generator) + 1)[:requests]
    blocks[1::4], blocks[2::4] = 0, -1
    table = torch.full((requests + 1, 3), 2**31 - 1, dtype=torch.int32)
    table[:requests, 0] = blocks.int()
    slots = torch.randint(-1, 99, (total,), generator=generator)
    width = dim + (12 * 2 // dtype.itemsize if keeps_positions else 0)
    state = guarded((requests + 4, ring_tokens, 1, width), dtype, padding=(1, 2, 1, 4), device=device)
    state.view.copy_(torch.randn(state.view.shape, generator=generator))
    state.view[::3] = torch.nan
    starts = torch.tensor([0, *counts]).cumsum(0).to(device, torch.int32)
    given = (_ints(device, *logical, dtype=torch.int64), starts, _ints(device, *slots.tolist(), dtype=torch.int64),
             table.to(device))  # fmt: skip
    before, made = snapshot(given, state.view), []
    for form in ("kernel", "torch"):
        cache = state.view if form == "kernel" else state.view.clone()
        plan, ring = by(
            form, call_plans.prepare_plan, *given, cache, key_dim=dim, slot_ids=given[0], page_tokens=16,
            rope_offset=dim if keeps_positions and dtype != FP32 else None, closed_block_slot_ids=given[2],
            block_tokens=4, max_seq_len=80,
        )  # fmt: skip
        assert_unchanged(before)
        made.append((plan, ring, cache))
    (got, ring, cache), (wanted, other, copy) = made
    _assert_same(got, wanted)
    for name in ("keys", "positions", "ring_ids"):
        assert_bitwise_equal(getattr(ring, name).contiguous(), getattr(other, name).contiguous(), name)
    if ring.copied_from is not None:
        for each in (ring, other):
            each.keys[each.ring_ids >= 0] = torch.arange(dim, device=device).to(dtype)
    by("kernel", rings.close_ring, ring, cache)
    by("torch", rings.close_ring, other, copy)
    assert_bitwise_equal(cache.contiguous(), copy.contiguous())
    state.assert_intact()


def test_index_queries_and_keys_of_one_projection_are_not_copied(device: torch.device) -> None:
    whole = torch.randn(5, 60, generator=stream(314)).to(device)
    q, k = whole[:, 3:43], whole[:, 43:53]
    joined = ops.side_by_side(q, k)
    assert joined.data_ptr() == q.data_ptr()
    assert_bitwise_equal(joined.contiguous(), torch.cat([q, k], dim=1))
    for other in (k.clone(), whole[:, 44:54], torch.randn(5, 10, device=device)):
        assert_bitwise_equal(ops.side_by_side(q, other), torch.cat([q, other], dim=1))


# Rows of a cache


@pytest.mark.parametrize(("width", "page", "rows"), [(128, 16, 40), (3, 8, 9), (1, 1, 5), (1500, 4, 3), (96, 5, 11)])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16, E4M3, torch.int64], ids=str)
def test_store_cache_rows(by: Any, device: torch.device, dtype: torch.dtype, width: int, page: int, rows: int) -> None:
    """Bits move as they are, between canaries: no slot, slots beyond the cache, rows and pages with gaps."""
    generator = stream(300, width, rows)
    blocks = 2 * rows // page + 2
    cache = guarded((blocks, page, 1, width), dtype, padding=(1, 2, 1, 3), device=device)
    bits = torch.randint(-128, 128, (rows, 2, width * dtype.itemsize), generator=generator, dtype=torch.int8)
    given = bits.to(device).view(dtype)[:, 1]
    slots = torch.randperm(blocks * page, generator=generator)[:rows]
    slots[1::5] = -1
    slots[2::7] = blocks * page + torch.arange(len(slots[2::7]))
    slots[-1] = 2**62
    slots = torch.stack([slots, slots.flip(0)], 1).to(device)[:, 0]
    wanted = cache.view.view(torch.uint8).clone().view(dtype)
    before = snapshot(given, slots)
    by("kernel", ops.qsa_store_cache_rows, cache.view, slots, given)
    by("torch", ops.qsa_store_cache_rows, wanted, slots, given[:, None])
    assert_bitwise_equal(cache.view.contiguous(), wanted.contiguous())
    assert_unchanged(before)
    cache.assert_intact()


@pytest.mark.parametrize("dtype", [BF16, E4M3], ids=str)
def test_store_cache_rows_casts_as_torch_does(by: Any, device: torch.device, dtype: torch.dtype) -> None:
    rows = torch.randn(6, 40, generator=stream(301)).to(device) * 400
    rows[0, :3] = torch.tensor([torch.nan, torch.inf, -1e30])
    slots = torch.tensor([5, 0, -7, 11, 12, 3], device=device)
    caches = [torch.zeros(3, 4, 1, 40, device=device).to(dtype) for _ in range(2)]
    by("kernel", ops.qsa_store_cache_rows, caches[0], slots, rows)
    by("torch", ops.qsa_store_cache_rows, caches[1], slots, rows)
    assert_bitwise_equal(*caches)


@pytest.mark.parametrize("shape", [(0, 4, 1, 8), (2, 4, 1, 8)])
def test_store_cache_rows_with_nothing_to_write(by: Any, device: torch.device, shape: tuple[int, ...]) -> None:
    cache = torch.full(shape, 7.0, device=device)
    for rows in (0, 2):
        slots = torch.full((rows,), -1, device=device)
        by("kernel", ops.qsa_store_cache_rows, cache, slots, torch.zeros(rows, 8, device=device))
    assert bool((cache == 7).all())


def test_store_cache_rows_far_into_a_cache(by: Any, device: torch.device) -> None:
    """Pages that lie further apart than 32 bits count, by strides over memory that they share."""
    memory = torch.zeros(4096, dtype=torch.int16, device=device)
    slots, rows = torch.tensor([2**33 + 1, 2], device=device), torch.full((2, 8), 5, dtype=torch.int16, device=device)
    cache = memory.as_strided((2**33, 4, 1, 8), (0, 8, 8, 1))
    by("kernel", ops.qsa_store_cache_rows, cache, slots, rows)
    assert memory.nonzero()[:, 0].tolist() == list(range(8, 24))
