"""vLLM's operators on random CPU tensors, against the slow oracle."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashqsa.integrations.vllm_plugin import ops
from flashqsa.preparation import prepare
from flashqsa.testing import StepCase, assert_bitwise_equal, assert_within_budget, make_step, oracles, stream

BF16 = torch.bfloat16
DECODE = StepCase("decode", ((300, 1), (7, 1), (0, 1), (128, 1)))
VERIFY = StepCase("verify_4", ((300, 4), (61, 4), (8, 4)))
PREFILL = StepCase("prefill", ((0, 150), (37, 61), (3, 1), (90, 2)))
CASES = [
    dataclasses.replace(case, dtype=dtype, name=f"{case.name}_{str(dtype)[6:]}")
    for case in (DECODE, VERIFY, PREFILL)
    for dtype in (torch.float32, BF16)
]


def _visible(step):
    return step.plan.visible_blocks


@pytest.mark.parametrize("case", CASES, ids=str)
def test_selecting_operators(case: StepCase) -> None:
    step = make_step(case, seed=1)
    expected = oracles.step_selection(step)
    k_cache = step.cache.block_keys[:, :, None]
    out = torch.full((step.num_rows, case.topk_blocks), 77, dtype=torch.int32)
    budget = case.topk_blocks * case.block_tokens
    lens = set(case.query_lens)
    if len(lens) == 1:
        ops.qsa_select_paged_decode(
            step.index_q, k_cache, step.plan.page_table, _visible(step), budget, case.block_tokens, lens.pop(), out
        )
        rows = [[block for block in row if block >= 0] for row in out.tolist()]
        assert rows == expected
        out.fill_(77)
    ops.qsa_select_paged_prefill(
        step.index_q, k_cache, step.plan.page_table, step.plan.query_starts + 13, _visible(step), budget,
        case.block_tokens, max(case.query_lens), out, max(case.seq_lens),
    )  # fmt: skip
    assert [[block for block in row if block >= 0] for row in out.tolist()] == expected
    step.assert_guards_intact()


def test_a_padding_request_selects_nothing() -> None:
    """Its page table and its rows hold leftovers."""
    step = make_step(DECODE, seed=2)
    table = torch.cat([step.plan.page_table, torch.full_like(step.plan.page_table[:1], 1 << 20)])
    index_q = torch.cat([step.index_q, torch.full_like(step.index_q[:1], float("nan"))])
    visible = torch.cat([_visible(step), torch.zeros(1, dtype=torch.int32)])
    out = torch.full((5, 8), 77, dtype=torch.int32)
    ops.qsa_select_paged_decode(index_q, step.cache.block_keys[:, :, None], table, visible, 32, 4, 1, out)
    assert [[b for b in row if b >= 0] for row in out[:4].tolist()] == oracles.step_selection(step)
    assert out[4].tolist() == [-1] * 8


@pytest.mark.parametrize("case", CASES, ids=str)
def test_expand_and_attention(case: StepCase) -> None:
    step = make_step(case, seed=3)
    chosen = oracles.step_selection(step)
    ids = torch.full((step.num_rows, case.topk_blocks), -1, dtype=torch.int32)
    for row, blocks in enumerate(chosen):
        ids[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    tokens = torch.full((step.num_rows, case.topk_blocks * 4 + 4), 77, dtype=torch.int32)
    ops.expand_qsa_block_indices(ids, step.plan.positions, _visible(step), 4, case.topk_blocks * 4, tokens)
    for row, (blocks, position) in enumerate(zip(chosen, step.plan.positions.tolist(), strict=True)):
        listed = oracles.selected_tokens(blocks, (position + 1) // 4, position, 4)
        assert tokens[row, : len(listed)].tolist() == listed
        assert set(tokens[row, len(listed) : -1].tolist()) <= {-1}
        assert tokens[row, -1] == len(listed)
    out = torch.full_like(step.q, float("nan"))
    result = ops.qsa_sparse_paged_attention(
        step.q, step.cache.k_pages, step.cache.v_pages, tokens, step.plan.page_table, step.plan.request_ids, False,
        out, output_gate=step.gate.contiguous(),
    )  # fmt: skip
    assert result is out
    exact, _ = oracles.step_attention(step, chosen)
    rounded, _ = oracles.step_attention(step, chosen, round_to=case.dtype)
    assert_within_budget(out, rounded.to(case.dtype), exact, case.name)
    step.assert_guards_intact()


def test_rows_without_tokens_give_zeros_whatever_their_request() -> None:
    """vLLM maps padding rows to request 0, with a count of 0."""
    step = make_step(dataclasses.replace(DECODE, dtype=BF16), seed=4)
    tokens = torch.full((4, 36), -1, dtype=torch.int32)
    tokens[:, -1] = 0
    out = torch.full_like(step.q, float("nan"))
    ops.qsa_sparse_paged_attention(
        step.q, step.cache.k_pages, step.cache.v_pages, tokens, step.plan.page_table,
        torch.zeros(4, dtype=torch.int32), False, out, output_gate=step.gate.contiguous(),
    )  # fmt: skip
    assert not bool(out.any())


@pytest.mark.parametrize("keeps_positions", [True, False])
@pytest.mark.parametrize("case", [DECODE, VERIFY, PREFILL], ids=str)
def test_prepare_writes_what_the_stage_writes(case: StepCase, keeps_positions: bool, prepare_arguments) -> None:
    """Bit for bit: every cache, index queries, queries and gates; text models' rings hold no positions."""
    case = dataclasses.replace(
        case, dtype=BF16, layout="packed", mrope=keeps_positions, speculative_rows=4, rope_dtype=BF16
    )
    ours, stage = (make_step(case, seed=5, written=False) for _ in range(2))
    if not keeps_positions:  # a token's rotary position is its place
        for step in (ours, stage):
            step.rope_positions.copy_(step.plan.positions)
            slots = torch.arange(case.ring_tokens)
            for request, ring_id in enumerate(step.plan.ring_ids.tolist()):
                last = case.requests[request][0] - 1
                stored = (last - (last - slots) % case.ring_tokens).clamp(min=0)
                step.cache.ring_positions[ring_id] = stored[:, None]
    expected = prepare(
        stage.q_gate, stage.k, stage.v, stage.index_qk, stage.rope_positions, stage.rope, stage.norms, stage.cache,
        stage.plan,
    )  # fmt: skip
    arguments = prepare_arguments(ours, keeps_positions)
    q, gate = ops.qsa_prepare(**arguments)
    index_q, state, dim = arguments["q_out"], arguments["state_cache"], case.index_head_dim
    assert_bitwise_equal(index_q, expected.index_q, "index_q")
    assert_bitwise_equal(q, expected.q, "q")
    assert_bitwise_equal(gate, expected.gate.contiguous(), "gate")
    for name in ("k_pages", "v_pages", "block_keys"):
        assert_bitwise_equal(getattr(ours.cache, name), getattr(stage.cache, name), name)
    assert_bitwise_equal(state[1:, :, 0, :dim].contiguous(), stage.cache.ring, "ring")
    assert not bool(state[0].any()), "block 0 belongs to nobody"
    ours.assert_guards_intact()


def test_store_cache_rows() -> None:
    cache = torch.full((3, 4, 1, 8), 5.0)
    rows = torch.randn(5, 1, 8, generator=stream(6))
    expected = cache.clone()
    for row, slot in zip((0, 2, 4), (11, 0, 6), strict=True):
        expected[slot // 4, slot % 4, 0] = rows[row, 0]
    ops.qsa_store_cache_rows(cache, torch.tensor([11, -1, 0, 12, 6]), rows)
    assert_bitwise_equal(cache, expected)


@pytest.mark.parametrize("keeps_positions", [True, False])
def test_compress_groups(keeps_positions: bool) -> None:
    case = dataclasses.replace(PREFILL, mrope=True, speculative_rows=4)
    step = make_step(case, seed=7, written=False)
    positions = step.rope_positions.t().contiguous()[:, None]
    pooled, first = ops.qsa_compress_groups_with_ratio(
        step.index_qk[:, -1:], positions, step.cache.ring[:, :, None], step.plan.ring_ids[:, None],
        step.plan.request_ids, step.plan.query_starts, step.plan.positions, step.plan.closed_block_slot_ids, 4,
        step.cache.ring_positions[:, :, None] if keeps_positions else None,
    )  # fmt: skip
    closed = 0
    for request in step.requests:
        for row, position in request.rows():
            if (position + 1) % 4:
                assert not bool(pooled[row].any() or first[row].any())
                continue
            closed += 1
            mean = request.raw_index_keys[position - 3 : position + 1].double().mean(dim=0)
            torch.testing.assert_close(pooled[row, 0].double(), mean, rtol=1e-6, atol=1e-6)
            where = request.rope_positions[:, position - 3] if keeps_positions else torch.full((3,), position - 3)
            assert first[row].tolist() == where.tolist()
    assert closed == int((step.plan.closed_block_slot_ids >= 0).sum()) > 40
