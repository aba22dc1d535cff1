"""Selections that come from elsewhere: recorded ones, and those of an oracle that sees the attention itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

import flashqsa
from flashqsa.testing import assert_within_budget


@pytest.fixture
def inputs(make_tokens: Any, plain_shape: Any) -> dict[str, torch.Tensor]:
    prompt = make_tokens(2, plain_shape.prompt)
    mask = torch.ones_like(prompt)
    mask[1, :7] = 0
    return {"input_ids": prompt, "attention_mask": mask}


@pytest.mark.parametrize("beams", [1, 3])
def test_recorded_ids_replayed_give_the_same_bits(model: Any, inputs: Any, on: Any, tmp_path: Path, beams: int) -> None:
    """Also when the indexer that chose them is lost in the meantime: the ids alone decide."""
    options = {**inputs, "max_new_tokens": 16, "do_sample": False, "num_beams": beams}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    with on(model), flashqsa.record(model) as recording:
        said = model.generate(**options)
    recording.save(tmp_path / "ids.safetensors")
    recording = type(recording).load(tmp_path / "ids.safetensors")
    with on(model), recording.replay(model):
        again = model.generate(**options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("index_qk_proj.weight"):
                parameter.copy_(parameter.flip(1))
    with on(model):
        without = model.generate(**options)
        with recording.replay(model):
            blind = model.generate(**options)
    for replayed in (again, blind):
        assert torch.equal(replayed.sequences, said.sequences)
        assert all(map(torch.equal, replayed.logits, said.logits))
    assert not torch.equal(without.logits[0], said.logits[0]), "the indexer must matter"


class MostMass:
    """Selects the blocks with the most attention mass, summed over heads: dense attention decides what to keep."""

    def __init__(self, topk_blocks: int) -> None:
        self.topk_blocks = topk_blocks
        self.masks: list[torch.Tensor] = []
        self.kept: list[float] = []
        self.kept_by_model: list[float] = []

    def __call__(self, context: Any) -> torch.Tensor:
        plan = context.plan
        ids = torch.full((plan.num_rows, self.topk_blocks), -1, dtype=torch.int32)
        mask = torch.zeros(plan.num_rows, context.cache.k_pages.shape[1], dtype=torch.bool)
        for group in plan.row_groups():
            keys = context.keys(group.request_id).repeat_interleave(context.q.shape[1] // context.cache.kv_heads, dim=1)
            start = int(plan.first_slots[group.request_id]) % mask.shape[1]
            for row in range(group.first_row, group.end_row):
                tokens, blocks = int(plan.positions[row]) + 1, int(plan.visible_blocks[row])
                whole = blocks * plan.block_tokens
                logits = torch.einsum("hd,thd->ht", context.q[row], keys[:tokens]) * context.softmax_scale
                mass = logits.softmax(dim=1).sum(dim=0)[:whole].view(blocks, plan.block_tokens).sum(dim=1)
                best = mass.topk(min(self.topk_blocks, blocks)).indices.sort().values
                ids[row, : best.numel()] = best.to(torch.int32)
                attended = torch.cat([whole_tokens(best, plan.block_tokens), torch.arange(whole, tokens)])
                mask[row, start + attended] = True
                models = context.selection.block_ids[row, : int(context.selection.block_counts[row])].long()
                self.kept.append(float(mass[best].sum()))
                self.kept_by_model.append(float(mass[models].sum()))
        self.masks.append(mask)
        return ids


def whole_tokens(block_ids: torch.Tensor, block_tokens: int) -> torch.Tensor:
    return (block_ids[:, None] * block_tokens + torch.arange(block_tokens)).flatten()


@torch.no_grad()
def test_an_oracle_selector_of_attention_mass(
    model: Any, inputs: Any, plain_shape: Any, on: Any, exactly: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sets reach the attention: transformers with these sets as its mask says the same."""
    selector = MostMass(plain_shape.budget // plain_shape.ratio)
    with on(model, selector=selector):
        logits = model(**inputs, use_cache=False).logits
    with on(model):
        usual = model(**inputs, use_cache=False).logits
    assert not torch.allclose(usual, logits, atol=0.1), "the selector must matter"
    assert sum(selector.kept) > 1.05 * sum(selector.kept_by_model), "the oracle keeps more of the mass"
    assert all(kept >= models - 1e-4 for kept, models in zip(selector.kept, selector.kept_by_model, strict=True))
    masks = dict(zip((0, 2), selector.masks, strict=True))
    batch, tokens = inputs["input_ids"].shape

    def of_the_oracle(self: Any, *_: Any) -> torch.Tensor:
        return masks[self.layer_idx].view(batch, 1, tokens, -1)

    monkeypatch.setattr(modeling.Qwen4ExpTextQSAIndexer, "forward", of_the_oracle)
    expected = model(**inputs, use_cache=False).logits
    with exactly(model) as exact_model:
        exact = exact_model(**inputs, use_cache=False).logits
    real = inputs["attention_mask"].bool()
    assert_within_budget(logits[real], expected[real], exact[real])
