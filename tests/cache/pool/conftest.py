"""A pool with real stages on tiny layers, and the same requests without paging, chunks, rollback or company."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from flashqsa import (
    LayerCache,
    NormWeights,
    PagedPool,
    QSAConfig,
    RopeTable,
    StepPlan,
    attend,
    plan_step,
    prepare,
    ring_capacity,
    select_blocks,
)
from flashqsa.testing import assert_bitwise_equal, assert_unchanged, snapshot, stream

LAYER_IDS = (3, 7)
TOKEN_IDS = 23
POSITIONS = 8192
CONFIG = QSAConfig(
    hidden_size=16, q_heads=2, kv_heads=1, head_dim=8, index_heads=2, index_head_dim=8, budget_tokens=20,
    block_tokens=4, rotary_dim=6, mrope_section=(1, 1, 1), max_positions=POSITIONS, qsa_layer_ids=LAYER_IDS,
)  # fmt: skip
"""Blocks of 4 tokens, of which a row selects 5."""


@functools.cache
def rope_table(device: torch.device) -> RopeTable:
    return RopeTable.build(
        CONFIG.rope_parameters, rotary_dim=CONFIG.rotary_dim, num_positions=POSITIONS,
        mrope_section=CONFIG.mrope_section, device=device,
    )  # fmt: skip


@dataclass(frozen=True)
class Projections:
    """What a layer projects each token id to: [TOKEN_IDS, heads, dim]."""

    q_gate: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index_qk: torch.Tensor
    norms: NormWeights


@functools.cache
def projections(layer_id: int, dtype: torch.dtype, device: torch.device) -> Projections:
    g, c = stream(layer_id), CONFIG

    def draw(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=g) * std).to(device=device, dtype=dtype)

    norms = NormWeights(*(draw(n, std=0.2) for n in (c.head_dim, c.head_dim, c.index_head_dim, c.index_head_dim)))
    return Projections(
        draw(TOKEN_IDS, c.q_heads, 2 * c.head_dim),
        draw(TOKEN_IDS, c.kv_heads, c.head_dim),
        draw(TOKEN_IDS, c.kv_heads, c.head_dim),
        draw(TOKEN_IDS, c.index_heads + 1, c.index_head_dim),
        norms,
    )


@dataclass(frozen=True)
class LayerRows:
    """What some rows of one request gave in one layer."""

    output: torch.Tensor
    block_ids: torch.Tensor
    block_counts: torch.Tensor


def rope_positions(positions: torch.Tensor) -> torch.Tensor:
    """[3, T] positions, all axes different."""
    return torch.stack([positions + 3, 70 + positions % 17, 100 + positions % 23])


@torch.no_grad()
def run_layers(caches: Sequence[LayerCache], plan: StepPlan, token_ids: torch.Tensor) -> list[LayerRows]:
    """All layers of one step; rows past the tokens are padding and get NaN."""
    rows, results = plan.num_rows - token_ids.shape[0], []
    positions = rope_positions(plan.positions.clamp(min=0))
    for cache in caches:
        assert cache.layer_id is not None
        assert cache.ring is not None
        given = projections(cache.layer_id, cache.ring.dtype, cache.device)

        def rows_of(table: torch.Tensor) -> torch.Tensor:
            return torch.cat([table[token_ids], table.new_full((rows, *table.shape[1:]), float("nan"))])

        ready = prepare(
            rows_of(given.q_gate), rows_of(given.k), rows_of(given.v), rows_of(given.index_qk), positions,
            rope_table(cache.device), given.norms, cache, plan,
        )  # fmt: skip
        selection = select_blocks(ready.index_q, cache, plan)
        output = attend(ready.q, cache, selection, plan, gate=ready.gate, row_exact=True)
        results.append(LayerRows(output, selection.block_ids, selection.block_counts))
    return results


@dataclass(frozen=True)
class Truth:
    """One request from beginning to end: rows of each layer, and what its caches hold."""

    rows: list[LayerRows]
    caches: list[LayerCache]


@functools.lru_cache(maxsize=4096)
def truth(
    tokens: tuple[int, ...], dtypes: tuple[torch.dtype, ...], scales: tuple[float | None, ...], device: torch.device
) -> Truth:
    """The request alone, in one step, contiguous."""
    dtype, kv_dtype, index_dtype = dtypes
    n, r, c = len(tokens), CONFIG.block_tokens, CONFIG
    room, ring = -(-max(n, 1) // r) * r, ring_capacity(r)
    kv, index_dim = (1, room, c.kv_heads, c.head_dim), c.index_head_dim
    caches = [
        LayerCache(
            torch.zeros(kv, dtype=kv_dtype, device=device),
            torch.zeros(kv, dtype=kv_dtype, device=device),
            torch.zeros(1, room // r, index_dim, dtype=index_dtype, device=device),
            torch.zeros(1, ring, index_dim, dtype=dtype, device=device),
            torch.zeros(1, ring, 3, dtype=torch.int64, device=device),
            k_scale=scales[0], v_scale=scales[1], layer_id=layer_id,
        )
        for layer_id in LAYER_IDS
    ]  # fmt: skip
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    plan = plan_step(
        torch.cat([zero, zero + n]), zero + n, None, page_tokens=None, block_tokens=r, topk_blocks=c.topk_blocks,
        max_query_len=n, max_seq_len=n, num_rows=n, first_slots=zero.to(torch.int64), ring_ids=zero, ring_tokens=ring,
    )  # fmt: skip
    return Truth(run_layers(caches, plan, torch.tensor(tokens, dtype=torch.int64, device=device)), caches)


class Serving:
    """A pool, the tokens that each of its requests has, and checks against `truth`. Free pages are shuffled."""

    def __init__(
        self,
        *,
        pages: int = 40,
        rings: int = 6,
        page_tokens: int = 16,
        speculative_rows: int = 7,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        index_dtype: torch.dtype | None = None,
        scales: tuple[float | None, float | None] = (None, None),
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.pool = PagedPool.from_config(
            CONFIG, page_tokens=page_tokens, num_pages=pages, num_rings=rings, speculative_rows=speculative_rows,
            dtype=dtype, kv_dtype=kv_dtype, index_dtype=index_dtype, k_scale=scales[0], v_scale=scales[1],
            device=device,
        )  # fmt: skip
        self.tokens: dict[Hashable, list[int]] = {}
        self.dtypes, self.scales = (dtype, kv_dtype or dtype, index_dtype or dtype), scales
        accounts = self.pool._accounts
        accounts.free_page_ids = torch.randperm(pages, generator=stream(seed)).tolist()
        accounts.free_ring_ids = torch.randperm(rings, generator=stream(seed, 1)).tolist()
        for cache in self.pool.caches:  # nobody may count on zeros
            for tensor in (cache.k_pages, cache.v_pages, cache.block_keys, cache.ring):
                assert tensor is not None
                if tensor.dtype == torch.float8_e4m3fn:
                    tensor.view(torch.uint8).fill_(0x7F)
                else:
                    tensor.fill_(float("nan"))

    def open(self, name: Hashable, shared: Sequence[int] = (), /, **options: Any) -> int:
        """Open a request; with a prefix, `shared` are the tokens that it has."""
        hit = self.pool.open(name, **options)
        self.tokens[name] = list(shared[:hit])
        return hit

    def fork(self, name: Hashable, new: Hashable) -> None:
        self.pool.fork(name, new)
        self.tokens[new] = list(self.tokens[name])

    def close(self, name: Hashable) -> None:
        self.pool.close(name)
        del self.tokens[name]

    def rollback(self, name: Hashable, length: int) -> None:
        self.pool.rollback(name, length=length)
        del self.tokens[name][length:]

    def step(self, work: Mapping[Hashable, Sequence[int]], **options: Any) -> dict[Hashable, list[LayerRows]]:
        """Run some tokens of some requests, and check what every row selected and gave. Returns rows by request."""
        plan = self.pool.plan_step({name: len(tokens) for name, tokens in work.items()}, **options)
        for name, tokens in work.items():
            self.tokens[name] += tokens
        self.pool.check_plan(plan)
        packed = torch.tensor([token for tokens in work.values() for token in tokens], dtype=torch.int64).to(
            self.device
        )
        results = run_layers(self.pool.caches, plan, packed)
        first, by_request = 0, {}
        for name, tokens in work.items():
            rows = slice(first, first + len(tokens))
            first += len(tokens)
            got = [LayerRows(x.output[rows], x.block_ids[rows], x.block_counts[rows]) for x in results]
            by_request[name] = got
            self.check_rows(name, got)
        return by_request

    def truth(self, name: Hashable) -> Truth:
        return truth(tuple(self.tokens[name]), self.dtypes, self.scales, self.device)

    def check_rows(self, name: Hashable, got: Sequence[LayerRows]) -> None:
        """The last rows of a request, bit for bit those of the request alone."""
        rows = got[0].output.shape[0]
        if not rows:
            return
        assert self.pool.length(name) == len(self.tokens[name])
        for layer_id, theirs, ours in zip(LAYER_IDS, self.truth(name).rows, got, strict=True):
            for part in ("block_counts", "block_ids", "output"):
                label = f"request {name!r}, layer {layer_id}, {part}"
                assert_bitwise_equal(getattr(ours, part), getattr(theirs, part)[-rows:], label)

    def check_caches(self, name: Hashable) -> None:
        """Keys, values and block keys of a request, bit for bit those of the request alone."""
        n, pages = len(self.tokens[name]), self.pool.page_ids(name)
        assert self.pool.length(name) == n
        for cache, alone in zip(self.pool.caches, self.truth(name).caches, strict=True):
            for part, rows in (("k_pages", n), ("v_pages", n), ("block_keys", n // CONFIG.block_tokens)):
                tensor, expected = getattr(cache, part), getattr(alone, part)[0, :rows]
                raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
                held = raw[pages].flatten(0, 1)[:rows].view(tensor.dtype)
                assert_bitwise_equal(held, expected, f"request {name!r}, layer {cache.layer_id}, {part}")


def some_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids that repeat nothing for long."""
    return torch.randint(0, TOKEN_IDS, (count,), generator=stream(seed, count // 1_000_000)).tolist()


@pytest.fixture
def make_serving() -> Callable[..., Serving]:
    return Serving


@pytest.fixture
def run_step() -> Callable[..., list[LayerRows]]:
    return run_layers


@pytest.fixture
def draw_tokens() -> Callable[..., list[int]]:
    return some_tokens


def _accounts_of(pool: PagedPool) -> Any:
    accounts = pool._accounts
    return (
        {a.request: (a.ring_id, list(a.page_ids), a.length, a.ring_start) for a in accounts.accounts.values()},
        list(accounts.free_page_ids),
        list(accounts.free_ring_ids),
        list(accounts.holders),
        set(accounts.prefixes),
    )


@contextmanager
def _nothing_changes(pool: PagedPool) -> Iterator[None]:
    before, accounts = snapshot({x.name: x.tensor for x in pool.tensors()}), _accounts_of(pool)
    yield
    assert_unchanged(before)
    assert _accounts_of(pool) == accounts
    pool._accounts.check()


@pytest.fixture
def nothing_changes() -> Callable[[PagedPool], AbstractContextManager[None]]:
    """A context in which no byte of a pool and none of its accounts may change."""
    return _nothing_changes


@pytest.fixture
def tiny_config() -> QSAConfig:
    return CONFIG


class LengthModel:
    """Lengths, and which tokens each ring physically holds, place by place."""

    def __init__(self, ring_tokens: int) -> None:
        self.ring_tokens = ring_tokens
        self.lengths: dict[Any, int] = {}
        self.rings: dict[Any, dict[int, int]] = {}

    def add(self, name: Any, length: int = 0, source: Any = None) -> None:
        self.lengths[name] = length
        self.rings[name] = {} if source is None else {p: t for p, t in self.rings[source].items() if t < length}

    def grow(self, name: Any, rows: int) -> None:
        end, places = self.lengths[name] + rows, self.ring_tokens
        self.rings[name] |= {token % places: token for token in range(end - min(rows, places), end)}
        self.lengths[name] = end

    def holds(self, name: Any, length: int) -> bool:
        """Whether the raw keys of the block that is open at a length are there."""
        return set(range(length - length % 4, length)) <= set(self.rings[name].values())

    def cut(self, name: Any, length: int) -> None:
        self.lengths[name] = length
        self.rings[name] = {p: t for p, t in self.rings[name].items() if t < length}


@pytest.fixture
def make_model() -> Callable[[int], LengthModel]:
    return LengthModel
