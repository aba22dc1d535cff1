"""gpu-vllm-ops on CPU tensors: our operators stand for vLLM's, as they are or with a fault that a gate has to find."""

from __future__ import annotations

import argparse
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks.gpu_workload import BLOCK, PAGE, TOPK
from benchmarks.vllm_ops_cases import RING_TOKENS, Case, Engine, cases, recorded_cases
from benchmarks.vllm_ops_shadow import shadow_rows

from benchmarks import gpu_vllm_ops, report_vllm_ops
from flashqsa.integrations.vllm_plugin.seams import OPERATORS

DECODE = Case("decode", ((2400, 1), (2304, 1), (3, 1)), 3, table_tokens=4096)
MIXED = Case("mixed", ((2403, 1), (3, 1), (0, 9), (2301, 6), (18, 3)), 2, table_tokens=4096)
MIXED_FP8 = Case("mixed", MIXED.requests, 2, fp8=True, mrope=False, table_tokens=4096)
Fault = Callable[[str, dict[str, Any], Any], None]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def faulty(fault: Fault | None = None) -> dict[str, Callable[..., Any]]:
    """Our operators, after each of which a fault is made in what it wrote or returned."""

    def made(name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ours)
        def operator(**arguments: Any) -> Any:
            returned = ours(**arguments)
            if fault is not None:
                fault(name, arguments, returned)
            return returned

        return operator

    return {name: made(name, ours) for name, ours in gpu_vllm_ops.OURS.items()}


def failed_in(case: Case, theirs: dict[str, Callable[..., Any]]) -> dict[str, str]:
    rows = list(gpu_vllm_ops.rows_of_case(case, theirs, None, generator()))
    assert len(rows) >= 7
    return {row["operator"]: "; ".join(row["failed"]) for row in rows if row["failed"]}


def test_cases_cover_what_is_promised_and_fit_their_tables() -> None:
    assert len({str(case) for case in cases()}) == len(cases())
    kinds = {(case.decode_requests == len(case.requests), case.fp8, case.mrope) for case in cases()}
    assert {(True, False, True), (True, True, False), (False, False, True), (False, True, False)} <= kinds
    for case in (*cases(), *recorded_cases()):
        assert max(before + rows for before, rows in case.requests) <= case.table_tokens
        assert len({rows for _, rows in case.requests[: case.decode_requests]}) <= 1, "decode rows are uniform"


def test_shares_of_the_work_add_up_to_all_of_it() -> None:
    compared, recorded = gpu_vllm_ops.chosen_cases("")
    parts = [gpu_vllm_ops.chosen_cases(f"{i}/4") for i in range(4)]
    assert sorted(str(case) for part, _ in parts for case in part) == sorted(map(str, compared))
    assert sum(len(groups) for _, groups in parts) == len(recorded) == 2
    assert gpu_vllm_ops.chosen_cases("shadow") == ([], recorded)
    assert [str(case) for case in gpu_vllm_ops.chosen_cases("verify")[0]] == ["verify 32 x 4 at 32,768, bf16, MRoPE"]


def test_metadata_is_that_of_a_step() -> None:
    engine = Engine(MIXED, generator())
    page, block = PAGE, PAGE // BLOCK
    for request, (before, rows) in enumerate(MIXED.requests):
        mine = (engine.row_requests == request).nonzero()[:, 0]
        assert engine.logical[mine].tolist() == list(range(before, before + rows))
        groups = max((before + rows) // BLOCK - before // BLOCK, 1)
        items = engine.work[engine.work[:, 0] == request][:, 1]
        assert items.tolist() == list(range(groups)), "one item a closed block, and one at least"
        for row in mine.tolist():
            token = int(engine.logical[row])
            table = engine.page_table[request]
            assert int(engine.slots[row]) == int(table[token // page]) * page + token % page
            closed = int(table[token // page]) * block + token % page // BLOCK if token % BLOCK == 3 else -1
            assert int(engine.closed_slots[row]) == closed
        kept = [int(slot) for slot in engine.ring_slots[mine] if slot >= 0]
        assert len(kept) == min(rows, RING_TOKENS)
        assert {slot // RING_TOKENS for slot in kept} == {int(engine.ring_table[request, 0])}
    assert len(set(engine.slots.tolist())) == engine.rows


@pytest.mark.parametrize("case", [DECODE, MIXED, MIXED_FP8], ids=str)
def test_every_operator_passes_beside_itself(case: Case) -> None:
    rows = list(gpu_vllm_ops.rows_of_case(case, faulty(), None, generator()))
    assert {row["operator"] for row in rows} >= set(gpu_vllm_ops.OURS) - {"qsa_select_paged_prefill"}
    assert [row["failed"] for row in rows] == [[]] * len(rows)
    assert all(row["figures"].get("equal share", 1) == 1 for row in rows)


def test_without_vllm_ours_is_held_against_float64_alone() -> None:
    assert failed_in(MIXED, {}) == {}
    assert not list(gpu_vllm_ops.all_rows({}, None, generator(), [], [[DECODE]])), "nothing to be in the shadow of"


def test_ids_in_any_order_are_the_same_set() -> None:
    def reversed_ids(name: str, arguments: dict[str, Any], _: Any) -> None:
        if "select" in name:
            for row, seen in enumerate(arguments["visible_blocks"].tolist()):
                count = min(seen, TOPK)
                ids = arguments["block_indices"][row]
                ids[:count], ids[count:] = ids[:count].flip(0), -7

    assert failed_in(MIXED, faulty(reversed_ids)) == {}


def wrong_id(name: str, arguments: dict[str, Any], _: Any) -> None:
    if name == "qsa_select_paged_decode":
        ids = arguments["block_indices"][0]
        ids[100] = next(block for block in range(600) if block not in ids.tolist())


def doubled_id(name: str, arguments: dict[str, Any], _: Any) -> None:
    if name == "qsa_select_paged_decode":
        arguments["block_indices"][0, 5] = arguments["block_indices"][0, 6]


def wrong_pooled_key(name: str, arguments: dict[str, Any], _: Any) -> None:
    if name == "qsa_prepare":
        slot, keys = int(arguments["compressed_slots"].max()), arguments["compressed_cache"]
        row = keys[slot // keys.shape[1], slot % keys.shape[1], 0]
        row[70:] = (row[70:].float() * 1.5 + 0.5).to(row.dtype)


def stray_write(name: str, arguments: dict[str, Any], _: Any) -> None:
    if name == "qsa_prepare":
        arguments["main_kv_cache"][0, 3, 0, 7] = 9.0


def changed_ring(name: str, arguments: dict[str, Any], _: Any) -> None:
    if name == "qsa_prepare":
        slot = int(arguments["state_slots"].max())
        arguments["state_cache"][slot // RING_TOKENS, slot % RING_TOKENS, 0, 3] += 1


def changed_gate(name: str, _: dict[str, Any], returned: Any) -> None:
    if name == "qsa_prepare":
        returned[1][0, 0, 0] += 1


def wrong_count(name: str, arguments: dict[str, Any], _: Any) -> None:
    if name == "expand_qsa_block_indices":
        arguments["out"][0, -1] += 1


def scaled_output(name: str, _: dict[str, Any], returned: Any) -> None:
    if name == "qsa_sparse_paged_attention":
        returned[1] *= 1.1


def moved_position(name: str, arguments: dict[str, Any], returned: Any) -> None:
    if name == "qsa_compress_groups_with_ratio":
        returned[1][int((arguments["compressed_slots"] >= 0).nonzero()[0, 0]), 0] += 1


def scaled_mean(name: str, arguments: dict[str, Any], returned: Any) -> None:
    if name == "qsa_compress_groups_with_ratio":
        returned[0][int((arguments["compressed_slots"] >= 0).nonzero()[0, 0])] *= 1.05


def other_row(name: str, arguments: dict[str, Any], _: Any) -> None:
    if name == "qsa_store_cache_rows" and arguments["cache"].dtype == torch.bfloat16:
        cache, slots = arguments["cache"], arguments["slot_mapping"]
        slot = int(slots[(slots >= 0) & (slots < cache.shape[0] * cache.shape[1])][0])
        cache[slot // cache.shape[1], slot % cache.shape[1], 0, 5] = 3.0


@pytest.mark.parametrize(
    ("fault", "operator", "told"),
    [
        (wrong_id, "qsa_select_paged_decode", "leaves a block out"),
        (doubled_id, "qsa_select_paged_decode", "distinct visible blocks"),
        (wrong_pooled_key, "qsa_prepare", "pooled keys"),
        (stray_write, "qsa_prepare", "main_kv_cache: vllm writes where it should not"),
        (changed_ring, "qsa_prepare", "ring: vllm writes other rows"),
        (changed_gate, "qsa_prepare", "gates: vllm"),
        (wrong_count, "expand_qsa_block_indices", "other tokens or counts"),
        (scaled_output, "qsa_sparse_paged_attention", "vLLM itself errs"),
        (moved_position, "qsa_compress_groups_with_ratio", "other first positions"),
        (scaled_mean, "qsa_compress_groups_with_ratio", "means"),
    ],
)
@pytest.mark.parametrize("case", [MIXED, MIXED_FP8], ids=str)
def test_a_fault_of_one_operator_fails_that_one_alone(case: Case, fault: Fault, operator: str, told: str) -> None:
    found = failed_in(case, faulty(fault))
    assert found.keys() == {operator}
    assert told in found[operator]


def test_a_fault_of_ours_fails_too(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = faulty()
    monkeypatch.setattr(gpu_vllm_ops, "OURS", faulty(wrong_pooled_key))
    assert "pooled keys: error" in failed_in(MIXED, theirs)["qsa_prepare"]
    monkeypatch.setattr(gpu_vllm_ops, "OURS", faulty(other_row))
    assert "flashqsa: other rows are stored" in failed_in(MIXED, theirs)["qsa_store_cache_rows"]


def test_what_raises_is_named_and_the_others_go_on() -> None:
    def refuses(**_: Any) -> None:
        raise AssertionError("out.shape")

    found = failed_in(MIXED, faulty() | {"expand_qsa_block_indices": refuses})
    assert found == {"expand_qsa_block_indices": "vllm raises AssertionError: out.shape"}


def test_times_are_taken_of_what_passed() -> None:
    class InTurn:
        def interleaved(self, contenders: dict[str, Callable[[], object]]) -> dict[str, Any]:
            return {name: {"median_us": 2.0 if run() is None else 1.0} for name, run in contenders.items()}

    rows = list(gpu_vllm_ops.rows_of_case(DECODE, faulty(wrong_count), InTurn(), generator()))
    assert [row["operator"] for row in rows if not row["times"]] == ["expand_qsa_block_indices"]
    assert "FAILED" in gpu_vllm_ops.line_of(rows[2])
    assert "ratio 1.00" in gpu_vllm_ops.line_of(rows[-1])


def test_the_peer_is_taken_as_far_as_it_fits() -> None:
    def other(cache: Any, rows: Any) -> None:
        pass

    functions = faulty()
    modules: dict[str, dict[str, Any]] = {"qsa_prepare": {}, "qsa_indexer": {}, "qsa": {}}
    for seam in OPERATORS:
        module = "qsa_prepare" if seam.name == "qsa_prepare" else seam.module.rsplit(".", 1)[1]
        modules[module][seam.name] = functions[seam.name]
    vllm = types.SimpleNamespace(**{name: types.SimpleNamespace(**held) for name, held in modules.items()})
    assert gpu_vllm_ops.Peer.of(vllm).left_out == {}
    vllm.with_topk, vllm.qsa.qsa_store_cache_rows = False, other
    del vllm.qsa.qsa_compress_groups_with_ratio
    left_out = gpu_vllm_ops.Peer.of(vllm).left_out
    assert len(left_out) == 4
    assert "top-k" in left_out["qsa_select_paged_decode"]
    assert "(cache, rows)" in left_out["qsa_store_cache_rows"]
    assert "no such function" in left_out["qsa_compress_groups_with_ratio"]
    assert len(gpu_vllm_ops.Peer.of(None).left_out) == len(OPERATORS)


@pytest.mark.parametrize("group", [[DECODE, MIXED], [MIXED_FP8]], ids=["bf16", "fp8"])
def test_shadow_serves_what_vllm_makes_of_the_recording(group: list[Case]) -> None:
    rows = list(shadow_rows(group, gpu_vllm_ops.OURS, faulty(), generator()))
    assert [row["failed"] for row in rows] == [[]] * len(rows)
    assert {row["operator"] for row in rows} == set(gpu_vllm_ops.OURS)
    assert {row["operator"]: row["calls"] for row in rows}["qsa_prepare"] == len(group)
    assert all(row["largest_error"] == row["differing_rows"] == 0 for row in rows)


def test_shadow_fails_where_ours_leaves_something_behind_or_differs() -> None:
    def failed(ours: dict[str, Callable[..., Any]]) -> dict[str, str]:
        rows = shadow_rows([DECODE], ours, faulty(), generator())
        return {row["operator"]: "; ".join(row["failed"]) for row in rows if row["failed"]}

    left = failed(faulty(stray_write))
    assert left.keys() == {"qsa_prepare"}
    assert "finds another main_kv_cache than recorded" in left["qsa_prepare"]
    assert "leaves a block out" in failed(faulty(wrong_id))["qsa_select_paged_decode"]
    assert "1 rows differ" in failed(faulty(changed_ring))["qsa_prepare"]
    assert "outputs: error" in failed(faulty(scaled_output))["qsa_sparse_paged_attention"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_vllm_ops.run(argparse.Namespace()) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_tables_show_times_agreement_and_what_was_not_measured() -> None:
    times = {"flashqsa": {"median_us": 30.0}, "vllm": {"median_us": 20.0}}
    row = {"measure": "gpu vllm ops", "case": "decode, bf16, text", "operator": "qsa_prepare", "part": "", "failed": [],
           "figures": {"equal share": 0.981, "places apart": 1.25}, "times": times}  # fmt: skip
    ids = row | {"operator": "qsa_select_paged_decode", "part": "decode rows",
                 "figures": {"rows with other ids": 2.0, "rows": 32.0}}  # fmt: skip
    alone = row | {"figures": {}, "times": {"flashqsa": {"median_us": 30.0}}}
    text = report_vllm_ops.ops_table([row, ids, alone])
    assert "| qsa_prepare | 20.0 | 30.0 | 1.50 | 98.1 % equal or more, at most 1.25 places apart |" in text
    assert "| qsa_select_paged_decode, decode rows | 20.0 | 30.0 | 1.50 | 2 of 32 rows with other ids |" in text
    assert "| qsa_prepare | not measured | 30.0 | not measured | not compared |" in text
    shadow = {"measure": "gpu vllm shadow", "case": "shadow of decode", "operator": "qsa_prepare", "calls": 2,
              "rows": 1234, "differing_rows": 0, "largest_error": 0.015625, "flashqsa_us": [3.0, 1.0, 2.0],
              "vllm_us": [7.0], "failed": []}  # fmt: skip
    broken = {"measure": "gpu vllm shadow", "case": "shadow of mixed", "operator": "recording", "told": "",
              "failed": ["raises Error: why\nwhere"]}  # fmt: skip
    text = report_vllm_ops.shadow_table([shadow, broken])
    assert "| decode | qsa_prepare | 2 / 1,234 | 0 | 0.0156 | 7.0 | 2.0 | yes |" in text
    assert "| mixed | recording | - | - | - | - | - | FAILED: raises Error: why |" in text
    assert "Not measured" in report_vllm_ops.sections([])["gpu-vllm-ops"]
