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


def _select(rows: int, requests: int, starts: bool, query_len: int) -> None:
    triton_ops.plan_select_triton(
        torch.zeros(rows, dtype=torch.int32), torch.zeros(requests + 1, dtype=torch.int32) if starts else None,
        requests=requests, query_len=query_len, block_tokens=4,
    )  # fmt: skip


def _expand(rows: int) -> None:
    triton_ops.plan_expand_triton(
        torch.zeros(rows, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64), topk=512
    )  # fmt: skip


def _attend(rows: int, requests: int) -> None:
    ids = torch.zeros(rows, 2052, dtype=torch.int32)
    triton_ops.plan_attend_triton(ids, ids[:, 0], requests=requests)


@each_arch
def test_plans_compile(arch: int) -> None:
    for starts, query_len in ((False, 1), (True, 4), (True, 4096)):
        with recorded_launches() as launches:
            _select(9, 3, starts, query_len)
        _compiles(launches, arch)
    with recorded_launches() as launches:
        _expand(9)
    _compiles(launches, arch)
    for rows in (9, 4096):
        with recorded_launches() as launches:
            _attend(rows, 3)
        _compiles(launches, arch, most=2)


def test_plans_are_compiled_once_for_any_numbers_of_rows_and_requests() -> None:
    with recorded_variants() as variants:
        for rows in (1, 2, 16, 100, 256):
            for requests in {1, 2, rows}:
                _select(rows, requests, False, 1)
                _attend(rows, requests)
            _expand(rows)
    assert len(variants) == 4


def _prepare(rows: int, requests: int, copies: bool) -> None:
    state = torch.zeros(9, 8, 1, 128 if copies else 140, dtype=BF16)
    table, numbers = torch.zeros(requests, 1, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    starts = torch.zeros(requests + 1, dtype=torch.int32)
    made = triton_ops.plan_prepare_triton(
        numbers, starts, numbers, table, state, key_dim=128, block_tokens=4, copies=copies
    )  # fmt: skip
    if copies:
        triton_ops.close_rings_triton(made["ring_keys"], table, state)


@each_arch
@pytest.mark.parametrize("copies", [True, False])
def test_plan_of_prepare_and_rings_compile(copies: bool, arch: int) -> None:
    for requests in (3, 20):
        with recorded_launches() as launches:
            _prepare(30, requests, copies)
        _compiles(launches, arch, most=2 if copies else 1)


def test_plan_of_prepare_is_compiled_twice_at_most() -> None:
    with recorded_variants() as variants:
        for rows in (1, 2, 16, 100, 4096):
            for requests in {1, 2, rows}:
                _prepare(rows, requests, False)
    assert len(variants) == 2
