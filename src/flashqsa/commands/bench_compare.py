"""An earlier result beside a new one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashqsa.commands.bench_result import NAME
from flashqsa.errors import ArgumentError

SAME = ("shapes", "requests", "rows", "page_tokens", "dtype", "device_name", "threads", "backends")
"""What has to be equal for times to be comparable."""


@dataclass(frozen=True, kw_only=True)
class Earlier:
    """An earlier result.

    Attributes:
        path: Its file.
        about: Its fields named in `SAME`, and the versions.
        medians: Microseconds by context and what was timed.
    """

    path: Path
    about: dict[str, Any]
    medians: dict[int, dict[str, float]]


def read_earlier(path: Path) -> Earlier:
    """Reads what `flashqsa bench --json` printed.

    Raises:
        ArgumentError: The file cannot be read, or is something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["benchmark"] != NAME:
            raise ValueError(f"its benchmark is {found['benchmark']}")
        return Earlier(
            path=path,
            about={name: found[name] for name in (*SAME, "versions")},
            medians={
                int(context["context"]): {
                    str(name): float(spread["median_us"]) for name, spread in context["times"].items()
                }
                for context in found["contexts"]
            },
        )
    except OSError as error:
        told = error.strerror or str(error)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        told = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
    raise ArgumentError(
        f"bench: compare must be a file that flashqsa bench --json has written, got {path} ({told}). Choose another."
    )


def compare(result: dict[str, Any], earlier: Earlier) -> dict[str, Any]:
    """What changed: settings that differ, and the ratio of new to old medians of every context in both.

    Args:
        result: The new result as `as_json` gives it.
        earlier: The other one.
    """
    return {
        "file": str(earlier.path),
        "versions": earlier.about["versions"],
        "differences": [name for name in SAME if result[name] != earlier.about[name]],
        "contexts": [
            {
                "context": found["context"],
                "ratios": {
                    name: round(spread["median_us"] / before[name], 3)
                    for name, spread in found["times"].items()
                    if before.get(name, 0) > 0
                },
            }
            for found in result["contexts"]
            if (before := earlier.medians.get(found["context"])) is not None
        ],
    }
