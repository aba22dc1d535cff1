"""What a pool costs, as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashqsa.cache.pool.memory import PoolTensor


def size_text(count: float) -> str:
    """Bytes as people read them."""
    for unit, step in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= step:
            return f"{count / step:,.1f} {unit}"
    return f"{count:,.0f} B"


def summary_text(
    tensors: Sequence[PoolTensor], *, layers: int, page_bytes: int, request_bytes: int, token_bytes: float
) -> str:
    """A table of one layer's tensors, and the totals of all layers.

    Args:
        tensors: Every tensor, layer by layer.
        layers: How many layers there are.
        page_bytes: Bytes of a page in all layers.
        request_bytes: Bytes that a request keeps besides its pages, in all layers.
        token_bytes: Bytes of a token in full pages, in all layers.
    """
    rows = [("tensor", "shape", "dtype", "tokens a row", "bytes a token", "shared with a prefix")]
    for listed in tensors[: len(tensors) // layers]:
        rows.append(
            (
                listed.name.rsplit(".", 1)[1],
                " x ".join(str(size) for size in listed.tensor.shape),
                str(listed.dtype).removeprefix("torch."),
                str(listed.row_tokens),
                f"{listed.token_bytes:,.1f}" if listed.shareable else "-",
                "by page" if listed.shareable else "no: private",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = sum(listed.tensor.numel() * listed.tensor.element_size() for listed in tensors)
    plural = "" if layers == 1 else "s"
    lines += [
        f"{layers} layer{plural}: {token_bytes:,.1f} bytes a token, {size_text(page_bytes)} a page, "
        f"{size_text(request_bytes)} a request besides",
        f"in all {size_text(total)}",
    ]
    return "\n".join(lines)
