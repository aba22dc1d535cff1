"""`python -m benchmarks gpu-vllm-ops`: each operator of the vLLM plugin beside vLLM's own kernel, on one CUDA GPU.

Both get the same arguments: decode, verification, prefill and mixed steps, bf16 and float8 caches, three position axes
and one. Each call first passes a gate, then both are timed, graphs replayed with a cold L2 in turn. Then mode shadow
runs on recorded arguments. Without a `peer_vllm` module on the path ours alone is held against float64, and timed. Most
of the time is compilation, so other processes go through the cases first, into Triton's cache.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.environment import ROOT, command
from benchmarks.gpu_timing import Ceilings, Timer, gpu_environment
from benchmarks.vllm_ops_cases import Call, Case, Engine, Operators, cases, recorded_cases
from benchmarks.vllm_ops_gates import Outcome, Sides, compare
from benchmarks.vllm_ops_shadow import shadow_rows
from flashqsa.integrations.vllm_plugin import ops
from flashqsa.integrations.vllm_plugin.seams import OPERATORS, arguments_of

NAME = "gpu-vllm-ops"
RESULTS = ROOT / "benchmarks" / "results" / "gpu_vllm_ops.jsonl"
MEASURE, SHADOW = "gpu vllm ops", "gpu vllm shadow"
OURS: Operators = {seam.name: getattr(ops, seam.name) for seam in OPERATORS}
MOST_WORKERS = 9
WORKERS_LIMIT_S = 150
Row = dict[str, Any]


class InTurn(Protocol):
    """What times contenders, as `Timer` does."""

    def interleaved(self, contenders: dict[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
        """Microseconds of each."""
        ...


@dataclass(frozen=True)
class Peer:
    """VLLM's operators as far as they can be called, and why the others are left out."""

    operators: Operators
    left_out: dict[str, str]

    @classmethod
    def of(cls, vllm: Any) -> Peer:
        """From what `peer_vllm.load` returned: a module an attribute; None for no vLLM at all."""
        found: dict[str, Callable[..., Any]] = {}
        left_out: dict[str, str] = {}
        for seam in OPERATORS:
            module = "qsa_prepare" if seam.name == "qsa_prepare" else seam.module.rsplit(".", 1)[1]
            function = getattr(getattr(vllm, module, None), seam.name, None)
            if vllm is None:
                left_out[seam.name] = "there is no peer_vllm module on the path"
            elif function is None:
                left_out[seam.name] = f"the peer's module {module} has no such function"
            elif arguments_of(function) != seam.arguments:
                left_out[seam.name] = f"it takes ({', '.join(arguments_of(function))})"
            elif "select" in seam.name and not getattr(vllm, "with_topk", True):
                left_out[seam.name] = "it needs vLLM's compiled top-k, which is not loaded"
            else:
                found[seam.name] = function
        return cls(found, left_out)


def load_peer(with_topk: bool) -> Any:
    """vLLM's operator modules; None without a module `peer_vllm` that loads them."""
    if importlib.util.find_spec("peer_vllm") is None:
        return None
    module = importlib.import_module("peer_vllm")
    if with_topk:
        try:
            vllm = module.load()
        except (OSError, RuntimeError) as error:
            print(f"{NAME}: vLLM's compiled top-k does not load: {error}", flush=True)
            with_topk = False
    if not with_topk:
        vllm = module.load(with_topk=False)
    vllm.with_topk = with_topk
    return vllm


def calls_of(engine: Engine) -> list[Call]:
    """All calls of a step, each with arguments of its own: what an operator got wrong does not reach the next."""
    ids = engine.unset_ids()
    for call in engine.select_calls(engine.prepared_index_q, ids):
        OURS[call.operator](**call.arguments)
    expand = engine.expand_call(ids)
    OURS[expand.operator](**expand.arguments)
    return [
        engine.prepare_call(),
        *engine.select_calls(engine.prepared_index_q, engine.unset_ids()),
        engine.expand_call(ids),
        engine.attend_call(engine.q, engine.gate, expand.arguments["out"]),
        engine.compress_call(),
        *engine.store_calls(),
    ]


def measure(engine: Engine, call: Call, peer: Operators, timer: InTurn | None) -> Row:
    """One row of the table: what the gate found, what failed, and times where nothing did."""
    row: Row = {"measure": MEASURE, "case": str(engine.case), "operator": call.operator, "part": call.part,
                "figures": {}, "failed": [], "times": {}}  # fmt: skip
    engines = {"flashqsa": OURS[call.operator]}
    if call.operator in peer:
        engines["vllm"] = peer[call.operator]
    stage = "flashqsa"
    try:
        sides: Sides = {}
        for stage, operator in engines.items():
            sides[stage] = Outcome.of(call, operator)
        stage = "gate"
        findings = compare(engine, call, sides)
        row |= {"figures": findings.figures, "failed": findings.failed}
        del sides
        if timer is not None and not findings.failed:
            stage = "timing"
            contenders: dict[str, Callable[[], object]] = {
                name: partial(operator, **call.fresh()) for name, operator in engines.items()
            }
            row["times"] = timer.interleaved(contenders)
    except Exception as error:  # of any class: asserts and compilers of two libraries. The other calls go on.
        row["failed"] = [f"{stage} raises {type(error).__name__}: {str(error).strip()[:400]}"]
    return row


def rows_of_case(case: Case, peer: Operators, timer: InTurn | None, generator: torch.Generator) -> Iterator[Row]:
    """Rows of all calls of one step."""
    try:
        engine = Engine(case, generator)
        calls = calls_of(engine)
    except Exception as error:  # ours selects what later operators take; the other cases go on
        yield {"measure": MEASURE, "case": str(case), "operator": "arguments", "part": "", "figures": {}, "times": {},
               "failed": [f"{type(error).__name__}: {str(error).strip()[:400]}"]}  # fmt: skip
        return
    for call in calls:
        yield measure(engine, call, peer, timer)


def all_rows(
    peer: Operators, timer: InTurn | None, generator: torch.Generator, compared: list[Case], recorded: list[list[Case]]
) -> Iterator[Row]:
    """Rows of all cases, then those of mode shadow over groups of recorded ones."""
    for case in compared:
        yield from rows_of_case(case, peer, timer, generator)
        if generator.device.type == "cuda":
            torch.cuda.empty_cache()
    for group in recorded if peer else []:
        for row in shadow_rows(group, OURS, peer, generator):
            yield {"measure": SHADOW, **row}


def chosen_cases(words: str) -> tuple[list[Case], list[list[Case]]]:
    """Cases whose name holds these words, and groups of recorded ones, by index dtype, of which the word is "shadow".

    Args:
        words: What to look for; "I/N" for every Nth case or group from the Ith on.
    """
    compared = cases()
    recorded = [[case for case in recorded_cases() if case.fp8 == fp8] for fp8 in (False, True)]
    first, _, count = words.partition("/")
    if first.isdecimal() and count.isdecimal():
        places = range(int(first), len(compared) + len(recorded), max(int(count), 1))
        split = len(compared)
        return [compared[i] for i in places if i < split], [recorded[i - split] for i in places if i >= split]
    return [case for case in compared if words in str(case)], recorded if words in "shadow" else []


def compile_in(workers: int, options: argparse.Namespace) -> None:
    """Go through the cases in other processes, untimed, so that Triton's cache holds their kernels.

    What fails there fails in this process again, which tells it.
    """
    words = ["--repeats", "0", "--workers", "0", *(["--without-topk"] if options.without_topk else [])]
    begin = [sys.executable, "-m", "benchmarks", NAME]
    running = [
        subprocess.Popen(
            [*begin, "--cases", f"{worker}/{workers}", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for worker in range(workers)
    ]  # fmt: skip
    until = time.monotonic() + WORKERS_LIMIT_S
    for process in running:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def line_of(row: Row) -> str:
    """One row for people."""
    operator = f"{row['operator']} ({row['part']})" if row.get("part") else row["operator"]
    text = f"{row['case']}: {operator}: "
    if row["failed"]:
        return text + "FAILED: " + "; ".join(row["failed"])
    if row["measure"] == SHADOW:
        return text + row["told"]
    text += ", ".join(f"{name} {value:.3g}" for name, value in row["figures"].items()) or "equal"
    times = {name: spread["median_us"] for name, spread in row["times"].items()}
    if times:
        text += "; us " + ", ".join(f"{name} {us:.1f}" for name, us in times.items())
    if "vllm" in times:
        text += f", ratio {times['flashqsa'] / times['vllm']:.2f}"
    return text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the sub-command."""
    parser.add_argument(
        "--out", type=Path, default=None, help="JSON lines to write; the committed file is " + RESULTS.name
    )
    parser.add_argument(
        "--cases", default="", help="only cases whose name holds this, e.g. 'decode', or 'shadow'; I/N for a share"
    )
    parser.add_argument("--repeats", type=int, default=20, help="timed rounds; 0 to compare only")
    parser.add_argument("--without-topk", action="store_true", help="leave vLLM's compiled top-k out, hence selection")
    parser.add_argument(
        "--workers", type=int, default=min(MOST_WORKERS, (os.cpu_count() or 2) - 1), help="processes that compile first"
    )
    parser.add_argument("--commit", default=None, help="commit to record where the checkout has no git")


def run(options: argparse.Namespace) -> int:
    """Compare and time every call; a line each on the terminal. 1 when something failed, 2 without a GPU."""
    if not torch.cuda.is_available():
        print(f"{NAME}: needs a CUDA GPU, found none.", file=sys.stderr)
        return 2
    begun = time.monotonic()
    peer = Peer.of(load_peer(not options.without_topk))
    for name, why in peer.left_out.items():
        print(f"{NAME}: vLLM's {name} is left out: {why}", flush=True)
    if not peer.operators:
        print(f"{NAME}: nothing of vLLM's to compare with, and no mode shadow", flush=True)
    compared, recorded = chosen_cases(options.cases)
    if options.workers > 1 and not options.cases:
        compile_in(options.workers, options)
        print(f"{NAME}: kernels compiled after {time.monotonic() - begun:.0f} s", flush=True)
    generator = torch.Generator("cuda").manual_seed(0)
    timer = Timer(options.repeats) if options.repeats else None
    ceilings = asdict(Ceilings.measure(timer)) if timer else {}
    facts = {"environment": gpu_environment(options.commit), "command": command(), **ceilings}
    lines, failed = [], []
    for row in all_rows(peer.operators, timer, generator, compared, recorded):
        print(line_of(row), flush=True)
        if row["failed"]:
            failed.append(f"{row['case']}: {row['operator']}")
        lines.append(json.dumps({**facts, **row}))
        if options.out:
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    told = f": {'; '.join(failed)}" if failed else ""
    seconds = time.monotonic() - begun
    print(f"{NAME}: {len(lines)} comparisons, {len(failed)} failed{told}; took {seconds:.0f} s", flush=True)
    return int(bool(failed) or not lines)
