"""Hostile memory: allocations full of canaries, poisoned slots, and bitwise before-and-after comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

FLOAT_CANARY = 0xFF
"""Byte whose repetition is NaN in every float dtype, float8_e4m3fn among them."""
INTEGER_CANARY = 0x5B
"""Byte whose repetition is a large positive number in every integer dtype."""
FP8_NAN = 0x7F
EDGE_BYTES = 64


class Guarded:
    """One allocation full of canaries, and the views cut out of it. Memory outside the views must never change.

    Attributes:
        base: [bytes] uint8, the whole allocation.
        canary: The byte that fills it.
        views: What is in use; the first one is `view`.
    """

    def __init__(self, num_bytes: int, canary: int, device: torch.device | str = "cpu") -> None:
        self.base = torch.full((num_bytes + 2 * EDGE_BYTES,), canary, dtype=torch.uint8, device=device)
        self.canary = canary
        self.views: list[torch.Tensor] = []

    @property
    def inner(self) -> torch.Tensor:
        """[num_bytes] uint8, the allocation without its two edges, to cut views from."""
        return self.base[EDGE_BYTES:-EDGE_BYTES]

    @property
    def view(self) -> torch.Tensor:
        """The first view that was cut."""
        return self.views[0]

    def cut(self, view: torch.Tensor) -> torch.Tensor:
        """Declare a view of the allocation as memory in use; any dtype and strides."""
        assert view.untyped_storage().data_ptr() == self.base.untyped_storage().data_ptr(), "not a view of this buffer"
        self.views.append(view)
        return view

    def assert_intact(self) -> None:
        """Raise AssertionError when a byte outside all views is no longer a canary."""
        outside = torch.ones_like(self.base, dtype=torch.bool)
        for view in self.views:
            size = view.element_size()
            strides = [size * s for s in view.stride()]
            outside.as_strided([*view.shape, size], [*strides, 1], view.storage_offset() * size).fill_(False)
        touched = (outside & (self.base != self.canary)).nonzero().flatten()
        assert touched.numel() == 0, (
            f"{touched.numel()} canary bytes were overwritten, from byte {int(touched[0]) - EDGE_BYTES} on "
            f"(first view {list(self.view.shape)} {self.view.dtype})"
        )


def guarded(
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    padding: Sequence[int] | int = 1,
    device: torch.device | str = "cpu",
) -> Guarded:
    """A tensor inside a larger canary-filled one, strided in every dimension that is padded.

    Args:
        shape: Shape of the view.
        dtype: Dtype of the view.
        padding: Elements added on both sides of each dimension: one number for all but the last dimension (which then
            stays whole), or one number a dimension.
        device: Where to allocate.

    Returns:
        The allocation; `.view` is the tensor, uninitialised in the sense that it holds canaries too.
    """
    pads = [padding] * (len(shape) - 1) + [0] if isinstance(padding, int) else list(padding)
    outer = [s + 2 * p for s, p in zip(shape, pads, strict=True)]
    num_bytes = dtype.itemsize
    for extent in outer:
        num_bytes *= extent
    canary = FLOAT_CANARY if dtype.is_floating_point else INTEGER_CANARY
    buffer = Guarded(num_bytes, canary, device)
    whole = buffer.inner.view(dtype).view(outer)
    for dim, (size, pad) in enumerate(zip(shape, pads, strict=True)):
        whole = whole.narrow(dim, pad, size)
    buffer.cut(whole)
    return buffer


def guarded_like(tensor: torch.Tensor, *, padding: Sequence[int] | int = 1) -> Guarded:
    """A guarded copy of a tensor."""
    buffer = guarded(tensor.shape, tensor.dtype, padding=padding, device=tensor.device)
    buffer.view.copy_(tensor)
    return buffer


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with NaN (floats) or a huge number (integers), in place."""
    if tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(FP8_NAN)
    elif tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def poison_slots(pages: torch.Tensor, slot_ids: torch.Tensor) -> None:
    """Fill slots of a paged tensor with NaN, in place.

    Args:
        pages: [P, page_rows, ...] float tensor.
        slot_ids: [N] int64 flat slots, all valid.
    """
    raw = pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages
    value = FP8_NAN if pages.dtype == torch.float8_e4m3fn else float("nan")
    raw[slot_ids // pages.shape[1], slot_ids % pages.shape[1]] = value


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[elements, itemsize] uint8 copy of a tensor's values."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)  # of one element, strides are made 1 too
    return copy.reshape(-1, 1).view(torch.uint8)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Bytes of some tensors at one moment.

    Attributes:
        tensors: The live tensors by name.
        contents: Their bytes when the snapshot was taken, by the same names.
    """

    tensors: Mapping[str, torch.Tensor]
    contents: Mapping[str, torch.Tensor]


def snapshot(*holders: Any) -> Snapshot:
    """Remember the bytes of tensors, or of all tensors in dataclasses (caches, plans, steps), lists and dicts.

    Names are those of dataclass fields; ``[i]`` and ``.field`` for what is nested.
    """
    found: dict[str, torch.Tensor] = {}
    for number, holder in enumerate(holders):
        _collect("" if len(holders) == 1 else f"[{number}]", holder, found)
    return Snapshot(found, {name: as_bytes(tensor) for name, tensor in found.items()})


def _collect(name: str, value: Any, found: dict[str, torch.Tensor]) -> None:
    if isinstance(value, torch.Tensor):
        found[name or "tensor"] = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _collect(f"{name}.{field.name}".lstrip("."), getattr(value, field.name), found)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(f"{name}.{key}".lstrip("."), item, found)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            _collect(f"{name}[{number}]", item, found)


def assert_unchanged(before: Snapshot, *, written: Mapping[str, torch.Tensor] | None = None) -> None:
    """Raise AssertionError when a tensor of the snapshot has other bytes now.

    Args:
        before: What `snapshot` returned.
        written: For tensors [P, page_rows, ...] that may change: name -> [N] flat slots that may. Negative slots are
            skipped. Everything outside those slots must be as it was.
    """
    allowed = written or {}
    unknown = set(allowed) - set(before.tensors)
    assert not unknown, f"written names tensors that the snapshot lacks: {sorted(unknown)}"
    for name, tensor in before.tensors.items():
        now, then = as_bytes(tensor), before.contents[name]
        differs = (now != then).any(dim=1).view(tensor.shape)
        if name in allowed:
            slot_ids = allowed[name]
            slot_ids = slot_ids[slot_ids >= 0]
            differs[slot_ids // tensor.shape[1], slot_ids % tensor.shape[1]] = False
        if bool(differs.any()):
            first = [int(i) for i in differs.nonzero()[0]]
            raise AssertionError(f"{name}: {int(differs.sum())} elements changed, the first at {first}")
