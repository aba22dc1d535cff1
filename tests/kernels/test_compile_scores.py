"""The score kernel's own tiles of compute capability 9.0: no spills, keys by wide copies, warpgroup products."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
import torch

pytest.importorskip("triton")

from flashqsa.cache import LayerCache
from flashqsa.plan import plan_step
from flashqsa.selection import triton_scores
from flashqsa.selection.row_levels import RowLevels
from flashqsa.testing.compiling import SHARED_BYTES, Launch, compile_launch, recorded_launches

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


@dataclass(frozen=True)
class Variant:
    """One step: `rows` rows of each of 32 requests of 131,072 tokens.

    Attributes:
        programs: Programs that fit on a multiprocessor at least, by shared memory.
    """

    name: str
    programs: int
    rows: int = 1
    heads: int = 4
    dim: int = 128
    page_tokens: int = 64
    q_dtype: torch.dtype = BF16
    keys_dtype: torch.dtype = BF16


VARIANTS = (
    Variant("decode", 5),
    Variant("decode, pages of 848 tokens", 5, page_tokens=848),
    Variant("decode, e4m3", 6, q_dtype=E4M3, keys_dtype=E4M3),
    Variant("four rows", 5, rows=4),
    Variant("sixteen rows", 4, rows=16),
    Variant("prefill", 2, rows=4096),
    Variant("prefill, e4m3", 2, rows=4096, q_dtype=E4M3, keys_dtype=E4M3),
    Variant("prefill, e4m3 keys", 3, rows=4096, q_dtype=BF16, keys_dtype=E4M3),
    Variant("prefill, 16 heads of 96", 2, rows=4096, heads=16, dim=96, q_dtype=FP16, keys_dtype=FP16),
)


def _launch(variant: Variant) -> Launch:
    requests, rows = 32, variant.rows
    keys = torch.zeros(2, variant.page_tokens // 4, variant.dim).to(variant.keys_dtype)
    kv = torch.zeros(2, variant.page_tokens, 1, 8)
    plan = plan_step(
        (torch.arange(requests + 1) * rows).to(torch.int32), torch.zeros(requests, dtype=torch.int32),
        torch.zeros(requests, 16, dtype=torch.int32), page_tokens=variant.page_tokens, block_tokens=4, topk_blocks=512,
        max_query_len=rows, max_seq_len=131072,
    )  # fmt: skip
    q = torch.zeros(1, variant.heads, variant.dim).to(variant.q_dtype).expand(requests * rows, -1, -1)
    scores = torch.empty(min(requests * rows, 2048), 32768, device="meta")
    cache = LayerCache(kv, kv, keys, None, None)
    with pytest.MonkeyPatch.context() as patch, recorded_launches() as launches:
        patch.setattr(triton_scores, "_is_hopper", lambda device: True)
        config = triton_scores.score_kernel_config(q, cache, plan, len(scores))
        levels = RowLevels.of(scores.shape[1], 512, config.block_m)
        largest = torch.empty(len(scores), levels.numbers(), device="meta")
        triton_scores.score_blocks_triton(
            q, cache, plan, scores, 0, 512, config=config, multiprocessors=132, largest=largest, levels=levels
        )
    (launch,) = launches
    return launch


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_score_blocks_of_hopper_compiles(variant: Variant) -> None:
    launch = _launch(variant)
    compiled = compile_launch(launch, 90)
    assert compiled.spill_bytes == 0
    assert variant.programs * (compiled.shared_bytes + 1024) <= SHARED_BYTES[90] + 1024
    assert compiled.registers * 128 * variant.programs <= 1 << 16
    assert "wgmma.mma_async" in compiled.ptx
    assert "max.NaN" in compiled.ptx
    copies = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?(0x[0-9a-f]+|\d+)(?:, %r\d+)?;", compiled.ptx)
    assert copies
    assert min(int(size, 0) for size in copies) >= 8, "keys, and nothing else, come by wide copies"
    if variant.keys_dtype == variant.q_dtype == E4M3:
        assert "cvt.rn.f16x2.e4m3x2" in compiled.ptx
        assert "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16" in compiled.ptx or variant.rows > 8
