"""The plan, preparation and token lists cross-compile for every architecture, and take one launch each.

Launches are recorded as the launchers make them, at released shapes and at those of tensor-parallel ranks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

import triton

from flashqsa.cache import LayerCache
from flashqsa.plan import build, plan_step
from flashqsa.preparation import NormWeights, triton_prepare
from flashqsa.results import Prepared, Selection
from flashqsa.rope import RopeTable
from flashqsa.selection.triton_expand import expand_tokens_triton
from flashqsa.testing.compiling import ARCHS, SHARED_BYTES, Compiled, Launch, compile_launch, recorded_launches

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
INT32 = torch.int32
PINNED = "3.9"
"""Another Triton allocates registers in its own way."""


@dataclass(frozen=True)
class Variant:
    """One step of two requests; `spills` are the bytes a thread that may be spilled."""

    name: str
    archs: tuple[int, ...] = ARCHS
    heads: tuple[int, int] = (24, 2)
    dims: tuple[int, int, int] = (256, 128, 64)
    dtype: torch.dtype = BF16
    cache_dtype: torch.dtype | None = None
    block_tokens: int = 4
    mrope: bool = True
    gates: bool = False
    rings: bool = True
    scale: str = "tensor"
    spills: int = 0


PREPARE = (
    Variant("24 over 2"),
    Variant("text, gates copied", (86, 90), mrope=False, gates=True),
    Variant("3 over 1", (90, 120), heads=(3, 1)),
    Variant("e4m3", (89, 90, 100, 120), cache_dtype=E4M3),
    Variant("e4m3 as bytes", (80, 86), cache_dtype=E4M3, scale="float"),
    Variant("fp32", (86, 90), dtype=FP32),
    Variant("fp16 of 96 dimensions", (80, 90), heads=(8, 4), dims=(96, 32, 24), dtype=FP16),
    Variant("all rotary, no rings", (89, 90), dims=(128, 64, 64), rings=False),
    Variant("blocks of 16", (86, 90), block_tokens=16, spills=16),
    Variant("blocks of 64", (90,), block_tokens=64, spills=16),
)


def _cache(variant: Variant) -> LayerCache:
    dtype = variant.cache_dtype or variant.dtype
    dim, index_dim, _ = variant.dims
    k_pages, v_pages = torch.zeros(2, 2, 64, variant.heads[1], dim).to(dtype)
    keys = torch.zeros(2, 64 // variant.block_tokens, index_dim).to(dtype)
    ring, positions = torch.zeros(2, 2 * variant.block_tokens, index_dim, dtype=variant.dtype), None
    if variant.rings:
        positions = torch.zeros(2, 2 * variant.block_tokens, 3, dtype=torch.int64)
    scale = torch.ones(1) if variant.scale == "tensor" else 0.5
    return LayerCache(
        k_pages, v_pages, keys, ring if variant.rings else None, positions,
        k_scale=scale if dtype == E4M3 else None, v_scale=scale if dtype == E4M3 else None,
    )  # fmt: skip


def _step(variant: Variant) -> dict[str, object]:
    """Arguments of `plan_step`: nothing is cached, nothing reserved."""
    return dict(
        query_starts=torch.tensor([0, 5, 9], dtype=INT32), seq_lens=torch.tensor([21, 30], dtype=INT32),
        page_table=torch.tensor([[0], [1]], dtype=INT32), page_tokens=64, block_tokens=variant.block_tokens,
        topk_blocks=512, max_query_len=5, max_seq_len=30, num_pages=2, num_rows=9,
        ring_ids=torch.tensor([1, 0], dtype=INT32) if variant.rings else None,
        ring_tokens=2 * variant.block_tokens if variant.rings else None,
    )  # fmt: skip


@functools.cache
def _prepare_launches(variant: Variant, native: bool) -> list[Launch]:
    plan = plan_step(**_step(variant))  # type: ignore[arg-type]
    cache = _cache(variant)
    dim, index_dim, rotary_dim = variant.dims
    q_gate = torch.zeros(9, variant.heads[0], 2 * dim, dtype=variant.dtype)
    kv = torch.zeros(9, variant.heads[1], dim, dtype=variant.dtype)
    index_qk = torch.zeros(9, 5, index_dim, dtype=variant.dtype)
    weights = (torch.zeros(n, dtype=variant.dtype) for n in (dim, dim, index_dim, index_dim))
    half = rotary_dim // 2
    section = (half - 2 * (half // 3), half // 3, half // 3) if variant.mrope else None
    gate = q_gate[..., dim:]
    index_q = index_qk[:, :-1].to(variant.cache_dtype or variant.dtype)
    out = Prepared(index_q, q_gate[..., :dim].clone(), gate.clone() if variant.gates else gate)
    with pytest.MonkeyPatch.context() as patch, recorded_launches() as launches:
        if native:
            patch.setattr(triton_prepare, "_writable", lambda x: x)
        triton_prepare.prepare_triton(
            q_gate, kv, kv, index_qk, torch.zeros(3, 9, dtype=torch.int64),
            RopeTable(torch.zeros(99, rotary_dim), section), NormWeights(*weights), cache, plan, out,
        )  # fmt: skip
    return launches


def _compiled(launch: Launch, arch: int) -> Compiled:
    compiled = compile_launch(launch, arch)
    assert compiled.shared_bytes <= SHARED_BYTES[arch], f"{compiled.shared_bytes} bytes of shared memory"
    assert ".tf32" not in compiled.ptx
    return compiled


def _judge_registers(spills: int, *compiled: Compiled) -> None:
    """Last in a test: with another Triton the rest is tested and this is skipped."""
    if not triton.__version__.startswith(f"{PINNED}."):
        pytest.skip(f"registers and spills are judged with triton {PINNED}, not {triton.__version__}")
    for each in compiled:
        assert each.spill_bytes <= spills, f"{each.spill_bytes} bytes spilled of {each.registers} registers"
        assert each.registers <= 144, f"{each.registers} registers leave too few programs of a warp to a multiprocessor"


@pytest.mark.parametrize(
    ("variant", "arch"), [pytest.param(v, arch, id=f"{v.name}, sm_{arch}") for v in PREPARE for arch in v.archs]
)
def test_prepare_compiles(variant: Variant, arch: int) -> None:
    """One launch whatever is asked for; products are not fused with sums, float8 keeps NaN."""
    (launch,) = _prepare_launches(variant, arch >= 89)
    compiled = _compiled(launch, arch)
    assert "fma.rn" not in compiled.ptx
    if variant.cache_dtype == E4M3 and arch >= 89:
        assert ".NaN" in compiled.ptx
        assert "e4m3x2" in compiled.ptx
    _judge_registers(variant.spills, compiled)


def test_fault_50_a_step_of_any_size_is_prepared_in_one_launch() -> None:
    """Also one that closes 8,192 blocks; and a step without rows launches nothing."""
    for rows, launched in ((32_768, 1), (1, 1), (0, 0)):
        plan = plan_step(
            torch.tensor([0, rows], dtype=INT32), torch.tensor([rows], dtype=INT32), torch.zeros(1, 1, dtype=INT32),
            page_tokens=32_768, block_tokens=4, topk_blocks=8, max_query_len=rows, max_seq_len=rows,
        )  # fmt: skip
        pages = torch.zeros(1, 32_768, 1, 8)
        cache = LayerCache(pages, pages, torch.zeros(1, 8_192, 8), None, None)
        x, weights = torch.zeros(rows, 2, 16), [torch.zeros(8) for _ in range(4)]
        out = Prepared(x[:, :1, :8], x[..., :8], x[..., 8:])
        with recorded_launches() as launches:
            triton_prepare.prepare_triton(
                x, x[:, :1, :8], x[:, :1, :8], x[..., :8], torch.zeros(3, rows, dtype=torch.int64),
                RopeTable(torch.zeros(9, 4)), NormWeights(*weights), cache, plan, out,
            )  # fmt: skip
        assert len(launches) == launched


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("contiguous", [False, True], ids=["paged", "contiguous"])
def test_plan_compiles(monkeypatch: pytest.MonkeyPatch, arch: int, contiguous: bool) -> None:
    """One launch plans a step, and one refills a plan from other tensors."""
    monkeypatch.setattr(build, "takes_kernels", lambda device: True)
    monkeypatch.setattr(build, "values_are_checked", lambda device: False)
    step = _step(Variant("plan"))
    if contiguous:
        step |= dict(page_table=None, page_tokens=None, num_pages=None, first_slots=torch.zeros(2, dtype=torch.int64))
    with recorded_launches() as launches:
        plan = plan_step(**step)  # type: ignore[arg-type]
        assert len(launches) == 1
        edited = {name: x.clone() if isinstance(x, torch.Tensor) else x for name, x in step.items()}
        plan_step(**edited, out=plan)  # type: ignore[arg-type]
        assert len(launches) == 2
    _judge_registers(0, *[_compiled(launch, arch) for launch in launches])


@pytest.mark.parametrize("arch", ARCHS)
def test_expand_tokens_compiles(arch: int) -> None:
    plan = plan_step(**_step(Variant("expand")))  # type: ignore[arg-type]
    selection = Selection(torch.zeros(9, 512, dtype=INT32), *torch.zeros(1, 9, dtype=INT32), None,
                          *torch.zeros(2, 9, dtype=INT32))  # fmt: skip
    with recorded_launches() as launches:
        expand_tokens_triton(selection, plan, torch.empty(9, 2052, dtype=INT32), tail_tokens=3)
    (launch,) = launches
    _judge_registers(0, _compiled(launch, arch))
