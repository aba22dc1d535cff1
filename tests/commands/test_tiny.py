"""`flashqsa tiny`: what it writes loads, repeats, obeys its options, and never half exists."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa.commands import tiny_checkpoint
from flashqsa.commands.app import main
from flashqsa.commands.tiny_checkpoint import TinyOptions, write_tiny_checkpoint
from flashqsa.commands.tiny_weights import draw_weight
from flashqsa.config import QSAConfig

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

pytestmark = pytest.mark.transformers

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with everything on, as the command line writes it."""
    path = tmp_path_factory.mktemp("tiny") / "made" / "on the way"
    assert main(["tiny", str(path), "--ngram", "--mtp"]) == 0
    return path


def _load(path: Path) -> tuple[torch.nn.Module, dict[str, set[str]]]:
    model, info = transformers.AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    return model.eval(), info


def _prompt(tokens: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(seed))


def test_tiny_writes_the_files_of_a_checkpoint_and_nothing_else(checkpoint: Path) -> None:
    assert {file.name for file in checkpoint.iterdir()} == FILES
    assert [entry.name for entry in checkpoint.parent.iterdir()] == [checkpoint.name]


def test_tiny_same_seed_same_bytes(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_tiny_checkpoint(tmp_path / name, TinyOptions(seed=seed))
        torch.rand(3)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c
    torch.random.set_rng_state(state)
    expected = torch.rand(4)
    torch.random.set_rng_state(state)
    write_tiny_checkpoint(tmp_path / "d")
    assert torch.equal(torch.rand(4), expected), "the caller's random state was changed"


def test_tiny_options_leave_the_weights_they_do_not_concern_alone(checkpoint: Path, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "plain")
    plain = safetensors_torch.load_file(tmp_path / "plain" / "model.safetensors")
    full = safetensors_torch.load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(value, full[name]) for name, value in plain.items())
    extra = set(full) - set(plain)
    assert all(name.startswith(("mtp.", "model.layers.1.ple.")) for name in extra)
    assert any(name.startswith("mtp.layers.0.self_attn.indexer.") for name in extra)
    assert {"mtp.fc_embedding.weight", "mtp.fc_hidden.weight", "mtp.hyper_connection_mixer.hc_norm.weight"} <= extra


def test_tiny_loads_in_transformers_and_runs(checkpoint: Path) -> None:
    model, info = _load(checkpoint)
    assert type(model) is transformers.Qwen4ExpForCausalLM
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    with torch.no_grad():
        logits = model(input_ids=_prompt(300, seed=1)).logits
    assert logits.shape == (1, 300, 512)
    assert logits.isfinite().all()
    stored = safetensors_torch.load_file(checkpoint / "model.safetensors")
    experts = model.model.layers[2].mlp.experts
    halves = [stored[f"model.layers.2.mlp.experts.5.{half}_proj.weight"] for half in ("gate", "up")]
    assert torch.equal(experts.gate_up_proj[5], torch.cat(halves))
    table = model.model.layers[1].ple.ple_embedding.ngram_embedding.weight
    parts = [
        stored[name] for name in sorted(stored) if name.startswith("model.layers.1.ple.ple_embedding.ngram_embedding.")
    ]
    assert torch.equal(table, torch.cat(parts))


@pytest.mark.parametrize("seed", [0, 3])
def test_tiny_greedy_decoding_is_lively_and_decided_far_above_rounding(seed: int, tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path / "model", TinyOptions(seed=seed))
    model, _ = _load(tmp_path / "model")
    prompt = _prompt(1000, seed=seed)
    made = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=48,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = made.sequences[0, prompt.shape[1] :]
    assert len(tokens) == 48
    assert tokens.max() < 256
    assert len(set(tokens.tolist())) > 24
    best, second = torch.stack(made.logits, dim=1)[0].topk(2).values.unbind(-1)
    assert (best - second).min() > 1e-4


def test_tiny_selection_decides_the_output(tmp_path: Path) -> None:
    logits = {}
    for budget in (64, 4096):
        path = tmp_path / str(budget)
        write_tiny_checkpoint(path, TinyOptions(budget=budget))
        model, _ = _load(path)
        with torch.no_grad():
            logits[budget] = model(input_ids=_prompt(400, seed=2)).logits[0]
    difference = (logits[64] - logits[4096]).abs().amax(-1)
    assert difference[:64].max() < 1e-4, "rows inside the budget see everything"
    assert difference[-100:].median() > 0.1


def test_tiny_options_are_honoured(tmp_path: Path) -> None:
    words = "--layers 8 --heads 4 --kv-heads 4 --head-dim 32 --index-heads 2 --index-head-dim 16 --ratio 8 --budget 64"
    path = tmp_path / "model"
    assert main(["tiny", str(path), *words.split(), "--dtype", "bfloat16", "--seed", "5"]) == 0
    config = QSAConfig.from_checkpoint(path)
    assert (config.q_heads, config.kv_heads, config.head_dim) == (4, 4, 32)
    assert (config.index_heads, config.index_head_dim) == (2, 16)
    assert (config.block_tokens, config.budget_tokens, config.topk_blocks) == (8, 64, 8)
    assert config.rotary_dim == 8
    assert sum(config.mrope_section) == config.rotary_dim // 2
    assert config.qsa_layer_ids == (3, 7)
    stored = safetensors_torch.load_file(path / "model.safetensors")
    assert {value.dtype for value in stored.values()} == {torch.bfloat16}
    model, info = _load(path)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.dtype == torch.bfloat16
    with torch.no_grad():
        assert model(input_ids=_prompt(90, seed=3)).logits.isfinite().all()


def test_tiny_tokenizer_round_trips_bytes_and_text(checkpoint: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    for text in (
        "",
        " two  spaces\n\ttab",
        "naïve Ünïcode 漢字 🙂",
        "e\u0301 stays two characters",
        "".join(map(chr, range(256))),
    ):
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
    assert tokenizer("a<|im_end|>b")["input_ids"] == [97, 258, 98]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 258)
    assert tokenizer.decode([97, 258, 98], skip_special_tokens=True) == "ab"


def test_tiny_chat_template_applies(checkpoint: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer(text)["input_ids"][0] == 257


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--layers", "3"], "layers must be at least 4"),
        (["--heads", "5"], "heads must be a multiple of 2 kv-heads"),
        (["--kv-heads", "0"], "kv-heads must be at least 1"),
        (["--head-dim", "20"], "head-dim must be a multiple of 8"),
        (["--index-head-dim", "8"], "index-head-dim must be at least 16"),
        (["--budget", "130"], "budget must be a multiple of ratio 4"),
        (["--ratio", "0"], "ratio must be at least 1"),
        (["--seed", "-1"], "seed must be at least 0"),
        (["--dtype", "int4"], "dtype must be float32 or bfloat16"),
        (["--layers", "many"], "Invalid value for '--layers'"),
        (["--sparsity", "9"], "No such option: --sparsity"),
    ],
)
def test_tiny_tells_a_bad_option_in_one_line(
    words: list[str], told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["tiny", str(tmp_path / "model"), *words]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("flashqsa: ")
    assert told in lines[0]
    assert not list(tmp_path.iterdir())


def _occupied(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    return tmp_path / "model"


def _file(tmp_path: Path) -> Path:
    (tmp_path / "model").write_text("mine")
    return tmp_path / "model"


def _below_a_file(tmp_path: Path) -> Path:
    return _file(tmp_path) / "deeper"


@pytest.mark.parametrize("place", [_occupied, _file, _below_a_file])
def test_tiny_refuses_a_place_it_cannot_have(
    place: Callable[[Path], Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = place(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["tiny", str(target)]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_tiny_force_replaces_its_own_files_only(tmp_path: Path) -> None:
    target = _occupied(tmp_path)
    (target / "config.json").write_text("old")
    assert main(["tiny", str(target), "--force"]) == 0
    assert {file.name for file in target.iterdir()} == FILES | {"notes.txt"}
    assert json.loads((target / "config.json").read_text())["vocab_size"] == 512
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_tiny_leaves_nothing_behind_when_it_fails_midway(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tiny_checkpoint(tmp_path / "model", on_tensor=stop)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [[], ["--force"]])
def test_tiny_interrupted_is_one_line_and_leaves_what_was_there(
    words: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []

    def interrupt(name: str, *rest: Any) -> torch.Tensor:
        drawn.append(name)
        if len(drawn) > 20:
            signal.raise_signal(signal.SIGINT)
        return draw_weight(name, *rest)

    monkeypatch.setattr(tiny_checkpoint, "draw_weight", interrupt)
    target = _occupied(tmp_path) if words else tmp_path / "model"
    before = sorted(tmp_path.rglob("*"))
    assert main(["tiny", str(target), *words]) == 130
    assert capfd.readouterr().err.strip() == "flashqsa: interrupted"
    assert sorted(tmp_path.rglob("*")) == before


def test_program_tells_its_version_and_its_commands(capfd: pytest.CaptureFixture[str]) -> None:
    metadata = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert main(["--version"]) == 0
    assert capfd.readouterr().out == f"flashqsa {metadata['project']['version']}\n"
    assert main([]) == 0
    assert "tiny" in capfd.readouterr().out
    assert main(["nonsense"]) == 2
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_program_names_the_extra_that_is_missing() -> None:
    code = (
        "import sys; sys.modules['typer'] = None\n"
        "from flashqsa.commands.app import main\n"
        "assert main(['--version']) == 0\n"
        "sys.exit(main(['tiny', 'somewhere']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "flashqsa: the command line needs typer, which is not installed. Run: pip install 'flashqsa[cli]'"
    ]
