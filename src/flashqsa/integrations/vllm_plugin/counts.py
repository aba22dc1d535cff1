"""How often each stage or operator served vLLM in this process: the proof that the sparse path ran."""

from __future__ import annotations

from collections import Counter

_calls: Counter[str] = Counter()


def count(name: str) -> None:
    """Add one call of a stage or an operator."""
    _calls[name] += 1


def report() -> dict[str, int]:
    """Calls since the process started, by name: vLLM's operator names, or `prepare`, `select_blocks` and `attend`."""
    return dict(_calls)
