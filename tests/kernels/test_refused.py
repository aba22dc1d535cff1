"""What kernels do not serve is refused by name with the reason, and served by torch under auto."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

from flashqsa.attention import attend, attend_tokens
from flashqsa.errors import UnsupportedError
from flashqsa.selection import select_blocks
from flashqsa.testing import StepCase, assert_bitwise_equal, make_step


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("index_q has 17 heads, more than 16", {"index_heads": 17}),
        ("index_head_dim is 264, above 256", {"index_head_dim": 264}),
        ("topk_blocks is 4097, above 4096", {"topk_blocks": 4097}),
        ("index_q or block_keys are float64", {"dtype": torch.float64}),
        ("index_q or block_keys are float64", {"index_dtype": torch.float64}),
    ],
    ids=str,
)
def test_select_blocks_names_the_reason(
    reason: str, options: dict[str, Any], device: torch.device, refuses: Any
) -> None:
    step = make_step(StepCase("refused", ((60, 1),), **options), seed=61, device=device)
    with refuses(UnsupportedError, "select_blocks", "'triton'", reason):
        select_blocks(step.index_q, step.cache, step.plan, backend="triton")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*backend 'torch' serves")
        select_blocks(step.index_q, step.cache, step.plan)


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("q is float64", {"dtype": torch.float64}),
        ("k_pages is float64", {"kv_dtype": torch.float64}),
        ("head_dim is 264, above 256", {"head_dim": 264}),
        ("65 query heads share a KV head, more than 64", {"q_heads": 65, "kv_heads": 1}),
        ("over torch.float32 caches", {"dtype": torch.float16, "kv_dtype": torch.float32}),
    ],
    ids=str,
)
def test_attend_names_the_reason(
    reason: str, options: dict[str, Any], device: torch.device, choose: Any, refuses: Any
) -> None:
    step = make_step(StepCase("refused", ((60, 1),), **options), seed=62, device=device)
    selection = choose(step)
    with refuses(UnsupportedError, "attend", "'triton'", reason):
        attend(step.q, step.cache, selection, step.plan, backend="triton")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*backend 'torch' serves")
        attend(step.q, step.cache, selection, step.plan)


@pytest.mark.parametrize("name", ["q", "gate", "k_pages", "v_pages"])
def test_gradients_are_refused(name: str, device: torch.device, choose: Any, refuses: Any) -> None:
    step = make_step(StepCase("gradients", ((60, 1),)), seed=63, device=device)
    selection, gate = choose(step), step.gate.clone()
    wanted = attend(step.q, step.cache, selection, step.plan, gate=gate, backend="triton")
    q, cache = step.q.clone(), step.cache
    if name in ("q", "gate"):
        (q if name == "q" else gate).requires_grad_()
    else:
        pages = getattr(cache, name).clone().requires_grad_()
        cache = dataclasses.replace(cache, **{name: pages})
    with refuses(UnsupportedError, "attend", "the kernels have no backward"):
        attend(q, cache, selection, step.plan, gate=gate, backend="triton")
    with refuses(UnsupportedError, "attend", "the kernels have no backward"):
        ids = torch.zeros(1, 2, dtype=torch.int32, device=device)
        attend_tokens(q, cache, ids, step.plan, gate=gate, backend="triton")
    with torch.no_grad():
        got = attend(q, cache, selection, step.plan, gate=gate, backend="triton")
    assert_bitwise_equal(got, wanted, "without gradients")


def test_auto_takes_torch_on_the_cpu_and_triton_on_a_gpu(device: torch.device, choose: Any) -> None:
    step = make_step(StepCase("auto", ((300, 1), (0, 40)), dtype=torch.float16), seed=64, device=device)
    taken = "torch" if device.type == "cpu" else "triton"
    selection = choose(step)
    wanted = attend(step.q, step.cache, selection, step.plan, gate=step.gate, backend=taken)
    assert_bitwise_equal(attend(step.q, step.cache, selection, step.plan, gate=step.gate), wanted, "attend")
