"""Many calls of `prepare` by kernel, every pool compared after each: chunks, decode, drafts accepted and rejected."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest
import torch

from flashqsa.cache import LayerCache, ring_capacity
from flashqsa.cache.state import read_slots
from flashqsa.plan import plan_step
from flashqsa.preparation import NormWeights, prepare
from flashqsa.rope import RopeTable
from flashqsa.testing import StepCase, assert_bitwise_equal, poison, randn, stream

SMALL = dict(q_heads=2, kv_heads=1, head_dim=8, index_heads=1, index_head_dim=8, rotary_dim=4)
CACHES = ("k_pages", "v_pages", "block_keys", "ring", "ring_positions")


@pytest.mark.parametrize("width", range(1, 17))
def test_fault_10_verify_windows_at_every_offset_with_random_accepts(twins: Any, width: int) -> None:
    """Rejected rows are written again by the next window, which overlaps them; rings wrap."""
    case = StepCase("verify", ((0, 70), (0, 70)), speculative_rows=width - 1, mrope=True, dtype=torch.float16, **SMALL)
    assert case.ring_tokens == ring_capacity(4, width - 1)
    running = twins(case, seed=22)
    accepts = torch.randint(1, width + 1, (60,), generator=stream(22, width)).tolist()
    done = [5, 6]
    offsets = set()
    running.run((0, 0, 5), (1, 0, 6))
    for step in range(5):
        windows = []
        for request in range(2):
            offsets.add(done[request] % 4)
            accepted = accepts.pop()
            windows.append((request, done[request], done[request] + width, width - accepted))
            done[request] += accepted
        running.run(*windows[:: 1 if step % 2 else -1])
        if max(done) + width > 70:
            break
    assert width > 4 or offsets == {0, 1, 2, 3}


@pytest.mark.parametrize("drafts", [0, 5, 16])
def test_fault_09_the_ring_suits_any_number_of_draft_rows_on_any_page_size(twins: Any, drafts: int) -> None:
    """All drafts rejected, step after step."""
    for page_tokens in (16, 1616):
        case = StepCase("ring", ((0, 34),), page_tokens=page_tokens, speculative_rows=drafts, **SMALL)
        running = twins(case, seed=24)
        running.run((0, 0, 9))
        for done in range(9, 13):
            running.run((0, done, done + drafts + 1, drafts))


@pytest.mark.parametrize("page_tokens", [16, 64, 80, 96, 128, 640, 800, 848, 1600, 1616])
def test_fault_16_every_block_goes_to_its_own_slot_on_any_page_size(same_as_torch: Any, page_tokens: int) -> None:
    """Steps that end just before, at and past the end of a page, of several requests."""
    requests = ((page_tokens - 3, 6), (page_tokens - 1, 1), (2 * page_tokens - 4, 4), (0, 5), (page_tokens, 4))
    same_as_torch(StepCase("pages", requests, page_tokens=page_tokens, **SMALL), seed=25)


@pytest.mark.parametrize("cut", [1, 3, 42, 43])
def test_fault_12_a_prefill_cut_anywhere_beside_decode_rows_equals_one_shot(twins: Any, cut: int) -> None:
    """The bits of one call, and of the torch backend at every cut."""
    case = StepCase("cut", ((0, 60), (0, 20)), page_tokens=64, mrope=True, dtype=torch.float16, **SMALL)
    whole, parts = twins(case, seed=20), twins(case, seed=20)
    shot = whole.run((0, 0, 60), (1, 0, 20))
    parts.run((1, 0, 17))
    first = parts.run((0, 0, cut), (1, 17, 18), padding_rows=1)
    second = parts.run((1, 18, 19), (0, cut, 59))
    third = parts.run((0, 59, 60), (1, 19, 20))
    for name in ("q", "index_q"):
        rows = [getattr(first, name)[:cut], getattr(second, name)[1:], getattr(third, name)[:1]]
        assert_bitwise_equal(torch.cat(rows), getattr(shot, name)[:60], name)
    for name in CACHES:
        assert_bitwise_equal(getattr(parts.wholes[0].cache, name), getattr(whole.wholes[0].cache, name), name)


def test_fault_36_a_window_prepares_what_serial_decode_does(twins: Any, device: torch.device) -> None:
    case = StepCase("serial", ((0, 48),), speculative_rows=9, mrope=True, dtype=torch.float16, **SMALL)
    together, serial = twins(case, seed=23), twins(case, seed=23)
    for running in (together, serial):
        running.run((0, 0, 30))
    rows = together.run((0, 30, 40))
    for row in range(10):
        alone = serial.run((0, 30 + row, 31 + row))
        for name in ("q", "index_q"):
            assert_bitwise_equal(getattr(alone, name), getattr(rows, name)[row : row + 1], f"{name} of row {row}")
    for name in CACHES:
        assert_bitwise_equal(getattr(serial.wholes[0].cache, name), getattr(together.wholes[0].cache, name), name)


@pytest.mark.parametrize("block_tokens", [2, 4, 20])
@pytest.mark.parametrize("rows", [1, 3, 9, 45])
def test_old_ring_rows_are_read_before_a_long_step_overwrites_them(twins: Any, rows: int, block_tokens: int) -> None:
    """At every offset of the open block: the step closes it with members from the ring, and wraps the ring too."""
    case = StepCase(
        "wrap", ((0, 90),), speculative_rows=3, block_tokens=block_tokens, page_tokens=2 * block_tokens, **SMALL
    )
    for start in {21, 22, 23, 40} if block_tokens > 2 else {21}:
        running = twins(case, seed=29)
        running.run((0, 0, start))
        running.run((0, start, start + rows))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="a device takes programs in any order")
@pytest.mark.parametrize("order", ["last first", "shuffled"])
def test_programs_may_run_in_any_order(twins: Any, monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    """None reads what another one writes: not the ring, whose old rows are pooled while it is written."""
    from triton.runtime.interpreter import InterpreterBuilder

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        programs = self.grid_dim[0]
        shuffled = torch.randperm(programs, generator=stream(programs)).tolist()
        self.grid_idx = (programs - 1 - x if order == "last first" else shuffled[x], y, z)

    monkeypatch.setattr(InterpreterBuilder, "set_grid_idx", set_grid_idx)
    running = twins(StepCase("order", ((0, 60), (0, 50)), speculative_rows=3, mrope=True, **SMALL), seed=31)
    running.run((0, 0, 21), (1, 0, 6))
    running.run((1, 6, 9, 1), (0, 21, 35))
    running.run((0, 35, 60), (1, 8, 43), padding_rows=2)


def test_preparing_the_same_rows_again_changes_no_byte(twins: Any) -> None:
    """After a rollback the same tokens come again: K, V, ring and closed blocks are recomputed, not added to."""
    case = StepCase("again", ((0, 40), (0, 30)), speculative_rows=8, dtype=torch.float16, **SMALL)
    running = twins(case, seed=30)
    running.run((0, 0, 21), (1, 0, 14))
    first = running.run((0, 21, 30), (1, 14, 16))
    cache = running.wholes[0].cache
    before = {name: getattr(cache, name).clone() for name in CACHES}
    for start in (21, 24, 29):
        again = running.run((0, start, 30), (1, 14, 16))
        assert_bitwise_equal(again.q[: 30 - start], first.q[start - 21 : 9], "q")
        for name in CACHES:
            assert_bitwise_equal(getattr(cache, name), before[name], name)


def test_fault_06_interleaved_requests_are_prepared_as_they_are_alone(twins: Any, device: torch.device) -> None:
    case = StepCase("two", ((0, 57), (0, 33)), mrope=True, **SMALL)
    both = twins(case, seed=27)
    both.run((0, 0, 30), (1, 0, 17))
    both.run((1, 17, 33), (0, 30, 57))
    for request, length in ((0, 57), (1, 33)):
        single = dataclasses.replace(case, requests=((0, length),), request_seeds=(request,))
        alone = twins(single, seed=27)
        alone.run((0, 0, length))
        for name, ids in (("k_pages", "slot_ids"), ("v_pages", "slot_ids"), ("block_keys", "block_slot_ids")):
            stored, wanted = (
                read_slots(getattr(running.wholes[0].cache, name), getattr(running.wholes[0].requests[place], ids))
                for running, place in ((both, request), (alone, 0))
            )
            assert_bitwise_equal(stored, wanted, f"{name} of request {request}")


def test_fault_19_every_phase_in_turn_and_all_of_them_in_one_step(twins: Any) -> None:
    """Prefill, chunk, decode, verify of 1 to 8 rows, draft extension; then one of each side by side."""
    case = StepCase("phases", tuple((0, 80) for _ in range(5)), speculative_rows=7, dtype=torch.float16, **SMALL)
    running = twins(case, seed=34)
    running.run((0, 0, 19))
    running.run((0, 19, 30))
    running.run((0, 30, 31))
    done = 31
    for width in range(1, 9):
        running.run((0, done, done + width, width // 2))
        done += width - width // 2
    running.run((0, done, done + 3))
    running.run((1, 0, 26), (2, 0, 33), (3, 0, 14))
    phases = [(1, 26, 45), (0, done + 3, done + 4), (4, 0, 13), (2, 33, 38, 2)]
    running.run(*phases, (3, 14, 16), padding_rows=2)


@pytest.mark.parametrize("requests", [((0, 1), (5_993, 2)), ((2_046, 1), (0, 1), (2_048, 1))], ids=["long", "middle"])
def test_fault_25_long_contexts_beside_short_ones(same_as_torch: Any, requests: tuple[tuple[int, int], ...]) -> None:
    same_as_torch(StepCase("long", requests, page_tokens=64, dtype=torch.float16, **SMALL), seed=33)


def test_fault_14_a_million_positions_on_a_one_column_table(device: torch.device, assert_same_rows: Any) -> None:
    """The last rows before position 1,048,576 close a block that began in the ring, at the last rows of the table."""
    tokens, rows, dtype = 1 << 20, 7, torch.float16
    rope = RopeTable.build({"rope_theta": 1e7}, rotary_dim=8, num_positions=tokens, device=device)
    generator = stream(35)
    norms = NormWeights(*(randn(generator, dtype, 16, std=0.2).to(device) for _ in range(4)))
    inputs = [randn(generator, dtype, rows, *shape).to(device) for shape in ((2, 32), (1, 16), (1, 16), (2, 16))]
    plan = plan_step(
        torch.tensor([0, rows], dtype=torch.int32, device=device),
        torch.tensor([tokens], dtype=torch.int32, device=device),
        torch.tensor([[1]], dtype=torch.int32, device=device), page_tokens=tokens, block_tokens=4, topk_blocks=8,
        max_query_len=rows, max_seq_len=tokens, num_pages=2,
        ring_ids=torch.zeros(1, dtype=torch.int32, device=device), ring_tokens=8, num_rows=rows,
    )  # fmt: skip
    assert plan.positions.tolist() == list(range(tokens - rows, tokens))
    stored = []
    for backend in ("triton", "torch"):
        k_pages, v_pages, keys = (_last_rows(tokens // n, 16, dtype, device) for n in (1, 1, 4))
        ring = randn(stream(36), dtype, 1, 8, 16).to(device)
        places = (torch.arange(tokens - rows - 8, tokens - rows, device=device) % 8).argsort()
        ring_positions = (torch.arange(tokens - rows - 8, tokens - rows, device=device))[places][None, :, None]
        cache = LayerCache(
            k_pages[:, :, None], v_pages[:, :, None], keys, ring, ring_positions.expand(1, 8, 3).contiguous()
        )
        positions = plan.positions.clone()
        prepared = prepare(*inputs, positions, rope, norms, cache, plan, backend=backend)
        slots = plan.slot_ids[plan.slot_ids >= 0]
        closed = plan.closed_block_slot_ids[plan.closed_block_slot_ids >= 0]
        assert len(closed) == 2
        stored.append(
            [prepared.q, prepared.index_q, read_slots(cache.k_pages, slots), read_slots(cache.v_pages, slots),
             read_slots(keys, closed), cache.ring]
        )  # fmt: skip
        assert cache.ring_positions[0, :, 0].sort().values.tolist() == list(range(tokens - 8, tokens))
    for name, got, wanted in zip(("q", "index_q", "k", "v", "block keys", "ring"), *stored, strict=True):
        assert_same_rows(got, wanted, dtype, name)


def _last_rows(rows: int, dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return poison(torch.empty(2, rows, dim, dtype=dtype, device=device))
