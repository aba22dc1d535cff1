"""`flashqsa tiny`: a small random checkpoint, to try everything on a laptop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from flashqsa.commands.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

_DEFAULTS = TinyOptions()


def tiny(
    directory: Annotated[Path, typer.Argument(help="Where to write; made when it does not exist.")],
    layers: Annotated[int, typer.Option(help="Decoder layers; every fourth is a QSA layer.")] = _DEFAULTS.layers,
    heads: Annotated[int, typer.Option(help="Query heads of a QSA layer.")] = _DEFAULTS.heads,
    kv_heads: Annotated[int, typer.Option(help="Key/value heads of a QSA layer.")] = _DEFAULTS.kv_heads,
    head_dim: Annotated[int, typer.Option(help="Dimension of these heads; a quarter rotates.")] = _DEFAULTS.head_dim,
    index_heads: Annotated[int, typer.Option(help="Query heads of the indexer.")] = _DEFAULTS.index_heads,
    index_head_dim: Annotated[int, typer.Option(help="Dimension of an index head.")] = _DEFAULTS.index_head_dim,
    ratio: Annotated[int, typer.Option(help="Tokens of a block.")] = _DEFAULTS.ratio,
    budget: Annotated[int, typer.Option(help="Tokens that a row selects at most.")] = _DEFAULTS.budget,
    ngram: Annotated[bool, typer.Option(help="Give the second layer hashed n-gram embeddings.")] = _DEFAULTS.ngram,
    mtp: Annotated[bool, typer.Option(help="Add a multi-token-prediction layer.")] = _DEFAULTS.mtp,
    seed: Annotated[int, typer.Option(help="The same seed gives the same file, bit for bit.")] = _DEFAULTS.seed,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = _DEFAULTS.dtype,
    force: Annotated[bool, typer.Option("--force", help="Write into a directory that holds files.")] = False,
) -> None:
    """Writes a small random `qwen4_exp` checkpoint into `directory`.

    Raises:
        ArgumentError: An option breaks a rule, or the directory cannot be written.
        UnsupportedError: The installed transformers does not know the architecture.
    """
    options = TinyOptions(
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        index_heads=index_heads,
        index_head_dim=index_head_dim,
        ratio=ratio,
        budget=budget,
        ngram=ngram,
        mtp=mtp,
        seed=seed,
        dtype=dtype,
    )
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("drawing weights", total=None)
        report = write_tiny_checkpoint(
            directory,
            options,
            force=force,
            on_tensor=lambda done, total: progress.update(task, completed=done, total=total),
        )
    Console().print(
        f"{directory}: {report.parameters:,} parameters in {report.tensors} tensors ({dtype}, "
        f"{report.file_bytes / 2**20:.1f} MiB); {layers} layers, QSA in {', '.join(map(str, report.qsa_layer_ids))}; "
        f"budget {budget} tokens in blocks of {ratio}",
        highlight=False,
        soft_wrap=True,
    )
