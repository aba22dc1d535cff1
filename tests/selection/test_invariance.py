"""A row's scores and ids, to the bit: whatever the phase, chunk, batch, pages, workspace and process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashqsa.results import Selection
from flashqsa.selection.plain import least_workspace_bytes
from flashqsa.testing import Step, StepCase, assert_bitwise_equal, make_step, oracles, stream

OWN, LENGTH = 5, 150
WHOLE = StepCase("whole", ((0, LENGTH),), topk_blocks=6, request_seeds=(OWN,))
DEEP_OWN, DEEP_LENGTH = 6, 2_100  # blocks of one token: the rows at the end see three tiles of blocks
DEEP = StepCase(
    "deep", ((DEEP_LENGTH - 40, 40),), q_heads=1, kv_heads=1, head_dim=8, index_head_dim=24, block_tokens=1,
    topk_blocks=50, request_seeds=(DEEP_OWN,),
)  # fmt: skip


def lanes(selection: Selection, rows: slice | list[int] | torch.Tensor) -> list[torch.Tensor]:
    assert selection.scores is not None
    return [selection.block_ids[rows], selection.block_counts[rows], selection.scores[rows]]


def assert_same_rows(
    selection: Selection, rows: slice | list[int], expected: Selection, wanted: slice | list[int], label: str
) -> None:
    for name, got, want in zip(
        ("block_ids", "block_counts", "scores"), lanes(selection, rows), lanes(expected, wanted), strict=True
    ):
        assert_bitwise_equal(got, want, f"{label}: {name}")


@pytest.fixture(scope="module")
def whole_step() -> Step:
    """The whole prompt in one step: row i is token i."""
    return make_step(WHOLE, seed=40)


@pytest.fixture
def prefill(whole_step: Step, select: Any, backend: str) -> Selection:
    return select(whole_step, backend=backend, return_scores=True)


@pytest.mark.parametrize("position", [23, 31, 32, 33, 63, 64, 100, 127, 128, 149])
def test_decode_alone_selects_as_prefill_does(select: Any, backend: str, prefill: Selection, position: int) -> None:
    for page_tokens in (4, 64, 1600):
        case = dataclasses.replace(WHOLE, requests=((position, 1),), page_tokens=page_tokens)
        decode = select(make_step(case, seed=40), backend=backend, return_scores=True)
        assert_same_rows(decode, slice(0, 1), prefill, slice(position, position + 1), f"pages of {page_tokens}")


@pytest.mark.parametrize("width", range(1, 17))
def test_fault_36_a_verify_window_selects_as_serial_decode_does(
    select: Any, backend: str, prefill: Selection, width: int
) -> None:
    """Each row sees the blocks that earlier rows of the window closed, wherever the window begins."""
    for start in (39, 61, 128 - width, 134):
        case = dataclasses.replace(WHOLE, requests=((start, width),), speculative_rows=width - 1)
        window = select(make_step(case, seed=40), backend=backend, return_scores=True)
        assert window.visible_blocks.tolist() == [(start + i + 1) // 4 for i in range(width)]
        assert_same_rows(window, slice(0, width), prefill, slice(start, start + width), f"from {start}")


def test_fault_36_a_window_beyond_the_budget_at_context_5000(integer_step: Any, select: Any) -> None:
    case = StepCase("far", ((5_000, 7),), q_heads=1, kv_heads=1, head_dim=8, index_head_dim=8, topk_blocks=512)
    step = integer_step(case, seed=41)
    window = select(step)
    for row, position in step.requests[0].rows():
        alone = select(integer_step(dataclasses.replace(case, requests=((position, 1),)), seed=41))
        assert_bitwise_equal(window.block_ids[row : row + 1], alone.block_ids, f"row {row}")
    assert window.block_ids.tolist() == oracles.step_selection(step)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_chunks_beside_any_requests_select_as_one_prefill(
    select: Any, whole_step: Step, data: st.DataObject
) -> None:
    prefill = select(whole_step, backend="torch", return_scores=True)
    cuts = sorted(data.draw(st.sets(st.integers(1, LENGTH - 1), max_size=3)))
    for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        others = data.draw(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 5)), max_size=3))
        place = data.draw(st.integers(0, len(others)))
        case = dataclasses.replace(
            WHOLE,
            requests=(*others[:place], (start, end - start), *others[place:]),
            request_seeds=(*range(100, 100 + place), OWN, *range(200, 200 + len(others) - place)),
            page_tokens=data.draw(st.sampled_from([4, 12, 64])),
            contiguous=data.draw(st.booleans()),
            padding_rows=data.draw(st.integers(0, 2)),
            padding_requests=data.draw(st.integers(0, 2)),
        )
        chunk = select(make_step(case, seed=40), backend="torch", return_scores=True)
        first = sum(new for _, new in others[:place])
        assert_same_rows(chunk, slice(first, first + end - start), prefill, slice(start, end), f"[{start}, {end})")


def test_rows_that_see_several_tiles_of_blocks_select_alike_in_every_phase(select: Any) -> None:
    chunk = select(make_step(DEEP, seed=42), return_scores=True)
    first = DEEP_LENGTH - 40
    for start, width in ((first, 1), (first + 3, 4), (first + 17, 16), (DEEP_LENGTH - 1, 1)):
        case = dataclasses.replace(DEEP, requests=((12, 3), (start, width)), request_seeds=(1, DEEP_OWN))
        rows = select(make_step(case, seed=42), return_scores=True)
        assert_same_rows(rows, slice(3, 3 + width), chunk, slice(start - first, start - first + width), f"{start}")


def test_results_do_not_depend_on_the_workspace(select: Any, backend: str) -> None:
    """From the least on, so that contexts come in one piece or in many, and rows in eights or all at once."""
    requests = ((DEEP_LENGTH - 40, 40), (900, 11))
    step = make_step(dataclasses.replace(DEEP, requests=requests, request_seeds=None), seed=43)
    least = least_workspace_bytes(step.index_q, step.cache.block_keys, 50)
    usual = select(step, backend=backend, return_scores=True)
    for extra in (0, 1, 64 << 10, 200 << 10, 600 << 10, 4 << 20, 1 << 40):
        other = select(step, backend=backend, return_scores=True, workspace_bytes=least + extra)
        assert_same_rows(other, slice(None), usual, slice(None), f"workspace of {least + extra}")


def test_fault_01_ids_are_the_same_bytes_over_ten_calls(key_rows: Any, select: Any, backend: str) -> None:
    """64 requests that see 1 to 4,096 blocks; what lies past each one's blocks changes nothing."""
    visible = torch.linspace(1, 4096, 64).round().to(torch.int64).tolist()
    if backend == "reference":
        visible = visible[:8]
    generator = stream(44)
    keys = [torch.randn(m, 8, generator=generator) for m in visible]
    queries = [torch.randn(1, 4, 8, generator=generator) for _ in visible]
    first = select(key_rows(keys, queries, seed=44), backend=backend, return_scores=True)
    for call in range(9):
        fill = (torch.nan, torch.inf, -torch.inf, 3e38)[call % 4]
        again = select(key_rows(keys, queries, seed=44 + call % 2, fill=fill), backend=backend, return_scores=True)
        assert_same_rows(again, slice(None), first, slice(None), f"call {call}")


def test_fault_06_interleaved_requests_select_as_they_do_alone(integer_step: Any, select: Any, backend: str) -> None:
    case = StepCase(
        "two", ((2_990, 11), (2_770, 7)), q_heads=1, kv_heads=1, head_dim=8, index_head_dim=16, topk_blocks=64
    )
    both = select(integer_step(case, seed=45), backend=backend, return_scores=True)
    for request, rows in enumerate((slice(0, 11), slice(11, 18))):
        single = dataclasses.replace(case, requests=(case.requests[request],), request_seeds=(request,))
        alone = select(integer_step(single, seed=45), backend=backend, return_scores=True)
        assert_same_rows(both, rows, alone, slice(None), f"request {request}")


def test_fault_06_a_complete_last_block_is_dropped_when_it_scores_low(
    scored_rows: Any, select: Any, backend: str
) -> None:
    scores = torch.rand(100, generator=stream(46)) + 1.0
    scores[-1] = 0.5
    selection = select(scored_rows(scores, seed=46, topk_blocks=40), backend=backend)
    assert int(selection.block_ids[0].max()) < 99


@contextmanager
def precision(name: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
        assert torch.get_float32_matmul_precision() == name, "the caller's precision was not restored"
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SURROUNDINGS = {
    "medium-precision": lambda: precision("medium"),
    "high-precision": lambda: precision("high"),
    "bf16-by-default": lambda: default_dtype(torch.bfloat16),
    "fp64-by-default": lambda: default_dtype(torch.float64),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference-mode": torch.inference_mode,
    "deterministic": deterministic,
    "meta-by-default": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("surroundings", SURROUNDINGS.values(), ids=SURROUNDINGS.keys())
def test_what_the_process_has_set_changes_nothing(select: Any, backend: str, surroundings: Any) -> None:
    case = dataclasses.replace(DEEP, requests=((1_100, 20),), index_heads=8, index_head_dim=64)
    step = make_step(case, seed=47)
    usual = select(step, backend=backend, return_scores=True)
    with surroundings():
        there = select(step, backend=backend, return_scores=True)
    assert_same_rows(there, slice(None), usual, slice(None), "surroundings")
    assert there.scores is not None
    assert there.scores.dtype == torch.float32


def test_medium_precision_does_not_reach_products_that_torch_would_shorten(key_rows: Any, select: Any) -> None:
    generator = stream(49)
    keys, queries = torch.randn(1_100, 512, generator=generator), torch.randn(3, 64, 512, generator=generator)
    inputs = key_rows([keys], [queries], seed=49, topk_blocks=100)
    usual = select(inputs, backend="torch", return_scores=True)
    with precision("medium"):
        there = select(inputs, backend="torch", return_scores=True)
    assert_same_rows(there, slice(None), usual, slice(None), "medium")


def test_selection_carries_no_gradient(select: Any, backend: str) -> None:
    step = make_step(WHOLE, seed=48)
    step.index_q.requires_grad_(True)
    selection = select(step, backend=backend, return_scores=True)
    assert selection.scores is not None
    assert not selection.scores.requires_grad
