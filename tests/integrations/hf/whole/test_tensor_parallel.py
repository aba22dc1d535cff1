"""Two processes that share one model, as transformers' own plan shards it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa.testing import assert_within_budget

RANKS = 2


@pytest.mark.slow
def test_two_gloo_processes(make_model: Any, plain_shape: Any, make_tokens: Any, exactly: Any, tmp_path: Path) -> None:
    model, prompt = make_model(plain_shape), make_tokens(2, 120)
    model.save_pretrained(tmp_path / "model")
    torch.save(prompt, tmp_path / "prompt.pt")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    script = Path(__file__).parent / "two_ranks.py"
    arguments = [str(tmp_path / "model"), str(tmp_path / "prompt.pt"), str(tmp_path)]
    ran = subprocess.run(
        [*launch, str(script), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(RANKS)]
    for rank in ranks:
        assert any("index_qk_proj" in name for name in rank["sharded"]), "the indexer's projection is sharded"
        assert rank["rows"] == [2 * (120 + 11)] * 2
    expected = model.generate(prompt, max_new_tokens=12, do_sample=False)
    with torch.no_grad(), exactly(model) as exact_model:
        exact = exact_model(expected[:, :-1]).logits[:, -12:]
    for rank in ranks:
        assert torch.equal(rank["ours"]["text"], expected)
        assert torch.equal(rank["stock"]["text"], expected)
        assert_within_budget(rank["ours"]["logits"], rank["stock"]["logits"], exact)
    assert torch.equal(ranks[0]["ours"]["logits"], ranks[1]["ours"]["logits"])
