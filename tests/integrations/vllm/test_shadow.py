"""Mode `shadow` with stand-ins for vLLM's operators: theirs serves, ours leaves nothing behind, differences told."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch

from flashqsa.errors import ArgumentError
from flashqsa.integrations.vllm_plugin import ops, registration
from flashqsa.integrations.vllm_plugin.seams import OPERATORS
from flashqsa.integrations.vllm_plugin.shadow import COMPARISONS, Compared, Shadow
from flashqsa.testing import StepCase, assert_bitwise_equal, make_step

BF16 = torch.bfloat16
CASE = StepCase("mixed", ((300, 1), (7, 1), (37, 61)), dtype=BF16, layout="packed", mrope=True, rope_dtype=BF16)


class Steps:
    """What stands for vLLM's forward context: one object a step."""

    def __init__(self) -> None:
        self.current = object()

    def __call__(self) -> object:
        return self.current

    def next(self) -> None:
        self.current = object()


def test_every_operator_is_compared() -> None:
    assert set(COMPARISONS) == {seam.name for seam in OPERATORS}


def test_preparation_is_undone_before_theirs_runs(prepare_arguments) -> None:
    """Theirs finds the caches as they were, and what it writes stays; a nudged key and a ring row are told."""
    served, alone = (prepare_arguments(make_step(CASE, seed=5, written=False), True) for _ in range(2))
    found = []

    def theirs(**arguments):
        found.append([arguments[name].clone() for name in ("main_kv_cache", "compressed_cache", "state_cache")])
        q, gate = ops.qsa_prepare(**arguments)
        slot = int(arguments["main_slot_mapping"][-1])
        page_tokens = arguments["main_kv_cache"].shape[1]
        arguments["main_kv_cache"][slot // page_tokens, slot % page_tokens, 0, 0] += 0.5
        arguments["state_cache"][1:, :, 0, :].view(torch.int16)[:, 0, 0] += 1
        return q, gate

    shadow = Shadow(4, Steps())
    before = [alone[name].clone() for name in ("main_kv_cache", "compressed_cache", "state_cache")]
    q, gate = shadow.wrap("qsa_prepare", ops.qsa_prepare, theirs)(**served)
    for held, expected in zip(found[0], before, strict=True):
        assert_bitwise_equal(held, expected)
    expected_q, expected_gate = theirs(**alone)
    assert_bitwise_equal(q, expected_q)
    assert_bitwise_equal(gate, expected_gate)
    for name in ("main_kv_cache", "compressed_cache", "state_cache", "q_out"):
        assert_bitwise_equal(served[name], alone[name], name)
    compared = shadow.compared["qsa_prepare"]
    assert (compared.calls, compared.rows) == (1, 63)
    assert compared.largest_error == pytest.approx(0.5, abs=0.02)
    assert 1 <= compared.differing_rows <= 3, "one written place of a ring was changed for each request"


def test_selection_in_any_order_is_the_same_set() -> None:
    """vLLM leaves ids unordered and columns past the count as they were."""
    step = make_step(CASE, seed=6)
    swapped = [False]

    def theirs(**arguments):
        ops.qsa_select_paged_prefill(**arguments)
        out, visible = arguments["block_indices"], arguments["visible_blocks"]
        for row, seen in enumerate(visible.tolist()):
            count = min(seen, out.shape[1])
            out[row, :count] = out[row, :count].flip(0)
            out[row, count:] = 77
        if swapped[0]:
            out[0, 3] = next(block for block in range(75) if block not in out[0].tolist())

    arguments = {
        "q": step.index_q, "k_cache": step.cache.block_keys[:, :, None], "page_table": step.plan.page_table,
        "query_start_loc": step.plan.query_starts, "visible_blocks": step.plan.visible_blocks, "token_topk": 32,
        "compress_ratio": 4, "max_query_len": 61, "block_indices": torch.empty(63, 8, dtype=torch.int32),
        "max_seq_len": 301,
    }  # fmt: skip
    shadow = Shadow(4, Steps())
    run = shadow.wrap("qsa_select_paged_prefill", ops.qsa_select_paged_prefill, theirs)
    run(**arguments)
    assert shadow.compared["qsa_select_paged_prefill"].differing_rows == 0
    assert arguments["block_indices"][1, 2:].tolist() == [77] * 6, "vLLM's result is served"
    swapped[0] = True
    run(**arguments)
    assert shadow.compared["qsa_select_paged_prefill"].differing_rows == 1


def test_attention_serves_theirs_and_tells_the_error() -> None:
    step = make_step(dataclasses.replace(CASE, dtype=torch.float32), seed=7)
    tokens = torch.full((63, 36), -1, dtype=torch.int32)
    tokens[:, 0], tokens[:, -1] = 0, 1

    def theirs(*args, **kwargs):
        result = ops.qsa_sparse_paged_attention(*args, **kwargs)
        result[5, 1, 2] += 0.25
        return result

    out = torch.empty_like(step.q)
    shadow = Shadow(4, Steps())
    run = shadow.wrap("qsa_sparse_paged_attention", ops.qsa_sparse_paged_attention, theirs)
    result = run(
        step.q, step.cache.k_pages, step.cache.v_pages, tokens, step.plan.page_table, step.plan.request_ids, False,
        out, output_gate=step.gate.contiguous(),
    )  # fmt: skip
    assert result is out
    assert shadow.compared["qsa_sparse_paged_attention"].largest_error == pytest.approx(0.25, abs=1e-4)


def test_a_number_against_nan_is_an_infinite_error() -> None:
    compared, rows = (
        Compared(),
        {"raw_keys": torch.ones(1, 1, 8), "compressed_slots": torch.zeros(1, dtype=torch.int64)},
    )

    def made(value):
        return lambda **arguments: (torch.full((1, 1, 8), value), torch.zeros(1, 3, dtype=torch.int64))

    COMPARISONS["qsa_compress_groups_with_ratio"](compared, made(1.0), made(float("nan")), rows)
    assert compared.largest_error == float("inf")


class Told(logging.Handler):
    """Collects what is logged, whether or not vLLM lets records through to the root logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def test_after_its_steps_theirs_alone_runs_and_the_table_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"ours": 0, "theirs": 0}

    def counting(name):
        def store(cache, slot_mapping, rows):
            calls[name] += 1
            ops.qsa_store_cache_rows(cache, slot_mapping, rows)

        return store

    steps = Steps()
    shadow = Shadow(3, steps)
    run = shadow.wrap("qsa_store_cache_rows", counting("ours"), counting("theirs"))
    cache, slots = torch.zeros(3, 4, 1, 8), torch.tensor([3, -1, 99])
    logger, told = logging.getLogger("vllm.flashqsa"), Told()
    monkeypatch.setattr(logger, "handlers", [told])
    monkeypatch.setattr(logger, "level", logging.INFO)
    for _ in range(5):
        for _ in range(2):  # two layers a step
            run(cache, slots, torch.ones(3, 8))
        steps.next()
    shadow.tell()
    assert calls == {"ours": 6, "theirs": 10}
    assert len(told.lines) == 1
    assert "qsa_store_cache_rows: 6 calls, 18 rows, 0 with other ids, largest error 0, median" in told.lines[0]


def test_what_ours_refuses_is_told_and_theirs_serves(prepare_arguments) -> None:
    step = make_step(CASE, seed=8, written=False)
    arguments = prepare_arguments(step, True) | {"main_eps": 0.5}
    state = arguments["state_cache"].clone()
    shadow = Shadow(1, Steps())
    result = shadow.wrap("qsa_prepare", ops.qsa_prepare, lambda **_: "theirs")(**arguments)
    assert result == "theirs"
    assert_bitwise_equal(arguments["state_cache"], state)
    compared = shadow.compared["qsa_prepare"]
    assert compared.calls == 0
    assert "refused 1 times: qsa_prepare: main_eps must equal eps" in compared.line("qsa_prepare")


@pytest.mark.parametrize(("value", "steps"), [("shadow", registration.SHADOW_STEPS), ("shadow:7", 7)])
def test_the_switch_says_how_many_steps(monkeypatch: pytest.MonkeyPatch, value: str, steps: int) -> None:
    monkeypatch.setenv(registration.VARIABLE, value)
    assert registration.chosen_mode() == "shadow"
    assert registration.shadow_steps() == steps


@pytest.mark.parametrize("value", ["shadow:", "shadow:0", "shadow:x", "full:3", "", "SHADOW"])
def test_other_switches_are_refused(monkeypatch: pytest.MonkeyPatch, refuses, value: str) -> None:
    monkeypatch.setenv(registration.VARIABLE, value)
    with refuses(ArgumentError, "flashqsa", registration.VARIABLE, repr(value), "shadow:N"):
        registration.chosen_mode()
