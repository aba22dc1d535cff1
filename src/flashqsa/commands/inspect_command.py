"""`flashqsa inspect`: what a model selects, from a checkpoint and a prompt or from a recording."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from flashqsa.commands.generate_model import quiet_transformers
from flashqsa.commands.generate_prompt import PromptOptions
from flashqsa.commands.generate_request import RunOptions, check_options, prepare_run
from flashqsa.commands.inspect_files import PICTURES, check_output, write_output
from flashqsa.commands.inspect_model import errors_of, loaded_model
from flashqsa.commands.inspect_output import InspectOutcome, as_json, print_outcome
from flashqsa.commands.inspect_source import load_recording, parse_steps, record_prompt
from flashqsa.commands.inspect_study import study_recording
from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError

COMMAND = "inspect"
MASS_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What the user asked for, besides the prompt and how to run.

    Attributes:
        layer: The one layer to look at, or None for all.
        mass_rows: Rows to weigh against dense attention; None for `MASS_ROWS`. Of a checkpoint only.
        request: Which request of a recording; None for the first.
        steps: Which forwards of a recording, such as `0-12`; None for all.
        save: Where to write the recording; of a checkpoint only.
        plot: A PNG or SVG file to draw a layer into, or None.
        html: A file to write the report into, or None.
    """

    layer: int | None = None
    mass_rows: int | None = None
    request: int | None = None
    steps: str | None = None
    save: Path | None = None
    plot: Path | None = None
    html: Path | None = None


_OPTIONS, _RUN, _PROMPT = InspectOptions(), RunOptions(max_new_tokens=1), PromptOptions()


def inspect_selections(
    source: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a recording.")],
    prompt: Annotated[str | None, typer.Option(help="The prompt.")] = _PROMPT.text,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file with it; - reads stdin.")] = _PROMPT.file,
    random_tokens: Annotated[int | None, typer.Option(help="Draw so many tokens instead.")] = _PROMPT.random_tokens,
    seed: Annotated[int | None, typer.Option(help="Decides the drawn tokens; 0 by default.")] = _PROMPT.seed,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template; by default where there is one.")
    ] = _PROMPT.chat,
    layer: Annotated[int | None, typer.Option(help="Look at this layer alone.")] = _OPTIONS.layer,
    mass_rows: Annotated[
        int | None, typer.Option(help="Rows to weigh against dense attention; 64 by default, 0 for none.")
    ] = _OPTIONS.mass_rows,
    request: Annotated[int | None, typer.Option(help="Request of a recording; 0 by default.")] = _OPTIONS.request,
    steps: Annotated[str | None, typer.Option(help="Forwards of a recording, such as 0-12.")] = _OPTIONS.steps,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens that enter at once.")] = _RUN.prefill_chunk,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = _RUN.dtype,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = _RUN.device,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's choice by default.")] = _RUN.threads,
    save: Annotated[Path | None, typer.Option(help="Write the recording to this .safetensors file.")] = _OPTIONS.save,
    plot: Annotated[Path | None, typer.Option(help="Draw a layer into this .png or .svg file.")] = _OPTIONS.plot,
    html: Annotated[Path | None, typer.Option(help="Write a report to this .html file.")] = _OPTIONS.html,
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Tells which blocks each layer selects, from where, and what dense attention would have looked at.

    Raises:
        FlashQSAError: Wrong input, or a limit of this machine or installation.
        typer.Abort: Interrupted.
    """
    prompt_options = PromptOptions(text=prompt, file=prompt_file, random_tokens=random_tokens, seed=seed, chat=chat)
    run_options = RunOptions(max_new_tokens=1, prefill_chunk=prefill_chunk, dtype=dtype, device=device, threads=threads)
    options = InspectOptions(
        layer=layer, mass_rows=mass_rows, request=request, steps=steps, save=save, plot=plot, html=html
    )
    try:
        with errors_of(COMMAND):
            _check_outputs(options)
            if os.path.isfile(source):  # unlike Path.is_file it answers for a name that is too long, too
                outcome = _of_recording(source, prompt_options, run_options, options)
            else:
                show_progress = not (quiet or as_json_)
                outcome = _of_checkpoint(source, prompt_options, run_options, options, show_progress=show_progress)
            _write_outputs(outcome, options)
    except KeyboardInterrupt:
        raise typer.Abort from None
    if as_json_:
        typer.echo(json.dumps(as_json(outcome), indent=2))
        return
    print_outcome(outcome, Console(highlight=False))
    for name in ("save", "plot", "html"):
        if getattr(options, name) is not None:
            typer.echo(f"written: {getattr(options, name)}")


def _of_recording(
    source: Path, prompt_options: PromptOptions, run_options: RunOptions, options: InspectOptions
) -> InspectOutcome:
    unused = {
        "a prompt": prompt_options != _PROMPT,
        "how to run": run_options != _RUN,
        "mass-rows": options.mass_rows is not None,
        "save": options.save is not None,
    }
    for name, given in unused.items():
        if given:
            raise ArgumentError(
                f"{COMMAND}: {name} must be left out with a recording, got both. A recording is not run again; pass "
                "the checkpoint to run it."
            )
    recording = load_recording(source)
    request_id, steps = options.request or 0, parse_steps(options.steps, recording)
    study = study_recording(
        recording, {}, layer_ids=_layer_ids(recording.layer_ids, options.layer), request_id=request_id, steps=steps
    )
    forwards = len(recording.steps) if steps is None else len(steps)
    return InspectOutcome(
        source=str(source),
        kind="recording",
        about=f"{source}, recorded: request {request_id}, {_count(forwards, 'forward')}, "
        f"{_count(study.layers[0].rows, 'row')}",
        run={},
        request_id=request_id,
        steps=forwards,
        study=study,
    )


def _of_checkpoint(
    source: Path,
    prompt_options: PromptOptions,
    run_options: RunOptions,
    options: InspectOptions,
    *,
    show_progress: bool,
) -> InspectOutcome:
    for name in ("request", "steps"):
        if getattr(options, name) is not None:
            raise ArgumentError(
                f"{COMMAND}: {name} must come with a recording, got {getattr(options, name)} with a checkpoint. "
                "Leave it out; there is one prompt."
            )
    mass_rows = MASS_ROWS if options.mass_rows is None else options.mass_rows
    if mass_rows < 0:
        raise ArgumentError(f"{COMMAND}: mass-rows must be at least 0, got {mass_rows}. Choose another value.")
    if not os.path.exists(source):
        raise ArgumentError(
            f"{COMMAND}: source must be a checkpoint's folder or a recording, got {source}, which is not there. "
            "Check the path."
        )
    check_options(prompt_options, run_options, compare=False)
    config = QSAConfig.from_checkpoint(source)
    layer_ids = _layer_ids(config.qsa_layer_ids, options.layer)
    with quiet_transformers():
        request, prompt, _ = prepare_run(source, config, prompt_options, run_options)
    console = Console(stderr=True)
    with (
        loaded_model(request) as model,
        Progress(console=console, transient=True, disable=not (show_progress and console.is_terminal)) as progress,
    ):
        task = progress.add_task("prompt", total=len(request.prompt_ids))
        recording, masses = record_prompt(
            model,
            request,
            topk_blocks=config.topk_blocks,
            mass_rows=mass_rows,
            on_progress=lambda done, total: progress.update(task, completed=done),
        )
        ran_in = str(model.dtype).removeprefix("torch.")
    if options.save is not None:
        write_output(COMMAND, "save", options.save, recording.save)
    run = {
        "prompt": {"source": prompt.source, "tokens": len(prompt.token_ids), "chat": prompt.chat, "seed": prompt.seed},
        "prefill_chunk": request.prefill_chunk,
        "device": request.device,
        "threads": request.threads,
        "dtype": ran_in,
        "versions": _versions(),
    }
    kind = f"random, seed {prompt.seed}" if prompt.source == "random" else f"from {prompt.source}"
    return InspectOutcome(
        source=str(source),
        kind="checkpoint",
        about=f"{source} on {request.device}, {ran_in}: {_count(len(prompt.token_ids), 'token')} ({kind})",
        run=run,
        request_id=0,
        steps=len(recording.steps),
        study=study_recording(recording, masses, layer_ids=layer_ids),
    )


def _layer_ids(known: tuple[int, ...], wanted: int | None) -> tuple[int, ...]:
    if wanted is None:
        return known
    if wanted not in known:
        raise ArgumentError(f"{COMMAND}: layer must be one of {list(known)}, got {wanted}. Choose a QSA layer.")
    return (wanted,)


def _check_outputs(options: InspectOptions) -> None:
    check_output(COMMAND, "save", options.save, (".safetensors",))
    check_output(COMMAND, "plot", options.plot, PICTURES)
    check_output(COMMAND, "html", options.html, (".html", ".htm"))
    if options.plot is not None or options.html is not None:
        import flashqsa.commands.inspect_figures  # noqa: F401  # without matplotlib it fails here, before the work


def _write_outputs(outcome: InspectOutcome, options: InspectOptions) -> None:
    if options.plot is not None:
        from flashqsa.commands.inspect_figures import save_figure
        from flashqsa.commands.inspect_plots import draw_layer

        figure = draw_layer(outcome.study.layers[0], outcome.study.block_tokens)
        write_output(COMMAND, "plot", options.plot, lambda staged: save_figure(figure, staged))
    if options.html is not None:
        from flashqsa.commands.inspect_report import make_report

        page = make_report(outcome)
        write_output(COMMAND, "html", options.html, lambda staged: _write_text(staged, page))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _versions() -> dict[str, Any]:
    import transformers

    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
