"""What `attend`, `attend_tokens` and `merge_partials` refuse: typed errors that name things, outputs untouched."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.attention import attend, attend_tokens, merge_partials
from flashqsa.errors import (
    ArgumentError,
    DeviceError,
    DTypeError,
    FlashQSAError,
    SelectionError,
    ShapeError,
    UnsupportedError,
)
from flashqsa.selection import expand_tokens
from flashqsa.testing import Step, StepCase, assert_unchanged, guarded, make_step, poison, snapshot

CASE = StepCase("refused", ((40, 3), (0, 6), (70, 1)), padding_requests=1, padding_rows=1)


@pytest.fixture
def step() -> Step:
    return make_step(CASE, seed=45)


class Refusal:
    """A call that must raise, leaving its output as it was."""

    def __init__(self, step: Step, refuses: Any, backend: str) -> None:
        self.step, self.refuses, self.backend = step, refuses, backend

    def __call__(
        self, error: type[FlashQSAError], where: str, *parts: str, chosen: Any, shape: Any = None, **changes: Any
    ) -> None:
        target = guarded(shape or self.step.q.shape, changes.pop("buffer_dtype", self.step.q.dtype))
        poison(target.view)
        before = snapshot(target.view, self.step.cache)
        arguments = {"q": self.step.q, "cache": self.step.cache, "plan": self.step.plan, "gate": self.step.gate}
        arguments.update(backend=self.backend, out=target.view)
        arguments.update(changes)
        call = attend if where == "attend" else attend_tokens
        with self.refuses(error, where, *parts):
            call(arguments.pop("q"), arguments.pop("cache"), chosen, arguments.pop("plan"), **arguments)
        assert_unchanged(before)
        target.assert_intact()


@pytest.fixture
def refused(step: Step, refuses: Any, backend: str) -> Refusal:
    return Refusal(step, refuses, backend)


def _ids(selection: Any, row: int, column: int, value: int) -> Any:
    block_ids = selection.block_ids.clone()
    block_ids[row, column] = value
    return dataclasses.replace(selection, block_ids=block_ids)


def _field(selection: Any, name: str, row: int, value: int) -> Any:
    values = getattr(selection, name).clone()
    values[row] = value
    return dataclasses.replace(selection, **{name: values})


def test_fault_45_selections_that_break_a_rule(step: Step, refused: Refusal, choose: Any) -> None:
    good = choose(step)
    last = 9  # the row at position 70: 17 blocks visible, 8 selected
    kept = good.block_ids[last].tolist()
    falling = dataclasses.replace(good, block_ids=good.block_ids.flip(1))
    wrong = {
        "all -1": (_ids(good, last, slice(None), -1), ("block_ids", "row 9", "-1")),
        "-1 in the middle": (_ids(good, last, 3, -1), ("block_ids", "row 9", "-1")),
        "twice the same": (_ids(good, last, 4, kept[3]), ("block_ids", "row 9", "ascending and unique", str(kept[3]))),
        "falling": (falling, ("block_ids",)),
        "not yet visible": (_ids(good, last, 7, 17), ("block_ids", "row 9", "17", "visible_blocks")),
        "far out of range": (_ids(good, last, 7, 2**31 - 1), ("block_ids", "row 9")),
        "negative": (_ids(good, last, 0, -5), ("block_ids", "row 9", "-5")),
        "a count above K": (_field(good, "block_counts", last, 9), ("block_counts", "row 9", "[0, 8]", "got 9")),
        "a negative count": (_field(good, "block_counts", last, -1), ("block_counts", "row 9", "got -1")),
        "a later view": (_field(good, "visible_blocks", last, 18), ("visible_blocks", "row 9", "got 18")),
        "a negative view": (_field(good, "visible_blocks", last, -1), ("visible_blocks", "row 9", "got -1")),
    }
    for selection, parts in wrong.values():
        refused(SelectionError, "attend", *parts, chosen=selection)
    attend(step.q, step.cache, good, step.plan, gate=step.gate, backend=refused.backend)


def test_fault_45_unchecked_ids_read_the_request_at_worst(
    step: Step, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where values are not looked at, as on a GPU: no read outside the request, other requests as ever."""
    good = choose(step)
    wanted = attend(step.q, step.cache, good, step.plan, gate=step.gate, backend="torch")
    for module in ("attention.api", "attention.plain", "plan.selected"):
        monkeypatch.setattr(f"flashqsa.{module}.values_are_checked", lambda device: False)
    others = torch.arange(step.num_rows) != 9
    for value in (-1, -5, 17, 100, 2**31 - 1, -(2**31)):
        for columns in (3, slice(None)):
            bad = _ids(good, 9, columns, value)
            for row_exact in (False, True):
                out = attend(step.q, step.cache, bad, step.plan, gate=step.gate, row_exact=row_exact, backend="torch")
                assert bool(torch.isfinite(out).all()), value
                assert row_exact or torch.equal(out[others], wanted[others])
    token_ids = expand_tokens(good, step.plan)
    token_ids[9, 2:5] = torch.tensor([-7, 2**31 - 1, 5], dtype=torch.int32)
    out = attend_tokens(step.q, step.cache, token_ids, step.plan, backend="torch")
    assert bool(torch.isfinite(out).all())


def test_fault_45_rows_of_padding_may_hold_anything(step: Step, backend: str, choose: Any) -> None:
    good = choose(step)
    wanted = attend(step.q, step.cache, good, step.plan, gate=step.gate, backend=backend)
    padding = step.plan.request_ids < 0
    worse = dataclasses.replace(
        good, block_counts=good.block_counts.masked_fill(padding, 77),
        visible_blocks=good.visible_blocks.masked_fill(padding, -9),
    )  # fmt: skip
    assert torch.equal(attend(step.q, step.cache, worse, step.plan, gate=step.gate, backend=backend), wanted)


def test_fault_45_token_lists_that_break_a_rule(step: Step, refused: Refusal, choose: Any) -> None:
    good = expand_tokens(choose(step), step.plan)
    last, count = 9, int(good[9, -1])
    width = good.shape[1] - 1

    def changed(column: int, value: int) -> torch.Tensor:
        token_ids = good.clone()
        token_ids[last, column] = value
        return token_ids

    shuffled = good.clone()
    shuffled[last, :count] = good[last, :count].flip(0)
    shuffled[last, 7] = shuffled[last, 2]
    wrong = {
        "-1 in the middle": (changed(3, -1), ("token_ids", "row 9", "got -1")),
        "not yet visible": (changed(3, 71), ("token_ids", "row 9", "position 70", "got 71")),
        "twice in a row": (changed(3, int(good[last, 2])), ("token_ids", "once", "row 9")),
        "twice far apart": (changed(3, int(good[last, 9])), ("token_ids", "once", "row 9")),
        "twice in a shuffled list": (shuffled, ("token_ids", "once", "row 9")),
        "a count beyond the list": (changed(-1, width + 1), ("token_ids", "row 9", f"[0, {width}]", str(width + 1))),
        "a negative count": (changed(-1, -1), ("token_ids", "row 9", "got -1")),
    }
    for token_ids, parts in wrong.values():
        refused(ArgumentError, "attend_tokens", *parts, chosen=token_ids)
    refused(ShapeError, "attend_tokens", "token_ids", "[12, 0]", chosen=good[:, :0])
    refused(ShapeError, "attend_tokens", "token_ids", chosen=good[:-1])
    refused(DTypeError, "attend_tokens", "token_ids", "int64", chosen=good.long())


def test_fault_35_a_selection_of_another_layer(step: Step, refused: Refusal, choose: Any) -> None:
    good = choose(step)
    other = dataclasses.replace(good, layer_id=7)
    refused(SelectionError, "attend", "layer 3", "layer 7", chosen=other)
    for selection, layer_id in ((dataclasses.replace(good, layer_id=None), 3), (other, None)):
        cache = dataclasses.replace(step.cache, layer_id=layer_id)
        attend(step.q, cache, selection, step.plan, backend=refused.backend)  # nobody said which layer: taken


def test_tensors_that_do_not_fit(step: Step, refused: Refusal, choose: Any) -> None:
    good = choose(step)
    q, gate = step.q, step.gate
    for parts, changes in (
        (("q", "[12, Hq, 16]", "[11, 6, 16]"), {"q": q[:-1], "gate": None}),
        (("q", "[12, Hq, 16]", "[12, 6, 8]"), {"q": q[..., :8], "gate": None}),
        (("q", "contiguous in its last dimension"), {"q": q.transpose(1, 2).contiguous().transpose(1, 2)}),
        (("q", "multiple of 2", "got 5"), {"q": q[:, :5], "gate": None}),
        (("gate", "[12, 6, 16]", "[12, 4, 16]", "gate half of q_proj"), {"gate": gate[:, :4]}),
        (("gate", "[12, 6, 16]", "[12, 16]"), {"gate": gate[:, 0]}),
        (("out", "[12, 6, 16]", "[12, 6, 8]"), {"shape": (12, 6, 8)}),
    ):
        refused(ShapeError, "attend", *parts, chosen=good, **changes)
    for name in ("block_ids", "block_counts", "visible_blocks"):
        fewer = dataclasses.replace(good, **{name: getattr(good, name)[:-1]})
        refused(ShapeError, "attend", f"selection.{name}", chosen=fewer)
        wide = dataclasses.replace(good, **{name: getattr(good, name).long()})
        refused(DTypeError, "attend", f"selection.{name}", "int64", chosen=wide)
    refused(ShapeError, "attend", "selection.block_ids", chosen=good.take(torch.arange(11)))


def test_dtypes_and_devices_that_are_not_taken(step: Step, refused: Refusal, choose: Any) -> None:
    good = choose(step)
    refused(DTypeError, "attend", "q", "int32", chosen=good, q=step.q.to(torch.int32))
    refused(DTypeError, "attend", "q", "float8_e4m3fn", chosen=good, q=step.q.to(torch.float8_e4m3fn))
    refused(DTypeError, "attend", "gate", "bool", chosen=good, gate=step.gate > 0)
    refused(DTypeError, "attend", "out", "bfloat16", chosen=good, out_dtype=torch.bfloat16)
    refused(DTypeError, "attend", "out_dtype", "int32", chosen=good, buffer_dtype=torch.int32)
    refused(DTypeError, "attend", "out_dtype", "float8_e4m3fn", chosen=good, out_dtype=torch.float8_e4m3fn)
    refused(DeviceError, "attend", "q", "meta", chosen=good, q=step.q.to("meta"))
    refused(DeviceError, "attend", "gate", "meta", chosen=good, gate=step.gate.to("meta"))
    elsewhere = dataclasses.replace(good, block_ids=good.block_ids.to("meta"))
    refused(DeviceError, "attend", "selection.block_ids", "meta", chosen=elsewhere)


def test_caches_of_another_plan(step: Step, refused: Refusal, choose: Any) -> None:
    cache = step.cache
    halves = dataclasses.replace(
        cache, k_pages=cache.k_pages[:, :8], v_pages=cache.v_pages[:, :8], block_keys=cache.block_keys[:, :2]
    )
    refused(ShapeError, "attend", "page_tokens = 16", "8", chosen=choose(step), cache=halves)
    fewer = dataclasses.replace(
        cache, k_pages=cache.k_pages[:2], v_pages=cache.v_pages[:2], block_keys=cache.block_keys[:2]
    )
    refused(ArgumentError, "attend", "num_pages", "2", chosen=choose(step), cache=fewer)


def test_options_of_another_type(step: Step, refused: Refusal, choose: Any) -> None:
    good = choose(step)
    for scale in (float("nan"), float("inf"), "1.0", True):
        refused(ArgumentError, "attend", "softmax_scale must be a finite number", repr(scale), chosen=good,
                softmax_scale=scale)  # fmt: skip
    refused(ArgumentError, "attend", "cache must be a LayerCache", "NoneType", chosen=good, cache=None)
    refused(ArgumentError, "attend", "plan must be a StepPlan", "dict", chosen=good, plan={})
    refused(ArgumentError, "attend", "selection must be a Selection", "list", chosen=[good.block_ids])


def test_backends_that_are_not_there(step: Step, choose: Any) -> None:
    with pytest.raises(ArgumentError, match="flash"):
        attend(step.q, step.cache, choose(step), step.plan, backend="flash")
    with pytest.raises(UnsupportedError, match="triton"):
        attend(step.q, step.cache, choose(step), step.plan, backend="triton")


def test_partials_that_do_not_fit(refuses: Any) -> None:
    out, lse = torch.zeros(3, 4, 8), torch.zeros(3, 4)
    with refuses(ArgumentError, "merge_partials", "outputs", "0 and 0"):
        merge_partials([], [])
    with refuses(ArgumentError, "merge_partials", "outputs", "2 and 1"):
        merge_partials([out, out], [lse])
    with refuses(ShapeError, "merge_partials", "outputs[1]", "[2, 4, 8]"):
        merge_partials([out, out[:2]], [lse, lse])
    with refuses(ShapeError, "merge_partials", "lses[1]", "[3, 2]"):
        merge_partials([out, out], [lse, lse[:, :2]])
    with refuses(DTypeError, "merge_partials", "outputs[0]", "bfloat16", "float32"):
        merge_partials([out.bfloat16()], [lse])
    with refuses(DTypeError, "merge_partials", "lses[0]", "float16"):
        merge_partials([out], [lse.half()])
    with refuses(ShapeError, "merge_partials", "gate", "[3, 2, 8]"):
        merge_partials([out], [lse], gate=torch.zeros(3, 2, 8))
    with refuses(DeviceError, "merge_partials", "lses[0]", "meta"):
        merge_partials([out], [lse.to("meta")])
    with refuses(DTypeError, "merge_partials", "out_dtype", "int32"):
        merge_partials([out], [lse], out_dtype=torch.int32)
