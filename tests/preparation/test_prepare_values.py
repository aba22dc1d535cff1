"""One call of `prepare` against the oracle and between backends: values, dtypes, scales, rotation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from flashqsa.cache.state import read_slots
from flashqsa.preparation import prepare
from flashqsa.results import Prepared
from flashqsa.testing import (
    Step,
    StepCase,
    assert_bitwise_equal,
    assert_ulp_close,
    guarded_like,
    make_step,
    oracles,
    poison,
)

E4M3 = torch.float8_e4m3fn
RAGGED = ((0, 13), (5, 1), (62, 3), (0, 1), (30, 6), (64, 1), (0, 0), (7, 5), (11, 0))

CASES = (
    StepCase("split", RAGGED),
    StepCase("packed", RAGGED, layout="packed"),
    StepCase("hnd", RAGGED, layout="hnd"),
    StepCase("dense", RAGGED, layout="dense", page_tokens=64),
    StepCase("contiguous", RAGGED, contiguous=True),
    StepCase("page-1600", RAGGED, page_tokens=1600),
    StepCase("page-is-a-block", RAGGED, page_tokens=4),
    StepCase("blocks-of-1", RAGGED, block_tokens=1, page_tokens=7),
    StepCase("blocks-of-2", RAGGED, block_tokens=2, page_tokens=10, speculative_rows=3),
    StepCase("blocks-of-8", RAGGED, block_tokens=8, page_tokens=80),
    StepCase("one-head-each", RAGGED, q_heads=1, kv_heads=1, index_heads=1),
    StepCase("dim-10", RAGGED, index_head_dim=10, head_dim=22, rotary_dim=6),
    StepCase("rotary-all", RAGGED, rotary_dim=16),
    StepCase("rotary-none", RAGGED, rotary_dim=0),
    StepCase("padding", RAGGED, padding_rows=3, padding_requests=2, speculative_rows=5),
    StepCase("mrope", RAGGED, mrope=True, rotary_dim=14),
    StepCase("bf16-table", RAGGED, dtype=torch.bfloat16, rope_dtype=torch.bfloat16, mrope=True),
    StepCase("fp64", RAGGED, dtype=torch.float64, rope_dtype=torch.float64),
    StepCase("nothing", ()),
    StepCase("only-padding", ((0, 0),), padding_rows=2),
)

WIDE = ((0, 23), (41, 9))
DTYPES = {
    "fp32": dict(dtype=torch.float32),
    "bf16": dict(dtype=torch.bfloat16),
    "fp16": dict(dtype=torch.float16),
    "bf16-e4m3": dict(dtype=torch.bfloat16, kv_dtype=E4M3, index_dtype=E4M3),
    "fp16-e4m3": dict(dtype=torch.float16, kv_dtype=E4M3, index_dtype=E4M3, layout="packed"),
    "fp32-e4m3": dict(dtype=torch.float32, kv_dtype=E4M3, index_dtype=E4M3, layout="hnd"),
    "bf16-fp16-kv": dict(dtype=torch.bfloat16, kv_dtype=torch.float16),
}


def wide(**dtypes: Any) -> StepCase:
    return StepCase("wide", WIDE, head_dim=128, index_head_dim=64, rotary_dim=32, mrope=True, **dtypes)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prepare_writes_and_returns_what_the_oracle_says(
    prepare_step: Any, assert_holds: Any, assert_queries: Any, backend: str, case: StepCase
) -> None:
    step = make_step(case, seed=1, written=False)
    prepared = prepare_step(step, backend=backend)
    for request in step.requests:
        assert_holds(step, request)
    assert_queries(step, prepared)
    assert prepared.q.dtype == prepared.index_q.dtype == case.dtype


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES.keys())
def test_prepare_in_every_dtype_is_within_a_last_place_of_the_oracle(
    prepare_step: Any, assert_holds: Any, assert_queries: Any, backend: str, dtypes: dict[str, Any]
) -> None:
    case = wide(**dtypes)
    step = make_step(case, seed=2, written=False)
    prepared = prepare_step(step, backend=backend)
    for request in step.requests:
        assert_holds(step, request)
    assert_queries(step, prepared)


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES.keys())
def test_fault_41_backends_agree(prepare_step: Any, dtypes: dict[str, Any]) -> None:
    case = wide(**dtypes)
    results, steps = [], []
    for backend in ("reference", "torch"):
        steps.append(make_step(case, seed=3, written=False))
        results.append(prepare_step(steps[-1], backend=backend))
    share = 1e-4 if case.dtype != torch.float32 else 1.0  # fp32 itself: by a last place
    for name in ("q", "index_q"):
        assert_last_places(getattr(results[1], name), getattr(results[0], name), share, name)
    for name in ("k_pages", "v_pages", "block_keys"):
        pages = [getattr(step.cache, name) for step in steps]
        slots = steps[0].plan.slot_ids if name != "block_keys" else steps[0].plan.closed_block_slot_ids
        rows = [read_slots(each, slots[slots >= 0]) for each in pages]
        assert_last_places(rows[1], rows[0], share, name)
    assert_bitwise_equal(steps[1].cache.ring, steps[0].cache.ring)
    assert_bitwise_equal(steps[1].cache.ring_positions, steps[0].cache.ring_positions)


def assert_last_places(actual: torch.Tensor, expected: torch.Tensor, share: float, label: str) -> None:
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual, expected, rtol=4e-7, atol=4e-7, msg=lambda text: f"{label}: {text}")
    else:
        assert_ulp_close(actual, expected, share=share, label=label)


@pytest.mark.parametrize("index_q_dtype", [None, E4M3, torch.float16])
def test_prepare_fills_the_buffers_given(
    prepare_step: Any, assert_queries: Any, backend: str, index_q_dtype: torch.dtype | None
) -> None:
    case = StepCase("out", RAGGED, dtype=torch.bfloat16, padding_rows=2, index_q_dtype=index_q_dtype)
    step = make_step(case, seed=4, written=False)
    plain = prepare_step(make_step(case, seed=4, written=False), backend=backend)
    guards = {
        "index_q": guarded_like(poison(torch.empty_like(step.index_q))),
        "q": guarded_like(poison(torch.empty_like(plain.q))),
        "gate": guarded_like(poison(torch.empty_like(step.gate))),
    }
    out = Prepared(**{name: guard.view for name, guard in guards.items()})
    filled = prepare_step(step, out=out, backend=backend)
    for name, guard in guards.items():
        assert getattr(filled, name).data_ptr() == guard.view.data_ptr(), f"{name} is not the buffer given"
        guard.assert_intact()
    assert_bitwise_equal(filled.q, plain.q)
    assert_queries(step, filled)
    if index_q_dtype is None:
        assert_bitwise_equal(filled.index_q, plain.index_q)


def test_prepare_may_write_queries_over_its_input(backend: str, prepare_step: Any) -> None:
    """Engines give q its place inside the projection's own buffer."""
    case = StepCase("in-place", RAGGED)
    plain = prepare_step(make_step(case, seed=5, written=False), backend=backend)
    step = make_step(case, seed=5, written=False)
    out = Prepared(index_q=torch.empty_like(plain.index_q), q=step.q_gate[..., :16], gate=step.gate)
    inputs = (step.q_gate, step.k, step.v, step.index_qk, step.rope_positions)
    prepare(*inputs, step.rope, step.norms, step.cache, step.plan, out=out, backend=backend)
    assert_bitwise_equal(step.q_gate[..., :16], plain.q)
    assert_bitwise_equal(step.gate, plain.gate)


SCALES = {
    "floats": lambda scale: scale,
    "tensors": lambda scale: torch.tensor([scale]),
    "scalars": lambda scale: torch.tensor(scale),
}


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES.keys())
def test_prepare_scales_e4m3_by_floats_and_tensors_alike(
    prepare_step: Any, assert_holds: Any, backend: str, scale: Any
) -> None:
    case = StepCase("scaled", RAGGED, dtype=torch.bfloat16, kv_dtype=E4M3)
    step = make_step(case, seed=6, written=False)
    step = dataclasses.replace(
        step, cache=dataclasses.replace(step.cache, k_scale=scale(case.k_scale), v_scale=scale(case.v_scale))
    )
    prepare_step(step, backend=backend)
    for request in step.requests:
        assert_holds(step, request)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_prepare_divides_by_scales_in_fp32_whatever_the_pages_hold(
    prepare_step: Any, backend: str, kv_dtype: torch.dtype
) -> None:
    """Attention multiplies by a scale when there is one, so pages of any dtype are divided by it, before the cast."""
    case = StepCase("scaled", ((0, 40),), dtype=torch.bfloat16, kv_dtype=kv_dtype, head_dim=64)
    step = make_step(case, seed=7, written=False)
    step = dataclasses.replace(step, cache=dataclasses.replace(step.cache, k_scale=0.37, v_scale=1.9))
    prepare_step(step, backend=backend)
    (truth,) = step.requests
    stored = read_slots(step.cache.v_pages, truth.slot_ids)
    assert_bitwise_equal(stored, (truth.raw_v.float() / 1.9).to(kv_dtype), "v")


def test_prepare_saturates_float8_at_448(prepare_step: Any, backend: str) -> None:
    case = StepCase(
        "loud", ((0, 9),), dtype=torch.bfloat16, kv_dtype=E4M3, index_dtype=E4M3, k_scale=1e-3, v_scale=1e-3
    )
    step = make_step(case, seed=8, written=False)
    loud = {name: torch.full_like(getattr(step.norms, name), 5e3) for name in ("index_q", "index_k")}
    step = dataclasses.replace(step, norms=dataclasses.replace(step.norms, **loud))
    step.v[2:4] = torch.tensor([1e30, -1e30], dtype=torch.bfloat16)[:, None, None]
    out = Prepared(step.index_q.to(E4M3), torch.empty_like(step.q), torch.empty_like(step.gate))
    prepared = prepare_step(step, out=out, backend=backend)
    (truth,) = step.requests
    stored_v = read_slots(step.cache.v_pages, truth.slot_ids).float()
    assert stored_v[2].eq(448).all()
    assert stored_v[3].eq(-448).all()
    for name, values in (
        ("k", read_slots(step.cache.k_pages, truth.slot_ids)),
        ("block keys", read_slots(step.cache.block_keys, truth.block_slot_ids)),
        ("index_q", prepared.index_q),
    ):
        wide = values.float()
        assert bool(wide.isfinite().all()), f"{name}: a value became NaN instead of 448"
        assert float(wide.abs().max()) == 448, name


def collapsed(step: Step, axis: int) -> Step:
    return dataclasses.replace(step, rope_positions=step.rope_positions[axis].clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fault_53_dimensions_past_the_rotary_ones_are_normed_and_nothing_else(
    prepare_step: Any, backend: str, dtype: torch.dtype
) -> None:
    case = StepCase("partial", RAGGED, mrope=True, rotary_dim=6, head_dim=20, index_head_dim=24, dtype=dtype)
    step, still = (make_step(case, seed=9, written=False) for _ in range(2))
    still.rope_positions.zero_()
    results = [prepare_step(each, backend=backend) for each in (step, still)]
    live = step.live_rows
    for name in ("q", "index_q"):
        moved, unmoved = (getattr(result, name)[live] for result in results)
        assert_bitwise_equal(moved[..., 6:], unmoved[..., 6:], f"{name}: dimensions past the rotary ones")
        assert not torch.equal(moved[..., :6], unmoved[..., :6]), f"{name}: nothing rotated"
    for name in ("k_pages", "block_keys"):
        slots = step.plan.slot_ids if name == "k_pages" else step.plan.closed_block_slot_ids
        moved, unmoved = (
            read_slots(getattr(each.cache, name), each.plan.slot_ids[live] if name == "k_pages" else slots[slots >= 0])
            for each in (step, still)
        )
        assert_bitwise_equal(moved[..., 6:], unmoved[..., 6:], f"{name}: dimensions past the rotary ones")


def test_fault_54_three_axes_that_all_differ_in_a_view_with_a_longer_row_stride(
    prepare_step: Any, assert_holds: Any, assert_queries: Any, backend: str
) -> None:
    case = StepCase("axes", RAGGED, mrope=True, rotary_dim=14)
    step = make_step(case, seed=10, written=False)
    assert step.rope_positions.stride(0) > step.num_rows
    live = step.live_rows
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(step.rope_positions[a, live], step.rope_positions[b, live])
    prepared = prepare_step(step, backend=backend)
    assert_queries(step, prepared)
    for request in step.requests:
        assert_holds(step, request)
    for axis in range(3):
        other = prepare_step(collapsed(make_step(case, seed=10, written=False), axis), backend=backend)
        assert not torch.allclose(other.q[live], prepared.q[live], atol=1e-3), f"axis {axis} alone gave the same"


def test_prepare_takes_positions_of_any_strides(prepare_step: Any, backend: str) -> None:
    case = StepCase("strides", RAGGED, mrope=True)
    plain = prepare_step(make_step(case, seed=11, written=False), backend=backend)
    step = make_step(case, seed=11, written=False)
    by_token = step.rope_positions.t().contiguous()
    turned = prepare_step(dataclasses.replace(step, rope_positions=by_token.t()), backend=backend)
    assert_bitwise_equal(turned.q, plain.q)


def test_one_axis_equals_three_equal_ones(prepare_step: Any, backend: str) -> None:
    case = StepCase("text", RAGGED)
    one, three = (make_step(case, seed=12, written=False) for _ in range(2))
    section = oracle_section(case)
    three = dataclasses.replace(
        three,
        rope_positions=three.rope_positions.expand(3, -1),
        rope=dataclasses.replace(three.rope, mrope_section=section),
    )
    results = [prepare_step(each, backend=backend) for each in (one, three)]
    assert_bitwise_equal(results[1].q, results[0].q)
    assert_bitwise_equal(three.cache.block_keys, one.cache.block_keys)
    assert_bitwise_equal(three.cache.ring_positions, one.cache.ring_positions)


def oracle_section(case: StepCase) -> tuple[int, int, int]:
    section = dataclasses.replace(case, mrope=True).mrope_section
    assert section is not None
    assert {oracles.position_axis(j, section) for j in range(case.rotary_dim // 2)} == {0, 1, 2}
    return section


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS = {
    "bf16-by-default": lambda: default_dtype(torch.bfloat16),
    "fp64-by-default": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference-mode": torch.inference_mode,
    "meta-by-default": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS.values(), ids=SURROUNDINGS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_process_has_set_changes_nothing(
    prepare_step: Any, backend: str, surroundings: Any, dtype: torch.dtype
) -> None:
    case = StepCase("set", ((0, 13), (6, 3)), mrope=True, dtype=dtype, kv_dtype=E4M3)
    usual, there = (make_step(case, seed=13, written=False) for _ in range(2))
    wanted = prepare_step(usual, backend=backend)
    with surroundings():
        inputs = (there.q_gate, there.k, there.v, there.index_qk, there.rope_positions)
        prepared = prepare(*inputs, there.rope, there.norms, there.cache, there.plan, backend=backend)
    assert_bitwise_equal(prepared.q, wanted.q)
    assert_bitwise_equal(prepared.index_q, wanted.index_q)
    for name in ("k_pages", "v_pages", "block_keys", "ring", "ring_positions"):
        assert_bitwise_equal(getattr(there.cache, name), getattr(usual.cache, name), name)
