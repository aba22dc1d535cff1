"""Benchmarks of whole steps on a GPU: their shapes, what they say of a peer, and what is reported of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.gpu_decode import Shape

from benchmarks import gpu_curves, gpu_decode, gpu_stack, report_pictures, report_steps, tables

FACTS = {
    "environment": {"commit": "0123456789ab", "date": "2030-01-02", "device": "A card", "cuda": "13", "python": "3.11",
                    "torch": "2", "triton": "3"},
    "command": "python -m benchmarks gpu-curves", "copy_bytes_per_us": 4e6, "matmul_flop_per_us": 8e8,
}  # fmt: skip


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


@pytest.fixture(scope="module")
def decode_work() -> gpu_decode.Workload:
    return gpu_decode.Workload(Shape(2, 4096), generator())


def spreads(**medians: float) -> dict[str, dict[str, float]]:
    return {stage: {"median_us": time} for stage, time in medians.items()}


def curve_row(curves: dict[str, str], *, vllm: bool = True, **shape: int) -> tables.Row:
    numbers = {"requests": 1, "context": 4096, "rows": 1} | shape
    ours = spreads(all=10.0 * numbers["rows"], select=4.0, attend=6.0)
    theirs = spreads(all=20.0, select=8.0, expand=4.0, attend=8.0) if vllm else None
    return FACTS | numbers | {
        "measure": "gpu curves", "curves": curves, "name": "a step", "floor_us": 2.0, "flashqsa": ours, "vllm": theirs,
    }  # fmt: skip


def test_curves_reach_what_they_are_for():
    by_name = {curve.name: curve for curve in gpu_curves.CURVES}
    for name in ("context, 1 request", "context, 32 requests"):
        contexts = [shape.context for shape in by_name[name].shapes]
        assert contexts[0] == 4096
        assert contexts[-1] == 1 << 20
    assert [shape.requests for shape in by_name["requests at 32,768"].shapes][-1] == 512
    assert [shape.rows for shape in by_name["rows of 32 requests at 131,072"].shapes][-1] == 16
    for curve in gpu_curves.CURVES:
        assert len({getattr(shape, curve.axis) for shape in curve.shapes}) == len(curve.shapes)


def test_a_shape_on_two_curves_is_measured_once():
    points = gpu_curves.points_of(gpu_curves.CURVES)
    assert points[Shape(32, 131072)] == {"context, 32 requests": "context", "rows of 32 requests at 131,072": "rows"}
    assert len(points) < sum(len(curve.shapes) for curve in gpu_curves.CURVES)


def test_floors_count_keys_once_and_selected_blocks_once(decode_work: gpu_decode.Workload):
    assert decode_work.key_bytes() == 2 * 1024 * 128 * 2
    assert decode_work.attended_bytes() == 2 * 512 * 4 * 2 * 2 * 256 * 2


def cudnn_like(ids: torch.Tensor) -> Callable[..., dict[str, torch.Tensor]]:
    def select(
        q: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, *, seq_q: int, top_k: int
    ) -> dict[str, torch.Tensor]:
        assert (q.shape, keys.shape) == ((2, 4, 128), (129, 16, 1, 128))
        assert (table.shape, lens.tolist(), seq_q, top_k) == ((2, 64), [4096, 4096], 1, 512)
        return {"block_ids": ids}

    return select


def test_cudnn_is_measured_where_it_selects_the_same(decode_work: gpu_decode.Workload, capsys: Any):
    ids = decode_work.selection.block_ids
    assert gpu_decode.cudnn_call(cudnn_like(ids.flip(1)), decode_work) is not None
    assert gpu_decode.cudnn_call(cudnn_like(ids * 0 + 7), decode_work) is None
    assert "selects other blocks at 2 x 4096" in capsys.readouterr().out
    assert gpu_decode.cudnn_call(lambda *_, **__: 1 // 0, decode_work) is None
    assert "fails at 2 x 4096: ZeroDivisionError" in capsys.readouterr().out


def test_without_its_packages_cudnn_is_left_out_with_a_line(monkeypatch: pytest.MonkeyPatch, capsys: Any):
    monkeypatch.setattr(gpu_decode, "CUDNN", "no_such_package.selection")
    assert gpu_decode.peer_cudnn() is None
    assert "cuDNN's selection is left out: No module named 'no_such_package'" in capsys.readouterr().out


def test_cudnns_table_holds_the_rows_that_have_it():
    row = curve_row({}) | {"select_floor_us": 1.0, "cudnn": spreads(select=5.0)}
    text = report_steps.cudnn_table([row, curve_row({}), row | {"cudnn": None}, row | {"vllm": None}])
    assert "| a step | 5.0 | 8.0 | 4.0 | 0.80 | 1.0 |" in text
    assert "| a step | 5.0 | not measured | 4.0 | 0.80 | 1.0 |" in text
    assert len(text.splitlines()) == 4


def test_a_line_on_the_terminal_names_what_was_measured():
    row = curve_row({}) | {"cudnn": spreads(select=5.0), "wide_over_tight": 1.05}
    text = gpu_decode.told(row)
    assert "FlashQSA all 10.0 select 4.0 attend 6.0, vLLM all 20.0" in text
    assert text.endswith("ratio 0.50, cuDNN select 5.0; wide over tight 1.05, at most 1.1")
    alone = gpu_decode.told(curve_row({}, vllm=False) | {"cudnn": None})
    assert alone.endswith("FlashQSA all 10.0 select 4.0 attend 6.0")
    times = {"flashqsa": {"median_us": 3000.0}, "projections": {"median_us": 1000.0}}
    stack_row = {"name": "a stack", "floor_us": 500.0, "difference": 0.03, "times": times}
    assert gpu_stack.told(stack_row).endswith("floor 0.500 ms, flashqsa 3.000, projections 1.000")
    times["vllm"] = {"median_us": 4000.0}
    assert gpu_stack.told(stack_row).endswith("vllm 4.000; ratio 0.75, first layers differ by 0.030")


def test_without_results_nothing_is_shown():
    sections = report_steps.sections([], [], [], [])
    assert {sections[name] for name in ("gpu-cudnn", "gpu-curves", "gpu-stack", "sweep")} == {tables.NOT_MEASURED}
    assert report_pictures.growth([]) is None
    assert report_pictures.growth([curve_row({"rows": "rows"})]) is None, "one point is no curve"


def test_growth_is_drawn_with_its_floor_and_by_what_grows():
    shared = curve_row({"rows": "rows", "context": "context"})
    rows = [shared, curve_row({"rows": "rows"}, rows=2), curve_row({"context": "context"}, vllm=False, context=65536)]
    picture = report_pictures.growth(rows)
    assert picture is not None
    lines = re.findall(r'polyline class="line (.)" points="([^"]+)"', picture)
    assert [style for style, _ in lines] == ["a", "d", "a", "b", "d"], "one panel has vLLM's figures, the other not"
    heights = [[float(point.split(",")[1]) for point in line.split()] for _, line in lines]
    assert heights[2][0] > heights[2][1] == heights[3][0] == heights[3][1], "two rows take ours as long as theirs"
    assert heights[4][0] == heights[4][1] > heights[2][0]
    assert "64k" in picture
    section = report_steps.sections([], rows, [], [])
    assert "img/growth.svg" in section["gpu-curves"]
    assert "0123456789ab" in section["gpu-curves-origin"]


def test_the_stack_is_the_released_one_and_fits_its_card():
    found = {(shape.heads, shape.requests, shape.rows) for shape in gpu_stack.SHAPES}
    assert found == {(heads, *step) for heads in ((24, 2), (6, 1)) for step in ((1, 1), (32, 1), (1, 8192))}
    assert gpu_stack.weight_numbers((24, 2)) == 2560 * (24 * 512 + 4 * 256 + 5 * 128 + 24 * 256)
    largest = max(map(gpu_stack.cache_bytes, gpu_stack.SHAPES))
    assert largest == 32 * 131072 * (2 * 2 * 256 * 2 + 128 // 4 * 2)
    assert gpu_stack.LAYERS * (largest + 2 * gpu_stack.weight_numbers((24, 2))) < 115e9


@pytest.fixture(scope="module")
def stack() -> gpu_stack.Stack:
    return gpu_stack.Stack(gpu_stack.Shape(2, 1, 3000, (6, 1)), generator(), layers=2)


def test_a_stack_passes_its_gate_and_its_floor_counts_what_it_reads(stack: gpu_stack.Stack):
    with torch.no_grad():
        errors, selection = stack.gate_correctness()
        assert not torch.equal(stack.flashqsa(), stack.projections())
    assert errors["output"] < 4e-3
    ceilings = gpu_stack.Ceilings(2.0, 1.0)
    numbers = gpu_stack.weight_numbers((6, 1)) + 2 * 750 * 128 + 2 * 2048 * 512
    assert stack.floor_us(selection, ceilings) == 2 * numbers
    prefill = gpu_stack.Stack(gpu_stack.Shape(1, 20, 3000, (6, 1)), generator(), layers=1)
    with torch.no_grad():
        _, selection = prefill.gate_correctness()
    scored = sum((2980 + row + 1) // 4 for row in range(20))
    attended = 20 * 2048 + sum((2980 + row + 1) % 4 for row in range(20))
    flop = 2 * 20 * gpu_stack.weight_numbers((6, 1)) + 2 * scored * 512 + 4 * attended * 6 * 256
    assert prefill.floor_us(selection, ceilings) == flop


def test_rings_of_both_engines_hold_the_same(stack: gpu_stack.Stack):
    cache = stack.layers[1].cache
    ring = gpu_stack.Peer(None, stack).rings[1]
    assert ring.shape == (3, 4, 1, 128 + 12)
    assert torch.equal(ring[1:, :, 0, :128], cache.ring)
    positions = ring[1:, :, 0, 128:].contiguous().view(torch.int64)
    assert torch.equal(positions, cache.ring_positions)
    assert all(position % 4 == slot for slot, position in enumerate(positions[0, :, 0].tolist()))


def test_the_stacks_table_shows_losses_and_what_was_not_measured():
    times = {"flashqsa": {"median_us": 3000.0}, "projections": {"median_us": 1000.0}, "vllm": {"median_us": 2000.0}}
    row = {"heads": [6, 1], "requests": 1, "rows": 8192, "context": 131072, "floor_us": 600.0, "times": times}
    text = report_steps.stack_table([row])
    assert "| 6/1 | 1 x 8,192 at 131,072 | 2.000 | 3.000 | 1.50 | 1.000 | 0.600 | 20 % |" in text
    del times["vllm"]
    assert "| not measured | 3.000 | not measured | 1.000 |" in report_steps.stack_table([row])
