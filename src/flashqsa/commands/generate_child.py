"""The same run in a process of its own, so that the memory of one engine is not counted with another's."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from flashqsa.commands.generate_engine import ENGINES, EngineRun, RunRequest, memory_error, run_engine
from flashqsa.commands.generate_loop import Progress
from flashqsa.errors import FlashQSAError, UnsupportedError


def run_engine_apart(
    request: RunRequest, engine: str, on_progress: Progress = lambda stage, done, total: None
) -> EngineRun:
    """Runs one engine in a fresh process.

    Args:
        request: What to run.
        engine: A key of `ENGINES`.
        on_progress: Told, in this process, about every chunk and every token.

    Raises:
        FlashQSAError: As `run_engine` raised it there.
        UnsupportedError: The process ended without a result.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(sending, request, engine), daemon=True)
    with _interrupts_ignored():  # inherited: Ctrl-C is this process's to tell, also while the other one starts
        process.start()
    sending.close()
    try:
        return _receive(receiving, process, engine, on_progress)
    finally:
        process.terminate()
        process.join()
        receiving.close()


def _receive(receiving: Connection, process: BaseProcess, engine: str, on_progress: Progress) -> EngineRun:
    while True:
        try:
            message = receiving.recv()
        except EOFError:
            process.join()
            raise _ended(engine, process.exitcode) from None
        match message:
            case EngineRun():
                return message
            case FlashQSAError():
                raise message
            case (stage, done, total):
                on_progress(stage, done, total)


def _serve(sending: Connection, request: RunRequest, engine: str) -> None:
    try:
        run = run_engine(request, engine, lambda stage, done, total: sending.send((stage, done, total)))
    except FlashQSAError as error:
        sending.send(error)
    else:
        sending.send(run)


def _ended(engine: str, exit_code: int | None) -> FlashQSAError:
    """What to tell of a process that ended without a word."""
    if exit_code == -getattr(signal, "SIGKILL", 9):
        return memory_error(engine, "its process was killed, as systems do that run out of memory")
    return UnsupportedError(
        f"generate: the process of {ENGINES[engine]} must end with a result, got exit code {exit_code}. "
        f"Run with --engine {engine} and without --compare to see why."
    )


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
