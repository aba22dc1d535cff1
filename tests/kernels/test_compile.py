"""Kernels cross-compile for every architecture: no spills, shared memory in reach, NaN kept, no TF32.

Launches are recorded as the launchers make them for a device of 132 multiprocessors, at released shapes. Every
architecture compiles the main path; of the others it compiles enough to see what differs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

import triton

from flashqsa.attention import triton_rows
from flashqsa.attention.tokens import RowTokens
from flashqsa.cache import LayerCache
from flashqsa.plan import plan_step
from flashqsa.results import Selection
from flashqsa.selection import triton_select
from flashqsa.testing.compiling import ARCHS, SHARED_BYTES, Compiled, Launch, compile_launch, recorded_launches

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
PINNED = "3.9"
"""The Triton that spills are judged with; another one allocates registers in its own way."""


@dataclass(frozen=True)
class Variant:
    """Arguments of one step; `rows` of each of `requests` with `context` tokens."""

    name: str
    archs: tuple[int, ...] = ARCHS
    requests: int = 1
    rows: int = 1
    context: int = 131072
    heads: tuple[int, int] = (24, 2)
    head_dim: int = 256
    index_heads: int = 4
    index_dim: int = 128
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype | None = None
    index_dtype: torch.dtype | None = None
    return_scores: bool = False
    spills: int = 0
    """Bytes a thread that may be spilled: what stays so is written down here."""


ATTEND = (
    Variant("24 over 2, split", spills=64),
    Variant("24 over 2, whole rows", (86, 90), requests=1024, spills=64),
    Variant("12 over 1", (100,), heads=(12, 1)),
    Variant("6 over 1", (90,), heads=(6, 1)),
    Variant("3 over 1", (89,), heads=(3, 1), spills=64),
    Variant("e4m3", (89, 90, 120), kv_dtype=E4M3, spills=64),
    Variant("fp16", (86,), dtype=FP16, spills=64),
    Variant("fp32", (86, 90), dtype=FP32, heads=(4, 2), head_dim=64),
    Variant("fp32, wide", (80,), dtype=FP32, spills=192),
    Variant("narrow heads", (86, 90), dtype=FP16, heads=(2, 1), head_dim=8),
)

SELECT = (
    Variant("decode"),
    Variant("four rows", rows=4),
    Variant("e4m3", (89, 90, 120), index_dtype=E4M3),
    Variant("fp16", (86,), dtype=FP16),
    Variant("fp32", (86, 90), dtype=FP32),
    Variant("fp32, 16 heads", (86, 90), dtype=FP32, rows=16, index_heads=16, spills=288),
    Variant("16 heads of 256", (86, 90), rows=16, index_heads=16, index_dim=256),
)

TOP = (
    Variant("1k", (80, 90), context=1024),
    Variant("3k with scores", (86, 90), context=3072, return_scores=True),
    Variant("8k", (80, 90, 120), context=8192),
    Variant("8k, many rows", (80, 90), requests=1024, context=8192),
    Variant("32k, many rows", (80, 90), requests=1024, context=32768),
    Variant("128k"),
    Variant("128k, more programs", (90, 100), requests=32),
    Variant("128k, many rows", requests=1024),
    Variant("1M with scores", (80, 90), context=1 << 20, return_scores=True),
    Variant("512k, many rows", (90,), requests=1024, context=1 << 19),
    Variant("512k with scores, many rows", (80, 90), requests=1024, context=1 << 19, return_scores=True),
)


@contextlib.contextmanager
def _as_on_a_gpu() -> Iterator[list[Launch]]:
    with pytest.MonkeyPatch.context() as patch, recorded_launches() as launches:
        for module in (triton_rows, triton_select):
            patch.setattr(module, "multiprocessors", lambda device: 132)
        yield launches


@functools.cache
def _launches(variant: Variant, stage: str) -> list[Launch]:
    """What selection or attention of a step would launch; nothing runs."""
    rows = variant.requests * variant.rows
    kv_dtype = variant.kv_dtype or variant.dtype
    k_pages, v_pages = torch.zeros(2, 2, 64, variant.heads[1], variant.head_dim).to(kv_dtype)
    index_dtype = variant.index_dtype or variant.dtype
    keys = torch.zeros(2, 16, variant.index_dim).to(index_dtype)
    scale = torch.ones(1) if kv_dtype == E4M3 else None
    cache = LayerCache(k_pages, v_pages, keys, None, None, k_scale=scale, v_scale=scale)
    plan = plan_step(
        (torch.arange(variant.requests + 1) * variant.rows).to(torch.int32),
        torch.zeros(variant.requests, dtype=torch.int32),
        torch.zeros(variant.requests, 16, dtype=torch.int32),
        page_tokens=64, block_tokens=4, topk_blocks=512, max_query_len=variant.rows, max_seq_len=variant.context,
    )  # fmt: skip
    ids, numbers = torch.zeros(rows, 512, dtype=torch.int32), torch.zeros(3, rows, dtype=torch.int32)
    scores = torch.zeros(rows, 512) if variant.return_scores else None
    selection = Selection(ids, numbers[0], scores, numbers[1], numbers[2])
    with _as_on_a_gpu() as launches:
        if stage == "select":
            index_q = torch.zeros(rows, variant.index_heads, variant.index_dim).to(index_dtype)
            triton_select.select_blocks_triton(index_q, cache, plan, selection, workspace_bytes=256 << 20)
        else:
            q = torch.zeros(rows, variant.heads[0], variant.head_dim, dtype=variant.dtype)
            tokens = RowTokens(ids, numbers[0], 4, numbers[1], plan.positions)
            triton_rows.attend_rows_triton(q, cache, plan, tokens, 0.0625, gate=q, out=torch.empty_like(q), lse=None)
    return launches


def _compiled(launch: Launch, arch: int) -> Compiled:
    compiled = compile_launch(launch, arch)
    assert compiled.shared_bytes <= SHARED_BYTES[arch], f"{compiled.shared_bytes} bytes of shared memory"
    assert ".tf32" not in compiled.ptx
    return compiled


def _judge_spills(variant: Variant, *compiled: Compiled) -> None:
    """Last in a test: with another Triton the rest is tested and this is skipped."""
    if not triton.__version__.startswith(f"{PINNED}."):
        pytest.skip(f"spills are judged with triton {PINNED}, not {triton.__version__}")
    for each in compiled:
        assert each.spill_bytes <= variant.spills, f"{each.spill_bytes} bytes spilled of {each.registers} registers"


def _each(variants: tuple[Variant, ...]) -> pytest.MarkDecorator:
    pairs = [pytest.param(v, arch, id=f"{v.name}, sm_{arch}") for v in variants for arch in v.archs]
    return pytest.mark.parametrize(("variant", "arch"), pairs)


@_each(ATTEND)
def test_attend_rows_compiles(variant: Variant, arch: int) -> None:
    """The rows' kernel and, where several programs share a row, the merge."""
    launches = _launches(variant, "attend")
    assert len(launches) == (1 if variant.requests == 1024 else 2)
    compiled = [_compiled(launch, arch) for launch in launches]
    assert all("max.NaN" in each.ptx for each in compiled)
    _judge_spills(variant, *compiled)


@_each(SELECT)
def test_score_blocks_compiles(variant: Variant, arch: int) -> None:
    launch = _launches(variant, "select")[0]
    assert launch.kernel.__name__ == "_score_blocks_kernel"
    compiled = _compiled(launch, arch)
    assert "max.NaN" in compiled.ptx
    _judge_spills(variant, compiled)


@_each(TOP)
def test_top_blocks_compiles(variant: Variant, arch: int) -> None:
    """One launch, whatever the context."""
    launch = _launches(variant, "select")[-1]
    assert launch.kernel.__name__ == "_top_blocks_kernel"
    _judge_spills(variant, _compiled(launch, arch))
