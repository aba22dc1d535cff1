"""How a soak runs the layers of a step: inputs for the system and for the oracle, eagerly or as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from flashqsa.cache import LayerCache, PagedPool
from flashqsa.config import QSAConfig
from flashqsa.plan import StepPlan
from flashqsa.preparation import NormWeights
from flashqsa.results import Selection
from flashqsa.rope import RopeTable
from flashqsa.testing.alone import LayerInputs
from flashqsa.testing.truth import randn, stream

Rows = tuple[torch.Tensor, Selection]
Stages = Callable[[LayerInputs, LayerCache, StepPlan, Selection | None], Rows]
"""One layer of one step: writes the caches, and gives the output [T, Hq, D] and the selection, the one given if any."""

CPU = torch.device("cpu")


class SoakLayers:
    """The layers of a soak: their weights, random projections, and what runs them.

    Args:
        stages: Runs one layer of a step.
        config: Shapes of the layers.
        pool: Owner of the caches.
        seed: Decides weights and projections.
        positions: Rotary positions that a request may have.
        dtype: Model dtype.

    Attributes:
        replays: How many steps a CUDA graph ran.
    """

    def __init__(
        self, stages: Stages, config: QSAConfig, pool: PagedPool, *, seed: int, positions: int, dtype: torch.dtype
    ) -> None:
        self.stages, self.config, self.pool, self.dtype = stages, config, pool, dtype
        self.device, self.numbers, self.replays = pool.caches[0].device, stream(seed), 0
        self.graph: _LayersGraph | None = None
        self.norms = [self._norms() for _ in pool.layer_ids]
        self.rope = RopeTable.build(
            config.rope_parameters, rotary_dim=config.rotary_dim, num_positions=positions,
            mrope_section=config.mrope_section, dtype=dtype,
        )  # fmt: skip
        self.device_rope = replace(self.rope, cos_sin=self.rope.cos_sin.to(self.device))
        self.device_norms = [
            replace(norms, **{name: getattr(norms, name).to(self.device) for name in ("q", "k", "index_q", "index_k")})
            for norms in self.norms
        ]

    def _norms(self) -> NormWeights:
        c = self.config
        dims = (c.head_dim, c.head_dim, c.index_head_dim, c.index_head_dim)
        q, k, index_q, index_k = (randn(self.numbers, self.dtype, n, std=0.2) for n in dims)
        return NormWeights(q=q, k=k, index_q=index_q, index_k=index_k, eps=c.norm_eps)

    def draw(self, layer: int, live_rows: int, plan: StepPlan) -> LayerInputs:
        """Random projections of a step on the CPU, where the oracle computes; rows of padding are NaN."""
        c, rows = self.config, plan.num_rows

        def projected(*shape: int) -> torch.Tensor:
            drawn = torch.full((rows, *shape), float("nan"), dtype=self.dtype)
            drawn[:live_rows] = randn(self.numbers, self.dtype, live_rows, *shape)
            return drawn

        time = plan.positions.to(CPU).clamp(min=0)
        positions = torch.stack([time + 3, time % 29, 20 + time % 31])
        kv = (c.kv_heads, c.head_dim)
        return LayerInputs(
            projected(c.q_heads, 2 * c.head_dim), projected(*kv), projected(*kv),
            projected(c.index_heads + 1, c.index_head_dim), positions, self.rope, self.norms[layer],
        )  # fmt: skip

    def run(
        self, plan: StepPlan, drawn: Sequence[LayerInputs], *, reused: Sequence[Selection] | None, graphed: bool
    ) -> list[Rows]:
        """The first layers of a step, one for each of `drawn`.

        Args:
            plan: The step.
            drawn: What `draw` gave for each layer.
            reused: Selections to take, one a layer, or None to select.
            graphed: Run all layers as one CUDA graph, captured at the first such step. Its plan must then always be
                the same one, refilled.
        """
        inputs = [self._on_device(layer, given) for layer, given in enumerate(drawn)]
        if graphed:
            if self.graph is None:
                self.graph = _LayersGraph(self.stages, self.pool.caches, plan, inputs)
            self.replays += 1
            return self.graph.replay(plan, inputs)
        selections: Sequence[Selection | None] = [None] * len(inputs) if reused is None else reused
        return [
            self.stages(given, cache, plan, selection)
            for given, cache, selection in zip(inputs, self.pool.caches, selections, strict=False)
        ]

    def _on_device(self, layer: int, drawn: LayerInputs) -> LayerInputs:
        parts = ("q_gate", "k", "v", "index_qk", "rope_positions")
        moved = {name: getattr(drawn, name).to(self.device) for name in parts}
        return replace(drawn, **moved, rope=self.device_rope, norms=self.device_norms[layer])


class _LayersGraph:
    """A captured step: all layers, at addresses that do not change."""

    def __init__(
        self, stages: Stages, caches: Sequence[LayerCache], plan: StepPlan, inputs: Sequence[LayerInputs]
    ) -> None:
        self.plan, self.inputs = plan, inputs

        def step() -> list[Rows]:
            return [stages(given, cache, plan, None) for given, cache in zip(inputs, caches, strict=True)]

        aside = torch.cuda.Stream(plan.device)  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream(plan.device))
        with torch.cuda.stream(aside):  # compiles kernels and allocates scratch; writes what the replay writes again
            step()
        torch.cuda.current_stream(plan.device).wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results = step()

    def replay(self, plan: StepPlan, inputs: Sequence[LayerInputs]) -> list[Rows]:
        """Run the step on other projections. The results are overwritten by the next replay."""
        assert plan is self.plan
        for target, source in zip(self.inputs, inputs, strict=True):
            for name in ("q_gate", "k", "v", "index_qk", "rope_positions"):
                getattr(target, name).copy_(getattr(source, name))
        self.graph.replay()
        return self.results
