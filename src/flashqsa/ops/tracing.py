"""Whether a call is traced. Apart from the operators, so that importing the stages does not import torch's compiler."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a call is being traced into a graph, or runs on tensors without values."""
    return torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)
