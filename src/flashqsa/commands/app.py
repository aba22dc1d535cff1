"""The `flashqsa` program: registers the sub-commands and turns failures into one line and an exit code.

Nothing of the `cli` extra is imported before `main` runs, so that its absence is told in a sentence too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flashqsa import __version__
from flashqsa.commands import EXIT_INTERRUPTED, EXIT_NOT_READ, EXIT_WRONG_INPUT
from flashqsa.errors import FlashQSAError

if TYPE_CHECKING:
    import typer

CLI_MODULES = ("typer", "rich", "psutil", "transformers", "safetensors", "tokenizers", "jinja2", "matplotlib")
"""Top-level modules that the `cli` extra installs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program.

    Args:
        arguments: The words after the program's name; those of the process when None.

    Returns:
        The exit code. Wrong input has been told in one line on stderr, without a traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        code = _run(words)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _interrupted()
    except FlashQSAError as error:
        return _fail(str(error))
    except OSError as error:
        if error.filename is not None:
            raise
        return _cannot_print(error)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in CLI_MODULES:
            raise
        return _fail(f"the command line needs {missing}, which is not installed. Run: pip install 'flashqsa[cli]'")


def build_app() -> typer.Typer:
    """The program with all its sub-commands.

    Raises:
        ModuleNotFoundError: A part of the `cli` extra is not installed.
    """
    import typer

    from flashqsa.commands.bench import bench
    from flashqsa.commands.doctor import doctor
    from flashqsa.commands.generate import generate
    from flashqsa.commands.inspect_command import inspect_selections
    from flashqsa.commands.needle import needle
    from flashqsa.commands.tiny import tiny

    app = typer.Typer(
        name="flashqsa",
        help="Qwen Sparse Attention: try it, look at it, measure it.",
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def print_version(wanted: bool) -> None:
        if wanted:
            typer.echo(f"flashqsa {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", callback=print_version, is_eager=True, help="Print the version and stop."
        ),
    ) -> None:
        """Options of the program itself."""

    app.command(help="Tell what is installed and usable here, and what to do about what is not.")(doctor)
    app.command(help="Write a small random qwen4_exp checkpoint into DIRECTORY.")(tiny)
    app.command(help="Generate from CHECKPOINT, greedily; with --compare, beside stock transformers.")(generate)
    app.command("inspect", help="Show what a model selects: from a checkpoint and a prompt, or from a recording.")(
        inspect_selections
    )
    app.command(help="Tell whether a needle in a long prompt is among what the final rows of CHECKPOINT select.")(
        needle
    )
    app.command(help="Time the stages of one layer at several contexts, beside dense attention and the floor.")(bench)
    return app


def _run(words: list[str]) -> int:
    """Runs one command line outside typer's own error handling, which would print several lines."""
    if words == ["--version"]:  # without the extra too
        print(f"flashqsa {__version__}")
        return 0
    import typer

    app = build_app()
    # Typer has carried its command parser under more than one name; the bases of this exception are the same in all.
    parser_error: type[Exception] = typer.BadParameter.__mro__[2]
    try:
        outcome = typer.main.get_command(app).main(args=words, prog_name="flashqsa", standalone_mode=False)
    except typer.Abort:
        return _interrupted()
    except parser_error as error:
        if not hasattr(error, "format_message"):
            raise
        return _fail(f"{error.format_message().rstrip('.')} (see flashqsa --help)")
    if outcome == EXIT_INTERRUPTED:  # typer's own answer to Ctrl-C, which it gives without a word
        return _interrupted()
    return outcome if isinstance(outcome, int) else 0


def _interrupted() -> int:
    print("flashqsa: interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED


def _cannot_print(error: OSError) -> int:
    """Says that the output went nowhere; nothing when its reader left, as `head` does."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # else the exit tries to print once more
    if isinstance(error, BrokenPipeError):
        return EXIT_NOT_READ  # typer's own code for it
    return _fail(f"standard output must be writable, got {error.strerror}. Send it somewhere else.")


def _fail(message: str) -> int:
    print(f"flashqsa: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_WRONG_INPUT
