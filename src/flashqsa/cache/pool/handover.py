"""One request as contiguous tensors, without pages and rings: copied out, checked, written to another pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flashqsa.cache.pool.accounts import Account, PoolAccounts
from flashqsa.cache.pool.exported import NUMBERS, ExportedRequest
from flashqsa.cache.pool.memory import PoolMemory, raw
from flashqsa.checks import expect, expect_int, expect_type
from flashqsa.errors import ArgumentError, DeviceError

SCALES = ("k_scale", "v_scale")


@torch.no_grad()
def export(account: Account, memory: PoolMemory, accounts: PoolAccounts, *, model: Any) -> ExportedRequest:
    """Copy a request out of its pages and its ring."""
    length, r = account.length, accounts.block_tokens
    device = memory.k.device
    pages = torch.tensor(account.page_ids[: accounts.pages_of(length)], dtype=torch.int64, device=device)
    places = torch.arange(account.ring_start, length, device=device) % accounts.ring_tokens
    tensors: dict[str, torch.Tensor] = {}
    for cache in memory.caches:
        assert cache.block_keys is not None
        assert cache.ring is not None
        assert cache.ring_positions is not None
        parts = {
            "k": _rows(cache.k_pages, pages, length),
            "v": _rows(cache.v_pages, pages, length),
            "block_keys": _rows(cache.block_keys, pages, length // r),
            "raw_index_keys": cache.ring[account.ring_id, places],
            "ring_positions": cache.ring_positions[account.ring_id, places],
        }
        for name in SCALES:
            scale = getattr(cache, name)
            if scale is not None:
                parts[name] = torch.as_tensor(scale, dtype=torch.float32).reshape(1).clone()
        tensors |= {f"layer.{cache.layer_id}.{name}": part for name, part in parts.items()}
    layer_ids = tuple(cache.layer_id for cache in memory.caches if cache.layer_id is not None)
    return ExportedRequest(length, account.ring_start, r, layer_ids, model, tensors)


def _rows(pages: torch.Tensor, page_ids: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows of some pages, contiguous."""
    return raw(pages)[page_ids].flatten(0, 1)[:rows].contiguous().view(pages.dtype)


def check(where: str, exported: ExportedRequest, memory: PoolMemory, *, layer_ids: Sequence[int], model: Any) -> None:
    """Raise unless an exported request fits a pool. Reads scales and ring positions on the host.

    Raises:
        ArgumentError, ShapeError, DTypeError: As `PagedPool.import_request`.
    """
    expect_type(where, "exported", exported, ExportedRequest, hint="ExportedRequest.load reads one.")
    hint = "The export is damaged; export the request again."
    for name in NUMBERS:
        expect_int(where, f"exported.{name}", getattr(exported, name), hint=hint)
    expect_type(where, "exported.layer_ids", exported.layer_ids, Sequence, hint=hint)
    expect_type(where, "exported.tensors", exported.tensors, Mapping, hint=hint)
    layout, length, ring_start = memory.layout, exported.length, exported.ring_start
    for name, here, there in (
        ("block_tokens", layout.block_tokens, exported.block_tokens),
        ("layer_ids", list(layer_ids), list(exported.layer_ids)),
        ("model", model, exported.model),
    ):
        if here != there and (name != "model" or None not in (here, there)):
            raise ArgumentError(
                f"{where}: exported.{name} must be {here} as in this pool, got {there}. "
                "Import into a pool for the same checkpoint."
            )
    began = length - length % layout.block_tokens
    if ring_start > length or (began < length and ring_start > began):
        raise ArgumentError(
            f"{where}: exported.ring_start must be at most {began}, where the block that is open at length {length} "
            f"begins, got {ring_start}. {hint}"
        )
    dims = {"N": length, "M": length // layout.block_tokens, "kept": length - ring_start, "Hkv": layout.kv_heads,
            "D": layout.head_dim, "Di": layout.index_head_dim}  # fmt: skip
    specs = {
        "k": ("N Hkv D", layout.kv_dtype),
        "v": ("N Hkv D", layout.kv_dtype),
        "block_keys": ("M Di", layout.index_dtype),
        "raw_index_keys": ("kept Di", layout.ring_dtype),
        "ring_positions": ("kept 3", torch.int64),
    }
    known = set()
    for cache in memory.caches:
        for name, (spec, dtype) in specs.items():
            tensor = _expect_tensor(where, exported, f"layer.{cache.layer_id}.{name}", hint)
            expect(where, f"layer.{cache.layer_id}.{name}", tensor, spec, dims, dtypes=(dtype,),
                   hint="Import into a pool of the same shapes and dtypes; lengths must agree.")  # fmt: skip
        positions = exported.tensors[f"layer.{cache.layer_id}.ring_positions"]
        if positions.numel() and int(positions.min()) < 0:
            raise ArgumentError(
                f"{where}: layer.{cache.layer_id}.ring_positions must not be negative, got {int(positions.min())}. "
                "Export a request whose steps have run."
            )
        known |= {f"layer.{cache.layer_id}.{name}" for name in (*specs, *_check_scales(where, exported, cache, hint))}
    unknown = sorted(map(str, set(exported.tensors) - known))
    if unknown:
        raise ArgumentError(f"{where}: exported.tensors must be those of this pool, got also {unknown}. {hint}")


def _expect_tensor(where: str, exported: ExportedRequest, name: str, hint: str) -> torch.Tensor:
    if name not in exported.tensors:
        raise ArgumentError(f"{where}: exported.tensors must hold {name}, got an export without. {hint}")
    tensor = exported.tensors[name]
    if isinstance(tensor, torch.Tensor) and tensor.is_meta:
        raise DeviceError(f"{where}: {name} must have values, got a tensor on meta. Load the export on a device.")
    return tensor


def _check_scales(where: str, exported: ExportedRequest, cache: Any, hint: str) -> list[str]:
    """Scales must be those of the pool: stored bytes mean nothing without them. Returns the names of those it has."""
    present = []
    for name in SCALES:
        full, here = f"layer.{cache.layer_id}.{name}", getattr(cache, name)
        there = exported.tensors.get(full)
        if there is not None:
            expect(where, full, there, "1", {}, dtypes=(torch.float32,), hint=hint)
            present.append(name)
        number = None if here is None else float(torch.as_tensor(here, dtype=torch.float32))
        if number != (None if there is None else float(there)):
            raise ArgumentError(
                f"{where}: {full} must be {number} as in this pool, got {None if there is None else float(there)}. "
                "Make the pool with the scales of the exporting one."
            )
    return present


@torch.no_grad()
def write(
    exported: ExportedRequest, memory: PoolMemory, page_ids: Sequence[int], ring_id: int, ring_start: int
) -> None:
    """Write a checked export to free pages and a free ring.

    Args:
        exported: What to write.
        memory: Where.
        page_ids: Pages for its tokens, in order.
        ring_id: Its ring.
        ring_start: First token whose raw key the ring takes: its last ones, when it was exported from a larger ring.
    """
    device = memory.k.device
    pages = torch.tensor(page_ids, dtype=torch.int64, device=device)
    places = torch.arange(ring_start, int(exported.length), device=device) % memory.layout.ring_tokens
    skipped = ring_start - int(exported.ring_start)
    for cache in memory.caches:
        assert cache.block_keys is not None
        assert cache.ring is not None
        assert cache.ring_positions is not None
        part = {name: exported.tensors[f"layer.{cache.layer_id}.{name}"].to(device) for name in
                ("k", "v", "block_keys", "raw_index_keys", "ring_positions")}  # fmt: skip
        _write_rows(cache.k_pages, pages, part["k"])
        _write_rows(cache.v_pages, pages, part["v"])
        _write_rows(cache.block_keys, pages, part["block_keys"])
        cache.ring[ring_id, places] = part["raw_index_keys"][skipped:]
        cache.ring_positions[ring_id, places] = part["ring_positions"][skipped:]


def _write_rows(target: torch.Tensor, page_ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows to pages, one after the other; what the last page has left stays."""
    page_rows, count = target.shape[1], rows.shape[0]
    whole = count // page_rows
    target, rows = raw(target), raw(rows).contiguous()
    if whole:
        target[page_ids[:whole]] = rows[: whole * page_rows].view(whole, page_rows, *rows.shape[1:])
    if count % page_rows:
        target[page_ids[whole], : count % page_rows] = rows[whole * page_rows :]
