"""Rotary angles by demand: the bits of transformers' tables, and no more of them than a forward rotates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashqsa.integrations import hf
from flashqsa.integrations.hf.angles import NeededAngles
from flashqsa.testing import stream

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture
def rotary(make_model: Any, qsa_case: Any) -> Any:
    return make_model(qsa_case).model.rotary_emb


def _positions(tokens: int) -> torch.Tensor:
    """[3, 2, tokens], all three axes different."""
    return torch.randint(0, 5000, (3, 2, tokens), generator=stream(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rope", [{}, YARN], ids=["default", "yarn"])
@pytest.mark.parametrize("tokens", [1, 7, 133])
def test_they_are_the_bits_of_the_tables(
    make_model: Any, qsa_case: Any, dtype: torch.dtype, rope: dict[str, Any], tokens: int
) -> None:
    model = make_model(qsa_case)
    parameters = model.config.rope_parameters | rope
    model = make_model(qsa_case, rope_parameters=parameters, max_position_embeddings=256).to(dtype)
    rotary, x, positions = model.model.rotary_emb, torch.zeros(2, 1, 8, dtype=dtype), _positions(tokens)
    cos, sin = rotary(x, positions)
    half = cos.shape[-1] // 2
    hf.enable(model)
    angles = rotary(x, positions)
    assert isinstance(angles, NeededAngles)
    for table, again in zip((cos, sin), angles, strict=True):
        assert torch.equal(table, again), "it still unpacks to the tables"
    for count in {1, min(3, tokens), tokens}:
        for table, rows in zip((cos, sin), angles.of_rows(count), strict=True):
            assert rows.dtype == dtype
            assert torch.equal(rows, table[:, -count:, :half].flatten(0, 1))
    columns = slice(tokens // 3, tokens, 4)
    for batch_rows in ((0,), (1,), (0, 1)):
        for table, some in zip((cos, sin), angles.of_columns(batch_rows, columns), strict=True):
            assert torch.equal(some, table[list(batch_rows)][:, columns, :half])


def test_one_axis_stands_for_three(rotary: Any) -> None:
    x, positions = torch.zeros(1), torch.arange(9)[None, None]
    expected = rotary(x, positions.expand(3, 2, -1))
    with hf.enabled():
        cos, sin = rotary(x, positions.expand(1, 2, -1))
    assert torch.equal(cos, expected[0])
    assert torch.equal(sin, expected[1])


def test_they_are_computed_once_and_copied_once_to_a_device(rotary: Any) -> None:
    calls: list[torch.Size] = []

    def tables(like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(positions.shape)
        return rotary(like, positions)

    angles = NeededAngles(tables, torch.zeros(0), _positions(20))
    assert angles.to("cpu") is angles
    away = angles.to("meta")
    for layer in (angles, away, angles.to("meta"), angles):
        layer.of_rows(2)
        layer.of_columns((1,), slice(0, 16, 4))
    assert calls == [(3, 2, 2), (3, 1, 4)]
    assert away.of_rows(2)[0] is angles.to("meta").of_rows(2)[0]
    assert away.of_columns((1,), slice(0, 16, 4))[1].device.type == "meta"


class _Made(TorchDispatchMode):
    """Elements of cosines, and bytes of whatever else an operation newly made."""

    def __init__(self) -> None:
        super().__init__()
        self.cosines, self.made = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves
        known = {x.untyped_storage().data_ptr() for x in leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in leaves(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
                self.cosines += x.numel() * (func is torch.ops.aten.cos.default)
                self.made += x.untyped_storage().nbytes()
        return out


@contextmanager
def _aside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Selection scores every block, which is its work: left out of what is counted."""
    select_blocks = hf.forward.select_blocks

    def uncounted(*args: Any, **kwargs: Any) -> Any:
        with torch.utils._python_dispatch._disable_current_modes():
            return select_blocks(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(hf.forward, "select_blocks", uncounted)
        yield


@torch.no_grad()
@pytest.mark.parametrize("pad", [0, 3])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_a_decode_step_makes_nothing_that_grows_but_the_caches(
    make_model: Any, qsa_case: Any, make_tokens: Any, monkeypatch: pytest.MonkeyPatch, static: bool, pad: int
) -> None:
    """Four steps, in which each sequence closes one block."""
    from transformers import DynamicCache, StaticCache

    model, batch, longest = make_model(qsa_case), 2, 2200

    def decode(context: int) -> _Made:
        prompt = make_tokens(batch, context + 4)
        mask = torch.ones_like(prompt)
        mask[0, :pad] = 0
        cache = StaticCache(model.config, max_cache_len=longest) if static else DynamicCache(config=model.config)
        model(prompt[:, :context], attention_mask=mask[:, :context], cache=cache, logits_to_keep=1)
        with _aside(monkeypatch), _Made() as made:
            for end in range(context + 1, context + 5):
                model(prompt[:, end - 1 : end], attention_mask=mask[:, :end], cache=cache)
        return made

    layers = 2
    with hf.enabled(model):
        short, long = decode(600), decode(2000)
    with _Made() as one:
        model.model.rotary_emb(torch.zeros(1), torch.zeros(3, 1, 1, dtype=torch.long))
    needed = one.cosines * batch * (4 + 1)  # a row in each of four steps, a block's first token in one
    assert short.cosines == long.cosines == needed
    keys, heads, dim, index_dim, number = 0 if static else layers, 2, 32, 32, 4
    per_token = keys * number * (2 * heads * dim + index_dim) + 3 * 8  # K, V, raw index keys; positions of three axes
    allowed = 4 * batch * 1400 * (per_token + 3)  # three bytes a token to look at the mask
    assert long.made - short.made <= allowed
    with _Made() as stock:
        model.model.rotary_emb(torch.zeros(1), torch.zeros(3, batch, 2000, dtype=torch.long))
    assert stock.cosines > 100 * needed
