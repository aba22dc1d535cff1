"""A short soak of the kernels: interpreted, or on a device with refilled plans replayed as one graph."""

from __future__ import annotations

import pytest
import torch

from flashqsa.testing import soak


@pytest.mark.slow
def test_soak_of_kernels(device: torch.device) -> None:
    report = soak(
        14, seed=4, stages="triton", max_tokens=60, num_pages=24, device=device, graphs=device.type == "cuda"
    )  # fmt: skip
    assert report.rows > 100
    assert {"ragged", "verify", "hit", "reuse", "hand_over"} <= set(report.actions)
