"""`flashqsa needle`: whether a sentence hidden in a long prompt is among what the final rows attend."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from flashqsa.commands.generate_engine import RunRequest
from flashqsa.commands.generate_model import load_stop_ids, load_text_config, quiet_transformers
from flashqsa.commands.generate_prompt import PromptOptions, check_seed, check_text
from flashqsa.commands.generate_request import RunOptions, check_options, prepare_run
from flashqsa.commands.inspect_files import PICTURES, check_output, write_output
from flashqsa.commands.inspect_model import errors_of, loaded_model
from flashqsa.commands.needle_output import NeedleOutcome, as_json, print_outcome
from flashqsa.commands.needle_prompt import Haystack, Plant, make_haystack, parse_contexts, parse_depths, plant
from flashqsa.commands.needle_search import search_needle
from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError

COMMAND = "needle"


@dataclass(frozen=True, kw_only=True)
class NeedleOptions:
    """What the user asked for, besides how to run.

    Attributes:
        contexts: Lengths of the prompts, separated by commas: tokens, or with k or m thousands or millions of them.
        depths: Where the needle lies, in percent, separated by commas.
        final_rows: How many of the last rows have to find it.
        needle: Its text, or None.
        question: What comes last, or None.
        filler_file: A text file with the filler, or None.
        seed: Decides the order of the sentences of the filler.
        plot: A PNG or SVG file to draw into, or None.
    """

    contexts: str = "4k,32k,128k"
    depths: str = "0,25,50,75,100"
    final_rows: int = 8
    needle: str | None = None
    question: str | None = None
    filler_file: Path | None = None
    seed: int = 0
    plot: Path | None = None


_DEFAULTS, _RUN = NeedleOptions(), RunOptions()


def needle(
    checkpoint: Annotated[Path, typer.Argument(help="The checkpoint's folder.")],
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts; k is 1,024.")] = _DEFAULTS.contexts,
    depths: Annotated[str, typer.Option(help="Where the needle lies, in percent.")] = _DEFAULTS.depths,
    final_rows: Annotated[int, typer.Option(help="Rows at the end that have to find it.")] = _DEFAULTS.final_rows,
    needle: Annotated[str | None, typer.Option(help="The needle's text.")] = _DEFAULTS.needle,
    question: Annotated[str | None, typer.Option(help="The text that comes last.")] = _DEFAULTS.question,
    filler_file: Annotated[Path | None, typer.Option(help="A text file with the filler.")] = _DEFAULTS.filler_file,
    seed: Annotated[int, typer.Option(help="Decides the order of the filler's sentences.")] = _DEFAULTS.seed,
    prefill_chunk: Annotated[int, typer.Option(help="Tokens that enter at once.")] = _RUN.prefill_chunk,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = _RUN.dtype,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = _RUN.device,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's choice by default.")] = _RUN.threads,
    plot: Annotated[Path | None, typer.Option(help="Draw into this .png or .svg file.")] = _DEFAULTS.plot,
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Tells per context, depth and layer whether the needle's blocks are selected. Nothing is generated.

    Raises:
        FlashQSAError: Wrong input, or a limit of this machine or installation.
        typer.Abort: Interrupted.
    """
    options = NeedleOptions(
        contexts=contexts,
        depths=depths,
        final_rows=final_rows,
        needle=needle,
        question=question,
        filler_file=filler_file,
        seed=seed,
        plot=plot,
    )
    run_options = RunOptions(max_new_tokens=1, prefill_chunk=prefill_chunk, dtype=dtype, device=device, threads=threads)
    try:
        with errors_of(COMMAND):
            outcome = _run(checkpoint, options, run_options, show_progress=not (quiet or as_json_))
        if plot is not None:
            _draw(outcome, plot)
    except KeyboardInterrupt:
        raise typer.Abort from None
    if as_json_:
        typer.echo(json.dumps(as_json(outcome), indent=2))
    else:
        print_outcome(outcome, Console(highlight=False))
        if plot is not None:
            typer.echo(f"drawn: {plot}")


def _run(checkpoint: Path, options: NeedleOptions, run_options: RunOptions, *, show_progress: bool) -> NeedleOutcome:
    lengths, depths = parse_contexts(options.contexts), parse_depths(options.depths)
    _check_options(options, run_options)
    config = QSAConfig.from_checkpoint(checkpoint)
    if max(lengths) > config.max_positions:
        raise ArgumentError(
            f"{COMMAND}: contexts must fit into the model's {config.max_positions:,} positions, got {max(lengths):,}. "
            "Leave out the longer ones."
        )
    with quiet_transformers():
        request, haystack = _prepare(checkpoint, config, options, run_options)
    plants = [plant(haystack, context, depth) for context in lengths for depth in depths]
    most_rows = len(haystack.question) - config.block_tokens + 1
    if options.final_rows > most_rows:
        raise ArgumentError(
            f"{COMMAND}: final-rows must be at most {most_rows}, so that all of them see all blocks of the needle, got "
            f"{options.final_rows}. Choose fewer, or a longer --question."
        )
    console = Console(stderr=True)
    searches = []
    with (
        loaded_model(request) as model,
        Progress(console=console, transient=True, disable=not (show_progress and console.is_terminal)) as progress,
    ):
        task = progress.add_task("", total=sum(planted.context for planted in plants))
        done_before = 0
        for planted in plants:
            progress.update(task, description=_told(planted))
            searches.append(
                search_needle(
                    model,
                    planted,
                    needle_tokens=len(haystack.needle),
                    final_rows=options.final_rows,
                    block_tokens=config.block_tokens,
                    prefill_chunk=run_options.prefill_chunk,
                    on_progress=lambda done, total, before=done_before: progress.update(task, completed=before + done),
                )
            )
            done_before += planted.context
        ran_in = str(model.dtype).removeprefix("torch.")
    return NeedleOutcome(
        request=request,
        dtype=ran_in,
        config=config,
        haystack=haystack,
        seed=options.seed,
        final_rows=options.final_rows,
        searches=tuple(searches),
    )


def _told(planted: Plant) -> str:
    return f"{planted.context:,} tokens, depth {planted.depth:g}%"


def _check_options(options: NeedleOptions, run_options: RunOptions) -> None:
    check_options(PromptOptions(random_tokens=1), run_options, compare=False)
    check_seed(options.seed)
    check_text("needle", options.needle)
    check_text("question", options.question)
    if options.final_rows < 1:
        raise ArgumentError(
            f"{COMMAND}: final-rows must be at least 1, got {options.final_rows}. Choose another value."
        )
    check_output(COMMAND, "plot", options.plot, PICTURES)
    if options.plot is not None:
        import flashqsa.commands.inspect_figures  # noqa: F401  # without matplotlib it fails here, before the work


def _prepare(
    checkpoint: Path, config: QSAConfig, options: NeedleOptions, run_options: RunOptions
) -> tuple[RunRequest, Haystack]:
    request, _, tokenizer = prepare_run(checkpoint, config, PromptOptions(random_tokens=1), run_options)
    text_config = load_text_config(checkpoint)
    haystack = make_haystack(
        tokenizer,
        needle=options.needle,
        question=options.question,
        filler_file=options.filler_file,
        seed=options.seed,
        block_tokens=config.block_tokens,
        vocab_size=text_config.vocab_size,
        stop_ids=load_stop_ids(checkpoint, text_config),
    )
    return replace(request, prompt_ids=()), haystack


def _draw(outcome: NeedleOutcome, path: Path) -> None:
    from flashqsa.commands.inspect_figures import save_figure
    from flashqsa.commands.needle_plot import draw_needle

    figure = draw_needle(outcome.searches)
    write_output(COMMAND, "plot", path, lambda staged: save_figure(figure, staged))
