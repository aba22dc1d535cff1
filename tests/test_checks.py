from __future__ import annotations

import pytest
import torch

from flashqsa.checks import FP8, expect, values_are_checked
from flashqsa.errors import DeviceError, DTypeError, FlashQSAError, ShapeError, UnsupportedError


def test_expect_binds_new_dimensions_and_keeps_known_ones() -> None:
    dims = {"Hq": 6}
    expect("attend", "q", torch.zeros(5, 6, 16), "T Hq D", dims)
    assert dims == {"Hq": 6, "T": 5, "D": 16}
    expect("attend", "gate", torch.zeros(5, 6, 16)[:, ::2][:, :6], "T 3 D", dims)


def test_expect_names_argument_dimensions_value_and_remedy(refuses) -> None:
    dims = {"T": 8, "Hq": 24, "D": 256}
    gate = torch.zeros(8, 12, 256)
    with refuses(ShapeError, "attend", "gate must be [T, Hq, D] = [8, 24, 256]", "[8, 12, 256]", "gate half of q_proj"):
        expect("attend", "gate", gate, "T Hq D", dims, hint="Pass the gate half of q_proj.")


def test_expect_refuses_another_rank_and_shows_unknown_dimensions_by_name(refuses) -> None:
    with refuses(ShapeError, "attend", "q must be [T, Hq, D] = [T, 6, D]", "got [4, 6]"):
        expect("attend", "q", torch.zeros(4, 6), "T Hq D", {"Hq": 6})


def test_expect_leaves_dimensions_alone_when_it_refuses(refuses) -> None:
    dims = {"D": 8}
    with refuses(ShapeError, "attend", "q"):
        expect("attend", "q", torch.zeros(4, 6, 7), "T Hq D", dims)
    assert dims == {"D": 8}


def test_expect_refuses_one_name_for_two_sizes(refuses) -> None:
    dims: dict[str, int] = {}
    expect("plan_step", "seq_lens", torch.zeros(3), "R", dims)
    with refuses(ShapeError, "plan_step", "ring_ids must be [R] = [3]", "got [4]"):
        expect("plan_step", "ring_ids", torch.zeros(4), "R", dims)


@pytest.mark.parametrize(
    ("tensor", "accepted"),
    [
        (torch.zeros(4, 8)[:, :5], True),
        (torch.zeros(8, 4)[::2], True),
        (torch.zeros(1, 8).expand(4, 8), True),
        (torch.zeros(8, 4).t(), False),
        (torch.zeros(4, 16)[:, ::2], False),
        (torch.zeros(4, 16)[:, ::16], True),  # one element: its stride is never used
        (torch.zeros(4, 0), True),
    ],
)
def test_expect_asks_for_a_contiguous_last_dimension_only(refuses, tensor: torch.Tensor, accepted: bool) -> None:
    if accepted:
        expect("attend", "q", tensor, "T D", {})
        return
    with refuses(ShapeError, "attend", "q must be contiguous in its last dimension", str(list(tensor.stride()))):
        expect("attend", "q", tensor, "T D", {})


def test_expect_names_allowed_dtypes(refuses) -> None:
    with refuses(DTypeError, "plan_step", "seq_lens must be one of int32", "got int64", "Convert seq_lens."):
        expect("plan_step", "seq_lens", torch.zeros(3, dtype=torch.int64), "R", {}, dtypes=(torch.int32,))
    expect("prepare", "k_pages", torch.zeros(2, dtype=torch.uint8).view(FP8), "D", {}, dtypes=(torch.float32, FP8))


def test_expect_refuses_what_is_no_tensor(refuses) -> None:
    with refuses(DTypeError, "plan_step", "seq_lens must be a torch.Tensor [R]", "got list"):
        expect("plan_step", "seq_lens", [1, 2], "R", {})  # type: ignore[arg-type]


def test_expect_names_both_devices(refuses) -> None:
    with refuses(DeviceError, "attend", "q must be on cpu", "got meta", "Move q."):
        expect("attend", "q", torch.zeros(2, device="meta"), "T", {}, device=torch.device("cpu"))


def test_values_are_read_on_the_cpu_and_elsewhere_only_in_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHQSA_DEBUG", raising=False)
    assert values_are_checked(torch.device("cpu"))
    assert not values_are_checked(torch.device("cuda"))
    monkeypatch.setenv("FLASHQSA_DEBUG", "1")
    assert values_are_checked(torch.device("cuda"))


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (ShapeError, ValueError),
        (DTypeError, TypeError),
        (DeviceError, ValueError),
        (UnsupportedError, NotImplementedError),
    ],
)
def test_errors_are_caught_by_the_base_and_by_the_fitting_builtin(error: type, builtin: type) -> None:
    assert issubclass(error, FlashQSAError)
    assert issubclass(error, builtin)
