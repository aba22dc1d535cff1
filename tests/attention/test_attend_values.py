"""`attend` against the definition in float64: phases, dtypes, layouts, page sizes, head shapes, depths."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.attention import attend
from flashqsa.cache import LayerCache
from flashqsa.plan import plan_step
from flashqsa.results import Selection
from flashqsa.selection import select_blocks
from flashqsa.testing import StepCase, assert_bitwise_equal, assert_within_budget, make_step, oracles

Check = Callable[..., tuple[torch.Tensor, torch.Tensor]]

E4M3 = torch.float8_e4m3fn
DTYPES = {
    "fp32": (torch.float32, None),
    "fp16": (torch.float16, None),
    "bf16": (torch.bfloat16, None),
    "fp64": (torch.float64, None),
    "bf16-e4m3": (torch.bfloat16, E4M3),
    "fp16-e4m3": (torch.float16, E4M3),
    "fp32-bf16": (torch.float32, torch.bfloat16),
    "bf16-fp32": (torch.bfloat16, torch.float32),
}
PHASES = {
    "prefill": ((0, 70), (0, 3), (0, 1)),
    "chunk": ((60, 37), (33, 70), (4, 5)),
    "decode": ((96, 1), (31, 1), (3, 1), (0, 1)),
    "verify": ((100, 4), (63, 2), (31, 7), (1, 3)),
    "mixed": ((0, 40), (90, 1), (57, 4), (0, 0), (12, 20)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_in_every_dtype(phase: str, dtype: str, backend: str, choose: Any, check: Check) -> None:
    model_dtype, kv_dtype = DTYPES[dtype]
    case = StepCase(
        phase, PHASES[phase], dtype=model_dtype, kv_dtype=kv_dtype, padding_rows=2, padding_requests=1,
        layout="packed" if phase == "chunk" else "split",
    )  # fmt: skip
    step = make_step(case, seed=49)
    check(step, choose(step), backend)


@pytest.mark.parametrize("phase", PHASES)
def test_fault_49_fp16_and_fp32_are_served(phase: str, backend: str, choose: Any, check: Check) -> None:
    for dtype in (torch.float16, torch.float32):
        step = make_step(StepCase(phase, PHASES[phase], dtype=dtype, layout="hnd"), seed=149)
        out, _ = check(step, choose(step, noise=10.0), backend, gated=False)
        assert out.dtype == dtype


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("phase", ["prefill", "chunk", "decode", "verify"])
def test_fault_39_scaled_caches_in_every_phase(
    phase: str, kv_dtype: torch.dtype, backend: str, choose: Any, check: Check
) -> None:
    case = StepCase(phase, PHASES[phase], dtype=torch.bfloat16, kv_dtype=kv_dtype, k_scale=0.37, v_scale=1.9)
    step = make_step(case, seed=39)
    selection = choose(step)
    out, lse = check(step, selection, backend)
    if kv_dtype != E4M3:
        return
    as_numbers = dataclasses.replace(step.cache, k_scale=0.37, v_scale=1.9)
    out_numbers, lse_numbers = check(step, selection, backend, cache=as_numbers)
    assert_bitwise_equal(out_numbers, out, "scales as floats")
    assert_bitwise_equal(lse_numbers, lse, "scales as floats")
    unscaled = dataclasses.replace(step.cache, k_scale=None, v_scale=None)
    ignored = attend(step.q, unscaled, selection, step.plan, gate=step.gate, backend=backend)
    assert not torch.equal(ignored, out), "the scales must matter"


def test_scales_multiply_whatever_is_stored(backend: str, choose: Any) -> None:
    step = make_step(StepCase("bf16", ((60, 9), (40, 1)), dtype=torch.bfloat16), seed=40)
    scaled = dataclasses.replace(step.cache, k_scale=0.5, v_scale=4.0)  # powers of two: exact in every order
    multiplied = dataclasses.replace(step.cache, k_pages=step.cache.k_pages * 0.5, v_pages=step.cache.v_pages * 4.0)
    selection = choose(step)
    got, wanted = (
        attend(step.q, cache, selection, step.plan, return_lse=True, backend=backend) for cache in (scaled, multiplied)
    )
    assert_bitwise_equal(got[0], wanted[0], "output")
    assert_bitwise_equal(got[1], wanted[1], "lse")


def test_every_float8_value_is_read_as_torch_converts_it(backend: str) -> None:
    """One token, one head of 256 values, all 256 bytes: the output is the values."""
    values = torch.arange(256, dtype=torch.uint8).view(E4M3)
    pages = values.expand(1, 4, 1, 256)
    cache = LayerCache(torch.zeros(1, 4, 1, 256).to(E4M3), pages, None, None, None)
    one = torch.ones(1, dtype=torch.int32)
    plan = plan_step(
        torch.tensor([0, 1], dtype=torch.int32), one, 0 * one[:, None],
        page_tokens=4, block_tokens=4, topk_blocks=1, max_query_len=1, max_seq_len=1,
    )  # fmt: skip
    selection = Selection(-one[:, None], 0 * one, None, 0 * one, 0 * one)
    for dtype in (torch.float32, torch.float64):
        out = attend(torch.ones(1, 1, 256, dtype=dtype), cache, selection, plan, backend=backend)
        assert torch.equal(torch.nan_to_num(out[0, 0], nan=7e7), torch.nan_to_num(values.to(dtype), nan=7e7))


@pytest.mark.parametrize("layout", ["split", "packed", "hnd", "dense"])
@pytest.mark.parametrize("contiguous", [False, True], ids=["paged", "first-slots"])
def test_memory_changes_no_bit(layout: Any, contiguous: bool, backend: str, choose: Any, check: Check) -> None:
    requests = ((70, 9), (0, 40), (129, 1), (31, 2))
    plain = make_step(StepCase("plain", requests, layout="dense", page_tokens=16), seed=15)
    expected, expected_lse = check(plain, choose(plain), backend)
    for page_tokens in (16,) if contiguous else (4, 16, 96):
        case = StepCase(layout, requests, layout=layout, contiguous=contiguous, page_tokens=page_tokens)
        step = make_step(case, seed=15)
        out, lse = check(step, choose(step), backend)
        assert_bitwise_equal(out, expected, f"pages of {page_tokens}")
        assert_bitwise_equal(lse, expected_lse, f"pages of {page_tokens}")


@pytest.mark.parametrize("page_tokens", [16, 64, 80, 96, 128, 640, 800, 848, 1600, 1616])
def test_page_sizes(page_tokens: int, backend: str, choose: Any, check: Check) -> None:
    requests = ((1617, 3), (799, 2), (page_tokens - 1, 1), (page_tokens, 1), (page_tokens + 1, 1))
    one_page = make_step(StepCase("one page", requests, page_tokens=2048, topk_blocks=24), seed=16)
    expected, expected_lse = check(one_page, choose(one_page, noise=2.0), backend)
    step = make_step(StepCase("pages", requests, page_tokens=page_tokens, topk_blocks=24), seed=16)
    out, lse = check(step, choose(step, noise=2.0), backend)
    assert_bitwise_equal(out, expected, "output")
    assert_bitwise_equal(lse, expected_lse, "lse")


HEADS = [(1, 1), (2, 2), (3, 1), (5, 1), (7, 1), (16, 1), (6, 2), (9, 3), (24, 2), (8, 8), (12, 4)]


@pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS)
def test_head_groups(q_heads: int, kv_heads: int, backend: str, choose: Any, check: Check) -> None:
    case = StepCase("heads", ((40, 33), (77, 1), (50, 3)), q_heads=q_heads, kv_heads=kv_heads, head_dim=32)
    step = make_step(case, seed=q_heads)
    check(step, choose(step), backend)


@pytest.mark.parametrize("head_dim", [32, 33, 40, 63, 64, 65, 80, 96, 127, 128, 160, 192, 255, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_head_dims(head_dim: int, dtype: torch.dtype, backend: str, choose: Any, check: Check) -> None:
    # errors are compared by their maxima, which takes some rows to be fair
    requests = ((40, 50), (77, 1), (50, 3), (30, 40))
    case = StepCase("dims", requests, q_heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype)
    step = make_step(case, seed=head_dim)
    check(step, choose(step), backend)


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 8])
def test_block_sizes(block_tokens: int, backend: str, choose: Any, check: Check) -> None:
    case = StepCase(
        "blocks", ((40, 30), (77, 1), (50, 3)), block_tokens=block_tokens, page_tokens=8 * block_tokens, topk_blocks=5
    )
    step = make_step(case, seed=block_tokens)
    check(step, choose(step), backend)


def test_released_shape(backend: str, choose: Any, check: Check) -> None:
    """24/2 heads of 256, blocks of 4, 512 of them, bf16."""
    case = StepCase(
        "released", ((2600, 1), (2100, 2), (2400, 9)), q_heads=24, head_dim=256, rotary_dim=64, index_head_dim=64,
        topk_blocks=512, page_tokens=64, dtype=torch.bfloat16,
    )  # fmt: skip
    step = make_step(case, seed=24)
    check(step, choose(step, noise=0.1), backend)


def test_fault_37_lengths_past_the_first_page(backend: str, choose: Any, check: Check) -> None:
    contexts = [*range(63, 71), *range(127, 131), 4097]
    case = StepCase("pages", tuple((n - 1, 1) for n in contexts), page_tokens=64, topk_blocks=512)
    step = make_step(case, seed=37)
    check(step, choose(step), backend)


def test_fault_25_ragged_batches_across_the_budget(
    backend: str, choose: Any, check: Check, attend_hostile: Any
) -> None:
    contexts, seeds = (1, 2047, 2049, 55995, 2048, 5, 300), (0, 1, 2, 3, 4, 5, 6)
    options: dict[str, Any] = {"topk_blocks": 512, "page_tokens": 64, "head_dim": 8, "q_heads": 4}
    alone = []
    for context, seed in zip(contexts, seeds, strict=True):
        step = make_step(StepCase("alone", ((context - 1, 1),), request_seeds=(seed,), **options), seed=25)
        alone.append(attend_hostile(step, choose(step), backend=backend))
    for batch in ((0, 3), (1, 2, 3), seeds):
        requests = tuple((contexts[i] - 1, 1) for i in batch)
        step = make_step(StepCase("batch", requests, request_seeds=batch, **options), seed=25)
        out, lse = check(step, choose(step), backend)
        for row, request in enumerate(batch):
            label = f"context {contexts[request]} in a batch of {len(batch)}"
            assert_bitwise_equal(out[row], alone[request][0][0], label)
            assert_bitwise_equal(lse[row], alone[request][1][0], label)


def test_fault_04_selected_blocks_give_all_their_tokens(backend: str) -> None:
    """Zero queries weigh every token alike: exp(lse) counts them, and values say which member of a block they are."""
    case = StepCase(
        "counts", ((2599, 1), (2600, 1), (2601, 1), (2602, 1), (2055, 6)), topk_blocks=512, page_tokens=64, head_dim=8
    )
    step = make_step(case, seed=4)
    v_pages = torch.full_like(step.cache.v_pages, float("nan"))
    for request in step.requests:
        members = torch.nn.functional.one_hot(torch.arange(request.seq_len) % 4, 8).to(torch.float32)
        slots = request.slot_ids
        v_pages[slots // case.page_tokens, slots % case.page_tokens] = members[:, None]
    selection = select_blocks(step.index_q, step.cache, step.plan)
    cache = dataclasses.replace(step.cache, v_pages=v_pages)
    out, lse = attend(torch.zeros_like(step.q), cache, selection, step.plan, return_lse=True, backend=backend)
    for row, position in enumerate(step.plan.positions.tolist()):
        tail = (position + 1) % 4
        count = 512 * 4 + tail
        assert selection.block_counts[row] == 512
        torch.testing.assert_close(lse[row], torch.full((6,), count, dtype=torch.float32).log())
        members = torch.tensor([512.0 + (member < tail) for member in range(4)] + [0.0] * 4)
        torch.testing.assert_close(out[row] * count, members.expand(6, -1), rtol=1e-5, atol=1e-3)


def test_fault_06_interleaved_pages_and_a_dropped_last_block(backend: str, choose: Any, check: Check) -> None:
    requests, options = ((2991, 10), (2776, 1)), {"topk_blocks": 64, "page_tokens": 16}
    both = make_step(StepCase("both", requests, **options), seed=6)
    selection = choose(both)
    out, lse = check(both, selection, backend)
    rows = {0: slice(0, 10), 1: slice(10, 11)}
    for request in (0, 1):
        case = StepCase("alone", (requests[request],), request_seeds=(request,), **options)
        alone = make_step(case, seed=6)
        alone_out, alone_lse = check(alone, choose(alone), backend)
        assert_bitwise_equal(out[rows[request]], alone_out, f"request {request}")
        assert_bitwise_equal(lse[rows[request]], alone_lse, f"request {request}")

    # the block that the last row of request 0 can see last, complete and not selected by any row, holds NaN
    truth = both.requests[0]
    picked = set(selection.block_ids[:10].flatten().tolist())
    last = max(block for block in range(truth.context_before // 4) if block not in picked)
    slots = truth.slot_ids[4 * last : 4 * last + 4]
    pages = [both.cache.k_pages.clone(), both.cache.v_pages.clone()]
    for tensor in pages:
        tensor[slots // 16, slots % 16] = float("nan")
    cache = dataclasses.replace(both.cache, k_pages=pages[0], v_pages=pages[1])
    again = attend(both.q, cache, selection, both.plan, gate=both.gate, backend=backend)
    assert_bitwise_equal(again, out, "a block that nobody selected")


def test_fault_06_a_complete_last_block_is_not_forced(backend: str) -> None:
    """Position 63 closes block 15 and selects block 3 alone: its own token is not attended."""
    step = make_step(StepCase("closes", ((63, 1),), topk_blocks=1), seed=66)
    one = torch.ones(1, dtype=torch.int32)
    selection = Selection(3 * one[:, None], one, None, 16 * one, 0 * one, 3)
    out, lse = attend(step.q, step.cache, selection, step.plan, return_lse=True, backend=backend)
    wanted, wanted_lse = oracles.attend_row(step.q[0], step.requests[0].k, step.requests[0].v, [12, 13, 14, 15])
    torch.testing.assert_close(out[0].double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[0].double(), wanted_lse, rtol=1e-5, atol=1e-6)


def test_fault_40_a_rotation_of_queries_and_keys_changes_nothing(backend: str, choose: Any) -> None:
    for dtype in (torch.float64, torch.float32):
        step = make_step(StepCase("rotated", ((60, 20), (90, 1), (40, 4)), head_dim=32, dtype=dtype), seed=40)
        generator = torch.Generator().manual_seed(40)
        rotation = torch.linalg.qr(torch.randn(32, 32, generator=generator, dtype=torch.float64)).Q
        cache = dataclasses.replace(step.cache, k_pages=(step.cache.k_pages.double() @ rotation).to(dtype))
        q = (step.q.double() @ rotation).to(dtype)
        selection = choose(step)
        plain = attend(step.q, step.cache, selection, step.plan, return_lse=True, backend=backend)
        turned = attend(q, cache, selection, step.plan, return_lse=True, backend=backend)
        exact_out, exact_lse = oracles_of(step, selection)
        # the rotated inputs are rounded once more: as far from float64 as an fp32 result may be, a few times over
        for got, wanted, exact in zip(turned, plain, (exact_out, exact_lse), strict=True):
            size = float(exact[torch.isfinite(exact)].abs().max())
            assert_within_budget(got, wanted + 8 * torch.finfo(dtype).eps * size, exact, str(dtype))


def oracles_of(step: Any, selection: Any) -> tuple[torch.Tensor, torch.Tensor]:
    counts = selection.block_counts.tolist()
    return oracles.step_attention(
        step, [ids[:count] for ids, count in zip(selection.block_ids.tolist(), counts, strict=True)], gated=False
    )
