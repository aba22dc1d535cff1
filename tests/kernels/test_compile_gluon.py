"""Union tiles in Gluon cross-compile for compute capability 9.0, two products in flight; what they do not serve."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget

from flashqsa.attention.gluon_tiles import attend_tiles_gluon
from flashqsa.attention.tokens import RowTokens
from flashqsa.cache import LayerCache
from flashqsa.errors import UnsupportedError
from flashqsa.plan import plan_step
from flashqsa.testing.compiling import SHARED_BYTES, Launch, launch_source, recorded_launches

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Variant:
    """One step of 64 new rows."""

    name: str
    heads: tuple[int, int] = (24, 2)
    dim: int = 256
    dtype: torch.dtype = BF16
    parts: int = 2
    unit_tokens: int = 4


VARIANTS = (
    Variant("24 over 2"),
    Variant("3 over 1", heads=(3, 1), parts=1),
    Variant("fp16, heads of 128", dim=128, dtype=FP16),
    Variant("single tokens, heads of 64", dim=64, unit_tokens=1),
)


def _attend(variant: Variant, *, scale: float = 0.0625, **changes: Any) -> list[Launch]:
    """Launches of a call, its cache or plan changed."""
    rows, unit = 64, variant.unit_tokens
    k_pages, v_pages = torch.zeros(2, 2, 64, variant.heads[1], variant.dim, dtype=variant.dtype)
    cache = dataclasses.replace(LayerCache(k_pages, v_pages, None, None, None), **changes)
    plan = plan_step(
        torch.tensor([0, rows], dtype=torch.int32), torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, 16, dtype=torch.int32), page_tokens=64, block_tokens=4, topk_blocks=512, max_query_len=rows,
        max_seq_len=131072,
    )  # fmt: skip
    q = torch.zeros(rows, variant.heads[0], variant.dim, dtype=variant.dtype)
    numbers = torch.zeros(2, rows, dtype=torch.int32)
    ids = torch.zeros(rows, 2048 // unit, dtype=torch.int32)
    tokens = RowTokens(ids, numbers[0], unit, numbers[1] if unit == 4 else None, plan.positions)
    with recorded_launches() as launches:
        attend_tiles_gluon(
            q, cache, plan, tokens, scale, gate=q, out=torch.empty_like(q), lse=torch.empty(rows, variant.heads[0]),
            parts=variant.parts,
        )  # fmt: skip
    return launches


def _compile(launch: Launch) -> Any:
    """Compile a recorded launch of a Gluon kernel for sm_90."""
    from triton.experimental.gluon._runtime import GluonASTSource

    source = launch_source(launch, GluonASTSource)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_attend_tiles_gluon_compiles(variant: Variant) -> None:
    _, launch = _attend(variant)
    assert launch.kernel.__name__ == "_attend_tiles_gluon_kernel"
    compiled = _compile(launch)
    assert compiled.metadata.shared <= SHARED_BYTES[90], f"{compiled.metadata.shared} bytes of shared memory"
    assert compiled.metadata.num_warps == 4 * (variant.parts + 1)
    ptx = compiled.asm["ptx"]
    kind = "f16" if variant.dtype == FP16 else "bf16"
    scores, values = (f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind}" for n in (64, variant.dim))
    assert ptx.count(scores) >= 2 * variant.parts * variant.dim // 16
    assert ptx.count(values) >= 2 * variant.parts * 4
    assert "wgmma.wait_group.sync.aligned 1" in ptx, "the products of a step run together"
    assert "cp.async.mbarrier.arrive.noinc" in ptx
    assert "max.NaN" in ptx


@pytest.mark.parametrize(
    ("variant", "options", "reason"),
    [
        (Variant("fp32", dtype=FP32), {}, "must be bf16 or fp16"),
        (Variant("96", dim=96), {}, "head dim must be one of"),
        (Variant("scaled"), {"k_scale": 2.0}, "must have no scales"),
        (Variant("unaligned"), {"k_pages": torch.zeros(2, 64, 2, 260, dtype=BF16)[..., :256]}, "multiples of 16 bytes"),
        (Variant("80 heads", heads=(80, 1), parts=1), {}, "at most 64 heads may share keys at 1 parts, got 80"),
        (Variant("negative"), {"scale": -1.0}, "must be above 0"),
    ],
    ids=lambda x: x.name if isinstance(x, Variant) else "",
)
def test_what_is_not_served_is_refused(variant: Variant, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        _attend(variant, **options)
