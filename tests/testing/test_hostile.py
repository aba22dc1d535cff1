"""The test kit notices what it is there to notice."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from flashqsa.testing import (
    Guarded,
    assert_unchanged,
    guarded,
    guarded_like,
    poison,
    poison_slots,
    snapshot,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float64, torch.int32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_guarded_is_intact_until_a_byte_beside_the_view_changes(dtype: torch.dtype) -> None:
    guard = guarded((3, 4, 8), dtype, padding=(1, 2, 3))
    assert guard.view.shape == (3, 4, 8)
    assert not guard.view.is_contiguous()
    poison(guard.view)
    guard.assert_intact()
    inside = torch.zeros_like(guard.base, dtype=torch.bool)
    size, view = dtype.itemsize, guard.view
    inside.as_strided([*view.shape, size], [*(size * s for s in view.stride()), 1], view.storage_offset() * size).fill_(
        True
    )
    assert int(inside.sum()) == view.nbytes
    for place in (~inside).nonzero().flatten().tolist()[:: 1 + guard.base.numel() // 97]:
        before = int(guard.base[place])
        guard.base[place] = before ^ 1
        with pytest.raises(AssertionError, match="canary bytes were overwritten"):
            guard.assert_intact()
        guard.base[place] = before
    guard.assert_intact()


@pytest.mark.parametrize("dtype", [d for d in DTYPES if d.is_floating_point], ids=str)
def test_canaries_are_nan_so_that_reading_them_shows(dtype: torch.dtype) -> None:
    guard = Guarded(64, 0xFF)
    assert bool(guard.inner.view(dtype).float().isnan().all())
    assert bool(poison(torch.zeros(4, dtype=torch.uint8).view(torch.float8_e4m3fn)).float().isnan().all())


def test_guarded_catches_a_write_past_the_end_of_the_last_row() -> None:
    guard = guarded((2, 4), torch.float32)
    beyond = torch.as_strided(guard.view, (2, 5), guard.view.stride(), guard.view.storage_offset())
    beyond[1, 4] = 0.0
    with pytest.raises(AssertionError, match="4 canary bytes"):
        guard.assert_intact()


def test_guarded_like_copies() -> None:
    x = torch.arange(12.0).view(3, 4)
    guard = guarded_like(x, padding=(0, 2))
    assert torch.equal(guard.view, x)
    guard.view.fill_(0.0)
    assert float(x.sum()) == 66.0


@dataclass(frozen=True)
class Holder:
    pages: torch.Tensor
    scale: torch.Tensor | None
    name: str = "x"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_assert_unchanged_compares_bytes_of_everything_held(dtype: torch.dtype) -> None:
    pages = poison(torch.zeros(4, 8, 3).to(dtype)[:, :5])
    before = snapshot([Holder(pages, torch.ones(1))], {"counts": torch.zeros(2)})
    assert set(before.tensors) == {"[0][0].pages", "[0][0].scale", "[1].counts"}
    assert_unchanged(before)
    before.tensors["[1].counts"][1] = -0.0
    with pytest.raises(AssertionError, match=r"\[1\]\.counts: 1 elements changed, the first at \[1\]"):
        assert_unchanged(before)
    before.tensors["[1].counts"][1] = 0.0
    assert_unchanged(before)
    pages.view(torch.uint8)[2, 1, 0] ^= 1
    with pytest.raises(AssertionError, match=r"pages: 1 elements changed, the first at \[2, 1, 0\]"):
        assert_unchanged(before)


def test_assert_unchanged_allows_the_slots_named() -> None:
    holder = Holder(torch.zeros(4, 8, 3), None)
    before = snapshot(holder)
    holder.pages[1, 2] = 5.0
    holder.pages[3, 7] = 5.0
    assert_unchanged(before, written={"pages": torch.tensor([10, -1, 31])})
    with pytest.raises(AssertionError, match=r"pages: 3 elements changed, the first at \[3, 7, 0\]"):
        assert_unchanged(before, written={"pages": torch.tensor([10, -1])})
    with pytest.raises(AssertionError, match="lacks"):
        assert_unchanged(before, written={"page": torch.tensor([10])})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_poison_slots_reaches_the_slots_named_only(dtype: torch.dtype) -> None:
    pages = torch.zeros(3, 4, 2).to(dtype)
    poison_slots(pages, torch.tensor([2, 11]))
    assert pages.float().isnan().view(12, 2).all(dim=1).nonzero().flatten().tolist() == [2, 11]


def test_the_kit_needs_torch_alone() -> None:
    program = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"triton", "transformers", "vllm", "matplotlib", "pytest", "hypothesis", "numpy"}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Refuse())
import warnings
warnings.simplefilter("ignore")
from flashqsa.testing import StepCase, make_step, tiny_config
make_step(StepCase("alone", ((3, 2),)), seed=0)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
