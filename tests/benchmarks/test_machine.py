"""Measurements that others disturb are repeated; the calmest is kept."""

from __future__ import annotations

import pytest

from benchmarks import machine


def test_a_disturbed_measurement_is_repeated_and_the_calmest_kept(monkeypatch: pytest.MonkeyPatch):
    found = iter([0.9, 0.4, 0.1])
    monkeypatch.setattr(machine.Disturbance, "cores", lambda self: next(found))
    monkeypatch.setattr(machine, "_watch", lambda: 0.0)
    runs = iter(["first", "second", "third"])
    assert machine.calmest(lambda: next(runs), patience=60) == ("third", 0.1)


def test_without_patience_a_measurement_is_taken_as_it_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine.Disturbance, "cores", lambda self: 1.5)
    assert machine.calmest(lambda: "only", patience=0) == ("only", 1.5)
