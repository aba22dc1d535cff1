"""Options of `attend`: gate, lse, scale, output buffer and dtype, processes with lower precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flashqsa.attention import attend
from flashqsa.testing import StepCase, assert_bitwise_equal, assert_within_budget, guarded, make_step, poison

Check = Callable[..., tuple[torch.Tensor, torch.Tensor]]
REQUESTS = ((0, 40), (90, 1), (61, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_output_is_rounded_before_the_gate_and_gated_in_fp32(dtype: torch.dtype, backend: str, choose: Any) -> None:
    step = make_step(StepCase("gate", REQUESTS, dtype=dtype), seed=1)
    selection = choose(step)
    options: dict[str, Any] = {"backend": backend, "out_dtype": torch.float32}
    ungated = attend(step.q, step.cache, selection, step.plan, **options)
    gated = attend(step.q, step.cache, selection, step.plan, gate=step.gate, **options)
    product = ungated.to(dtype).double() * torch.sigmoid(step.gate.double())
    unrounded = ungated.double() * torch.sigmoid(step.gate.double())
    assert float((gated.double() - product).abs().max()) < 1e-6
    assert float((gated.double() - unrounded).abs().max()) > 1e-5, "the output was not rounded before the gate"
    rounded_once = attend(step.q, step.cache, selection, step.plan, gate=step.gate, backend=backend)
    assert_bitwise_equal(rounded_once, gated.to(dtype), "one rounding after the gate")


def test_gates_of_another_dtype_and_of_any_size(backend: str, choose: Any) -> None:
    step = make_step(StepCase("gate", REQUESTS, dtype=torch.float32), seed=2)
    selection = choose(step)
    ungated = attend(step.q, step.cache, selection, step.plan, backend=backend)
    for dtype in (torch.bfloat16, torch.float64):
        gate = (20 * step.gate).to(dtype)
        got = attend(step.q, step.cache, selection, step.plan, gate=gate, backend=backend)
        torch.testing.assert_close(got, ungated * torch.sigmoid(gate.double()).float(), rtol=1e-6, atol=1e-7)
    for logit, factor in ((0.0, 0.5), (1e4, 1.0), (-1e4, 0.0), (float("inf"), 1.0), (-float("inf"), 0.0)):
        gate = torch.full_like(step.gate, logit)
        got = attend(step.q, step.cache, selection, step.plan, gate=gate, backend=backend)
        assert_bitwise_equal(got + 0.0, ungated * factor + 0.0, f"gate {logit}")


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.037, 1e-3, 0.0])
def test_softmax_scale(scale: float, backend: str, choose: Any, check: Check) -> None:
    step = make_step(StepCase("scale", REQUESTS), seed=3)
    selection = choose(step)
    out, lse = check(step, selection, backend, softmax_scale=scale)
    default, _ = check(step, selection, backend)
    if scale == 0.25:  # 16 ** -0.5
        assert_bitwise_equal(out, default, "the default")
    else:
        assert not torch.equal(out, default)
    if scale == 0.0:  # every token alike: lse counts them
        position, visible = step.plan.positions, step.plan.visible_blocks
        counts = selection.block_counts * 4 + position + 1 - 4 * visible
        torch.testing.assert_close(lse[:, 0], counts.float().log())


def test_lse_is_the_natural_logarithm_before_any_gate(backend: str, choose: Any, row_lists: Any) -> None:
    step = make_step(StepCase("lse", REQUESTS), seed=4)
    selection = choose(step)
    _, lse = attend(step.q, step.cache, selection, step.plan, return_lse=True, backend=backend)
    _, gated = attend(step.q, step.cache, selection, step.plan, gate=step.gate, return_lse=True, backend=backend)
    assert lse.dtype == torch.float32
    assert_bitwise_equal(gated, lse, "gated")
    tokens = row_lists(step, selection)[40]
    truth = step.requests[1]
    for head in range(6):
        products = [float(truth.k[token, head // 3] @ step.q[40, head].double()) / 4 for token in tokens]
        total = sum(2.718281828459045**product for product in products)
        assert float(lse[40, head].double().exp()) == pytest.approx(total, rel=1e-5)


def test_bf16_lse_is_not_rounded_to_bf16(backend: str, choose: Any) -> None:
    step = make_step(StepCase("lse", REQUESTS, dtype=torch.bfloat16), seed=4)
    _, lse = attend(step.q, step.cache, choose(step), step.plan, return_lse=True, backend=backend)
    assert lse.dtype == torch.float32
    assert not torch.equal(lse, lse.bfloat16().float())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_out_dtype_is_one_cast_of_the_fp32_result(
    dtype: torch.dtype, out_dtype: torch.dtype, backend: str, choose: Any
) -> None:
    step = make_step(StepCase("dtype", REQUESTS, dtype=dtype), seed=5)
    selection = choose(step)
    for gate in (None, step.gate):
        options: dict[str, Any] = {"gate": gate, "backend": backend}
        wide = attend(step.q, step.cache, selection, step.plan, out_dtype=torch.float32, **options)
        got = attend(step.q, step.cache, selection, step.plan, out_dtype=out_dtype, **options)
        assert_bitwise_equal(got, wide.to(out_dtype), f"{out_dtype}")
        buffer = torch.empty(step.q.shape, dtype=out_dtype)
        assert attend(step.q, step.cache, selection, step.plan, out=buffer, **options) is buffer
        assert_bitwise_equal(buffer, got, "a buffer's dtype is what is asked for")


def test_output_buffers_may_have_any_strides_and_content(backend: str, choose: Any) -> None:
    step = make_step(StepCase("buffer", REQUESTS, padding_rows=2, padding_requests=1), seed=6)
    selection = choose(step)
    wanted = attend(step.q, step.cache, selection, step.plan, gate=step.gate, backend=backend)
    target = guarded((6, wanted.shape[0], 16), torch.float32, padding=(1, 2, 8))
    buffer = poison(target.view).transpose(0, 1)  # heads first
    attend(step.q, step.cache, selection, step.plan, gate=step.gate, out=buffer, backend=backend)
    assert_bitwise_equal(buffer, wanted, "strided buffer")
    target.assert_intact()
    over_q, over_gate = step.q.clone(), step.gate.clone()
    attend(over_q, step.cache, selection, step.plan, gate=step.gate, out=over_q, backend=backend)
    attend(step.q, step.cache, selection, step.plan, gate=over_gate, out=over_gate, backend=backend)
    assert_bitwise_equal(over_q, wanted, "written over the queries")
    assert_bitwise_equal(over_gate, wanted, "written over the gate")


@pytest.mark.parametrize("gradients", [False, True], ids=["inference", "training"])
def test_other_precisions_of_the_process_change_nothing(gradients: bool, backend: str, choose: Any) -> None:
    """Autocast and lower matmul precision do not reach the products, and are as before afterwards."""
    step = make_step(StepCase("process", REQUESTS, head_dim=32), seed=7)
    selection = choose(step)

    def run() -> list[torch.Tensor]:
        q = torch.nan_to_num(step.q).detach().clone().requires_grad_(gradients)
        out, lse = attend(q, step.cache, selection, step.plan, gate=step.gate, return_lse=True, backend=backend)
        if gradients:
            (out.sum() + lse.sum()).backward()
        return [out.detach(), lse.detach(), *([q.grad] if gradients else [])]

    wanted = run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for got, expected in zip(run(), wanted, strict=True):
            assert_bitwise_equal(got, expected, "autocast")
        assert torch.is_autocast_enabled("cpu")
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        for got, expected in zip(run(), wanted, strict=True):
            assert_bitwise_equal(got, expected, "medium")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_inference_mode_and_gradients_give_the_same_bits(backend: str, choose: Any) -> None:
    step = make_step(StepCase("modes", REQUESTS, dtype=torch.bfloat16, padding_rows=1), seed=8)
    selection = choose(step)
    wanted = attend(step.q, step.cache, selection, step.plan, gate=step.gate, return_lse=True, backend=backend)
    with torch.inference_mode():
        got = attend(step.q, step.cache, selection, step.plan, gate=step.gate, return_lse=True, backend=backend)
    q, gate = step.q.clone().requires_grad_(), step.gate.clone().requires_grad_()
    trained = attend(q, step.cache, selection, step.plan, gate=gate, return_lse=True, backend=backend)
    for name, result in (("inference", got), ("gradients", trained)):
        assert_bitwise_equal(result[0], wanted[0], name)
        assert_bitwise_equal(result[1], wanted[1], name)


def test_bf16_caches_with_fp32_queries_lose_nothing(backend: str, choose: Any, check: Check) -> None:
    step = make_step(StepCase("mixed", REQUESTS, dtype=torch.float32, kv_dtype=torch.bfloat16), seed=9)
    selection = choose(step)
    out, _ = check(step, selection, backend)
    wide = {name: getattr(step.cache, name).float() for name in ("k_pages", "v_pages")}
    same = attend(
        step.q, dataclasses.replace(step.cache, **wide), selection, step.plan, gate=step.gate, backend=backend
    )
    assert_bitwise_equal(same, out, "the same values in fp32")


def test_float64_queries_are_attended_in_float64(backend: str, choose: Any, exact: Any, row_lists: Any) -> None:
    for kv_dtype in (torch.float64, torch.float32, torch.float8_e4m3fn):
        step = make_step(StepCase("f64", REQUESTS, dtype=torch.float64, kv_dtype=kv_dtype), seed=10)
        selection = choose(step)
        out, lse = attend(step.q, step.cache, selection, step.plan, gate=step.gate, return_lse=True, backend=backend)
        assert out.dtype == lse.dtype == torch.float64
        wanted, wanted_lse = exact(step, row_lists(step, selection))
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-13)
        torch.testing.assert_close(lse, wanted_lse, rtol=0, atol=1e-13)
        assert_within_budget(out, wanted, wanted)
