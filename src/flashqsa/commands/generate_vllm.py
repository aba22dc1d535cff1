"""`--engine vllm`: the same prompt through an engine of vLLM whose QSA layers run on FlashQSA."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from flashqsa.commands.generate_engine import WARM_UP_TOKENS, EngineRun, RunRequest, is_out_of_memory
from flashqsa.commands.generate_loop import Generated, Progress
from flashqsa.commands.generate_memory import peak_bytes, start_peak
from flashqsa.errors import DeviceError, FlashQSAError, UnsupportedError

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: its memory and its calls are counted
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""What vLLM reads when it is imported, where the user has not said otherwise."""


def run_vllm(request: RunRequest, on_progress: Progress) -> EngineRun:
    """Runs vLLM in this process.

    The prompt enters in chunks of `prefill_chunk` tokens, one request alone, without graphs. Where FLASHQSA_VLLM is
    unset, mode `full` is taken.

    Args:
        request: What to run.
        on_progress: Told about every token.

    Raises:
        UnsupportedError: vLLM is not installed, does not load the checkpoint, or did not run on FlashQSA.
        DeviceError: The installed vLLM is built for another device.
    """
    for name, value in (ENVIRONMENT | {"FLASHQSA_VLLM": "full"}).items():
        os.environ.setdefault(name, value)
    device = torch.device(request.device)
    platform = _platform()
    if platform != device.type:
        raise DeviceError(
            f"generate: device must be {platform} with --engine vllm, the build that is installed, got {device.type}. "
            f"Pass --device {platform}, or install the other build."
        )
    from flashqsa.integrations import vllm_plugin

    vllm_plugin.register()  # does nothing where the entry point has been read
    started = time.perf_counter()
    with _refusals(request):  # some layers tell at their first step alone what they do not serve
        engine = _load(request)
        load_s = time.perf_counter() - started
        warm_up = replace(request, prompt_ids=request.prompt_ids[:WARM_UP_TOKENS], max_new_tokens=2)
        _generate(engine, warm_up, lambda stage, done, total: None)
    before = vllm_plugin.report()
    loaded_bytes = start_peak(device)
    generated = _generate(engine, request, on_progress)
    peak = peak_bytes(device)
    calls = {name: count - before.get(name, 0) for name, count in vllm_plugin.report().items()}
    if not any(calls.values()):
        raise UnsupportedError(
            "generate: QSA layers must run on FlashQSA, got none that did. See vLLM's warnings, or set FLASHQSA_VLLM."
        )
    dtype = str(engine.llm_engine.model_config.dtype).removeprefix("torch.")
    return EngineRun(
        engine="vllm", generated=generated, dtype=dtype, load_s=load_s, peak_bytes=peak, loaded_bytes=loaded_bytes,
        operator_calls=calls,
    )  # fmt: skip


def _platform() -> str:
    try:
        from vllm.platforms import current_platform
    except ModuleNotFoundError as error:
        if error.name != "vllm":
            raise
        raise UnsupportedError(
            "generate: vllm must be installed for --engine vllm, got no module of that name. Install vllm on a GPU, "
            "vllm-cpu elsewhere, in an environment of its own."
        ) from error
    device_type: str = current_platform.device_type
    return device_type


@contextmanager
def _refusals(request: RunRequest) -> Iterator[None]:
    """What vLLM raises, in many types, told in one line."""
    try:
        yield
    except (ValueError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, FlashQSAError) or is_out_of_memory(error):
            raise
        told = " ".join(str(error).split())
        raise UnsupportedError(
            f"generate: checkpoint must be one that vLLM serves here, got {request.checkpoint} with "
            f"({type(error).__name__}: {told[:400]}). Take --engine flashqsa."
        ) from error


def _load(request: RunRequest) -> Any:
    from vllm import LLM

    return LLM(
        str(request.checkpoint), skip_tokenizer_init=True, enforce_eager=True, dtype=request.dtype,
        max_model_len=len(request.prompt_ids) + max(2, request.max_new_tokens), max_num_seqs=1,
        max_num_batched_tokens=request.prefill_chunk, enable_chunked_prefill=True, enable_prefix_caching=False,
    )  # fmt: skip


def _generate(engine: Any, request: RunRequest, on_progress: Progress) -> Generated:
    from vllm import SamplingParams

    sampling = SamplingParams(
        max_tokens=request.max_new_tokens, temperature=0, detokenize=False, ignore_eos=True, logprobs=2,
        stop_token_ids=list(request.stop_ids),
    )  # fmt: skip
    token_ids: list[int] = []
    started = time.perf_counter()
    first_known = started
    engine.llm_engine.add_request("generate", {"prompt_token_ids": list(request.prompt_ids)}, sampling)
    while engine.llm_engine.has_unfinished_requests():
        for output in engine.llm_engine.step():
            chosen = output.outputs[0]
            if not token_ids and chosen.token_ids:
                first_known = time.perf_counter()
            token_ids = list(chosen.token_ids)
            on_progress("decode", len(token_ids), request.max_new_tokens)
    ended = time.perf_counter()
    stopped = "stop token" if token_ids and token_ids[-1] in request.stop_ids else "length"
    margins = tuple(_margin(row, token) for row, token in zip(chosen.logprobs, token_ids, strict=True))
    return Generated(
        token_ids=tuple(token_ids), margins=margins, stopped=stopped, prefill_s=first_known - started,
        decode_s=ended - first_known,
    )  # fmt: skip


def _margin(row: Any, token_id: int) -> float:
    """How far the log-probability of a token lies above the best other one."""
    others = [entry.logprob for other, entry in row.items() if other != token_id]
    return float(row[token_id].logprob - max(others))
