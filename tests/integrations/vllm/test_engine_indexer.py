"""vLLM 0.33's unmodified indexer, with its own cache and metadata classes, on FlashQSA's operators on CPU tensors.

Its source comes from the wheel. Stand-ins: the operators it imports (ours), its projection, which it does not call
here, and the forward context. Heads of 128 of which 64 dimensions rotate, as its joint preparation asks for.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from flashqsa.integrations.vllm_plugin import cpu_engine, ops
from flashqsa.rope import RopeTable
from flashqsa.testing import assert_ulp_close, assert_within_budget, oracles, randn, stream

SOURCE = Path(__file__).parents[3] / "build" / "vllm-sources" / "0.33.0" / "vllm" / "models" / "qwen4_exp"
PACKAGE = "vllm_0_33"
BF16 = torch.bfloat16
HI, DI, HQ, HKV, D, R, BUDGET, PAGE, ROTARY, EPS = 4, 128, 6, 2, 64, 4, 64, 16, 64, 1e-6
PAGES, TOKENS = 120, 420
SECTION = [11, 11, 10]
OPERATORS = {
    "ops.qsa": ("qsa_compress_groups_with_ratio", "qsa_store_cache_rows", "qsa_sparse_paged_attention"),
    "ops.qsa_indexer": ("expand_qsa_block_indices", "qsa_select_paged_decode", "qsa_select_paged_prefill"),
    "ops.qsa_prepare": ("qsa_prepare",),
}


def _load(name: str, file: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.{name}", SOURCE / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def indexer_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """`indexer_qsa` of the wheel in a package that holds our operators; all it does not touch is the installed vLLM."""
    import vllm.v1.attention.ops.metadata as helper

    ours = cpu_engine.token_requests(helper.compute_token_to_req_indices)
    monkeypatch.setattr(helper, "compute_token_to_req_indices", ours)
    before = set(sys.modules)
    for name in ("", ".common", ".nvidia", ".nvidia.ops"):
        package = types.ModuleType(PACKAGE + name)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, PACKAGE + name, package)
    for name, operators in OPERATORS.items():
        module = types.ModuleType(f"{PACKAGE}.nvidia.{name}")
        for operator in operators:
            setattr(module, operator, getattr(ops, operator))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    _load("common.qsa_cache", "common/qsa_cache.py")
    module = _load("nvidia.indexer_qsa", "nvidia/indexer_qsa.py")
    module.index_q = []

    def recording(*args, **kwargs):
        module.index_q = [args[7]]  # q_out
        return ops.qsa_prepare(*args, **kwargs)

    monkeypatch.setattr(module, "qsa_prepare", recording)
    yield module
    for name in set(sys.modules) - before:
        if name.startswith(PACKAGE):
            del sys.modules[name]


class Projection(torch.nn.Module):
    """Takes the place of vLLM's linear layer: the indexer is handed projected rows."""

    def __init__(self, *sizes, **named) -> None:
        super().__init__()


class Norm(torch.nn.Module):
    """The two attributes of vLLM's Gemma norm that are read."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.zeros(size)), eps


@dataclass
class Request:
    """One request: what each of its tokens is, and how many are in the caches."""

    index: int
    ring_block: int
    page_ids: list[int]
    keys: torch.Tensor  # [N, Di] raw
    positions: torch.Tensor  # [3, N]
    done: int = 0


class Bench:
    """An indexer with its caches and metadata builders; steps are given as rows of each request."""

    def __init__(self, module, *, mrope: bool, draft_rows: int, index_dtype: str = "bf16") -> None:
        names = types.SimpleNamespace
        self.module, self.mrope = module, mrope
        speculative = names(num_speculative_tokens=draft_rows, parallel_drafting=False) if draft_rows else None
        self.config = names(
            cache_config=names(block_size=PAGE), num_speculative_tokens=draft_rows, speculative_config=speculative,
            model_config=names(dtype=BF16, uses_mrope=mrope),
            attention_config=names(resolve_indexer_kv_dtype=lambda default: index_dtype),
            compilation_config=names(static_forward_context={}),
            scheduler_config=names(max_num_batched_tokens=512, max_num_seqs=8),
            parallel_config=names(decode_context_parallel_size=1),
        )  # fmt: skip
        g = stream(11, mrope, draft_rows)
        table = RopeTable.build(
            {"rope_theta": 1e4}, rotary_dim=ROTARY, num_positions=2 * TOKENS, mrope_section=SECTION if mrope else None,
            dtype=BF16,
        )  # fmt: skip
        self.section = tuple(SECTION) if mrope else None
        rotary = torch.nn.Module()
        rotary.rotary_dim, rotary.is_neox_style, rotary.mrope_interleaved = ROTARY, True, True
        rotary.cos_sin_cache = table.cos_sin
        if mrope:
            rotary.mrope_section = SECTION
        model = names(
            indexer_n_heads=HI, indexer_kv_heads=1, indexer_head_dim=DI, indexer_budget=BUDGET,
            indexer_compress_ratio=R, hidden_size=256, rms_norm_eps=EPS,
        )  # fmt: skip
        self.indexer = module.QSAIndexer(
            vllm_config=self.config, config=model, layer_id=3, rotary_emb=rotary, prefix="model.layers.3.indexer"
        )
        assert self.indexer.use_fused_pre_indexer
        for norm in (self.indexer.q_layernorm, self.indexer.k_layernorm):
            norm.weight.data = randn(g, BF16, DI, std=0.2)
        self.raw, self.compressed = self.indexer.raw_key_cache, self.indexer.compressed_key_cache
        self.specs = [cache.get_kv_cache_spec(self.config) for cache in (self.raw, self.compressed)]
        self.ring_tokens = self.specs[0].block_size
        width = DI + 12 if mrope else DI
        self.raw.bind_kv_cache(randn(g, BF16, 9, 1, self.ring_tokens, width))
        if mrope:
            self.raw.rope_position_cache.fill_(-5)
        pooled = torch.full((PAGES, 1, PAGE // R, DI), float("nan"), dtype=BF16)
        self.compressed.bind_kv_cache(pooled.to(self.compressed.dtype))
        builder = sys.modules[f"{PACKAGE}.common.qsa_cache"].QSAMetadataBuilder
        self.builders = [builder(spec, ["layer"], self.config, torch.device("cpu")) for spec in self.specs]
        norms = [names(weight=randn(g, BF16, D, std=0.2), variance_epsilon=EPS) for _ in range(2)]
        self.attn = names(
            use_fused_qsa_prepare=True, kv_cache=torch.zeros(PAGES, HKV, PAGE, 2 * D, dtype=BF16),
            kv_cache_dtype="auto", q_norm=norms[0], k_norm=norms[1], _k_scale_float=1.0, _v_scale_float=1.0,
        )  # fmt: skip
        order = (torch.randperm(PAGES - 1, generator=g) + 1).tolist()
        self.requests = [self._request(i, order[30 * i : 30 * i + 30]) for i in range(3)]

    def _request(self, index: int, page_ids: list[int]) -> Request:
        tokens = torch.arange(TOKENS)
        positions = tokens.expand(3, -1)
        if self.mrope:
            positions = torch.stack([tokens // 2 + index, tokens // 3 + tokens % 7, tokens % 11 + tokens // 5])
        return Request(index, index + 2, page_ids, randn(stream(12, index), BF16, TOKENS, DI), positions)

    def step(self, rows: Sequence[tuple[int, int]], *, out=None, drafts: int | None = None) -> torch.Tensor:
        """Run rows (request, count) and check every selection and closed block.

        Args:
            rows: Requests in order, decodes first, and how many rows each has.
            out: Buffer of an earlier step.
            drafts: How many rows of each request stay; the others were drafts of other tokens, and are rejected.
        """
        requests = [self.requests[index] for index, _ in rows]
        counts = [count for _, count in rows]
        total, g = sum(counts), stream(13, *(r.done for r in requests))
        keys, positions, logical, slots = [], [], [], []
        for request, count in zip(requests, counts, strict=True):
            span = slice(request.done, request.done + count)
            own = request.keys[span].clone()
            if drafts is not None:
                own[drafts:] = randn(g, BF16, count - drafts, DI)
            keys.append(own)
            positions.append(request.positions[:, span])
            at = torch.arange(request.done, request.done + count)
            logical.append(at)
            slots.append(torch.tensor(request.page_ids)[at // PAGE] * PAGE + at % PAGE)
        index_q, qkv = randn(g, BF16, total, HI * DI), randn(g, BF16, total, 2 * (HQ + HKV) * D)
        common = self._common(requests, counts, torch.cat(slots))
        metadata = {}
        for cache, builder in zip((self.raw, self.compressed), self.builders, strict=True):
            metadata[cache.prefix] = builder.build(0, common[cache is self.raw])
        self.module.get_forward_context = lambda: types.SimpleNamespace(attn_metadata=metadata)
        rope = torch.cat(positions, dim=1) if self.mrope else torch.cat(positions, dim=1)[0]
        projected = torch.cat([index_q, torch.cat(keys)], dim=1)
        result, _ = self.indexer(projected, rope, out, attn=self.attn, qkv=qkv, slot_mapping=torch.cat(slots))
        row = 0
        for request, count, own in zip(requests, counts, keys, strict=True):
            seen = torch.cat([request.keys[: request.done], own])
            self._check_blocks(request, seen)
            if not self.indexer.skip_topk:
                own_rows = slice(row, row + count)
                q = index_q[own_rows].view(count, HI, DI)
                self._check_rows(request, q, self.module.index_q[0][own_rows], result[own_rows])
            request.done += count if drafts is None else drafts
            row += count
        return result

    def _common(self, requests, counts, slots):
        """vLLM's metadata of a step, for the ring's group (True) and that of the pages (False)."""
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lens = torch.tensor([r.done + n for r, n in zip(requests, counts, strict=True)], dtype=torch.int32)
        tables = {
            True: torch.tensor([[r.ring_block] for r in requests], dtype=torch.int32),
            False: torch.tensor([r.page_ids for r in requests], dtype=torch.int32),
        }
        return {
            kind: CommonAttentionMetadata(
                query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, num_reqs=len(requests),
                num_actual_tokens=int(starts[-1]), max_query_len=max(counts), max_seq_len=int(lens.max()),
                block_table_tensor=table, slot_mapping=slots,
            )
            for kind, table in tables.items()
        }  # fmt: skip

    def _pooled(self, request: Request, blocks: int) -> torch.Tensor:
        ids = torch.arange(blocks)
        per_page = PAGE // R
        return self.compressed.kv_cache[torch.tensor(request.page_ids)[ids // per_page], ids % per_page, 0]

    def _check_blocks(self, request: Request, seen: torch.Tensor) -> None:
        exact = oracles.pool_block_keys(
            seen, request.positions[:, : seen.shape[0]], self.indexer.k_layernorm.weight, EPS,
            self.indexer.rotary_emb.cos_sin_cache, self.section, R, BF16,
        )  # fmt: skip
        held = self._pooled(request, exact.shape[0])
        if held.dtype == BF16:
            assert_ulp_close(held, exact.to(BF16), share=1e-3, label=f"blocks of request {request.index}")
        else:
            error = (held.double() - exact).abs()
            assert bool((error <= exact.abs() * 2**-4 + 2**-9).all()), f"blocks of request {request.index}"

    def _check_rows(self, request: Request, q: torch.Tensor, rotated: torch.Tensor, packed: torch.Tensor) -> None:
        positions = request.positions[:, request.done : request.done + q.shape[0]]
        normed = oracles.rms_norm(q, self.indexer.q_layernorm.weight, EPS, BF16)
        exact = oracles.rotate(normed, positions, self.indexer.rotary_emb.cos_sin_cache, self.section, BF16)
        if rotated.dtype == BF16:
            assert_within_budget(rotated, exact.to(BF16), exact, f"index queries of request {request.index}")
        else:
            assert bool(((rotated.double() - exact).abs() <= exact.abs() * 2**-4 + 2**-9).all())
        for row in range(q.shape[0]):
            position = request.done + row
            visible = (position + 1) // R
            best = oracles.select_best(oracles.score_blocks(rotated[row], self._pooled(request, visible)), BUDGET // R)
            tokens = oracles.selected_tokens(best, visible, position, R)
            label = f"request {request.index}, token {position}"
            assert packed[row, -1] == len(tokens), label
            assert packed[row, : len(tokens)].tolist() == tokens, label
            assert set(packed[row, len(tokens) : -1].tolist()) <= {-1}, label


@pytest.fixture
def bench(indexer_module: types.ModuleType):
    """Makes a bench; norms and projection are stand-ins."""
    indexer_module.ReplicatedLinear, indexer_module.GemmaRMSNorm = Projection, Norm
    return lambda **options: Bench(indexer_module, **options)


@pytest.mark.parametrize("index_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("mrope", [False, True], ids=["text", "mrope"])
def test_chunked_mixed_and_decode(bench, mrope: bool, index_dtype: str) -> None:
    """Prefill cut inside blocks, decodes before prefills in one batch, then decodes past the budget."""
    made = bench(mrope=mrope, draft_rows=0, index_dtype=index_dtype)
    for rows in ([(0, 97)], [(0, 1), (1, 63)], [(0, 1), (2, 2), (1, 130)], [(1, 1), (0, 1), (2, 3)], [(0, 1), (2, 90)]):
        made.step(rows)
    for _ in range(9):
        made.step([(0, 1), (1, 1), (2, 1)])
    assert [request.done for request in made.requests] == [110, 203, 104]


@pytest.mark.parametrize("mrope", [False, True], ids=["text", "mrope"])
@pytest.mark.parametrize("draft_rows", [1, 3])
def test_fault_10_rejected_drafts(bench, mrope: bool, draft_rows: int) -> None:
    """Windows of drafts of which any number is rejected: the ring keeps what the open block needs."""
    made = bench(mrope=mrope, draft_rows=draft_rows)
    assert made.ring_tokens == 4 * (1 + -(-draft_rows // 4))
    made.step([(0, 70)])
    made.step([(1, 33), (2, 75)])
    window = draft_rows + 1
    for kept in [*range(1, window + 1)] * 4:
        made.step([(0, window), (1, window), (2, window)], drafts=kept)
    made.step([(0, window), (2, window), (1, 41)])


@pytest.mark.parametrize("mrope", [False, True], ids=["text", "mrope"])
def test_reuse_returns_the_frozen_rows_and_keeps_the_caches(bench, mrope: bool) -> None:
    made = bench(mrope=mrope, draft_rows=3)
    made.step([(0, 81)])
    buffer = torch.full((4, BUDGET + R), 7, dtype=torch.int32)
    made.indexer.skip_topk = True
    for _ in range(6):  # blocks that close are written and checked all the same
        assert made.step([(0, 1)], out=buffer[:1]) is not None
    assert bool((buffer == 7).all())
    with pytest.raises(RuntimeError, match="requires an output buffer"):
        made.step([(0, 1)])
    made.requests[0].done += 1  # its caches were written before vLLM asked for the buffer
    made.indexer.skip_topk = False
    made.step([(0, 4)])
    made.step([(0, 1)])


def test_without_metadata_rows_are_inert(bench) -> None:
    made = bench(mrope=False, draft_rows=0)
    made.module.get_forward_context = lambda: types.SimpleNamespace(attn_metadata=None)
    out = torch.full((3, BUDGET + R), 7, dtype=torch.int32)
    made.indexer.skip_topk = True
    made.indexer(torch.zeros(3, 5 * DI), torch.zeros(3, dtype=torch.int64), out, attn=made.attn)
    assert bool((out == 7).all())
    made.indexer.skip_topk = False
    made.indexer(torch.zeros(3, 5 * DI), torch.zeros(3, dtype=torch.int64), out, attn=made.attn)
    assert bool((out[:, :-1] == -1).all())
    assert not bool(out[:, -1].any())
