"""What `flashqsa generate` prints: figures for people, or one JSON object for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flashqsa import __version__
from flashqsa.commands.generate_compare import Comparison, Difference
from flashqsa.commands.generate_engine import ENGINES, EngineRun, RunRequest
from flashqsa.commands.generate_prompt import Prompt

KEPT_CONTROLS = "\n\t"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Everything there is to tell.

    Attributes:
        request: What was run.
        prompt: Where its prompt came from.
        runs: The runs, by engine.
        texts: The generated text, by engine; None where the checkpoint has no tokenizer.
        comparison: Of two runs; None for one.
    """

    request: RunRequest
    prompt: Prompt
    runs: Mapping[str, EngineRun]
    texts: Mapping[str, str | None]
    comparison: Comparison | None


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain values, under the names that the documentation lists."""
    import transformers

    request, prompt = outcome.request, outcome.prompt
    return {
        "checkpoint": str(request.checkpoint),
        "prompt": {
            "source": prompt.source,
            "tokens": len(prompt.token_ids),
            "chat": prompt.chat,
            "seed": prompt.seed,
        },
        "max_new_tokens": request.max_new_tokens,
        "prefill_chunk": request.prefill_chunk,
        "device": request.device,
        "threads": request.threads,
        "versions": {
            "flashqsa": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "runs": {engine: _run_as_json(outcome, run) for engine, run in outcome.runs.items()},
        "comparison": _comparison_as_json(outcome.comparison) if outcome.comparison else None,
    }


def _run_as_json(outcome: Outcome, run: EngineRun) -> dict[str, Any]:
    generated = run.generated
    return {
        "token_ids": list(generated.token_ids),
        "text": outcome.texts[run.engine],
        "stopped": generated.stopped,
        "dtype": run.dtype,
        "load_s": run.load_s,
        "prefill_s": generated.prefill_s,
        "decode_s": generated.decode_s,
        "total_s": run.total_s,
        "prefill_tokens_per_s": len(outcome.prompt.token_ids) / generated.prefill_s,
        "decode_tokens_per_s": run.decode_tokens_per_s,
        "peak_bytes": run.peak_bytes,
        "growth_bytes": run.growth_bytes,
        "share_selected": share_selected(run),
        "operator_calls": run.operator_calls,
        "layers": [asdict(layer) | {"share_selected": layer.share_selected} for layer in run.layers],
    }


def _comparison_as_json(comparison: Comparison) -> dict[str, Any]:
    ratios = {name: getattr(comparison, f"{name}_ratio") for name in ("prefill", "decode", "total")}
    difference = comparison.first_difference
    return {
        "same_tokens": comparison.same_tokens,
        "first_difference": asdict(difference) if difference else None,
        "speed_ratio": ratios,
    }


def share_selected(run: EngineRun) -> float | None:
    """Share of the visible blocks that was attended, over all layers; None for an engine that does not count."""
    if not run.layers:
        return None
    visible = sum(layer.blocks_visible for layer in run.layers)
    return sum(layer.blocks_selected for layer in run.layers) / visible if visible else 1.0


def print_outcome(outcome: Outcome, console: Console) -> None:
    """Prints the outcome for people, in at most 80 columns where paths and the text allow."""
    shown = outcome.runs.get("flashqsa") or next(iter(outcome.runs.values()))
    text = outcome.texts[shown.engine]
    for line in (
        f"{outcome.request.checkpoint} on {outcome.request.device}, {shown.dtype}, "
        f"{_count(outcome.request.threads, 'thread')}",
        f"prompt: {_prompt_line(outcome)}",
        f"generated: {_count(len(shown.generated.token_ids), 'token')}, stopped by {shown.generated.stopped}",
        *_unused_lines(shown),
    ):
        console.out(line, highlight=False)
    console.print()
    console.out(_token_line(shown) if text is None else printable(text, console.encoding), highlight=False)
    console.print()
    console.print(_comparison_table(outcome) if outcome.comparison else _figures_table(outcome, shown))
    console.print()
    if shown.layers:
        console.print(_layers_table(shown))
        console.print()
    for line in (*_path_lines(shown), *_verdict_lines(outcome)):
        console.out(line, highlight=False)


def printable(text: str, encoding: str) -> str:
    """The text with all written out that a terminal would obey or cannot show, since a model may emit anything."""
    visible = (
        character if character in KEPT_CONTROLS or character.isprintable() else ascii(character)[1:-1]
        for character in text
    )
    return "".join(visible).encode(encoding, "backslashreplace").decode(encoding)


def _prompt_line(outcome: Outcome) -> str:
    prompt = outcome.prompt
    kind = f"random, seed {prompt.seed}" if prompt.source == "random" else f"from {prompt.source}"
    template = ", in the chat template" if prompt.chat else ""
    return (
        f"{_count(len(prompt.token_ids), 'token')} ({kind}{template}), in chunks of {outcome.request.prefill_chunk:,}"
    )


def _token_line(run: EngineRun) -> str:
    return f"token ids (there is no tokenizer): {' '.join(map(str, run.generated.token_ids))}"


def _unused_lines(run: EngineRun) -> list[str]:
    if not run.unused_tensors:
        return []
    return [f"unused: {_count(len(run.unused_tensors), 'tensor')} of the checkpoint, such as {run.unused_tensors[0]}"]


def _figures_table(outcome: Outcome, run: EngineRun) -> Table:
    table = _table(("", "left"), (ENGINES[run.engine], "right"))
    for name, value in _figures(outcome, run).items():
        table.add_row(name, value)
    return table


def _comparison_table(outcome: Outcome) -> Table:
    stock, flashqsa, comparison = outcome.runs["stock"], outcome.runs["flashqsa"], outcome.comparison
    assert comparison is not None
    ratios = {
        "prefill": comparison.prefill_ratio,
        "decode": comparison.decode_ratio,
        "total": comparison.total_ratio,
        "peak memory": stock.peak_bytes / max(1, flashqsa.peak_bytes),
        "  over the loaded model": stock.growth_bytes / max(1, flashqsa.growth_bytes),
    }
    table = _table(("", "left"), (ENGINES["stock"], "right"), (ENGINES["flashqsa"], "right"), ("stock / ours", "right"))
    theirs, ours = _figures(outcome, stock), _figures(outcome, flashqsa)
    for name in ours:
        ratio = ratios.get(name)
        table.add_row(name, theirs[name], ours[name], "" if ratio is None else f"{ratio:.2f} x")
    return table


def _figures(outcome: Outcome, run: EngineRun) -> dict[str, str]:
    generated, decode_speed = run.generated, run.decode_tokens_per_s
    return {
        "prefill": f"{generated.prefill_s:.2f} s",
        "  tokens/s": f"{len(outcome.prompt.token_ids) / generated.prefill_s:,.1f}",
        "decode": f"{generated.decode_s:.2f} s",
        "  tokens/s ": "-" if decode_speed is None else f"{decode_speed:,.1f}",
        "total": f"{run.total_s:.2f} s",
        "peak memory": f"{run.peak_bytes / 2**20:,.0f} MiB",
        "  over the loaded model": f"{run.growth_bytes / 2**20:,.0f} MiB",
    }


def _layers_table(run: EngineRun) -> Table:
    names = ("QSA layer", "rows", "dense rows", "blocks selected", "of visible", "share")
    table = _table(*((name, "right") for name in names))
    for layer in run.layers:
        counts = (layer.rows, layer.dense_rows, layer.blocks_selected, layer.blocks_visible)
        table.add_row(str(layer.layer_id), *(f"{count:,}" for count in counts), f"{layer.share_selected:.1%}")
    return table


def _path_lines(run: EngineRun) -> list[str]:
    if run.operator_calls:
        served = ", ".join(f"{name} {count:,}" for name, count in run.operator_calls.items())
        return [f"served by FlashQSA: {served} calls"]
    share = share_selected(run)
    if share is None:
        return []
    sparse = sum(layer.rows > layer.dense_rows for layer in run.layers)
    if sparse == 0:
        return ["sparse path: not needed, no row saw more blocks than the budget holds"]
    layers = _count(len(run.layers), "QSA layer")
    return [f"sparse path: ran in {sparse} of {layers}; {share:.1%} of the blocks in sight attended"]


def _verdict_lines(outcome: Outcome) -> list[str]:
    if outcome.comparison is None:
        return []
    run, difference = outcome.runs["flashqsa"], outcome.comparison.first_difference
    if difference is None:
        return [f"same tokens: yes, all {len(run.generated.token_ids):,}"]
    return [
        f"same tokens: no, from generated token {difference.index + 1:,} on",
        f"  stock transformers: {_token(difference.stock_token_id, difference.stock_margin)}",
        f"  FlashQSA: {_token(difference.flashqsa_token_id, difference.flashqsa_margin)}",
        *_mismatch_reasons(run.dtype, difference),
    ]


def _mismatch_reasons(dtype: str, difference: Difference) -> list[str]:
    lines = [
        "  stock ranks blocks by torch.topk, which breaks ties between equal scores arbitrarily;",
        "  in FlashQSA the lower block wins",
    ]
    if dtype != "float32":
        lines.append(f"  in {dtype} the engines round at different places; compare with --dtype float32")
    return lines


def _token(token_id: int | None, margin: float | None) -> str:
    if token_id is None or margin is None:
        return "nothing, it had stopped"
    return f"token {token_id}, its logit {margin:.2g} above the second best"


def _table(*columns: tuple[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name, justify in columns:
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
