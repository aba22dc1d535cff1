"""`flashqsa generate`: greedy text from a checkpoint, on FlashQSA, stock transformers or both, or in vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from flashqsa.commands import EXIT_MISMATCH
from flashqsa.commands.generate_child import run_engine_apart
from flashqsa.commands.generate_compare import compare_runs
from flashqsa.commands.generate_engine import ENGINES, EngineRun, RunRequest, run_engine
from flashqsa.commands.generate_model import quiet_transformers
from flashqsa.commands.generate_output import Outcome, as_json, print_outcome
from flashqsa.commands.generate_prompt import PromptOptions
from flashqsa.commands.generate_request import RunOptions, check_options, prepare_run
from flashqsa.config import QSAConfig
from flashqsa.errors import UnsupportedError

_RUN, _PROMPT = RunOptions(), PromptOptions()


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint's folder.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = _PROMPT.text,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with it; - reads stdin.")] = _PROMPT.file,
    random_tokens: Annotated[int | None, typer.Option(help="Draw so many tokens instead.")] = _PROMPT.random_tokens,
    seed: Annotated[int | None, typer.Option(help="Decides the drawn tokens; 0 by default.")] = _PROMPT.seed,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; by default where there is one.")
    ] = _PROMPT.chat,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = _RUN.max_new_tokens,
    ignore_stop: Annotated[bool, typer.Option("--ignore-stop", help="Go on after a stop token.")] = _RUN.ignore_stop,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens that enter at once.")] = _RUN.prefill_chunk,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = _RUN.dtype,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = _RUN.device,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's choice by default.")] = _RUN.threads,
    engine: Annotated[
        str | None, typer.Option(help="flashqsa (the default), stock: transformers alone, or vllm: vLLM on FlashQSA.")
    ] = _RUN.engine,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run both and compare; exit code 3 if they differ.")
    ] = False,
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> int:
    """Generates greedily from `checkpoint` and tells what it took.

    Returns:
        The exit code: 0, or 3 when `compare` finds a difference.

    Raises:
        FlashQSAError: Wrong input, or a limit of this machine or installation.
        typer.Abort: Interrupted.
    """
    prompt_options = PromptOptions(text=prompt, file=prompt_file, random_tokens=random_tokens, seed=seed, chat=chat)
    run_options = RunOptions(
        max_new_tokens=max_new_tokens,
        ignore_stop=ignore_stop,
        prefill_chunk=prefill_chunk,
        dtype=dtype,
        device=device,
        threads=threads,
        engine=engine,
    )
    try:
        outcome = _run(checkpoint, prompt_options, run_options, compare=compare, show_progress=not (quiet or as_json_))
    except KeyboardInterrupt:
        raise typer.Abort from None
    if as_json_:
        typer.echo(json.dumps(as_json(outcome), indent=2))
    else:
        print_outcome(outcome, Console(highlight=False))
    return EXIT_MISMATCH if outcome.comparison and not outcome.comparison.same_tokens else 0


def _run(
    checkpoint: Path, prompt_options: PromptOptions, run_options: RunOptions, *, compare: bool, show_progress: bool
) -> Outcome:
    check_options(prompt_options, run_options, compare=compare)
    config = QSAConfig.from_checkpoint(checkpoint)
    with quiet_transformers():
        request, prompt, tokenizer = prepare_run(checkpoint, config, prompt_options, run_options)
    engines = ("stock", "flashqsa") if compare else (run_options.engine or "flashqsa",)
    runs = _run_engines(request, engines, show_progress=show_progress)
    if "flashqsa" in runs:
        _check_layers(runs["flashqsa"], config, fed_tokens=len(request.prompt_ids) - 1)
    return Outcome(
        request=request,
        prompt=prompt,
        runs=runs,
        texts={engine: _text(tokenizer, run) for engine, run in runs.items()},
        comparison=compare_runs(runs["stock"], runs["flashqsa"]) if compare else None,
    )


def _run_engines(request: RunRequest, engines: tuple[str, ...], *, show_progress: bool) -> dict[str, EngineRun]:
    """Runs the engines one after the other; two of them each in a process of its own."""
    run_one = run_engine if len(engines) == 1 else run_engine_apart
    runs = {}
    with _progress(show_progress) as progress:
        for engine in engines:
            task = progress.add_task(f"{ENGINES[engine]}: loading", total=None)

            def show(stage: str, done: int, total: int, engine: str = engine, task: Any = task) -> None:
                told = f"{ENGINES[engine]}: {stage} {done:,} of {total:,} tokens"
                progress.update(task, description=told, completed=done, total=total)

            runs[engine] = run_one(request, engine, show)
    return runs


@contextmanager
def _progress(show: bool) -> Iterator[Progress]:
    """Bars on stderr that are gone afterwards; none where nobody watches."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    shown = show and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not shown) as progress:
        yield progress


def _check_layers(run: EngineRun, config: QSAConfig, *, fed_tokens: int) -> None:
    """Makes sure that every row of every QSA layer went through FlashQSA."""
    rows = {layer.layer_id: layer.rows for layer in run.layers}
    expected = dict.fromkeys(config.qsa_layer_ids, fed_tokens + len(run.generated.token_ids))
    if rows != expected:
        raise UnsupportedError(
            f"generate: every QSA layer must run all its rows on FlashQSA, {expected} by layer, got {rows}. "
            "This is a fault of the integration: please report it with the versions of torch and transformers."
        )


def _text(tokenizer: Any | None, run: EngineRun) -> str | None:
    if tokenizer is None:
        return None
    text: str = tokenizer.decode(list(run.generated.token_ids), skip_special_tokens=True)
    return text
