"""One run of one engine: load, warm up, generate, and measure time, memory and what was attended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashqsa.commands.generate_loop import Generated, Progress, generate_tokens
from flashqsa.commands.generate_memory import peak_bytes, start_peak
from flashqsa.commands.generate_model import load_model, quiet_transformers
from flashqsa.errors import ArgumentError, UnsupportedError
from flashqsa.integrations import hf

ENGINES = {"flashqsa": "FlashQSA", "stock": "stock transformers", "vllm": "vLLM on FlashQSA"}
"""Names of the engines, and how they are written out."""

WARM_UP_TOKENS = 8
MOST_THREADS = 1024


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """What every engine of one call gets. Plain values alone: it travels to other processes.

    Attributes:
        checkpoint: The checkpoint's folder.
        prompt_ids: The prompt.
        max_new_tokens: Tokens to generate at most.
        prefill_chunk: Prompt tokens that enter at once.
        stop_ids: Tokens after which nothing more is generated.
        dtype: `auto`, `float32`, `bfloat16` or `float16`.
        device: A torch device.
        threads: CPU threads of torch.
    """

    checkpoint: Path
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    prefill_chunk: int
    stop_ids: tuple[int, ...]
    dtype: str
    device: str
    threads: int


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """What one engine did.

    Attributes:
        engine: A key of `ENGINES`.
        generated: The tokens, and the time they took.
        dtype: The dtype that the model ran in.
        load_s: Seconds to load the model.
        peak_bytes: Memory held at most while generating.
        loaded_bytes: Memory held just before.
        layers: What each QSA layer attended; empty for engines that do not count by layer.
        operator_calls: How often each of FlashQSA's stages or operators served vLLM; empty for other engines.
        unused_tensors: Names of the checkpoint's tensors that the model has no use for.
    """

    engine: str
    generated: Generated
    dtype: str
    load_s: float
    peak_bytes: int
    loaded_bytes: int
    layers: tuple[hf.LayerReport, ...] = ()
    operator_calls: dict[str, int] = field(default_factory=dict)
    unused_tensors: tuple[str, ...] = field(default=(), repr=False)

    @property
    def growth_bytes(self) -> int:
        """Memory that generating took on top of the loaded model."""
        return max(0, self.peak_bytes - self.loaded_bytes)

    @property
    def total_s(self) -> float:
        """Seconds for the prompt and all tokens."""
        return self.generated.prefill_s + self.generated.decode_s

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Speed after the first token, which is the prefill's; None when there was no other."""
        after_first = len(self.generated.token_ids) - 1
        return after_first / self.generated.decode_s if after_first else None


def run_engine(request: RunRequest, engine: str, on_progress: Progress = lambda stage, done, total: None) -> EngineRun:
    """Runs one engine in this process.

    Args:
        request: What to run.
        engine: A key of `ENGINES`.
        on_progress: Told about every chunk and every token.

    Raises:
        ConfigError: The checkpoint does not load.
        ArgumentError: The model's logits are not finite.
        UnsupportedError: The model or the prompt does not fit in memory; or, of vLLM, as `run_vllm`.
    """
    if engine == "vllm":
        from flashqsa.commands.generate_vllm import run_vllm

        with _memory_errors(engine), torch_threads(request.threads):
            return run_vllm(request, on_progress)
    device = torch.device(request.device)
    with _memory_errors(engine), torch_threads(request.threads), quiet_transformers():
        started = time.perf_counter()
        model, unused_tensors = load_model(request.checkpoint, dtype=request.dtype, device=device)
        load_s = time.perf_counter() - started
        with _engine_on(model, engine):
            _generate(model, request, request.prompt_ids[:WARM_UP_TOKENS], max_new_tokens=2)
        with _engine_on(model, engine):  # enabled anew, it counts from zero
            loaded_bytes = start_peak(device)
            generated = _generate(
                model, request, request.prompt_ids, max_new_tokens=request.max_new_tokens, on_progress=on_progress
            )
            peak = peak_bytes(device)
            layers = tuple(hf.report(model)) if engine == "flashqsa" else ()
    return EngineRun(
        engine=engine,
        generated=generated,
        dtype=str(model.dtype).removeprefix("torch."),
        load_s=load_s,
        peak_bytes=peak,
        loaded_bytes=loaded_bytes,
        layers=layers,
        unused_tensors=unused_tensors,
    )


def _generate(model: Any, request: RunRequest, prompt_ids: Sequence[int], **how: Any) -> Generated:
    return generate_tokens(model, prompt_ids, prefill_chunk=request.prefill_chunk, stop_ids=request.stop_ids, **how)


@contextmanager
def _engine_on(model: Any, engine: str) -> Iterator[None]:
    if engine == "stock":
        yield
        return
    with hf.enabled(model):
        yield


def check_threads(count: int | None, *, command: str = "generate") -> None:
    """Checks a number of CPU threads that a user gave.

    Args:
        count: The number; None for torch's choice.
        command: Name of the sub-command, first in the message.

    Raises:
        ArgumentError: There are none, or more than can be started.
    """
    if count is not None and not 1 <= count <= MOST_THREADS:
        raise ArgumentError(
            f"{command}: threads must be at least 1 and at most {MOST_THREADS:,}, got {count}. Choose another value."
        )


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """So many CPU threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _memory_errors(engine: str) -> Iterator[None]:
    """Running out of memory is a limit of the machine, told in one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise memory_error(engine, " ".join(str(error).split())) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a failure says that memory ran out, on the CPU or on a device."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def memory_error(engine: str, told: str) -> UnsupportedError:
    """The error for an engine that ran out of memory.

    Args:
        engine: A key of `ENGINES`.
        told: What the system said.
    """
    return UnsupportedError(
        f"generate: {ENGINES[engine]} must fit in memory, got: {told}. "
        "Take a smaller --prefill-chunk, a shorter prompt or a narrower --dtype."
    )
