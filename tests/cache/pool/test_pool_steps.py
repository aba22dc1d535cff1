"""Real steps of two tiny layers through a pool, bit for bit those of each request alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.errors import ArgumentError, DeviceError
from flashqsa.plan import plan_step
from flashqsa.testing import assert_bitwise_equal, assert_unchanged, snapshot


@pytest.mark.parametrize("page_tokens", [4, 16, 20])
def test_chunks_decodes_and_verification_side_by_side(make_serving: Any, draw_tokens: Any, page_tokens: int) -> None:
    serving = make_serving(pages=400 // page_tokens, page_tokens=page_tokens)
    a, b, c = draw_tokens(90, 1), draw_tokens(70, 2), draw_tokens(9, 3)
    for name in "abc":
        serving.open(name)
    serving.step({"b": b[:33], "a": a[:1]})
    serving.step({"a": a[1:48], "c": c[:2], "b": b[33:34]})
    serving.step({"c": c[2:3], "b": b[34:41], "a": a[48:49]})
    serving.step({"a": a[49:], "b": b[41:], "c": c[3:]})
    for name in "abc":
        serving.check_caches(name)


@pytest.mark.parametrize("offset", range(8))
def test_rollback_and_rewrite_three_times(make_serving: Any, draw_tokens: Any, offset: int) -> None:
    """A window of 8 rows is rejected from every place on, three times over; block keys are those of the last try."""
    serving, start = make_serving(speculative_rows=7), 30 + offset
    serving.open("a")
    serving.step({"a": draw_tokens(start, 1)})
    for accepted in (0, 1, 3, 6, 7):
        length = serving.pool.length("a")
        for attempt in range(3):
            serving.step({"a": draw_tokens(8, 100 * accepted + attempt)})
            serving.check_caches("a")
            serving.rollback("a", length + accepted if attempt == 2 else length)
        serving.check_caches("a")
    serving.step({"a": draw_tokens(9, 5)})
    serving.check_caches("a")


@pytest.mark.parametrize("back", range(1, 9))
def test_fault_10_rollback_and_rewrite_three_times_to_every_offset(
    make_serving: Any, draw_tokens: Any, back: int
) -> None:
    """From every place of the ring, every number of rows that the ring promises, three times with other tokens."""
    serving = make_serving(speculative_rows=8, pages=60)
    serving.open("a")
    serving.step({"a": draw_tokens(24, 1)})
    assert serving.pool.speculative_rows == 8
    for place in range(12):
        length = serving.pool.length("a")
        assert length % 12 == place, "every place of the ring is the last one once"
        for attempt in range(3):
            serving.rollback("a", length - back)
            serving.step({"a": draw_tokens(back, 1000 * place + attempt)})
            serving.check_caches("a")
        serving.step({"a": draw_tokens(1, place)})
    serving.check_caches("a")


@pytest.mark.parametrize("rows", range(8))
def test_a_rollback_bit_by_bit_is_one_rollback(make_serving: Any, draw_tokens: Any, rows: int) -> None:
    serving = make_serving(speculative_rows=7)
    serving.open("a")
    serving.step({"a": draw_tokens(45)})
    for _ in range(rows):
        serving.rollback("a", serving.pool.length("a") - 1)
    serving.step({"a": draw_tokens(6, 1)})
    serving.check_caches("a")


def test_beyond_the_promise_whole_blocks_or_a_clear_error(
    make_serving: Any, draw_tokens: Any, refuses: Any, nothing_changes: Any
) -> None:
    serving = make_serving(speculative_rows=3)
    pool = serving.pool
    assert pool.speculative_rows == 4, "whole blocks: 8 raw keys"
    serving.open("a")
    serving.step({"a": draw_tokens(45)})
    for length in (35, 34, 33, 31, 1):
        with (
            nothing_changes(pool),
            refuses(ArgumentError, "PagedPool.rollback", "at least 40 or a multiple of 4", f"got {length}", "'a'"),
        ):
            pool.rollback("a", length=length)
    serving.rollback("a", 41)
    serving.step({"a": draw_tokens(2, 1)})
    serving.rollback("a", 36)
    with nothing_changes(pool), refuses(ArgumentError, "PagedPool.rollback", "from token 36 on", "roll back to 32"):
        pool.rollback("a", rows=2)
    serving.step({"a": draw_tokens(11, 2)})
    serving.check_caches("a")
    serving.rollback("a", 0)
    assert pool.page_ids("a") == []
    serving.step({"a": draw_tokens(7, 3)})
    serving.check_caches("a")


def test_an_aborted_chunk_is_taken_back_to_whole_blocks(make_serving: Any, draw_tokens: Any) -> None:
    """A step was planned and ran in one of two layers only: its ring has lost the open block, the blocks are whole."""
    serving = make_serving(speculative_rows=3)
    pool = serving.pool
    serving.open("a")
    serving.step({"a": draw_tokens(22)})
    pool.plan_step({"a": 40})
    pool.caches[0].ring.fill_(float("nan"))
    with pytest.raises(ArgumentError, match="roll back to 20"):
        pool.rollback("a", rows=40)
    serving.rollback("a", 20)
    serving.step({"a": draw_tokens(25, 2)})
    serving.check_caches("a")


def test_fork_in_an_open_block_and_both_go_on(make_serving: Any, draw_tokens: Any) -> None:
    for length in range(36, 41):
        serving = make_serving(pages=20)
        serving.open("a")
        serving.step({"a": draw_tokens(length)})
        serving.fork("a", "b")
        serving.fork("b", "c")
        serving.step({"c": draw_tokens(1, 1), "a": draw_tokens(2, 2)})
        serving.step({"b": draw_tokens(7, 3), "a": draw_tokens(1, 4), "c": draw_tokens(3, 5)})
        serving.rollback("b", length - 1)
        serving.step({"b": draw_tokens(5, 6)})
        for name in "abc":
            serving.check_caches(name)


@pytest.mark.slow
def test_fault_6_two_requests_on_interleaved_pages(make_serving: Any, draw_tokens: Any, run_step: Any) -> None:
    """3,001 and 2,777 tokens in turns, so that their shuffled pages alternate: every row is that of its request alone.

    And a complete last block is dropped where its score is low, also the one that a row closes itself.
    """
    serving, dropped = make_serving(pages=370), 0
    serving.tokens = {"a": draw_tokens(3001, 1), "b": draw_tokens(2777, 2)}
    given: dict[str, list[Any]] = {"a": [], "b": []}
    for name in given:
        serving.pool.open(name)
    for first in range(0, 3001, 500):
        chunks = {name: rows[first : first + 500] for name, rows in serving.tokens.items()}
        plan = serving.pool.plan_step({name: len(rows) for name, rows in chunks.items()})
        layers = run_step(serving.pool.caches, plan, torch.tensor(chunks["a"] + chunks["b"]))
        for name, rows in (("a", slice(len(chunks["a"]))), ("b", slice(len(chunks["a"]), None))):
            given[name].append([(x.block_counts[rows], x.block_ids[rows], x.output[rows]) for x in layers])
    for name, chunks in given.items():
        serving.check_caches(name)
        for layer, alone in enumerate(serving.truth(name).rows):
            counts, ids, output = (torch.cat(parts) for parts in zip(*(chunk[layer] for chunk in chunks), strict=True))
            assert_bitwise_equal(ids, alone.block_ids)
            assert_bitwise_equal(output, alone.output)
            visible = torch.arange(1, ids.shape[0] + 1) // 4
            last = ids.gather(1, (counts.long() - 1).clamp(min=0)[:, None])[:, 0]
            dropped += int((last < visible - 1)[visible > 5].sum())
    assert dropped > 1000
    pages = serving.pool.page_ids("a")
    assert not set(pages) & set(serving.pool.page_ids("b"))
    assert pages != sorted(pages)


@pytest.mark.slow
def test_fork_at_4099_tokens(make_serving: Any, draw_tokens: Any) -> None:
    """Both branches are independent and right, at a length that is no multiple of a block or a page.

    Every row of every step is compared bit for bit with its request alone; the branches go on in one step, too, one of
    them rolls back behind the fork, and the other one outlives it.
    """
    serving = make_serving(pages=600)
    serving.open("a")
    serving.step({"a": draw_tokens(4099)})
    serving.fork("a", "b")
    held = serving.pool.page_ids("a")
    assert serving.pool.page_ids("b") == held
    before = snapshot({"k": serving.pool.caches[0].k_pages[held], "v": serving.pool.caches[1].v_pages[held]})
    serving.step({"b": draw_tokens(30, 1)})
    assert_unchanged(before)
    serving.step({"a": draw_tokens(2, 2)})
    assert serving.pool.page_ids("a")[:-1] == serving.pool.page_ids("b")[:256]
    for name in "ab":
        serving.check_caches(name)
    serving.step({"a": draw_tokens(5, 3), "b": draw_tokens(1, 4)})
    serving.rollback("a", 4096)
    serving.step({"a": draw_tokens(6, 5)})
    serving.check_caches("a")
    serving.close("a")
    serving.step({"b": draw_tokens(3, 6)})
    serving.check_caches("b")


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.bfloat16},
        {"dtype": torch.float32, "kv_dtype": FP8, "index_dtype": FP8, "scales": (0.37, 1.9)},
        {"dtype": torch.float16, "index_dtype": FP8},
    ],
    ids=["bf16", "fp8", "fp16-fp8-index"],
)
def test_other_dtypes(make_serving: Any, draw_tokens: Any, options: dict[str, Any]) -> None:
    serving = make_serving(**options)
    serving.open("a")
    serving.step({"a": draw_tokens(37)})
    serving.fork("a", "b")
    serving.step({"a": draw_tokens(3, 1), "b": draw_tokens(1, 2)})
    serving.open("c", serving.tokens["a"], prefix_of="a", tokens=17)
    serving.step({"c": draw_tokens(11, 3)})
    for name in "abc":
        serving.check_caches(name)


def test_a_plan_is_refilled_with_fewer_rows_and_requests(make_serving: Any, draw_tokens: Any) -> None:
    """One plan for all steps, as a CUDA graph would hold it: shapes and addresses stay, the rest is padding."""
    serving = make_serving(pages=60)
    for name in "abcd":
        serving.open(name)
    serving.step({name: draw_tokens(20 + 9 * number, number) for number, name in enumerate("abcd")})
    shape = {"num_requests": 6, "num_rows": 24, "table_pages": 9, "max_query_len": 8, "max_seq_len": 140}
    plan = serving.pool.plan_step({"a": 0}, **shape)
    addresses = {name: x.data_ptr() for name, x in vars(plan).items() if isinstance(x, torch.Tensor)}
    steps = [
        {"a": 1, "b": 1, "c": 1, "d": 1},
        {"d": 8, "b": 8, "a": 8},
        {"c": 1},
        {},
        {"b": 2, "d": 0, "c": 7, "a": 3},
    ]
    for number, step in enumerate(steps):
        serving.step({name: draw_tokens(rows, 50 + number) for name, rows in step.items()}, out=plan)
        assert (plan.num_requests, plan.num_rows, plan.max_query_len, plan.max_seq_len) == (6, 24, 8, 140)
        assert plan.page_table.shape == (6, 9)
        assert {name: x.data_ptr() for name, x in vars(plan).items() if isinstance(x, torch.Tensor)} == addresses
        assert plan.seq_lens[len(step) :].tolist() == [0] * (6 - len(step))
        assert int((plan.request_ids >= 0).sum()) == sum(step.values())
    for name in "abcd":
        serving.check_caches(name)


def test_a_refilled_plan_is_the_plan_made_anew(make_serving: Any, draw_tokens: Any) -> None:
    serving = make_serving()
    pool = serving.pool
    for name in "ab":
        serving.open(name)
    out = pool.plan_step({}, num_requests=2, num_rows=30, table_pages=3, max_query_len=30, max_seq_len=48)
    refilled = pool.plan_step({"a": 21, "b": 5}, out=out)
    assert refilled is out
    for name in "ba":  # in this order the pages come back as they went
        pool.rollback(name, length=0)
    fresh = pool.plan_step({"a": 21, "b": 5}, num_rows=30)
    for name in ("query_starts", "seq_lens", "ring_ids", "request_ids", "positions", "visible_blocks", "slot_ids",
                 "closed_block_slot_ids", "ring_slot_ids"):  # fmt: skip
        assert_bitwise_equal(getattr(refilled, name), getattr(fresh, name), name)
    assert refilled.page_table[:, :2].tolist() == fresh.page_table.tolist()


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"num_requests": 1}, ("num_requests", "the 2", "got 1")),
        ({"num_rows": 4}, ("num_rows", "the 5", "got 4")),
        ({"table_pages": 1}, ("table_pages", "the 2", "got 1")),
        ({"max_query_len": 3}, ("max_query_len", "the 4", "got 3")),
        ({"max_seq_len": 23}, ("max_seq_len", "the 24", "got 23")),
        ({"num_rows": 5.5}, ("num_rows", "got 5.5")),
        ({"out": 3}, ("out", "int")),
        ({"out": "small"}, ("out.num_rows", "the 5", "got 3")),
        ({"out": "small", "num_rows": 3}, ("num_rows", "not be given with out")),
        ({"out": "foreign"}, ("out", "page_tokens = 16", "got 8")),
        ({"out": "contiguous"}, ("out", "page_table")),
    ],
)
def test_steps_that_do_not_fit_change_nothing(
    make_serving: Any, draw_tokens: Any, refuses: Any, nothing_changes: Any, options: dict[str, Any], parts: Any
) -> None:
    serving = make_serving()
    pool = serving.pool
    for name in "ab":
        serving.open(name)
    serving.step({"a": draw_tokens(20), "b": draw_tokens(3)})
    serving.fork("b", "c")
    other = make_serving(page_tokens=8).pool
    other.open("a")
    plans = {
        "small": pool.plan_step({"a": 0}, num_requests=2, num_rows=3, table_pages=4, max_query_len=9, max_seq_len=90),
        "foreign": other.plan_step({"a": 5}, num_requests=2, table_pages=4),
        "contiguous": plan_step(
            torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), None, page_tokens=None,
            block_tokens=4, topk_blocks=5, max_query_len=0, max_seq_len=0,
            first_slots=torch.zeros(2, dtype=torch.int64),
        ),
    }  # fmt: skip
    options = {name: plans.get(value, value) for name, value in options.items()}
    before = snapshot(plans)
    with nothing_changes(pool), refuses(ArgumentError, "PagedPool.plan_step", *parts):
        pool.plan_step({"a": 4, "b": 1}, **options)
    assert_unchanged(before)


def test_a_plan_that_lives_elsewhere_is_refused(make_serving: Any, refuses: Any) -> None:
    pool = make_serving().pool
    plan = pool.plan_step({})
    plan.request_ids = plan.request_ids.to("meta")
    with refuses(DeviceError, "PagedPool.plan_step", "cpu", "meta"):
        pool.plan_step({}, out=plan)


def test_memory_runs_out_while_a_step_is_planned(
    make_serving: Any, draw_tokens: Any, nothing_changes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = make_serving()
    serving.open("a")
    serving.step({"a": draw_tokens(20)})
    serving.fork("a", "b")

    def fails(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("flashqsa.plan.plan_step", fails)
        with nothing_changes(serving.pool), pytest.raises(torch.OutOfMemoryError):
            serving.pool.plan_step({"a": 30, "b": 1})
    serving.step({"a": draw_tokens(30, 1), "b": draw_tokens(1, 2)})
    for name in "ab":
        serving.check_caches(name)
