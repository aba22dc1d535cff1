"""Where no kernel runs: the CPU without the interpreter. An explicit backend never falls back, auto takes torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from flashqsa.attention import attend
from flashqsa.backends import explain
from flashqsa.errors import UnsupportedError
from flashqsa.selection import select_blocks
from flashqsa.testing import StepCase, assert_bitwise_equal, make_step


def test_the_cpu_is_refused_by_name_and_served_by_torch(refuses: Callable[..., AbstractContextManager[None]]) -> None:
    step = make_step(StepCase("cpu", ((60, 1), (0, 9))), seed=60)
    selection = select_blocks(step.index_q, step.cache, step.plan)
    plain = select_blocks(step.index_q, step.cache, step.plan, backend="torch")
    assert_bitwise_equal(selection.block_ids, plain.block_ids, "auto takes torch")
    with refuses(UnsupportedError, "select_blocks", "kernels run on CUDA devices"):
        select_blocks(step.index_q, step.cache, step.plan, backend="triton")
    with refuses(UnsupportedError, "attend", "kernels run on CUDA devices"):
        attend(step.q, step.cache, selection, step.plan, backend="triton")
    assert explain("cpu")["attend"]["triton"] == "refused: kernels run on CUDA devices"
    assert explain("cpu")["attend"]["torch"].startswith("taken")
