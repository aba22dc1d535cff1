"""The table of faults in docs/reliability.md: every number has a test, and every test that a row names is there.

    .venv/bin/python tests/testing/test_reliability.py

writes the table anew from the names of the tests.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: written by tests/testing/test_reliability.py -->", "<!-- end of faults -->"

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


if __name__ == "__main__":
    before, rest = DOCUMENT.read_text().split(BEGIN)
    DOCUMENT.write_text(f"{before}{BEGIN}\n{table(find_tests())}\n{END}{rest.split(END)[1]}")
