"""`warmup` where nothing is compiled, what it refuses, and the shapes that it goes through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashqsa import CacheLayout, LayerCache, QSAConfig, WarmupReport, warmup
from flashqsa.errors import ArgumentError, DeviceError, ShapeError
from flashqsa.warming import api
from flashqsa.warming.shapes import step_shapes

CONFIG = QSAConfig(
    hidden_size=64, q_heads=4, kv_heads=2, head_dim=32, index_heads=2, index_head_dim=16, budget_tokens=64,
    block_tokens=4, rotary_dim=8, max_positions=5000,
)  # fmt: skip


def test_on_a_cpu_there_is_nothing_to_compile() -> None:
    assert warmup(CONFIG, device="cpu") == WarmupReport()
    layout = CacheLayout.from_config(CONFIG, page_tokens=32, dtype=torch.float32)
    assert warmup(CONFIG, cache=layout, device="cpu", forms=api.FORMS).steps == 0


@pytest.mark.parametrize("name", ["max_requests", "max_rows", "max_seq_len"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bounds_are_whole_numbers_above_zero(name: str, value: Any, refuses: Any) -> None:
    with refuses(ArgumentError, "warmup", name, repr(value)):
        warmup(CONFIG, device="cpu", **{name: value})


def test_unknown_forms_and_configs_are_refused(refuses: Any) -> None:
    with refuses(ArgumentError, "warmup", "forms", "verify"):
        warmup(CONFIG, device="cpu", forms=("row_exact", "verify"))
    with refuses(ArgumentError, "warmup", "config", "dict"):
        warmup({}, device="cpu")  # type: ignore[arg-type]
    with refuses(ArgumentError, "warmup", "cache", "dict"):
        warmup(CONFIG, cache={})  # type: ignore[arg-type]


def test_caches_of_other_heads_are_refused(monkeypatch: pytest.MonkeyPatch, refuses: Any) -> None:
    monkeypatch.setattr(api, "takes_kernels", lambda device: True)
    pages = torch.zeros(1, 8, 2, 32)
    with refuses(ShapeError, "warmup", "kv_heads", "(2, 32)"):
        warmup(replace(CONFIG, kv_heads=1), cache=LayerCache(pages, pages, torch.zeros(1, 2, 16), None, None))
    with refuses(DeviceError, "warmup", "device", "meta"):
        warmup(CONFIG, cache=LayerCache(pages, pages, None, None, None), device="meta")
    with refuses(ArgumentError, "warmup", "block_keys", "None"):
        warmup(CONFIG, cache=LayerCache(pages, pages, None, None, None))


@pytest.mark.parametrize("bounds", [(1, 1, 1), (1, 7, 64), (9, 40, 1000), (256, 8192, 262_144), (4096, 100, 5000)])
@pytest.mark.parametrize("all_contexts", [False, True])
def test_shapes_stay_within_bounds_and_reach_them(bounds: tuple[int, int, int], all_contexts: bool) -> None:
    max_requests, max_rows, max_seq_len = bounds
    shapes = list(step_shapes(CONFIG, *bounds, all_contexts=all_contexts))
    assert len(shapes) == len(set(shapes))
    assert all(1 <= shape.requests <= max_requests for shape in shapes)
    assert all(1 <= shape.requests * shape.rows + shape.padding <= max_rows for shape in shapes)
    assert max(shape.rows for shape in shapes) == max_rows
    assert max(shape.requests for shape in shapes) == min(max_requests, max_rows)
    assert {shape.max_seq_len for shape in shapes} >= {max_seq_len, min(max_seq_len, CONFIG.budget_tokens)}


def test_no_range_of_numbers_is_left_out() -> None:
    """Every context has a bound with the same power of two above its blocks; of rows none is far from a bound."""
    shapes = list(step_shapes(CONFIG, 100, 3000, 5000, all_contexts=True))
    bounds = {shape.max_seq_len // 4 for shape in shapes}
    for blocks in range(1, 5000 // 4 + 1):
        assert any((blocks - 1).bit_length() == (bound - 1).bit_length() and bound >= blocks for bound in bounds)
    decode = {shape.requests for shape in shapes if shape.rows == 1}
    prefill = {shape.rows for shape in shapes if shape.requests == 1}
    for most, numbers in ((100, decode), (3000, prefill)):
        for number in range(2, most + 1):
            assert any(2 * number <= 2 * other <= 3 * number for other in numbers | {most}), number
