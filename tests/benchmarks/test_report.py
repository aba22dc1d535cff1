"""The tables of the documentation are what the result files say."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from benchmarks.__main__ import main

from benchmarks import report, report_gpu, report_pictures, report_reported, tables
from flashqsa.errors import ArgumentError

pytestmark = pytest.mark.transformers

ENVIRONMENT = {
    "commit": "0123456789ab", "date": "2030-01-02", "cpu": "A CPU", "threads": 2, "instruction_set": "AVX9",
    "system": "Linux", "python": "3.11", "torch": "2", "transformers": "5",
}  # fmt: skip


def timed_row(measure: str, tokens: int, theirs: float, ours: float, target: float | None) -> report.Row:
    return {
        "measure": measure, "workload": "drifting", "tokens": tokens, "neighbour_overlap": 0.9,
        "transformers": {"median_ms": theirs, "p20_ms": theirs, "p80_ms": theirs},
        "flashqsa": {"median_ms": ours, "p20_ms": ours, "p80_ms": ours},
        "speedup": theirs / ours, "target_speedup": target, "share_of_floor": {"transformers": 0.1, "flashqsa": 0.2},
        "cores_used_by_others": 0.25, "environment": ENVIRONMENT, "command": "python -m benchmarks hf-layer-cpu",
    }  # fmt: skip


def test_pages_hold_what_the_results_say():
    assert main(["report", "--check"]) == 0, "run: python -m benchmarks report"


def test_a_loss_is_shown_as_one():
    text = report.time_table([timed_row("layer", 4096, theirs=50.0, ours=100.0, target=1.3)])
    assert "| 0.50 | ≥ 1.3, missed |" in text
    assert "| 4,096 | 0.90 | 50.0 (50.0 to 50.0) | 100 (100 to 100) |" in text


def test_every_table_without_results_says_so():
    sections = report.all_sections([])
    assert all(tables.NOT_MEASURED in sections[name] for name in ("layer", "layer-short", "selection", "memory"))


def test_figures_come_with_command_commit_and_machine():
    text = report.all_sections([timed_row("layer", 64, 2.0, 1.0, None)])["layer-short"]
    for fact in (
        "python -m benchmarks hf-layer-cpu",
        "0123456789ab",
        "A CPU",
        "2 threads",
        "2030-01-02",
        "at most 0.25 cores",
    ):
        assert fact in text


def test_only_text_between_markers_changes():
    page = "before\n<!-- begin: memory -->\nold\n<!-- end: memory -->\nafter\n"
    filled = report.with_sections(page, {"memory": "new"})
    assert filled == "before\n<!-- begin: memory -->\n\nnew\n\n<!-- end: memory -->\nafter\n"
    assert report.with_sections(filled, {"memory": "new"}) == filled
    with pytest.raises(KeyError):
        report.with_sections("<!-- begin: unknown -->\n<!-- end: unknown -->", {})


def test_check_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page, results = tmp_path / "page.md", tmp_path / "results.jsonl"
    page.write_text("<!-- begin: layer -->\n<!-- end: layer -->\n", encoding="utf-8")
    results.write_text(json.dumps(timed_row("layer", 64, 2.0, 1.0, None)) + "\n", encoding="utf-8")
    monkeypatch.setattr(report, "PAGES", (page,))
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    before = page.read_text(encoding="utf-8")
    assert report.run(argparse.Namespace(check=True)) == 1
    assert page.read_text(encoding="utf-8") == before
    assert report.run(argparse.Namespace(check=False)) == 0
    assert "| 2.00 |" in page.read_text(encoding="utf-8")
    assert report.run(argparse.Namespace(check=True)) == 0


def test_the_gpu_table_shows_stages_ratio_and_floor():
    stages = {"select": 10.0, "expand": 5.0, "attend": 20.0, "all": 30.0}
    spread = {stage: {"median_us": time, "p20_us": time, "p80_us": time} for stage, time in stages.items()}
    row = {"name": "1 x 8192", "floor_us": 3.0, "flashqsa": spread, "vllm": None}
    assert "| 1 x 8192 | not measured | 30.0 (10.0 / 20.0) | not measured | 3.0 | 10 % |" in report_gpu.decode_table(
        [row]
    )
    faster = {stage: {"median_us": spread[stage]["median_us"] / 2} for stage in spread}
    assert "| 15.0 (5.0 / 2.5 / 10.0) | 30.0 (10.0 / 20.0) | 2.00 |" in report_gpu.decode_table(
        [row | {"vllm": faster}]
    )


def test_the_short_gpu_table_adds_up_stages():
    spread = {"all": {"median_us": 30.0}}
    decode = {"name": "1 x 131072", "requests": 1, "rows": 1, "context": 131072, "floor_us": 3.0,
              "flashqsa": spread, "vllm": {"all": {"median_us": 20.0}}}  # fmt: skip
    times = {"flashqsa select": 300.0, "flashqsa attend": 700.0, "vllm select": 900.0, "vllm expand": 100.0}
    prefill = {"requests": 1, "rows": 8192, "context": 131072, "floors_us": {"select": 80.0, "attend": 520.0},
               "times": {name: {"median_us": us} for name, us in times.items()}}  # fmt: skip
    text = report_gpu.short_table([decode], [prefill])
    assert "| 1 x 1 rows at 131,072 | 0.020 | 0.030 | 1.50 | 0.003 |" in text
    assert "| 1 x 8,192 rows at 131,072 | not measured | 1.000 | not measured | 0.600 |" in text
    prefill["times"]["vllm attend"] = {"median_us": 3000.0}
    assert "| 1 x 8,192 rows at 131,072 | 4.000 | 1.000 | 0.25 | 0.600 |" in report_gpu.short_table([], [prefill])


def test_tables_of_long_chunks_show_losses_and_what_was_not_measured():
    times = {"flashqsa select": 300.0, "vllm select": 200.0, "flashqsa attend": 1500.0, "vllm attend": 3000.0}
    row = {
        "measure": "gpu prefill", "requests": 1, "rows": 8192, "context": 32768, "fp8_index": False, "overlap": 0.77,
        "heads": [24, 2], "churn": 0.05, "useful_tflops": 90.0, "floors_us": {"select": 80.0, "attend": 530.0},
        "times": {name: {"median_us": us} for name, us in times.items()},
    }  # fmt: skip
    text = report_gpu.prefill_table([row])
    assert "| 1 x 8,192 at 32,768 | 0.77 | 0.20 ms | 0.30 ms | 1.50 | 0.08 | 3.00 ms | 1.50 ms | 0.50 | 0.53 |" in text
    text = report_gpu.attend_table([row])
    assert "| 24/2 | 1 x 8,192 at 32,768 | 0.05 | 3,000.0 | 1,500.0 | 0.50 | not measured | 530.0 | 90 |" in text
    prepared = {"name": "1 x 1 rows", "floor_us": 1.0, "times": {"flashqsa": {"median_us": 9.0}}}
    text = report_gpu.prepare_table([prepared])
    assert "| 1 x 1 rows | not measured | 9.0 | not measured | not measured | 1.0 |" in text


def curve_row(churn: float, ours: float, theirs: float) -> report.Row:
    return {
        "measure": "gpu curve", "rows": 8192, "context": 131072, "heads": [24, 2], "churn": churn,
        "floors_us": {"attend": 500.0},
        "times": {"flashqsa attend": {"median_us": ours}, "vllm attend": {"median_us": theirs}},
    }  # fmt: skip


def points(picture: str) -> list[list[tuple[float, float]]]:
    lines = re.findall(r'points="([^"]+)"', picture)
    return [[tuple(map(float, point.split(","))) for point in line.split()] for line in lines]


def test_the_curve_has_its_points_where_the_results_are():
    picture = report_pictures.overlap_curve([curve_row(1.0, 4000, 1000), curve_row(0.0, 1000, 3000)])
    theirs, ours, floor = points(picture)  # 'row by row' was not measured
    assert ours[0][0] == theirs[0][0] < ours[1][0]
    assert ours[1][1] == theirs[0][1], "1 ms is as high in both"
    assert floor[0][1] == floor[1][1] > ours[1][1]


def test_shares_of_stages_fill_their_bars():
    stages = {"select": {"median_us": 30.0}, "attend": {"median_us": 10.0}}
    picture = report_pictures.stage_shares([{"name": "1 x 131072", "flashqsa": stages}], [])
    widths = [float(found) for found in re.findall(r'class="f." [^>]*width="([\d.]+)"', picture)]
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.2)
    assert "decode, 1 x 131,072 tokens" in picture
    assert report_pictures.pictures([], [], []) == {}


def test_reported_results_are_shown_and_others_refused(tmp_path: Path):
    assert report_reported.reported_table(tmp_path) == "None so far.\n"
    spread = {"median_us": 1500.0, "p20_us": 1.0, "p80_us": 1.0, "calls": 7}
    result = {
        "benchmark": "flashqsa bench", "shapes": {}, "backends": {}, "requests": 2, "rows": 4096,
        "page_tokens": 64, "dtype": "bfloat16", "device_name": "A card", "threads": 1,
        "versions": {"flashqsa": "0.1", "torch": "2", "triton": None},
        "contexts": [{"context": 8192, "times": {"select + attend": spread}}],
        "break_even": {"tokens": None, "told": "not looked for"},
    }  # fmt: skip
    (tmp_path / "card.json").write_text(json.dumps(result), encoding="utf-8")
    text = report_reported.reported_table(tmp_path)
    assert "| A card | bfloat16 | 2 x 4,096 | 8,192 | 1.5 | - | not looked for | flashqsa 0.1, torch 2" in text
    (tmp_path / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ArgumentError):
        report_reported.reported_table(tmp_path)
