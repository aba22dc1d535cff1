"""YaRN: a model used past the length that it was trained for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

TRAINED = 64


@pytest.fixture
def model(make_model: Any, plain_shape: Any) -> Any:
    rope = copy.deepcopy(plain_shape.config().rope_parameters)
    rope |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}
    return make_model(plain_shape, rope_parameters=rope, max_position_embeddings=4 * TRAINED)


@pytest.mark.parametrize("tokens", [TRAINED - 1, 3 * TRAINED, 4 * TRAINED - 24])
def test_past_the_original_length(
    model: Any, make_model: Any, plain_shape: Any, make_tokens: Any, assert_as_stock: Any, tokens: int
) -> None:
    prompt, mask = make_tokens(2, tokens), torch.ones(2, tokens, dtype=torch.int64)
    mask[1, :5] = 0
    said = assert_as_stock(model, {"input_ids": prompt, "attention_mask": mask}, new_tokens=24)
    assert said.shape[1] == tokens + 24
    unscaled = make_model(plain_shape)
    with torch.no_grad():
        assert not torch.allclose(model(prompt).logits, unscaled(prompt).logits, atol=0.1), "the scaling must matter"
    assert model.model.rotary_emb.attention_scaling > 1.1
