"""What `select_blocks` refuses, and that nothing is written then."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
from flashqsa.results import Selection
from flashqsa.selection import select_blocks
from flashqsa.selection.plain import least_workspace_bytes
from flashqsa.testing import Step, StepCase, assert_unchanged, make_step, snapshot


@pytest.fixture
def step() -> Step:
    return make_step(StepCase("refused", ((30, 2), (9, 1)), padding_rows=1), seed=80)


@pytest.fixture
def out(step: Step) -> Selection:
    rows = step.num_rows
    return Selection(
        block_ids=torch.full((rows, 8), 77, dtype=torch.int32),
        block_counts=torch.full((rows,), 77, dtype=torch.int32),
        scores=None,
        visible_blocks=torch.full((rows,), 77, dtype=torch.int32),
        request_ids=torch.full((rows,), 77, dtype=torch.int32),
    )


def bad_queries(step: Step) -> dict[str, tuple[Any, type[Exception], tuple[str, ...]]]:
    q = step.index_q
    return {
        "rows": (q[:3], ShapeError, ("index_q must be [T, Hi, Di] = [4, Hi, 16]", "[3, 4, 16]")),
        "dimension": (q[..., :8], ShapeError, ("index_q", "[4, 4, 8]")),
        "rank": (q[0], ShapeError, ("index_q", "[4, 16]")),
        "no-head": (q[:, :0], ShapeError, ("index_q", "at least one head", "[4, 0, 16]")),
        "strided": (q.transpose(1, 2).contiguous().transpose(1, 2), ShapeError, ("index_q", "contiguous")),
        "integers": (q.to(torch.int32), DTypeError, ("index_q", "int32")),
        "list": (q.tolist(), DTypeError, ("index_q", "list")),
        "device": (q.to("meta"), DeviceError, ("index_q", "meta")),
    }


@pytest.mark.parametrize("fault", bad_queries(make_step(StepCase("x", ((30, 2), (9, 1)), padding_rows=1), seed=80)))
def test_select_blocks_refuses_queries(refuses: Any, step: Step, out: Selection, backend: str, fault: str) -> None:
    index_q, error, parts = bad_queries(step)[fault]
    before = snapshot(step.cache, step.plan, step.index_q, out)
    with refuses(error, "select_blocks", *parts):
        select_blocks(index_q, step.cache, step.plan, out=out, backend=backend)
    assert_unchanged(before)


def test_select_blocks_refuses_caches(refuses: Any, step: Step, out: Selection, backend: str) -> None:
    def call(**changes: Any) -> None:
        select_blocks(step.index_q, dataclasses.replace(step.cache, **changes), step.plan, out=out, backend=backend)

    before = snapshot(step.cache, step.plan, step.index_q, out)
    with refuses(ArgumentError, "select_blocks", "cache must have block_keys", "got None"):
        call(block_keys=None)
    with refuses(ShapeError, "select_blocks", "block_keys", "= 4 blocks, got 2"):
        call(block_keys=step.cache.block_keys[:, :2])
    wide = torch.zeros(len(step.cache.k_pages), 8, 2, 16)
    with refuses(ShapeError, "select_blocks", "k_pages", "page_tokens = 16", "got 8"):
        call(k_pages=wide, v_pages=wide)
    with refuses(ArgumentError, "select_blocks", "k_pages must hold", "got 2"):
        call(k_pages=step.cache.k_pages[:2], v_pages=step.cache.v_pages[:2], block_keys=step.cache.block_keys[:2])
    assert_unchanged(before)


def test_select_blocks_refuses_a_workspace_below_one_tile(
    refuses: Any, step: Step, out: Selection, backend: str
) -> None:
    least = least_workspace_bytes(step.index_q, step.cache.block_keys, 8)
    before = snapshot(out)
    for workspace in (least - 1, 0, -5):
        with refuses(ArgumentError, "select_blocks", f"workspace_bytes must be at least {least}", f"got {workspace}"):
            select_blocks(step.index_q, step.cache, step.plan, out=out, workspace_bytes=workspace, backend=backend)
    assert_unchanged(before)


def test_a_default_workspace_always_holds_a_tile(key_rows: Any, select: Any) -> None:
    keys, queries = torch.ones(3, 2_000), torch.ones(1, 300, 2_000)
    inputs = key_rows([keys], [queries], seed=81, topk_blocks=2**17)
    assert least_workspace_bytes(inputs.index_q, inputs.cache.block_keys, 2**17) > 64 << 20
    assert select(inputs, return_scores=True).block_ids[0, :4].tolist() == [0, 1, 2, -1]


def bad_buffers(out: Selection) -> dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]]:
    return {
        "rows": (dict(block_ids=out.block_ids[:3]), ShapeError, ("out.block_ids", "[4, 8]", "[3, 8]")),
        "columns": (dict(block_ids=out.block_ids[:, :7]), ShapeError, ("out.block_ids", "[4, 7]")),
        "ids-int64": (dict(block_ids=out.block_ids.long()), DTypeError, ("out.block_ids", "int64")),
        "counts": (dict(block_counts=out.block_counts[:2]), ShapeError, ("out.block_counts", "[2]")),
        "visible": (dict(visible_blocks=out.visible_blocks.float()), DTypeError, ("out.visible_blocks", "float32")),
        "requests": (dict(request_ids=out.request_ids.to("meta")), DeviceError, ("out.request_ids", "meta")),
        "scores-unasked": (dict(scores=torch.zeros(4, 8)), ArgumentError, ("out.scores", "return_scores")),
    }


BUFFER_FAULTS = ["rows", "columns", "ids-int64", "counts", "visible", "requests", "scores-unasked"]


@pytest.mark.parametrize("fault", BUFFER_FAULTS)
def test_select_blocks_refuses_buffers(refuses: Any, step: Step, out: Selection, backend: str, fault: str) -> None:
    changes, error, parts = bad_buffers(out)[fault]
    before = snapshot(step.cache, step.plan, step.index_q, out)
    with refuses(error, "select_blocks", *parts):
        select_blocks(step.index_q, step.cache, step.plan, out=dataclasses.replace(out, **changes), backend=backend)
    assert_unchanged(before)


def test_select_blocks_refuses_buffers_whose_scores_do_not_fit(
    refuses: Any, step: Step, out: Selection, backend: str
) -> None:
    for scores, error, parts in (
        (None, ArgumentError, ("out.scores", "no scores")),
        (torch.zeros(4, 8, dtype=torch.float64), DTypeError, ("out.scores", "float64")),
        (torch.zeros(4, 9), ShapeError, ("out.scores", "[4, 9]")),
    ):
        with refuses(error, "select_blocks", *parts):
            select_blocks(
                step.index_q, step.cache, step.plan, return_scores=True,
                out=dataclasses.replace(out, scores=scores), backend=backend,
            )  # fmt: skip


def test_select_blocks_never_falls_back_from_a_named_backend(step: Step, out: Selection) -> None:
    before = snapshot(out)
    with pytest.raises(ArgumentError, match="select_blocks: backend must be one of"):
        select_blocks(step.index_q, step.cache, step.plan, out=out, backend="numpy")
    with pytest.raises(UnsupportedError, match=r"select_blocks: backend .*'triton'"):
        select_blocks(step.index_q, step.cache, step.plan, out=out, backend="triton")
    assert_unchanged(before)
