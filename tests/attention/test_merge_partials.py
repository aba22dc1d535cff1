"""Partial outputs over shards of the tokens merge into the output over all of them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from flashqsa.attention import attend, merge_partials
from flashqsa.cache import LayerCache
from flashqsa.plan import plan_step
from flashqsa.results import Selection
from flashqsa.testing import Step, StepCase, assert_bitwise_equal, assert_within_budget, guarded_like, make_step

CASE = StepCase("shards", ((2050, 1), (2040, 11), (2, 1), (1023, 2)), topk_blocks=512, page_tokens=64, padding_rows=1)


def _shards(step: Step, selection: Selection, count: int) -> list[Selection]:
    """Selections of the blocks that each of `count` ranges of the context owns; with several, the second owns none."""
    bounds = torch.linspace(0, 520, count + 1).long().tolist()
    if count > 1:
        bounds[2] = bounds[1] if count > 2 else bounds[2]
    shards = []
    for low, high in itertools.pairwise(bounds):
        block_ids = torch.full_like(selection.block_ids, -1)
        counts = torch.zeros_like(selection.block_counts)
        for row in range(step.num_rows):
            ids = selection.block_ids[row, : int(selection.block_counts[row])]
            owned = ids[(ids >= low) & (ids < high)]
            block_ids[row, : owned.shape[0]], counts[row] = owned, owned.shape[0]
        shards.append(dataclasses.replace(selection, block_ids=block_ids, block_counts=counts))
    return shards


def _partials(step: Step, shards: list[Selection], backend: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    parts = [
        attend(
            step.q, step.cache, shard, step.plan, include_tail=number == len(shards) - 1, out_dtype=torch.float32,
            return_lse=True, backend=backend,
        )
        for number, shard in enumerate(shards)
    ]  # fmt: skip
    return [out for out, _ in parts], [lse for _, lse in parts]


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fault_44_shards_of_the_context_merge_within_1e_5(
    count: int, dtype: torch.dtype, backend: str, choose: Any, exact: Any, row_lists: Any
) -> None:
    step = make_step(dataclasses.replace(CASE, dtype=dtype), seed=44)
    selection = choose(step, topk=400)
    shards = _shards(step, selection, count)
    assert count < 3 or not bool(shards[1].block_counts.any()), "one shard owns nothing"
    outs, lses = _partials(step, shards, backend)
    options: dict[str, Any] = {"out_dtype": torch.float32, "backend": backend}
    whole = attend(step.q, step.cache, selection, step.plan, **options)
    merged = merge_partials(outs, lses)
    assert merged.dtype == torch.float32
    assert bool(torch.isfinite(merged).all())
    assert float((merged - whole).abs().max()) <= 1e-5
    gated = attend(step.q, step.cache, selection, step.plan, gate=step.gate, backend=backend)
    merged = merge_partials(outs, lses, gate=step.gate)
    assert merged.dtype == dtype
    truth, _ = exact(step, row_lists(step, selection))
    assert_within_budget(merged, gated, truth, "gated once, after the merge")


def test_fault_44_shards_in_caches_of_their_own(backend: str, choose: Any) -> None:
    """Each rank holds a range of 2,051 tokens in its own pages, under its own plan; only the last one has a tail."""
    step = make_step(StepCase("whole", ((2050, 1),), topk_blocks=512, page_tokens=64), seed=45)
    truth, selection = step.requests[0], choose(step, topk=100, noise=2.0)
    chosen = selection.block_ids[0, :100]
    whole = attend(step.q, step.cache, selection, step.plan, gate=step.gate, backend=backend)
    for bounds in ((0, 1024, 2051), (0, 4, 4, 1028, 2048, 2051)):
        outs, lses = [], []
        for start, end in itertools.pairwise(bounds):
            pages = [torch.full((40, 64, 2, 16), float("nan")) for _ in range(2)]
            order = torch.randperm(40, generator=torch.Generator().manual_seed(start))
            local = torch.arange(end - start)
            for page, tokens in zip(pages, (truth.k, truth.v), strict=True):
                page[order[local // 64], local % 64] = tokens[start:end].float()
            plan = plan_step(
                step.plan.query_starts, torch.tensor([end - start], dtype=torch.int32), order.to(torch.int32)[None],
                page_tokens=64, block_tokens=4, topk_blocks=512, max_query_len=1, max_seq_len=2051,
            )  # fmt: skip
            ids = (chosen[(chosen >= start // 4) & (chosen < -(-end // 4))] - start // 4).to(torch.int32)
            owned = Selection(
                ids[None], torch.tensor([len(ids)], dtype=torch.int32), None, plan.visible_blocks, plan.request_ids
            )
            cache = LayerCache(pages[0], pages[1], None, None, None)
            out, lse = attend(
                step.q, cache, owned, plan, include_tail=end == 2051, out_dtype=torch.float32, return_lse=True,
                backend=backend,
            )  # fmt: skip
            outs.append(out)
            lses.append(lse)
        merged = merge_partials(outs, lses, gate=step.gate)
        assert float((merged - whole).abs().max()) <= 1e-5, bounds


def test_one_shard_is_the_whole(backend: str, choose: Any) -> None:
    step = make_step(StepCase("one", ((0, 40), (90, 1)), dtype=torch.bfloat16, padding_rows=1), seed=46)
    selection = choose(step)
    out, lse = attend(
        step.q, step.cache, selection, step.plan, out_dtype=torch.float32, return_lse=True, backend=backend
    )
    assert_bitwise_equal(merge_partials([out], [lse]), out, "no gate")
    wanted = attend(step.q, step.cache, selection, step.plan, gate=step.gate, backend=backend)
    merged = merge_partials([out], [lse], gate=step.gate)
    assert_bitwise_equal(merged, wanted, "gated")


def test_empty_shards_are_not_looked_at() -> None:
    """What an output holds where its lse is -inf, and a gate where every lse is, may be NaN."""
    generator = torch.Generator().manual_seed(47)
    out, gate = torch.randn(4, 3, 8, generator=generator), torch.randn(4, 3, 8, generator=generator)
    lse = torch.randn(4, 3, generator=generator)
    empty, nothing = torch.full((4, 3, 8), float("nan")), torch.full((4, 3), -torch.inf)
    for outputs, lses in (([out, empty], [lse, nothing]), ([empty, empty, out], [nothing, nothing, lse])):
        assert_bitwise_equal(merge_partials(outputs, lses), out, "an empty shard")
    none = merge_partials([empty, empty], [nothing, nothing], gate=torch.full_like(gate, float("nan")))
    assert bool((none == 0).all())


@pytest.mark.parametrize("far", [0.0, 20.0, 200.0, 1e4, 3e38])
def test_shards_of_any_weight(far: float) -> None:
    """Lses that are far apart, large or small: exact to fp32 against float64."""
    generator = torch.Generator().manual_seed(48)
    outs = [torch.randn(5, 2, 8, generator=generator) for _ in range(3)]
    lses = [torch.randn(5, 2, generator=generator) + shift for shift in (far, 0.0, -far)]
    stacked = torch.stack(lses).double()
    weights = (stacked - stacked.amax(dim=0)).exp()
    exact = (torch.stack(outs).double() * (weights / weights.sum(dim=0))[..., None]).sum(dim=0)
    assert float((merge_partials(outs, lses).double() - exact).abs().max()) < 1e-6


def test_order_dtype_and_inputs() -> None:
    generator = torch.Generator().manual_seed(49)
    buffers = [guarded_like(torch.randn(5, 2, 8, generator=generator), padding=(1, 1, 8)) for _ in range(3)]
    outs, lses = [buffer.view for buffer in buffers], [torch.randn(5, 2, generator=generator) for _ in range(3)]
    before = [out.clone() for out in outs]
    merged = merge_partials(outs, lses)
    torch.testing.assert_close(merge_partials(outs[::-1], lses[::-1]), merged, rtol=0, atol=1e-6)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert_bitwise_equal(merge_partials(outs, lses, out_dtype=dtype), merged.to(dtype), str(dtype))
    gate = torch.randn(5, 2, 8, generator=generator).to(torch.bfloat16)
    gated = merge_partials(outs, lses, gate=gate, out_dtype=torch.float32)
    wanted = merged.to(torch.bfloat16).double() * torch.sigmoid(gate.double())
    assert float((gated.double() - wanted).abs().max()) < 1e-6, "rounded to the gate's dtype before it is gated"
    for out, same, buffer in zip(outs, before, buffers, strict=True):
        assert_bitwise_equal(out, same, "inputs")
        buffer.assert_intact()
