"""Memory and work of the enabled model: nothing of size rows x context, one plan a forward, one pooling a block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flashqsa.integrations import hf
from flashqsa.integrations.hf import masks, pooled

CONTEXT = 2000


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes, self.where = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() > self.num_bytes:
                self.num_bytes, self.where = tensor.untyped_storage().nbytes(), f"{func}: {list(tensor.shape)}"
        return out


@pytest.fixture
def model(make_model: Any, qsa_case: Any) -> Any:
    return make_model(qsa_case)


@torch.no_grad()
def test_fault_43_no_tensor_of_rows_times_context(model: Any, make_tokens: Any) -> None:
    """Counted in bytes, so that a mask of bool would show; stock's own mask shows that the measure sees one."""
    prompt, mask = make_tokens(1, CONTEXT), torch.ones(1, CONTEXT, dtype=torch.long)
    mask[0, :3] = 0
    with hf.enabled(model), _Largest() as ours:
        model(prompt, attention_mask=mask, logits_to_keep=1)
    assert ours.num_bytes < CONTEXT * CONTEXT, f"{ours.num_bytes} bytes in {ours.where}"
    with hf.enabled(model):
        cache = model(prompt, attention_mask=mask, logits_to_keep=1).cache
        with _Largest() as ours:
            model(prompt[:, :1], attention_mask=torch.cat([mask, mask[:, -1:]], dim=1), cache=cache)
    per_token = 2 * (2 * 32 + 1) * 4  # K and V of two heads, and index keys, as transformers' cache grows
    assert ours.num_bytes < 2 * CONTEXT * per_token, f"{ours.num_bytes} bytes in {ours.where}"
    short = prompt[:, :300]
    with _Largest() as stock:
        model(short, attention_mask=mask[:, :300], logits_to_keep=1)
    assert stock.num_bytes >= 300 * 300


@torch.no_grad()
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
def test_every_block_is_pooled_once(
    model: Any, make_tokens: Any, monkeypatch: pytest.MonkeyPatch, static: bool
) -> None:
    from transformers import DynamicCache, StaticCache

    counts: list[int] = []
    mean_of_blocks = pooled.mean_of_blocks

    def counting(raw_keys: torch.Tensor) -> torch.Tensor:
        counts.append(raw_keys.shape[0])
        return mean_of_blocks(raw_keys)

    monkeypatch.setattr(pooled, "mean_of_blocks", counting)
    r, layers, pads, length, total = 4, 2, [0, 5], 131, 170
    prompt = make_tokens(2, total)
    mask = (torch.arange(total)[None] >= torch.tensor(pads)[:, None]).long()
    cache = StaticCache(model.config, max_cache_len=total) if static else DynamicCache(config=model.config)
    with hf.enabled(model):
        model(prompt[:, :length], attention_mask=mask[:, :length], cache=cache)
        assert sum(counts) == layers * sum((length - pad) // r for pad in pads)
        for end in range(length + 1, total + 1):
            counts.clear()
            model(prompt[:, end - 1 : end], attention_mask=mask[:, :end], cache=cache)
            closed = sum((end - pad) % r == 0 for pad in pads)
            assert counts == [1] * (layers * closed), f"token {end - 1} closes {closed} blocks a layer"


@torch.no_grad()
def test_fault_50_one_plan_serves_all_layers(
    make_model: Any, make_tokens: Any, monkeypatch: pytest.MonkeyPatch, qsa_case: Any
) -> None:
    plans: list[Any] = []
    plan_step = masks.plan_step

    def counting(*args: Any, **kwargs: Any) -> Any:
        plans.append(plan_step(*args, **kwargs))
        return plans[-1]

    monkeypatch.setattr(masks, "plan_step", counting)
    model = hf.enable(make_model(qsa_case, num_hidden_layers=3, layer_types=["full_attention"] * 3))
    out = model(make_tokens(2, 70))
    assert len(plans) == 1
    model(make_tokens(2, 1), cache=out.cache)
    assert len(plans) == 2


def test_a_step_is_copied_once_to_each_device(model: Any) -> None:
    """Layers of a model that is spread over devices share one plan on each."""
    from transformers.masking_utils import causal_mask_function

    step = masks.step_mask(2, 40, 40, mask_function=causal_mask_function, config=model.config)
    assert step.to("cpu") is step
    away = step.to("meta")
    assert step.to(torch.device("meta")) is away
    assert away.to("meta") is away
    assert away.plan.positions.device == away.plan.first_slots.device == torch.device("meta")
    assert (away.starts, away.ends, away.kv_tokens) == (step.starts, step.ends, step.kv_tokens)
    assert away.plan.max_seq_len == step.plan.max_seq_len


@pytest.mark.parametrize("name", ["sdpa", "eager"])
@pytest.mark.parametrize("by_class", [False, True])
def test_dense_masks_raise_in_every_test_of_an_enabled_model(model: Any, name: str, by_class: bool) -> None:
    """The guard of this folder: whoever asks for one by name, or in the module, while FlashQSA is enabled."""
    from transformers import AttentionMaskInterface, masking_utils

    for mask in (AttentionMaskInterface._global_mapping[name], getattr(masking_utils, f"{name}_mask")):

        def build(mask: Any = mask) -> Any:
            options = {} if by_class else {"config": model.config}
            return mask(1, 4, 4, q_offset=0, allow_is_causal_skip=False, device="cpu", **options)

        with hf.enabled(None if by_class else model), pytest.raises(AssertionError, match=f"{name}_mask was called"):
            build()
        assert build().shape == (1, 1, 4, 4)
