"""The soak serves random requests without a difference, and sees the differences that faults make."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flashqsa import CacheLayout, PagedPool, Selection, StepPlan
from flashqsa.cache.pool import handover
from flashqsa.cache.pool.accounts import PoolAccounts
from flashqsa.cache.pool.memory import PoolMemory
from flashqsa.errors import ArgumentError, FlashQSAError
from flashqsa.testing import soak
from flashqsa.testing.soak import run_stages
from flashqsa.testing.soak_command import main

ACTIONS = {"admit", "fork", "hit", "hold", "hand_over", "close", "ragged", "padded_decode", "verify", "reuse", "abort"}
STEPS = 300


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_soak_of_300_steps(seed: int) -> None:
    report = soak(STEPS, seed=seed, stages="torch")
    assert report.steps == STEPS == sum(report.actions.values())
    assert report.rows > 20 * STEPS
    assert set(report.actions) >= ACTIONS


@pytest.mark.slow
def test_soak_with_values_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed memory poisoned, values and accounts checked; short requests and few pages, so that more is shared."""
    monkeypatch.setenv("FLASHQSA_DEBUG", "1")
    report = soak(60, seed=1, stages="torch", max_tokens=260, num_pages=60)
    assert sum(report.actions.values()) == 60
    assert report.rows > 5 * 60


@pytest.mark.slow
@pytest.mark.parametrize("page_tokens", [4, 80])
def test_soak_on_pages_of_any_size(page_tokens: int) -> None:
    report = soak(40, seed=6, stages="torch", max_tokens=320, page_tokens=page_tokens, num_pages=1200 // page_tokens)
    assert report.rows > 5 * 40


def test_soak_from_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    main(["8", "--seed", "3", "--stages", "torch", "--max-tokens", "60", "--num-pages", "30"])
    printed = json.loads(capsys.readouterr().out)
    report = soak(8, seed=3, stages="torch", max_tokens=60, num_pages=30)
    assert {name: printed[name] for name in ("steps", "seed", "rows", "requests", "replays", "actions")} == {
        **dataclasses.asdict(report), "seed": 3,
    }  # fmt: skip


def test_graphs_need_a_gpu(refuses: Any) -> None:
    with refuses(ArgumentError, "soak", "graphs", "cpu"):
        soak(1, graphs=True)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"steps": 0}, ("steps", "got 0")),
        ({"steps": 2.5}, ("steps", "got 2.5")),
        ({"seed": "x"}, ("seed", "got 'x'")),
        ({"max_requests": 0}, ("max_requests", "got 0")),
        ({"max_tokens": 0}, ("max_tokens", "got 0")),
        ({"max_tokens": 61}, ("max_tokens", "block_tokens = 4", "got 61")),
        ({"stages": 3}, ("stages", "got 3")),
        ({"config": 3}, ("config", "int")),
    ],
)
def test_soaks_that_show_nothing_are_refused(refuses: Any, change: dict[str, Any], parts: tuple[str, ...]) -> None:
    arguments = {"steps": 1, "stages": "torch"} | change
    with refuses(ArgumentError, "soak", *parts):
        soak(arguments.pop("steps"), **arguments)


def test_soak_is_a_function_of_its_seed() -> None:
    first, again, other = (soak(12, seed=seed, stages="torch", max_tokens=100) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def _without_the_last_block(output: torch.Tensor, selection: Selection, plan: StepPlan) -> Any:
    """One block less in every row: as if top-k had lost a candidate."""
    counts = (selection.block_counts - 1).clamp(min=0)
    ids = selection.block_ids.masked_fill(torch.arange(selection.block_ids.shape[1]) >= counts[:, None], -1)
    return output, replace(selection, block_ids=ids, block_counts=counts)


def _another_block(output: torch.Tensor, selection: Selection, plan: StepPlan) -> Any:
    """Where a row has a choice, the first blocks instead of the best ones."""
    many = selection.visible_blocks > selection.block_ids.shape[1]
    first = torch.arange(selection.block_ids.shape[1], dtype=torch.int32)
    return output, replace(selection, block_ids=torch.where(many[:, None], first, selection.block_ids))


def _padding_written(output: torch.Tensor, selection: Selection, plan: StepPlan) -> Any:
    """Rows that nobody asked for are not zero."""
    return output.masked_fill((plan.request_ids < 0)[:, None, None], 1.0), selection


def _imprecise(output: torch.Tensor, selection: Selection, plan: StepPlan) -> Any:
    return output.half().float(), selection


FAULTS = [_without_the_last_block, _another_block, _padding_written, _imprecise]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__[1:])
def test_soak_sees_a_stage_that_is_wrong(fault: Callable[..., Any]) -> None:
    right = run_stages("torch")

    def wrong(inputs: Any, cache: Any, plan: StepPlan, selection: Selection | None) -> Any:
        return fault(*right(inputs, cache, plan, selection), plan)

    where = "rows of padding" if fault is _padding_written else r"request \d+, layer 1"
    with pytest.raises(AssertionError, match=rf"step \d+, .*{where}"):
        soak(40, seed=2, stages=wrong, max_tokens=300)


POOL_FAULTS = ["ring of a fork", "page on write", "block keys on write", "rollback in the ring", "ring of an import",
               "pages of an import", "page freed too soon"]  # fmt: skip


@pytest.mark.parametrize("fault", POOL_FAULTS)
def test_soak_sees_a_pool_that_is_wrong(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """A fork without its ring; copies on write that never happen, or without block keys; a ring without drafts; an
    import without a ring, or whose last page is not written; a shared page that is free when one holder closes."""
    if fault == "ring of a fork":
        monkeypatch.setattr(PoolMemory, "copy_ring", lambda *_: None)
    elif fault == "page on write":
        monkeypatch.setattr(PoolMemory, "copy_page", lambda *_: None)
    elif fault == "block keys on write":
        monkeypatch.setattr(PoolMemory, "paged", property(lambda memory: (memory.k, memory.v)))
    elif fault == "ring of an import":
        monkeypatch.setattr("flashqsa.cache.pool.handover.write", _import_without_ring)
    elif fault == "pages of an import":
        monkeypatch.setattr("flashqsa.cache.pool.handover._write_rows", lambda target, pages, rows: None)
    elif fault == "page freed too soon":
        monkeypatch.setattr(PoolAccounts, "_drop", _drop_for_all)
    else:
        small = CacheLayout.from_config
        monkeypatch.setattr(CacheLayout, "from_config", lambda *a, **k: small(*a, **k | {"speculative_rows": 0}))
        monkeypatch.setattr(PagedPool, "rollback", _rollback_blindly)
    with pytest.raises((AssertionError, FlashQSAError)):
        soak(80, seed=5, stages="torch", max_tokens=120)


def _import_without_ring(exported: Any, memory: PoolMemory, page_ids: Any, ring_id: int, ring_start: int) -> None:
    """As if an export were pages alone."""
    for cache in memory.caches:
        for name, pages in (("k", cache.k_pages), ("v", cache.v_pages), ("block_keys", cache.block_keys)):
            handover._write_rows(pages, torch.tensor(page_ids), exported.tensors[f"layer.{cache.layer_id}.{name}"])


def _drop_for_all(accounts: PoolAccounts, page_ids: Any) -> list[int]:
    freed = list(page_ids)
    for page in freed:
        accounts.holders[page] = 0
    accounts.free_page_ids += [page for page in freed if page not in accounts.free_page_ids]
    return freed


def _rollback_blindly(pool: PagedPool, request: Any, *, length: int) -> None:
    """As if a ring of whole blocks could take drafts."""
    account = pool._accounts.account("", request)
    pool._accounts.cut(account, length)
    account.ring_start = min(account.ring_start, length - length % 4)
