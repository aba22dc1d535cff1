"""A soak from the command line: ``python -m flashqsa.testing.soak_command 2000 --device cuda --graphs``.

Prints one JSON line: the options, and what was done. A difference ends it with an AssertionError.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence

from flashqsa.testing.soak import soak


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, run, print."""
    options = argparse.ArgumentParser(prog="python -m flashqsa.testing.soak_command", description=soak.__doc__)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("steps", type=int, help="steps of the scheduler")
    options.add_argument("--seed", type=int, default=0, help="decides all of it")
    options.add_argument("--stages", default="auto", help="auto, reference, torch or triton")
    options.add_argument("--max-tokens", type=int, default=1600, help="tokens of a request at most")
    options.add_argument("--num-pages", type=int, default=260, help="pages of the pool")
    options.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    options.add_argument("--graphs", action="store_true", help="replay refilled plans as one CUDA graph")
    given = vars(options.parse_args(arguments))
    report = soak(**given)
    print(json.dumps({**given, **dataclasses.asdict(report)}))


if __name__ == "__main__":
    main()
