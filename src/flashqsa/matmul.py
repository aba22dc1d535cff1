"""Matrix products in true fp32, whatever the process allows elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def exact_fp32_matmul() -> Iterator[None]:
    """Keep TF32 and bf16 shortcuts out of fp32 products inside the block, and restore the caller's choice after it."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
