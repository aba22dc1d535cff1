"""One request leaves a pool and lives on in another one: other pages, another ring, another process."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa import ExportedRequest, PagedPool
from flashqsa.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from flashqsa.testing import assert_bitwise_equal

pytest.importorskip("safetensors")

FP8 = torch.float8_e4m3fn
KINDS = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "fp8": {"kv_dtype": FP8, "index_dtype": FP8, "scales": (0.37, 1.9)},
}


def sixteen_steps(serving: Any, name: str, draw_tokens: Any) -> list[torch.Tensor]:
    """Decode, verification with rejected rows, and chunks: what every row gave in every layer."""
    given = []
    for number in range(16):
        rows = (1, 4, 1, 9)[number % 4]
        result = serving.step({name: draw_tokens(rows, 70 + number)})[name]
        given += [x for layer in result for x in (layer.output, layer.block_ids, layer.block_counts)]
        if rows == 4:
            serving.rollback(name, serving.pool.length(name) - number % 5)
    serving.check_caches(name)
    return given


@pytest.mark.parametrize("kind", KINDS)
def test_fault_32_the_next_16_steps_are_identical(
    make_serving: Any, draw_tokens: Any, tmp_path: Path, kind: str
) -> None:
    """Through a file, into a pool with other page sizes, page ids and ring, in use by others."""
    here, there = (make_serving(**KINDS[kind], **options) for options in ({"seed": 1}, {"seed": 2, "page_tokens": 8}))
    here.open("a")
    here.step({"a": draw_tokens(47)})
    here.pool.export_request("a").save(tmp_path / "a.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    there.open("other")
    there.step({"other": draw_tokens(50, 1)})
    assert there.pool.import_request("b", ExportedRequest.load(tmp_path / "a.safetensors")) == 47
    there.tokens["b"] = list(here.tokens["a"])
    assert there.pool.page_ids("b")[:3] != here.pool.page_ids("a")
    assert there.pool.ring_id("b") != here.pool.ring_id("a")
    there.check_caches("b")
    for ours, theirs in zip(sixteen_steps(there, "b", draw_tokens), sixteen_steps(here, "a", draw_tokens), strict=True):
        assert_bitwise_equal(ours, theirs)
    there.check_caches("other")


SECOND_PROCESS = """
import importlib.util, sys
import torch
spec = importlib.util.spec_from_file_location("pool_tests", sys.argv[1])
module = sys.modules["pool_tests"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
from flashqsa import ExportedRequest
serving = module.Serving(seed=9, page_tokens=32, pages=20, rings=3)
serving.pool.import_request("a", ExportedRequest.load(sys.argv[2]))
serving.tokens["a"] = module.some_tokens(45)
given = []
for number in range(16):
    result = serving.step({"a": module.some_tokens((1, 4, 1, 9)[number % 4], 70 + number)})["a"]
    given += [x for layer in result for x in (layer.output, layer.block_ids, layer.block_counts)]
    if number % 4 == 1:
        serving.rollback("a", serving.pool.length("a") - number % 5)
torch.save(given, sys.argv[3])
"""


def test_fault_32_hand_over_between_two_processes(make_serving: Any, draw_tokens: Any, tmp_path: Path) -> None:
    serving = make_serving()
    serving.open("a")
    serving.step({"a": draw_tokens(45)})
    file, results = tmp_path / "a.safetensors", tmp_path / "results.pt"
    serving.pool.export_request("a").save(file)
    conftest = Path(__file__).with_name("conftest.py")
    run = subprocess.run(
        [sys.executable, "-c", SECOND_PROCESS, conftest, file, results],
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for ours, theirs in zip(sixteen_steps(serving, "a", draw_tokens), torch.load(results), strict=True):
        assert_bitwise_equal(theirs, ours)


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 15, 16, 17, 40, 41, 42, 43])
def test_fault_21_a_snapshot_holds_the_open_block(make_serving: Any, draw_tokens: Any, length: int) -> None:
    here, there = make_serving(seed=1), make_serving(seed=2)
    here.open("a")
    here.step({"a": draw_tokens(length)})
    exported = here.pool.export_request("a")
    here.close("a")
    assert there.pool.import_request("a", exported) == length
    there.tokens["a"] = draw_tokens(length)
    for token in draw_tokens(9, 3):
        there.step({"a": [token]})
    there.check_caches("a")


def test_fault_31_evicted_renumbered_and_brought_back(make_serving: Any, draw_tokens: Any) -> None:
    serving = make_serving(pages=9, rings=3)
    serving.open("a")
    serving.step({"a": draw_tokens(70)})
    pages = serving.pool.page_ids("a")
    exported, tokens = serving.pool.export_request("a"), serving.tokens["a"]
    serving.close("a")
    serving.open("b")
    serving.step({"b": draw_tokens(41, 1)})
    serving.pool.import_request("a", exported)
    serving.tokens["a"] = tokens
    assert serving.pool.page_ids("a") != pages
    serving.step({"a": draw_tokens(3, 2), "b": draw_tokens(2, 3)})
    for name in "ab":
        serving.check_caches(name)


def test_rings_of_other_sizes(make_serving: Any, draw_tokens: Any, refuses: Any) -> None:
    """A smaller ring takes the last raw keys, a larger one what there is."""
    large, small = make_serving(speculative_rows=16), make_serving(speculative_rows=0)
    large.open("a")
    large.step({"a": draw_tokens(41)})
    small.pool.import_request("a", large.pool.export_request("a"))
    small.tokens["a"] = list(large.tokens["a"])
    small.step({"a": draw_tokens(2, 1)})
    exported = small.pool.export_request("a")
    assert exported.ring_start == 39
    large.pool.import_request("b", exported)
    large.tokens["b"] = list(small.tokens["a"])
    with refuses(ArgumentError, "PagedPool.rollback", "from token 39 on"):
        large.pool.rollback("b", length=39)
    large.rollback("b", 42)
    large.step({"b": draw_tokens(20, 2)})
    for serving, name in ((large, "a"), (large, "b"), (small, "a")):
        serving.check_caches(name)


def test_a_fork_and_a_shared_prefix_are_exported_whole(make_serving: Any, draw_tokens: Any) -> None:
    here, there = make_serving(seed=1), make_serving(seed=2)
    here.open("a")
    here.step({"a": draw_tokens(37)})
    here.fork("a", "b")
    here.step({"b": draw_tokens(4, 1)})
    for name in "ab":
        there.pool.import_request(name, here.pool.export_request(name))
        there.tokens[name] = list(here.tokens[name])
    assert not set(there.pool.page_ids("a")) & set(there.pool.page_ids("b"))
    there.step({"a": [1], "b": [2]})
    for name in "ab":
        there.check_caches(name)


def exported_by(make_serving: Any, draw_tokens: Any, **options: Any) -> ExportedRequest:
    serving = make_serving(**options)
    serving.open("a")
    serving.step({"a": draw_tokens(42)})
    return serving.pool.export_request("a")


def without(exported: ExportedRequest, name: str) -> ExportedRequest:
    return dataclasses.replace(exported, tensors={n: x for n, x in exported.tensors.items() if n != name})


def with_tensor(exported: ExportedRequest, name: str, change: Any) -> ExportedRequest:
    return dataclasses.replace(exported, tensors={**exported.tensors, name: change(exported.tensors.get(name))})


REFUSED = {
    "no export": (lambda e: {"length": 3}, ArgumentError, ("exported must be a ExportedRequest", "dict")),
    "other blocks": (lambda e: dataclasses.replace(e, block_tokens=2), ArgumentError, ("block_tokens must be 4",)),
    "other layers": (lambda e: dataclasses.replace(e, layer_ids=(3, 8)), ArgumentError, ("layer_ids", "[3, 8]")),
    "other model": (
        lambda e: dataclasses.replace(e, model=e.model | {"rotary_dim": 4}), ArgumentError, ("model", "_dim': 4"),
    ),
    "length no number": (lambda e: dataclasses.replace(e, length="42"), ArgumentError, ("length", "'42'")),
    "fault 24: longer": (lambda e: dataclasses.replace(e, length=43), ShapeError, ("layer.3.k", "[43, 1, 8]")),
    "fault 24: shorter": (lambda e: dataclasses.replace(e, length=41), ShapeError, ("layer.3.k", "[41, 1, 8]")),
    "fault 24: v shorter": (lambda e: with_tensor(e, "layer.7.v", lambda x: x[:40]), ShapeError, ("layer.7.v", "40")),
    "fault 24: block keys shorter": (
        lambda e: with_tensor(e, "layer.7.block_keys", lambda x: x[:5]), ShapeError, ("layer.7.block_keys", "[10, 8]"),
    ),
    "fault 24: block keys longer": (
        lambda e: with_tensor(e, "layer.3.block_keys", lambda x: torch.cat([x, x])), ShapeError, ("[20, 8]",),
    ),
    "ring without the open block": (
        lambda e: dataclasses.replace(e, ring_start=41), ArgumentError, ("ring_start must be at most 40", "got 41"),
    ),
    "ring beyond the end": (lambda e: dataclasses.replace(e, ring_start=43), ArgumentError, ("ring_start", "got 43")),
    "fewer raw keys": (
        lambda e: with_tensor(e, "layer.3.raw_index_keys", lambda x: x[1:]), ShapeError, ("raw_index_keys",),
    ),
    "raw keys never written": (
        lambda e: with_tensor(e, "layer.7.ring_positions", lambda x: x - 1000), ArgumentError, ("ring_positions",),
    ),
    "other dtype": (lambda e: with_tensor(e, "layer.3.v", lambda x: x.half()), DTypeError, ("layer.3.v", "float16")),
    "fault 31: block keys missing": (lambda e: without(e, "layer.7.block_keys"), ArgumentError, ("block_keys",)),
    "fault 31: raw keys missing": (lambda e: without(e, "layer.3.raw_index_keys"), ArgumentError, ("raw_index_keys",)),
    "scales that the pool lacks": (
        lambda e: with_tensor(e, "layer.3.k_scale", lambda x: torch.ones(1)), ArgumentError, ("k_scale must be None",),
    ),
    "one tensor too many": (
        lambda e: with_tensor(e, "layer.5.k", lambda x: torch.ones(1)), ArgumentError, ("also ['layer.5.k']",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_fault_24_fault_31_an_export_that_does_not_fit_changes_nothing(
    make_serving: Any, draw_tokens: Any, refuses: Any, nothing_changes: Any, what: str
) -> None:
    change, error, parts = REFUSED[what]
    there = make_serving(seed=2)
    there.open("b")
    there.step({"b": draw_tokens(30, 1)})
    exported = change(exported_by(make_serving, draw_tokens))
    with nothing_changes(there.pool), refuses(error, "PagedPool.import_request", *parts):
        there.pool.import_request("a", exported)


def test_other_scales_are_refused(make_serving: Any, draw_tokens: Any, refuses: Any, nothing_changes: Any) -> None:
    exported = exported_by(make_serving, draw_tokens, kv_dtype=FP8, scales=(0.37, 1.9))
    other = make_serving(kv_dtype=FP8, scales=(0.37, 2.0)).pool
    with (
        nothing_changes(other),
        refuses(ArgumentError, "PagedPool.import_request", "layer.3.v_scale must be 2.0", "1.89"),
    ):
        other.import_request("a", exported)
    none = make_serving(kv_dtype=FP8).pool
    with nothing_changes(none), refuses(ArgumentError, "PagedPool.import_request", "k_scale must be None"):
        none.import_request("a", exported)


def test_a_model_of_other_heads_is_refused(make_serving: Any, draw_tokens: Any, tiny_config: Any, refuses: Any) -> None:
    config = dataclasses.replace(tiny_config, head_dim=16)
    pool = PagedPool.from_config(config, page_tokens=16, num_pages=9, num_rings=1, dtype=torch.float32)
    with refuses(ShapeError, "PagedPool.import_request", "layer.3.k", "[42, 1, 16]", "[42, 1, 8]"):
        pool.import_request("a", exported_by(make_serving, draw_tokens))


OTHER_CONFIGS = {
    "heads": ({"head_dim": 16}, ShapeError, ("layer.3.k", "[42, 1, 16]")),
    "index heads": ({"index_head_dim": 16}, ShapeError, ("layer.3.block_keys", "[10, 16]")),
    "blocks": ({"block_tokens": 2}, ArgumentError, ("block_tokens must be 2", "got 4")),
    "layers": ({"qsa_layer_ids": (3, 11)}, ArgumentError, ("layer_ids must be [3, 11]", "got [3, 7]")),
    "fewer layers": ({"qsa_layer_ids": (3,)}, ArgumentError, ("layer_ids must be [3]", "got [3, 7]")),
    "rotation": ({"rotary_dim": 4}, ArgumentError, ("model", "'rotary_dim': 4", "'rotary_dim': 6")),
    "sections": ({"mrope_section": (3, 0, 0)}, ArgumentError, ("model", "[3, 0, 0]", "[1, 1, 1]")),
    "norms": ({"norm_eps": 1e-5}, ArgumentError, ("model", "1e-05", "1e-06")),
    "theta": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, ArgumentError, ("model", "1000000.0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHER_CONFIGS)
def test_fault_32_an_export_of_another_config_is_refused(
    make_serving: Any, draw_tokens: Any, tiny_config: Any, refuses: Any, nothing_changes: Any, file: Path, what: str
) -> None:
    """Through a file, into a pool of a checkpoint that differs in one number."""
    change, error, parts = OTHER_CONFIGS[what]
    config = dataclasses.replace(tiny_config, **change)
    pool = PagedPool.from_config(
        config, page_tokens=16, num_pages=9, num_rings=2, speculative_rows=3, dtype=torch.float32
    )
    pool.open("b")
    pool.plan_step({"b": 20})
    with nothing_changes(pool), refuses(error, "PagedPool.import_request", *parts):
        pool.import_request("a", ExportedRequest.load(file))


def test_killed_half_way_nothing_that_is_in_use_has_changed(
    make_serving: Any, draw_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import stops in its second layer; the request is not there, others and the accounts are as before."""
    from flashqsa.cache.pool import handover

    there = make_serving(seed=2)
    there.open("b")
    there.step({"b": draw_tokens(30, 1)})
    exported, writes = exported_by(make_serving, draw_tokens), []
    free = (there.pool.free_pages, there.pool.free_rings)
    write_rows = handover._write_rows

    def stops(*arguments: Any) -> None:
        writes.append(1)
        if len(writes) == 5:
            raise KeyboardInterrupt
        write_rows(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(handover, "_write_rows", stops)
        with pytest.raises(KeyboardInterrupt):
            there.pool.import_request("a", exported)
    assert there.pool.requests == ("b",)
    assert (there.pool.free_pages, there.pool.free_rings) == free
    there.pool._accounts.check()
    there.step({"b": draw_tokens(20, 2)})
    there.pool.import_request("a", exported)
    there.tokens["a"] = draw_tokens(42)
    for name in "ab":
        there.check_caches(name)


@pytest.fixture
def file(make_serving: Any, draw_tokens: Any, tmp_path: Path) -> Path:
    exported_by(make_serving, draw_tokens).save(tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def rewrite(file: Path, change: Any) -> None:
    """Change the metadata of a safetensors file."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    change(header["__metadata__"])
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])


@pytest.mark.parametrize("share", [0.0, 0.0005, 0.1, 0.5, 0.99, 0.9999])
def test_a_truncated_file_is_refused(file: Path, refuses: Any, share: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    with refuses(ArgumentError, "ExportedRequest.load", "whole exported request", str(file)):
        ExportedRequest.load(file)


@pytest.mark.parametrize(
    ("change", "error", "parts"),
    [
        (lambda m: m.update(version="2"), UnsupportedError, ("version 1", "'2'")),
        (lambda m: m.pop("version"), UnsupportedError, ("version 1", "None")),
        (lambda m: m.update(format="flashqsa.recording"), ArgumentError, ("'flashqsa.recording'",)),
        (lambda m: m.pop("request"), ArgumentError, ("describe its request",)),
        (lambda m: m.update(request="{"), ArgumentError, ("describe its request",)),
        (lambda m: m.update(request="[]"), ArgumentError, ("describe its request",)),
        (lambda m: m.update(request='{"length": 3}'), ArgumentError, ("describe its request",)),
    ],
)
def test_a_file_of_another_kind_is_refused(
    file: Path, refuses: Any, change: Any, error: Any, parts: tuple[str, ...]
) -> None:
    rewrite(file, change)
    with refuses(error, "ExportedRequest.load", *parts, str(file)):
        ExportedRequest.load(file)


def test_a_missing_file_is_refused(tmp_path: Path, refuses: Any) -> None:
    with refuses(ArgumentError, "ExportedRequest.load", "nowhere"):
        ExportedRequest.load(tmp_path / "nowhere")


def test_a_failed_save_leaves_the_old_file(
    make_serving: Any, draw_tokens: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = file.read_bytes()

    def fails(tensors: Any, path: Path, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", fails)
    with pytest.raises(OSError, match="disk full"):
        exported_by(make_serving, draw_tokens).save(file)
    assert file.read_bytes() == old
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_the_form_of_a_file(file: Path) -> None:
    """Format, version, names and shapes, as documented."""
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        metadata, shapes = opened.metadata(), {n: opened.get_slice(n).get_shape() for n in opened.keys()}  # noqa: SIM118
    assert (metadata["format"], metadata["version"]) == ("flashqsa.request", "1")
    about = json.loads(metadata["request"])
    assert {name: about[name] for name in ("length", "ring_start", "block_tokens", "layer_ids")} == {
        "length": 42, "ring_start": 30, "block_tokens": 4, "layer_ids": [3, 7],
    }  # fmt: skip
    assert set(about["model"]) == {"rope_parameters", "rotary_dim", "mrope_section", "norm_eps"}
    assert shapes == {
        f"layer.{layer_id}.{name}": shape
        for layer_id in (3, 7)
        for name, shape in {
            "k": [42, 1, 8], "v": [42, 1, 8], "block_keys": [10, 8], "raw_index_keys": [12, 8],
            "ring_positions": [12, 3],
        }.items()
    }  # fmt: skip
