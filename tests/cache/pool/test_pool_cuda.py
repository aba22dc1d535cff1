"""The pool on a GPU: nothing is read back, one graph serves all steps, results are those of each request alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.errors import ArgumentError
from flashqsa.testing import assert_bitwise_equal

pytestmark = pytest.mark.gpu


def test_steps_forks_rollback_and_prefixes(make_serving: Any, draw_tokens: Any, tmp_path: Any) -> None:
    serving, there = (make_serving(device="cuda", seed=seed) for seed in (1, 2))
    serving.open("a")
    serving.step({"a": draw_tokens(45)})
    serving.fork("a", "b")
    serving.step({"a": draw_tokens(5, 1), "b": draw_tokens(1, 2)})
    serving.rollback("a", 46)
    serving.open("c", serving.tokens["a"], prefix_of="a", tokens=42)
    prefix = serving.pool.hold_prefix("b")
    serving.close("b")
    serving.open("d", [*draw_tokens(45), *draw_tokens(1, 2)], prefix_of=prefix)
    serving.step({"a": draw_tokens(3, 3), "c": draw_tokens(9, 4), "d": draw_tokens(2, 5)})
    there.pool.import_request("a", serving.pool.export_request("a"))
    there.tokens["a"] = list(serving.tokens["a"])
    there.step({"a": draw_tokens(7, 6)})
    there.check_caches("a")
    for name in "acd":
        serving.check_caches(name)


@pytest.mark.parametrize("refill", [False, True])
def test_fault_47_a_step_reads_nothing_back(
    make_serving: Any, draw_tokens: Any, no_synchronisation: Any, refill: bool
) -> None:
    """Opening, sharing, copying pages on write, planning, rolling back and closing never wait for the device."""
    serving = make_serving(device="cuda")
    pool = serving.pool
    serving.open("a")
    serving.step({"a": draw_tokens(45)})
    options = {"out": pool.plan_step({"a": 0}, num_requests=4, num_rows=16, table_pages=8, max_query_len=8,
                                     max_seq_len=120)} if refill else {}  # fmt: skip
    with no_synchronisation():
        pool.fork("a", "b")
        pool.open("c", prefix_of="a", tokens=41)
        prefix = pool.hold_prefix("a")
        pool.open("d", prefix_of=prefix)
        plan = pool.plan_step({"a": 5, "b": 1, "c": 3, "d": 2}, **options)
        pool.rollback("a", rows=4)
        pool.close("b")
        pool.release_prefix(prefix)
        pool.plan_step({"a": 2, "c": 1}, **options)
    assert plan.device.type == "cuda"
    pool._accounts.check()


@torch.no_grad()
def test_fault_17_one_graph_over_refilled_plans(make_serving: Any, run_step: Any, draw_tokens: Any) -> None:
    """Decode and verify steps of changing requests through one captured graph equal the same steps run eagerly."""
    replayed, eager = make_serving(device="cuda", pages=60), make_serving(device="cuda", pages=60)
    for serving in (replayed, eager):
        for number, name in enumerate("abcd"):
            serving.open(name)
            serving.step({name: draw_tokens(20 + 9 * number, number)})
    pool = replayed.pool
    plan = pool.plan_step(
        {"a": 0}, num_requests=6, num_rows=24, table_pages=9, max_query_len=8, max_seq_len=140
    )  # before the first step no row is live: the warm-up writes nothing
    token_ids = torch.zeros(24, dtype=torch.int64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run_step(pool.caches, plan, token_ids)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run_step(pool.caches, plan, token_ids)
    steps = [{"a": 1, "b": 1, "c": 1, "d": 1}, {"d": 8, "b": 8, "a": 8}, {"c": 1}, {"b": 2, "c": 7, "a": 3}]
    for number, step in enumerate(steps):
        tokens = {name: draw_tokens(rows, 50 + number) for name, rows in step.items()}
        packed = [token for rows in tokens.values() for token in rows]
        token_ids[: len(packed)].copy_(torch.tensor(packed))
        pool.plan_step(step, out=plan)
        graph.replay()
        first = 0
        for name, layers in eager.step(tokens).items():
            for theirs, ours in zip(layers, results, strict=True):
                rows = slice(first, first + step[name])
                assert_bitwise_equal(ours.block_ids[rows], theirs.block_ids)
                assert_bitwise_equal(ours.output[rows], theirs.output)
            first += step[name]
        assert not results[0].output[first:].any()
        pool.rollback("a", rows=1)
        eager.rollback("a", eager.pool.length("a") - 1)
        replayed.tokens = {name: list(held) for name, held in eager.tokens.items()}
    for name in "abcd":
        replayed.check_caches(name)


def test_debug_mode_on_a_gpu(make_serving: Any, draw_tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHQSA_DEBUG", "1")
    serving = make_serving(device="cuda")
    serving.open("a")
    serving.step({"a": draw_tokens(45)})
    serving.fork("a", "b")
    serving.step({"a": draw_tokens(5, 1), "b": draw_tokens(1, 2)})
    serving.rollback("a", 47)
    serving.step({"a": draw_tokens(5, 1)})
    pages = serving.pool.page_ids("b")
    serving.close("b")
    assert serving.pool.caches[0].k_pages[pages[-1]].isnan().all()
    serving.check_caches("a")


def test_the_default_device_of_torch_changes_nothing(make_serving: Any, draw_tokens: Any) -> None:
    """A step is packed in pinned memory of the host, also where tensors without a device are put on the GPU."""
    serving = make_serving(device="cuda")
    pool = serving.pool
    serving.open("a")
    serving.step({"a": draw_tokens(21)})
    with torch.device("cuda"):
        pool.import_request("b", pool.export_request("a"))
        plans = [pool.plan_step({"a": 3, "b": 1})]
        pool.rollback("a", rows=3)
        pool.rollback("b", rows=1)
    plans.append(pool.plan_step({"a": 3, "b": 1}))
    for name in ("query_starts", "seq_lens", "ring_ids", "slot_ids"):
        assert_bitwise_equal(getattr(plans[0], name), getattr(plans[1], name), name)
    pool.rollback("a", rows=3)
    pool.rollback("b", rows=1)
    serving.tokens["b"] = list(serving.tokens["a"])
    serving.step({"a": draw_tokens(3, 1), "b": draw_tokens(1, 2)})
    for name in "ab":
        serving.check_caches(name)


def test_a_step_that_runs_after_its_request_was_closed_is_found(
    make_serving: Any, draw_tokens: Any, run_step: Any, refuses: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHQSA_DEBUG", "1")
    serving = make_serving(device="cuda", pages=4)
    pool = serving.pool
    serving.open("a")
    serving.step({"a": draw_tokens(20)})
    plan = pool.plan_step({"a": 3})
    pool.close("a")
    run_step(pool.caches, plan, torch.tensor(draw_tokens(3, 1), device="cuda"))
    pool._accounts.free_ring_ids.reverse()  # another ring: pages are what is looked at here
    pool.open("b")
    with refuses(ArgumentError, "PagedPool.plan_step", "free pages", "layer 3", "token 20 of request 'a'"):
        pool.plan_step({"b": 64})
