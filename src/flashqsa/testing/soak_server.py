"""The scheduler of a soak: a pool, random requests, and the same requests alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from flashqsa.cache import PagedPool, PoolFullError, Prefix
from flashqsa.config import QSAConfig
from flashqsa.plan import StepPlan
from flashqsa.results import Selection
from flashqsa.testing.alone import RequestAlone
from flashqsa.testing.soak_layers import CPU, SoakLayers, Stages

MAX_CHUNK, MAX_DRAFTS, MAX_PREFIXES, MAX_ROWS = 700, 7, 3, 64
SELECTED = ("block_ids", "block_counts", "visible_blocks", "request_ids")


@dataclass
class _Live:
    """One open request: itself alone, and the selection of its last row, if that may still be used."""

    alone: RequestAlone
    selections: list[Selection] = field(default_factory=list)


class SoakServer:
    """The pool, the requests and the dice."""

    def __init__(
        self, stages: Stages, config: QSAConfig, *, seed: int, max_requests: int, max_tokens: int, page_tokens: int,
        num_pages: int, dtype: torch.dtype, device: torch.device, graphs: bool,
    ) -> None:  # fmt: skip
        self.config, self.max_tokens, self.dtype, self.graphs = config, max_tokens, dtype, graphs
        self.dice = random.Random(seed)
        self.pool = PagedPool.from_config(
            config, page_tokens=page_tokens, num_pages=num_pages, num_rings=max_requests, speculative_rows=MAX_DRAFTS,
            dtype=dtype, device=device, poison=True,
        )  # fmt: skip
        self.layers = SoakLayers(stages, config, self.pool, seed=seed, positions=max_tokens + 64, dtype=dtype)
        self.live: dict[int, _Live] = {}
        self.prefixes: list[tuple[Prefix, RequestAlone]] = []
        self.actions: Counter[str] = Counter()
        self.opened = self.rows = self.number = 0
        self.graph_plan = self.pool.plan_step(
            {}, num_requests=max_requests + 2, num_rows=MAX_ROWS, table_pages=-(-max_tokens // page_tokens) + 3,
            max_query_len=MAX_DRAFTS + 1, max_seq_len=max_tokens,
        )  # fmt: skip

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
            RequestAlone(self.config, self.pool.layer_ids, self.max_tokens, dtype=self.dtype, device=CPU)
        )
        self._run({name: self._chunk(name)})

    def fork(self) -> None:
        """Another request with all that one has."""
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
        exported, pages = self.pool.export_request(name), self.pool.page_ids(name)
        self.pool.close(name)
        live, new = self.live.pop(name), self._new_name()
        self.pool.open(between)
        try:
            self.pool.extend(between, 1)
            self.pool.import_request(new, exported)
            assert not pages or self.pool.page_ids(new) != pages, f"step {self.number}: the pages are the same ones"
            self.live[new] = live
        finally:
            self.pool.close(between)

    def close(self) -> None:
        """A request goes, or a held prefix."""
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
        self.layers.run(plan, [self.layers.draw(0, rows, plan)], reused=None, graphed=False)
        self._back(name, length if rows <= MAX_DRAFTS else length - length % self.config.block_tokens)

    def reuse(self) -> None:
        """One row for requests that have a selection, made in different steps: filtered, merged, used again."""
        names = [name for name in self._some() if self.live[name].selections and self._fit(name, 1)]
        if not names:
            return
        merged = [
            _merge([self.live[name].selections[layer] for name in names]) for layer in range(len(self.pool.caches))
        ]
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

    def _run(
        self, rows: dict[int, int], *, out: StepPlan | None = None, reused: Sequence[Selection] | None = None
    ) -> None:
        """One step of all layers, compared with each request alone."""
        rows = {name: count for name, count in rows.items() if count}
        if not rows:
            return
        plan, total = self.pool.plan_step(rows, out=out), sum(rows.values())
        self.pool.check_plan(plan)
        alone = {name: self.live[name].alone.plan(count) for name, count in rows.items()}
        kept: dict[int, list[Selection]] = {name: [] for name in rows}
        drawn = [self.layers.draw(layer, total, plan) for layer in range(len(self.pool.caches))]
        results = self.layers.run(plan, drawn, reused=reused, graphed=self.graphs and out is not None)
        for layer, (inputs, (output, selection)) in enumerate(zip(drawn, results, strict=True)):
            layer_id, output, host = self.pool.layer_ids[layer], output.to(CPU), _on_host(selection)
            assert not output[total:].any(), f"step {self.number}, layer {layer_id}: rows of padding are not zero"
            first = 0
            for name, count in rows.items():
                own = torch.arange(first, first + count)
                part = replace(
                    inputs, **{n: getattr(inputs, n)[own] for n in ("q_gate", "k", "v", "index_qk")},
                    rope_positions=inputs.rope_positions[:, own],
                )  # fmt: skip
                self.live[name].alone.check_layer(
                    layer, part, alone[name], output[own], host.take(own), reused=reused is not None,
                    label=f"step {self.number}, request {name}, layer {layer_id}, {count} rows from token "
                    f"{self.live[name].alone.length - count}",
                )  # fmt: skip
                kept[name].append(selection.take(own[-1:].to(plan.device)))
                first += count
        self.rows += total
        for name, selections in kept.items():
            self.live[name].selections = selections


def _on_host(selection: Selection) -> Selection:
    """A selection where the oracle computes."""
    ids, counts, visible, requests = (getattr(selection, name).to(CPU) for name in SELECTED)
    return Selection(ids, counts, None, visible, requests, selection.layer_id)


def _merge(rows: Sequence[Selection]) -> Selection:
    """Selections of single rows as one selection."""
    ids, counts, visible, requests = (torch.cat([getattr(row, name) for row in rows]) for name in SELECTED)
    return Selection(ids, counts, None, visible, requests, rows[0].layer_id)
