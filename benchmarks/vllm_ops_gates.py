"""What has to hold of each operator of the vLLM plugin: ours and vLLM's, from the same arguments, beside float64.

Ids, copies and places are compared exactly. Numbers are held against float64: ours may be as far as the error budget of
the reference, or twice as far as vLLM's. A vLLM that is far off itself fails too, since then the arguments are not what
it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu_gates import LARGEST_OUTPUT_ERROR, sampled_rows
from benchmarks.gpu_workload import BLOCK, BUDGET, HEAD_DIM, Q_HEADS, TOPK
from benchmarks.vllm_ops_cases import BF16, FP8, Arguments, Call, Engine
from benchmarks.vllm_ops_truth import F64, attended, bits, closing_members, largest, pair_magnitude, prepared, wide
from flashqsa.cache.state import read_slots
from flashqsa.preparation.plain import mean_of_blocks

MOST_PLACES = {BF16: 4.0, FP8: 1.5}
"""Places of its dtype by which a stored number may differ from vLLM's. In bf16 vLLM rounds the two products of a
rotation and their sum where ours rounds once, and sums in another order move a rounding before it; a place is that of
the rotated pair. All of that is little beside a place of float8."""
FAR_OFF = {BF16: 2.0**-5, FP8: 2.0**-3}
"""Error of vLLM's numbers, as a share of the largest, from which on it did not compute what was asked for."""
FP8_SCORE_ERROR = 2.0**-10
"""Share of sum |q| |k| by which vLLM's float8 scores may err: Hopper's float8 products have short accumulators."""
SCORE_ROWS = 256


@dataclass
class Findings:
    """Figures of a comparison, and what does not hold."""

    figures: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def note(self, name: str, value: float) -> None:
        """Keep the largest value under a name."""
        self.figures[name] = max(value, self.figures.get(name, value))

    def require(self, holds: bool, message: str) -> None:
        """Note a failure unless it holds."""
        if not holds:
            self.failed.append(message)


@dataclass
class Outcome:
    """What a call returned, and its arguments afterwards."""

    returned: Any
    arguments: Arguments

    @classmethod
    def of(cls, call: Call, operator: Callable[..., Any]) -> Outcome:
        """Run an operator on clones of what it writes."""
        arguments = call.fresh()
        return cls(operator(**arguments), arguments)


Sides = dict[str, Outcome]
"""Outcomes by engine: "flashqsa", and "vllm" where there is one."""


def compare(engine: Engine, call: Call, sides: Sides) -> Findings:
    """All that has to hold of one call."""
    findings = Findings()
    GATES[call.operator](findings, engine, call, sides)
    return findings


def check_numbers(
    findings: Findings, name: str, got: dict[str, torch.Tensor], exact: torch.Tensor, rounded: torch.Tensor
) -> None:
    """Errors of both sides beside float64, as shares of the largest number."""
    if not exact.numel():
        return
    scale = largest(exact)
    errors = {side: largest(wide(numbers) - exact) / scale for side, numbers in got.items()}
    for side, error in errors.items():
        findings.note(f"{side} error", error)
    # twice what the definition errs by in these dtypes and a place, as `flashqsa.testing.error_budget` has it
    budget = 2 * (largest(wide(rounded) - exact) / scale + torch.finfo(rounded.dtype).eps)
    allowed = max(budget, 2 * errors.get("vllm", 0.0))
    ours, theirs = errors["flashqsa"], errors.get("vllm", 0.0)
    findings.require(ours <= allowed, f"{name}: error {ours:.2e} of the largest number, {allowed:.2e} may be")
    bound = FAR_OFF[rounded.dtype]
    findings.require(theirs <= bound, f"{name}: vLLM itself errs by {theirs:.2e} of the largest number")


def check_places(
    findings: Findings, name: str, got: dict[str, torch.Tensor], magnitude: torch.Tensor, most: float
) -> None:
    """Stored numbers of both, at most so many places of their dtype apart, and how many are equal."""
    if "vllm" not in got or not magnitude.numel():
        return
    ours, theirs = got["flashqsa"], got["vllm"]
    kind = torch.finfo(ours.dtype)
    place = (kind.eps * magnitude.abs()).clamp(min=kind.eps * kind.smallest_normal)
    apart = largest((wide(ours) - wide(theirs)) / place)
    share = float((bits(ours) == bits(theirs)).double().mean())
    findings.note("places apart", apart)
    findings.figures["equal share"] = min(share, findings.figures.get("equal share", share))
    findings.require(apart <= most, f"{name}: {apart:.2f} places from vLLM's, {most:g} may be")


def check_untouched(
    findings: Findings, name: str, before: torch.Tensor, sides: Sides, argument: str, slots: torch.Tensor
) -> None:
    """Nothing but the rows at these slots was written."""
    page, place = slots // before.shape[1], slots % before.shape[1]
    held = bits(before)
    for side, outcome in sides.items():
        after = bits(outcome.arguments[argument]).clone()
        after[page, place] = held[page, place]
        findings.require(torch.equal(after, held), f"{name}: {side} writes where it should not")


def gate_prepare(findings: Findings, engine: Engine, call: Call, sides: Sides) -> None:
    """Numbers beside float64, cache rows beside vLLM's; gates and ring rows are copies."""
    exact, rounded = prepared(engine, exact=True), prepared(engine, exact=False)
    closed = engine.closed_slots[engine.closed_slots >= 0]
    made: dict[str, dict[str, torch.Tensor]] = {name: {} for name in exact}
    for side, outcome in sides.items():
        arguments = outcome.arguments
        rows = read_slots(arguments["main_kv_cache"], engine.slots)
        keys = read_slots(arguments["compressed_cache"][:, :, 0], closed)
        parts = (arguments["q_out"], outcome.returned[0], rows[..., :HEAD_DIM], rows[..., HEAD_DIM:], keys)
        for name, part in zip(exact, parts, strict=True):
            made[name][side] = part.contiguous()
    for name, got in made.items():
        check_numbers(findings, name, got, exact[name], rounded[name])
        magnitude = exact[name] if name == "V" else pair_magnitude(exact[name], engine.rope.rotary_dim)
        check_places(findings, name, got, magnitude, MOST_PLACES[rounded[name].dtype])
    _check_copies(findings, engine, sides)
    for argument, slots in (("main_kv_cache", engine.slots), ("compressed_cache", closed),
                            ("state_cache", engine.ring_slots[engine.ring_slots >= 0])):  # fmt: skip
        check_untouched(findings, argument, call.arguments[argument], sides, argument, slots)


def _check_copies(findings: Findings, engine: Engine, sides: Sides) -> None:
    """Gates and the rows of the rings, bit for bit."""
    gate = engine.qkv.view(engine.rows, -1, HEAD_DIM)[:, 1 : 2 * Q_HEADS : 2]
    kept = (engine.ring_slots >= 0).nonzero()[:, 0]
    ring = engine.index_k[kept]
    if engine.case.mrope:
        ring = torch.cat([ring, engine.rope_of(engine.logical[kept]).t().contiguous().view(BF16)], dim=1)
    for side, outcome in sides.items():
        findings.require(torch.equal(outcome.returned[1], gate), f"gates: {side} changes them")
        rows = read_slots(outcome.arguments["state_cache"][:, :, 0], engine.ring_slots[kept])
        findings.require(torch.equal(bits(rows), bits(ring)), f"ring: {side} writes other rows")


def gate_select(findings: Findings, engine: Engine, call: Call, sides: Sides) -> None:
    """Every row's blocks are the best in float64 as far as the bound on fp32 scores can tell, ours in order too."""
    ids = {side: outcome.arguments["block_indices"] for side, outcome in sides.items()}
    visible = call.arguments["visible_blocks"].to(torch.int64)
    columns = torch.arange(TOPK, device=visible.device)[None]
    used = columns < visible[:, None]
    ours = ids["flashqsa"]
    ascending = (ours[:, 1:] > ours[:, :-1]) | ~used[:, 1:]
    findings.require(bool(ascending.all()), "ids do not ascend")
    findings.require(bool((ours[~used] == -1).all()), "ids past the count are not -1")
    first = 0
    for request, rows in enumerate(_rows_of_requests(call)):
        for begin in range(first, first + rows, SCORE_ROWS):
            some = slice(begin, min(begin + SCORE_ROWS, first + rows))
            _check_rows(findings, call, {side: x[some] for side, x in ids.items()}, request, some)
        first += rows
    if "vllm" in ids:
        sets = [x.masked_fill(~used, -1).sort(dim=1).values for x in ids.values()]
        differing = sets[0] != sets[1]
        findings.note("rows with other ids", float(differing.any(dim=1).sum()))
        findings.note("rows", float(visible.shape[0]))


def _rows_of_requests(call: Call) -> list[int]:
    arguments = call.arguments
    if "decode_query_len" in arguments:
        return [arguments["decode_query_len"]] * arguments["page_table"].shape[0]
    rows: list[int] = arguments["query_start_loc"].diff().tolist()
    return rows


def _check_rows(findings: Findings, call: Call, ids: dict[str, torch.Tensor], request: int, rows: slice) -> None:
    """Some rows of one request: each of `ids` [n, K] beside float64 scores of all blocks."""
    arguments = call.arguments
    visible = arguments["visible_blocks"][rows].to(torch.int64)
    blocks = int(visible.max())
    if blocks == 0:
        return
    page_blocks = arguments["k_cache"].shape[1]
    every = torch.arange(blocks, device=visible.device)
    slots = arguments["page_table"][request][every // page_blocks].to(torch.int64) * page_blocks + every % page_blocks
    keys = wide(read_slots(arguments["k_cache"][:, :, 0], slots))
    query = wide(arguments["q"][rows])
    exact = torch.relu(query.flatten(0, 1) @ keys.t()).view(*query.shape[:2], blocks).sum(dim=1)
    magnitude = query.abs().sum(dim=1) @ keys.abs().t()
    seen = every[None] < visible[:, None]
    count = visible.clamp(max=TOPK)
    for side, chosen_ids in ids.items():
        valid = (torch.arange(TOPK, device=visible.device)[None] < count[:, None]) & (chosen_ids >= 0)
        place = torch.where(valid & (chosen_ids < blocks), chosen_ids, blocks).to(torch.int64)
        chosen = torch.zeros(exact.shape[0], blocks + 1, dtype=torch.bool, device=exact.device)
        chosen = chosen.scatter_(1, place, True)[:, :blocks] & seen
        whole = bool((chosen.sum(dim=1) == count).all())
        findings.require(whole, f"{side}: some rows hold other than min(K, visible) distinct visible blocks")
        short = visible > TOPK
        if not whole or not bool(short.any()):
            continue
        per_score = (query.shape[2] + 8) * 2.0**-24
        if side == "vllm" and arguments["k_cache"].dtype == FP8:
            per_score = FP8_SCORE_ERROR
        low = exact.masked_fill(~chosen, torch.inf).argmin(dim=1, keepdim=True)
        high = exact.masked_fill(chosen | ~seen, -1.0).argmax(dim=1, keepdim=True)
        lost = exact.gather(1, high) - exact.gather(1, low)
        share = lost / (per_score * (magnitude.gather(1, high) + magnitude.gather(1, low)))
        worst = max(0.0, float(share[short].max()))
        findings.note(f"{side} share of bound", worst)
        findings.require(
            worst <= 1, f"{side}: leaves a block out that is better by {worst:.2f} of what rounding allows"
        )


def gate_expand(findings: Findings, engine: Engine, call: Call, sides: Sides) -> None:
    """Token ids exactly, the count in the last column."""
    ids = call.arguments["block_indices"].to(torch.int64)
    count = engine.visible.to(torch.int64).clamp(max=TOPK)[:, None] * BLOCK
    tail_start = (engine.logical + 1)[:, None] // BLOCK * BLOCK
    total = count + engine.logical[:, None] + 1 - tail_start
    column = torch.arange(BUDGET + BLOCK - 1, device=ids.device)[None]
    of_block = ids[:, (column[0] // BLOCK).clamp(max=TOPK - 1)] * BLOCK + column % BLOCK
    tokens = torch.where(column < count, of_block, tail_start + column - count)
    expected = torch.cat([torch.where(column < total, tokens, -1), total], dim=1).to(torch.int32)
    for side, outcome in sides.items():
        differing = int((outcome.arguments["out"] != expected).any(dim=1).sum())
        findings.require(differing == 0, f"{side}: {differing} rows hold other tokens or counts")


def gate_attention(findings: Findings, engine: Engine, call: Call, sides: Sides) -> None:
    """Sampled rows beside float64, all rows beside vLLM's, by the norm of the error over the norm of the row."""
    rows = sampled_rows(engine.rows, 48)
    exact = torch.stack([attended(call, row) for row in rows])
    size = exact.flatten(1).norm(dim=1)
    errors = {
        side: largest((wide(outcome.returned[rows]) - exact).flatten(1).norm(dim=1) / size)
        for side, outcome in sides.items()
    }
    for side, error in errors.items():
        findings.note(f"{side} error", error)
    ours, theirs = errors["flashqsa"], errors.get("vllm", 0.0)
    allowed = max(LARGEST_OUTPUT_ERROR, 2 * theirs)
    findings.require(ours <= allowed, f"outputs: error {ours:.2e} of a row, {allowed:.2e} may be")
    findings.require(theirs <= FAR_OFF[BF16], f"outputs: vLLM itself errs by {theirs:.2e} of a row")
    for side, outcome in sides.items():
        findings.require(outcome.returned is outcome.arguments["out"], f"{side}: does not return `out`")
    if "vllm" in sides:
        pair = [sides[side].returned.float().flatten(1) for side in ("flashqsa", "vllm")]
        apart = largest((pair[0] - pair[1]).norm(dim=1) / pair[1].norm(dim=1))
        findings.note("largest difference", apart)
        most = max(2 * LARGEST_OUTPUT_ERROR, 3 * theirs)
        findings.require(apart <= most, f"outputs: a row is {apart:.2e} from vLLM's, {most:.2e} may be")


def gate_compress(findings: Findings, engine: Engine, call: Call, sides: Sides) -> None:
    """Means within a place of bf16, first positions exactly, zeros in rows that close nothing."""
    rows, raw, first = closing_members(engine)
    exact, rounded = mean_of_blocks(raw.to(F64)), mean_of_blocks(raw)
    positions = torch.zeros(engine.rows, 3, dtype=torch.int64, device=engine.device)
    positions[rows] = engine.rope_of(first).t()
    got = {side: outcome.returned[0][rows, 0] for side, outcome in sides.items()}
    check_numbers(findings, "means", got, exact, rounded)
    check_places(findings, "means", got, exact, 1.0)
    for side, outcome in sides.items():
        pooled, firsts = outcome.returned
        findings.require(torch.equal(firsts, positions), f"{side}: other first positions")
        rest = pooled.clone()
        rest[rows] = 0
        findings.require(not bool(rest.any()), f"{side}: rows that close nothing are not zero")


def gate_store(findings: Findings, engine: Engine, call: Call, sides: Sides) -> None:
    """Rows at their slots bit for bit, where float8 rounds within a place; nothing else is written."""
    cache, slots = call.arguments["cache"], call.arguments["slot_mapping"]
    live = ((slots >= 0) & (slots < cache.shape[0] * cache.shape[1])).nonzero()[:, 0]
    expected = call.arguments["rows"][live, 0].to(cache.dtype)
    got = {side: read_slots(outcome.arguments["cache"][:, :, 0], slots[live]) for side, outcome in sides.items()}
    if cache.dtype == FP8:
        check_places(findings, "rows", got, wide(expected), 1.0)
    for side in ("flashqsa",) if cache.dtype == FP8 else tuple(got):
        findings.require(torch.equal(bits(got[side]), bits(expected)), f"{side}: other rows are stored")
    check_untouched(findings, "cache", cache, sides, "cache", slots[live])


Gate = Callable[[Findings, Engine, Call, Sides], None]

GATES: dict[str, Gate] = {
    "qsa_prepare": gate_prepare,
    "qsa_select_paged_decode": gate_select,
    "qsa_select_paged_prefill": gate_select,
    "expand_qsa_block_indices": gate_expand,
    "qsa_sparse_paged_attention": gate_attention,
    "qsa_compress_groups_with_ratio": gate_compress,
    "qsa_store_cache_rows": gate_store,
}
