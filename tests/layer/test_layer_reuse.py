"""Draft steps that reuse a selection: nothing recent is lost, nothing counted twice, and the caches stay complete."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa import QSAAttention
from flashqsa.errors import ArgumentError, SelectionError, ShapeError
from flashqsa.testing import assert_bitwise_equal, assert_unchanged, assert_within_budget, oracles, snapshot

CONTEXT, DRAFTS = 200, 9


@pytest.fixture
def serving(make_config: Any, make_layer: Any, row_by_row: Any, make_rope: Any, make_engine: Any) -> Any:
    """(layer, rope, engine), the layer's projections row by row."""
    config = make_config()
    return row_by_row(make_layer(config)), make_rope(config), make_engine(config, layers=2, speculative_rows=16)


def _piece(rows: Any, name: str, sequence: Any, start: int, end: int) -> Any:
    return rows(name, sequence[0][start:end], sequence[1][:, start:end])


@torch.no_grad()
@pytest.mark.transformers
@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_reused_rows_attend_their_blocks_and_everything_since(
    stock: Any, make_engine: Any, make_rope: Any, make_sequence: Any, rows: Any, offset: int
) -> None:
    """The tail of a reused row starts where its blocks ended when it was selected, though blocks close meanwhile."""
    theirs, start = stock(), CONTEXT + offset
    config = theirs.config
    layer, rope, engine = QSAAttention(config), make_rope(config), make_engine(config)
    layer.load_state_dict(theirs.layer.state_dict())
    sequence = make_sequence(start + DRAFTS)
    _, selection = engine.step(layer, rope, [_piece(rows, "a", sequence, 0, start)])
    last = selection.take(torch.tensor([start - 1]))
    outputs = []
    for token in range(start, start + DRAFTS):
        (out,), used = engine.step(layer, rope, [_piece(rows, "a", sequence, token, token + 1)], selection=last)
        assert used is last
        outputs.append(out)
    _, attended = theirs.run(*sequence)
    ids = last.block_ids[0, : int(last.block_counts[0])].tolist()
    visible = start // config.block_tokens
    assert len(ids) == config.topk_blocks < visible
    for token in range(start, start + DRAFTS):
        attended[token] = False
        attended[token, oracles.selected_tokens(ids, visible, token, config.block_tokens)] = True
    expected, _ = theirs.run(*sequence, attended)
    exact = theirs.exactly(*sequence, attended)
    assert_within_budget(torch.cat(outputs), expected[start:], exact[start:])


@torch.no_grad()
def test_reuse_keeps_the_caches_up_to_date(serving: Any, make_engine: Any, make_sequence: Any, rows: Any) -> None:
    """A fresh selection after some reused steps is what it would have been without them."""
    layer, rope, reusing = serving
    fresh = make_engine(reusing.config, speculative_rows=16)
    sequence = make_sequence(CONTEXT + DRAFTS + 1)
    _, selection = reusing.step(layer, rope, [_piece(rows, "a", sequence, 0, CONTEXT)])
    fresh.step(layer, rope, [_piece(rows, "a", sequence, 0, CONTEXT)])
    last = selection.take(torch.tensor([CONTEXT - 1]))
    for token in range(CONTEXT, CONTEXT + DRAFTS):
        piece = _piece(rows, "a", sequence, token, token + 1)
        reusing.step(layer, rope, [piece], selection=last)
        fresh.step(layer, rope, [piece])
    assert_bitwise_equal(reusing.block_keys("a"), fresh.block_keys("a"), "block keys")
    for mine, theirs in zip(reusing.ring("a"), fresh.ring("a"), strict=True):
        assert_bitwise_equal(mine, theirs, "ring")
    piece = _piece(rows, "a", sequence, CONTEXT + DRAFTS, CONTEXT + DRAFTS + 1)
    (mine,), again = reusing.step(layer, rope, [piece])
    (theirs,), expected = fresh.step(layer, rope, [piece])
    assert_bitwise_equal(mine, theirs, "output")
    assert_bitwise_equal(again.block_ids, expected.block_ids, "selection")


@torch.no_grad()
def test_fault_35_a_selection_follows_its_requests(serving: Any, make_sequence: Any, rows: Any) -> None:
    """Requests leave, stay and change places between steps: take() carries the selection along."""
    layer, rope, engine = serving
    lengths = {"a": 90, "b": 131, "c": 170}
    sequences = {name: make_sequence(n + 2, seed) for seed, (name, n) in enumerate(lengths.items())}
    _, selection = engine.step(layer, rope, [_piece(rows, name, sequences[name], 0, n) for name, n in lengths.items()])
    last_rows = dict(zip(lengths, (torch.tensor(list(lengths.values())).cumsum(0) - 1).tolist(), strict=True))
    alone = {}
    for name, n in lengths.items():
        own = selection.take(torch.tensor([last_rows[name]]))
        (alone[name],), _ = engine.step(layer, rope, [_piece(rows, name, sequences[name], n, n + 1)], selection=own)
        engine.rollback(name, n)
    stay = ["c", "a"]
    kept = selection.take(torch.tensor([last_rows[name] for name in stay]))
    work = [_piece(rows, name, sequences[name], lengths[name], lengths[name] + 1) for name in stay]
    outputs, _ = engine.step(layer, rope, work, selection=kept)
    for name, out in zip(stay, outputs, strict=True):
        assert_bitwise_equal(out, alone[name], name)


@torch.no_grad()
def test_fault_35_a_selection_of_another_layer_is_refused(
    serving: Any, make_sequence: Any, rows: Any, refuses: Any
) -> None:
    layer, rope, engine = serving
    sequence = make_sequence(98)
    _, selection = engine.step(layer, rope, [_piece(rows, "a", sequence, 0, 97)], layer_id=0)
    last = selection.take(torch.tensor([96]))
    assert last.layer_id == 0
    piece = _piece(rows, "a", sequence, 97, 98)
    with refuses(SelectionError, "QSAAttention", "layer 1", "layer 0"):
        engine.step(layer, rope, [piece], layer_id=1, selection=last)


@torch.no_grad()
def test_a_selection_that_does_not_fit_leaves_the_caches_alone(
    serving: Any, make_sequence: Any, rows: Any, refuses: Any
) -> None:
    """Of other rows, of another layer, of no row at all: refused before anything is written."""
    layer, rope, engine = serving
    sequence = make_sequence(98)
    _, selection = engine.step(layer, rope, [_piece(rows, "a", sequence, 0, 97)], layer_id=0)
    last = selection.take(torch.tensor([96]))
    before = snapshot(engine.caches)
    for wrong, error in (
        (dataclasses.replace(last, layer_id=1), SelectionError),
        (dataclasses.replace(last, block_ids=last.block_ids.flip(1)), SelectionError),
        (selection, ShapeError),
        (last.block_ids, ArgumentError),
    ):
        with refuses(error, "QSAAttention", "selection"):
            engine.step(layer, rope, [_piece(rows, "a", sequence, 97, 98)], layer_id=0, selection=wrong)
        engine.rollback("a", 97)
        assert_unchanged(before)


@torch.no_grad()
@pytest.mark.parametrize("accepted", [1, 2, 3, 4])
def test_fault_34_reuse_is_anchored_on_the_last_accepted_row(
    serving: Any, make_sequence: Any, rows: Any, accepted: int
) -> None:
    """After a window of 4, drafts reuse the row that was accepted last, not the one that was computed last."""
    layer, rope, engine = serving
    sequence = make_sequence(CONTEXT + 8)
    engine.step(layer, rope, [_piece(rows, "a", sequence, 0, CONTEXT)])
    _, window = engine.step(layer, rope, [_piece(rows, "a", sequence, CONTEXT, CONTEXT + 4)])
    engine.rollback("a", CONTEXT + accepted)
    anchor = window.take(torch.tensor([accepted - 1]))
    assert int(anchor.visible_blocks[0]) == (CONTEXT + accepted) // 4
    token = CONTEXT + accepted
    piece = _piece(rows, "a", sequence, token, token + 1)
    (out,), _ = engine.step(layer, rope, [piece], selection=anchor)
    engine.rollback("a", CONTEXT)
    for step in range(CONTEXT, token):
        _, serial = engine.step(layer, rope, [_piece(rows, "a", sequence, step, step + 1)])
    (expected,), _ = engine.step(layer, rope, [piece], selection=serial)
    assert_bitwise_equal(out, expected, "the draft after the window")


@torch.no_grad()
def test_reuse_refuses_a_row_that_saw_more(serving: Any, make_sequence: Any, rows: Any, refuses: Any) -> None:
    """A rejected row's selection names blocks that the rolled-back row cannot see."""
    layer, rope, engine = serving
    sequence = make_sequence(120)
    _, selection = engine.step(layer, rope, [_piece(rows, "a", sequence, 0, 120)])
    last = selection.take(torch.tensor([119]))
    engine.rollback("a", 60)
    with refuses(SelectionError, "QSAAttention", "selection.visible_blocks"):
        engine.step(layer, rope, [_piece(rows, "a", sequence, 60, 61)], selection=last)
