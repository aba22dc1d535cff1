"""Mode shadow of the vLLM plugin on recorded arguments: vLLM's operators serve, ours run beside them.

A step runs on vLLM's operators while each call's arguments are written to a file. They are read again twice: once with
vLLM's operators watched, to see that they find what was recorded and that what they make is served bit for bit; once as
activation wraps them, for the table of differences and times.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.vllm_ops_cases import BF16, Arguments, Call, Case, Engine, Operators
from benchmarks.vllm_ops_gates import FAR_OFF, GATES, MOST_PLACES, Findings, Outcome
from benchmarks.vllm_ops_truth import bits, largest
from flashqsa.integrations.vllm_plugin.shadow import Compared, Shadow

IN_FULL = {name: gate for name, gate in GATES.items() if "select" in name or "attention" in name}
"""Gates of operators of which a table of differences says too little."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """One call whose arguments are in a file."""

    engine: Engine
    step: int
    operator: str
    written: tuple[str, ...]
    file: Path

    def load(self) -> Call:
        """The call, on the device that it was recorded on."""
        arguments = torch.load(self.file, map_location=self.engine.device, weights_only=True)
        return Call(self.operator, "", arguments, self.written)


def _savable(arguments: Arguments) -> Arguments:
    """With rotary positions of a ring as a copy: a file holds no two tensors that view the same bytes differently."""
    rope_cache = arguments.get("rope_cache")
    return arguments if rope_cache is None else arguments | {"rope_cache": rope_cache.clone()}


def record(engine: Engine, step: int, operators: Operators, folder: Path) -> list[Recorded]:
    """Run a step as vLLM's layers do, and write down the arguments of every call before it is made."""
    made: list[Recorded] = []

    def serve(call: Call) -> Any:
        file = folder / f"{step}-{len(made)}.pt"
        torch.save(_savable(call.arguments), file)
        made.append(Recorded(engine, step, call.operator, call.written, file))
        return operators[call.operator](**call.arguments)

    serve(engine.compress_call())  # before preparation, which overwrites the oldest keys of the ring
    prepare = engine.prepare_call()
    q, gate = serve(prepare)
    ids = engine.unset_ids()
    for call in engine.select_calls(prepare.arguments["q_out"], ids):
        serve(call)
    expand = engine.expand_call(ids)
    serve(expand)
    serve(engine.attend_call(q, gate, expand.arguments["out"]))
    for call in engine.store_calls():
        serve(call)
    return made


@dataclass
class Watched:
    """VLLM's operator, with what it found and what it left."""

    operator: Callable[..., Any]
    written: tuple[str, ...]
    before: Arguments = field(default_factory=dict)
    after: Arguments = field(default_factory=dict)
    returned: Any = None
    copies: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, **arguments: Any) -> Any:
        self.before = {name: arguments[name].clone() for name in self.written}
        self.returned = self.operator(**arguments)
        self.after = {name: arguments[name].clone() for name in self.written}
        self.copies = [tensor.clone() for tensor in tensors_of(self.returned)]
        return self.returned


def tensors_of(returned: Any) -> tuple[torch.Tensor, ...]:
    """Tensors of what an operator returns: none, one, or some."""
    if returned is None:
        return ()
    return (returned,) if isinstance(returned, torch.Tensor) else tuple(returned)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    return torch.equal(bits(a), bits(b))


def check_served(findings: Findings, call: Call, watched: Watched, served: Any, recorded: Arguments) -> None:
    """What vLLM's operator made is what stands, and it found what was recorded."""
    findings.require(served is watched.returned, "another object is served than vLLM's")
    pairs = zip(tensors_of(served), watched.copies, strict=True)
    findings.require(all(same_bits(a, b) for a, b in pairs), "what is served is not what vLLM's returned")
    for name in call.written:
        findings.require(same_bits(call.arguments[name], watched.after[name]), f"{name} is not as vLLM's left it")
        findings.require(same_bits(watched.before[name], recorded[name]), f"vLLM's finds another {name} than recorded")


def _largest_served(call: Call, watched: Watched) -> float:
    """The largest number that vLLM's operator made: rows of K and V, or what it returned."""
    if call.operator == "qsa_prepare":
        slots, cache = call.arguments["main_slot_mapping"], watched.after["main_kv_cache"]
        held = bits(cache)[slots // cache.shape[1], slots % cache.shape[1]].view(cache.dtype)
        return largest(held.float())
    floats = [tensor for tensor in watched.copies if tensor.is_floating_point()]
    return max((largest(tensor.float()) for tensor in floats), default=0.0)


def _check_in_full(
    findings: Findings, recorded: Recorded, ours: Callable[..., Any], call: Call, served: Any
) -> None:  # fmt: skip
    """Blocks that differ are ties within the bound on scores, and rows of attention are near vLLM's and float64."""
    gate = IN_FULL.get(recorded.operator)
    if gate is not None:
        given = recorded.load()
        sides = {"flashqsa": Outcome.of(given, ours), "vllm": Outcome(served, call.arguments)}
        gate(findings, recorded.engine, given, sides)


def check_table(findings: Findings, operator: str, compared: Compared, scale: float, dtype: torch.dtype) -> None:
    """Nothing was refused, rows are the same but for ties of scores, and numbers but for rounding."""
    findings.require(not compared.refusals, f"ours refuses: {'; '.join(compared.refusals)}")
    findings.require(compared.calls > 0, "ours never ran")
    stores_fp8 = operator == "qsa_store_cache_rows" and dtype != BF16  # two casts to float8 may round apart
    if "select" not in operator and not stores_fp8:
        findings.require(compared.differing_rows == 0, f"{compared.differing_rows} rows differ")
    kind = dtype if operator == "qsa_prepare" else BF16
    share = MOST_PLACES[kind] * torch.finfo(kind).eps
    most = scale * (FAR_OFF[BF16] if operator == "qsa_sparse_paged_attention" else share)
    findings.require(
        compared.largest_error <= most, f"largest error {compared.largest_error:.3g}, {most:.3g} may be"
    )  # fmt: skip


def _replayed(calls: list[Recorded], ours: Operators, theirs: Operators) -> Shadow:
    """Mode shadow as activation makes it, over all calls."""
    steps = [object() for _ in calls]
    current = [0]
    shadow = Shadow(len({call.step for call in calls}), lambda: steps[current[0]])
    served = {name: shadow.wrap(name, ours[name], theirs[name]) for name in theirs}
    for recorded in calls:
        current[0] = recorded.step
        served[recorded.operator](**recorded.load().arguments)
    return shadow


def shadow_rows(group: list[Case], ours: Operators, theirs: Operators, generator: torch.Generator) -> Iterator[Row]:
    """One row an operator of vLLM's: what differed over the steps of some cases, and times.

    Args:
        group: Cases of one index dtype.
        ours: The plugin's operators.
        theirs: vLLM's; operators that are not there are run by ours while recording, and not compared.
        generator: Makes the steps.
    """
    name = "shadow of " + "; ".join(str(case) for case in group)
    row: Row = {"case": name, "operator": "recording", "told": ""}
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield from _rows(group, ours, theirs, generator, Path(folder), name)
    except Exception as error:  # of any class, as in the comparisons
        yield row | {"failed": [f"raises {type(error).__name__}: {str(error).strip()[:400]}"]}


def _rows(
    group: list[Case], ours: Operators, theirs: Operators, generator: torch.Generator, folder: Path, name: str
) -> Iterator[Row]:
    calls: list[Recorded] = []
    for step, case in enumerate(group):
        calls += record(Engine(case, generator), step, {**ours, **theirs}, folder)
    calls = [call for call in calls if call.operator in theirs]
    findings = {operator: Findings() for operator in dict.fromkeys(call.operator for call in calls)}
    scales = dict.fromkeys(findings, 0.0)
    for recorded in calls:
        found, operator = findings[recorded.operator], recorded.operator
        watched = Watched(theirs[operator], recorded.written)
        call = recorded.load()
        shadow = Shadow(1, object)
        served = shadow.wrap(operator, ours[operator], watched)(**call.arguments)
        check_served(found, call, watched, served, recorded.load().arguments)
        scales[operator] = max(scales[operator], _largest_served(call, watched))
        _check_in_full(found, recorded, ours[operator], call, served)
    shadow = _replayed(calls, ours, theirs)
    dtype = calls[0].engine.kv.dtype
    for operator, found in findings.items():
        compared = shadow.compared[operator]
        check_table(found, operator, compared, scales[operator], dtype)
        yield {
            "case": name, "operator": operator, "failed": found.failed, "calls": compared.calls, "rows": compared.rows,
            "told": compared.line(operator).removeprefix(f"{operator}: "), "differing_rows": compared.differing_rows,
            "largest_error": compared.largest_error, "flashqsa_us": compared.ours_us, "vllm_us": compared.theirs_us,
        }  # fmt: skip
