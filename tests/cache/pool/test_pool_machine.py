"""A state machine over two pools: whatever is called in whatever order, every request stays what it is alone."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from flashqsa import PoolFullError
from flashqsa.errors import ArgumentError

LONGEST = 90
PLACES = {"here": {"page_tokens": 16, "pages": 18, "rings": 7}, "there": {"page_tokens": 8, "pages": 28, "rings": 6}}
SOME = st.integers(0, 1 << 16)
SEEDS = st.integers(0, 2)


class PoolMachine(RuleBasedStateMachine):
    """Requests are numbered; a number is drawn and taken modulo how many there are."""

    calls = 0

    def __init__(self, make_serving: Any, make_model: Any, draw_tokens: Any) -> None:
        super().__init__()
        self.draw_tokens = draw_tokens
        self.places = {name: make_serving(speculative_rows=3, seed=7, **options) for name, options in PLACES.items()}
        self.models = {name: make_model(8) for name in PLACES}
        self.prefixes: list[tuple[str, Any, list[int]]] = []
        self.graph_plan = self.places["here"].pool.plan_step(
            {}, num_requests=5, num_rows=40, table_pages=9, max_query_len=30, max_seq_len=LONGEST
        )
        self.opened = 0
        for place, length in (("here", 21), ("here", 43), ("there", 30)):
            name = self.name()
            self.places[place].open(name)
            self.models[place].add(name)
            self.grow(place, {name: draw_tokens(length, name % 3)})

    def grow(self, place: str, tokens: dict[Any, list[int]], **options: Any) -> bool:
        """One step, if there is room."""
        if self.refused(place, lambda: self.places[place].step(tokens, **options)):
            return False
        for name, rows in tokens.items():
            self.models[place].grow(name, len(rows))
        return True

    def name(self) -> int:
        self.opened += 1
        return self.opened

    def pick(self, place: str, some: int) -> Any:
        requests = self.places[place].pool.requests
        return requests[some % len(requests)] if requests else None

    def live(self) -> bool:
        return any(serving.tokens for serving in self.places.values())

    def refused(self, place: str, call: Any) -> bool:
        """Make a call. When the pool is full, that is refused, and lengths and free pages are as they were."""
        pool = self.places[place].pool
        before = (pool.free_pages, pool.free_rings, {name: pool.length(name) for name in pool.requests})
        try:
            call()
        except PoolFullError:
            assert (pool.free_pages, pool.free_rings, {n: pool.length(n) for n in pool.requests}) == before
            return True
        return False

    @rule(place=st.sampled_from(sorted(PLACES)))
    def open(self, place: str) -> None:
        name = self.name()
        if not self.refused(place, lambda: self.places[place].open(name)):
            self.models[place].add(name)

    @precondition(live)
    @rule(place=st.sampled_from(sorted(PLACES)), some=SOME, share=st.integers(0, 100))
    def hit(self, place: str, some: int, share: int) -> None:
        serving, model, name = self.places[place], self.models[place], self.name()
        source = self.pick(place, some)
        if source is None:
            return
        wanted = model.lengths[source] * share // 100
        exact = model.holds(source, wanted)
        shared = serving.tokens[source]
        if not self.refused(place, lambda: serving.open(name, shared, prefix_of=source, tokens=wanted)):
            assert serving.pool.length(name) == (wanted if exact else wanted - wanted % 4)
            model.add(name, serving.pool.length(name), source)

    @precondition(live)
    @rule(place=st.sampled_from(sorted(PLACES)), some=SOME)
    def fork(self, place: str, some: int) -> None:
        source, name = self.pick(place, some), self.name()
        if source is not None and not self.refused(place, lambda: self.places[place].fork(source, name)):
            self.models[place].add(name, self.models[place].lengths[source], source)

    @precondition(live)
    @rule(
        place=st.sampled_from(sorted(PLACES)),
        work=st.lists(st.tuples(SOME, st.sampled_from([0, 1, 1, 2, 4, 5, 17, 30]), SEEDS), min_size=1, max_size=4),
        refill=st.booleans(),
    )
    def step(self, place: str, work: list[tuple[int, int, int]], refill: bool) -> None:
        model, tokens = self.models[place], {}
        for some, rows, seed in work:
            name = self.pick(place, some)
            if name is not None and model.lengths[name] + rows <= LONGEST:
                tokens[name] = self.draw_tokens(rows, seed)
        fits = place == "here" and sum(len(rows) for rows in tokens.values()) <= 40
        options = {"out": self.graph_plan} if refill and fits else {}
        if tokens:
            self.grow(place, tokens, **options)

    @precondition(live)
    @rule(
        place=st.sampled_from(sorted(PLACES)), some=SOME, rows=st.integers(1, 5), accepted=st.integers(0, 5), seed=SEEDS
    )
    def verify(self, place: str, some: int, rows: int, accepted: int, seed: int) -> None:
        """All requests of a place add drafts; those after the accepted ones are taken back."""
        serving, model = self.places[place], self.models[place]
        tokens = {
            name: self.draw_tokens(rows, (seed + name) % 3) for name in serving.tokens if model.lengths[name] < 80
        }
        if tokens and self.grow(place, tokens):
            for name in tokens:
                target = model.lengths[name] - max(rows - accepted, 0)
                serving.rollback(name, target)
                model.cut(name, target)

    @precondition(live)
    @rule(place=st.sampled_from(sorted(PLACES)), some=SOME, seed=SEEDS)
    def decode(self, place: str, some: int, seed: int) -> None:
        """One row for every second request."""
        names = [name for name in self.places[place].tokens if self.models[place].lengths[name] < LONGEST]
        if names[some % 2 :: 2]:
            self.grow(place, {name: self.draw_tokens(1, seed) for name in names[some % 2 :: 2]})

    @precondition(live)
    @rule(place=st.sampled_from(sorted(PLACES)), some=SOME, rows=st.integers(0, 11))
    def rollback(self, place: str, some: int, rows: int) -> None:
        serving, model, name = self.places[place], self.models[place], self.pick(place, some)
        if name is None:
            return
        target = max(model.lengths[name] - rows, 0)
        if model.holds(name, target):
            serving.rollback(name, target)
            model.cut(name, target)
        else:
            with pytest.raises(ArgumentError, match="raw index keys"):
                serving.pool.rollback(name, length=target)

    @precondition(live)
    @rule(place=st.sampled_from(sorted(PLACES)), some=SOME)
    def close(self, place: str, some: int) -> None:
        name = self.pick(place, some)
        if name is not None:
            self.places[place].close(name)
            del self.models[place].lengths[name]

    @precondition(live)
    @rule(place=st.sampled_from(sorted(PLACES)), some=SOME)
    def hold(self, place: str, some: int) -> None:
        name = self.pick(place, some)
        if name is not None and len(self.prefixes) < 3:
            prefix = self.places[place].pool.hold_prefix(name)
            self.prefixes.append((place, prefix, self.places[place].tokens[name][: prefix.tokens]))

    @precondition(lambda self: self.prefixes)
    @rule(some=SOME, release=st.booleans())
    def hit_or_release(self, some: int, release: bool) -> None:
        place, prefix, tokens = self.prefixes[some % len(self.prefixes)]
        name, serving = self.name(), self.places[place]
        if not self.refused(place, lambda: serving.open(name, tokens, prefix_of=prefix)):
            assert serving.pool.length(name) == prefix.tokens
            self.models[place].add(name, prefix.tokens)
        if release:
            self.prefixes.remove((place, prefix, tokens))
            serving.pool.release_prefix(prefix)

    @precondition(live)
    @rule(place=st.sampled_from(sorted(PLACES)), some=SOME)
    def move(self, place: str, some: int) -> None:
        source, other, name = self.pick(place, some), "there" if place == "here" else "here", self.name()
        if source is None:
            return
        exported = self.places[place].pool.export_request(source)
        if not self.refused(other, lambda: self.places[other].pool.import_request(name, exported)):
            self.places[other].tokens[name] = self.places[place].tokens.pop(source)
            self.models[other].add(name, self.models[place].lengths.pop(source))
            self.models[other].rings[name] = self.models[place].rings.pop(source)
            self.places[place].pool.close(source)

    @invariant()
    def accounts_agree(self) -> None:
        PoolMachine.calls += 1
        for place, serving in self.places.items():
            serving.pool._accounts.check()
            assert {name: serving.pool.length(name) for name in serving.pool.requests} == self.models[place].lengths

    def teardown(self) -> None:
        for serving in self.places.values():
            for name in serving.pool.requests:
                serving.check_caches(name)


@pytest.mark.slow
@pytest.mark.parametrize("debug", ["0", "1"])
def test_whatever_is_called_in_whatever_order(
    make_serving: Any, make_model: Any, draw_tokens: Any, monkeypatch: pytest.MonkeyPatch, record_property: Any,
    debug: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("FLASHQSA_DEBUG", debug)
    before = PoolMachine.calls
    run_state_machine_as_test(
        lambda: PoolMachine(make_serving, make_model, draw_tokens),
        settings=settings(
            max_examples=30, stateful_step_count=50, derandomize=True, deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    record_property("calls in any order", PoolMachine.calls - before)
