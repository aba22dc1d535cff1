"""Files that `flashqsa inspect` and `flashqsa needle` write: checked before the work, whole or not there after it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from flashqsa.errors import ArgumentError

PICTURES = (".png", ".svg")


def check_output(command: str, option: str, path: Path | None, suffixes: Sequence[str]) -> None:
    """Checks that a file can be written, by making another one beside it.

    Args:
        command: Name of the sub-command, first in the message.
        option: Name of the option, without dashes.
        path: The file, or None where none is asked for.
        suffixes: Allowed ends of its name.

    Raises:
        ArgumentError: It has another end, is a folder, or its folder is not there or takes no files.
    """
    if path is None:
        return
    if path.suffix not in suffixes:
        raise ArgumentError(
            f"{command}: {option} must end in {' or '.join(suffixes)}, got {path}. Choose one of these formats."
        )
    try:
        if path.is_dir():
            raise ArgumentError(f"{command}: {option} must be a file, got the folder {path}. Choose another name.")
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _not_writable(command, option, path, error) from error


def write_output(command: str, option: str, path: Path, write: Callable[[Path], None]) -> None:
    """Writes a file beside its place and moves it there: a failure leaves nothing behind.

    Args:
        command: As in `check_output`.
        option: As in `check_output`.
        path: The file; one that exists is replaced.
        write: Writes to the path that it is given, whose name ends like that of `path`.

    Raises:
        ArgumentError: The file cannot be written.
    """
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as folder:
            # A name of its own inside: the temporary folder is private to the user, the file need not be.
            staged = Path(folder) / path.name
            write(staged)
            staged.replace(path)
    except OSError as error:
        raise _not_writable(command, option, path, error) from error


def _not_writable(command: str, option: str, path: Path, error: OSError) -> ArgumentError:
    return ArgumentError(
        f"{command}: {option} must be a file that can be written, got {path} ({error.strerror or error}). "
        "Choose another place."
    )
