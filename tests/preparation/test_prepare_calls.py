"""The parts of preparation one by one, and how many operations a step takes."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashqsa.cache import LayerCache
from flashqsa.plan import StepPlan, plan_step
from flashqsa.preparation import NormWeights, prepare
from flashqsa.preparation.plain import cast_saturating, mean_of_blocks, pool_block_keys, rms_norm, rotate
from flashqsa.preparation.reference import (
    cast_reference,
    pool_block_reference,
    rms_norm_reference,
    rotate_reference,
)
from flashqsa.rope import RopeTable
from flashqsa.testing import assert_bitwise_equal, assert_ulp_close, oracles, randn, stream

E4M3 = torch.float8_e4m3fn
MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Operations(TorchDispatchMode):
    """Counts tensor operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def prompts(lens: list[int]) -> tuple[StepPlan, Callable[[int], Callable[[], None]]]:
    """The plan of whole prompts, and what prepares a layer of their step, by the layer's seed."""
    rows, pages = sum(lens), [-(-n // 64) for n in lens]
    table = torch.randperm(sum(pages), generator=stream(70)).to(torch.int32)
    rows_of_table = torch.full((len(lens), max(pages)), -1, dtype=torch.int32)
    for request, (each, count) in enumerate(zip(table.split(pages), pages, strict=True)):
        rows_of_table[request, :count] = each
    plan = plan_step(
        torch.tensor([0, *lens]).cumsum(0).to(torch.int32), torch.tensor(lens, dtype=torch.int32), rows_of_table,
        page_tokens=64, block_tokens=4, topk_blocks=8, max_query_len=max(lens), max_seq_len=max(lens),
        ring_ids=torch.arange(len(lens), dtype=torch.int32), ring_tokens=4,
    )  # fmt: skip
    positions = torch.cat([torch.arange(n) for n in lens])
    rope = RopeTable.build({"rope_theta": 1e4}, rotary_dim=4, num_positions=max(lens))

    def layer(seed: int) -> Callable[[], None]:
        generator = stream(71, seed)
        kv = [torch.zeros(sum(pages), 64, 1, 8) for _ in range(2)]
        ring = torch.zeros(len(lens), 4, 8), torch.zeros(len(lens), 4, 3, dtype=torch.int64)
        cache = LayerCache(*kv, torch.zeros(sum(pages), 16, 8), *ring)
        inputs = [randn(generator, torch.float32, rows, heads, dim) for heads, dim in ((2, 16), (1, 8), (1, 8), (2, 8))]
        norms = NormWeights(*(torch.zeros(8) for _ in range(4)))

        def work() -> None:
            prepare(*inputs, positions, rope, norms, cache, plan, backend="torch")
            closed = plan.closed_block_slot_ids >= 0
            assert int((cache.block_keys != 0).any(-1).sum()) == int(closed.sum()) == sum(n // 4 for n in lens)

        return work

    return plan, layer


def operations(work: Callable[[], None]) -> collections.Counter[str]:
    with Operations() as counter:
        work()
    return counter.counts


def test_fault_50_pooling_32768_tokens_takes_as_many_operations_as_pooling_64() -> None:
    few, many = (operations(prompts([tokens])[1](0)) for tokens in (64, 32_768))
    assert many == few
    assert many.total() < 400


def test_fault_50_many_requests_take_as_many_operations_as_one() -> None:
    one, many = (operations(prompts(lens)[1](0)) for lens in ([64], [64] * 40))
    assert many == one


def test_fault_50_the_second_layer_builds_nothing_of_the_plan_anew() -> None:
    plan, layer = prompts([64, 13])
    layer(0)()
    groups, ends = plan.row_groups(), plan.end_slots()
    tensors = {name: id(value) for name, value in vars(plan).items()}
    layer(1)()
    assert plan.row_groups() is groups
    assert plan.end_slots() is ends
    assert {name: id(value) for name, value in vars(plan).items()} == tensors


def values(dtype: torch.dtype, *shape: int, seed: int) -> torch.Tensor:
    return randn(stream(72, seed), dtype, *shape)


@pytest.mark.parametrize("dtype", MODEL_DTYPES, ids=str)
def test_rms_norm_is_the_gemma_form(dtype: torch.dtype) -> None:
    """x / rms * (1 + weight) in fp32, rounded once; also of tiny and huge rows."""
    x, weight = values(dtype, 300, 128, seed=0), values(dtype, 128, seed=1)
    x[0], x[1], x[2] = 0, x[1] * 1e-4, x[2] * 1e3
    normed = rms_norm(x, weight, 1e-6)
    exact = oracles.rms_norm(x, weight, 1e-6)
    by_row = torch.stack([rms_norm_reference(row, weight, 1e-6) for row in x])
    if dtype == torch.float32:
        torch.testing.assert_close(normed.double(), exact, rtol=1e-6, atol=0)
        torch.testing.assert_close(normed, by_row, rtol=4e-7, atol=0)
    else:
        assert_ulp_close(normed, exact.to(dtype), share=1e-3)
        assert_ulp_close(normed, by_row)
    assert not bool(normed[0].any()), "a row of zeros stays zeros"


@pytest.mark.parametrize("dtype", MODEL_DTYPES, ids=str)
def test_rotate_pairs_each_dimension_with_the_one_half_the_rotary_ones_away(dtype: torch.dtype) -> None:
    x = values(dtype, 40, 3, 20, seed=2)
    angles = torch.rand(40, 6, generator=stream(73)) * 6
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    rotated = rotate(x, table[:, :6], table[:, 6:])
    exact = oracles.rotate(x, torch.arange(40).expand(3, -1), table, None)
    torch.testing.assert_close(rotated.double(), exact, rtol=0, atol=1e-6)
    assert_bitwise_equal(rotated[..., 12:], x[..., 12:].float(), "dimensions past the rotary ones")
    for row, head in ((0, 0), (39, 2)):
        assert_bitwise_equal(rotated[row, head], rotate_reference(x[row, head], table[row, :6], table[row, 6:]))


@pytest.mark.parametrize("dtype", MODEL_DTYPES, ids=str)
def test_fault_41_block_keys_of_4096_tokens_are_the_same_bytes_as_one_by_one(dtype: torch.dtype) -> None:
    raw, weight = values(dtype, 1_024, 4, 64, seed=3), values(dtype, 64, seed=4)
    angles = torch.rand(1_024, 4, generator=stream(74)) * 6
    pooled = pool_block_keys(raw, weight, 1e-6, angles.cos(), angles.sin())
    by_block = torch.stack(
        [pool_block_reference(raw[g], weight, 1e-6, angles[g].cos(), angles[g].sin()) for g in range(1_024)]
    )
    if dtype == torch.float32:
        torch.testing.assert_close(pooled, by_block, rtol=4e-7, atol=4e-7)
    else:
        assert_bitwise_equal(pooled.to(dtype), by_block.to(dtype))


@pytest.mark.parametrize("block_tokens", [1, 2, 3, 4, 8])
def test_mean_of_blocks_is_summed_in_fp32_and_rounded_once(block_tokens: int) -> None:
    """1 + 2^-7 and its kin: added in bf16, the small parts would be lost."""
    raw = 1 + torch.randint(2, (50, block_tokens, 16), generator=stream(75)) * 2.0**-7
    means = mean_of_blocks(raw.bfloat16())
    assert_bitwise_equal(means, raw.double().mean(1).float().bfloat16())


@pytest.mark.parametrize("cast", [cast_saturating, cast_reference], ids=["torch", "reference"])
def test_casts_to_float8_saturate_and_keep_nan(cast: Any) -> None:
    x = torch.tensor([0.0, 447.0, 464.0, 465.0, 1e9, -1e9, torch.inf, -torch.inf, torch.nan, 2.0**-10, -(2.0**-11)])
    stored = cast(x, E4M3).float()
    assert stored[:8].tolist() == [0, 448, 448, 448, 448, -448, 448, -448]
    assert bool(stored[8].isnan())
    assert stored[9:].tolist() == [0.0, 0.0], "half of the smallest subnormal number rounds to even, which is zero"
    assert cast(torch.tensor([3.7]), E4M3, 0.37).float().tolist() == [10.0]
    assert cast(torch.tensor([1e6]), torch.bfloat16).tolist() == [999424.0], "other dtypes do not saturate"
