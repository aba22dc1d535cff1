"""What a row's bits depend on: decode on the row alone, longer steps on the request's own rows, nothing on the rest."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.attention import attend
from flashqsa.attention.tiles import TILE_ROWS
from flashqsa.testing import Step, StepCase, assert_bitwise_equal, assert_within_budget, make_step

Check = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Result = tuple[torch.Tensor, torch.Tensor]

ODD = {"head_dim": 33, "q_heads": 3, "kv_heads": 1}
"""Heads whose elements fill no vector register: bits that depend on where an element lies show here first."""
SHAPES: dict[str, dict[str, Any]] = {"even": {}, "odd": ODD}


def _attend(step: Step, selection: Any, backend: str, **options: Any) -> Result:
    result: Any = attend(
        step.q, step.cache, selection, step.plan, gate=step.gate, return_lse=True, backend=backend, **options
    )
    return result


def _assert_same(got: Result, wanted: Result, label: str) -> None:
    assert_bitwise_equal(got[0], wanted[0], f"{label}: output")
    assert_bitwise_equal(got[1], wanted[1], f"{label}: lse")


def _rows(result: Result, first: int, count: int = 1) -> Result:
    return result[0][first : first + count], result[1][first : first + count]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_is_a_function_of_the_row_alone(shape: str, dtype: torch.dtype, backend: str, choose: Any) -> None:
    contexts = (0, 1, 3, 4, 30, 31, 32, 47, 64, 100, 333)
    seeds = tuple(range(len(contexts)))
    options: dict[str, Any] = {"dtype": dtype, **SHAPES[shape]}
    alone = {}
    for seed, context in zip(seeds, contexts, strict=True):
        step = make_step(StepCase("alone", ((context, 1),), request_seeds=(seed,), **options), seed=1)
        alone[seed] = _attend(step, choose(step), backend)
    others = {
        "batch": {},
        "reversed": {"order": seeds[::-1]},
        "padded": {"padding_rows": 3, "padding_requests": 2},
        "larger pages": {"page_tokens": 48},
        "first slots": {"contiguous": True},
        "heads first": {"layout": "hnd"},
        "K and V side by side": {"layout": "packed"},
        "wide bounds": {"max_query_len": 64, "max_seq_len": 4096},
    }
    for label, changes in others.items():
        order = changes.pop("order", seeds)
        requests = tuple((contexts[seed], 1) for seed in order)
        step = make_step(StepCase(label, requests, request_seeds=order, **options, **changes), seed=1)
        together = _attend(step, choose(step), backend)
        for row, seed in enumerate(order):
            _assert_same(_rows(together, row), alone[seed], f"{label}, context {contexts[seed]}")


@pytest.mark.parametrize("shape", SHAPES)
def test_decode_beside_longer_requests(shape: str, backend: str, choose: Any) -> None:
    alone = make_step(StepCase("alone", ((95, 1),), request_seeds=(5,), **SHAPES[shape]), seed=2)
    wanted = _attend(alone, choose(alone), backend)
    mixed = StepCase("mixed", ((0, 70), (95, 1), (40, 4)), request_seeds=(0, 5, 1), padding_rows=1, **SHAPES[shape])
    step = make_step(mixed, seed=2)
    _assert_same(_rows(_attend(step, choose(step), backend), 70), wanted, "between a prefill and a verification")


@pytest.mark.parametrize("shape", SHAPES)
def test_row_exact_equals_decode_everywhere(shape: str, backend: str, choose: Any, check: Check) -> None:
    step = make_step(StepCase("rows", ((0, 70), (120, 5), (63, 1)), **SHAPES[shape]), seed=3)
    exact = check(step, choose(step), backend, row_exact=True)
    row = 0
    for request, (before, new) in enumerate(step.case.requests):
        for position in range(before, before + new):
            case = StepCase("decode", ((position, 1),), request_seeds=(request,), **SHAPES[shape])
            decode = make_step(case, seed=3)
            wanted = _attend(decode, choose(decode), backend)
            _assert_same(_rows(exact, row), wanted, f"request {request} position {position}")
            row += 1


@pytest.mark.parametrize("width", range(2, 9))
def test_fault_36_verify_windows_beyond_the_budget(width: int, backend: str, choose: Any, check: Check) -> None:
    """Row i of a window equals the serial decode of token i, which sees the blocks that earlier rows closed."""
    options: dict[str, Any] = {"topk_blocks": 64, "page_tokens": 64}
    window = make_step(StepCase("window", ((5000 + width, width),), **options), seed=36)
    selection = choose(window, noise=0.05)
    exact = check(window, selection, backend, row_exact=True)
    check(window, selection, backend)
    for row in range(width):
        serial = make_step(StepCase("serial", ((5000 + width + row, 1),), **options), seed=36)
        wanted = _attend(serial, choose(serial, noise=0.05), backend)
        _assert_same(_rows(exact, row), wanted, f"row {row} of {width}")


@pytest.mark.parametrize("batch", [1, 3, 64, 65])
def test_fault_48_verify_widths_and_batches(batch: int, backend: str, choose: Any, check: Check) -> None:
    """Widths 1..8, odd ones first: a request's rows have the same bits alone and in any batch."""
    widths = (1, 3, 5, 7, 2, 4, 6, 8) if batch < 64 else (3, 4) if batch == 64 else (5, 1)
    for width in widths:
        contexts = [29 + (7 * request) % 41 for request in range(batch)]
        case = StepCase("batch", tuple((n, width) for n in contexts), head_dim=8, q_heads=4, topk_blocks=6)
        step = make_step(case, seed=48)
        together = check(step, choose(step), backend)
        for request in {0, batch // 2, batch - 1}:
            case = StepCase("alone", ((contexts[request], width),), request_seeds=(request,), head_dim=8, q_heads=4,
                            topk_blocks=6)  # fmt: skip
            alone = make_step(case, seed=48)
            wanted = _attend(alone, choose(alone), backend)
            _assert_same(_rows(together, request * width, width), wanted, f"width {width}, request {request}")


def _chunks(cuts: tuple[int, ...], backend: str, choose: Any, noise: float, options: dict[str, Any]) -> Result:
    """One request of the last cut's length, its rows computed in chunks."""
    parts = []
    for start, end in itertools.pairwise((0, *cuts)):
        step = make_step(StepCase("chunk", ((start, end - start),), **options), seed=5)
        parts.append(_attend(step, choose(step, noise=noise), backend))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])


@pytest.mark.parametrize("noise", [0.0, 0.3, 10.0], ids=["same blocks", "neighbours", "unrelated"])
@pytest.mark.parametrize("shape", SHAPES)
def test_chunks_cut_at_tiles_equal_the_whole(shape: str, noise: float, backend: str, choose: Any) -> None:
    length = 4 * TILE_ROWS + 1  # the last chunk may be one row: a tile of its own in the whole as well
    whole = _chunks((length,), backend, choose, noise, SHAPES[shape])
    for cuts in ((TILE_ROWS, length), (2 * TILE_ROWS, 3 * TILE_ROWS, length), (4 * TILE_ROWS, length)):
        _assert_same(_chunks(cuts, backend, choose, noise, SHAPES[shape]), whole, f"cut at {cuts}")


def test_other_cuts_stay_within_the_budget(
    backend: str, choose: Any, exact: Any, row_lists: Any, attend_hostile: Any
) -> None:
    step = make_step(StepCase("whole", ((0, 150),)), seed=5)
    selection = choose(step)
    truth, truth_lse = exact(step, row_lists(step, selection))
    reference = attend_hostile(step, selection, backend="reference")
    for cuts in ((1, 150), (63, 150), (65, 66, 150), (2, 5, 47, 101, 150), tuple(range(1, 151))):
        out, lse = _chunks(cuts, backend, choose, 0.3, {})
        assert_within_budget(out, reference[0], truth, f"cut at {cuts[:4]}")
        assert_within_budget(lse, reference[1], truth_lse, f"cut at {cuts[:4]}")


@pytest.mark.parametrize("shape", SHAPES)
def test_prefill_and_verify_depend_on_their_own_rows_alone(shape: str, backend: str, choose: Any) -> None:
    parts = {3: (0, 70), 1: (50, 33), 2: (64, 4), 0: (127, 2)}
    alone = {}
    for seed, part in parts.items():
        step = make_step(StepCase("alone", (part,), request_seeds=(seed,), **SHAPES[shape]), seed=7)
        alone[seed] = _attend(step, choose(step), backend)
    for order in ((3, 1, 2, 0), (0, 2, 1, 3)):
        case = StepCase(
            "batch", tuple(parts[seed] for seed in order), request_seeds=order, padding_rows=2, padding_requests=1,
            page_tokens=32, layout="hnd", **SHAPES[shape],
        )  # fmt: skip
        step = make_step(case, seed=7)
        together, row = _attend(step, choose(step), backend), 0
        for seed in order:
            count = parts[seed][1]
            _assert_same(_rows(together, row, count), alone[seed], f"request {seed} in {order}")
            row += count


def test_fault_01_the_same_step_gives_the_same_bits(backend: str, choose: Any) -> None:
    case = StepCase("repeat", ((0, 64), (4095, 1), (700, 7)), topk_blocks=64, page_tokens=64, dtype=torch.bfloat16)
    step = make_step(case, seed=1)
    selection = choose(step, noise=1.0)
    first = _attend(step, selection, backend)
    for _ in range(9):
        _assert_same(_attend(step, selection, backend), first, "again")


def test_fault_01_what_lies_past_a_count_is_never_read(backend: str, choose: Any) -> None:
    step = make_step(StepCase("past", ((0, 70), (120, 5), (63, 1))), seed=11)
    counts = [min(8, (p + 1) // 4, 1 + row % 8) for row, p in enumerate(step.plan.positions.tolist())]
    selection = choose(step, counts=counts)
    wanted = _attend(step, selection, backend)
    for garbage in (0, 7, 2**31 - 1, -(2**31)):
        past = torch.arange(8)[None] >= selection.block_counts[:, None]
        selection.block_ids[past] = garbage
        _assert_same(_attend(step, selection, backend), wanted, f"{garbage} past the counts")


def test_strides_of_queries_and_gates_change_no_bit(backend: str, choose: Any) -> None:
    for shape in SHAPES.values():
        step = make_step(StepCase("strides", ((0, 70), (120, 5), (63, 1)), dtype=torch.float32, **shape), seed=12)
        selection = choose(step)
        wanted = attend(
            step.q.contiguous(), step.cache, selection, step.plan, gate=step.gate.contiguous(), backend=backend
        )
        heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (step.q, step.gate)]
        side_by_side = torch.cat([step.q, step.gate], dim=-1)
        views = {
            "heads first": heads_first,
            "one projection": side_by_side.chunk(2, dim=-1),
            "kit": (step.q, step.gate),
        }
        for label, (q, gate) in views.items():
            got = attend(q, step.cache, selection, step.plan, gate=gate, backend=backend)
            assert_bitwise_equal(got, wanted, label)


def test_broadcast_queries_and_caches(backend: str, choose: Any) -> None:
    """Expanded tensors are read like the copies that they stand for."""
    step = make_step(StepCase("expanded", ((0, 40), (50, 1)), q_heads=4, kv_heads=2), seed=13)
    selection = choose(step)
    q = step.q[:, :1].expand(-1, 4, -1)
    pages = [x[:, :, :1].expand(-1, -1, 2, -1) for x in (step.cache.k_pages, step.cache.v_pages)]
    views = dataclasses.replace(step.cache, k_pages=pages[0], v_pages=pages[1])
    copies = dataclasses.replace(step.cache, k_pages=pages[0].contiguous(), v_pages=pages[1].contiguous())
    got = attend(q, views, selection, step.plan, backend=backend)
    wanted = attend(q.contiguous(), copies, selection, step.plan, backend=backend)
    assert_bitwise_equal(got, wanted, "expanded")
