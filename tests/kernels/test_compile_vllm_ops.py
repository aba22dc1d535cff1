"""Kernels of vLLM's operators cross-compile for every architecture, and are few launches and variants."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from flashqsa.integrations.vllm_plugin import triton_ops
from flashqsa.testing.compiling import ARCHS, Launch, compile_launch, recorded_launches, recorded_variants

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
each_arch = pytest.mark.parametrize("arch", ARCHS)


def _compiles(launches: list[Launch], arch: int, *, most: int = 1) -> None:
    assert 1 <= len(launches) <= most
    for launch in launches:
        assert compile_launch(launch, arch).spill_bytes == 0


def _store(rows: int, dtype: torch.dtype = BF16, width: int = 128) -> None:
    triton_ops.store_cache_rows_triton(
        torch.zeros(3, 16, width).to(dtype), torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, width).to(dtype)
    )


@each_arch
@pytest.mark.parametrize(("dtype", "width"), [(BF16, 128), (E4M3, 128), (torch.int64, 3)], ids=str)
def test_store_cache_rows_compiles(dtype: torch.dtype, width: int, arch: int) -> None:
    with recorded_launches() as launches:
        _store(32, dtype, width)
    _compiles(launches, arch)


def test_store_cache_rows_is_compiled_once_for_any_number_of_rows() -> None:
    with recorded_variants() as variants:
        for rows in (1, 2, 16, 100, 4096):
            _store(rows)
    assert len(variants) == 1
