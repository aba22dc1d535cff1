"""Random steps: what they promise to stage tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashqsa.cache.state import read_slots
from flashqsa.testing import StepCase, as_bytes, assert_bitwise_equal, assert_unchanged, make_step, oracles, snapshot

MIXED = StepCase(
    "mixed",
    ((0, 7), (13, 1), (0, 0), (30, 4), (64, 0), (5, 9), (0, 41), (100, 17)),
    speculative_rows=3,
    padding_rows=2,
    padding_requests=2,
    mrope=True,
)
FP8 = torch.float8_e4m3fn
VARIANTS: dict[str, dict[str, Any]] = {
    "split": {},
    "packed": {"layout": "packed"},
    "hnd": {"layout": "hnd", "page_tokens": 8},
    "contiguous": {"contiguous": True},
    "bf16": {"dtype": torch.bfloat16, "mrope": False},
    "fp8": {"dtype": torch.bfloat16, "kv_dtype": FP8, "index_dtype": FP8, "index_q_dtype": FP8},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_caches_hold_the_truth_and_nan_everywhere_else(variant: str) -> None:
    step = make_step(replace(MIXED, **VARIANTS[variant]), seed=1)
    step.assert_guards_intact()
    for name, truth, slot_ids, scale in (
        ("k_pages", "k", "slot_ids", step.cache.k_scale),
        ("v_pages", "v", "slot_ids", step.cache.v_scale),
        ("block_keys", "block_keys", "block_slot_ids", None),
    ):
        pages = getattr(step.cache, name)
        used = torch.zeros(pages.shape[:2], dtype=torch.bool)
        for request in step.requests:
            slots = getattr(request, slot_ids)
            held = read_slots(pages, slots).double() * (1.0 if scale is None else scale.double())
            assert torch.equal(held, getattr(request, truth)), name
            assert not bool(used.view(-1)[slots].any()), "two requests share a slot"
            used.view(-1)[slots] = True
        assert bool(pages.float()[~used].isnan().all()), name


@pytest.mark.parametrize("variant", VARIANTS)
def test_unwritten_steps_are_what_preparation_finds(variant: str) -> None:
    """The caches differ from the written ones in the rows that the plan writes, which are NaN, and nowhere else."""
    case = replace(MIXED, **VARIANTS[variant])
    before, after = make_step(case, seed=2, written=False), make_step(case, seed=2)
    for name, slots in (("k_pages", "slot_ids"), ("v_pages", "slot_ids"), ("block_keys", "closed_block_slot_ids")):
        old, new = getattr(before.cache, name), getattr(after.cache, name)
        slot_ids = getattr(before.plan, slots)
        slot_ids = slot_ids[slot_ids >= 0]
        assert bool(read_slots(old, slot_ids).float().isnan().all()), name
        assert not bool(read_slots(new, slot_ids).float().isnan().any()), name
        differs = (as_bytes(old) != as_bytes(new)).any(dim=1).view(old.shape)
        differs[slot_ids // old.shape[1], slot_ids % old.shape[1]] = False
        assert not bool(differs.any()), name


@pytest.mark.parametrize("drafts", [0, 1, 3, 6])
def test_rings_hold_the_open_block_and_the_leftovers_of_rejected_drafts(drafts: int) -> None:
    case = StepCase("ring", ((3, 2), (21, 3), (40, 9)), speculative_rows=drafts)
    for written in (False, True):
        step = make_step(case, seed=3, written=written)
        assert step.cache.ring is not None
        assert step.cache.ring_positions is not None
        for request in step.requests:
            newest = request.seq_len if written else request.context_before
            for position in range(newest // 4 * 4, newest):
                place = request.ring_id, position % case.ring_tokens
                assert_bitwise_equal(step.cache.ring[place], request.raw_index_keys[position])
                assert step.cache.ring_positions[place].tolist() == request.rope_positions[:, position].tolist()
        unused = set(range(step.cache.ring.shape[0])) - {request.ring_id for request in step.requests}
        assert len(unused) == 2
        for ring in unused:
            assert bool(step.cache.ring[ring].isnan().all())


def test_a_token_is_a_function_of_its_request_and_position() -> None:
    """Not of the batch, the cut, the pages or the layout."""
    batch = make_step(replace(MIXED, requests=((0, 101), (3, 50))), seed=4)
    other = make_step(
        replace(MIXED, requests=((2, 9), (60, 13)), request_seeds=(1, 0), page_tokens=8, contiguous=True), seed=4
    )
    long, cut = batch.requests[0], other.requests[1]
    for name in ("k", "v", "block_keys", "raw_index_keys", "raw_k"):
        assert_bitwise_equal(getattr(long, name)[: getattr(cut, name).shape[0]], getattr(cut, name), name)
    assert torch.equal(long.rope_positions[:, :73], cut.rope_positions)
    for name in ("q", "gate", "index_q", "index_qk", "q_gate"):
        assert_bitwise_equal(getattr(batch, name)[60:73], getattr(other, name)[9:22], name)
    assert not torch.equal(long.k, make_step(batch.case, seed=5).requests[0].k)


def test_a_step_repeats() -> None:
    first, second = make_step(MIXED, seed=6), make_step(MIXED, seed=6)
    for a, b in zip(snapshot(first).contents.values(), snapshot(second).contents.values(), strict=True):
        assert torch.equal(a, b)


def test_rows_of_padding_are_nan_and_positions_have_three_different_axes() -> None:
    step = make_step(MIXED, seed=7)
    for name in ("q", "gate", "index_q", "k", "v", "index_qk"):
        rows = getattr(step, name)
        assert bool(rows[~step.live_rows].isnan().all()), name
        assert not bool(rows[step.live_rows].isnan().any()), name
    assert step.rope_positions.stride(0) > step.num_rows
    time, height, width = step.rope_positions[:, step.live_rows]
    assert len({tuple(axis.tolist()) for axis in (time, height, width)}) == 3
    positions = torch.tensor([p for request in step.requests for _, p in request.rows()])
    assert not bool((time == positions).all()), "rotary positions must not be token positions"


def test_page_tables_are_shuffled_with_garbage_behind_every_length() -> None:
    step = make_step(replace(MIXED, page_tokens=4), seed=8)
    table = step.plan.page_table
    assert table is not None
    used: list[int] = []
    for request, seq_len in enumerate(MIXED.seq_lens):
        pages = table[request].tolist()
        used += pages[: -(-seq_len // 4)]
        assert len(pages) > -(-seq_len // 4)
    assert len(used) == len(set(used))
    assert used != sorted(used)


@pytest.mark.parametrize("variant", VARIANTS)
def test_oracles_are_finite_on_a_step_and_change_nothing(variant: str) -> None:
    """NaN in unused memory, padding rows and rings never reaches a result."""
    step = make_step(replace(MIXED, **VARIANTS[variant]), seed=9)
    before = snapshot(step)
    out, lse = oracles.step_attention(step, oracles.step_selection(step))
    assert bool(out.isfinite().all())
    assert bool(lse[step.live_rows].isfinite().all())
    assert bool((out[~step.live_rows] == 0).all())
    assert bool((lse[~step.live_rows] == -torch.inf).all())
    assert_unchanged(before)


def test_unattended_slots_are_those_no_row_of_the_request_attends() -> None:
    step = make_step(replace(MIXED, topk_blocks=2), seed=10)
    selection = oracles.step_selection(step)
    expected, _ = oracles.step_attention(step, selection)
    slot_ids = step.unattended_slots(selection)
    assert slot_ids.numel() > 0
    for request in step.requests:
        request.v[torch.isin(request.slot_ids, slot_ids)] = torch.nan
    assert torch.equal(oracles.step_attention(step, selection)[0], expected)
    attended = torch.cat([request.slot_ids for request in step.requests if request.new_rows])
    assert slot_ids.numel() + len({*attended.tolist()} - {*slot_ids.tolist()}) == sum(r.seq_len for r in step.requests)
