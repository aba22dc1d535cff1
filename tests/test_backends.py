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
def test_auto_takes_kernels_on_a_gpu_and_says_once_why_not() -> None:
    assert backends.resolve_backend("prepare", "auto", CUDA, None) == "triton"
    with pytest.warns(UserWarning, match="prepare: backend 'torch' serves cuda tensors: no float64"):
        assert backends.resolve_backend("prepare", "auto", CUDA, "no float64") == "torch"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert backends.resolve_backend("prepare", "auto", CUDA, "no float64") == "torch"
    assert backends.takes_kernels(CUDA)
    assert not backends.takes_kernels(torch.device("cpu"))


@pytest.mark.usefixtures("_kernels_serve")
def test_explain_tells_what_auto_takes() -> None:
    lines = backends.explain("cuda")
    assert lines["attend"]["triton"] == "taken"
    assert lines["prepare"] == lines["attend"]
    assert backends.explain("cpu")["attend"]["triton"] == "refused by auto: interpreted"


def test_unknown_names_and_refusals_are_told(refuses: Callable[..., AbstractContextManager[None]]) -> None:
    with refuses(ArgumentError, "attend", "backend must be one of auto, reference, torch, triton", "'cutlass'"):
        backends.resolve_backend("attend", "cutlass", CUDA, None)
    with refuses(UnsupportedError, "attend", "'triton', which refuses it: no reason"):
        backends.resolve_backend("attend", "triton", CUDA, "no reason")
