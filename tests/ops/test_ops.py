"""The operators of a graph: their schemas, fakes and mutations by torch's own check, and what a graph makes of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flashqsa import attend, attend_tokens, expand_tokens, prepare, select_blocks
from flashqsa.errors import SelectionError, ShapeError
from flashqsa.ops.attention import attend_op, attend_tokens_op
from flashqsa.ops.parts import NOT_TOLD, PLAN_NUMBERS, PLAN_TENSORS, join_cache, join_plan, split_plan, split_scales
from flashqsa.ops.preparation import prepare_op
from flashqsa.ops.selection import select_blocks_op
from flashqsa.testing import Step, StepCase, assert_bitwise_equal, make_step

E4M3 = torch.float8_e4m3fn
MIXED = StepCase("mixed", ((70, 1), (37, 4), (0, 50), (0, 0)), padding_rows=3)
CASES = [
    MIXED,
    dataclasses.replace(MIXED, name="packed", layout="packed", mrope=True),
    dataclasses.replace(MIXED, name="bf16", dtype=torch.bfloat16),
    dataclasses.replace(MIXED, name="e4m3", kv_dtype=E4M3),
    dataclasses.replace(MIXED, name="contiguous", contiguous=True, layout="dense"),
]


def _caches(step: Step) -> list[torch.Tensor | None]:
    cache = step.cache
    return [cache.k_pages, cache.v_pages, cache.block_keys, cache.ring, cache.ring_positions]


def _prepare_arguments(step: Step) -> tuple[Any, ...]:
    scale_tensors, scale_numbers = split_scales(step.cache)
    plan_tensors, plan_numbers = split_plan(step.plan)
    rows = [step.q_gate, step.k, step.v, step.index_qk, step.rope_positions]
    weights = [step.norms.q, step.norms.k, step.norms.index_q, step.norms.index_k]
    dim = step.case.head_dim
    return (
        torch.empty_like(step.index_qk[:, :-1]), torch.empty_like(step.q_gate[..., :dim]), *_caches(step), rows,
        step.rope.cos_sin, weights, scale_tensors, plan_tensors, scale_numbers, plan_numbers,
        list(step.rope.mrope_section or ()), step.norms.eps, "torch",
    )  # fmt: skip


def _select_arguments(step: Step, with_scores: bool) -> tuple[Any, ...]:
    rows, topk = step.num_rows, step.plan.topk_blocks
    numbers = [torch.zeros(rows, dtype=torch.int32) for _ in range(3)]
    scores = torch.zeros(rows, topk) if with_scores else None
    return (
        torch.zeros(rows, topk, dtype=torch.int32), *numbers, scores, step.index_q, *_caches(step)[:3],
        *split_plan(step.plan), NOT_TOLD, "torch",
    )  # fmt: skip


def _attend_arguments(step: Step, with_lse: bool) -> tuple[Any, ...]:
    selection = select_blocks(step.index_q, step.cache, step.plan)
    chosen = [selection.block_ids, selection.block_counts, selection.visible_blocks, selection.request_ids]
    scale_tensors, scale_numbers = split_scales(step.cache)
    plan_tensors, plan_numbers = split_plan(step.plan)
    lse = torch.zeros(step.q.shape[:2]) if with_lse else None
    return (
        torch.zeros_like(step.q), lse, step.q, step.gate if with_lse else None, *_caches(step)[:2], chosen,
        scale_tensors, plan_tensors, scale_numbers, plan_numbers, [3, 3], step.case.head_dim**-0.5, True, False, None,
        "torch",
    )  # fmt: skip


def _attend_tokens_arguments(step: Step, with_lse: bool) -> tuple[Any, ...]:
    out, lse, q, gate, k_pages, v_pages, *_ = _attend_arguments(step, with_lse)
    token_ids = expand_tokens(select_blocks(step.index_q, step.cache, step.plan), step.plan)
    scale_tensors, scale_numbers = split_scales(step.cache)
    plan_tensors, plan_numbers = split_plan(step.plan)
    return (
        out, lse, q, gate, k_pages, v_pages, token_ids, scale_tensors, plan_tensors, scale_numbers, plan_numbers,
        step.case.head_dim**-0.5, True, None, "torch",
    )  # fmt: skip


def _opcheck(operator: Any, arguments: tuple[Any, ...], case: StepCase) -> None:
    """torch's own check; its comparison of schemas multiplies, which float8 cannot, and a schema knows no dtype."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=checks[1:] if case.kv_is_fp8 else checks)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_prepare(case: StepCase) -> None:
    _opcheck(prepare_op, _prepare_arguments(make_step(case, seed=1, written=False)), case)


@pytest.mark.parametrize("with_scores", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_select_blocks(case: StepCase, with_scores: bool) -> None:
    _opcheck(select_blocks_op, _select_arguments(make_step(case, seed=2), with_scores), case)


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_attend(case: StepCase, with_lse: bool) -> None:
    _opcheck(attend_op, _attend_arguments(make_step(case, seed=3), with_lse), case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_opcheck_attend_tokens(case: StepCase) -> None:
    _opcheck(attend_tokens_op, _attend_tokens_arguments(make_step(case, seed=4), True), case)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plan_and_cache_survive_being_taken_apart(case: StepCase) -> None:
    step = make_step(case, seed=5)
    plan = join_plan(*split_plan(step.plan))
    for name in (*PLAN_TENSORS, *PLAN_NUMBERS):
        assert getattr(plan, name) is getattr(step.plan, name) or getattr(plan, name) == getattr(step.plan, name), name
    cache = join_cache(*_caches(step), *split_scales(step.cache), layer_id=3)
    assert all(getattr(cache, f.name) is getattr(step.cache, f.name) for f in dataclasses.fields(cache)[:-1])
    assert cache.layer_id == step.cache.layer_id
    floats = dataclasses.replace(step.cache, k_scale=0.5, v_scale=None)
    again = join_cache(*_caches(step), *split_scales(floats))
    assert (again.k_scale, again.v_scale) == (0.5, None)


def _in_plain_memory(step: Step) -> Step:
    """The step with caches that share no bytes in different dtypes, which torch refuses to write in a graph."""
    names = ("block_keys", "ring", "ring_positions")
    copies = {name: getattr(step.cache, name).clone() for name in names}
    k, v = step.cache.k_pages, step.cache.v_pages
    if step.case.layout == "packed":
        k, v = torch.cat([k, v], dim=-1).split(k.shape[-1], dim=-1)
    else:
        k, v = k.clone(), v.clone()
    return dataclasses.replace(step, cache=dataclasses.replace(step.cache, k_pages=k, v_pages=v, **copies))


def _stages(step: Step) -> tuple[torch.Tensor, ...]:
    """All stages of a step, with every output that they can give."""
    prepared = prepare(
        step.q_gate, step.k, step.v, step.index_qk, step.rope_positions, step.rope, step.norms, step.cache, step.plan
    )
    selection = select_blocks(prepared.index_q, step.cache, step.plan, return_scores=True)
    out, lse = attend(prepared.q, step.cache, selection, step.plan, gate=prepared.gate, return_lse=True)
    assert selection.scores is not None
    return prepared.index_q, prepared.q, selection.block_ids, selection.scores, selection.visible_blocks, out, lse


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_in_a_graph_equal_eager_ones_bit_for_bit(case: StepCase) -> None:
    eager, traced = (_in_plain_memory(make_step(case, seed=6, written=False)) for _ in range(2))
    compiled = torch.compile(_stages, fullgraph=True, backend="aot_eager")
    for expected, got in zip(_stages(eager), compiled(traced), strict=True):
        assert_bitwise_equal(got, expected)
    for expected, got in zip(_caches(eager), _caches(traced), strict=True):
        assert_bitwise_equal(got, expected)


def test_errors_of_a_graph_are_the_eager_ones() -> None:
    step = make_step(MIXED, seed=7)
    other = dataclasses.replace(step.cache, layer_id=4)
    selection = select_blocks(step.index_q, step.cache, step.plan)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with pytest.raises(SelectionError, match="attend: selection must be of layer 4"):
        compiled(step.q, other, selection, step.plan)
    with pytest.raises(ShapeError, match="attend: q must be"):
        compiled(step.q[:, :, :8].contiguous(), step.cache, selection, step.plan)


def test_tensors_without_values_pass_through() -> None:
    """Shapes of all stages under a fake mode, where no value can be read."""
    step = make_step(MIXED, seed=8)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, index_q = mode.from_tensor(step.q), mode.from_tensor(step.index_q)
        selection = select_blocks(index_q, step.cache, step.plan)
        out = attend(q, step.cache, selection, step.plan, out_dtype=torch.float64)
        assert isinstance(out, torch.Tensor)
        assert out.shape == step.q.shape
        assert out.dtype == torch.float64
        assert selection.block_ids.shape == (step.num_rows, step.plan.topk_blocks)


def test_eager_calls_meet_no_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("an eager call went through the dispatcher")

    for module, name in (("preparation", "prepare_op"), ("selection", "select_blocks_op"), ("attention", "attend_op")):
        monkeypatch.setattr(f"flashqsa.ops.{module}.{name}", refuse)
    step = make_step(MIXED, seed=9, written=False)
    _stages(step)
    token_ids = expand_tokens(select_blocks(step.index_q, step.cache, step.plan), step.plan)
    attend_tokens(step.q, step.cache, token_ids, step.plan)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="dispatcher"):
        torch.compile(_stages, fullgraph=True, backend="eager")(step)
