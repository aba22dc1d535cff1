"""What `prepare` refuses, by a typed error and before a byte of any cache is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.errors import ArgumentError, DeviceError, DTypeError, ShapeError, UnsupportedError
from flashqsa.plan import StepPlan, plan_step
from flashqsa.preparation import prepare
from flashqsa.results import Prepared
from flashqsa.rope import RopeTable
from flashqsa.testing import Step, StepCase, assert_unchanged, make_step, snapshot

CASE = StepCase("refused", ((10, 3), (4, 6)), mrope=True, padding_rows=1, head_dim=20, index_head_dim=24)
T = CASE.num_rows


def inputs_of(step: Step) -> dict[str, Any]:
    names = ("q_gate", "k", "v", "index_qk", "rope_positions", "rope", "norms", "cache", "plan")
    return {name: getattr(step, name) for name in names}


def changed(holder: str, **changes: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Some fields of the norms, the cache or the rope table replaced, given by functions of the old ones."""
    return lambda given: {
        holder: dataclasses.replace(
            given[holder], **{name: change(getattr(given[holder], name)) for name, change in changes.items()}
        )
    }


def given(**changes: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda inputs: {name: change(inputs[name]) for name, change in changes.items()}


def far(positions: torch.Tensor) -> torch.Tensor:
    positions = positions.clone()
    positions[2, 4] = 10**6
    return positions


def behind(positions: torch.Tensor) -> torch.Tensor:
    positions = positions.clone()
    positions[1, 0] = -1
    return positions


REFUSED: dict[str, tuple[Any, type[Exception], tuple[str, ...]]] = {
    "q_gate-rows": (given(q_gate=lambda x: x[:-1]), ShapeError, ("q_gate must be [T, Hq, 2D]", f"[{T - 1}, 6, 40]")),
    "q_gate-without-gates": (given(q_gate=lambda x: x[..., :20]), ShapeError, ("q_gate", "[10, 6, 20]")),
    "q_gate-heads": (given(q_gate=lambda x: x[:, :5]), ShapeError, ("q_gate must have a multiple of 2", "got 5")),
    "q_gate-no-heads": (given(q_gate=lambda x: x[:, :0]), ShapeError, ("q_gate", "got 0 query heads")),
    "q_gate-dtype": (given(q_gate=lambda x: x.to(torch.int32)), DTypeError, ("q_gate", "int32")),
    "q_gate-list": (given(q_gate=lambda x: [x]), DTypeError, ("q_gate", "list")),
    "k-dtype": (given(k=lambda x: x.bfloat16()), DTypeError, ("k must be one of float32", "bfloat16")),
    "k-heads": (given(k=lambda x: x[:, :1]), ShapeError, ("k must be [T, Hkv, D] = [10, 2, 20]", "[10, 1, 20]")),
    "k-flat": (given(k=lambda x: x.reshape(T, -1)), ShapeError, ("k must be", "[10, 40]")),
    "k-device": (given(k=lambda x: x.to("meta")), DeviceError, ("k must be on cpu", "meta")),
    "v-dim": (given(v=lambda x: x[..., :16]), ShapeError, ("v must be", "[10, 2, 16]")),
    "v-strided": (
        given(v=lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)), ShapeError, ("v must be contiguous",)
    ),
    "index_qk-dim": (given(index_qk=lambda x: x[..., :16]), ShapeError, ("index_qk", "[10, 5, 16]")),
    "index_qk-only-keys": (given(index_qk=lambda x: x[:, -1:]), ShapeError, ("at least one query head", "got 1 heads")),
    "index_qk-dtype": (given(index_qk=lambda x: x.double()), DTypeError, ("index_qk", "float64")),
    "positions-rows": (given(rope_positions=lambda x: x[:, 1:]), ShapeError, ("rope_positions must be", "[3, 9]")),
    "positions-two-axes": (given(rope_positions=lambda x: x[:2]), ShapeError, ("rope_positions", "[2, 10]")),
    "positions-nested": (given(rope_positions=lambda x: x[None]), ShapeError, ("rope_positions", "[1, 3, 10]")),
    "positions-int32": (given(rope_positions=lambda x: x.int()), DTypeError, ("rope_positions", "int64", "int32")),
    "positions-list": (given(rope_positions=lambda x: x.tolist()), DTypeError, ("rope_positions", "list")),
    "positions-device": (given(rope_positions=lambda x: x.to("meta")), DeviceError, ("rope_positions", "meta")),
    "positions-far": (given(rope_positions=far), ArgumentError, ("rope_positions must be in [0, ", "1000000")),
    "positions-behind": (given(rope_positions=behind), ArgumentError, ("rope_positions must be in [0, ", "got -1")),
    "rope-wide": (
        given(rope=lambda x: RopeTable(torch.ones(99, 22))), ShapeError, ("rope must rotate at most", "= 20", "got 22")
    ),
    "rope-device": (given(rope=lambda x: RopeTable(x.cos_sin.to("meta"))), DeviceError, ("rope.cos_sin", "meta")),
    "rope-none": (given(rope=lambda x: None), ArgumentError, ("rope must be a RopeTable", "NoneType")),
    "norms-none": (given(norms=lambda x: {}), ArgumentError, ("norms must be a NormWeights", "dict")),
    "cache-none": (given(cache=lambda x: None), ArgumentError, ("cache must be a LayerCache", "NoneType")),
    "plan-none": (given(plan=lambda x: None), ArgumentError, ("plan must be a StepPlan", "NoneType")),
    "norms-q": (changed("norms", q=lambda x: x[:-1]), ShapeError, ("norms.q must be [D] = [20]", "[19]")),
    "norms-index_k": (changed("norms", index_k=lambda x: x[:20]), ShapeError, ("norms.index_k", "[20]")),
    "norms-dtype": (changed("norms", k=lambda x: x.long()), DTypeError, ("norms.k", "int64")),
    "norms-device": (changed("norms", index_q=lambda x: x.to("meta")), DeviceError, ("norms.index_q", "meta")),
    "ring-none": (
        changed("cache", ring=lambda x: None, ring_positions=lambda x: None), ArgumentError, ("have a ring", "None")
    ),
    "ring-dtype": (changed("cache", ring=lambda x: x.bfloat16()), DTypeError, ("ring must hold raw", "bfloat16")),
    "ring-capacity": (
        changed("cache", ring=lambda x: x[:, :3], ring_positions=lambda x: x[:, :3]), ShapeError,
        ("ring must have ring_tokens = 4", "got 3"),
    ),
    "ring-too-few": (
        changed("cache", ring=lambda x: x[:1], ring_positions=lambda x: x[:1]), ArgumentError, ("1 rings", "ring_ids")
    ),
    "ring-never-filled": (
        changed("cache", ring_positions=lambda x: torch.full_like(x, -1)), ArgumentError,
        ("ring_positions must be in [0, ", "token 8 of request 0", "got [-1, -1, -1]"),
    ),
    "pages": (
        changed("cache", k_pages=lambda x: x[:2], v_pages=lambda x: x[:2], block_keys=lambda x: x[:2]), ArgumentError,
        ("k_pages must hold", "got 2"),
    ),
    "page-size": (
        changed("cache", k_pages=lambda x: x[:, :8], v_pages=lambda x: x[:, :8]), ShapeError, ("page_tokens = 16",)
    ),
    "page-blocks": (changed("cache", block_keys=lambda x: x[:, :2]), ShapeError, ("block_keys", "4 blocks", "got 2")),
}  # fmt: skip


@pytest.mark.parametrize("fault", REFUSED)
def test_prepare_refuses_and_writes_nothing(refuses: Any, backend: str, fault: str) -> None:
    change, error, parts = REFUSED[fault]
    step = make_step(CASE, seed=60, written=False)
    inputs = inputs_of(step)
    before = snapshot(inputs)
    with refuses(error, "prepare", *parts):
        prepare(**(inputs | change(inputs)), backend=backend)
    assert_unchanged(before)
    step.assert_guards_intact()


def buffers(step: Step) -> Prepared:
    return Prepared(*(torch.full_like(x, 7.0) for x in (step.index_q, step.q, step.gate)))


BAD_BUFFERS: dict[str, tuple[dict[str, Callable[[torch.Tensor], Any]], type[Exception], tuple[str, ...]]] = {
    "q-rows": (dict(q=lambda x: x[:3]), ShapeError, ("out.q must be [T, Hq, D] = [10, 6, 20]", "[3, 6, 20]")),
    "q-dtype": (dict(q=lambda x: x.half()), DTypeError, ("out.q", "float16")),
    "index_q-heads": (dict(index_q=lambda x: x[:, :2]), ShapeError, ("out.index_q", "[10, 2, 24]")),
    "index_q-dtype": (dict(index_q=lambda x: x.to(torch.int8)), DTypeError, ("out.index_q", "int8")),
    "gate-dim": (dict(gate=lambda x: x[..., :8]), ShapeError, ("out.gate", "[10, 6, 8]")),
    "gate-device": (dict(gate=lambda x: x.to("meta")), DeviceError, ("out.gate", "meta")),
}


@pytest.mark.parametrize("fault", BAD_BUFFERS)
def test_prepare_refuses_buffers_and_writes_nothing(refuses: Any, backend: str, fault: str) -> None:
    changes, error, parts = BAD_BUFFERS[fault]
    step = make_step(CASE, seed=61, written=False)
    out = buffers(step)
    before = snapshot(inputs_of(step), out)
    bad = dataclasses.replace(out, **{name: change(getattr(out, name)) for name, change in changes.items()})
    with refuses(error, "prepare", *parts):
        prepare(**inputs_of(step), out=bad, backend=backend)
    assert_unchanged(before)


def without_rings(plan: StepPlan) -> StepPlan:
    return plan_step(
        plan.query_starts, plan.seq_lens, plan.page_table, page_tokens=16, block_tokens=4, topk_blocks=8,
        max_query_len=6, max_seq_len=13, num_pages=plan.num_pages, num_rows=plan.num_rows,
    )  # fmt: skip


def test_prepare_refuses_a_block_whose_older_tokens_are_in_no_ring(refuses: Any, backend: str) -> None:
    """Request 0 begins at token 10, inside block 2, and closes it; request 1 begins with a block."""
    step = make_step(CASE, seed=62, written=False)
    inputs = inputs_of(step)
    before = snapshot(inputs)
    with refuses(ArgumentError, "prepare", "request 0 must have a ring", "token 10", "ring -1"):
        prepare(**(inputs | {"plan": without_rings(step.plan)}), backend=backend)
    lost = step.plan.ring_ids.clone()
    lost[0] = -1
    plan = plan_step(
        step.plan.query_starts, step.plan.seq_lens, step.plan.page_table, page_tokens=16, block_tokens=4,
        topk_blocks=8, max_query_len=6, max_seq_len=13, num_pages=step.plan.num_pages, num_rows=10, ring_ids=lost,
        ring_tokens=4,
    )  # fmt: skip
    with refuses(ArgumentError, "prepare", "request 0 must have a ring", "ring -1"):
        prepare(**(inputs | {"plan": plan}), backend=backend)
    assert_unchanged(before)


def test_prepare_reads_no_position_of_padding_rows(backend: str) -> None:
    step = make_step(CASE, seed=63, written=False)
    step.rope_positions[:, -1] = torch.tensor([-(2**60), 2**60, 10**9])
    prepared = prepare(**inputs_of(step), backend=backend)
    assert not bool(prepared.q[-1].any())


def test_prepare_never_falls_back_from_a_named_backend() -> None:
    step = make_step(CASE, seed=64, written=False)
    before = snapshot(inputs_of(step))
    with pytest.raises(ArgumentError, match="prepare: backend must be one of"):
        prepare(**inputs_of(step), backend="cuda")
    with pytest.raises(UnsupportedError, match=r"prepare: backend .*'triton'"):
        prepare(**inputs_of(step), backend="triton")
    assert_unchanged(before)
