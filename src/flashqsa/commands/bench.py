"""`flashqsa bench`: how long a layer's stages take on this machine, beside dense attention and the floor."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console, Group
from rich.live import Live

from flashqsa.cache import CacheLayout
from flashqsa.commands import EXIT_MISMATCH
from flashqsa.commands.bench_compare import Earlier, compare, read_earlier
from flashqsa.commands.bench_gate import first_difference
from flashqsa.commands.bench_output import closing_lines, headline, make_table
from flashqsa.commands.bench_result import SPARSE, BenchOutcome, Measured, as_json
from flashqsa.commands.bench_timing import Ceilings, measure_ceilings, time_in_turn
from flashqsa.commands.bench_workload import Setting, Workload
from flashqsa.commands.doctor import DTYPES, RELEASED
from flashqsa.commands.doctor_backends import explain_stages, taken_backend
from flashqsa.commands.generate_engine import check_threads, is_out_of_memory, torch_threads
from flashqsa.commands.generate_request import device_named
from flashqsa.commands.inspect_files import PICTURES, check_output, write_output
from flashqsa.commands.needle_prompt import parse_contexts
from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError, UnsupportedError

COMMAND = "bench"
REPEATS_CPU, REPEATS_GPU = 7, 30


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What the user asked for.

    Attributes:
        contexts: Lengths, separated by commas: tokens, or with k or m thousands or millions of them.
        rows: Rows of each request: 1 decodes, a few verify, many prefill.
        requests: Requests in a step.
        page_tokens: Tokens of a page.
        dtype: `auto`, `float32`, `bfloat16` or `float16`; `auto` is float32 on a CPU and bfloat16 on CUDA.
        device: `auto`, `cpu`, `cuda` or `cuda:N`; `auto` is CUDA where there is one.
        threads: CPU threads; None leaves torch's choice.
        repeats: Timed calls; None for 7 on a CPU and 30 on CUDA.
        dense: Whether to time dense attention.
        plot: A PNG or SVG file to draw into, or None.
        compare: An earlier result, or None.
    """

    contexts: str = "1k,4k,16k,64k"
    rows: int = 1
    requests: int = 1
    page_tokens: int = 64
    dtype: str = "auto"
    device: str = "auto"
    threads: int | None = None
    repeats: int | None = None
    dense: bool = True
    plot: Path | None = None
    compare: Path | None = None


_DEFAULTS = BenchOptions()


class WrongResultError(Exception):
    """What would be timed gives a wrong result."""


def bench(
    checkpoint: Annotated[
        Path | None, typer.Argument(help="A checkpoint's folder; the released shapes by default.")
    ] = None,
    contexts: Annotated[str, typer.Option(help="Tokens of a request; k is 1,024.")] = _DEFAULTS.contexts,
    rows: Annotated[
        int, typer.Option(help="New tokens of each request: 1 decodes, more verify or prefill.")
    ] = _DEFAULTS.rows,
    requests: Annotated[int, typer.Option(help="Requests in a step.")] = _DEFAULTS.requests,
    page_tokens: Annotated[int, typer.Option(help="Tokens of a cache page.")] = _DEFAULTS.page_tokens,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = _DEFAULTS.dtype,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = _DEFAULTS.device,
    threads: Annotated[int | None, typer.Option(help="CPU threads; torch's choice by default.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Timed calls; 7 on a CPU, 30 on CUDA by default.")] = None,
    dense: Annotated[bool, typer.Option("--dense/--no-dense", help="Time dense attention too.")] = True,
    plot: Annotated[Path | None, typer.Option(help="Draw into this .png or .svg file.")] = None,
    compare: Annotated[Path | None, typer.Option(help="An earlier result (--json) to set beside this one.")] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No table before the end.")] = False,
) -> int:
    """Times the stages of one layer and the whole of it, at several contexts.

    Returns:
        The exit code: 0, or 3 when a result is wrong; nothing is timed then.

    Raises:
        FlashQSAError: Wrong input, or a limit of this machine.
        typer.Abort: Interrupted.
    """
    options = BenchOptions(
        contexts=contexts,
        rows=rows,
        requests=requests,
        page_tokens=page_tokens,
        dtype=dtype,
        device=device,
        threads=threads,
        repeats=repeats,
        dense=dense,
        plot=plot,
        compare=compare,
    )
    try:
        return _run(checkpoint, options, as_json_=as_json_, show_progress=not (quiet or as_json_))
    except KeyboardInterrupt:
        raise typer.Abort from None
    except WrongResultError as error:
        print(f"flashqsa: bench: {error}; nothing was timed there", file=sys.stderr)
        return EXIT_MISMATCH


def _run(checkpoint: Path | None, options: BenchOptions, *, as_json_: bool, show_progress: bool) -> int:
    lengths, earlier = _check_options(options)
    config = RELEASED if checkpoint is None else QSAConfig.from_checkpoint(checkpoint)
    setting = _setting(config, options)
    if lengths[-1] > config.max_positions:
        raise ArgumentError(
            f"bench: contexts must fit into the model's {config.max_positions:,} positions, got {lengths[-1]:,}. "
            "Leave out the longer ones."
        )
    layout = CacheLayout.from_config(config, page_tokens=options.page_tokens, dtype=setting.dtype)
    named = None if checkpoint is None else str(checkpoint)
    threads = options.threads or torch.get_num_threads()
    on_gpu = setting.device.type == "cuda"
    repeats = options.repeats or (REPEATS_GPU if on_gpu else REPEATS_CPU)
    console, told = Console(stderr=True, highlight=False, markup=False), headline(setting, named, threads)
    measured: list[Measured] = []
    show = show_progress and console.is_terminal
    with _memory_errors(), torch_threads(threads):
        first = Group(told, make_table(lengths, [], None))
        with Live(first, console=console, transient=True) if show else _NoTable() as live:
            ceilings = measure_ceilings(setting.dtype, setting.device)
            for context in lengths:
                measured.append(_measure(setting, context, options, repeats, ceilings))
                live.update(Group(told, make_table(lengths, measured, None)))
    outcome = BenchOutcome(
        checkpoint=named,
        setting=setting,
        repeats=repeats,
        threads=threads,
        backends={
            stage: taken_backend(lines)
            for stage, lines in explain_stages(config, layout, setting.dtype, setting.device).items()
        },
        ceilings=ceilings,
        contexts=tuple(measured),
    )
    if options.plot is not None:
        _draw(outcome, options.plot)
    _print(outcome, told, earlier, options.plot, as_json_=as_json_)
    return 0


def _measure(setting: Setting, context: int, options: BenchOptions, repeats: int, ceilings: Ceilings) -> Measured:
    work = Workload(setting, context, dense=options.dense)
    wrong = first_difference(work)
    if wrong is not None:
        raise WrongResultError(wrong)
    return Measured(
        context=context,
        times=time_in_turn(work.contenders(), repeats=repeats, device=setting.device),
        floor_us=round(ceilings.floor_us(*work.floor()), 2),
        neighbour_overlap=work.neighbour_overlap(),
    )


def _print(outcome: BenchOutcome, told: str, earlier: Earlier | None, plot: Path | None, *, as_json_: bool) -> None:
    result = as_json(outcome)
    comparison = None if earlier is None else compare(result, earlier)
    if as_json_:
        typer.echo(json.dumps(result | {"comparison": comparison}, indent=2))
        return
    console = Console(highlight=False)
    console.out(told, highlight=False)
    ratios = None
    if comparison is not None:
        ratios = {row["context"]: row["ratios"][SPARSE] for row in comparison["contexts"] if SPARSE in row["ratios"]}
    console.print()
    console.print(make_table([found.context for found in outcome.contexts], outcome.contexts, ratios))
    console.print()
    for line in closing_lines(outcome, comparison):
        console.out(line, highlight=False)
    if plot is not None:
        console.out(f"drawn: {plot}", highlight=False)


def _check_options(options: BenchOptions) -> tuple[list[int], Earlier | None]:
    lengths = sorted(parse_contexts(options.contexts, command=COMMAND))
    check_threads(options.threads, command=COMMAND)
    for name in ("rows", "requests", "page_tokens", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ArgumentError(
                f"bench: {name.replace('_', '-')} must be at least 1, got {value}. Choose another value."
            )
    if options.rows > lengths[0]:
        raise ArgumentError(
            f"bench: rows must be at most the shortest context, {lengths[0]:,} tokens, got {options.rows:,}. "
            "Choose fewer rows or longer --contexts."
        )
    if options.dtype not in ("auto", *DTYPES):
        raise ArgumentError(
            f"bench: dtype must be among auto, {', '.join(DTYPES)}, got {options.dtype}. Choose one of them."
        )
    check_output(COMMAND, "plot", options.plot, PICTURES)
    if options.plot is not None:
        import flashqsa.commands.inspect_figures  # noqa: F401  # without matplotlib it fails here, before the work
    return lengths, None if options.compare is None else read_earlier(options.compare)


def _setting(config: QSAConfig, options: BenchOptions) -> Setting:
    device = torch.device(device_named(options.device, command=COMMAND))
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Setting(
        config=config,
        requests=options.requests,
        rows=options.rows,
        page_tokens=options.page_tokens,
        dtype=DTYPES.get(options.dtype, auto),
        device=device,
    )


@contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        told = " ".join(str(error).split())
        raise UnsupportedError(
            f"bench: caches and dense attention must fit in memory, got: {told}. Take shorter --contexts, fewer "
            "--requests or --rows, a narrower --dtype, or --no-dense."
        ) from error


def _draw(outcome: BenchOutcome, path: Path) -> None:
    from flashqsa.commands.bench_plot import draw_bench
    from flashqsa.commands.inspect_figures import save_figure

    figure = draw_bench(outcome)
    write_output(COMMAND, "plot", path, lambda staged: save_figure(figure, staged))


class _NoTable:
    """Stands for the live table where nobody watches."""

    def __enter__(self) -> _NoTable:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def update(self, _: object) -> None:
        """Shows nothing."""
