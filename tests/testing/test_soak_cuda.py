"""The soak on a GPU: kernels, refilled plans replayed as one CUDA graph, free memory NaN throughout."""

from __future__ import annotations

import pytest

from flashqsa.testing import soak

pytestmark = pytest.mark.gpu
ACTIONS = {"admit", "fork", "hit", "hold", "hand_over", "close", "ragged", "padded_decode", "verify", "reuse", "abort"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(8))
def test_soak_of_2000_steps(seed: int) -> None:
    """An eighth of them each, for most of the time is the oracle's on the CPU: every row of every step is compared."""
    report = soak(250, seed=seed, stages="triton", device="cuda", graphs=True)
    assert report.steps == 250
    assert report.replays > 30, "steps that the graph ran"
    assert set(report.actions) >= ACTIONS


def test_soak_with_values_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed pages poisoned, accounts and plans checked after every call; no graph, which checks would stall."""
    monkeypatch.setenv("FLASHQSA_DEBUG", "1")
    report = soak(60, seed=1, stages="triton", device="cuda", max_tokens=260, num_pages=60)
    assert sum(report.actions.values()) == 60
