"""Which backend serves a call, where no kernel can run: devices are stood in for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from flashqsa import backends
from flashqsa.errors import ArgumentError, UnsupportedError

CUDA = torch.device("cuda")


@pytest.fixture
def _kernels_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "triton_refusal", lambda device: None)
    monkeypatch.setattr(backends, "_announced", set())


@pytest.mark.usefixtures("_kernels_serve")
def test_auto_leaves_untried_kernels_to_torch_and_says_so_once() -> None:
    assert {"prepare"} == backends.UNTRIED & set(backends.STAGES)
    with pytest.warns(UserWarning, match="prepare: backend 'torch' serves cuda tensors: its kernel has not run"):
        assert backends.resolve_backend("prepare", "auto", CUDA, None) == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.resolve_backend("prepare", "auto", CUDA, None) == "torch"
    assert backends.resolve_backend("prepare", "triton", CUDA, None) == "triton"
    assert backends.resolve_backend("attend", "auto", CUDA, None) == "triton"
    assert backends.takes_kernel("attend", CUDA)
    assert not backends.takes_kernel("plan_step", CUDA)
    assert not backends.takes_kernel("attend", torch.device("cpu"))


@pytest.mark.usefixtures("_kernels_serve")
def test_explain_tells_what_auto_takes() -> None:
    lines = backends.explain("cuda")
    assert lines["attend"]["triton"] == "taken"
    assert lines["prepare"]["triton"].startswith("refused by auto: its kernel has not run on a GPU")
    assert lines["prepare"]["torch"].startswith("taken")
    assert backends.explain("cpu")["attend"]["triton"] == "refused by auto: interpreted"


def test_unknown_names_and_refusals_are_told(refuses: Callable[..., AbstractContextManager[None]]) -> None:
    with refuses(ArgumentError, "attend", "backend must be one of auto, reference, torch, triton", "'cutlass'"):
        backends.resolve_backend("attend", "cutlass", CUDA, None)
    with refuses(UnsupportedError, "attend", "'triton', which refuses it: no reason"):
        backends.resolve_backend("attend", "triton", CUDA, "no reason")
