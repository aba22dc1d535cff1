"""The tables of docs/reliability.md: every fault has a test, what a row names is there, figures are those measured.

    .venv/bin/python tests/testing/test_reliability.py

writes them anew, from the names of the tests and from what `measure.py` and `tests/mutation/run.py` measured.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "reliability.md"
FIGURES = Path(__file__).with_name("figures.json")
SURVIVORS = ROOT / "tests" / "mutation" / "survivors.toml"
BEGIN, END = "<!-- faults: written by tests/testing/test_reliability.py -->", "<!-- end of faults -->"
MEASURED, END_MEASURED = "<!-- figures: written by tests/testing/test_reliability.py -->", "<!-- end of figures -->"

TITLES = {
    1: "ids in no order change a sum from run to run",
    2: "which of equal scores is selected is left open",
    3: "candidates of a radix or histogram pass overflow silently",
    4: "top-K of tokens splits a block",
    5: "another path below the budget gives other results",
    6: "blocks grouped by physical place, the last one forced, its key rotated elsewhere",
    7: "forms of masks, and forwards with and without a cache, differ",
    8: "heads reduced in another way",
    9: "the ring's size depends on the page",
    10: "a ring narrower than the verify window",
    11: "an entry of padding read as a full block",
    12: "a cached prefix taken for a multiple of a block",
    13: "partial tiles read or write past their rows",
    14: "a circular cache addressed in a line",
    15: "strides of a view taken for tight ones",
    16: "units of pages mixed up",
    17: "a graph replayed with rows of padding",
    18: "rows of length zero",
    19: "no plan for some phase",
    20: "a block split across shards",
    21: "a snapshot without the open block's raw keys",
    22: "side caches that do not follow a prefix, a stale ring on a hit",
    23: "stale index keys after a dense path",
    24: "caches of different lengths accepted",
    25: "the batch axis mistaken from two requests on",
    26: "side caches lost when batches are merged, filtered or split",
    27: "left padding: logical taken for physical places",
    28: "two owners of one length drift apart",
    29: "stale pooled rows beyond the valid length",
    30: "the ring taken for part of a prefix",
    31: "K and V brought back without index keys",
    32: "one request handed over between pools",
    33: "side caches that nobody lists",
    34: "reuse anchored on a rejected row",
    35: "a selection that does not follow its request, or of another layer",
    36: "verification beyond the budget falls back",
    37: "garbage past the first page",
    38: "wrong only at depth",
    39: "float8 caches missing in some phase",
    40: "rotated caches",
    41: "fused differs from separate",
    42: "32-bit arithmetic on large pools",
    43: "memory for scores or masks without a budget",
    44: "partial softmax merged in low precision",
    45: "invalid ids, rows that see nothing",
    46: "work that follows the cap, not the row",
    47: "the host waits on the step path",
    48: "widths of verification tied to a tile",
    49: "fp16 and fp32 refused without need",
    50: "the plan built in every layer, one block pooled at a time",
    51: "spellings of layer types",
    52: "silent defaults of a partial config",
    53: "partial rotation dropped",
    54: "position axes collapsed in a fused kernel",
    55: "the sparse path silently absent",
    56: "combinations of backends that nobody knows",
}
ACTIONS = {"admit", "fork", "hit", "hold", "hand_over", "close", "ragged", "padded_decode", "verify", "reuse", "abort"}
BACKENDS = ("torch", "interpreter", "gpu", "compiled", "vllm")


@dataclass
class FaultTests:
    """Tests of one number."""

    files: dict[str, list[str]] = field(default_factory=dict)
    backends: set[str] = field(default_factory=set)


def numbers_of(name: str) -> set[int]:
    """Fault numbers in the name of a test, as in ``fault_25_27`` or ``fault_24_fault_31``; above 56 are none."""
    found = [int(n) for run in re.findall(r"(?:^|_)fault_(\d+(?:_\d+)*)(?=_|$)", name) for n in run.split("_")]
    return {number for number in found if number in TITLES}


def marked_gpu(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == "gpu" for part in ast.walk(node))


def functions_of(path: Path) -> Iterator[tuple[ast.FunctionDef, bool]]:
    """Tests of a file, and whether they need a GPU."""
    tree = ast.parse(path.read_text())
    everything = any(
        marked_gpu(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            yield node, everything or any(marked_gpu(mark) for mark in node.decorator_list)


def backends_of(path: str, gpu: bool) -> set[str]:
    """Where a test runs: kernels in the interpreter and on a GPU, unless they need the one or only compile."""
    if gpu:
        return {"gpu"}
    if path.startswith("tests/integrations/vllm"):
        return {"vllm"}
    if not path.startswith("tests/kernels"):
        return {"torch"}
    return {"compiled"} if Path(path).name.startswith("test_compile") else {"interpreter", "gpu"}


@functools.cache
def find_tests() -> dict[int, FaultTests]:
    """Tests by fault number."""
    found = {number: FaultTests() for number in TITLES}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        relative = path.relative_to(ROOT).as_posix()
        for node, gpu in functions_of(path):
            for number in numbers_of(node.name):
                found[number].files.setdefault(relative, []).append(node.name)
                found[number].backends |= backends_of(relative, gpu)
    return found


def table(found: dict[int, FaultTests]) -> str:
    lines = ["| | what broke elsewhere | tests | runs on |", "|---|---|---|---|"]
    for number, title in TITLES.items():
        files = ", ".join(f"[{path.removeprefix('tests/')}](../{path})" for path in found[number].files)
        backends = ", ".join(name for name in BACKENDS if name in found[number].backends)
        lines.append(f"| {number} | {title} | {files} | {backends} |")
    return "\n".join(lines)


def documented() -> dict[int, tuple[set[str], set[str]]]:
    """Files and backends of each row of the table."""
    text = DOCUMENT.read_text().split(BEGIN)[1].split(END)[0]
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    return {
        int(number): (set(re.findall(r"\(\.\./([^)]+)\)", files)), set(backends.strip().split(", ")))
        for number, files, backends in rows
    }


def test_every_fault_has_a_test() -> None:
    missing = [number for number, tests in find_tests().items() if not tests.files]
    assert not missing, f"no test carries fault_N in its name for {missing}"


@pytest.mark.parametrize("number", TITLES)
def test_a_row_of_the_table_is_true(number: int) -> None:
    """Files and backends that a row names are those of tests that carry its number."""
    files, backends = documented()[number]
    found = find_tests()[number]
    write = "Write the table anew: .venv/bin/python tests/testing/test_reliability.py"
    assert files, write
    assert files <= set(found.files), f"no such test any more in {sorted(files - set(found.files))}. {write}"
    assert backends <= found.backends, f"{number} does not run on {sorted(backends - found.backends)}. {write}"


def test_names_of_tests_are_read_right(tmp_path: Path) -> None:
    assert numbers_of("test_fault_25_27_ragged_left_padding") == {25, 27}
    assert numbers_of("test_fault_24_fault_31_an_export") == {24, 31}
    assert numbers_of("test_fault_7_2500_tokens") == {7}
    assert numbers_of("test_from_dict_fault_51_knows") == {51}
    assert numbers_of("test_fault_0_nothing") == numbers_of("test_default_3") == set()
    file = tmp_path / "test_some.py"
    file.write_text("@pytest.mark.gpu\ndef test_a(): ...\ndef test_b(): ...\ndef helper(): ...\n")
    assert [(node.name, gpu) for node, gpu in functions_of(file)] == [("test_a", True), ("test_b", False)]
    file.write_text("pytestmark = [pytest.mark.gpu]\ndef test_b(): ...\n")
    assert [(node.name, gpu) for node, gpu in functions_of(file)] == [("test_b", True)]
    assert backends_of("tests/kernels/test_x.py", False) == {"interpreter", "gpu"}
    assert backends_of("tests/kernels/test_compile_x.py", False) == {"compiled"}


def survivors() -> dict[tuple[str, str], dict[str, str]]:
    """What became of mutants that survived, by module and changed line."""
    listed = tomllib.loads(SURVIVORS.read_text())["survivor"]
    return {(entry["module"], entry["change"]): entry for entry in listed}


def fate(mutant: dict[str, Any]) -> dict[str, str]:
    """The entry of a survivor: what kills it since, or why nothing can."""
    change = next(line[1:] for line in mutant["diff"] if line.startswith("+"))
    return survivors()[mutant["module"].removeprefix("src/flashqsa/"), " ".join(change.split())]


def soak_row(name: str, soaks: list[dict[str, Any]]) -> list[str]:
    if not soaks:
        return []
    steps, requests, rows, replays = (sum(x[n] for x in soaks) for n in ("steps", "requests", "rows", "replays"))
    replayed = f", {replays:,} steps by one graph" if replays else ""
    at = ", ".join(sorted({soak["commit"] for soak in soaks}))
    return [
        f"| {name} | {steps:,} steps in {len(soaks)} runs, {requests:,} requests, {rows:,} rows compared in every "
        f"layer{replayed}; at {at} |"
    ]


def figures_table() -> str:
    measured = json.loads(FIGURES.read_text())
    counts, soaks = measured["counts"], measured["soaks"]
    lines = ["| measured | |", "|---|---|"]
    lines += soak_row("soak on the CPU, `torch`", [soak for soak in soaks if soak["device"] == "cpu"])
    lines += soak_row("soak on a GPU, `triton`", [soak for soak in soaks if soak["device"] != "cpu"])
    lines += [
        f"| state machine | {counts['calls in any order']:,} calls in any order, both pools compared |",
        f"| calls stopped half-way | {counts['calls that were stopped']:,} at every operation of torch in 8 calls: no "
        f"account and no byte in use changed; {counts['calls stopped at a line']:,} at every line of the pool in 13 "
        "calls: all of it has happened, or nothing |",
        f"| bad inputs | {counts['bad inputs refused with a typed error']:,} tests of a typed error; "
        f"{counts['bad calls of the pool that change no byte']:,} tests compare every byte of a pool |",
        f"| tests | {counts['tests']:,}, of which {counts['tests of a fault of others']:,} carry a fault's number |",
    ]
    for report in measured.get("mutation", []):
        fates = [fate(mutant) for mutant in report["survivors"]]
        since = sum("killed_by" in entry for entry in fates)
        lines.append(
            f"| mutants, sample {report['seed']} | {report['killed']} of {report['mutants']} killed at once, {since} "
            f"by tests written for them, {len(fates) - since} change nothing |"
        )
    lines += ["", "Mutants that no test can tell, and why:", "", "| module | change | |", "|---|---|---|"]
    for (module, change), entry in survivors().items():
        if "reason" in entry:
            shown = change.replace("|", "\\|")
            lines.append(f"| {module} | `{shown}` | {entry['reason']} |")
    return "\n".join(lines)


def test_figures_are_those_measured() -> None:
    text = DOCUMENT.read_text().split(MEASURED)[1].split(END_MEASURED)[0]
    assert text.strip() == figures_table(), "Write the figures anew: .venv/bin/python tests/testing/test_reliability.py"


def test_soaks_are_as_long_as_they_are_said_to_be() -> None:
    """Three seeds of 300 steps on the CPU, 2,000 steps of other seeds on a GPU with a graph, every action in each."""
    soaks = json.loads(FIGURES.read_text())["soaks"]
    cpu, gpu = ([soak for soak in soaks if (soak["device"] == "cpu") == where] for where in (True, False))
    assert [(soak["steps"], soak["seed"], soak["stages"]) for soak in cpu] == [(300, n, "torch") for n in range(3)]
    assert sum(soak["steps"] for soak in gpu) >= 2000
    assert len({soak["seed"] for soak in gpu}) == len(gpu)
    assert all(soak["graphs"] and soak["stages"] == "triton" and soak["replays"] > 30 for soak in gpu)
    for soak in soaks:
        assert set(soak["actions"]) >= ACTIONS
        assert sum(soak["actions"].values()) == soak["steps"]


def test_mutants_are_killed_or_explained() -> None:
    """At least 95 % of those that a test can kill; and not many of the others, or the sample says little."""
    for report in json.loads(FIGURES.read_text())["mutation"]:
        unkillable = sum("reason" in fate(mutant) for mutant in report["survivors"])
        killed = report["killed"] + sum("killed_by" in fate(mutant) for mutant in report["survivors"])
        assert report["mutants"] >= 150
        assert killed >= 0.95 * (report["mutants"] - unkillable)
        assert unkillable <= 0.08 * report["mutants"]
    for entry in survivors().values():
        assert ("killed_by" in entry) != ("reason" in entry)
        assert "killed_by" not in entry or (ROOT / entry["killed_by"]).is_file()


def rewritten(text: str, begin: str, end: str, body: str) -> str:
    before, rest = text.split(begin)
    return f"{before}{begin}\n{body}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    text = rewritten(DOCUMENT.read_text(), BEGIN, END, table(find_tests()))
    DOCUMENT.write_text(rewritten(text, MEASURED, END_MEASURED, figures_table()))
