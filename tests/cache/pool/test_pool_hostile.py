"""Calls that nobody should make, numbers of other libraries, and modes of torch that are on by accident."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa import CacheLayout, ExportedRequest, PagedPool, PoolFullError
from flashqsa.errors import ArgumentError, DeviceError, ShapeError, UnsupportedError

np = pytest.importorskip("numpy")
pytest.importorskip("safetensors")

LAYOUT = {"page_tokens": 8, "block_tokens": 4, "kv_heads": 1, "head_dim": 8, "index_head_dim": 8, "ring_tokens": 8}


def make_pool(**change: Any) -> PagedPool:
    dtypes = dict.fromkeys(("kv_dtype", "index_dtype", "ring_dtype"), torch.float32)
    arguments = {"topk_blocks": 4, "num_pages": 40, "num_rings": 4, "layer_ids": [0, 1]} | change
    return PagedPool(CacheLayout(**LAYOUT, **dtypes), **arguments)


@pytest.fixture
def pool() -> PagedPool:
    """One request of 18 tokens whose layers have run, and a fork of it."""
    pool = make_pool()
    pool.open("a")
    pool.plan_step({"a": 18})
    for listed in pool.tensors():
        listed.tensor.fill_(3)
    pool.fork("a", "b")
    return pool


@pytest.mark.parametrize("rows", [10**6, 2**31, 2**63, 10**30])
def test_more_rows_than_any_pool_holds_are_refused_at_once(
    pool: PagedPool, refuses: Any, nothing_changes: Any, rows: int
) -> None:
    """Pages are counted before any of them is listed: 10^30 rows would be listed for ever."""
    needed = -(-(18 + rows) // 8) - 3 + 1  # with a copy of the shared one
    assert pool.pages_needed({"a": rows, "b": 0}) == needed
    for call, where in ((lambda: pool.plan_step({"a": rows}), "plan_step"), (lambda: pool.extend("a", rows), "extend")):
        with nothing_changes(pool), refuses(PoolFullError, f"PagedPool.{where}", f"cover the {needed} ", "got 37"):
            call()


@pytest.mark.parametrize("name", [([],), (1, {}), None], ids=str)
def test_names_that_cannot_be(pool: PagedPool, refuses: Any, nothing_changes: Any, name: Any) -> None:
    """A tuple is hashable by its type, and fails when it is hashed; None names no prefix."""
    with nothing_changes(pool):
        for call, where in (
            (lambda: pool.open(name), "open"),
            (lambda: pool.fork("a", name), "fork"),
            (lambda: pool.import_request(name, pool.export_request("a")), "import_request"),
        ):
            with refuses(ArgumentError, f"PagedPool.{where}", "hashable and not None", repr(name)):
                call()
        for call, where in (
            (lambda: pool.close(name), "close"),
            (lambda: pool.length(name), "length"),
            (lambda: pool.extend(name, 1), "extend"),
            (lambda: pool.rollback(name, rows=1), "rollback"),
            (lambda: pool.fork(name, "c"), "fork"),
        ):
            with refuses(ArgumentError, f"PagedPool.{where}", "open", repr(name)):
                call()


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int64])
def test_numbers_of_numpy_do_not_overflow(kind: Any, tmp_path: Path) -> None:
    """Three times 100 rows as int8 are 300, and what a file says about a request is plain."""
    layout = CacheLayout(**{name: kind(value) for name, value in LAYOUT.items()}, ring_dtype=torch.float32)
    pool = PagedPool(
        layout, topk_blocks=kind(4), num_pages=kind(100), num_rings=kind(3), layer_ids=np.arange(2, dtype=kind)
    )
    pool.open("a")
    for _ in range(3):
        plan = pool.plan_step({"a": kind(100)}, num_rows=kind(101))
    assert plan.seq_lens.tolist() == [300]
    pool.rollback("a", rows=kind(3))
    pool.extend("a", kind(9))
    for cache in pool.caches:
        cache.ring_positions.fill_(1)
    assert pool.open("b", prefix_of="a", tokens=kind(100)) == 100
    numbers = [pool.length("a"), pool.length("b"), pool.token_bytes, *pool.layer_ids, *pool.page_ids("a")]
    assert numbers[:3] == [297, 100, pool.layout.page_bytes * 2 / 8]
    assert {type(number) for number in numbers} == {int, float}
    pool.export_request("a").save(tmp_path / "a")
    assert pool.import_request("c", ExportedRequest.load(tmp_path / "a")) == 297


@pytest.mark.parametrize(
    ("change", "error", "parts"),
    [
        ({"layer_ids": 5}, ArgumentError, ("layer_ids", "got int")),
        ({"layer_ids": None}, ArgumentError, ("layer_ids", "got NoneType")),
        ({"layer_ids": "01"}, ArgumentError, ("layer_ids", "got '0'")),
        ({"device": "nonsense"}, DeviceError, ("device", "'nonsense'")),
        ({"device": 3.5}, DeviceError, ("device", "3.5")),
        ({"model": object()}, ArgumentError, ("model", "JSON value", "got object")),
        ({"model": {(1, 2): 3}}, ArgumentError, ("model", "JSON value", "got dict")),
    ],
)
def test_pools_that_cannot_be(refuses: Any, change: dict[str, Any], error: Any, parts: tuple[str, ...]) -> None:
    with refuses(error, "PagedPool", *parts):
        make_pool(**change)


def test_a_model_is_compared_as_a_file_gives_it_back(tmp_path: Path, refuses: Any) -> None:
    """Tuples are lists there, and numbers as keys are strings."""
    here, there, other = (make_pool(model={"sections": (1, size), 3: "x"}) for size in (2, 2, 4))
    here.open("a")
    here.export_request("a").save(tmp_path / "a")
    exported = ExportedRequest.load(tmp_path / "a")
    assert there.import_request("a", exported) == 0
    with refuses(ArgumentError, "PagedPool.import_request", "model", "[1, 4]", "[1, 2]"):
        other.import_request("a", exported)


@pytest.mark.parametrize(
    ("change", "error", "parts"),
    [
        ({"layer_ids": None}, ArgumentError, ("exported.layer_ids", "NoneType")),
        ({"layer_ids": [[0], {}]}, ArgumentError, ("exported.layer_ids", "[[0], {}]")),
        ({"tensors": None}, ArgumentError, ("exported.tensors", "NoneType")),
        ({"tensors": {3: 4}}, ArgumentError, ("exported.tensors", "layer.0.k")),
        ({"length": 2**62}, ShapeError, ("layer.0.k", f"{2**62}")),
        ({"length": True}, ArgumentError, ("exported.length", "True")),
    ],
)
def test_exports_that_cannot_be(
    pool: PagedPool, refuses: Any, nothing_changes: Any, change: dict[str, Any], error: Any, parts: tuple[str, ...]
) -> None:
    exported = dataclasses.replace(pool.export_request("a"), **change)
    with nothing_changes(pool), refuses(error, "PagedPool.import_request", *parts):
        pool.import_request("c", exported)


def test_an_export_with_other_names_or_without_values(pool: PagedPool, refuses: Any, nothing_changes: Any) -> None:
    exported = pool.export_request("a")
    last = "layer.1.ring_positions"
    tensors = dict(exported.tensors)
    for change, error, parts in (
        ({7: tensors[last]}, ArgumentError, ("also ['7']",)),
        ({last: tensors[last].to("meta")}, DeviceError, (last, "meta")),
        ({last: tensors[last].float()}, TypeError, (last, "float32")),
    ):
        with nothing_changes(pool), refuses(error, "PagedPool.import_request", *parts):
            pool.import_request("c", dataclasses.replace(exported, tensors=tensors | change))


def test_no_gradient_reaches_the_pool(pool: PagedPool, tmp_path: Path) -> None:
    exported = pool.export_request("a")
    tensors = {n: x.requires_grad_() if x.is_floating_point() else x for n, x in exported.tensors.items()}
    asking = dataclasses.replace(exported, tensors=tensors)
    asking.save(tmp_path / "a")
    assert pool.import_request("c", asking) == 18
    pool.plan_step({"a": 1, "b": 1})
    assert not any(listed.tensor.requires_grad for listed in pool.tensors())
    assert not any(x.requires_grad for x in pool.export_request("c").tensors.values())


def test_layers_that_run_with_gradients_leave_no_graph(
    make_serving: Any, draw_tokens: Any, run_step: Any, request: pytest.FixtureRequest
) -> None:
    """They need not know of each other, and the next step lets go of what they have put into the caches."""
    serving = make_serving()
    pool = serving.pool
    projections = run_step.__wrapped__.__globals__["projections"]
    for layer_id in pool.layer_ids:
        keys = projections(layer_id, torch.float32, torch.device("cpu")).k
        keys.requires_grad_()
        request.addfinalizer(keys.detach_)
        request.addfinalizer(functools.partial(keys.requires_grad_, False))
    serving.open("a")
    for rows in (21, 1, 5):
        tokens = draw_tokens(rows, rows)
        plan = pool.plan_step({"a": rows})
        assert not any(listed.tensor.requires_grad for listed in pool.tensors())
        run_step.__wrapped__(pool.caches, plan, torch.tensor(tokens))
        assert pool.caches[1].k_pages.requires_grad, "the layers did run with gradients"
        serving.tokens["a"] += tokens
    pool.fork("a", "b")
    serving.tokens["b"] = list(serving.tokens["a"])
    assert not any(x.requires_grad for x in pool.export_request("b").tensors.values())
    with torch.no_grad():
        serving.step({"a": draw_tokens(3, 1), "b": draw_tokens(2, 2)})
        for name in "ab":
            serving.check_caches(name)


def test_a_pool_made_in_inference_mode_goes_on_outside_it(refuses: Any) -> None:
    with torch.inference_mode():
        pool = make_pool()
        pool.open("a")
        pool.plan_step({"a": 18})
    pool.fork("a", "b")
    pool.plan_step({"a": 1, "b": 1})
    pool.rollback("b", rows=1)
    assert (pool.length("a"), pool.length("b")) == (19, 18)
    pool._accounts.check()


def test_the_default_device_of_torch_changes_nothing(make_serving: Any, draw_tokens: Any) -> None:
    """Host tensors of a step are on the CPU, whatever tensors without a device are put on elsewhere."""
    serving = make_serving()
    pool = serving.pool
    serving.open("a")
    serving.step({"a": draw_tokens(21)})
    serving.fork("a", "b")
    tokens, plans = draw_tokens(3, 1), []
    for device in ("meta", "cpu"):
        with torch.device(device):
            exported = pool.export_request("a")
            plans.append(pool.plan_step({"a": 3, "b": 0}))
            assert {x.device.type for x in exported.tensors.values()} == {"cpu"}
            pool.import_request(device, exported)
            pool.close(device)
        if device == "meta":
            pool.rollback("a", rows=3)
    for name in ("query_starts", "seq_lens", "ring_ids", "slot_ids"):
        assert torch.equal(getattr(plans[0], name), getattr(plans[1], name)), name
    pool.rollback("a", rows=3)
    serving.step({"a": tokens, "b": draw_tokens(2, 2)})
    for name in "ab":
        serving.check_caches(name)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=lambda f: f.__name__)
def test_a_pool_is_neither_copied_nor_pickled(pool: PagedPool, refuses: Any, nothing_changes: Any, copied: Any) -> None:
    """Caches of a pickled pool would be views of nothing that the pool copies, forks and exports."""
    with nothing_changes(pool), refuses(UnsupportedError, "PagedPool", "copied or pickled", "2 requests", "Export"):
        copied(pool)


def test_what_is_no_plan_is_refused(pool: PagedPool, refuses: Any) -> None:
    for plan in (3, None, {"a": 1}):
        with refuses(ArgumentError, "PagedPool.check_plan", "plan must be a StepPlan", type(plan).__name__):
            pool.check_plan(plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [None, 3, b"x"], ids=str)
def test_what_is_no_path_is_refused(pool: PagedPool, refuses: Any, path: Any) -> None:
    with refuses(ArgumentError, "ExportedRequest.save", "path", repr(path)):
        pool.export_request("a").save(path)
    with refuses(ArgumentError, "ExportedRequest.load", "path", repr(path)):
        ExportedRequest.load(path)


def test_folders_are_no_files(pool: PagedPool, refuses: Any, tmp_path: Path) -> None:
    exported = pool.export_request("a")
    for path in (tmp_path, tmp_path / "none" / "a", ""):
        with refuses(ArgumentError, "ExportedRequest.save", "file in a folder that exists", str(path)):
            exported.save(path)
        with refuses(ArgumentError, "ExportedRequest.load", "whole exported request", str(path)):
            ExportedRequest.load(path)
    exported.save(tmp_path / "a")
    with refuses(DeviceError, "ExportedRequest.load", "device", "'nonsense'"):
        ExportedRequest.load(tmp_path / "a", device="nonsense")
    with refuses(ArgumentError, "ExportedRequest.save", "model must be a JSON value"):
        dataclasses.replace(exported, model=object()).save(tmp_path / "a")
    assert ExportedRequest.load(tmp_path / "a").length == 18
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "about",
    ["[" * 100_000, '{"length":' + "1" * 6000 + "}", "NaN", "3"],
    ids=["deep", "long number", "no number", "a number"],
)
def test_metadata_that_no_reader_takes(pool: PagedPool, refuses: Any, tmp_path: Path, about: str) -> None:
    path = tmp_path / "a"
    pool.export_request("a").save(path)
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"]["request"] = about
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with refuses(ArgumentError, "ExportedRequest.load", "describe its request", str(path)):
        ExportedRequest.load(path)


def test_threads_that_save_one_file_leave_a_whole_one(
    pool: PagedPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second is half done when the first one is finished and moves its file into place."""
    from safetensors import torch as files

    exported, save_file, written, finished = pool.export_request("a"), files.save_file, [], threading.Event()

    def slowly(tensors: Any, path: Path, metadata: Any) -> None:
        written.append(path)
        if threading.current_thread().name == "second":
            Path(path).write_bytes(b"half")
            finished.wait(20)
        save_file(tensors, path, metadata)

    monkeypatch.setattr("safetensors.torch.save_file", slowly)
    second = threading.Thread(target=exported.save, args=(tmp_path / "a",), name="second")
    second.start()
    while not written:
        pass
    exported.save(tmp_path / "a")
    assert ExportedRequest.load(tmp_path / "a").length == 18
    finished.set()
    second.join()
    assert len(set(written)) == 2
    assert ExportedRequest.load(tmp_path / "a").length == 18
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


KILLED = """
import os, signal, sys
import safetensors.torch
from flashqsa import CacheLayout, ExportedRequest, PagedPool
def half(tensors, path, metadata):
    data = open(sys.argv[1], "rb").read()
    with open(path, "wb") as file:
        file.write(data[: len(data) // 2])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
exported = ExportedRequest.load(sys.argv[1])
safetensors.torch.save_file = half
exported.save(sys.argv[2])
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs SIGKILL")
def test_a_process_killed_while_it_saves_leaves_no_half_file(pool: PagedPool, refuses: Any, tmp_path: Path) -> None:
    """What was there before is still whole, and the half that lies beside it is refused."""
    exported, old, folder = pool.export_request("a"), tmp_path / "old", tmp_path / "there"
    folder.mkdir()
    exported.save(old)
    exported.save(folder / "a")
    for name, whole in (("a", True), ("b", False)):
        killed = subprocess.run([sys.executable, "-c", KILLED, old, folder / name], check=False, timeout=120)
        assert killed.returncode == -signal.SIGKILL
        assert (folder / name).exists() == whole
    assert ExportedRequest.load(folder / "a").length == 18
    halves = [path for path in folder.iterdir() if path.name != "a"]
    assert len(halves) == 2
    for path in halves:
        with refuses(ArgumentError, "ExportedRequest.load", "whole exported request"):
            ExportedRequest.load(path)
