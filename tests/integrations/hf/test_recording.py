"""What a model selected, recorded, written, read and selected again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import flashqsa
from flashqsa.errors import ArgumentError, DTypeError, SelectionError, ShapeError, UnsupportedError
from flashqsa.integrations import hf
from flashqsa.recording import LayerRecord, Recording, StepRecord

TOKENS, R, TOPK = 90, 4, 9


@pytest.fixture
def model(make_model: Any, qsa_case: Any) -> Any:
    return make_model(qsa_case)


@pytest.fixture
def prompt(make_tokens: Any) -> torch.Tensor:
    return make_tokens(2, TOKENS)


@pytest.fixture
def mask(prompt: torch.Tensor) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    mask[1, :6] = 0
    return mask


@torch.no_grad()
def _run(model: Any, prompt: torch.Tensor, mask: torch.Tensor, steps: int = 5) -> torch.Tensor:
    out = model(prompt, attention_mask=mask, use_cache=True)
    logits = [out.logits]
    for step in range(steps):
        token = prompt[:, step : step + 1]
        mask = torch.cat([mask, torch.ones_like(token)], dim=1)
        out = model(token, attention_mask=mask, cache=out.cache)
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


def _assert_equal(one: Recording, other: Recording) -> None:
    assert (one.block_tokens, one.layer_ids, len(one.steps)) == (other.block_tokens, other.layer_ids, len(other.steps))
    for mine, theirs in zip(one.steps, other.steps, strict=True):
        assert torch.equal(mine.request_ids, theirs.request_ids)
        assert torch.equal(mine.positions, theirs.positions)
        assert mine.layers.keys() == theirs.layers.keys()
        for layer, record in mine.layers.items():
            for name, tensor in vars(record).items():
                again = getattr(theirs.layers[layer], name)
                assert (tensor is None) == (again is None)
                assert tensor is None or torch.equal(tensor, again), name


@pytest.mark.parametrize("scores", [False, True])
def test_a_recording_replays_bit_for_bit_also_from_its_file(
    model: Any, make_model: Any, qsa_case: Any, prompt: torch.Tensor, mask: torch.Tensor, tmp_path: Path, scores: bool
) -> None:
    with hf.enabled(model):
        expected = _run(model, prompt, mask)
    with flashqsa.record(model, scores=scores) as recording:
        assert torch.equal(_run(model, prompt, mask), expected), "recording changes nothing"
    assert model.config._attn_implementation != "flashqsa", "what was not enabled before is not enabled afterwards"
    recording.save(tmp_path / "selections.safetensors")
    read = Recording.load(tmp_path / "selections.safetensors")
    _assert_equal(read, recording)
    blind = make_model(qsa_case)
    for attention in hf.patch.qsa_attentions(blind):  # cannot select anything like it by itself
        attention.indexer.index_qk_proj.weight.data.zero_()
    with hf.enabled(blind):
        assert not torch.equal(_run(blind, prompt, mask), expected)
    for kept in (recording, read):
        for _ in range(2):  # every replay starts from the first step
            with kept.replay(blind) as same:
                assert same is blind
                assert torch.equal(_run(blind, prompt, mask), expected)


def test_what_a_recording_holds(model: Any, prompt: torch.Tensor, mask: torch.Tensor) -> None:
    with flashqsa.record(model, scores=True) as recording:
        _run(model, prompt, mask, steps=2)
    assert recording.block_tokens == R
    assert recording.layer_ids == (0, 1)
    assert [step.positions.shape[0] for step in recording.steps] == [2 * TOKENS, 2, 2]
    assert recording.steps[0].positions.tolist() == [*range(TOKENS), *([-1] * 6), *range(TOKENS - 6)]
    assert recording.steps[2].positions.tolist() == [TOKENS + 1, TOKENS - 5]
    for step in recording.steps:
        assert sorted(step.layers) == [0, 1]
        for layer in step.layers.values():
            assert torch.equal(layer.visible_blocks, (step.positions + 1).to(torch.int32) // R)
            assert torch.equal(layer.block_counts, layer.visible_blocks.clamp(max=TOPK))
            assert torch.equal((layer.block_ids >= 0).sum(dim=1), layer.block_counts)
            assert layer.scores is not None
            assert torch.equal(layer.scores > -torch.inf, layer.block_ids >= 0)
            assert bool((layer.scores[layer.block_ids >= 0] >= 0).all())


def test_generate_with_beams_replays(model: Any, prompt: torch.Tensor, mask: torch.Tensor) -> None:
    options = {"attention_mask": mask, "max_new_tokens": 8, "num_beams": 3, "do_sample": False}
    with flashqsa.record(model) as recording:
        expected = model.generate(prompt, **options)
    with recording.replay(model):
        assert torch.equal(model.generate(prompt, **options), expected)


@pytest.mark.parametrize("by_class", [False, True])
def test_an_enabled_model_is_recorded_as_it_runs(
    model: Any, prompt: torch.Tensor, mask: torch.Tensor, by_class: bool
) -> None:
    """Its budget and its selector stay; two recordings at once are two recordings."""

    def first(context: Any) -> torch.Tensor:
        ids = torch.arange(3)[None]
        return torch.where(ids < context.plan.visible_blocks[:, None], ids, -1)

    with hf.enabled(None if by_class else model, budget_tokens=8), flashqsa.record(model) as outer:
        _run(model, prompt, mask, steps=1)
        with flashqsa.record(model) as inner:
            _run(model, prompt, mask, steps=0)
        _run(model, prompt, mask, steps=0)
    assert (len(outer.steps), len(inner.steps)) == (4, 1)
    assert outer.steps[0].layers[1].block_ids.shape == (2 * TOKENS, 2)
    assert torch.equal(outer.steps[2].layers[1].block_ids, inner.steps[0].layers[1].block_ids)
    with hf.enabled(None if by_class else model, selector=first), flashqsa.record(model) as chosen:
        expected = _run(model, prompt, mask)
    assert int(chosen.steps[0].layers[0].block_ids.max()) == 2
    with chosen.replay(model):
        assert torch.equal(_run(model, prompt, mask), expected)


def test_training_with_checkpoints_is_recorded_once(model: Any, prompt: torch.Tensor) -> None:
    def gradients() -> list[torch.Tensor]:
        model.zero_grad(set_to_none=True)
        model(prompt, labels=prompt, use_cache=False).loss.backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    model.train()
    model.activation_checkpointing_enable()
    with flashqsa.record(model) as recording:
        expected = gradients()
    assert len(recording.steps) == 1
    with recording.replay(model):
        for one, other in zip(gradients(), expected, strict=True):
            assert torch.equal(one, other)


def test_what_does_not_fit_is_refused(
    model: Any, make_model: Any, qsa_case: Any, prompt: torch.Tensor, mask: torch.Tensor, refuses: Any
) -> None:
    with flashqsa.record(model) as recording:
        _run(model, prompt, mask, steps=1)
    with recording.replay(model), refuses(SelectionError, "Recording", "178", "180"):
        _run(model, prompt[:, 1:], mask[:, 1:])
    with recording.replay(model), refuses(SelectionError, "Recording", "row 90"):
        _run(model, prompt, torch.ones_like(mask))
    with recording.replay(model), refuses(ArgumentError, "Recording", "step", "2"):
        _run(model, prompt, mask, steps=2)
    for changed in ({"indexer_compress_ratio": 2}, {"num_hidden_layers": 1, "layer_types": ["full_attention"]}):
        other = make_model(qsa_case, **changed)
        with refuses(ArgumentError, "Recording.replay", "blocks of 4 tokens"), recording.replay(other):
            pass
    del recording.steps[0].layers[1]
    with recording.replay(model), refuses(SelectionError, "Recording", "layer_id", "1"):
        _run(model, prompt, mask)
    recording.steps[0].layers[0].block_ids[50, 0] = 70
    with recording.replay(model), refuses(SelectionError, "selector", "row 50"):
        _run(model, prompt, mask)
    no_qsa = make_model(qsa_case, layer_types=["linear_attention"] * 2)
    with refuses(ArgumentError, "enable", "without one"), flashqsa.record(no_qsa):
        pass


def test_scores_that_a_selector_does_not_give(
    model: Any, prompt: torch.Tensor, mask: torch.Tensor, refuses: Any
) -> None:
    with hf.enabled(model, selector=lambda context: context.selection.block_ids):
        with flashqsa.record(model, scores=True), refuses(ArgumentError, "record", "scores", "layer 0"):
            _run(model, prompt, mask)
        _run(model, prompt, mask)  # nobody listens any longer


def test_recording_leaves_no_trace(model: Any, prompt: torch.Tensor, mask: torch.Tensor) -> None:
    before = [list(vars(module)) for module in model.modules()]

    def fail_inside() -> None:
        with flashqsa.record(model):
            _run(model, prompt, mask)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert [list(vars(module)) for module in model.modules()] == before


def _small() -> Recording:
    ids = torch.tensor([[0, -1], [0, 1]], dtype=torch.int32)
    counts = torch.tensor([1, 2], dtype=torch.int32)
    layer = LayerRecord(ids, counts, counts, ids.float().t().contiguous().t())  # shared and strided memory as well
    return Recording(4, (3,), [StepRecord(counts - counts, torch.tensor([6, 9]), {3: layer})])


def test_files_that_are_no_recording(tmp_path: Path, refuses: Any) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "selections.safetensors"
    _small().save(path)
    _assert_equal(Recording.load(path), _small())
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert (metadata["format"], metadata["version"]) == ("flashqsa.recording", "1")

    def changed(**more: Any) -> dict[str, torch.Tensor]:
        names = {f"step.0.layer.3.{name}": tensor for name, tensor in more.items()}
        return {name: tensor for name, tensor in (tensors | names).items() if tensor is not None}

    def ids(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    for error, values, about, part in (
        (ArgumentError, tensors, {}, "format None"),
        (UnsupportedError, tensors, metadata | {"version": "2"}, "'2'"),
        (ArgumentError, changed(block_counts=None), metadata, "step.0.layer.3.block_counts"),
        (ShapeError, changed(visible_blocks=torch.ones(3, dtype=torch.int32)), metadata, "[3]"),
        (DTypeError, changed(block_ids=torch.ones(2, 2)), metadata, "float32"),
        (ShapeError, changed(scores=torch.ones(2, 3)), metadata, "[2, 3]"),
        (ArgumentError, changed(block_ids=ids([[0, -1], [1, 0]])), metadata, "block_ids [1, 0]"),
        (ArgumentError, changed(block_ids=ids([[0, -1], [1, 1]])), metadata, "row 1"),
        (ArgumentError, changed(block_ids=ids([[0, 0], [0, 1]])), metadata, "row 0"),
        (ArgumentError, changed(block_ids=ids([[0, -1], [0, 2]])), metadata, "block_ids [0, 2] in row 1"),
        (ArgumentError, changed(block_counts=ids([1, 3])), metadata, "block_counts"),
        (ArgumentError, changed(visible_blocks=ids([2, 2])), metadata, "visible_blocks"),
        (ArgumentError, tensors, metadata | {"recording": "{"}, "source must be"),
        (ArgumentError, tensors, metadata | {"recording": "[]"}, "source must be"),
        (ArgumentError, tensors, metadata | {"recording": '{"steps": 1, "layer_ids": [3]}'}, "block_tokens"),
        (ArgumentError, tensors, metadata | {"recording": metadata["recording"].replace("[3]", '"3"')}, "layer_ids"),
        (
            ArgumentError,
            tensors,
            metadata | {"recording": metadata["recording"].replace('steps": 1', 'steps": 2')},
            "step.1.positions",
        ),
    ):
        save_file(values, path, metadata=about or None)
        with refuses(error, "Recording.load", part):
            Recording.load(path)
    path.write_bytes(b"nothing of the kind")
    with refuses(ArgumentError, "Recording.load", "no safetensors file"):
        Recording.load(path)
    with pytest.raises(FileNotFoundError):
        Recording.load(tmp_path / "nowhere.safetensors")


def test_without_safetensors_the_extra_is_named(tmp_path: Path, refuses: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with refuses(UnsupportedError, "Recording.save", "flashqsa[transformers]"):
        _small().save(tmp_path / "selections.safetensors")


def test_importing_the_package_loads_no_safetensors() -> None:
    code = "import sys, flashqsa; assert flashqsa.record; print('safetensors' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert run.stdout.strip() == "False"
