"""A trial of each stage on the device: the backend that it takes against the definition, on a small step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch

from flashqsa import attend, plan_step, prepare, select_blocks
from flashqsa.cache import CacheLayout, LayerCache
from flashqsa.commands.doctor_backends import empty_cache, taken_backend
from flashqsa.commands.doctor_findings import Finding
from flashqsa.config import QSAConfig
from flashqsa.plan import StepPlan
from flashqsa.preparation import NormWeights
from flashqsa.results import Selection
from flashqsa.rope import RopeTable

ROWS = 4
SPARE_BLOCKS = 8
"""Blocks in sight beyond the budget, so that something has to be left out."""

ROUNDINGS = 8
"""Roundings of the model dtype by which two backends may differ where values are not compared exactly."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One stage, tried.

    Attributes:
        stage: One of `flashqsa.backends.STAGES`.
        backend: What ran.
        works: Whether it ran and agreed with the definition.
        told: One line about it.
    """

    stage: str
    backend: str
    works: bool
    told: str


def try_stages(
    config: QSAConfig,
    layout: CacheLayout,
    dtype: torch.dtype,
    device: torch.device,
    stages: Mapping[str, Mapping[str, str]],
) -> tuple[Trial, ...]:
    """Runs each stage on a few rows of one request that sees a little more than the budget.

    Args:
        config: Constants of the checkpoint.
        layout: Its caches.
        dtype: The model dtype.
        device: Where to run.
        stages: What each stage takes, as `explain_stages` says.
    """
    step = _Step(config, layout, dtype, device)
    runs: dict[str, Callable[[str], str | None]] = {
        "prepare": step.try_prepare,
        "select_blocks": step.try_select,
        "attend": step.try_attend,
    }
    trials = []
    for stage, run in runs.items():
        backend = taken_backend(dict(stages[stage]))
        try:
            differs = run(backend)
        except Exception as error:  # a kernel that does not compile fails in many ways; to tell of it is the purpose
            differs = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        told = differs or "agrees with the definition"
        trials.append(Trial(stage=stage, backend=backend, works=differs is None, told=told))
    return tuple(trials)


def trial_findings(trials: tuple[Trial, ...]) -> list[Finding]:
    """What to do about stages that do not work."""
    return [
        Finding(
            problem=True,
            about=f"{trial.stage} on backend {trial.backend}",
            told=trial.told,
            remedy="a kernel needs a C compiler and a writable Triton cache; if both are there, please report it"
            if trial.backend == "triton"
            else "please report it with the output of flashqsa doctor --json",
        )
        for trial in trials
        if not trial.works
    ]


class _Step:
    """Random inputs of one step, and what each stage makes of them."""

    def __init__(self, config: QSAConfig, layout: CacheLayout, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.generator = torch.Generator().manual_seed(0)
        tokens = config.budget_tokens + SPARE_BLOCKS * config.block_tokens
        pages = -(-tokens // layout.page_tokens)
        self.rows = min(ROWS, tokens)
        self.tokens = tokens
        self.cache = empty_cache(config, layout, device, pages=pages)
        self._fill(self.cache.k_pages, self.cache.v_pages)
        self._fill(self.cache.block_keys, whole=True)  # products of whole numbers are exact: so must be what is chosen
        self.plan = self._plan(pages, layout)

    def try_prepare(self, backend: str) -> str | None:
        config, dim = self.config, self.config.head_dim
        rope = RopeTable.build(
            config.rope_parameters,
            rotary_dim=config.rotary_dim,
            num_positions=self.tokens,
            max_positions=config.max_positions,
            mrope_section=config.mrope_section,
            device=self.device,
        )
        q, k, index_q, index_k = (self._draw(n).mul_(0.1) for n in (dim, dim, *[config.index_head_dim] * 2))
        norms = NormWeights(q=q, k=k, index_q=index_q, index_k=index_k, eps=config.norm_eps)
        inputs = (
            self._draw(self.rows, config.q_heads, 2 * dim),
            self._draw(self.rows, config.kv_heads, dim),
            self._draw(self.rows, config.kv_heads, dim),
            self._draw(self.rows, config.index_heads + 1, config.index_head_dim),
        )
        positions = torch.arange(self.tokens - self.rows, self.tokens, device=self.device)
        results = []
        for name in (backend, "reference"):
            cache = _copy(self.cache)
            made = prepare(*inputs, positions, rope, norms, cache, self.plan, backend=name)
            results.append((made.q, made.index_q, cache.k_pages, cache.v_pages, cache.block_keys))
        names = ("q", "index_q", "keys", "values", "block keys")
        return next(filter(None, map(self._differs, names, *results)), None)

    def try_select(self, backend: str) -> str | None:
        index_q = self._draw(self.rows, self.config.index_heads, self.config.index_head_dim, whole=True)
        chosen = select_blocks(index_q, self.cache, self.plan, backend=backend)
        expected = select_blocks(index_q, self.cache, self.plan, backend="reference")
        if torch.equal(chosen.block_ids, expected.block_ids):
            return None
        rows = int((chosen.block_ids != expected.block_ids).any(dim=1).sum())
        return f"{rows} of {self.rows} rows select other blocks than the definition"

    def try_attend(self, backend: str) -> str | None:
        q = self._draw(self.rows, self.config.q_heads, self.config.head_dim)
        gate = self._draw(self.rows, self.config.q_heads, self.config.head_dim)
        made, expected = (
            cast(torch.Tensor, attend(q, self.cache, self._every_other_block(), self.plan, gate=gate, backend=name))
            for name in (backend, "reference")
        )
        return self._differs("the output", made, expected)

    def _every_other_block(self) -> Selection:
        visible, topk = self.plan.visible_blocks, self.plan.topk_blocks
        ids = torch.arange(topk, dtype=torch.int32, device=self.device)[None] * 2
        ids = torch.where(ids < visible[:, None], ids, -1)
        return Selection(
            block_ids=ids,
            block_counts=(ids >= 0).sum(dim=1, dtype=torch.int32),
            scores=None,
            visible_blocks=visible,
            request_ids=self.plan.request_ids,
        )

    def _differs(self, name: str, made: torch.Tensor | None, expected: torch.Tensor | None) -> str | None:
        assert made is not None
        assert expected is not None
        made, expected = made.float(), expected.float()
        most = float((made - expected).abs().max())
        eps = torch.finfo(self.dtype).eps if made.numel() else 0.0
        allowed = ROUNDINGS * eps * max(1.0, float(expected.abs().max()))
        return None if most <= allowed else f"{name} differ from the definition by {most:.3g}, more than {allowed:.3g}"

    def _draw(self, *shape: int, whole: bool = False) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator)
        return (values.round() if whole else values).to(device=self.device, dtype=self.dtype)

    def _fill(self, *caches: torch.Tensor | None, whole: bool = False) -> None:
        for cache in caches:
            assert cache is not None
            cache.copy_(self._draw(*cache.shape, whole=whole))

    def _plan(self, pages: int, layout: CacheLayout) -> StepPlan:
        def numbers(*values: int) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        order = torch.randperm(pages, generator=self.generator).to(torch.int32)
        return plan_step(
            numbers(0, self.rows),
            numbers(self.tokens),
            order[None].to(self.device),
            page_tokens=layout.page_tokens,
            block_tokens=layout.block_tokens,
            topk_blocks=self.config.topk_blocks,
            max_query_len=self.rows,
            max_seq_len=self.tokens,
            num_pages=pages,
            ring_ids=numbers(0),
            ring_tokens=layout.ring_tokens,
            num_rows=self.rows,
        )


def _copy(cache: LayerCache) -> LayerCache:
    names = ("k_pages", "v_pages", "block_keys", "ring", "ring_positions")
    return replace(cache, **{name: getattr(cache, name).clone() for name in names})
