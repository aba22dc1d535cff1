"""The oracles against hand-made numbers, and against the model they describe."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashqsa.testing import oracles, stream, tiny_config

TOKENS = 150


def test_select_best_orders_by_score_then_id_with_nan_last() -> None:
    scores = [1.0, math.nan, 3.0, -0.0, 3.0, 0.0, -math.inf, math.inf]
    assert oracles.select_best(scores, 1) == [7]
    assert oracles.select_best(scores, 2) == [2, 7]
    assert oracles.select_best(scores, 5) == [0, 2, 3, 4, 7]
    assert oracles.select_best(scores, 7) == [0, 2, 3, 4, 5, 6, 7]
    assert oracles.select_best(scores, 99) == list(range(8))
    assert oracles.select_best([], 4) == []


def test_score_blocks_fault_8_sums_the_relus_of_heads() -> None:
    """Three blocks of which sum-of-relu, relu-of-sum and max over heads each choose another one."""
    index_q = torch.eye(3)
    keys = torch.tensor([[3.0, 3.0, 3.0], [6.0, 5.0, -8.0], [10.0, -5.0, -5.0]])
    assert [int(keys.sum(dim=1).argmax()), int(keys.max(dim=1).values.argmax())] == [0, 2]
    assert oracles.score_blocks(index_q, keys).tolist() == [9.0, 11.0, 10.0]
    assert oracles.select_best(oracles.score_blocks(index_q, keys), 1) == [1]
    assert oracles.score_blocks(index_q, torch.tensor([[math.nan, 1.0, 2.0]])).isnan().all()


def test_selected_tokens_are_whole_blocks_and_the_open_tail() -> None:
    assert oracles.selected_tokens([0, 2], 3, 13, 4) == [0, 1, 2, 3, 8, 9, 10, 11, 12, 13]
    assert oracles.selected_tokens([1], 3, 11, 4) == [4, 5, 6, 7]
    assert oracles.selected_tokens([], 0, 2, 4) == [0, 1, 2]


def test_attend_row_of_one_token_is_its_value() -> None:
    k, v = torch.randn(5, 2, 8, generator=stream(1)), torch.randn(5, 2, 8, generator=stream(2))
    q = torch.randn(6, 8, generator=stream(3))
    out, lse = oracles.attend_row(q, k, v, [3])
    assert torch.allclose(out, v[3].repeat_interleave(3, dim=0).double(), rtol=1e-12)
    expected = (q.double() * k[3].repeat_interleave(3, dim=0).double()).sum(dim=1) / math.sqrt(8)
    assert torch.allclose(lse, expected, rtol=1e-12)
    out, lse = oracles.attend_row(q, k, v, [])
    assert out.abs().max() == 0
    assert bool((lse == -math.inf).all())


def test_rotate_fault_53_leaves_the_other_dimensions_alone() -> None:
    x = torch.randn(7, 3, 64, generator=stream(4))
    table = torch.randn(50, 16, generator=stream(5))
    rotated = oracles.rotate(x, torch.randint(0, 50, (3, 7), generator=stream(6)), table, (4, 2, 2))
    assert torch.equal(rotated[..., 16:], x[..., 16:].double())
    assert not torch.isclose(rotated[..., :16], x[..., :16].double()).all(dim=-1).any()


@pytest.fixture
def model_layer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A QSA layer of transformers with random weights, ties broken by the lower id, and what it makes of a sequence."""
    pytest.importorskip("transformers", minversion="5.16.1")
    from transformers import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

    def lowest_first(scores: torch.Tensor, k: int, dim: int) -> Any:
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        return SimpleNamespace(values=values[:k], indices=indices[:k])

    monkeypatch.setattr(torch.Tensor, "topk", lowest_first)
    config = Qwen4ExpTextConfig(**tiny_config())
    config._attn_implementation = "eager"
    layer, rotary = modeling.Qwen4ExpTextAttention(config, 3), modeling.Qwen4ExpTextRotaryEmbedding(config)
    generator = stream(7)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.dim() == 1 else 0.08))
    hidden = torch.randn(1, TOKENS, config.hidden_size, generator=generator)
    positions = torch.stack([torch.arange(TOKENS) + 3, torch.arange(TOKENS) % 17, torch.arange(TOKENS) % 23])
    embeddings = rotary(hidden, positions[:, None])
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        mask = layer.indexer(hidden, embeddings, causal, None) & causal
        float_mask = torch.where(causal, 0.0, torch.finfo(torch.float32).min)
        out = layer(hidden, embeddings, float_mask)[0]
    angles = torch.arange(200, dtype=torch.float32)[:, None] * rotary.inv_freq[None]
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return SimpleNamespace(
        config=config, layer=layer, hidden=hidden[0], positions=positions, table=table, mask=mask[0, 0], out=out[0]
    )


@pytest.mark.transformers
@torch.no_grad()
def test_oracles_describe_the_model(model_layer: SimpleNamespace) -> None:
    """A whole layer in fp32: the same tokens attended by every row, and the same output up to fp32 rounding."""
    m = model_layer
    config, layer, section, eps = m.config, m.layer, (4, 2, 2), m.config.rms_norm_eps
    q, gate = layer.q_proj(m.hidden).view(TOKENS, 6, 128).chunk(2, dim=-1)
    q = oracles.rotate(oracles.rms_norm(q, layer.q_norm.weight, eps), m.positions, m.table, section)
    k = layer.k_proj(m.hidden).view(TOKENS, 2, 64)
    k = oracles.rotate(oracles.rms_norm(k, layer.k_norm.weight, eps), m.positions, m.table, section)
    v = layer.v_proj(m.hidden).view(TOKENS, 2, 64)
    index_qk = layer.indexer.index_qk_proj(m.hidden).view(TOKENS, 5, 32)
    weights = layer.indexer.q_layernorm.weight, layer.indexer.k_layernorm.weight
    index_q = oracles.rotate(oracles.rms_norm(index_qk[:, :4], weights[0], eps), m.positions, m.table, section)
    block_keys = oracles.pool_block_keys(index_qk[:, 4], m.positions, weights[1], eps, m.table, section, 4)
    topk = config.indexer_budget // config.indexer_compress_ratio
    out = torch.zeros(TOKENS, 6, 64)
    for t in range(TOKENS):
        visible = (t + 1) // 4
        blocks = oracles.select_best(oracles.score_blocks(index_q[t], block_keys[:visible]), topk)
        tokens = oracles.selected_tokens(blocks, visible, t, 4)
        assert m.mask[t].nonzero().flatten().tolist() == tokens, f"row {t}"
        out[t] = oracles.attend_row(q[t], k, v, tokens, gate=gate[t])[0]
    assert bool((m.mask.sum(dim=1) < torch.arange(1, TOKENS + 1)).any()), (
        "nothing was left out: no selection took place"
    )
    assert torch.allclose(layer.o_proj(out.flatten(1)), m.out, rtol=0, atol=2e-5 * float(m.out.abs().max()))
