"""Kernels whose configuration a caller may pass: what is chosen today, what else is tried, and what has to agree.

Of the scores and of rows attended alone a configuration decides nothing but speed, so that every candidate has to give
the bits of the chosen one; of union tiles it is part of the arithmetic, and outputs have to lie within the gate's
error. Every candidate differs from the chosen configuration in one number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from benchmarks import gpu_decode, gpu_prefill
from benchmarks.gpu_gates import LARGEST_OUTPUT_ERROR
from benchmarks.gpu_workload import BLOCK, HEAD_DIM, INDEX_HEADS, PAGE, TOPK
from flashqsa.attention.tokens import RowTokens
from flashqsa.backends import multiprocessors

Config = dict[str, Any]
MOST_COLUMNS = 256
"""Rows x heads of a product of scores: more are several instructions, and hold too many registers."""
SCORED = (
    gpu_decode.Shape(1, 131072), gpu_decode.Shape(1, 1048576), gpu_decode.Shape(32, 131072),
    gpu_decode.Shape(1, 1048576, fp8_index=True), gpu_decode.Shape(32, 131072, fp8_index=True),
    gpu_decode.Shape(32, 131072, rows=4), gpu_decode.Shape(1, 131072, rows=2048),
    gpu_decode.Shape(1, 131072, rows=2048, fp8_index=True),
)  # fmt: skip
ATTENDED = tuple(
    gpu_prefill.Shape(requests, 1, 131072, heads=heads, churn=0.0)
    for heads in ((24, 2), (6, 1))
    for requests in (1, 8, 32, 128)
)
SELECTED = (
    gpu_decode.Shape(1, 8192), gpu_decode.Shape(1, 32768), gpu_decode.Shape(1, 131072), gpu_decode.Shape(1, 1048576),
    gpu_decode.Shape(8, 32768), gpu_decode.Shape(32, 131072), gpu_decode.Shape(1, 131072, rows=2048),
)  # fmt: skip
VERIFIED = tuple(gpu_prefill.Shape(32, 4, 65536, heads=heads, churn=0.05) for heads in ((24, 2), (6, 1)))
TILED = tuple(gpu_prefill.Shape(1, 8192, 131072, heads=heads, churn=0.05) for heads in ((24, 2), (6, 1)))


@dataclass(frozen=True)
class Subject:
    """A kernel at one shape.

    Attributes:
        kernel: Its benchmark id.
        shape: The shape, in words.
        chosen: The configuration that is taken today.
        candidates: Others.
        run: Launches the kernel with a configuration and returns what it writes.
        same: Whether the results of a candidate may stand for those of the chosen configuration.
        results: Of what it writes, what is compared.
    """

    kernel: str
    shape: str
    chosen: Config
    candidates: list[Config]
    run: Callable[[Config], list[torch.Tensor]]
    same: Callable[[list[torch.Tensor], list[torch.Tensor]], bool]
    results: Callable[[list[torch.Tensor]], list[torch.Tensor]]


def around(chosen: Config, **options: tuple[Any, ...]) -> list[Config]:
    """The chosen configuration with one number exchanged: for each name the values given, but for its own."""
    return [chosen | {name: value} for name, values in options.items() for value in values if value != chosen[name]]


def same_bits(wanted: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    """Whether all results are equal, and none was left unwritten."""
    return all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


def same_outputs(wanted: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    """Whether outputs agree as far as rounding explains; a row that was not written does not."""
    pairs = [(a.float(), b.float()) for a, b in zip(wanted, found, strict=True)]
    return all(bool((a - b).norm() <= 2 * LARGEST_OUTPUT_ERROR * a.norm()) for a, b in pairs)


def _copies(written: list[torch.Tensor]) -> list[torch.Tensor]:
    return [numbers.clone() for numbers in written]


def scores(shape: gpu_decode.Shape, generator: torch.Generator) -> Subject:
    """`selection.score_blocks`: scores of all rows, and of the largest levels those that every tile gives."""
    from flashqsa.selection.row_levels import RowLevels
    from flashqsa.selection.triton_scores import ScoreKernelConfig, score_blocks_triton, score_kernel_config

    work = gpu_decode.Workload(shape, generator)
    rows, blocks = work.scores.shape
    chosen = asdict(score_kernel_config(work.index_q, work.cache, work.plan, rows))
    least = int(work.plan.visible_blocks.min())

    def run(config: Config) -> list[torch.Tensor]:
        tiles = ScoreKernelConfig(**config)
        levels = RowLevels.of(blocks, TOPK, tiles.block_m)
        largest = None
        if levels.given:
            largest = work.plan.scratch("sweep.largest", (rows, levels.numbers()), torch.float32)
        score_blocks_triton(
            work.index_q, work.cache, work.plan, work.scores, 0, TOPK, config=tiles,
            multiprocessors=multiprocessors(work.q.device), largest=largest, levels=levels,
        )  # fmt: skip
        return [work.scores] if largest is None else [work.scores, largest]

    def results(written: list[torch.Tensor]) -> list[torch.Tensor]:
        group = RowLevels.of(blocks, TOPK, chosen["block_m"]).group
        return [numbers[:, :count].clone() for numbers, count in zip(written, (least, least // group), strict=False)]

    together = (chosen["rows"] // 2, 2 * chosen["rows"])
    candidates = around(
        chosen, block_m=(64, 128), stages=(1, 2, 3, 4), programs=(2, 3, 4, 5, 6, 8), pages_ahead=(1, 3),
        rows=tuple(n for n in together if shape.rows > 1 and 0 < n * INDEX_HEADS <= MOST_COLUMNS),
    )  # fmt: skip
    return Subject("selection.score_blocks", str(shape), chosen, candidates, run, same_bits, results)


def best_blocks(shape: gpu_decode.Shape, generator: torch.Generator) -> Subject:
    """`selection.top_blocks`: numbers that a program holds, its warps, and how it searches."""
    from flashqsa.selection.row_levels import LEAST_BLOCK, RowLevels
    from flashqsa.selection.triton_scores import score_blocks_triton, score_kernel_config
    from flashqsa.selection.triton_topk import TopKernelConfig, top_blocks_triton

    work = gpu_decode.Workload(shape, generator)
    rows, blocks = work.scores.shape
    device, found = work.q.device, work.selection
    tiles, processors = score_kernel_config(work.index_q, work.cache, work.plan, rows), multiprocessors(device)

    def levels_of(least_block: int) -> RowLevels:
        return RowLevels.of(blocks, TOPK, tiles.block_m, least_block)

    chosen = asdict(TopKernelConfig.choose(rows, levels_of(LEAST_BLOCK), processors)) | {"least_block": LEAST_BLOCK}
    candidates = around(
        chosen, least_block=(2048, 4096, 8192), warps=(4, 8, 16, 32), bins=(True, False), registers=(None, 64, 128)
    )
    given = levels_of(LEAST_BLOCK)  # of wider programs the levels are the first of these
    largest = torch.empty(rows, max(1, given.numbers()), dtype=torch.float32, device=device)
    parents = torch.empty(rows, max(levels_of(config["least_block"]).parents for config in (chosen, *candidates)),
                          dtype=torch.int32, device=device)  # fmt: skip

    @functools.cache
    def score() -> None:
        score_blocks_triton(
            work.index_q, work.cache, work.plan, work.scores, 0, TOPK, config=tiles, multiprocessors=processors,
            largest=largest if given.given else None, levels=given,
        )  # fmt: skip

    def run(config: Config) -> list[torch.Tensor]:
        score()
        form = {name: value for name, value in config.items() if name != "least_block"}
        top_blocks_triton(
            work.scores, largest, parents, levels_of(config["least_block"]), work.plan, 0, found, scored_all=False,
            multiprocessors=processors, config=TopKernelConfig(**form),
        )  # fmt: skip
        return [found.block_ids, found.block_counts]

    return Subject("selection.top_blocks", str(shape), chosen, candidates, run, same_bits, _copies)


def _row_tokens(work: gpu_prefill.Workload) -> RowTokens:
    found = work.selection
    return RowTokens(found.block_ids, found.block_counts, BLOCK, found.visible_blocks, work.plan.positions)


def rows_alone(shape: gpu_prefill.Shape, generator: torch.Generator) -> Subject:
    """`attention.attend_rows`: what a program takes of a row, and how deep its loads are."""
    from flashqsa.attention.triton_rows import GROUP_SEGMENTS, RowsKernelConfig, attend_rows_triton, row_segments

    work = gpu_prefill.Workload(shape, generator)
    segments = row_segments(TOPK * BLOCK)
    pairs = work.q.shape[0] * shape.heads[1]
    chosen = asdict(RowsKernelConfig.choose(pairs, segments, multiprocessors(work.q.device), False, HEAD_DIM))
    shares = tuple(sorted({1, *(GROUP_SEGMENTS << n for n in range(8) if GROUP_SEGMENTS << n < segments), segments}))

    def run(config: Config) -> list[torch.Tensor]:
        attend_rows_triton(
            work.q, work.cache, work.plan, _row_tokens(work), HEAD_DIM**-0.5, gate=work.gate, out=work.out, lse=None,
            config=RowsKernelConfig(**config),
        )  # fmt: skip
        return [work.out]

    candidates = around(chosen, share=shares, stages=(1, 2, 3, 4))
    return Subject("attention.attend_rows", str(shape), chosen, candidates, run, same_bits, _copies)


def tiles(shape: gpu_prefill.Shape, generator: torch.Generator) -> Subject:
    """`attention.attend_tiles`: the plain union tiles, which every device can run."""
    from flashqsa.attention.triton_tiles import TilesKernelConfig, attend_tiles_triton

    work = gpu_prefill.Workload(shape, generator)
    chosen = asdict(TilesKernelConfig.choose(shape.heads[0] // shape.heads[1], wide=False))

    def run(config: Config) -> list[torch.Tensor]:
        attend_tiles_triton(
            work.q, work.cache, work.plan, _row_tokens(work), HEAD_DIM**-0.5, gate=work.gate, out=work.out, lse=None,
            config=TilesKernelConfig(**config),
        )  # fmt: skip
        return [work.out]

    candidates = around(chosen, block_m=(64, 128), block_n=(16, 32, 64), warps=(4, 8), stages=(2, 3, 4))
    return Subject("attention.attend_tiles", str(shape), chosen, candidates, run, same_outputs, _copies)


def tiles_of_hopper(shape: gpu_prefill.Shape, generator: torch.Generator) -> Subject | None:
    """`attention.attend_tiles_gluon`: warpgroups that attend; None where the device has no such kernel."""
    from flashqsa.attention.gluon_tiles import attend_tiles_gluon, gluon_tiles_refusal

    if generator.device.type != "cuda" or torch.cuda.get_device_capability(generator.device)[0] != 9:
        return None
    work = gpu_prefill.Workload(shape, generator)
    step = (work.q, work.cache, work.plan, _row_tokens(work), HEAD_DIM**-0.5)
    if gluon_tiles_refusal(*step, parts=1) is not None:
        return None

    def run(config: Config) -> list[torch.Tensor]:
        attend_tiles_gluon(*step, gate=work.gate, out=work.out, lse=None, **config)
        return [work.out]

    chosen = {"parts": 1}
    candidates = around(chosen, parts=(1, 2))
    return Subject("attention.attend_tiles_gluon", str(shape), chosen, candidates, run, same_outputs, _copies)


def lists_of_verification(shape: gpu_prefill.Shape, generator: torch.Generator) -> Subject:
    """`attention.verify_lists`: the union lists of narrow requests."""
    from flashqsa.attention.triton_verify_lists import FEWEST_ROWS, verify_lists

    work = gpu_prefill.Workload(shape, generator)

    def run(config: Config) -> list[torch.Tensor]:
        lists = verify_lists(_row_tokens(work), work.plan, PAGE, FEWEST_ROWS, shape.rows, **config)
        return [lists.tiles, lists.slot_ids, lists.row_bits]

    def results(written: list[torch.Tensor]) -> list[torch.Tensor]:
        return [written[0].clone(), *_up_to(written[0][:, 2], written[1:])]

    chosen = {"warps": None, "look_words": 1024}
    candidates = around(chosen, warps=(4, 8, 16), look_words=(512, 1024, 2048))
    return Subject("attention.verify_lists", str(shape), chosen, candidates, run, same_bits, results)


def lists_of_tiles(shape: gpu_prefill.Shape, generator: torch.Generator) -> Subject:
    """`attention.union_lists`: the union lists of tiles of 64 rows x heads."""
    from flashqsa.attention.triton_tiles import tile_height
    from flashqsa.attention.triton_union import union_lists

    work = gpu_prefill.Workload(shape, generator)
    height = tile_height(shape.heads[0] // shape.heads[1], 64)

    def run(config: Config) -> list[torch.Tensor]:
        lists = union_lists(_row_tokens(work), work.plan, PAGE, height, **config)
        return [lists.row_counts, lists.block_counts, lists.slot_ids, lists.row_bits]

    def results(written: list[torch.Tensor]) -> list[torch.Tensor]:
        counts = torch.where(written[0] > 0, written[1], 0)
        return [written[0].clone(), counts, *_up_to(counts, written[2:])]

    chosen = {"warps": 4, "per_warp": 256}
    candidates = around(chosen, warps=(2, 4, 8), per_warp=(128, 256, 512))
    return Subject("attention.union_lists", str(shape), chosen, candidates, run, same_bits, results)


def _up_to(counts: torch.Tensor, lists: list[torch.Tensor]) -> list[torch.Tensor]:
    """Lists [N, W] with -1 past their counts."""
    valid = torch.arange(lists[0].shape[1], device=counts.device)[None] < counts[:, None]
    return [torch.where(valid, numbers, -1) for numbers in lists]


Build = Callable[[torch.Generator], Subject | None]
KERNELS: dict[str, tuple[Callable[..., Subject | None], tuple[Any, ...]]] = {
    "selection.score_blocks": (scores, SCORED),
    "selection.top_blocks": (best_blocks, SELECTED),
    "attention.attend_rows": (rows_alone, ATTENDED),
    "attention.attend_tiles": (tiles, TILED),
    "attention.attend_tiles_gluon": (tiles_of_hopper, TILED),
    "attention.verify_lists": (lists_of_verification, VERIFIED),
    "attention.union_lists": (lists_of_tiles, TILED),
}


def subjects(kernels: str, shapes: str) -> Iterator[Build]:
    """What builds each subject whose kernel and shape hold these words."""
    for kernel, (build, every) in KERNELS.items():
        for shape in every:
            if kernels in kernel and shapes in str(shape):
                yield partial(build, shape)
