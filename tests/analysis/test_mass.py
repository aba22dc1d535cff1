"""The dense attention mass of blocks, and what a selection keeps of it, against a softmax row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashqsa
from flashqsa.analysis import block_mass, iterate_block_mass, kept_mass
from flashqsa.cache import LayerCache
from flashqsa.errors import ArgumentError, DTypeError, SelectionError, ShapeError
from flashqsa.plan import plan_step
from flashqsa.testing import Step, StepCase, make_step, oracles

CASES = (
    StepCase("prefill", ((0, 37),), padding_rows=2),
    StepCase("ragged", ((61, 1), (0, 0), (130, 5), (0, 3), (7, 1)), padding_requests=1, topk_blocks=5),
    StepCase("packed bf16", ((40, 4), (90, 2)), dtype=torch.bfloat16, layout="packed"),
    StepCase("contiguous", ((33, 6), (64, 3)), contiguous=True, layout="dense"),
    StepCase("float64", ((50, 4),), dtype=torch.float64),
    StepCase("float8 keys", ((50, 4),), dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn),
    StepCase("blocks of 3", ((50, 4), (0, 2)), block_tokens=3, page_tokens=15),
    StepCase("long", ((2600, 2),), topk_blocks=20),
)


def _dense_mass(step: Step, scale: float | None = None) -> list[tuple[list[float], float]]:
    """Mass of each visible block and of the tail, by row."""
    r, heads = step.case.block_tokens, step.case.kv_heads
    result: list[tuple[list[float], float]] = [([], 0.0) for _ in range(step.num_rows)]
    for request in step.requests:
        for row, position in request.rows():
            q = step.q[row].to(torch.float64)
            probabilities = torch.zeros(position + 1, dtype=torch.float64)
            for head in range(q.shape[0]):
                keys = request.k[: position + 1, head // (q.shape[0] // heads)].to(torch.float64)
                logits = keys @ q[head] * (q.shape[1] ** -0.5 if scale is None else scale)
                probabilities += torch.softmax(logits, dim=0) / q.shape[0]
            visible = (position + 1) // r
            blocks = [float(probabilities[g * r : (g + 1) * r].sum()) for g in range(visible)]
            result[row] = blocks, float(probabilities[visible * r :].sum())
    return result


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("workspace_bytes", [1, 1 << 26])
def test_block_mass_is_the_dense_softmax_summed_by_block(case: StepCase, workspace_bytes: int) -> None:
    step = make_step(case, seed=3)
    mass = block_mass(step.q, step.cache, step.plan, workspace_bytes=workspace_bytes)
    expected = _dense_mass(step)
    assert mass.blocks.shape == (step.num_rows, max(len(blocks) for blocks, _ in expected))
    assert mass.blocks.dtype == mass.tail.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    tolerance = 1e-12 if case.dtype == torch.float64 else 2e-6
    for row, (blocks, tail) in enumerate(expected):
        wide = torch.tensor(blocks + [0.0] * (mass.blocks.shape[1] - len(blocks)), dtype=torch.float64)
        assert torch.allclose(mass.blocks[row].double(), wide, rtol=0, atol=tolerance)
        assert float(mass.tail[row]) == pytest.approx(tail, abs=tolerance)
    total = mass.blocks.sum(dim=1) + mass.tail
    assert torch.allclose(total, step.live_rows.to(total.dtype), atol=tolerance, rtol=0)
    step.assert_guards_intact()


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_masses_on_a_gpu_are_those_of_the_cpu(case: StepCase) -> None:
    found = []
    for device in ("cpu", "cuda"):
        step = make_step(case, seed=3, device=device)
        selection = flashqsa.select_blocks(step.index_q, step.cache, step.plan, backend="torch")
        mass = block_mass(step.q, step.cache, step.plan)
        kept = kept_mass(step.q, step.cache, step.plan, selection)
        found.append([x.cpu() for x in (mass.blocks, mass.tail, kept.kept, kept.best, kept.recent)])
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-5, rtol=0, equal_nan=True)


def test_block_mass_of_some_rows_in_any_order() -> None:
    step = make_step(CASES[1], seed=5)
    everything = block_mass(step.q, step.cache, step.plan)
    rows = torch.tensor([6, 0, 3, 9, 0])
    some = block_mass(step.q, step.cache, step.plan, rows=rows)
    assert torch.equal(some.rows, rows)
    assert torch.allclose(some.blocks, everything.blocks[rows][:, : some.blocks.shape[1]], atol=1e-6)
    assert torch.allclose(some.tail, everything.tail[rows], atol=1e-6)
    none = block_mass(step.q, step.cache, step.plan, rows=rows[:0])
    assert none.blocks.shape == (0, 0)


def test_block_mass_with_another_scale_and_in_parts() -> None:
    step = make_step(CASES[0], seed=6)
    expected = _dense_mass(step, scale=0.7)
    seen = []
    for part in iterate_block_mass(step.q, step.cache, step.plan, softmax_scale=0.7, workspace_bytes=300_000):
        for row, blocks, tail in zip(part.rows.tolist(), part.blocks.tolist(), part.tail.tolist(), strict=True):
            seen.append(row)
            assert tail == pytest.approx(expected[row][1], abs=2e-6)
            assert blocks[: len(expected[row][0])] == pytest.approx(expected[row][0], abs=2e-6)
    assert seen == list(range(37)), "padding rows are left out"


def test_block_mass_is_a_teacher_without_gradient() -> None:
    step = make_step(CASES[3], seed=7)
    q = step.q.clone().requires_grad_()
    teacher = block_mass(q, step.cache, step.plan)
    assert not teacher.blocks.requires_grad
    student = torch.zeros(step.num_rows, teacher.blocks.shape[1] + 1, requires_grad=True)
    target = torch.cat([teacher.blocks, teacher.tail[:, None]], dim=1)
    torch.nn.functional.kl_div(student.log_softmax(dim=1), target, reduction="batchmean").backward()
    assert student.grad is not None
    assert bool(student.grad.isfinite().all())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kept_mass_is_that_of_the_selected_blocks_and_the_tail(case: StepCase) -> None:
    step = make_step(case, seed=8)
    selection = flashqsa.select_blocks(step.index_q, step.cache, step.plan)
    kept = kept_mass(step.q, step.cache, step.plan, selection, workspace_bytes=1 << 20)
    for row, (blocks, tail) in enumerate(_dense_mass(step)):
        count = int(selection.block_counts[row])
        if not bool(step.live_rows[row]):
            assert bool(torch.stack([kept.kept[row], kept.best[row], kept.recent[row]]).isnan().all())
            continue
        chosen = selection.block_ids[row, :count].tolist()
        assert float(kept.kept[row]) == pytest.approx(tail + sum(blocks[g] for g in chosen), abs=5e-6)
        assert float(kept.best[row]) == pytest.approx(tail + sum(sorted(blocks, reverse=True)[:count]), abs=5e-6)
        assert float(kept.recent[row]) == pytest.approx(tail + sum(blocks[len(blocks) - count :]), abs=5e-6)


def test_kept_mass_agrees_with_the_two_log_sum_exps() -> None:
    """Of one head: attention over the selection and over everything differ by the mass that was left out."""
    step = make_step(StepCase("one head", ((70, 9),), q_heads=1, kv_heads=1, topk_blocks=4), seed=9)
    selection = flashqsa.select_blocks(step.index_q, step.cache, step.plan)
    kept = kept_mass(step.q, step.cache, step.plan, selection)
    _, sparse = flashqsa.attend(step.q, step.cache, selection, step.plan, return_lse=True)
    _, dense = oracles.step_attention(step)
    assert torch.allclose(kept.kept.double(), (sparse.double() - dense).exp()[:, 0], atol=1e-5)


def test_kept_mass_of_a_reused_selection_counts_all_that_came_after_it() -> None:
    step = make_step(StepCase("reuse", ((60, 3),), topk_blocks=4), seed=10)
    visible = step.plan.visible_blocks - 2
    ids = torch.tensor([[0, 3], [1, 2], [0, 5]], dtype=torch.int32)
    counts = torch.full((3,), 2, dtype=torch.int32)
    selection = flashqsa.Selection(ids, counts, None, visible, step.plan.request_ids)
    kept = kept_mass(step.q, step.cache, step.plan, selection, rows=torch.tensor([2, 1]))
    for place, row in enumerate((2, 1)):
        blocks, tail = _dense_mass(step)[row]
        expected = tail + sum(blocks[int(visible[row]) :]) + sum(blocks[g] for g in ids[row].tolist())
        assert float(kept.kept[place]) == pytest.approx(expected, abs=5e-6)
        old = sorted(blocks[: int(visible[row])], reverse=True)
        expected = tail + sum(blocks[int(visible[row]) :]) + sum(old[:2])
        assert float(kept.best[place]) == pytest.approx(expected, abs=5e-6)


def test_fault_43_mass_of_a_long_context_stays_within_its_workspace() -> None:
    """4,096 rows over 32,768 tokens: scores of one layer would take 3 GiB."""
    tokens, rows, workspace = 32_768, 4096, 16 << 20
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(1, tokens, 1, 16, generator=generator)
    cache = LayerCache(keys, keys, None, None, None)
    starts, lens = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    plan = plan_step(
        starts, lens, None, page_tokens=None, block_tokens=4, topk_blocks=8, max_query_len=rows, max_seq_len=tokens,
        first_slots=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip
    q = torch.randn(rows, 6, 16, generator=generator)
    some = torch.arange(0, rows, 512)
    largest = 0
    for part in iterate_block_mass(q, cache, plan, rows=some, workspace_bytes=workspace):
        largest = max(largest, part.blocks.numel() * 4)
        assert torch.allclose(part.blocks.sum(dim=1) + part.tail, torch.ones(len(part.rows)), atol=1e-5)
    assert largest < workspace


def test_what_is_refused(refuses: Any) -> None:
    step = make_step(CASES[0], seed=2)
    selection = flashqsa.select_blocks(step.index_q, step.cache, step.plan)
    q, cache, plan = step.q, step.cache, step.plan
    with refuses(ShapeError, "block_mass", "q must be"):
        block_mass(q[:-1], cache, plan)
    with refuses(DTypeError, "block_mass", "q must be", "int64"):
        block_mass(q.to(torch.int64), cache, plan)
    with refuses(ArgumentError, "block_mass", "multiple of 2 heads", "3"):
        block_mass(q[:, :3], cache, plan)
    with refuses(ArgumentError, "block_mass", "plan must be"):
        block_mass(q, cache, None)  # type: ignore[arg-type]
    with refuses(ArgumentError, "block_mass", "cache must be"):
        block_mass(q, None, plan)  # type: ignore[arg-type]
    with refuses(ArgumentError, "block_mass", "rows must be in [0, 39)", "39"):
        block_mass(q, cache, plan, rows=torch.tensor([39]))
    with refuses(DTypeError, "block_mass", "rows must be", "bool"):
        block_mass(q, cache, plan, rows=torch.ones(39).bool())
    with refuses(ArgumentError, "block_mass", "workspace_bytes"):
        block_mass(q, cache, plan, workspace_bytes=0)
    with refuses(ArgumentError, "block_mass", "softmax_scale", "nan"):
        block_mass(q, cache, plan, softmax_scale=float("nan"))
    with refuses(ArgumentError, "kept_mass", "selection must be"):
        kept_mass(q, cache, plan, selection.block_ids)  # type: ignore[arg-type]
    with refuses(ShapeError, "kept_mass", "block_ids must be"):
        kept_mass(q, cache, plan, selection.take(torch.arange(5)))
    other = flashqsa.Selection(**{**vars(selection), "layer_id": 7})
    with refuses(SelectionError, "kept_mass", "layer 3", "layer 7"):
        kept_mass(q, cache, plan, other)
    other = flashqsa.Selection(**{**vars(selection), "request_ids": selection.request_ids + 1})
    with refuses(SelectionError, "kept_mass", "other requests"):
        kept_mass(q, cache, plan, other)
