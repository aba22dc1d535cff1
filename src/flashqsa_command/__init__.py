"""The `flashqsa` command from its first moment on: Ctrl-C is told in one line while torch is still imported, too.

A package of its own, since whatever lies within `flashqsa` is reached only after that import.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def _stop(_number: int, _frame: FrameType | None) -> None:
    """Leave at once: an exception could be taken, by the import that it comes up in, for its own."""
    os.write(2, b"flashqsa: interrupted\n")
    os._exit(INTERRUPTED)


def main() -> int:
    """Run the command line of this process.

    Returns:
        The exit code.
    """
    before = signal.signal(signal.SIGINT, _stop)
    from flashqsa.commands.app import main as run

    signal.signal(signal.SIGINT, before)
    return run(sys.argv[1:])
