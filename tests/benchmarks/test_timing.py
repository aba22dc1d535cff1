"""Timing: engines in turn, quantiles, floors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.timing import Call, Ceilings, Timing, interleave


def test_interleave_takes_engines_in_turn_and_leaves_set_up_untimed():
    calls: list[str] = []

    def engine(name: str):
        @contextmanager
        def prepared() -> Iterator[Call]:
            calls.append(f"set up {name}")
            yield lambda: calls.append(name)
            calls.append(f"put away {name}")

        return prepared

    timings = interleave({"a": engine("a"), "b": engine("b")}, repeats=2, warmups=1)
    assert [name for name in calls if len(name) == 1] == ["a", "b", "b", "a", "a", "b"]
    assert {name: timing.calls for name, timing in timings.items()} == {"a": 2, "b": 2}
    assert calls[:3] == ["set up a", "a", "put away a"]


def test_timing_of_known_seconds():
    timing = Timing.of([0.005, 0.001, 0.002, 0.003, 0.004, 0.006])
    assert (timing.p20_ms, timing.median_ms, timing.p80_ms, timing.calls) == (2.0, 3.5, 5.0, 6)
    assert Timing.of([0.25]) == Timing(250.0, 250.0, 250.0, 1)


def test_floor_is_the_slower_of_arithmetic_and_traffic():
    ceilings = Ceilings(gflop_per_s=100.0, gbyte_per_s=10.0)
    assert ceilings.floor_ms(flop=1e9, moved_bytes=0) == 10.0
    assert ceilings.floor_ms(flop=1e9, moved_bytes=1e9) == 100.0
