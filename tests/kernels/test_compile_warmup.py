"""After `warmup` no step of serving needs a variant of a kernel that is not compiled yet.

Launches are recorded as the launchers make them for an H200, none runs. A variant is what Triton looks up before it
compiles: kernel, types, constants, what it assumes of numbers and addresses, options.
"""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from flashqsa import LayerCache, QSAConfig, RopeTable, StepPlan, warmup
from flashqsa.attention import attend, attend_tokens, triton_attend
from flashqsa.plan import plan_step
from flashqsa.plan.build import ROW_TENSORS
from flashqsa.preparation import NormWeights, prepare
from flashqsa.results import Prepared
from flashqsa.selection import expand_tokens, select_blocks
from flashqsa.testing.compiling import Variant, recorded_variants

BF16, FP16, FP32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
INT32 = torch.int32
MULTIPROCESSORS = 132

RELEASED = QSAConfig(
    hidden_size=2560, q_heads=24, kv_heads=2, head_dim=256, index_heads=4, index_head_dim=128, budget_tokens=2048,
    block_tokens=4, rotary_dim=64, mrope_section=(11, 11, 10), max_positions=262_144,
)  # fmt: skip


@pytest.fixture
def as_on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dispatch on CPU tensors as on one GPU of compute capability 9.0, where launches do not fill any tensor."""
    answers: dict[str, Callable[..., Any]] = {
        "takes_kernels": lambda device: True,
        "triton_refusal": lambda device: None,
        "values_are_checked": lambda device: False,
        "multiprocessors": lambda device: MULTIPROCESSORS,
        "_is_hopper": lambda device: True,
    }
    for module in ("flashqsa.attention.triton_rows", "flashqsa.selection.triton_select"):
        importlib.import_module(module)
    for name, module in list(sys.modules.items()):
        for answered, answer in answers.items():
            if name.startswith("flashqsa.") and hasattr(module, answered):
                monkeypatch.setattr(module, answered, answer)

    def gluon_serves(q: Any, cache: Any, plan: Any, tokens: Any, softmax_scale: float) -> bool:
        from flashqsa.attention.gluon_tiles import gluon_tiles_refusal

        return gluon_tiles_refusal(q, cache, plan, tokens, softmax_scale, parts=1) is None

    monkeypatch.setattr(triton_attend, "_gluon_serves", gluon_serves)


@dataclass(frozen=True)
class Engine:
    """An engine and its bounds; what it serves is random.

    Attributes:
        name: Name of the case.
        config: The checkpoint.
        page_tokens: Tokens of a page; None for requests in one piece.
        max_requests: Requests at most.
        max_rows: Rows at most.
        max_seq_len: Tokens of a request at most.
        dtype: Model dtype.
        kv_dtype: Dtype of K and V.
        index_dtype: Dtype of block keys.
        forms: As in `warmup`.
        packed: Whether K and V are halves of one tensor, as views with strides of their own.
    """

    name: str
    config: QSAConfig = RELEASED
    page_tokens: int | None = 64
    max_requests: int = 256
    max_rows: int = 8192
    max_seq_len: int = 262_144
    dtype: torch.dtype = BF16
    kv_dtype: torch.dtype = BF16
    index_dtype: torch.dtype = BF16
    forms: tuple[str, ...] = ()
    packed: bool = False

    def cache(self) -> LayerCache:
        """Caches of few pages, as large pools have them."""
        config, page = self.config, self.page_tokens or 64
        shape = (3, page, config.kv_heads, config.head_dim)
        if self.packed:
            both = torch.zeros(3, config.kv_heads, page, 2 * config.head_dim, dtype=self.kv_dtype).transpose(1, 2)
            k, v = both[..., : config.head_dim], both[..., config.head_dim :]
        else:
            k, v = torch.zeros(2, *shape, dtype=self.kv_dtype)
        scale = torch.ones(48)[5:6] if self.kv_dtype == E4M3 else None
        return LayerCache(
            k, v, torch.zeros(3, page // config.block_tokens, config.index_head_dim, dtype=self.index_dtype),
            torch.zeros(3, 8, config.index_head_dim, dtype=self.dtype), torch.zeros(3, 8, 3, dtype=torch.int64),
            k_scale=scale, v_scale=scale,
        )  # fmt: skip

    def warm(self, **changes: Any) -> set[Variant]:
        """Variants that `warmup` compiles."""
        bounds = {
            "max_requests": self.max_requests, "max_rows": self.max_rows, "max_seq_len": self.max_seq_len,
            "forms": self.forms, "paged": self.page_tokens is not None, "cache": self.cache(),
        }  # fmt: skip
        with recorded_variants() as variants:
            report = warmup(self.config, **{**bounds, **changes})
        assert report.refusals == {}
        assert report.steps > 100
        return variants


ENGINES = (
    Engine("released"),
    Engine("rank of four, small", replace(RELEASED, q_heads=6, kv_heads=1), 848, max_requests=24, max_rows=2048),
    Engine("1M, packed fp8", max_seq_len=1 << 20, kv_dtype=E4M3, index_dtype=E4M3, packed=True,
           forms=("e4m3_queries",)),
    Engine("contiguous, fp16", replace(RELEASED, mrope_section=None), None, max_requests=7, max_seq_len=40_000,
           dtype=FP16, kv_dtype=FP16, index_dtype=FP16),
    Engine("everything", max_requests=100, max_rows=3000, forms=("row_exact", "shards", "token_lists")),
    Engine("odd and fp32",
           QSAConfig(512, 10, 2, 96, 3, 64, 136, 8, 32), 16, max_requests=33, max_rows=300, max_seq_len=5000,
           dtype=FP32, kv_dtype=FP32, index_dtype=FP32, forms=("row_exact",)),
)  # fmt: skip


def _somewhere(rng: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """A copy that begins anywhere in a larger buffer, as rows of engines' buffers do."""
    first = rng.randrange(8)
    buffer = tensor.new_zeros(tensor.shape[0] + first, *tensor.shape[1:])
    buffer[first:] = tensor
    return buffer[first:]


@dataclass(frozen=True)
class Served:
    """One step of serving.

    Attributes:
        rows: Rows of each request.
        padding: Rows of padding.
        max_query_len: Bound on the rows of a request.
        max_seq_len: Bound on lengths.
    """

    rows: list[int]
    padding: int
    max_query_len: int
    max_seq_len: int

    @classmethod
    def draw(cls, rng: random.Random, engine: Engine) -> Served:
        """Decode, verification, chunks of prompts, or all of them together."""
        requests = min(rng.choice([1, 2, rng.randint(1, engine.max_requests), engine.max_requests]), engine.max_rows)
        kind = rng.choice(["decode", "verify", "prefill", "mixed"])
        if kind == "decode":
            rows = [1] * requests
        elif kind == "verify":
            rows = [rng.randint(2, 16)] * max(1, min(requests, engine.max_rows // 16))
        else:
            rows = [1] * (requests - 1) if kind == "mixed" else []
            while sum(rows) < engine.max_rows and len(rows) < engine.max_requests:
                rows.append(rng.randint(1, rng.choice([20, 200, engine.max_rows])))
                if rng.random() < 0.4:
                    break
            rows = rows or [1]
            rows[-1] = max(1, rows[-1] - max(0, sum(rows) - engine.max_rows))
        longest = max(rows)
        limit = rng.choice([engine.max_seq_len, engine.max_seq_len, 3 * engine.config.budget_tokens, longest])
        return cls(
            rows=rows, padding=rng.choice([0, 0, rng.randint(0, max(0, engine.max_rows - sum(rows)))]),
            max_query_len=longest,
            max_seq_len=max(longest, rng.choice([limit, rng.randint(1, limit)])),
        )  # fmt: skip

    def plan(self, rng: random.Random, engine: Engine, cache: LayerCache) -> StepPlan:
        """Its plan, from tensors that begin anywhere, with a page table of any width."""
        requests, total, config = len(self.rows), sum(self.rows) + self.padding, engine.config
        starts = torch.tensor([0, *self.rows]).cumsum(0).to(INT32)
        numbers = torch.zeros(requests, dtype=INT32)
        starts, lens, rings = (_somewhere(rng, x) for x in (starts, numbers, numbers))
        bounds = {
            "block_tokens": config.block_tokens, "topk_blocks": config.topk_blocks,
            "max_query_len": self.max_query_len, "max_seq_len": self.max_seq_len, "ring_ids": rings, "ring_tokens": 8,
        }  # fmt: skip
        if engine.page_tokens is None:
            slots = [_somewhere(rng, torch.zeros(requests, dtype=torch.int64)) for _ in range(2)]
            named = {"first_block_slots": slots[1]} if rng.random() < 0.5 else {}
            return plan_step(
                starts, lens, None, page_tokens=None, first_slots=slots[0], num_rows=total, **named, **bounds
            )
        width = rng.choice([1, 16, 17, rng.randint(1, 5000)])
        table = _somewhere(rng, torch.zeros(1, width, dtype=INT32)).expand(requests, -1).contiguous()
        paged = {"page_tokens": engine.page_tokens, "num_pages": rng.choice([None, 3])}
        if rng.random() < 0.3:  # an engine that has planned itself
            return StepPlan.from_tensors(
                query_starts=starts, seq_lens=lens, page_table=table, **paged, **bounds,
                **{name: _somewhere(rng, torch.zeros(total, dtype=dtype)) for name, dtype in ROW_TENSORS.items()},
            )  # fmt: skip
        plan = plan_step(starts, lens, table, num_rows=total, **paged, **bounds)
        if rng.random() < 0.3:
            plan = plan_step(starts, lens, table, num_rows=total, out=plan, **paged, **bounds)
        return plan

    def serve(self, rng: random.Random, engine: Engine, cache: LayerCache) -> None:
        """All stages, as a layer calls them."""
        plan, config = self.plan(rng, engine, cache), engine.config
        total, dim, index_dim = plan.num_rows, config.head_dim, config.index_head_dim

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=engine.dtype)

        q_gate, index_qk = zeros(total, config.q_heads, 2 * dim), zeros(total, config.index_heads + 1, index_dim)
        positions = torch.zeros(3, total, dtype=torch.int64) if rng.random() < 0.5 else torch.zeros(total).long()
        out = None
        if "e4m3_queries" in engine.forms and rng.random() < 0.5:
            index_q = index_qk.new_empty(index_qk[:, :-1].shape, dtype=E4M3)
            out = Prepared(index_q, q_gate.new_empty(q_gate[..., :dim].shape), q_gate[..., dim:])
        prepared = prepare(
            q_gate, zeros(total, config.kv_heads, dim), zeros(total, config.kv_heads, dim), index_qk, positions,
            RopeTable(torch.zeros(9, config.rotary_dim), config.mrope_section),
            NormWeights(zeros(dim), zeros(dim), zeros(index_dim), zeros(index_dim)), cache, plan, out=out,
            backend="triton",
        )  # fmt: skip
        scores = "shards" in engine.forms and rng.random() < 0.5
        selection = select_blocks(prepared.index_q, cache, plan, return_scores=scores, backend="triton")
        if rng.random() < 0.3:
            selection = replace(
                selection,
                **{n: _somewhere(rng, getattr(selection, n)) for n in ("block_counts", "visible_blocks")},
            )
        if scores:
            attend(
                prepared.q, cache, selection, plan, include_tail=rng.random() < 0.5, out_dtype=FP32, return_lse=True,
                backend="triton",
            )  # fmt: skip
        elif "token_lists" in engine.forms and rng.random() < 0.5:
            token_ids = expand_tokens(selection, plan)
            attend_tokens(prepared.q, cache, token_ids, plan, gate=prepared.gate, backend="triton")
        else:
            row_exact = "row_exact" in engine.forms and rng.random() < 0.5
            attend(prepared.q, cache, selection, plan, gate=prepared.gate, row_exact=row_exact, backend="triton")


def _serve(engine: Engine, steps: int, seed: int) -> set[Variant]:
    rng, cache = random.Random(seed), engine.cache()
    with recorded_variants() as variants:
        for _ in range(steps):
            Served.draw(rng, engine).serve(rng, engine, cache)
    return variants


def _missing(served: set[Variant], warmed: set[Variant]) -> list[str]:
    """What sets each variant that was not warmed apart from the warmed one that is nearest to it."""
    lines = set()
    for kernel, fixed in served - warmed:
        known = [other for name, other in warmed if name == kernel]
        nearest = min((fixed - other for other in known), key=len, default=fixed)
        lines.add(f"{kernel}: " + ", ".join(f"{name} {value}" for name, value in sorted(nearest, key=str)))
    return sorted(lines)


@pytest.mark.usefixtures("as_on_an_h200")
@pytest.mark.parametrize("engine", ENGINES, ids=[engine.name for engine in ENGINES])
def test_serving_reaches_no_variant_that_was_not_warmed(engine: Engine) -> None:
    warmed = engine.warm()
    served = _serve(engine, 200, seed=sum(map(ord, engine.name)))
    assert {"_plan_step_kernel", "_prepare_kernel", "_score_blocks_kernel", "_top_blocks_kernel"} <= dict(served).keys()
    assert _missing(served, warmed) == []


@pytest.mark.usefixtures("as_on_an_h200")
@pytest.mark.parametrize(
    ("smaller", "kernel"),
    [
        ({"max_requests": 8, "max_rows": 128}, "_top_blocks_kernel"),
        ({"max_seq_len": 8192}, "_score_blocks_kernel"),
        ({"forms": ()}, "_merge_rows_kernel"),
    ],
)
def test_beyond_its_bounds_serving_reaches_more(smaller: dict[str, Any], kernel: str) -> None:
    """The comparison can fail: what a warm-up of less leaves out is served and found."""
    engine = ENGINES[4]
    missing = _missing(_serve(engine, 100, seed=11), engine.warm(**smaller))
    assert any(line.startswith(kernel) for line in missing), missing


@pytest.mark.usefixtures("as_on_an_h200")
def test_variants_are_few() -> None:
    """At released shapes: a compilation takes a second or two."""
    assert len(ENGINES[0].warm()) <= 60
