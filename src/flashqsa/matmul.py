"""Matrix products in true fp32, whatever the process allows elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def exact_fp32_matmul() -> Iterator[None]:
    """Keep TF32 and bf16 shortcuts out of fp32 products inside the block, and restore the caller's choice after it.

    torch has two ways to allow them, one for all backends and one for each, and refuses to mix them: the first is read
    only where it is in use, and what each backend had is put back as it was.
    """
    everywhere = _precision_everywhere()
    if everywhere == "highest":
        yield
        return
    torch_backends: Any = torch.backends  # torch's own types lack mkldnn.matmul
    backends = (torch_backends.cuda.matmul, torch_backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    if everywhere is not None:
        torch.set_float32_matmul_precision("highest")
    for backend in backends:
        backend.fp32_precision = "ieee"
    try:
        yield
    finally:
        if everywhere is not None:
            torch.set_float32_matmul_precision(everywhere)
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _precision_everywhere() -> str | None:
    """What `torch.set_float32_matmul_precision` last set, or None where the backends have settings of their own."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # torch's answer to settings by backend
        return None
