"""The entry point of the command, as a process: from before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import flashqsa_command

RUN = "import sys, flashqsa_command; sys.exit(flashqsa_command.main())"


def _run(*words: str, first_on_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    places = [str(first_on_path)] if first_on_path else []
    path = os.pathsep.join([*places, str(Path(flashqsa_command.__file__).parents[1])])
    return subprocess.run(
        [sys.executable, "-c", RUN, *words], env={**os.environ, "PYTHONPATH": path}, text=True, timeout=120,
        check=False, capture_output=True,
    )  # fmt: skip


def test_the_installed_command_begins_there() -> None:
    (command,) = (found for found in entry_points(group="console_scripts") if found.name == "flashqsa")
    assert command.value == "flashqsa_command:main"


def test_words_and_exit_codes_reach_the_command() -> None:
    assert _run("--version").stdout.startswith("flashqsa ")
    refused = _run("needle", "/nowhere")
    assert refused.returncode == 2
    assert refused.stderr.startswith("flashqsa: ")


def test_ctrl_c_while_the_library_is_imported(tmp_path: Path) -> None:
    """One line, even where the import would take an exception for its own."""
    library = tmp_path / "flashqsa"
    library.mkdir()
    (library / "__init__.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    for _ in range(10):\n        pass\n"
        "except BaseException:\n    raise ImportError('taken for its own') from None\n"
    )
    stopped = _run("doctor", first_on_path=tmp_path)
    assert (stopped.returncode, stopped.stdout, stopped.stderr) == (130, "", "flashqsa: interrupted\n")
