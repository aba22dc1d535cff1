"""`soak`: a random scheduler over a `PagedPool`, every request compared with itself alone after every step."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from flashqsa.attention import attend
from flashqsa.cache import LayerCache, PagedPool, PoolFullError, Prefix
from flashqsa.config import QSAConfig
from flashqsa.plan import StepPlan
from flashqsa.preparation import NormWeights
from flashqsa.results import Selection
from flashqsa.rope import RopeTable
from flashqsa.selection import select_blocks
from flashqsa.testing.alone import LayerInputs, RequestAlone
from flashqsa.testing.truth import randn, stream

Stages = Callable[[LayerInputs, LayerCache, StepPlan, Selection | None], tuple[torch.Tensor, Selection]]
"""One layer of one step: writes the caches, and gives the output [T, Hq, D] and the selection, the one given if any."""

MAX_CHUNK, MAX_DRAFTS, MAX_PREFIXES, MAX_ROWS = 700, 7, 3, 64
SOAK_CONFIG = QSAConfig(
    hidden_size=32, q_heads=2, kv_heads=1, head_dim=16, index_heads=2, index_head_dim=16, budget_tokens=32,
    block_tokens=4, rotary_dim=8, mrope_section=(2, 1, 1), qsa_layer_ids=(1, 3),
)  # fmt: skip
"""Two small layers; a row selects 8 blocks of 4 tokens."""


@dataclass(frozen=True)
class SoakReport:
    """What a soak did.

    Attributes:
        steps: Steps of the scheduler.
        rows: Rows that were compared, in every layer.
        actions: How often each action was done; ``full`` counts calls that the pool refused for lack of room.
    """

    steps: int
    rows: int
    actions: dict[str, int]


@dataclass
class _Live:
    """One open request: itself alone, and the selection of its last row, if that may still be used."""

    alone: RequestAlone
    selections: list[Selection] = field(default_factory=list)


def run_stages(backend: str) -> Stages:
    """The library's own stages on one backend."""

    def stages(
        inputs: LayerInputs, cache: LayerCache, plan: StepPlan, selection: Selection | None
    ) -> tuple[torch.Tensor, Selection]:
        ready = inputs.prepared(cache, plan, backend=backend)
        if selection is None:
            selection = select_blocks(ready.index_q, cache, plan, backend=backend)
        output = attend(ready.q, cache, selection, plan, gate=ready.gate, backend=backend)
        assert isinstance(output, torch.Tensor)
        return output, selection

    return stages


@torch.no_grad()
def soak(
    steps: int,
    *,
    seed: int = 0,
    stages: Stages | str = "auto",
    config: QSAConfig = SOAK_CONFIG,
    max_requests: int = 6,
    max_tokens: int = 1600,
    page_tokens: int = 16,
    num_pages: int = 260,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> SoakReport:
    """Serve random requests, and compare every row of every step with its request alone.

    Each step does one thing: a ragged step (prefill chunks of 1 to 700 rows beside decode rows), a padded decode step
    through a refilled plan, a verify step with up to 7 drafts of which a random number is accepted, a draft step that
    reuses selections made in different earlier steps, an aborted step, or a new request (empty, forked, by a prefix of
    any length, of a live request or of one that is gone, or handed over to itself with other pages and another ring).
    Free memory is NaN throughout. The oracle calls only the ``reference`` backend, on contiguous tensors.

    Args:
        steps: How many steps.
        seed: Decides all of it.
        stages: A backend's name, or what runs one layer of a step: your own backend.
        config: Shapes of the layers.
        max_requests: Requests at once.
        max_tokens: Tokens of a request at most, a multiple of the block size.
        page_tokens: Tokens of a page.
        num_pages: Pages of the pool; so few that it fills up.
        dtype: Model dtype. In bf16 and fp16 a kernel that rounds once differently may select otherwise than the
            definition; fp32 is exact enough to tell.
        device: Where to run.

    Returns:
        What was done.

    Raises:
        AssertionError: A row differs; the message names step, request, layer and rows.
    """
    run = run_stages(stages) if isinstance(stages, str) else stages
    server = _Server(run, config, seed, max_requests, max_tokens, page_tokens, num_pages, dtype, torch.device(device))
    for number in range(steps):
        server.step(number)
    return SoakReport(steps, server.rows, dict(server.actions))


class _Server:
    """The pool, the requests and the dice."""

    def __init__(
        self, run: Stages, config: QSAConfig, seed: int, max_requests: int, max_tokens: int, page_tokens: int,
        num_pages: int, dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.run, self.config, self.max_tokens, self.dtype, self.device = run, config, max_tokens, dtype, device
        self.dice, self.numbers = random.Random(seed), stream(seed)
        self.pool = PagedPool.from_config(
            config, page_tokens=page_tokens, num_pages=num_pages, num_rings=max_requests, speculative_rows=MAX_DRAFTS,
            dtype=dtype, device=device, poison=True,
        )  # fmt: skip
        self.live: dict[int, _Live] = {}
        self.prefixes: list[tuple[Prefix, RequestAlone]] = []
        self.actions: Counter[str] = Counter()
        self.opened = self.rows = self.number = 0
        self.norms = [self._norms() for _ in self.pool.layer_ids]
        self.rope = RopeTable.build(
            config.rope_parameters, rotary_dim=config.rotary_dim, num_positions=max_tokens + 64,
            mrope_section=config.mrope_section, dtype=dtype, device=device,
        )  # fmt: skip
        self.graph_plan = self.pool.plan_step(
            {}, num_requests=max_requests + 2, num_rows=MAX_ROWS, table_pages=-(-max_tokens // page_tokens) + 3,
            max_query_len=MAX_DRAFTS + 1, max_seq_len=max_tokens,
        )  # fmt: skip

    def _norms(self) -> NormWeights:
        c = self.config
        dims = (c.head_dim, c.head_dim, c.index_head_dim, c.index_head_dim)
        q, k, index_q, index_k = (self._draw(n, std=0.2) for n in dims)
        return NormWeights(q=q, k=k, index_q=index_q, index_k=index_k, eps=c.norm_eps)

    def _draw(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return randn(self.numbers, self.dtype, *shape, std=std).to(self.device)

    def step(self, number: int) -> None:
        """One random action; when the pool is full, somebody is closed."""
        self.number = number
        weights = {
            self.ragged: 5, self.padded_decode: 4, self.verify: 4, self.reuse: 3, self.abort: 1, self.admit: 3,
            self.fork: 1, self.hit: 2, self.hold: 1, self.hand_over: 1, self.close: 1,
        }  # fmt: skip
        action = self.dice.choices(list(weights), list(weights.values()))[0] if self.live else self.admit
        try:
            action()
            self.actions[action.__name__] += 1
        except PoolFullError:
            self.actions["full"] += 1
            self.close()

    def admit(self) -> None:
        """An empty request, whose first chunk comes at once."""
        name = self._new_name()
        self.pool.open(name)
        self.live[name] = _Live(
            RequestAlone(self.config, self.pool.layer_ids, self.max_tokens, dtype=self.dtype, device=self.device)
        )
        self._run({name: self._chunk(name)})

    def fork(self) -> None:
        source, name = self._someone(), self._new_name()
        self.pool.fork(source, name)
        alone = self.live[source].alone
        self.live[name] = _Live(alone.copy(alone.length), list(self.live[source].selections))

    def hit(self) -> None:
        """A prefix of any length, of a live request or of a held prefix."""
        name = self._new_name()
        choices: list[tuple[int | Prefix, RequestAlone, int]] = [(p, alone, p.tokens) for p, alone in self.prefixes]
        choices += [(other, live.alone, live.alone.length) for other, live in self.live.items()]
        source, alone, tokens = self.dice.choice(choices)
        length = self.pool.open(name, prefix_of=source, tokens=self.dice.randint(0, tokens))
        self.live[name] = _Live(alone.copy(length))
        self._run({name: self._chunk(name)})

    def hold(self) -> None:
        """Keep a prefix, or give the oldest one back."""
        if len(self.prefixes) == MAX_PREFIXES:
            self.pool.release_prefix(self.prefixes.pop(0)[0])
        name = self._someone()
        prefix = self.pool.hold_prefix(name)
        self.prefixes.append((prefix, self.live[name].alone.copy(prefix.tokens)))

    def hand_over(self) -> None:
        """A request leaves, another one takes its pages, and it comes back on others."""
        name, between = self._someone(), self._new_name()
        exported = self.pool.export_request(name)
        self.pool.close(name)
        live, new = self.live.pop(name), self._new_name()
        self.pool.open(between)
        try:
            self.pool.extend(between, 1)
            self.pool.import_request(new, exported)
            self.live[new] = live
        finally:
            self.pool.close(between)

    def close(self) -> None:
        if self.live:
            name = self._someone()
            self.pool.close(name)
            del self.live[name]
        elif self.prefixes:
            self.pool.release_prefix(self.prefixes.pop(0)[0])

    def ragged(self) -> None:
        """Some requests, each with a chunk or one row."""
        names = self._some()
        self._run({name: self._chunk(name) if self.dice.random() < 0.3 else self._fit(name, 1) for name in names})

    def padded_decode(self) -> None:
        """One row for some requests, through a plan that is refilled in place."""
        self._run({name: self._fit(name, 1) for name in self._some()}, out=self.graph_plan)

    def verify(self) -> None:
        """Drafts for some requests; those after the accepted ones are taken back, at once or bit by bit."""
        drafts = {name: self._fit(name, self.dice.randint(1, MAX_DRAFTS + 1)) for name in self._some()}
        self._run(drafts, out=self.graph_plan if self.dice.random() < 0.5 else None)
        for name, rows in drafts.items():
            for _ in range(self.dice.randint(1, 2)):
                rejected = self.dice.randint(0, max(rows - 1, 0))
                rows -= rejected
                self._back(name, self.live[name].alone.length - rejected)

    def abort(self) -> None:
        """A step that ran in its first layer only is taken back."""
        name = self._someone()
        length = self.live[name].alone.length
        rows = self._chunk(name)
        plan = self.pool.plan_step({name: rows})
        self.run(self._inputs(0, rows, plan), self.pool.caches[0], plan, None)
        self._back(name, length if rows <= MAX_DRAFTS else length - length % self.config.block_tokens)

    def reuse(self) -> None:
        """One row for requests that have a selection, made in different steps: filtered, merged, used again."""
        names = [name for name in self._some() if self.live[name].selections and self._fit(name, 1)]
        if not names:
            return
        merged = [_merge([self.live[name].selections[layer] for name in names]) for layer in range(len(self.norms))]
        self._run(dict.fromkeys(names, 1), reused=merged)

    def _back(self, name: int, length: int) -> None:
        """Take a request back, and forget a selection that saw blocks which are gone."""
        live = self.live[name]
        if self.pool.length(name) != length:
            self.pool.rollback(name, length=length)
        live.alone.length = length
        if live.selections and int(live.selections[0].visible_blocks[0]) > length // self.config.block_tokens:
            live.selections = []

    def _new_name(self) -> int:
        self.opened += 1
        return self.opened

    def _someone(self) -> int:
        return self.dice.choice(list(self.live))

    def _some(self) -> list[int]:
        names = list(self.live)
        return self.dice.sample(names, self.dice.randint(1, len(names)))

    def _fit(self, name: int, rows: int) -> int:
        """Rows that a request may still take."""
        return min(rows, self.max_tokens - self.live[name].alone.length)

    def _chunk(self, name: int) -> int:
        """1 to 700 rows, small ones more often."""
        return self._fit(name, int(MAX_CHUNK ** self.dice.random()))

    def _inputs(self, layer: int, live_rows: int, plan: StepPlan) -> LayerInputs:
        """Random projections of a step; rows of padding are NaN."""
        c, rows = self.config, plan.num_rows

        def draw(*shape: int) -> torch.Tensor:
            drawn = torch.full((rows, *shape), float("nan"), dtype=self.dtype, device=self.device)
            drawn[:live_rows] = self._draw(live_rows, *shape)
            return drawn

        time = plan.positions.clamp(min=0)
        positions = torch.stack([time + 3, time % 29, 20 + time % 31])
        kv = (c.kv_heads, c.head_dim)
        return LayerInputs(
            draw(c.q_heads, 2 * c.head_dim), draw(*kv), draw(*kv), draw(c.index_heads + 1, c.index_head_dim), positions,
            self.rope, self.norms[layer],
        )  # fmt: skip

    def _run(
        self, rows: dict[int, int], *, out: StepPlan | None = None, reused: Sequence[Selection] | None = None
    ) -> None:
        """One step of all layers, compared with each request alone."""
        rows = {name: count for name, count in rows.items() if count}
        if not rows:
            return
        plan = self.pool.plan_step(rows, out=out)
        self.pool.check_plan(plan)
        alone = {name: self.live[name].alone.plan(count) for name, count in rows.items()}
        kept: dict[int, list[Selection]] = {name: [] for name in rows}
        for layer, cache in enumerate(self.pool.caches):
            inputs = self._inputs(layer, sum(rows.values()), plan)
            output, selection = self.run(inputs, cache, plan, None if reused is None else reused[layer])
            first = 0
            for name, count in rows.items():
                own = torch.arange(first, first + count, device=self.device)
                mine = selection.take(own)
                part = replace(
                    inputs, **{n: getattr(inputs, n)[own] for n in ("q_gate", "k", "v", "index_qk")},
                    rope_positions=inputs.rope_positions[:, own],
                )  # fmt: skip
                self.live[name].alone.check_layer(
                    layer, part, alone[name], output[own], mine, reused=reused is not None,
                    label=f"step {self.number}, request {name}, layer {cache.layer_id}, {count} rows from token "
                    f"{self.live[name].alone.length - count}",
                )  # fmt: skip
                kept[name].append(mine.take(own[-1:] - first))
                first += count
        self.rows += sum(rows.values())
        for name, selections in kept.items():
            self.live[name].selections = selections


def _merge(rows: Sequence[Selection]) -> Selection:
    """Selections of single rows as one selection."""
    ids, counts, visible, requests = (
        torch.cat([getattr(row, name) for row in rows])
        for name in ("block_ids", "block_counts", "visible_blocks", "request_ids")
    )
    return Selection(ids, counts, None, visible, requests, rows[0].layer_id)
