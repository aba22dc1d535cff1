"""Progress on stderr: a bar when rich is installed and a terminal listens, one line a step otherwise."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A function to call with the name of each step as it begins.

    Args:
        total: Number of steps.
    """
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield _plain(total)
        return
    if not sys.stderr.isatty():
        yield _plain(total)
        return
    from rich.console import Console

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        begun = False

        def begin(name: str) -> None:
            nonlocal begun
            bar.update(task, description=name, advance=1 if begun else 0)
            begun = True

        yield begin


def _plain(total: int) -> Callable[[str], None]:
    count = 0

    def begin(name: str) -> None:
        nonlocal count
        count += 1
        print(f"[{count}/{total}] {name}", file=sys.stderr, flush=True)

    return begin
