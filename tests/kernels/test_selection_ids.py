"""The top-K kernels: exact ids on given scores, on ties, plateaus, NaN and infinities, in every form."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from flashqsa.selection import row_levels, select_blocks, triton_topk
from flashqsa.selection.row_levels import RowLevels
from flashqsa.testing import assert_bitwise_equal, assert_same_selection, oracles, stream

FORMS = {
    "no groups": (512, 8, False),
    "no groups, bins": (512, 8, True),
    "groups": (128, 4, False),
    "groups, bins": (128, 4, True),
    "groups of groups": (64, 4, False),
    "groups of groups, bins": (64, 4, True),
    "more groups than the budget": (128, 2, False),
    "more groups than the budget, bins": (128, 2, True),
    "levels above the tile": (32, 2, True),
}
"""Numbers that a program holds, numbers of a group, bins or not; a row of 300 scores and K = 16 has these groups."""


def _take(monkeypatch: pytest.MonkeyPatch, block: int, group: int, bins: bool) -> None:
    """Kernels of this form, whatever the shape, of at least twice the budget."""

    def choose(rows: int, levels: RowLevels, multiprocessors: int) -> triton_topk.TopKernelConfig:
        return triton_topk.TopKernelConfig(bins, 4)

    monkeypatch.setattr(triton_topk.TopKernelConfig, "choose", choose)
    monkeypatch.setattr(row_levels, "LEAST_BLOCK", block)
    monkeypatch.setattr(row_levels, "MOST_BLOCK", block)
    monkeypatch.setattr(row_levels, "MOST_GROUP", group)


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One form of the kernels."""
    name = str(request.param)
    _take(monkeypatch, *FORMS[name])
    return name


def test_rows_of_300_scores_have_the_levels_that_forms_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for block, group, bins in list(FORMS.values())[::2]:
        _take(monkeypatch, block, group, bins)
        levels = RowLevels.of(300, 16, 64)
        found.append((levels.block, levels.group, levels.levels, levels.given))
    assert found == [(512, 8, 1, 0), (128, 4, 2, 1), (64, 4, 3, 2), (128, 2, 3, 2), (32, 2, 5, 4)]


def test_levels_of_a_row() -> None:
    assert [RowLevels.of(width, 512, 64).block for width in (1, 65, 2048, 2049)] == [64, 128, 2048, 2048]
    assert [RowLevels.of(1 << 20, topk, 64).block for topk in (1, 512, 4096, 10000)] == [2048, 2048, 16384, 32768]
    long = RowLevels.of(131072, 512, 64)
    assert (long.group, long.levels, long.given, long.span) == (4, 4, 3, 131072)
    assert long.numbers() == 131072 // 4 + 131072 // 16 + 131072 // 64
    assert RowLevels.of(131072, 512, 32).given == 2, "groups of 64 do not fit into tiles of 32"
    assert RowLevels.of(300, 16, 64).numbers() == 0, "a short row has no levels"


def _plateaus() -> dict[str, list[float]]:
    noise = torch.rand(300, generator=stream(1)).tolist()
    mixed = [1.0 if g % 3 else 2.0 for g in range(300)]
    special = list(noise)
    for g in range(0, 300, 7):
        special[g] = math.nan
    for g in range(3, 300, 50):
        special[g] = math.inf
    few = [math.nan] * 300
    few[250], few[40], few[299] = 0.0, 2.0**-126, 3.0
    return {
        "distinct": noise,
        "rising": [float(g) for g in range(300)],
        "falling": [float(300 - g) for g in range(300)],
        "equal": [1.0] * 300,
        "zeros": [0.0] * 300,
        "signed zeros": [0.0 if g % 2 else -0.0 for g in range(300)],
        "two plateaus": mixed,
        "few positive": [1.0 + g if g % 31 == 0 else 0.0 for g in range(300)],
        "one bin": [1.0 + 2.0**-11 * noise[g] for g in range(300)],
        "tied integers": [float(int(8 * x)) for x in noise],
        "subnormal": [g * 1.4e-45 for g in range(300)],
        "huge": [1.5e38 * x for x in noise],
        "all infinite": [math.inf] * 300,
        "all NaN": [math.nan] * 300,
        "mostly NaN": few,
        "NaN and infinite": special,
        "exactly K above zero": [2.0 if g % 20 == 5 else 0.0 for g in range(300)],
    }


@pytest.mark.parametrize("name", _plateaus())
def test_fault_2_ids_of_given_scores(name: str, form: str, scored_rows: Any, select: Any) -> None:
    """The kernel against the oracle, then against the definition; three rows see as many blocks and score in steps."""
    scores = _plateaus()[name]
    inputs = scored_rows(scores, seed=2, rows=2)
    selection = select(inputs, return_scores=True)
    best = oracles.select_best(scores, 16)
    assert_same_selection(selection, [best, best])
    wanted = torch.tensor([[scores[g] for g in best]] * 2, device=selection.scores.device)
    wanted[1] *= 2.0
    if name != "subnormal":  # a device may flush them in the product
        assert torch.equal(selection.scores.nan_to_num(nan=-1.0), wanted.nan_to_num(nan=-1.0))
    defined = select_blocks(inputs.index_q, inputs.cache, inputs.plan, backend="reference")
    assert_bitwise_equal(selection.block_ids, defined.block_ids, "against the definition")


@pytest.mark.parametrize("topk_blocks", [1, 3, 5, 16, 100, 255, 299, 300, 301, 512])
def test_budgets_that_are_no_power_of_two(topk_blocks: int, scored_rows: Any, select: Any) -> None:
    scores = [float(int(20 * x)) for x in torch.rand(300, generator=stream(3)).tolist()]
    for return_scores in (False, True):
        selection = select(scored_rows(scores, seed=3, topk_blocks=topk_blocks), return_scores=return_scores)
        assert_same_selection(selection, [oracles.select_best(scores, topk_blocks)])


@pytest.mark.parametrize("group", [2, 4])
@pytest.mark.parametrize("topk_blocks", [7, 48, 64])
def test_groups_of_odd_budgets(
    topk_blocks: int, group: int, scored_rows: Any, select: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that end in the middle, K groups that do not fill a program."""
    _take(monkeypatch, 64, group, group == 2)
    for blocks in (65, 129, 300, 511):
        scores = [float(int(20 * x)) for x in torch.rand(blocks, generator=stream(4, blocks)).tolist()]
        for return_scores in (False, True):
            inputs = scored_rows(scores, seed=4, topk_blocks=topk_blocks, max_blocks=600)
            selection = select(inputs, return_scores=return_scores)
            assert_same_selection(selection, [oracles.select_best(scores, topk_blocks)])


@pytest.mark.parametrize(
    ("name", "blocks", "wanted"),
    [
        ("equal", 1024, list(range(512))),
        ("signed zeros", 1024, list(range(512))),
        ("300 at 2.0", 1024, None),
        ("100 positive", 2000, None),
    ],
)
def test_fault_2_ties_at_the_released_budget(
    name: str, blocks: int, wanted: list[int] | None, scored_rows: Any, select: Any
) -> None:
    g = torch.arange(blocks)
    scores = {
        "equal": torch.ones(blocks),
        "signed zeros": torch.where(g % 2 == 0, -0.0, 0.0),
        "300 at 2.0": torch.where((g * 7) % 1024 < 300, 2.0, 1.0),
        "100 positive": torch.where(g % 20 == 3, 1.0 + g, torch.zeros(blocks)),
    }[name]
    selection = select(scored_rows(scores, seed=5, topk_blocks=512))
    best = oracles.select_best(scores, 512)
    assert wanted is None or best == wanted
    assert_same_selection(selection, [best])


@pytest.mark.parametrize("blocks", [16383, 16384, 16385, 30938])
@pytest.mark.parametrize("kind", ["noise", "one step"])
def test_fault_3_rows_packed_in_one_bin(blocks: int, kind: str, scored_rows: Any, select: Any) -> None:
    """No candidate buffer to overflow: one chunk, one chunk and a bit, two of them, all scores nearly equal."""
    noise = torch.rand(blocks, generator=stream(6, blocks))
    scores = 1.0 + (1e-3 * noise if kind == "noise" else 2.0**-11 * (noise > 0.97))
    selection = select(scored_rows(scores, seed=6, topk_blocks=512))
    best = scores.sort(descending=True, stable=True).indices[:512].sort().values
    assert selection.block_ids[0].tolist() == best.tolist()


def test_scratch_of_a_plan_is_used_again(scored_rows: Any, select: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch left in the scratch changes nothing of the next."""
    _take(monkeypatch, 64, 4, False)
    noise = torch.rand(300, generator=stream(10))
    inputs = scored_rows(noise.tolist(), seed=10, rows=2)
    first = select(inputs)
    assert_same_selection(first, [oracles.select_best(noise.tolist(), 16)] * 2)
    for _ in range(2):
        assert_bitwise_equal(select(inputs).block_ids, first.block_ids, "again")


def test_best_blocks_in_one_group_and_in_one_each(
    scored_rows: Any, select: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that tie with each other, groups whose best is NaN, the last group cut short."""
    _take(monkeypatch, 64, 4, False)
    noise = torch.rand(299, generator=stream(11)).tolist()
    for scores in (
        [3.0 if 40 <= g < 56 else noise[g] for g in range(299)],
        [2.0 if g % 4 == 3 else 1.0 for g in range(299)],
        [2.0 if g >= 290 else 1.0 for g in range(299)],
        [noise[g] if g % 32 == 31 else math.nan for g in range(299)],
        [math.nan if g % 4 else noise[g] for g in range(299)],
    ):
        inputs = scored_rows(scores, seed=11, rows=1)
        assert_same_selection(select(inputs), [oracles.select_best(scores, 16)])


@pytest.mark.gpu
@pytest.mark.parametrize("form_taken", [None, (1024, 2, False), (2048, 4, True)], ids=["own", "guesses", "bins"])
@pytest.mark.parametrize("blocks", [16383, 16384, 16385, 30938, 65504, 70000, 262144])
def test_fault_3_long_rows(
    blocks: int,
    form_taken: tuple[int, int, bool] | None,
    scored_rows: Any,
    select: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One row, and 64 of 32 requests."""
    if form_taken is not None:
        _take(monkeypatch, *form_taken)
    for scores in (
        1.0 + 1e-3 * torch.rand(blocks, generator=stream(7, blocks)),
        1.0 + 2.0**-11 * (torch.rand(blocks, generator=stream(7, blocks)) > 0.97),
        torch.randn(blocks, generator=stream(8, blocks)).clamp(min=0.0),
        (3 * torch.randn(blocks, generator=stream(9, blocks))).round().abs(),
        torch.zeros(blocks),
        torch.arange(blocks, dtype=torch.float32),
    ):
        best = scores.sort(descending=True, stable=True).indices[:512].sort().values
        for rows, requests in ((1, 1), (2, 32)):
            selection = select(scored_rows(scores, seed=7, topk_blocks=512, rows=rows, requests=requests))
            assert bool((selection.block_ids.cpu() == best).all()), f"{rows} x {requests} rows"
