"""One call of `prepare` by kernel: what it writes and returns, in every layout, dtype and dimension."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from flashqsa.cache.state import read_slots
from flashqsa.preparation import prepare
from flashqsa.preparation.triton_heads import encode_e4m3
from flashqsa.results import Prepared
from flashqsa.testing import Step, StepCase, assert_bitwise_equal, guarded_like, make_step, poison

E4M3 = torch.float8_e4m3fn
RAGGED = ((0, 13), (5, 1), (62, 3), (0, 1), (30, 6), (64, 1), (0, 0), (7, 5), (11, 0))
FEW = ((0, 9), (6, 1), (22, 3))

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
    StepCase("blocks-of-3", RAGGED, block_tokens=3, page_tokens=81),
    StepCase("blocks-of-8", RAGGED, block_tokens=8, page_tokens=80),
    StepCase("blocks-of-32", ((0, 40), (30, 9), (63, 1), (33, 31)), block_tokens=32, page_tokens=64),
    StepCase("one-head-each", RAGGED, q_heads=1, kv_heads=1, index_heads=1),
    StepCase("dim-22", RAGGED, index_head_dim=40, head_dim=22, rotary_dim=6),
    StepCase("rotary-all", RAGGED, rotary_dim=16),
    StepCase("rotary-none", RAGGED, rotary_dim=0),
    StepCase("padding", RAGGED, padding_rows=3, padding_requests=2, speculative_rows=5),
    StepCase("long-ring", RAGGED, speculative_rows=33, mrope=True),
    StepCase("mrope", RAGGED, mrope=True, rotary_dim=14),
    StepCase("half-table", RAGGED, rope_dtype=torch.float16, mrope=True),
    StepCase("nothing", ()),
    StepCase("only-padding", ((0, 0),), padding_rows=2),
)

DIMS = ((64, 32, 16), (96, 32, 24), (128, 64, 32), (192, 96, 96), (256, 128, 64))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_prepare_writes_and_returns_what_torch_does(same_as_torch: Any, case: StepCase) -> None:
    """16 bits here, since the roundings show there; fp32 in the tests of fewer rows."""
    _, prepared = same_as_torch(dataclasses.replace(case, dtype=torch.float16), seed=1)
    assert prepared.q.dtype == prepared.index_q.dtype == torch.float16


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prepare_in_bf16_writes_and_returns_what_torch_does(same_as_torch: Any, case: StepCase) -> None:
    same_as_torch(dataclasses.replace(case, dtype=torch.bfloat16), seed=1)


@pytest.mark.parametrize(("dim", "index_dim", "rotary"), DIMS, ids=str)
def test_prepare_serves_every_head_dimension(
    same_as_torch: Any, dtype: torch.dtype, dim: int, index_dim: int, rotary: int
) -> None:
    case = StepCase(
        "dims", FEW, head_dim=dim, index_head_dim=index_dim, rotary_dim=rotary, dtype=dtype, mrope=True, q_heads=3,
        kv_heads=1,
    )  # fmt: skip
    same_as_torch(case, seed=2)


@pytest.mark.parametrize("mrope", [False, True], ids=["text", "mrope"])
def test_prepare_equals_the_definition(same_as_torch: Any, dtype: torch.dtype, mrope: bool) -> None:
    """Row by row, head by head, block by block."""
    case = StepCase("definition", FEW, dtype=dtype, mrope=mrope, rotary_dim=14, speculative_rows=2, padding_rows=1)
    same_as_torch(case, seed=3, expected="reference")


MIXED = {
    "e4m3": dict(kv_dtype=E4M3, index_dtype=E4M3),
    "e4m3-packed": dict(kv_dtype=E4M3, layout="packed"),
    "e4m3-hnd": dict(kv_dtype=E4M3, index_dtype=E4M3, layout="hnd"),
    "fp32-pages": dict(kv_dtype=torch.float32, index_dtype=torch.float32),
    "fp16-pages": dict(kv_dtype=torch.float16, index_dtype=torch.float16),
}


@pytest.mark.parametrize("dtypes", MIXED.values(), ids=MIXED.keys())
def test_fault_39_prepare_casts_to_what_the_caches_hold(
    same_as_torch: Any, dtype: torch.dtype, dtypes: dict[str, Any]
) -> None:
    """Float8 with scales of 0.37 and 1.9; it goes as bytes where nothing converts it, as in the interpreter."""
    same_as_torch(StepCase("mixed", FEW, dtype=dtype, head_dim=64, index_head_dim=32, **dtypes), seed=4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [MIXED["e4m3"], MIXED["e4m3-packed"]], ids=["e4m3", "e4m3-packed"])
def test_bytes_and_conversions_of_float8_are_the_same(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, prepare_hostile: Any, dtypes: dict[str, Any]
) -> None:
    """The form of older architectures beside the native one."""
    from flashqsa.preparation import triton_prepare

    case = StepCase("bytes", RAGGED, dtype=torch.bfloat16, head_dim=128, index_head_dim=64, **dtypes)
    native, bytewise = (make_step(case, seed=5, device=device, written=False) for _ in range(2))
    prepare_hostile(native)
    monkeypatch.setattr(triton_prepare, "_writable", lambda x: x.view(torch.uint8) if x.dtype == E4M3 else x)
    prepare_hostile(bytewise)
    for name in ("k_pages", "v_pages", "block_keys"):
        assert_bitwise_equal(getattr(bytewise.cache, name), getattr(native.cache, name), name)


@triton.jit
def _encode_kernel(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, encode_e4m3(tl.load(x_ptr + i, mask=i < N, other=0.0)), mask=i < N)


def test_float8_is_encoded_as_torch_does(device: torch.device) -> None:
    """Every code, the middles between neighbours, what lies just beside them, subnormal numbers, overflow, NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = codes[codes.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    points = torch.cat([finite, middles])
    beside = [torch.nextafter(points, torch.tensor(side)) for side in (torch.inf, -torch.inf)]
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 449.0, -480.0, 3e38, 1e-45, -1e-45, 2.0**-10])
    x = torch.cat([points, *beside, special])
    wanted = x.clamp(-448, 448).to(E4M3)
    got = torch.full((len(x),), 0x55, dtype=torch.uint8, device=device)
    _encode_kernel[(triton.cdiv(len(x), 256),)](x.to(device), got, N=len(x), BLOCK=256)
    got = got.cpu().view(E4M3)
    assert torch.equal(got.float().isnan(), wanted.float().isnan())
    real = ~wanted.float().isnan()
    assert_bitwise_equal(got[real], wanted[real], "codes")


SCALES = {
    "floats": lambda scale, device: scale,
    "tensors": lambda scale, device: torch.tensor([scale], device=device),
    "scalars": lambda scale, device: torch.tensor(scale, device=device),
}


@pytest.mark.parametrize("kinds", [("floats", "floats"), ("tensors", "scalars"), ("floats", "tensors")], ids=str)
def test_scales_are_floats_or_tensors(same_as_torch: Any, device: torch.device, kinds: tuple[str, str]) -> None:
    """Also one of each; and pages that are not float8 are divided by a scale as well."""
    for kv_dtype in (E4M3, torch.float32):
        case = StepCase("scaled", FEW, dtype=torch.float16, kv_dtype=kv_dtype, head_dim=64)

        def change(step: Step) -> Step:
            k_scale, v_scale = (SCALES[kind](scale, device) for kind, scale in zip(kinds, (0.37, 1.9), strict=True))
            return dataclasses.replace(step, cache=dataclasses.replace(step.cache, k_scale=k_scale, v_scale=v_scale))

        step, _ = same_as_torch(case, seed=6, change=change)
        truth = step.requests[0]
        stored = read_slots(step.cache.v_pages, truth.slot_ids).cpu()
        wanted = truth.raw_v.cpu().float() / 1.9  # torch on a GPU multiplies by 1 / 1.9 instead
        assert_bitwise_equal(stored, wanted.clamp(-448, 448).to(kv_dtype), "values")


def test_float8_saturates_at_448_and_nan_stays(prepare_hostile: Any, device: torch.device) -> None:
    case = StepCase("loud", ((0, 9),), dtype=torch.float16, kv_dtype=E4M3, index_dtype=E4M3, k_scale=1e-3, v_scale=1e-3)
    step = make_step(case, seed=7, device=device, written=False)
    loud = {name: torch.full_like(getattr(step.norms, name), 5e3) for name in ("index_q", "index_k")}
    step = dataclasses.replace(step, norms=dataclasses.replace(step.norms, **loud))
    step.v[2:5] = torch.tensor([6e4, -6e4, torch.nan], dtype=torch.float16, device=device)[:, None, None]
    out = Prepared(step.index_q.to(E4M3), torch.empty_like(step.q), torch.empty_like(step.gate))
    prepared = prepare_hostile(step, out=out)
    (truth,) = step.requests
    stored = read_slots(step.cache.v_pages, truth.slot_ids).float()
    assert bool(stored[2].eq(448).all())
    assert bool(stored[3].eq(-448).all())
    assert bool(stored[4].isnan().all())
    for name, values in (
        ("k", read_slots(step.cache.k_pages, truth.slot_ids)),
        ("block keys", read_slots(step.cache.block_keys, truth.block_slot_ids)),
        ("index_q", prepared.index_q),
    ):
        wide = values.float()
        assert bool(wide.isfinite().all()), f"{name}: a value became NaN instead of 448"
        assert float(wide.abs().max()) == 448, name


@pytest.mark.parametrize("index_q_dtype", [None, E4M3, torch.float32], ids=str)
def test_prepare_fills_the_buffers_given(
    same_as_torch: Any, device: torch.device, index_q_dtype: torch.dtype | None
) -> None:
    """Strided, poisoned, between canaries; gates are copied, those of padding rows too."""
    case = StepCase("out", RAGGED, dtype=torch.float16, padding_rows=2, index_q_dtype=index_q_dtype)
    guards: list[Any] = []

    def out(step: Step) -> Prepared:
        views = {}
        for name in ("index_q", "q", "gate"):
            like = getattr(step, name)
            guards.append(guarded_like(poison(torch.empty(like.shape, dtype=like.dtype, device=device))))
            views[name] = guards[-1].view
        return Prepared(**views)

    _, prepared = same_as_torch(case, seed=8, out=out)
    for guard in guards:
        guard.assert_intact()
    assert prepared.q.data_ptr() == guards[1].view.data_ptr()


def test_prepare_may_write_queries_over_its_input(device: torch.device, prepare_hostile: Any) -> None:
    """Engines give q its place inside the projection's own buffer."""
    for dim in (16, 96):
        case = StepCase("in-place", FEW, head_dim=dim, padding_rows=1)
        plain = prepare_hostile(make_step(case, seed=9, device=device, written=False))
        step = make_step(case, seed=9, device=device, written=False)
        out = Prepared(index_q=torch.empty_like(plain.index_q), q=step.q_gate[..., :dim], gate=step.gate)
        inputs = (step.q_gate, step.k, step.v, step.index_qk, step.rope_positions)
        prepare(*inputs, step.rope, step.norms, step.cache, step.plan, out=out, backend="triton")
        assert_bitwise_equal(step.q_gate[..., :dim], plain.q)
        assert_bitwise_equal(step.gate, plain.gate)


def test_fault_53_dimensions_past_the_rotary_ones_are_normed_and_nothing_else(
    prepare_hostile: Any, device: torch.device, dtype: torch.dtype
) -> None:
    case = StepCase("partial", FEW, mrope=True, rotary_dim=6, head_dim=20, index_head_dim=24, dtype=dtype)
    step, still = (make_step(case, seed=10, device=device, written=False) for _ in range(2))
    still.rope_positions.zero_()
    results = [prepare_hostile(each) for each in (step, still)]
    for name in ("q", "index_q"):
        moved, unmoved = (getattr(result, name)[step.live_rows] for result in results)
        assert_bitwise_equal(moved[..., 6:], unmoved[..., 6:], f"{name}: dimensions past the rotary ones")
        assert not torch.equal(moved[..., :6], unmoved[..., :6]), f"{name}: nothing rotated"


def test_fault_54_three_axes_that_all_differ_in_a_view_with_a_longer_row_stride(
    same_as_torch: Any, prepare_hostile: Any, device: torch.device
) -> None:
    case = StepCase("axes", FEW, mrope=True, rotary_dim=14)
    step, prepared = same_as_torch(case, seed=11)
    live = step.live_rows
    assert step.rope_positions.stride(0) > step.num_rows
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert not torch.equal(step.rope_positions[a, live], step.rope_positions[b, live])
    for axis in range(3):
        alone = make_step(case, seed=11, device=device, written=False)
        alone = dataclasses.replace(alone, rope_positions=step.rope_positions[axis].clone())
        assert not torch.allclose(prepare_hostile(alone).q[live], prepared.q[live], atol=1e-3), f"axis {axis} alone"


@pytest.mark.parametrize("section", [(3, 2, 2), (5, 1, 1), (7, 0, 0), (3, 0, 4), (3, 4, 0), (1, 9, 9)], ids=str)
def test_sections_of_any_lengths(same_as_torch: Any, section: tuple[int, int, int]) -> None:
    """Also axes that own nothing, and sections longer than there are frequencies."""

    def change(step: Step) -> Step:
        return dataclasses.replace(step, rope=dataclasses.replace(step.rope, mrope_section=section))

    same_as_torch(StepCase("sections", FEW, mrope=True, rotary_dim=14, speculative_rows=1), seed=12, change=change)


def test_two_runs_give_the_same_bytes(device: torch.device, prepare_hostile: Any, dtype: torch.dtype) -> None:
    steps = [make_step(StepCase("twice", FEW, dtype=dtype), seed=13, device=device, written=False) for _ in range(2)]
    results = [prepare_hostile(step) for step in steps]
    for name in ("q", "index_q"):
        assert_bitwise_equal(getattr(results[0], name), getattr(results[1], name), name)
    for name in ("k_pages", "v_pages", "block_keys", "ring", "ring_positions"):
        assert_bitwise_equal(getattr(steps[0].cache, name), getattr(steps[1].cache, name), name)
