"""`QSAAttention` is transformers' layer: same parameters, same selected sets, outputs within the error budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flashqsa import QSAAttention
from flashqsa.errors import ArgumentError
from flashqsa.testing import assert_bitwise_equal, assert_within_budget

pytestmark = pytest.mark.transformers

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = {"default": {}, "linear": {"rope_type": "linear", "factor": 3.0}, "llama3": LLAMA3, "yarn": YARN}
CUTS = {
    "prefill, then decode": [150, *[1] * 30],
    "chunks at odd places": [7, 1, 33, 64, 2, 73],
    "decode from the first token": [1] * 60,
    "windows": [90, 2, 5, 16, 1, 3, 8, 4, 7],
}
"""Rows of each step of a request; the requests run side by side in ragged batches."""


def _serve(
    layer: QSAAttention, rope: Any, engine: Any, rows: Any, sequences: dict[str, Any], one_axis: bool, **options: Any
) -> dict[str, list[tuple[torch.Tensor, Any]]]:
    """(output, selection) of every step of each request."""
    served: dict[str, list[Any]] = {name: [] for name in sequences}
    done = dict.fromkeys(sequences, 0)
    for step in range(max(len(cuts) for cuts in CUTS.values())):
        work = []
        for name, (hidden, positions) in sequences.items():
            if step < len(CUTS[name]):
                new = slice(done[name], done[name] + CUTS[name][step])
                work.append(rows(name, hidden[new], positions[0, new] if one_axis else positions[:, new]))
                done[name] = new.stop
        outputs, selection = engine.step(layer, rope, work, **options)
        parts = torch.arange(selection.block_ids.shape[0]).split([len(out) for out in outputs])
        for piece, out, part in zip(work, outputs, parts, strict=True):
            served[piece.name].append((out, selection.take(part)))
    return served


@pytest.fixture
def assert_serves(make_engine: Any, make_rope: Any, make_sequence: Any, rows: Any, attended_tokens: Any) -> Any:
    """Serves all of CUTS and compares each request with transformers on its whole sequence."""

    @torch.no_grad()
    def check(theirs: Any, *, one_axis: bool = False, **options: Any) -> None:
        config = theirs.config
        layer = QSAAttention(config)
        layer.load_state_dict(theirs.layer.state_dict())
        sequences = {}
        for seed, (name, cuts) in enumerate(CUTS.items()):
            hidden, positions = make_sequence(sum(cuts), seed)
            sequences[name] = (hidden, positions[:1].expand(3, -1) if one_axis else positions)
        engine = make_engine(config, speculative_rows=16)
        served = _serve(layer, make_rope(config), engine, rows, sequences, one_axis, **options)
        for name, (hidden, positions) in sequences.items():
            stock_out, stock_tokens = theirs.run(hidden, positions)
            first, chosen = 0, []
            for out, selection in served[name]:
                chosen.append(attended_tokens(selection, config, first, len(hidden)))
                first += len(out)
            assert torch.equal(torch.cat(chosen), stock_tokens), name
            exact = theirs.exactly(hidden, positions, stock_tokens)
            assert_within_budget(torch.cat([out for out, _ in served[name]]), stock_out, exact, name)
        sparse = stock_tokens.sum(dim=1) < torch.arange(len(stock_tokens)) + 1
        assert int(sparse.sum()) > 20, "most of this compared nothing but dense attention"

    return check


@pytest.mark.parametrize("one_axis", [True, False], ids=["one axis", "three axes"])
@pytest.mark.parametrize("rope", ROPES)
def test_ragged_batches_of_prefill_chunks_decode_and_windows(
    stock: Any, assert_serves: Any, rope: str, one_axis: bool
) -> None:
    assert_serves(stock(rope=ROPES[rope]), one_axis=one_axis)


@pytest.mark.parametrize("rotary", [0.25, 0.5])
@pytest.mark.parametrize("ratio", [2, 8])
def test_partial_rotary_and_other_ratios(stock: Any, assert_serves: Any, rotary: float, ratio: int) -> None:
    rope = {"partial_rotary_factor": rotary, "mrope_section": [4, 2, 2] if rotary == 0.25 else [6, 5, 5]}
    assert_serves(stock(rope=rope, indexer_compress_ratio=ratio, indexer_budget=40))


def test_attention_bias_and_one_kv_head(stock: Any, assert_serves: Any) -> None:
    assert_serves(stock(attention_bias=True, num_key_value_heads=1, num_attention_heads=5, seed=3))


def test_row_exact(stock: Any, assert_serves: Any) -> None:
    assert_serves(stock(), row_exact=True)


def test_backends_agree(stock: Any, assert_serves: Any) -> None:
    assert_serves(stock(), backend="reference")
    with pytest.raises(ArgumentError, match="backend must be one of"):
        assert_serves(stock(), backend="cuda")


@pytest.mark.parametrize("bias", [False, True])
def test_parameters_are_those_of_the_checkpoint(stock: Any, bias: bool) -> None:
    theirs = stock(attention_bias=bias)
    layer = QSAAttention(theirs.config)
    assert {k: v.shape for k, v in layer.state_dict().items()} == {
        k: v.shape for k, v in theirs.layer.state_dict().items()
    }
    assert layer.load_state_dict(theirs.layer.state_dict(), strict=True)
    assert theirs.layer.load_state_dict(layer.state_dict(), strict=True)


class _Quantised(nn.Module):
    """A linear that has no weight to look at."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self._apply_inner = inner.forward
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self._apply_inner(x)


@torch.no_grad()
def test_projections_are_called_as_modules(
    make_config: Any, make_layer: Any, make_engine: Any, make_rope: Any, make_sequence: Any, rows: Any
) -> None:
    config = make_config()
    layer, (hidden, positions) = make_layer(config), make_sequence(80)
    outputs = []
    for replaced in (False, True):
        if replaced:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                setattr(layer, name, _Quantised(getattr(layer, name)))
            layer.indexer.index_qk_proj = _Quantised(layer.indexer.index_qk_proj)
        engine = make_engine(config)
        outputs.append(engine.step(layer, make_rope(config), [rows("a", hidden, positions)])[0][0])
    assert_bitwise_equal(outputs[1], outputs[0])
    wrapped = [module for module in layer.modules() if isinstance(module, _Quantised)]
    assert [module.calls for module in wrapped] == [1] * 5


def test_gradients_equal_those_of_transformers(
    stock: Any, make_engine: Any, make_rope: Any, make_sequence: Any, rows: Any
) -> None:
    theirs = stock()
    layer = QSAAttention(theirs.config)
    layer.load_state_dict(theirs.layer.state_dict())
    hidden, positions = make_sequence(120)
    weights = torch.randn(120, hidden.shape[1], generator=torch.Generator().manual_seed(9))
    out, attended = theirs.run(hidden, positions)
    (out * weights).sum().backward()
    ((mine,), _) = make_engine(theirs.config).step(layer, make_rope(theirs.config), [rows("a", hidden, positions)])
    (mine * weights).sum().backward()
    exact = _gradients_in_float64(theirs, hidden, positions, attended, weights)
    for name, parameter in layer.named_parameters():
        if name.startswith("indexer."):
            assert parameter.grad is None, "the selection is a constant"
        else:
            stock_gradient = theirs.layer.get_parameter(name).grad
            assert_within_budget(parameter.grad, stock_gradient, exact[name], name)


def _gradients_in_float64(
    theirs: Any, hidden: torch.Tensor, positions: torch.Tensor, attended: torch.Tensor, weights: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Dense attention under the mask of what was attended, written out."""
    config = theirs.config
    p = {name: x.detach().double().requires_grad_() for name, x in theirs.layer.named_parameters()}
    cos, sin = (part[0].double()[:, None] for part in theirs.rotary(hidden[None], positions[:, None]))
    x, half, rotary = hidden.double(), config.rotary_dim // 2, config.rotary_dim

    def prepared(heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + config.norm_eps) * (1 + weight)
        turned = torch.cat([-heads[..., half:rotary], heads[..., :half]], dim=-1)
        return torch.cat([heads[..., :rotary] * cos + turned * sin, heads[..., rotary:]], dim=-1).transpose(0, 1)

    q, gate = (x @ p["q_proj.weight"].t()).view(len(x), config.q_heads, -1).chunk(2, dim=-1)
    k, v = ((x @ p[f"{n}_proj.weight"].t()).view(len(x), config.kv_heads, -1) for n in "kv")
    group = config.q_heads // config.kv_heads
    keys = prepared(k, p["k_norm.weight"]).repeat_interleave(group, dim=0)
    values = v.transpose(0, 1).repeat_interleave(group, dim=0)
    scores = prepared(q, p["q_norm.weight"]) @ keys.transpose(1, 2) * config.head_dim**-0.5
    out = scores.masked_fill(~attended, -torch.inf).softmax(dim=-1) @ values
    out = (out.transpose(0, 1) * torch.sigmoid(gate)).flatten(1) @ p["o_proj.weight"].t()
    (out * weights).sum().backward()
    return {name: parameter.grad for name, parameter in p.items() if parameter.grad is not None}
