"""`warmup`: compile the kernels that serving can reach, before the first request asks for them."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from flashqsa.backends import takes_kernels
from flashqsa.cache import CacheLayout, LayerCache
from flashqsa.checks import expect_int, expect_type
from flashqsa.config import QSAConfig
from flashqsa.errors import ArgumentError, DeviceError, ShapeError
from flashqsa.rope import RopeTable
from flashqsa.warming.serving import Inputs, PaddingServer
from flashqsa.warming.shapes import step_shapes

FORMS = ("row_exact", "shards", "token_lists", "e4m3_queries")


@dataclass(frozen=True)
class WarmupReport:
    """What `warmup` did.

    Attributes:
        compiled: Variants of kernels that were compiled.
        loaded: Variants that came from Triton's cache on disk.
        steps: Steps that were run.
        seconds: How long it took.
        refusals: Stage to the reason why kernels refuse it at these shapes; nothing is compiled for it.
    """

    compiled: int = 0
    loaded: int = 0
    steps: int = 0
    seconds: float = 0.0
    refusals: dict[str, str] = field(default_factory=dict)


def warmup(
    config: QSAConfig,
    *,
    cache: LayerCache | CacheLayout | None = None,
    device: torch.device | str | None = None,
    rope: RopeTable | None = None,
    paged: bool = True,
    max_requests: int = 256,
    max_rows: int = 8192,
    max_seq_len: int | None = None,
    forms: Collection[str] = (),
) -> WarmupReport:
    """Compile every kernel that steps within some bounds can reach, so that no request waits for a compiler.

    Kernels have a variant for each range of row counts, rows of a request and context lengths. The stages are run at
    shapes from all of these ranges, on rows of padding: nothing is read from caches or written to them, so the caches
    may be those that serve already. Call it once a process and device, e.g. before CUDA graphs are captured. Variants
    that another process compiled are loaded from Triton's cache on disk.

    Where ``backend="auto"`` takes no kernels (on a CPU, say) there is nothing to compile: the report is all zeros.

    Args:
        config: The checkpoint's constants; under tensor parallelism with the `q_heads` and `kv_heads` of the rank.
        cache: Caches of a layer as they are served from, or the layout of such; their dtypes, strides and scales
            decide variants. By default scratch ones of bf16, in pages of 16 blocks.
        device: Where to run; that of `cache`, else the current CUDA device, else the CPU.
        rope: The rotary table that serving uses; its dtype decides variants. Float32 by default.
        paged: Whether requests lie in pages (`page_table`) or each in one piece (`first_slots`).
        max_requests: Requests of a step at most.
        max_rows: Rows of a step at most, padding included. Takes the memory that one layer's step of so many rows does.
        max_seq_len: The largest `max_seq_len` that steps are planned with, in tokens; `max_positions` by default.
        forms: What serving does besides: "row_exact" (attention with `row_exact=True`), "shards" (selections with
            scores and partial outputs with lse in fp32, with and without tail), "token_lists" (`expand_tokens` and
            `attend_tokens`), "e4m3_queries" (index queries in float8_e4m3fn through `out` of `prepare`).

    Returns:
        How many variants were compiled, and how long that took.

    Raises:
        ShapeError: `cache` has other heads than `config`.
        DeviceError: `device` is not that of `cache`.
        ArgumentError: A bound is no whole number above 0, a form is unknown, or `cache` has no block keys.
        FlashQSAError: As the stages, where `cache`, `rope` and `config` do not fit each other.
    """
    begin = time.perf_counter()
    where = "warmup"
    expect_type(where, "config", config, QSAConfig)
    max_seq_len = config.max_positions if max_seq_len is None else max_seq_len
    for name, value in (("max_requests", max_requests), ("max_rows", max_rows), ("max_seq_len", max_seq_len)):
        expect_int(where, name, value, least=1)
    unknown = sorted(set(forms) - set(FORMS))
    if unknown:
        raise ArgumentError(
            f"{where}: forms must be among {', '.join(FORMS)}, got {unknown[0]!r}. Leave out what serving does not do."
        )
    if not isinstance(cache, LayerCache | CacheLayout | None):
        raise ArgumentError(
            f"{where}: cache must be a LayerCache or a CacheLayout, got {type(cache).__name__}. Pass the caches of one "
            "layer, or leave it out."
        )
    if cache is None:
        cache = CacheLayout.from_config(config, page_tokens=16 * config.block_tokens)
    device = _device(where, cache, device)
    if not takes_kernels(device):
        return WarmupReport()
    cache = _scratch_cache(cache, device) if isinstance(cache, CacheLayout) else cache
    _check_cache(where, cache, config)
    shapes = list(step_shapes(config, max_requests, max_rows, max_seq_len, all_contexts="shards" in forms))
    on_gpu = device.type == "cuda"
    with torch.cuda.device(device) if on_gpu else nullcontext(), torch.no_grad(), _counted_compilations() as counts:
        server = PaddingServer(config, cache, Inputs.make(config, cache, rope, max_rows), paged, forms)
        for shape in shapes:
            server.serve(shape)
        if on_gpu:
            torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    return WarmupReport(counts["compiled"], counts["loaded"], len(shapes), seconds, server.refusals)


def _device(where: str, cache: LayerCache | CacheLayout, device: torch.device | str | None) -> torch.device:
    if device is None and isinstance(cache, CacheLayout):
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = cache.device if device is None and isinstance(cache, LayerCache) else torch.device(device or "cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if isinstance(cache, LayerCache) and device != cache.device:
        raise DeviceError(f"{where}: device must be {cache.device}, that of cache, got {device}. Leave it out.")
    return device


def _scratch_cache(layout: CacheLayout, device: torch.device) -> LayerCache:
    """Caches of one page and one ring, which padding never touches."""
    kv = (1, layout.page_tokens, layout.kv_heads, layout.head_dim)
    keys = (1, layout.page_blocks, layout.index_head_dim)
    return LayerCache(
        torch.zeros(kv, dtype=layout.kv_dtype, device=device),
        torch.zeros(kv, dtype=layout.kv_dtype, device=device),
        torch.zeros(keys, dtype=layout.index_dtype, device=device),
        torch.zeros(1, layout.ring_tokens, layout.index_head_dim, dtype=layout.ring_dtype, device=device),
        torch.zeros(1, layout.ring_tokens, 3, dtype=torch.int64, device=device),
    )


def _check_cache(where: str, cache: LayerCache, config: QSAConfig) -> None:
    if cache.block_keys is None:
        raise ArgumentError(f"{where}: cache must have block_keys, got None. Pass the caches that selection reads.")
    got, wanted = (cache.kv_heads, cache.head_dim), (config.kv_heads, config.head_dim)
    if got != wanted:
        raise ShapeError(
            f"{where}: cache must have the kv_heads and head_dim of config, {wanted}, got {got}. Under tensor "
            "parallelism pass the config of the rank: dataclasses.replace(config, q_heads=..., kv_heads=...)."
        )


@contextmanager
def _counted_compilations() -> Iterator[dict[str, int]]:
    """Counts of kernels that Triton compiles, or loads from disk, inside the block."""
    from triton import knobs

    counts = {"compiled": 0, "loaded": 0}
    before = knobs.compilation.listener

    def listen(*, cache_hit: bool, **told: Any) -> None:
        counts["loaded" if cache_hit else "compiled"] += 1
        if before is not None:
            before(cache_hit=cache_hit, **told)

    knobs.compilation.listener = listen
    try:
        yield counts
    finally:
        knobs.compilation.listener = before
