"""The torch backend is differentiable in q, K, V and the gate; what is selected is a constant."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.attention import attend, attend_tokens, merge_partials
from flashqsa.selection import expand_tokens
from flashqsa.testing import Step, StepCase, assert_bitwise_equal, make_step

PHASES = {
    "prefill": ((0, 9), (0, 2)),
    "decode": ((12, 1), (3, 1), (0, 1)),
    "verify": ((10, 3), (6, 2)),
    "mixed": ((0, 6), (9, 1), (5, 3), (0, 0)),
}
SMALL: dict[str, Any] = {
    "q_heads": 2, "kv_heads": 1, "head_dim": 4, "rotary_dim": 2, "topk_blocks": 2, "page_tokens": 4, "layout": "dense",
}  # fmt: skip
Leaves = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _leaves(step: Step) -> Leaves:
    """q, K pages, V pages and gate as leaves; NaN of padding and free pages replaced by numbers."""
    tensors = (step.q, step.cache.k_pages, step.cache.v_pages, step.gate)
    q, k, v, gate = (torch.nan_to_num(x.detach(), nan=0.5).clone().requires_grad_() for x in tensors)
    return q, k, v, gate


def _attend(step: Step, selection: Any, leaves: Leaves, **options: Any) -> Any:
    q, k, v, gate = leaves
    cache = dataclasses.replace(step.cache, k_pages=k, v_pages=v)
    return attend(q, cache, selection, step.plan, gate=gate, **options)


@pytest.mark.parametrize("contiguous", [False, True], ids=["paged", "first-slots"])
@pytest.mark.parametrize("phase", PHASES)
def test_gradcheck(phase: str, contiguous: bool, choose: Any) -> None:
    case = StepCase(phase, PHASES[phase], dtype=torch.float64, padding_rows=1, contiguous=contiguous, **SMALL)
    step = make_step(case, seed=61)
    selection = choose(step)

    def function(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _attend(step, selection, leaves, return_lse=True)  # type: ignore[arg-type]
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(function, _leaves(step), fast_mode=phase != "decode")


@pytest.mark.parametrize("row_exact", [False, True])
def test_gradcheck_of_scales_and_shards(row_exact: bool, choose: Any) -> None:
    """Scaled caches, a scale of one's own, rows without a token, and no tail."""
    case = StepCase("shard", PHASES["mixed"], dtype=torch.float64, **SMALL)
    step = make_step(case, seed=62)
    counts = [min(2, int(seen), row % 3) for row, seen in enumerate(step.plan.visible_blocks)]
    selection = choose(step, counts=counts)
    cache = dataclasses.replace(step.cache, k_scale=torch.tensor([0.37]), v_scale=1.9)
    step = dataclasses.replace(step, cache=cache)

    def function(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = _attend(
            step, selection, leaves, return_lse=True, include_tail=False, softmax_scale=0.8, row_exact=row_exact  # type: ignore[arg-type]
        )  # fmt: skip
        return out, lse.masked_fill(lse == -torch.inf, 0)

    assert torch.autograd.gradcheck(function, _leaves(step), fast_mode=True)


def test_gradcheck_through_token_lists_and_merged_shards(choose: Any) -> None:
    step = make_step(StepCase("merged", PHASES["mixed"], dtype=torch.float64, **SMALL), seed=63)
    selection = choose(step)
    token_ids = expand_tokens(selection, step.plan)
    halves = []
    for half in (0, 1):
        part = torch.full_like(token_ids, -1)
        for row, count in enumerate(token_ids[:, -1].tolist()):
            chosen = token_ids[row, half:count:2]
            part[row, : chosen.shape[0]], part[row, -1] = chosen, chosen.shape[0]
        halves.append(part)

    def function(*leaves: torch.Tensor) -> torch.Tensor:
        q, k, v, gate = leaves
        cache = dataclasses.replace(step.cache, k_pages=k, v_pages=v)
        shards = [attend_tokens(q, cache, part, step.plan, return_lse=True) for part in halves]
        return merge_partials([out for out, _ in shards], [lse for _, lse in shards], gate=gate)

    whole = attend_tokens(step.q, step.cache, token_ids, step.plan, gate=step.gate)
    torch.testing.assert_close(function(step.q, step.cache.k_pages, step.cache.v_pages, step.gate), whole)
    assert torch.autograd.gradcheck(function, _leaves(step), fast_mode=True)


def _dense(step: Step, lists: list[list[int]], leaves: Leaves) -> torch.Tensor:
    """Dense attention under a mask of what is attended, in torch operations of the leaves' dtype."""
    q, k_pages, v_pages, gate = leaves
    out = torch.zeros_like(q)
    for request in step.requests:
        places = (request.slot_ids // k_pages.shape[1], request.slot_ids % k_pages.shape[1])
        group = q.shape[1] // k_pages.shape[2]
        k, v = (pages[places].repeat_interleave(group, dim=1).transpose(0, 1) for pages in (k_pages, v_pages))
        rows = torch.tensor([row for row, _ in request.rows()], dtype=torch.int64)
        if not rows.numel():
            continue
        mask = torch.full((rows.numel(), request.seq_len), -torch.inf, dtype=q.dtype)
        for i, row in enumerate(rows.tolist()):
            mask[i, lists[row]] = 0
        scores = q[rows].transpose(0, 1) @ k.transpose(1, 2) * q.shape[2] ** -0.5 + mask
        attended = (scores.softmax(dim=-1) @ v).transpose(0, 1)
        out = out.index_copy(0, rows, attended * torch.sigmoid(gate[rows]))
    return out


@pytest.mark.parametrize("phase", ["prefill", "decode", "verify"])
def test_gradients_equal_those_of_dense_masked_attention(phase: str, choose: Any, row_lists: Any) -> None:
    requests = {"prefill": ((0, 150), (0, 33)), "decode": ((150, 1), (63, 1)), "verify": ((120, 5), (60, 4))}[phase]
    step = make_step(StepCase(phase, requests, head_dim=32, padding_rows=1, topk_blocks=6), seed=64)
    selection = choose(step)
    weights = torch.randn(step.q.shape, generator=torch.Generator().manual_seed(64))
    sparse, dense, exact = _leaves(step), _leaves(step), _leaves(step)
    exact = tuple(x.detach().double().requires_grad_() for x in exact)  # type: ignore[assignment]
    (_attend(step, selection, sparse) * weights).sum().backward()
    lists = row_lists(step, selection)
    (_dense(step, lists, dense) * weights).sum().backward()
    (_dense(step, lists, exact) * weights.double()).sum().backward()
    for name, got, low, wanted in zip(("q", "k", "v", "gate"), sparse, dense, exact, strict=True):
        assert got.grad is not None
        assert low.grad is not None
        assert wanted.grad is not None
        size = float(wanted.grad.abs().max())
        error, budget = ((x.grad.double() - wanted.grad).abs().max() for x in (got, low))  # type: ignore[union-attr]
        assert size > 0.01
        assert float(error) <= 2 * (float(budget) + torch.finfo(torch.float32).eps * size), name


def test_gradients_in_the_model_dtype(choose: Any, row_lists: Any) -> None:
    """bf16 leaves get bf16 gradients, summed in fp32 however many rows attend a token."""
    step = make_step(StepCase("bf16", ((0, 200),), dtype=torch.bfloat16, topk_blocks=6), seed=65)
    selection = choose(step)
    leaves, wide = _leaves(step), _leaves(step)
    wide = tuple(x.detach().double().requires_grad_() for x in wide)  # type: ignore[assignment]
    _attend(step, selection, leaves, out_dtype=torch.float32).sum().backward()
    _dense(step, row_lists(step, selection), wide).sum().backward()
    for name, got, wanted in zip(("q", "k", "v", "gate"), leaves, wide, strict=True):
        assert got.grad is not None
        assert wanted.grad is not None
        assert got.grad.dtype == torch.bfloat16
        size = float(wanted.grad.abs().max())
        assert float((got.grad.double() - wanted.grad).abs().max()) <= 2 * torch.finfo(torch.bfloat16).eps * size, name


@pytest.mark.parametrize("wanted", ["q", "k", "v", "gate", "q k", "k v gate"])
def test_only_what_is_asked_for_gets_a_gradient(wanted: str, choose: Any) -> None:
    step = make_step(StepCase("some", ((0, 70), (50, 1), (30, 3))), seed=66)
    selection = choose(step)
    everything = _leaves(step)
    _attend(step, selection, everything).sum().backward()
    names = dict(zip(("q", "k", "v", "gate"), range(4), strict=True))
    some = _leaves(step)
    for name, place in names.items():
        some[place].requires_grad_(name in wanted.split())
    out = _attend(step, selection, some)
    out.sum().backward()
    for name, place in names.items():
        if name in wanted.split():
            assert_bitwise_equal(some[place].grad, everything[place].grad, name)  # type: ignore[arg-type]
        else:
            assert some[place].grad is None


def test_no_gradient_no_graph(choose: Any) -> None:
    step = make_step(StepCase("none", ((0, 20), (50, 1))), seed=67)
    selection, leaves = choose(step), _leaves(step)
    with torch.no_grad():
        assert not _attend(step, selection, leaves).requires_grad
    assert _attend(step, selection, leaves).requires_grad
    out = torch.empty_like(step.q)
    assert _attend(step, selection, leaves, out=out) is out
    out.sum().backward()  # through a buffer that was given
    assert leaves[0].grad is not None


def test_gradients_flow_through_caches_written_in_place(choose: Any) -> None:
    """As in training with a cache: keys and values are written into pages, then attended."""
    step = make_step(StepCase("written", ((0, 30),), page_tokens=16, layout="dense"), seed=68)
    selection, truth = choose(step), step.requests[0]
    k, v = (x.float().clone().requires_grad_() for x in (truth.k, truth.v))
    places = (truth.slot_ids // 16, truth.slot_ids % 16)
    pages = [torch.zeros_like(step.cache.k_pages) for _ in range(2)]
    for page, rows in zip(pages, (k, v), strict=True):
        page[places] = rows
    cache = dataclasses.replace(step.cache, k_pages=pages[0], v_pages=pages[1])
    attend(step.q, cache, selection, step.plan).sum().backward()
    leaves = _leaves(step)
    cache = dataclasses.replace(step.cache, k_pages=leaves[1], v_pages=leaves[2])
    attend(step.q, cache, selection, step.plan).sum().backward()
    for rows, leaf in ((k, leaves[1]), (v, leaves[2])):
        assert rows.grad is not None
        assert leaf.grad is not None
        assert_bitwise_equal(rows.grad, leaf.grad[places], "gradients of written rows")


@pytest.mark.parametrize("what", ["keys", "selection", "visible blocks", "page table", "positions"])
def test_a_change_between_forward_and_backward_is_an_error(what: str, choose: Any) -> None:
    """Never silently the gradient of another step: caches, selections and plans are reused by the next one."""
    step = make_step(StepCase("changed", ((0, 20), (50, 1)), layout="dense"), seed=69)
    selection, leaves = choose(step), _leaves(step)
    out = _attend(step, selection, leaves)
    table = step.plan.page_table
    assert table is not None
    changed = {
        "keys": leaves[1].detach(),
        "selection": selection.block_ids,
        "visible blocks": selection.visible_blocks,
        "page table": table,
        "positions": step.plan.positions,
    }[what]
    changed.copy_(changed.clone())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_refused(choose: Any) -> None:
    step = make_step(StepCase("twice", ((0, 20),)), seed=70)
    leaves = _leaves(step)
    out = _attend(step, choose(step), leaves)
    (grad,) = torch.autograd.grad(out.square().sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_gradients_of_rows_without_a_token_are_zero(choose: Any) -> None:
    step = make_step(StepCase("empty", ((0, 9), (20, 2)), padding_rows=2, padding_requests=1), seed=71)
    selection = choose(step, counts=[0] * step.num_rows)
    leaves = _leaves(step)
    with torch.no_grad():
        leaves[3].fill_(float("nan"))
    out, lse = _attend(step, selection, leaves, include_tail=False, return_lse=True)
    (out.sum() + lse.masked_fill(lse == -torch.inf, 0).sum()).backward()
    for leaf in leaves:
        assert leaf.grad is not None
        assert bool((leaf.grad == 0).all())


@pytest.mark.parametrize("logit", [0.0, 80.0, -80.0, 1000.0, -1000.0])
def test_gradient_of_the_gate(logit: float, choose: Any) -> None:
    step = make_step(StepCase("gate", ((0, 20),), dtype=torch.float64), seed=72)
    selection, leaves = choose(step), _leaves(step)
    with torch.no_grad():
        leaves[3].fill_(logit)
    _attend(step, selection, leaves).sum().backward()
    ungated = attend(step.q, step.cache, selection, step.plan)
    slope = torch.sigmoid(torch.tensor(logit, dtype=torch.float64))
    assert leaves[3].grad is not None
    torch.testing.assert_close(leaves[3].grad, ungated * slope * torch.sigmoid(torch.tensor(-logit).double()))
