"""Steps of padding through all stages: kernels are launched at the shapes of a step, and find nothing to do."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from flashqsa.attention import attend, attend_tokens
from flashqsa.cache import LayerCache
from flashqsa.checks import FP8
from flashqsa.config import QSAConfig
from flashqsa.errors import UnsupportedError
from flashqsa.plan import StepPlan, plan_step
from flashqsa.preparation import NormWeights, prepare
from flashqsa.results import Prepared, Selection
from flashqsa.rope import RopeTable
from flashqsa.selection import expand_tokens, select_blocks
from flashqsa.warming.shapes import StepShape


@dataclass(frozen=True)
class Inputs:
    """What a layer's projections would hand over, zeros, for the largest step; tables and weights beside them."""

    q_gate: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index_qk: torch.Tensor
    rope_positions: torch.Tensor
    rope: RopeTable
    norms: NormWeights

    @classmethod
    def make(cls, config: QSAConfig, cache: LayerCache, rope: RopeTable | None, max_rows: int) -> Inputs:
        """Inputs of `max_rows` rows, in the dtype of the raw index keys."""
        device, dim, index_dim = cache.device, config.head_dim, config.index_head_dim
        dtype = _model_dtype(cache)

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        if rope is None:
            rope = RopeTable.build(
                config.rope_parameters, rotary_dim=config.rotary_dim, num_positions=1,
                max_positions=config.max_positions, mrope_section=config.mrope_section, device=device,
            )  # fmt: skip
        return cls(
            q_gate=zeros(max_rows, config.q_heads, 2 * dim),
            k=zeros(max_rows, config.kv_heads, dim),
            v=zeros(max_rows, config.kv_heads, dim),
            index_qk=zeros(max_rows, config.index_heads + 1, index_dim),
            rope_positions=torch.zeros(max_rows, dtype=torch.int64, device=device),
            rope=rope,
            norms=NormWeights(zeros(dim), zeros(dim), zeros(index_dim), zeros(index_dim), eps=config.norm_eps),
        )


def _model_dtype(cache: LayerCache) -> torch.dtype:
    """The dtype of raw index keys; without a ring that of the first cache which is no float8."""
    tensors = (cache.ring, cache.k_pages, cache.block_keys)
    return next((x.dtype for x in tensors if x is not None and x.dtype != FP8), torch.bfloat16)


@dataclass
class PaddingServer:
    """Serves steps whose rows are all padding.

    Attributes:
        config: The checkpoint's constants.
        cache: Caches of a layer, neither read nor written.
        inputs: Inputs for the largest step.
        paged: Whether requests lie in pages.
        forms: As in `warmup`.
        refusals: Stage to why kernels refuse it.
    """

    config: QSAConfig
    cache: LayerCache
    inputs: Inputs
    paged: bool
    forms: Collection[str]
    refusals: dict[str, str] = field(default_factory=dict)

    def serve(self, shape: StepShape) -> None:
        """One step, in every form."""
        plan = self._plan(shape)
        for e4m3 in self._either("e4m3_queries"):
            prepared = self._prepare(plan, e4m3)
            self._attend(prepared, self._select(prepared, plan), plan)

    def _plan(self, shape: StepShape) -> StepPlan:
        """All rows lie past the last request's, and no request has a token: nothing is read or written."""
        device, requests, ring = self.cache.device, shape.requests, self.cache.ring
        nothing = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        table = nothing[:requests, None].clone() if self.paged else None
        first_slots = None if self.paged else torch.zeros(requests, dtype=torch.int64, device=device)
        options: dict[str, Any] = {
            "page_tokens": self.cache.k_pages.shape[1] if self.paged else None,
            "block_tokens": self.config.block_tokens,
            "topk_blocks": self.config.topk_blocks,
            "max_query_len": shape.rows,
            "max_seq_len": shape.max_seq_len,
            "first_slots": first_slots,
            "ring_ids": None if ring is None else nothing[:requests].clone() - 1,
            "ring_tokens": None if ring is None else ring.shape[1],
            "num_rows": requests * shape.rows + shape.padding,
        }
        lens = torch.zeros(requests, dtype=torch.int32, device=device)
        plan = plan_step(nothing, lens, table, **options)
        if first_slots is not None:  # the same with block slots that the caller names
            plan = plan_step(nothing, lens, table, first_block_slots=first_slots, **options)
        return plan

    def _prepare(self, plan: StepPlan, e4m3: bool) -> Prepared:
        rows, dim, given = plan.num_rows, self.config.head_dim, self.inputs
        q_gate, index_qk = given.q_gate[:rows], given.index_qk[:rows]
        out = None
        if e4m3:
            index_q = index_qk.new_empty(index_qk[:, :-1].shape, dtype=FP8)
            out = Prepared(index_q, q_gate.new_empty(q_gate[..., :dim].shape), q_gate[..., dim:])
        prepared: Prepared | None = self._run(
            "prepare", prepare, q_gate, given.k[:rows], given.v[:rows], index_qk, given.rope_positions[:rows],
            given.rope, given.norms, self.cache, plan, out=out,
        )  # fmt: skip
        if prepared is not None:
            return prepared
        index_q = index_qk[:, :-1].contiguous()
        return Prepared(index_q.to(FP8) if e4m3 else index_q, q_gate[..., :dim].contiguous(), q_gate[..., dim:])

    def _select(self, prepared: Prepared, plan: StepPlan) -> Selection:
        selection: Selection | None = None
        for scores in self._either("shards"):
            selection = self._run(
                "select_blocks", select_blocks, prepared.index_q, self.cache, plan, return_scores=scores
            )
        if selection is not None:
            return selection
        numbers = torch.zeros(plan.num_rows, dtype=torch.int32, device=plan.device)
        ids = numbers[:, None].expand(-1, plan.topk_blocks).contiguous()
        return Selection(ids, numbers, None, numbers, plan.request_ids, self.cache.layer_id)

    def _attend(self, prepared: Prepared, selection: Selection, plan: StepPlan) -> None:
        q, cache, gate = prepared.q, self.cache, prepared.gate
        for row_exact in self._either("row_exact"):
            self._run("attend", attend, q, cache, selection, plan, gate=gate, row_exact=row_exact)
        for tail in (False, True) if "shards" in self.forms else ():
            partial = {"include_tail": tail, "out_dtype": torch.float32, "return_lse": True}
            self._run("attend", attend, q, cache, selection, plan, **partial)
        if "token_lists" in self.forms:
            self._run("attend", attend_tokens, q, cache, expand_tokens(selection, plan), plan, gate=gate)

    def _either(self, form: str) -> tuple[bool, ...]:
        """Without a form, and with it if it is asked for."""
        return (False, True) if form in self.forms else (False,)

    def _run(self, stage: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What a stage returns; None where kernels refuse it."""
        if stage in self.refusals:
            return None
        try:
            return call(*args, backend="triton", **options)
        except UnsupportedError as error:
            self.refusals[stage] = str(error)
            return None
