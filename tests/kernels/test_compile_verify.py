"""Verification cross-compiles for compute capability 9.0, two products in flight; what it does not serve."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget

from flashqsa.attention.gluon_verify import attend_verify_gluon
from flashqsa.attention.tokens import RowTokens
from flashqsa.cache import LayerCache
from flashqsa.errors import UnsupportedError
from flashqsa.plan import plan_step
from flashqsa.testing.compiling import SHARED_BYTES, Launch, compile_launch, launch_source, recorded_launches

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Variant:
    """One step of 3 requests."""

    name: str
    heads: tuple[int, int] = (24, 2)
    rows: int = 4
    dim: int = 256
    dtype: torch.dtype = BF16
    topk: int = 512


VARIANTS = (
    Variant("24 over 2"),
    Variant("6 over 1, 8 rows", heads=(6, 1), rows=8),
    Variant("3 over 1, fp16, heads of 128", heads=(3, 1), rows=16, dim=128, dtype=FP16),
    Variant("16 over 1, heads of 64", heads=(16, 1), dim=64),
)


def _attend(variant: Variant, *, scale: float = 0.0625, **changes: Any) -> list[Launch]:
    """Launches of a call, its cache changed."""
    requests, rows = 3, 3 * variant.rows
    k_pages, v_pages = torch.zeros(2, 2, 64, variant.heads[1], variant.dim, dtype=variant.dtype)
    cache = dataclasses.replace(LayerCache(k_pages, v_pages, None, None, None), **changes)
    plan = plan_step(
        torch.arange(requests + 1, dtype=torch.int32) * variant.rows, torch.zeros(requests, dtype=torch.int32),
        torch.zeros(requests, 16, dtype=torch.int32), page_tokens=64, block_tokens=4, topk_blocks=variant.topk,
        max_query_len=variant.rows, max_seq_len=131072,
    )  # fmt: skip
    q = torch.zeros(rows, variant.heads[0], variant.dim, dtype=variant.dtype)
    numbers = torch.zeros(2, rows, dtype=torch.int32)
    ids = torch.zeros(rows, variant.topk, dtype=torch.int32)
    tokens = RowTokens(ids, numbers[0], 4, numbers[1], plan.positions)
    with recorded_launches() as launches:
        attend_verify_gluon(
            q, cache, plan, tokens, scale, gate=q, out=torch.empty_like(q), lse=torch.empty(rows, variant.heads[0])
        )
    return launches


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.name)
def test_spans_compile(variant: Variant) -> None:
    from triton.experimental.gluon._runtime import GluonASTSource

    _, launch, _ = _attend(variant)
    assert launch.kernel.__name__ == "_attend_spans_kernel"
    source = launch_source(launch, GluonASTSource)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=launch.options)
    assert compiled.metadata.shared <= SHARED_BYTES[90], f"{compiled.metadata.shared} bytes of shared memory"
    assert compiled.metadata.num_warps == 8
    ptx = compiled.asm["ptx"]
    kind = "f16" if variant.dtype == FP16 else "bf16"
    values = f"wgmma.mma_async.sync.aligned.m64n{variant.dim}k16.f32.{kind}.{kind}"
    assert ptx.count(values) >= 2 * 4
    assert "wgmma.wait_group.sync.aligned 1" in ptx, "the products of a step run together"
    assert "cp.async.mbarrier.arrive.noinc" in ptx
    assert "max.NaN" in ptx


@pytest.mark.parametrize("variant", VARIANTS[:3], ids=lambda v: v.name)
def test_lists_and_merge_compile(variant: Variant) -> None:
    lists, _, merge = _attend(variant)
    assert (lists.kernel.__name__, merge.kernel.__name__) == ("_verify_lists_kernel", "_merge_spans_kernel")
    for launch in (lists, merge):
        compiled = compile_launch(launch, 90)
        assert compiled.shared_bytes <= SHARED_BYTES[90]
        assert compiled.spill_bytes <= 320, f"{compiled.spill_bytes} bytes spilled"


@pytest.mark.parametrize(
    ("variant", "options", "reason"),
    [
        (Variant("fp32", dtype=FP32), {}, "must be bf16 or fp16"),
        (Variant("scaled"), {"k_scale": 2.0}, "must have no scales"),
        (Variant("long lists", topk=1025), {}, "the lists of 5 rows must fit one program, got 1025 units"),
        (Variant("24 over 1", heads=(24, 1)), {}, "4 rows with their heads must fit 64, got 24 heads"),
        (Variant("negative"), {"scale": -1.0}, "must be above 0"),
    ],
    ids=lambda x: x.name if isinstance(x, Variant) else "",
)
def test_what_is_not_served_is_refused(variant: Variant, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        _attend(variant, **options)
