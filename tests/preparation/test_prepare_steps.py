"""Many calls of `prepare`: chunks, decode, drafts accepted and rejected, against one shot and the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashqsa.cache import ring_capacity
from flashqsa.testing import StepCase, assert_bitwise_equal, assert_unchanged, make_step, snapshot, stream

SMALL = dict(q_heads=2, kv_heads=1, head_dim=8, index_heads=1, index_head_dim=8, rotary_dim=4)


def assert_same_store(one: Any, other: Any, request: int, length: int) -> None:
    stored, wanted = one.stored(request, length), other.stored(request, length)
    for name in wanted:
        assert_bitwise_equal(stored[name], wanted[name], f"{name} of request {request}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [1, 2, 3, 5, 842, 843])
def test_fault_12_a_prefill_cut_anywhere_beside_decode_rows_equals_one_shot(
    session: Any, window: Any, cut: int, dtype: torch.dtype
) -> None:
    """Block keys, K, V, ring and prepared queries; the prefix is no multiple of r."""
    case = StepCase("cut", ((0, 1_000), (0, 40)), page_tokens=64, mrope=True, dtype=dtype, **SMALL)
    whole, parts = (session(case, seed=20) for _ in range(2))
    shot = whole.run([window(0, 0, 1_000), window(1, 0, 40)])
    parts.run([window(1, 0, 37)])
    first = parts.run([window(0, 0, cut), window(1, 37, 38)], padding_rows=1)
    second = parts.run([window(1, 38, 39), window(0, cut, 999)])
    third = parts.run([window(0, 999, 1_000), window(1, 39, 40)])
    for name in ("q", "index_q"):
        rows = [getattr(first, name)[:cut], getattr(second, name)[1:], getattr(third, name)[:1]]
        assert_bitwise_equal(torch.cat(rows), getattr(shot, name)[:1_000], name)
        assert_bitwise_equal(getattr(third, name)[1:], getattr(shot, name)[-1:], name)
    for request, length in ((0, 1_000), (1, 40)):
        assert_same_store(parts, whole, request, length)
        parts.assert_holds(request, length)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule_of_three_requests_equals_one_shot(session: Any, window: Any, data: st.DataObject) -> None:
    """Chunks of any size in any company, some of whose last rows are drafts that the next step takes back."""
    r, drafts = data.draw(st.sampled_from([4, 1, 2, 8]), label="r"), data.draw(st.integers(0, 6), label="drafts")
    lens = (41, 23, 30)
    case = StepCase(
        "any", tuple((0, n) for n in lens), block_tokens=r, page_tokens=r * data.draw(st.integers(1, 5)),
        speculative_rows=drafts, contiguous=data.draw(st.booleans()), **SMALL,
    )  # fmt: skip
    whole, parts = session(case, seed=21), session(case, seed=21)
    whole.run([window(i, 0, n) for i, n in enumerate(lens)])
    schedule = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(0, drafts)), max_size=4)
    done = [0, 0, 0]
    for chunks in [*data.draw(st.lists(schedule, max_size=6)), [(0, 41, 0), (2, 41, 0), (1, 41, 0)]]:
        windows = {}
        for request, rows, rejected in chunks:
            end = min(done[request] + rows, lens[request])
            if request not in windows and end > done[request]:
                windows[request] = window(request, done[request], end, min(rejected, end - done[request]))
        if windows:
            parts.run(list(windows.values()), padding_rows=len(chunks) % 3)
        for request, taken in windows.items():
            done[request] = taken.end - taken.rejected
            assert_same_store_of_blocks(parts, whole, request, done[request])
    for request, length in enumerate(lens):
        assert_same_store(parts, whole, request, length)


def assert_same_store_of_blocks(parts: Any, whole: Any, request: int, length: int) -> None:
    """As `assert_same_store`, for a request that the other session has to its end: its ring has moved on."""
    stored, wanted = parts.stored(request, length), whole.stored(request, length)
    for name in ("k", "v", "block keys"):
        assert_bitwise_equal(stored[name], wanted[name], f"{name} of request {request}")
    truth, r = whole.whole.requests[request], whole.case.block_tokens
    assert_bitwise_equal(stored["ring"], truth.raw_index_keys[max(0, length - r) : length], "ring")


@pytest.mark.parametrize("width", range(1, 17))
def test_fault_10_verify_windows_at_every_offset_with_random_accepts(
    session: Any, window: Any, backend: str, width: int
) -> None:
    """After each step every complete block of accepted tokens is the oracle's, and the ring holds the open one's."""
    case = StepCase("verify", ((0, 90), (0, 90)), speculative_rows=width - 1, mrope=True, **SMALL)
    assert case.ring_tokens == ring_capacity(4, width - 1)
    running = session(case, seed=22, backend=backend)
    accepts = torch.randint(1, width + 1, (60,), generator=stream(22, width)).tolist()
    done = [5, 6]
    offsets = set()
    running.run([window(0, 0, 5), window(1, 0, 6)])
    for step in range(8):
        windows = []
        for request in range(2):
            offsets.add(done[request] % 4)
            accepted = accepts.pop()
            windows.append(window(request, done[request], done[request] + width, width - accepted))
            done[request] += accepted
        running.run(windows[:: 1 if step % 2 else -1])
        for request in range(2):
            if backend == "torch" or step == 7:
                running.assert_holds(request, done[request])
        if max(done) + width > 90:
            break
    assert width > 4 or offsets == {0, 1, 2, 3}


def test_fault_36_a_window_prepares_what_serial_decode_does(session: Any, window: Any, backend: str) -> None:
    case = StepCase("serial", ((0, 60),), speculative_rows=9, mrope=True, **SMALL)
    together, serial = session(case, seed=23, backend=backend), session(case, seed=23, backend=backend)
    for running in (together, serial):
        running.run([window(0, 0, 30)])
    rows = together.run([window(0, 30, 40)])
    for row in range(10):
        alone = serial.run([window(0, 30 + row, 31 + row)])
        for name in ("q", "index_q"):
            assert_bitwise_equal(getattr(alone, name), getattr(rows, name)[row : row + 1], f"{name} of row {row}")
        if row % 4 == 1:  # token 31 + 4 n closes a block: its key is there for its own row
            assert not bool(serial.stored(0, 31 + row)["block keys"].isnan().any())
    assert_same_store(together, serial, 0, 40)


@pytest.mark.parametrize("page_tokens", [16, 64, 128, 848, 1616])
@pytest.mark.parametrize("drafts", [0, 1, 5, 16])
def test_fault_09_the_ring_suits_any_number_of_draft_rows_on_any_page_size(
    session: Any, window: Any, page_tokens: int, drafts: int
) -> None:
    case = StepCase("ring", ((0, 34),), page_tokens=page_tokens, speculative_rows=drafts, **SMALL)
    running = session(case, seed=24)
    running.run([window(0, 0, 9)])
    done = 9
    while done + drafts + 1 <= 34:
        running.run([window(0, done, done + drafts + 1, drafts)])  # all drafts rejected, step after step
        done += 1
        running.assert_holds(0, done)


@pytest.mark.parametrize("page_tokens", [16, 64, 80, 96, 128, 640, 800, 848, 1600, 1616])
def test_fault_16_every_block_goes_to_its_own_slot_on_any_page_size(
    session: Any, window: Any, page_tokens: int
) -> None:
    case = StepCase("pages", ((0, 1_701), (0, 130)), page_tokens=page_tokens, **SMALL)
    running = session(case, seed=25)
    running.run([window(1, 0, 130), window(0, 0, 850)])
    running.run([window(0, 850, 1_701)])
    for request, length in ((0, 1_701), (1, 130)):
        running.assert_holds(request, length)


@pytest.mark.parametrize("context", [*range(63, 71), *range(127, 131)])
def test_fault_37_contexts_just_past_a_page(session: Any, window: Any, context: int) -> None:
    case = StepCase("page", ((0, context + 2),), page_tokens=64, **SMALL)
    running = session(case, seed=26)
    running.run([window(0, 0, context)])
    running.run([window(0, context, context + 1)])
    running.run([window(0, context + 1, context + 2)])
    running.assert_holds(0, context + 2)


def test_fault_06_interleaved_requests_are_prepared_as_they_are_alone(session: Any, window: Any, backend: str) -> None:
    case = StepCase("two", ((0, 57), (0, 33)), mrope=True, **SMALL)
    both = session(case, seed=27, backend=backend)
    both.run([window(0, 0, 30), window(1, 0, 17)])
    both.run([window(1, 17, 33), window(0, 30, 57)])
    for request, length in ((0, 57), (1, 33)):
        single = dataclasses.replace(case, requests=((0, length),), request_seeds=(request,))
        alone = session(single, seed=27, backend=backend)
        alone.run([window(0, 0, length)])
        stored, wanted = both.stored(request, length), alone.stored(0, length)
        for name in wanted:
            assert_bitwise_equal(stored[name], wanted[name], f"{name} of request {request}")


def test_fault_06_pooled_keys_are_rotated_at_the_position_of_their_first_token(
    session: Any, window: Any, backend: str
) -> None:
    """Also when that token came in an earlier step, and rotary positions are no running count."""
    case = StepCase("first", ((0, 24),), mrope=True, **SMALL)
    for cut in (1, 2, 3):
        running = session(case, seed=28, backend=backend)
        running.whole.rope_positions[:, 4:8] = torch.tensor([[50, 1, 2, 3], [7, 8, 9, 10], [60, 5, 5, 5]])
        truth = running.whole.requests[0]
        truth.rope_positions[:, 4:8] = running.whole.rope_positions[:, 4:8]
        running.run([window(0, 0, 4 + cut)])
        running.run([window(0, 4 + cut, 24)])
        running.assert_holds(0, 24)


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 7, 8, 9, 30])
def test_a_long_step_leaves_only_its_last_rows_in_the_ring(session: Any, window: Any, backend: str, rows: int) -> None:
    case = StepCase("long", ((0, 50),), speculative_rows=3, **SMALL)
    running = session(case, seed=29, backend=backend)
    truth = running.whole.requests[0]
    start = 11
    running.run([window(0, 0, start)])
    kept = min(rows, case.ring_tokens)
    end = start + rows
    ring_before = running.cache.ring[truth.ring_id].clone()
    running.run([window(0, start, end)])
    for place in range(case.ring_tokens):
        position = max(p for p in range(end) if p % case.ring_tokens == place)
        now = running.cache.ring[truth.ring_id, place]
        if position >= end - kept:
            assert_bitwise_equal(now, truth.raw_index_keys[position], f"place {place}")
            stored = running.cache.ring_positions[truth.ring_id, place]
            assert stored.tolist() == truth.rope_positions[:, position].tolist()
        else:
            assert_bitwise_equal(now, ring_before[place], f"place {place}")


def test_preparing_the_same_rows_again_changes_no_byte(session: Any, window: Any, backend: str) -> None:
    """After a rollback the same tokens come again: K, V, ring and closed blocks are recomputed, not added to."""
    case = StepCase("again", ((0, 40), (0, 30)), speculative_rows=8, dtype=torch.bfloat16, **SMALL)
    running = session(case, seed=30, backend=backend)
    running.run([window(0, 0, 21), window(1, 0, 14)])
    windows = [window(0, 21, 30), window(1, 14, 16)]
    first = running.run(windows)
    before = snapshot(running.cache)
    for start in (21, 24, 29):
        again = running.run([window(0, start, 30), windows[1]])
        assert_bitwise_equal(again.q[: 30 - start], first.q[start - 21 : 9], "q")
        assert_unchanged(before)


def test_drafts_of_wrong_tokens_leave_no_trace(session: Any, window: Any, backend: str) -> None:
    """Two sessions of the same tokens, one of which drafted wrongly before each of its steps."""
    case = StepCase("drafts", ((0, 44),), speculative_rows=7, mrope=True, **SMALL)
    clean, drafted = session(case, seed=31, backend=backend), session(case, seed=31, backend=backend)
    clean.run([window(0, 0, 10)])
    drafted.run([window(0, 0, 17, 7)])
    for start, end in ((10, 12), (12, 13), (13, 17), (17, 25), (25, 36)):
        clean.run([window(0, start, end)])
        drafted.run([window(0, start, min(end + 7, 44), min(7, 44 - end))])
        assert_same_store(drafted, clean, 0, end)


def test_fault_25_ragged_batches(session: Any, window: Any, backend: str) -> None:
    for lens in ((1, 120), (65, 1, 63), (1, 5, 63, 64, 65, 2, 9)):
        case = StepCase("ragged", tuple((0, n) for n in lens), page_tokens=16, **SMALL)
        running = session(case, seed=32, backend=backend)
        running.run([window(i, 0, n) for i, n in enumerate(lens)][::-1])
        for request, length in enumerate(lens):
            running.assert_holds(request, length)


@pytest.mark.parametrize("requests", [((0, 1), (55_993, 2)), ((2_046, 1), (0, 1), (2_048, 1))], ids=["long", "middle"])
def test_fault_25_long_contexts_beside_short_ones(
    prepare_step: Any, assert_holds: Any, backend: str, requests: tuple[tuple[int, int], ...]
) -> None:
    step = make_step(StepCase("long", requests, page_tokens=64, dtype=torch.bfloat16, **SMALL), seed=33, written=False)
    prepare_step(step, backend=backend)
    for request in step.requests:
        assert_holds(step, request)


def test_fault_19_every_phase_in_turn_and_all_of_them_in_one_step(session: Any, window: Any, backend: str) -> None:
    """Prefill, chunk, decode, verify of 1 to 8 rows, draft extension; then one of each side by side."""
    case = StepCase("phases", tuple((0, 90) for _ in range(5)), speculative_rows=7, **SMALL)
    running = session(case, seed=34, backend=backend)
    running.run([window(0, 0, 19)])
    running.run([window(0, 19, 30)])
    running.run([window(0, 30, 31)])
    done = 31
    for width in range(1, 9):
        running.run([window(0, done, done + width, width // 2)])
        done += width - width // 2
        running.assert_holds(0, done)
    running.run([window(0, done, done + 3)])
    for request, length in ((1, 26), (2, 33), (3, 14)):
        running.run([window(request, 0, length)])
    phases = [window(1, 26, 45), window(0, done + 3, done + 4), window(4, 0, 13), window(2, 33, 38, 2)]
    running.run([*phases, window(3, 14, 16)], padding_rows=2)
    for request, length in ((0, done + 4), (1, 45), (2, 36), (3, 16), (4, 13)):
        running.assert_holds(request, length)
