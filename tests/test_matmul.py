from __future__ import annotations

import subprocess
import sys

import torch

from flashqsa.matmul import exact_fp32_matmul

PROBE = """
import torch
from flashqsa.matmul import exact_fp32_matmul

SETTINGS = (
    "pass",
    "torch.set_float32_matmul_precision('high')",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cuda.matmul.allow_tf32 = True",
    "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
    "torch.backends.mkldnn.fp32_precision = 'bf16'",
    "torch.backends.fp32_precision = 'tf32'",
)

def reset():
    torch.set_float32_matmul_precision("highest")
    for place in (torch.backends, torch.backends.mkldnn, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul):
        place.fp32_precision = "none"

def state():
    try:
        everywhere = torch.get_float32_matmul_precision()
    except RuntimeError:
        everywhere = "by backend"
    return [everywhere, torch.backends.fp32_precision, torch.backends.mkldnn.fp32_precision,
            torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]

seen = set()
for setting in SETTINGS:
    reset()
    exec(setting)
    before = state()
    seen.add(tuple(before))
    try:
        with exact_fp32_matmul():
            inside = state()
            assert inside[0] == "highest" and not torch.backends.cuda.matmul.allow_tf32, (setting, inside)
            exact = {"ieee"} if before[0] != "highest" else {"ieee", "none"}
            assert set(inside[3:]) <= exact, (setting, inside)
            raise KeyError
    except KeyError:
        pass
    assert state() == before, (setting, before, state())
assert len(seen) == len(SETTINGS), seen
"""


def test_exact_fp32_matmul_holds_inside_and_restores_every_setting() -> None:
    """In a process of its own, since these settings are torch's own and for good."""
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_exact_fp32_matmul_can_be_nested() -> None:
    with exact_fp32_matmul(), exact_fp32_matmul():
        assert torch.get_float32_matmul_precision() == "highest"
