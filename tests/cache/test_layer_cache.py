"""`LayerCache`: which tensors go together."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashqsa.cache import LayerCache
from flashqsa.errors import ArgumentError, DeviceError, DTypeError, FlashQSAError, ShapeError
from flashqsa.testing import StepCase, make_step

FP8 = torch.float8_e4m3fn


def tensors(**overrides: Any) -> dict[str, Any]:
    return {
        "k_pages": torch.zeros(8, 16, 2, 32),
        "v_pages": torch.zeros(8, 16, 2, 32),
        "block_keys": torch.zeros(8, 4, 24),
        "ring": torch.zeros(3, 8, 24),
        "ring_positions": torch.zeros(3, 8, 3, dtype=torch.int64),
    } | overrides


@pytest.mark.parametrize("layout", ["split", "packed", "hnd", "dense"])
@pytest.mark.parametrize("contiguous", [False, True])
def test_layer_cache_takes_views_of_any_pool(layout: Any, contiguous: bool) -> None:
    step = make_step(StepCase("views", ((5, 3), (20, 1)), layout=layout, contiguous=contiguous), seed=1)
    assert step.cache.device.type == "cpu"
    assert (step.cache.kv_heads, step.cache.head_dim) == (2, 16)
    step.plan.check_cache("attend", step.cache)


def test_layer_cache_serves_attention_alone() -> None:
    cache = LayerCache(**tensors(block_keys=None, ring=None, ring_positions=None))
    assert cache.kv_heads == 2


@pytest.mark.parametrize("scale", [0.37, torch.tensor([0.37])], ids=["float", "tensor"])
def test_layer_cache_takes_scales_of_either_kind(scale: Any) -> None:
    pages = torch.zeros(8, 16, 2, 32, dtype=torch.uint8).view(FP8)
    cache = LayerCache(**tensors(k_pages=pages, v_pages=pages), k_scale=scale, v_scale=scale)
    assert cache.k_scale is scale


REFUSED: dict[str, tuple[dict[str, Any], type[FlashQSAError], tuple[str, ...]]] = {
    "fewer value pages": (
        {"v_pages": torch.zeros(7, 16, 2, 32)},
        ShapeError,
        ("v_pages", "[8, 16, 2, 32]", "[7, 16, 2, 32]"),
    ),
    "other value width": ({"v_pages": torch.zeros(8, 16, 2, 16)}, ShapeError, ("v_pages", "[8, 16, 2, 16]")),
    "other value dtype": (
        {"v_pages": torch.zeros(8, 16, 2, 32).bfloat16()},
        DTypeError,
        ("v_pages", "float32", "bfloat16"),
    ),
    "integer pages": ({"k_pages": torch.zeros(8, 16, 2, 32, dtype=torch.int8)}, DTypeError, ("k_pages", "int8")),
    "pages without heads": ({"k_pages": torch.zeros(8, 16, 32)}, ShapeError, ("k_pages", "[P, page_tokens, Hkv, D]")),
    "values elsewhere": ({"v_pages": torch.zeros(8, 16, 2, 32, device="meta")}, DeviceError, ("v_pages", "meta")),
    "dimensions last": (
        {"k_pages": torch.zeros(8, 16, 32, 2).transpose(2, 3)},
        ShapeError,
        ("k_pages", "contiguous in its last"),
    ),
    "ring of another width": (
        {"ring": torch.zeros(3, 8, 32)},
        ShapeError,
        ("ring", "[rings, ring_tokens, 24]", "[3, 8, 32]"),
    ),
    "ring alone": ({"ring_positions": None}, ArgumentError, ("ring and ring_positions",)),
    "positions alone": ({"ring": None}, ArgumentError, ("ring and ring_positions",)),
    "float8 ring": (
        {"ring": torch.zeros(3, 8, 24, dtype=torch.uint8).view(FP8)},
        DTypeError,
        ("ring", "float8_e4m3fn"),
    ),
    "positions of one axis": (
        {"ring_positions": torch.zeros(3, 8, 1, dtype=torch.int64)},
        ShapeError,
        ("ring_positions", "[3, 8, 1]"),
    ),
    "positions of int32": (
        {"ring_positions": torch.zeros(3, 8, 3, dtype=torch.int32)},
        DTypeError,
        ("ring_positions", "int64", "int32"),
    ),
    "fewer ring positions": (
        {"ring_positions": torch.zeros(3, 4, 3, dtype=torch.int64)},
        ShapeError,
        ("ring_positions", "[3, 8, 3]", "[3, 4, 3]"),
    ),
    "scale a head": ({"k_scale": torch.ones(2)}, ShapeError, ("k_scale", "[2]", "per tensor")),
    "scale of float64": ({"v_scale": torch.ones(1).double()}, DTypeError, ("v_scale", "float32", "float64")),
    **{
        f"scale of {value!r}": (
            {"k_scale": value},
            ArgumentError,
            ("k_scale must be a finite number above 0", repr(value)),
        )
        for value in (0.0, -1.0, float("nan"), float("inf"), True, "1.0")
    },
    "layer of 1.0": ({"layer_id": 1.0}, ArgumentError, ("layer_id must be a whole number", "1.0")),
    "pages missing": ({"k_pages": None}, DTypeError, ("k_pages must be a torch.Tensor", "NoneType")),
    "scale elsewhere": ({"v_scale": torch.ones(1, device="meta")}, DeviceError, ("v_scale", "meta")),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_layer_cache_refuses(refuses, reason: str) -> None:
    overrides, error, parts = REFUSED[reason]
    with refuses(error, "LayerCache", *parts):
        LayerCache(**tensors(**overrides))


def test_layer_cache_fault_24_refuses_index_keys_of_another_length(refuses) -> None:
    """8 pages of K/V, 4 pages of block keys."""
    with refuses(ShapeError, "LayerCache", "block_keys", "[8, page_blocks, Di]", "[4, 4, 24]", "as many pages"):
        LayerCache(**tensors(block_keys=torch.zeros(4, 4, 24)))
