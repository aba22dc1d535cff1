"""Steps of a random engine as arguments of vLLM's QSA operators: paged caches, rings, slots, work lists.

Everything lies where the generator does, so that the same cases run on a CPU and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu_workload import (
    BLOCK,
    BUDGET,
    HEAD_DIM,
    INDEX_DIM,
    INDEX_HEADS,
    KV_HEADS,
    MROPE,
    PAGE,
    Q_HEADS,
    ROTARY,
    TOPK,
    normed,
    packed_pool,
    randn,
)
from flashqsa.rope import RopeTable

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
EPS = 1e-6
RING_TOKENS = 8
"""Raw keys that an engine keeps of a request: a block, and as many drafts."""
POSITION_WIDTH = 12
"""Three int64 rotary positions behind a raw key, in units of bf16."""
K_SCALE, V_SCALE = 0.06, 0.045
"""Scales of float8 K and V, no powers of two."""

Arguments = dict[str, Any]
Operators = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True)
class Case:
    """One step.

    Attributes:
        name: What it is called.
        requests: Tokens before the step and rows of each request.
        decode_requests: Requests that lead as decode rows, all of the same number of rows.
        fp8: Float8 index cache, and float8 K and V with scales; bf16 otherwise.
        mrope: Three position axes, kept in the rings behind the raw keys; otherwise a position is a token's place.
        table_tokens: Tokens that a row of the page table has room for.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    decode_requests: int
    fp8: bool = False
    mrope: bool = True
    table_tokens: int = 32768

    def __str__(self) -> str:
        return f"{self.name}, {'fp8' if self.fp8 else 'bf16'}, {'MRoPE' if self.mrope else 'text'}"


def cases() -> list[Case]:
    """What is compared and timed at released shapes."""
    decode = tuple((32767 - i, 1) for i in range(32))
    verify = tuple((32764 - i, 4) for i in range(32))
    mixed = (
        (3, 1), (511, 1), (2047, 1), (2050, 1), (5000, 1), (9001, 1), (20002, 1), (32767, 1),
        (0, 300), (1021, 257), (17, 3), (8190, 515), (30000, 402), (6, 4),
    )  # fmt: skip
    prefill = ((30720, 2048),)
    return [
        Case("decode 32 x 1 at 32,768", decode, 32),
        Case("decode 32 x 1 at 32,768", decode, 32, fp8=True, mrope=False),
        Case("verify 32 x 4 at 32,768", verify, 32),
        Case("prefill 1 x 2,048 at 32,768", prefill, 0, mrope=False),
        Case("prefill 1 x 2,048 at 32,768", prefill, 0, fp8=True),
        Case("mixed, 8 decode and 6 chunks", mixed, 8),
        Case("mixed, 8 decode and 6 chunks", mixed, 8, fp8=True, mrope=False),
    ]


def recorded_cases() -> list[Case]:
    """What is recorded for mode shadow: short contexts, since a recording holds whole caches."""
    decode = tuple((2600 + 3 * i, 1) for i in range(32))
    chunks = (*decode[:8], (0, 300), (2301, 257), (18, 3))
    return [
        Case("decode 32 x 1", decode, 32),
        Case("mixed, 8 decode and 3 chunks", chunks, 8),
        Case("decode 32 x 1", decode, 32, fp8=True, mrope=False),
    ]


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    Attributes:
        operator: Name of the operator.
        part: Which rows or cache it is about, where a step calls the operator more than once.
        arguments: By name; tensors that are written hold what they hold before the call.
        written: Names of arguments that the operator writes.
    """

    operator: str
    part: str
    arguments: Arguments
    written: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Operator, and part where there is one."""
        return f"{self.operator} ({self.part})" if self.part else self.operator

    def fresh(self) -> Arguments:
        """The same objects, with clones of what is written."""
        return self.arguments | {name: self.arguments[name].clone() for name in self.written}


class Engine:
    """Metadata, caches and projections of one step."""

    def __init__(self, case: Case, generator: torch.Generator) -> None:
        self.case, self.generator, self.device = case, generator, generator.device
        self.before, self.lens = (self.integers(column) for column in zip(*case.requests, strict=True))
        self.ends = self.before + self.lens
        self.requests, self.rows = len(case.requests), sum(rows for _, rows in case.requests)
        self.query_starts = torch.cat([self.lens.new_zeros(1), self.lens.cumsum(0)]).to(torch.int32)
        self.row_requests = torch.arange(self.requests, device=self.device).repeat_interleave(self.lens)
        offsets = torch.arange(self.rows, device=self.device) - self.query_starts[self.row_requests]
        self.logical = self.before[self.row_requests] + offsets
        self.visible = ((self.logical + 1) // BLOCK).to(torch.int32)
        self.page_table, self.pages = self._shuffled_pages()
        self._make_slots()
        self._make_caches()
        self._make_projections()

    def integers(self, values: Any) -> torch.Tensor:
        """An int64 tensor of host integers."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def randn(self, *size: int) -> torch.Tensor:
        """Gaussian bf16 numbers."""
        return randn(self.generator, *size)

    @property
    def decode_rows(self) -> int:
        """Rows that lead the step as decode rows."""
        return sum(rows for _, rows in self.case.requests[: self.case.decode_requests])

    def _shuffled_pages(self) -> tuple[torch.Tensor, int]:
        """[R, pages] int32 table of pages in random order, 0 where a request has none; and the pages of the pool."""
        counts = [-(-(before + rows) // PAGE) for before, rows in self.case.requests]
        order = torch.randperm(sum(counts), device=self.device, generator=self.generator).to(torch.int32) + 1
        table = order.new_zeros(self.requests, self.case.table_tokens // PAGE)
        for row, pages in zip(table, order.split(counts), strict=True):
            row[: pages.shape[0]] = pages
        return table, sum(counts) + 1

    def _make_slots(self) -> None:
        pages = self.page_table[self.row_requests, self.logical // PAGE].to(torch.int64)
        self.slots = pages * PAGE + self.logical % PAGE
        page_blocks = PAGE // BLOCK
        closed = pages * page_blocks + self.logical % PAGE // BLOCK
        self.closed_slots = torch.where((self.logical + 1) % BLOCK == 0, closed, -1)
        order = torch.randperm(self.requests, device=self.device, generator=self.generator)
        self.ring_table = (order.to(torch.int32) + 1)[:, None]  # block 0 belongs to nobody
        ring = self.ring_table[self.row_requests, 0].to(torch.int64)
        kept = self.logical + RING_TOKENS >= self.ends[self.row_requests]
        self.ring_slots = torch.where(kept, ring * RING_TOKENS + self.logical % RING_TOKENS, -1)
        groups = (self.ends // BLOCK - self.before // BLOCK).clamp(min=1)  # the first item also writes the ring
        request = torch.arange(self.requests, device=self.device).repeat_interleave(groups)
        item = torch.arange(request.shape[0], device=self.device) - (groups.cumsum(0) - groups)[request]
        self.work = torch.stack([request, item], dim=1).to(torch.int32).contiguous()

    def rope_of(self, logical: torch.Tensor) -> torch.Tensor:
        """[3, N] rotary positions of tokens: three that differ where the model has three axes."""
        axes = (logical, logical - logical % 7, logical - logical % 5) if self.case.mrope else (logical,) * 3
        return torch.stack(axes)

    def _make_caches(self) -> None:
        fp8 = self.case.fp8
        pool = packed_pool(self.pages, KV_HEADS, self.generator)
        self.kv = (pool * 16).to(FP8) if fp8 else pool
        self.k_scale, self.v_scale = (K_SCALE, V_SCALE) if fp8 else (1.0, 1.0)
        keys = normed(self.randn(self.pages, PAGE // BLOCK, 1, INDEX_DIM))
        self.index_dtype = FP8 if fp8 else BF16
        self.block_keys = keys.to(self.index_dtype)
        tokens = self.before[:, None] - 1 - torch.arange(RING_TOKENS, device=self.device).flip(0)
        self.older_keys = self.randn(self.requests, RING_TOKENS, INDEX_DIM)  # the last tokens before the step
        width = INDEX_DIM + (POSITION_WIDTH if self.case.mrope else 0)
        self.ring = self.randn(self.requests + 1, RING_TOKENS, 1, width)
        if self.case.mrope:
            self.ring[..., INDEX_DIM:] = 0
        request, place = (tokens >= 0).nonzero(as_tuple=True)
        token = tokens[request, place]
        block = self.ring_table[request, 0].to(torch.int64)
        self.ring[block, token % RING_TOKENS, 0, :INDEX_DIM] = self.older_keys[request, place]
        if self.case.mrope:
            positions = self.ring[:, :, 0, INDEX_DIM:].view(torch.int64)
            positions[block, token % RING_TOKENS] = self.rope_of(token).t()

    def _make_projections(self) -> None:
        self.qkv = self.randn(self.rows, 2 * (Q_HEADS + KV_HEADS) * HEAD_DIM)
        self.index_qk = self.randn(self.rows, (INDEX_HEADS + 1) * INDEX_DIM)
        self.index_q, self.index_k = self.index_qk.split([INDEX_HEADS * INDEX_DIM, INDEX_DIM], dim=1)
        three = self.rope_of(self.logical)
        self.positions = three.contiguous() if self.case.mrope else self.logical
        self.rope = RopeTable.build(
            {"rope_theta": 1e7}, rotary_dim=ROTARY, num_positions=self.case.table_tokens, device=self.device,
            mrope_section=MROPE if self.case.mrope else None, dtype=BF16,
        )  # fmt: skip
        dims = {"q": HEAD_DIM, "k": HEAD_DIM, "index_q": INDEX_DIM, "index_k": INDEX_DIM}
        self.norms = {name: 0.1 * self.randn(dim) for name, dim in dims.items()}
        shared = self.randn(self.requests, INDEX_HEADS, INDEX_DIM)  # rows of a request ask for similar blocks
        queries = shared[self.row_requests] + 0.3 * self.randn(self.rows, INDEX_HEADS, INDEX_DIM)
        self.prepared_index_q = normed(queries).to(self.index_dtype)
        self.q, self.gate = (self.randn(self.rows, Q_HEADS, HEAD_DIM) for _ in range(2))

    def prepare_call(self) -> Call:
        """Norms, rotation, pooling and all cache writes."""
        return Call(
            "qsa_prepare", "",
            {
                "q": self.index_q, "k": self.index_k, "positions": self.positions, "cos_sin_cache": self.rope.cos_sin,
                "q_norm_weight": self.norms["index_q"], "k_norm_weight": self.norms["index_k"], "eps": EPS,
                "q_out": torch.zeros_like(self.prepared_index_q), "state_cache": self.ring,
                "state_slots": self.ring_slots, "state_block_table": self.ring_table,
                "query_start_loc": self.query_starts, "logical_positions": self.logical,
                "compressed_cache": self.block_keys, "compressed_slots": self.closed_slots,
                "k_work_metadata": self.work, "compress_ratio": BLOCK,
                "mrope_section": MROPE if self.case.mrope else None,
                "rope_pos_offset": INDEX_DIM if self.case.mrope else None, "main_qkv": self.qkv,
                "main_q_norm_weight": self.norms["q"], "main_k_norm_weight": self.norms["k"], "main_eps": EPS,
                "main_kv_cache": self.kv, "main_slot_mapping": self.slots, "main_k_scale": self.k_scale,
                "main_v_scale": self.v_scale,
            },
            ("q_out", "state_cache", "compressed_cache", "main_kv_cache"),
        )  # fmt: skip

    def select_calls(self, index_q: torch.Tensor, block_ids: torch.Tensor) -> list[Call]:
        """Selection of the decode rows and of the others, into the rows of one tensor [T, K]."""
        first, requests, calls = self.decode_rows, self.case.decode_requests, []
        both = bool(first) and first < self.rows
        shared = {"k_cache": self.block_keys, "token_topk": BUDGET, "compress_ratio": BLOCK}
        if first:
            rows = {
                "q": index_q[:first], "page_table": self.page_table[:requests], "visible_blocks": self.visible[:first],
                "decode_query_len": first // requests, "block_indices": block_ids[:first],
            }  # fmt: skip
            calls.append(
                Call("qsa_select_paged_decode", "decode rows" if both else "", shared | rows, ("block_indices",))
            )
        if first < self.rows:
            rows = {
                "q": index_q[first:], "page_table": self.page_table[requests:],
                "query_start_loc": self.query_starts[requests:], "visible_blocks": self.visible[first:],
                "max_query_len": max(rows for _, rows in self.case.requests), "block_indices": block_ids[first:],
                "max_seq_len": max(before + rows for before, rows in self.case.requests),
            }  # fmt: skip
            calls.append(Call("qsa_select_paged_prefill", "chunks" if both else "", shared | rows, ("block_indices",)))
        return calls

    def expand_call(self, block_ids: torch.Tensor) -> Call:
        """Token ids of the blocks of each row."""
        out = torch.full((self.rows, BUDGET + BLOCK), -7, dtype=torch.int32, device=self.device)
        arguments = {
            "block_indices": block_ids, "query_positions": self.logical, "visible_blocks": self.visible,
            "compress_ratio": BLOCK, "token_topk": BUDGET, "out": out,
        }  # fmt: skip
        return Call("expand_qsa_block_indices", "", arguments, ("out",))

    def attend_call(self, q: torch.Tensor, gate: torch.Tensor, tokens: torch.Tensor) -> Call:
        """Attention over the token ids of each row."""
        k, v = self.kv.split(HEAD_DIM, dim=-1)
        arguments = {
            "q": q, "k_cache": k, "v_cache": v, "logical_indices": tokens, "block_table": self.page_table,
            "token_to_req": self.row_requests.to(torch.int32),
            "use_prefill_config": self.case.decode_requests < self.requests, "out": torch.zeros_like(q),
            "k_scale": self.k_scale, "v_scale": self.v_scale, "output_gate": gate,
        }  # fmt: skip
        return Call("qsa_sparse_paged_attention", "", arguments, ("out",))

    def compress_call(self) -> Call:
        """Means of blocks, as vLLM's unfused path has them."""
        rope_cache = self.ring[..., INDEX_DIM:].view(torch.int64) if self.case.mrope else None
        arguments = {
            "raw_keys": self.index_k.reshape(-1, 1, INDEX_DIM),
            "raw_positions": self.rope_of(self.logical).t().contiguous()[:, None],
            "compressor_state_cache": self.ring[..., :INDEX_DIM], "compressor_state_block_table": self.ring_table,
            "token_to_req": self.row_requests.to(torch.int32), "query_start_loc": self.query_starts,
            "logical_positions": self.logical, "compressed_slots": self.closed_slots, "compress_ratio": BLOCK,
            "rope_cache": rope_cache,
        }  # fmt: skip
        return Call("qsa_compress_groups_with_ratio", "", arguments)

    def store_calls(self) -> list[Call]:
        """Rows of the unfused path into their caches: bf16 pooled keys, and rotary positions behind raw keys."""
        nowhere = self.pages * (PAGE // BLOCK) + self.logical  # beyond the cache: not to be written, like -1
        slots = torch.where((self.closed_slots < 0) & (self.logical % 2 == 0), nowhere, self.closed_slots)
        rows = self.randn(self.rows, 1, INDEX_DIM)
        pooled = {"cache": self.block_keys, "slot_mapping": slots, "rows": rows}
        calls = [Call("qsa_store_cache_rows", "pooled keys", pooled, ("cache",))]
        if self.case.mrope:
            cache = self.ring[..., INDEX_DIM:].view(torch.int64).contiguous()
            three = self.rope_of(self.logical).t().contiguous()[:, None]
            positions = {"cache": cache, "slot_mapping": self.ring_slots, "rows": three}
            calls.append(Call("qsa_store_cache_rows", "positions", positions, ("cache",)))
        return calls

    def unset_ids(self) -> torch.Tensor:
        """[T, K] int32 block ids that no operator has written."""
        return torch.full((self.rows, TOPK), -7, dtype=torch.int32, device=self.device)
