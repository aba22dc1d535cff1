"""A stand-in for an engine around QSA layers, and transformers' layer on the same sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flashqsa import LayerCache, QSAAttention, QSAConfig, RopeTable, Selection, StepPlan, plan_step, ring_capacity
from flashqsa.commands.tiny_weights import draw_weight
from flashqsa.testing import oracles, poison, stream, tiny_config

HIDDEN = 96
POSITIONS = 4096


def _config_dict(**overrides: Any) -> dict[str, Any]:
    """3/1 heads of 64 and 2 index heads of 32, in blocks of 4 tokens with a budget of 11."""
    rope = tiny_config()["rope_parameters"] | overrides.pop("rope", {})
    small = {"hidden_size": HIDDEN, "num_attention_heads": 6, "indexer_n_heads": 2, "indexer_budget": 44}
    return tiny_config(**small | {"rope_parameters": rope} | overrides)


@dataclass
class _Request:
    ring_id: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True)
class Rows:
    """What a step adds to one request: hidden states [n, hidden] and positions [n] or [3, n]."""

    name: str
    hidden: torch.Tensor
    positions: torch.Tensor


class Engine:
    """Pages, rings and lengths of some requests, for the layers of a model. Free memory is NaN, pages are shuffled."""

    def __init__(
        self,
        config: QSAConfig,
        *,
        layers: int = 1,
        pages: int = 80,
        page_tokens: int = 16,
        requests: int = 4,
        speculative_rows: int = 0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self.config, self.page_tokens, self.speculative_rows = config, page_tokens, speculative_rows
        self.ring_tokens = ring_capacity(config.block_tokens, speculative_rows)
        self.free = torch.randperm(pages, generator=stream(seed)).tolist()
        self.rings = torch.randperm(requests, generator=stream(seed, 1)).tolist()
        self.requests: dict[str, _Request] = {}
        self.num_pages = pages
        kv, blocks = (pages, page_tokens, config.kv_heads, config.head_dim), page_tokens // config.block_tokens
        self.caches = [
            LayerCache(
                poison(torch.empty(kv, dtype=dtype)),
                poison(torch.empty(kv, dtype=dtype)),
                poison(torch.empty(pages, blocks, config.index_head_dim, dtype=dtype)),
                poison(torch.empty(requests, self.ring_tokens, config.index_head_dim, dtype=dtype)),
                poison(torch.empty(requests, self.ring_tokens, 3, dtype=torch.int64)),
                layer_id=layer_id,
            )
            for layer_id in range(layers)
        ]

    def plan(self, work: Sequence[Rows]) -> StepPlan:
        """Grow the requests and plan their rows."""
        for rows in work:
            request = self.requests.get(rows.name) or _Request(self.rings.pop())
            self.requests[rows.name] = request
            request.length += rows.hidden.shape[0]
            while len(request.pages) * self.page_tokens < request.length:
                request.pages.append(self.free.pop())
        requests = [self.requests[rows.name] for rows in work]
        counts = [rows.hidden.shape[0] for rows in work]
        table = torch.full((len(work), max(len(r.pages) for r in requests) + 1), -1, dtype=torch.int32)
        for row, request in enumerate(requests):
            table[row, : len(request.pages)] = torch.tensor(request.pages)
        return plan_step(
            torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
            torch.tensor([r.length for r in requests], dtype=torch.int32),
            table,
            page_tokens=self.page_tokens,
            block_tokens=self.config.block_tokens,
            topk_blocks=self.config.topk_blocks,
            max_query_len=max(counts),
            max_seq_len=max(r.length for r in requests),
            num_pages=self.num_pages,
            ring_ids=torch.tensor([r.ring_id for r in requests], dtype=torch.int32),
            ring_tokens=self.ring_tokens,
            speculative_rows=self.speculative_rows,
        )

    def step(
        self, layer: QSAAttention, rope: RopeTable, work: Sequence[Rows], *, layer_id: int = 0, **options: Any
    ) -> tuple[list[torch.Tensor], Selection]:
        """One step of one layer: the output of each request's rows, and the selection."""
        plan = self.plan(work)
        hidden = torch.cat([rows.hidden for rows in work])
        positions = torch.cat([rows.positions for rows in work], dim=-1)
        output, selection = layer(hidden, positions, rope, self.caches[layer_id], plan, **options)
        return list(output.split([rows.hidden.shape[0] for rows in work])), selection

    def rollback(self, name: str, length: int) -> None:
        """Take a request back to a length; its pages stay, with what was written there."""
        self.requests[name].length = length

    def block_keys(self, name: str, layer_id: int = 0) -> torch.Tensor:
        """[blocks, Di] keys of the complete blocks of a request."""
        request, r = self.requests[name], self.config.block_tokens
        keys = self.caches[layer_id].block_keys
        assert keys is not None
        return keys[request.pages].flatten(0, 1)[: request.length // r]

    def ring(self, name: str, layer_id: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Raw index keys and positions of the last tokens that fit a block, in the order of the tokens."""
        request, cache, r = self.requests[name], self.caches[layer_id], self.config.block_tokens
        assert cache.ring is not None
        assert cache.ring_positions is not None
        places = torch.arange(max(request.length - r, 0), request.length) % self.ring_tokens
        return cache.ring[request.ring_id, places], cache.ring_positions[request.ring_id, places]


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    return Engine


@pytest.fixture
def rows() -> Callable[..., Rows]:
    return Rows


@pytest.fixture
def make_config() -> Callable[..., QSAConfig]:
    return lambda **overrides: QSAConfig.from_dict(_config_dict(**overrides))


@pytest.fixture
def make_layer() -> Callable[..., QSAAttention]:
    """A layer with weights that make attention decide something."""

    def make(config: QSAConfig, *, seed: int = 0, layer_id: int | None = None) -> QSAAttention:
        layer = QSAAttention(config, layer_id)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(draw_weight(name, parameter.shape, seed))
        return layer

    return make


@pytest.fixture
def make_rope() -> Callable[..., RopeTable]:
    def make(config: QSAConfig, dtype: torch.dtype = torch.float32) -> RopeTable:
        return RopeTable.build(
            config.rope_parameters,
            rotary_dim=config.rotary_dim,
            num_positions=POSITIONS,
            max_positions=config.max_positions,
            mrope_section=config.mrope_section,
            dtype=dtype,
        )

    return make


class _RowByRow(nn.Module):
    """A projection without a weight of its own, whose rows do not depend on how many there are."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.cat([self.inner(row) for row in x.split(1)])


@pytest.fixture
def row_by_row() -> Callable[[QSAAttention], QSAAttention]:
    """Replaces the projections of a layer: then equal rows have equal bits all the way, GEMMs included."""

    def replace(layer: QSAAttention) -> QSAAttention:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(layer, name, _RowByRow(getattr(layer, name)))
        layer.indexer.index_qk_proj = _RowByRow(layer.indexer.index_qk_proj)  # type: ignore[assignment]
        return layer

    return replace


@pytest.fixture
def make_sequence() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Hidden states [N, hidden] and positions [3, N], all axes different, of a sequence."""

    def make(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        time = torch.arange(tokens) + 3 + seed
        axes = torch.stack([time, 70 + time % 17, 100 + time % 23])
        return torch.randn(tokens, HIDDEN, generator=stream(seed, 2)), axes

    return make


@pytest.fixture
def stock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' layer, ties broken by the lower id: `stock(**overrides)` makes one and returns its helper."""
    pytest.importorskip("transformers", minversion="5.16.1")
    from transformers import Qwen4ExpTextConfig
    from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

    def lowest_first(scores: torch.Tensor, k: int, dim: int) -> Any:
        values, indices = scores.sort(dim=dim, descending=True, stable=True)
        return SimpleNamespace(values=values[:k], indices=indices[:k])

    monkeypatch.setattr(torch.Tensor, "topk", lowest_first)

    def make(*, seed: int = 0, **overrides: Any) -> StockLayer:
        config = Qwen4ExpTextConfig(**_config_dict(**overrides))
        config._attn_implementation = "eager"
        layer, rotary = modeling.Qwen4ExpTextAttention(config, 3), modeling.Qwen4ExpTextRotaryEmbedding(config)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                parameter.copy_(draw_weight(name, parameter.shape, seed))
        return StockLayer(layer, rotary, QSAConfig.from_pretrained_config(config))

    return make


class StockLayer:
    """transformers' layer on one whole sequence, and the same in float64 by the oracles of the test kit."""

    def __init__(self, layer: Any, rotary: Any, config: QSAConfig) -> None:
        self.layer, self.rotary, self.config = layer, rotary, config

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, attended: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [N, hidden], and [N, N] bool of the tokens attended: the indexer's choice, or the one given."""
        tokens = hidden.shape[0]
        table = self.rotary(hidden[None], positions[:, None])
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None]
        if attended is None:
            attended = (self.layer.indexer(hidden[None], table, causal, None) & causal)[0, 0]
        forced = self.layer.indexer.register_forward_hook(lambda *_: attended[None, None])
        mask = torch.where(causal, 0.0, torch.finfo(hidden.dtype).min).to(hidden.dtype)
        out = self.layer(hidden[None], table, mask)[0][0]
        forced.remove()
        return out, attended

    @torch.no_grad()
    def exactly(self, hidden: torch.Tensor, positions: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """[N, hidden] float64: the layer's output over the tokens attended."""
        config, eps = self.config, self.config.norm_eps
        angles = self.rotary(hidden[None, :1].float(), torch.arange(POSITIONS)[None, None].expand(3, 1, -1))
        half = config.rotary_dim // 2
        table = torch.cat([part[0, :, :half] for part in angles], dim=-1).double()
        weights = {name: parameter.double() for name, parameter in self.layer.named_parameters()}
        section, x = config.mrope_section, hidden.double()

        def project(name: str, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

        q, gate = project("q_proj", x).view(len(x), config.q_heads, -1).chunk(2, dim=-1)
        k, v = (project(n, x).view(len(x), config.kv_heads, -1) for n in ("k_proj", "v_proj"))
        q, k = (
            oracles.rotate(oracles.rms_norm(x, weights[f"{name}.weight"], eps), positions, table, section)
            for name, x in (("q_norm", q), ("k_norm", k))
        )
        rows = [
            oracles.attend_row(q[t], k, v, attended[t].nonzero().flatten().tolist(), gate=gate[t])[0]
            for t in range(len(x))
        ]
        return project("o_proj", torch.stack(rows).flatten(1))


@pytest.fixture
def attended_tokens() -> Callable[..., torch.Tensor]:
    def tokens(selection: Selection, config: QSAConfig, first_position: int, columns: int) -> torch.Tensor:
        """[rows, columns] bool: what the rows of one request attend, from their position on."""
        chosen = torch.zeros(selection.block_ids.shape[0], columns, dtype=torch.bool)
        for row in range(chosen.shape[0]):
            ids = selection.block_ids[row, : int(selection.block_counts[row])].tolist()
            visible, position = int(selection.visible_blocks[row]), first_position + row
            chosen[row, oracles.selected_tokens(ids, visible, position, config.block_tokens)] = True
        return chosen

    return tokens
