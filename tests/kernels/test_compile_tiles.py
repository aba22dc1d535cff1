"""Union tiles cross-compile for every architecture, at the heads of a whole model and of tensor-parallel ranks."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

import triton

from flashqsa.attention.tokens import RowTokens
from flashqsa.attention.triton_rows import attend_rows_triton
from flashqsa.attention.triton_tiles import TilesKernelConfig, attend_tiles_triton
from flashqsa.cache import LayerCache
from flashqsa.plan import plan_step
from flashqsa.testing.compiling import ARCHS, SHARED_BYTES, Launch, compile_launch, recorded_launches

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
PINNED = "3.9"
"""Another Triton allocates registers in its own way."""


@dataclass(frozen=True)
class Variant:
    """One step of 64 new rows; `spills` are the bytes a thread that may be spilled."""

    name: str
    archs: tuple[int, ...]
    heads: tuple[int, int] = (24, 2)
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    spills: int = 0

    @property
    def wide(self) -> bool:
        return self.dtype == FP32


VARIANTS = (
    Variant("24 over 2", ARCHS, spills=512),
    Variant("6 over 1", (90,), (6, 1), spills=640),
    Variant("e4m3", (89, 90, 120), kv_dtype=E4M3, spills=640),
    Variant("fp16", (86, 90), dtype=FP16, spills=512),
    Variant("fp32", (80, 90), dtype=FP32, spills=192),
)


@functools.cache
def _launches(variant: Variant) -> list[Launch]:
    rows, kv_dtype = 64, variant.kv_dtype or variant.dtype
    k_pages, v_pages = torch.zeros(2, 2, 64, variant.heads[1], 256).to(kv_dtype)
    scale = torch.ones(1) if kv_dtype == E4M3 else None
    cache = LayerCache(k_pages, v_pages, None, None, None, k_scale=scale, v_scale=scale)
    plan = plan_step(
        torch.tensor([0, rows], dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, 16, dtype=torch.int32), page_tokens=64, block_tokens=4, topk_blocks=512, max_query_len=rows,
        max_seq_len=131072,
    )  # fmt: skip
    q = torch.zeros(rows, variant.heads[0], 256, dtype=variant.dtype)
    numbers = torch.zeros(2, rows, dtype=torch.int32)
    tokens = RowTokens(torch.zeros(rows, 512, dtype=torch.int32), numbers[0], 4, numbers[1], plan.positions)
    config = TilesKernelConfig.choose(variant.heads[0] // variant.heads[1], variant.wide)
    with recorded_launches() as launches:
        attend_tiles_triton(q, cache, plan, tokens, 0.0625, gate=q, out=torch.empty_like(q), lse=None, config=config)
    return launches


@pytest.mark.parametrize(
    ("variant", "arch"), [pytest.param(v, arch, id=f"{v.name}, sm_{arch}") for v in VARIANTS for arch in v.archs]
)
def test_attend_tiles_compiles(variant: Variant, arch: int) -> None:
    _, launch = _launches(variant)
    assert launch.kernel.__name__ == "_attend_tiles_kernel"
    compiled = compile_launch(launch, arch)
    assert compiled.shared_bytes <= SHARED_BYTES[arch], f"{compiled.shared_bytes} bytes of shared memory"
    assert ".tf32" not in compiled.ptx
    assert "max.NaN" in compiled.ptx
    if triton.__version__.startswith(PINNED):
        assert compiled.spill_bytes <= variant.spills, f"{compiled.spill_bytes} bytes spilled"


@pytest.mark.parametrize("arch", [80, 90])
def test_union_lists_compile(arch: int) -> None:
    launch, _ = _launches(VARIANTS[0])
    assert launch.kernel.__name__ == "_union_lists_kernel"
    compiled = compile_launch(launch, arch)
    assert compiled.shared_bytes <= SHARED_BYTES[arch]
    if triton.__version__.startswith(PINNED):
        assert compiled.spill_bytes == 0


@pytest.mark.parametrize("arch", [86, 90])
def test_the_pass_over_left_rows_compiles(arch: int) -> None:
    """Whole rows in a loop."""
    k_pages, v_pages = torch.zeros(2, 2, 64, 2, 256, dtype=BF16)
    plan = plan_step(
        torch.tensor([0, 64], dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, 16, dtype=torch.int32), page_tokens=64, block_tokens=4, topk_blocks=512, max_query_len=64,
        max_seq_len=131072,
    )  # fmt: skip
    q, numbers = torch.zeros(64, 24, 256, dtype=BF16), torch.zeros(3, 64, dtype=torch.int32)
    tokens = RowTokens(torch.zeros(64, 512, dtype=torch.int32), numbers[0], 4, numbers[1], plan.positions)
    cache = LayerCache(k_pages, v_pages, None, None, None)
    with recorded_launches() as launches:
        attend_rows_triton(
            q, cache, plan, tokens, 0.0625, gate=q, out=torch.empty_like(q), lse=None, served=numbers[2]
        )  # fmt: skip
    (launch,) = launches
    compiled = compile_launch(launch, arch)
    assert compiled.shared_bytes <= SHARED_BYTES[arch]
    if triton.__version__.startswith(PINNED):
        assert compiled.spill_bytes <= 64, f"{compiled.spill_bytes} bytes spilled"
