"""Static caches whose decode transformers compiles: the same tokens, and no graph is made anew in every step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flashqsa.integrations import hf

TOKENS, PAD = 60, 6


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("by_class", [False, True])
def test_static_generation_that_compiles_by_itself(
    make_model: Any, qsa_case: Any, make_tokens: Any, watch: Any, assert_same_sets: Any, by_class: bool
) -> None:
    """As on CUDA, where it does so unasked."""
    from torch._dynamo.utils import counters
    from transformers import CompileConfig

    model, prompt = make_model(qsa_case), make_tokens(2, TOKENS)
    mask = torch.ones_like(prompt)
    mask[1, :PAD] = 0
    compiled = CompileConfig(backend="eager", mode=None)
    compiled._compile_all_devices = True
    options = {"attention_mask": mask, "do_sample": False, "cache_implementation": "static"}
    with watch() as stock:
        expected = model.generate(prompt, max_new_tokens=24, **options)
    graphs = []
    with hf.enabled(None if by_class else model):
        for new in (10, 24):
            torch._dynamo.reset()
            counters.clear()
            with watch() as ours:
                said = model.generate(prompt, max_new_tokens=new, compile_config=compiled, **options)
            assert torch.equal(said, expected[:, : TOKENS + new])
            graphs.append(counters["stats"]["unique_graphs"])
    assert assert_same_sets(ours, stock, mask.bool()) <= 2
    assert graphs[0] > 0, "it must compile"
    assert graphs[0] == graphs[1], "a longer generation makes no more graphs"
