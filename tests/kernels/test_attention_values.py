"""The attention kernel against float64 within the error budget: shapes, dtypes, options, tails, token lists, shards."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from flashqsa.attention import merge_partials
from flashqsa.attention.triton_rows import SEGMENT_TOKENS
from flashqsa.plan import plan_step
from flashqsa.selection import expand_tokens
from flashqsa.testing import StepCase, assert_bitwise_equal, assert_within_budget, make_step, poison_slots

RAGGED = ((150, 1), (0, 19), (61, 5), (31, 1), (0, 3), (270, 2))
"""Decode, prefill, verification, within the budget, shorter than a block."""


def _case(name: str, **options: Any) -> StepCase:
    return StepCase(name, **{"requests": RAGGED, "padding_rows": 2, "padding_requests": 1, **options})


@pytest.mark.parametrize(
    ("heads", "head_dim", "page_tokens", "layout"),
    [
        ((2, 2), 32, 16, "split"),
        ((6, 2), 64, 64, "hnd"),
        ((5, 1), 96, 80, "packed"),
        ((24, 2), 128, 848, "dense"),
        ((16, 1), 256, 64, "hnd"),
        ((3, 1), 8, 16, "split"),
        ((20, 1), 40, 16, "split"),
    ],
    ids=str,
)
def test_output_within_the_error_budget(
    heads: tuple[int, int], head_dim: int, page_tokens: int, layout: Any, dtype: torch.dtype, device: torch.device,
    choose: Any, attend_hostile: Any, row_lists: Any, assert_attends: Any,
) -> None:  # fmt: skip
    """Every shape on a ragged step of every phase, with padding, strided caches and NaN in free memory."""
    case = _case(
        "shapes", q_heads=heads[0], kv_heads=heads[1], head_dim=head_dim, rotary_dim=8, page_tokens=page_tokens,
        layout=layout, dtype=dtype,
    )  # fmt: skip
    step = make_step(case, seed=30, device=device)
    selection = choose(step)
    got = attend_hostile(step, selection)
    assert_attends(step, row_lists(step, selection), got)
    padding = step.plan.request_ids < 0
    assert bool((got[0][padding] == 0).all())
    assert bool((got[1][padding] == -torch.inf).all())


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 8])
def test_blocks_of_other_sizes(
    block_tokens: int, device: torch.device, choose: Any, attend_hostile: Any, row_lists: Any, assert_attends: Any
) -> None:
    """Also one that does not divide a segment."""
    case = _case("block", block_tokens=block_tokens, page_tokens=24, topk_blocks=160 // block_tokens, head_dim=32)
    step = make_step(case, seed=31, device=device)
    selection = choose(step)
    assert_attends(step, row_lists(step, selection), attend_hostile(step, selection))


@pytest.mark.parametrize("contiguous", [False, True], ids=["paged", "contiguous"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("include_tail", [False, True], ids=["no tail", "tail"])
def test_options(
    contiguous: bool, gated: bool, include_tail: bool, device: torch.device, choose: Any, attend_hostile: Any,
    row_lists: Any, assert_attends: Any,
) -> None:  # fmt: skip
    case = _case("options", contiguous=contiguous, head_dim=32)
    step = make_step(case, seed=32, device=device)
    selection = choose(step)
    options = {"gated": gated, "softmax_scale": 0.3}
    got = attend_hostile(step, selection, include_tail=include_tail, row_exact=gated, **options)
    assert_attends(step, row_lists(step, selection, include_tail), got, **options)


@pytest.mark.parametrize("model_dtype", [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_partial_outputs_in_fp32(
    model_dtype: torch.dtype, device: torch.device, choose: Any, attend_hostile: Any, row_lists: Any,
    assert_attends: Any,
) -> None:  # fmt: skip
    step = make_step(_case("partial", dtype=model_dtype, head_dim=32), seed=33, device=device)
    selection = choose(step)
    got = attend_hostile(step, selection, gated=False, out_dtype=torch.float32)
    assert got[0].dtype == torch.float32
    assert_attends(step, row_lists(step, selection), got, gated=False)
    low = attend_hostile(step, selection, gated=False)
    assert_bitwise_equal(got[0].to(model_dtype), low[0], "rounded once")


@pytest.mark.parametrize("mixed", [torch.float32, torch.float16], ids=str)
def test_fault_49_queries_of_fp32_over_other_caches(
    mixed: torch.dtype, device: torch.device, choose: Any, attend_hostile: Any, row_lists: Any, assert_attends: Any
) -> None:
    step = make_step(_case("mixed", kv_dtype=mixed, head_dim=32), seed=34, device=device)
    selection = choose(step)
    assert_attends(step, row_lists(step, selection), attend_hostile(step, selection))


@pytest.mark.gpu
@pytest.mark.parametrize("scales", ["tensors", "floats", "one of each"])
@pytest.mark.parametrize("model_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_fault_39_float8_caches_in_every_phase(
    scales: str, model_dtype: torch.dtype, device: torch.device, choose: Any, attend_hostile: Any, row_lists: Any,
    assert_attends: Any,
) -> None:  # fmt: skip
    """e4m3 K and V with k_scale 0.37 and v_scale 1.9, given as tensors or as numbers."""
    step = make_step(
        _case("e4m3", dtype=model_dtype, kv_dtype=torch.float8_e4m3fn, head_dim=64), seed=35, device=device
    )
    k_scale, v_scale = step.case.scales
    if scales == "floats":
        step = dataclasses.replace(step, cache=dataclasses.replace(step.cache, k_scale=k_scale, v_scale=v_scale))
    elif scales == "one of each":
        step = dataclasses.replace(step, cache=dataclasses.replace(step.cache, k_scale=k_scale))
    selection = choose(step)
    assert_attends(step, row_lists(step, selection), attend_hostile(step, selection))


@pytest.mark.parametrize("context", [1, 3, 4, 5, 63, 64, 100, 464])
def test_fault_5_contexts_below_the_budget_are_dense(
    context: int, device: torch.device, choose: Any, attend_hostile: Any, assert_attends: Any
) -> None:
    """A decode row that selects all it sees, at split work: causal attention over everything."""
    case = StepCase("dense", ((context - 1, 1),), topk_blocks=128, head_dim=32, q_heads=3, kv_heads=1)
    step = make_step(case, seed=36, device=device)
    assert_attends(step, [list(range(context))], attend_hostile(step, choose(step)))


@pytest.mark.parametrize("later", [1, 5, SEGMENT_TOKENS // 2 + 3, SEGMENT_TOKENS + 3, 3 * SEGMENT_TOKENS + 37])
def test_reused_selections_attend_all_tokens_since(
    later: int, device: torch.device, choose: Any, attend_hostile: Any, row_lists: Any, assert_attends: Any
) -> None:
    """A selection taken to rows that are `later` tokens further: the tail grows, past its segment too."""
    early = make_step(StepCase("early", ((90, 1), (4, 1), (44, 1)), topk_blocks=5), seed=37, device=device)
    case = StepCase("late", ((90 + later, 1), (4 + later, 1), (44 + later, 1)), topk_blocks=5, head_dim=32)
    step = make_step(case, seed=37, device=device)
    selection = choose(early).take(torch.arange(3, device=device))
    lists = row_lists(step, selection)
    assert all(len(tokens) > later for tokens in lists)
    assert_attends(step, lists, attend_hostile(step, selection))


def test_budgets_and_tails_that_fill_segments(
    device: torch.device, choose: Any, attend_hostile: Any, row_lists: Any, assert_attends: Any
) -> None:
    """Lists one token below, at and above a multiple of a segment."""
    blocks = SEGMENT_TOKENS // 2
    case = StepCase("segments", tuple((700 + i, 1) for i in range(4)), topk_blocks=blocks, head_dim=32)
    step = make_step(case, seed=38, device=device)
    for counts in ([blocks] * 4, [32, 31, 33, 0], [64, 1, 63, 62]):
        selection = choose(step, counts=counts)
        assert_attends(step, row_lists(step, selection), attend_hostile(step, selection))


@pytest.mark.parametrize("model_dtype", [torch.float32, torch.float16], ids=str)
def test_token_lists(
    model_dtype: torch.dtype, device: torch.device, choose: Any, attend_hostile: Any, row_lists: Any,
    assert_attends: Any,
) -> None:  # fmt: skip
    """The lists of expand_tokens, then the same in another order, with garbage past their counts."""
    step = make_step(_case("lists", dtype=model_dtype, head_dim=32), seed=39, device=device)
    lists = [tokens[:35] for tokens in row_lists(step, choose(step))]
    for reverse in (False, True):
        token_ids = torch.full((step.num_rows, 41), 2**31 - 1, dtype=torch.int32)
        for row, tokens in enumerate(lists):
            token_ids[row, : len(tokens)] = torch.tensor(tokens[::-1] if reverse else tokens, dtype=torch.int32)
            token_ids[row, -1] = len(tokens)
        wide = torch.full((step.num_rows, 43), -1, dtype=torch.int32)
        wide[:, 1:-1] = token_ids
        got = attend_hostile(step, wide.to(device)[:, 1:-1])
        assert_attends(step, lists, got)


def test_token_lists_of_a_selection(
    device: torch.device, choose: Any, attend_hostile: Any, row_lists: Any, assert_attends: Any
) -> None:
    step = make_step(StepCase("expanded", RAGGED, head_dim=32), seed=40, device=device)
    selection = choose(step)
    token_ids = expand_tokens(selection, step.plan)
    assert_attends(step, row_lists(step, selection), attend_hostile(step, token_ids))


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_fault_44_shards_merge_exactly(
    shards: int, device: torch.device, choose: Any, attend_hostile: Any, row_lists: Any
) -> None:
    """Blocks dealt to shards, one shard empty, the tail owned by the last: within 1e-5 of the unsplit result."""
    case = StepCase("shards", ((700, 1), (201, 2), (2, 1)), topk_blocks=40, head_dim=32)
    step = make_step(case, seed=41, device=device)
    whole = choose(step)
    wanted = attend_hostile(step, whole)
    outputs, lses = [], []
    for shard in range(shards + 1):
        owned = torch.arange(40, device=device) % shards == shard  # the shard after the last owns nothing
        live = owned[None] & (torch.arange(40, device=device)[None] < whole.block_counts[:, None])
        order = (~live).to(torch.int32).argsort(dim=1, stable=True)
        part = dataclasses.replace(
            whole, block_ids=whole.block_ids.gather(1, order), block_counts=live.sum(1).to(torch.int32)
        )
        out, lse = attend_hostile(step, part, gated=False, include_tail=shard == shards - 1, out_dtype=torch.float32)
        outputs.append(out)
        lses.append(lse)
    merged = merge_partials(outputs, lses, gate=step.gate)
    assert not bool(merged.isnan().any())
    assert float((merged - wanted[0]).abs().max()) < 1e-5


@pytest.mark.parametrize("kind", ["no row", "rows of other requests"])
def test_fault_45_nan_where_no_row_attends(
    kind: str, dtype: torch.dtype, device: torch.device, choose: Any, attend_hostile: Any, row_lists: Any,
    unseen_poisoned: Any,
) -> None:  # fmt: skip
    """K and V are NaN wherever no row of the request selected: no bit changes."""
    case = StepCase("nan", ((150, 1), (100, 4), (0, 20), (80, 1)), topk_blocks=3, dtype=dtype, head_dim=32)
    step = make_step(case, seed=42, device=device)
    selection = choose(step, noise=0.1)
    wanted = attend_hostile(step, selection)
    assert bool(torch.isfinite(wanted[0]).all())
    poisoned = unseen_poisoned(step, row_lists(step, selection), keys=kind == "rows of other requests")
    got = attend_hostile(poisoned, selection)
    assert_bitwise_equal(got[0], wanted[0], "output")
    assert_bitwise_equal(got[1], wanted[1], "lse")


def test_nan_and_infinity_stay_in_their_rows(device: torch.device, choose: Any, attend_hostile: Any) -> None:
    """NaN that is attended comes out, of its own rows alone; a gate of NaN in padding does not."""
    step = make_step(StepCase("inf", ((30, 1), (90, 1), (40, 3)), padding_rows=2, head_dim=32), seed=43, device=device)
    selection = choose(step)
    wanted = attend_hostile(step, selection)
    assert bool(step.gate[-2:].isnan().all())
    assert bool((wanted[0][-2:] == 0).all())
    q, gate = step.q.clone(), step.gate.clone()
    q[0], q[1] = float("nan"), float("inf")
    gate[3, 0], gate[3, 1], gate[3, 2] = float("nan"), float("inf"), -float("inf")
    got = attend_hostile(dataclasses.replace(step, q=q, gate=gate), selection)
    assert bool(got[0][0].isnan().all())
    assert bool(got[0][3, 0].isnan().all())
    assert bool((got[0][3, 2] == 0).all())
    assert_bitwise_equal(got[0][3, 1], attend_hostile(step, selection, gated=False)[0][3, 1], "a gate of infinity is 1")
    assert_bitwise_equal(got[0][[2, 4]], wanted[0][[2, 4]], "other rows")
    v_pages = step.cache.v_pages.clone()
    poison_slots(v_pages, step.requests[0].slot_ids[30:31])
    cache = dataclasses.replace(step.cache, v_pages=v_pages)
    got = attend_hostile(dataclasses.replace(step, cache=cache), selection)
    assert bool(got[0][0].isnan().all())
    assert_bitwise_equal(got[0][1:], wanted[0][1:], "other requests")


@pytest.mark.parametrize("seq_lens", [[0, 5, 0], [0, 0], []], ids=str)
def test_fault_18_requests_without_tokens(
    seq_lens: list[int], device: torch.device, choose: Any, attend_hostile: Any
) -> None:
    """Zeros and -inf, from queries and caches of NaN."""
    requests = tuple((n - 1, 1) if n else (0, 0) for n in seq_lens)
    step = make_step(StepCase("empty", requests, padding_rows=3, head_dim=32), seed=44, device=device)
    out, lse = attend_hostile(step, choose(step))
    live = step.plan.request_ids >= 0
    assert bool(torch.isfinite(out).all())
    assert bool((out[~live] == 0).all())
    assert bool((lse[~live] == -torch.inf).all())
    assert bool(torch.isfinite(lse[live]).all())


def test_rows_that_select_nothing(device: torch.device, choose: Any, attend_hostile: Any) -> None:
    """Live rows of a shard without the tail: zeros whatever their query, gate and caches hold."""
    step = make_step(StepCase("nothing", ((40, 1), (0, 20), (63, 4)), head_dim=32), seed=45, device=device)
    counts = [0 if row in (0, 5, 22) else min(8, seen) for row, seen in enumerate(step.plan.visible_blocks.tolist())]
    selection = choose(step, counts=counts)
    q, gate = step.q.clone(), step.gate.clone()
    empty = selection.block_counts == 0
    q[empty], gate[empty] = float("nan"), float("nan")
    out, lse = attend_hostile(dataclasses.replace(step, q=q, gate=gate), selection, include_tail=False)
    assert bool((out[empty] == 0).all())
    assert bool((lse[empty] == -torch.inf).all())
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("context", [*range(63, 68), 127, 128, 129])
def test_fault_37_contexts_around_a_page(
    context: int, device: torch.device, choose: Any, attend_hostile: Any, row_lists: Any, assert_attends: Any
) -> None:
    """Pages of 64, shuffled, with garbage past the end."""
    case = StepCase("page", ((context - 1, 1), (context - 3, 3)), page_tokens=64, topk_blocks=40, head_dim=32)
    step = make_step(case, seed=46, device=device)
    selection = choose(step)
    assert_attends(step, row_lists(step, selection), attend_hostile(step, selection))


@pytest.mark.gpu
def test_fault_45_ids_that_break_the_rules_are_memory_safe(device: torch.device, choose: Any) -> None:
    """Ids of -1, duplicates, ids not yet visible and page ids of nobody: something comes out, nothing faults."""
    from flashqsa.attention import attend

    step = make_step(_case("broken", head_dim=64, dtype=torch.bfloat16), seed=47, device=device)
    selection = choose(step)
    for value in (-1, 0, 2**31 - 1, -(2**31), 10**6):
        ids = selection.block_ids.clone()
        ids[:, 1:3] = value
        attend(step.q, step.cache, dataclasses.replace(selection, block_ids=ids), step.plan, backend="triton")
        ids[:] = value
        attend(step.q, step.cache, dataclasses.replace(selection, block_ids=ids), step.plan, backend="triton")
    table = torch.full_like(step.plan.page_table, 2**31 - 1)
    plan = plan_step(
        step.plan.query_starts, step.plan.seq_lens, table, page_tokens=16, block_tokens=4, topk_blocks=8,
        max_query_len=step.plan.max_query_len, max_seq_len=step.plan.max_seq_len, num_rows=step.num_rows,
    )  # fmt: skip
    attend(step.q, step.cache, selection, plan, backend="triton")
    torch.cuda.synchronize()
    wanted = attend(step.q, step.cache, selection, step.plan, backend="triton", out_dtype=torch.float32)
    defined = attend(step.q, step.cache, selection, step.plan, backend="reference", out_dtype=torch.float32)
    assert_within_budget(wanted, defined.to(torch.bfloat16), defined.double(), "afterwards")
