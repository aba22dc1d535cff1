"""What `flashqsa doctor` found to be told, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to know.

    Attributes:
        problem: Whether something does not work, or works worse than this machine could; a remark otherwise.
        about: What it is about: a package, a device, a stage, the checkpoint.
        told: What was found.
        remedy: What to do.
    """

    problem: bool
    about: str
    told: str
    remedy: str
