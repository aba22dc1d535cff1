"""A small checkpoint and changed copies of it; the program as a test calls it."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa.commands.app import main
from flashqsa.commands.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

BUDGET_TOKENS = 32
CPU = ("--device", "cpu", "--threads", "1")


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """A job in the background of a shell is started with SIGINT ignored; a user's terminal does not do that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose budget of 32 tokens a prompt of some 40 exceeds."""
    path = tmp_path_factory.mktemp("generate") / "tiny"
    write_tiny_checkpoint(path, TinyOptions(budget=BUDGET_TOKENS))
    return path


@pytest.fixture
def changed(small_checkpoint: Path, tmp_path: Path) -> Callable[[Callable[[Path], Any]], Path]:
    """Copies the checkpoint and changes the copy."""

    def change(how: Callable[[Path], Any]) -> Path:
        copy = tmp_path / "changed"
        shutil.copytree(small_checkpoint, copy)
        how(copy)
        return copy

    return change


@pytest.fixture
def edit_weights() -> Callable[[Callable[[dict[str, torch.Tensor]], Any]], Callable[[Path], None]]:
    """Makes a change of the weights out of a change of the tensors by name."""
    safetensors_torch = pytest.importorskip("safetensors.torch")

    def of(edit: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
        def rewrite(folder: Path) -> None:
            tensors = safetensors_torch.load_file(folder / "model.safetensors")
            edit(tensors)
            safetensors_torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

        return rewrite

    return of


GENERATE_LAYER = {
    "layer_id": int,
    "rows": int,
    "dense_rows": int,
    "blocks_visible": int,
    "blocks_selected": int,
    "share_selected": float,
}
GENERATE_RUN = {
    "token_ids": [int],
    "text": (str, None),
    "stopped": str,
    "dtype": str,
    "load_s": float,
    "prefill_s": float,
    "decode_s": float,
    "total_s": float,
    "prefill_tokens_per_s": float,
    "decode_tokens_per_s": (float, None),
    "peak_bytes": int,
    "growth_bytes": int,
    "share_selected": (float, None),
    "operator_calls": {},
    "layers": [GENERATE_LAYER],
}
GENERATE_DIFFERENCE = {
    "index": int,
    "stock_token_id": (int, None),
    "flashqsa_token_id": (int, None),
    "stock_margin": (float, None),
    "flashqsa_margin": (float, None),
}
GENERATE_COMPARISON = {
    "same_tokens": bool,
    "first_difference": (GENERATE_DIFFERENCE, None),
    "speed_ratio": {"prefill": float, "decode": (float, None), "total": float},
}
GENERATE = {
    "checkpoint": str,
    "prompt": {"source": str, "tokens": int, "chat": bool, "seed": (int, None)},
    "max_new_tokens": int,
    "prefill_chunk": int,
    "device": str,
    "threads": int,
    "versions": {"flashqsa": str, "torch": str, "transformers": str},
}


@pytest.fixture
def generate_json(
    capfd: pytest.CaptureFixture[str], assert_form: Callable[[Any, Any], None]
) -> Callable[..., dict[str, Any]]:
    """Runs `flashqsa generate ... --json` on the CPU and returns what it printed, which has its form."""

    def run(*words: Any) -> dict[str, Any]:
        capfd.readouterr()
        assert main(["generate", *map(str, words), *CPU, "--json"]) == 0
        captured = capfd.readouterr()
        assert captured.err == "", "nothing but the result where nobody watches"
        result: dict[str, Any] = json.loads(captured.out)
        engine = words[words.index("--engine") + 1] if "--engine" in words else "flashqsa"
        engines, comparison = (engine,), None
        if "--compare" in words:
            engines, comparison = ("stock", "flashqsa"), GENERATE_COMPARISON
        assert_form(result, GENERATE | {"runs": dict.fromkeys(engines, GENERATE_RUN), "comparison": comparison})
        return result

    return run


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Runs `flashqsa generate ...` and expects exit code 2 and one line, without a traceback, that `told` matches."""

    def run(*words: Any, told: str) -> None:
        assert main(["generate", *map(str, words)]) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1, captured.err
        assert captured.err.startswith("flashqsa: ")
        assert re.search(told, captured.err), captured.err

    return run


def _form_errors(value: Any, form: Any, where: str) -> list[str]:
    if isinstance(form, dict):
        if not isinstance(value, dict) or set(value) != set(form):
            return [f"{where}: {value!r} has not the names {sorted(form)}"]
        return [error for name in form for error in _form_errors(value[name], form[name], f"{where}.{name}")]
    if isinstance(form, list):
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        return [error for i, item in enumerate(value) for error in _form_errors(item, form[0], f"{where}[{i}]")]
    if isinstance(form, tuple):
        fits = any(not _form_errors(value, one, where) for one in form)
        return [] if fits else [f"{where}: {value!r} is none of {form}"]
    fits = value is None if form is None else type(value) is form or (form is float and type(value) is int)
    return [] if fits else [f"{where}: {value!r} is not {form}"]


@pytest.fixture
def assert_form() -> Callable[[Any, Any], None]:
    """Compares parsed JSON with its form: types, {name: form}, [form of every item], (one form, or another)."""

    def check(value: Any, form: Any) -> None:
        assert _form_errors(value, form, "$") == []

    return check


NEEDLE, QUESTION = "\nZQXZXQXZZQXQZXXQZQXZ\n", "\n????????????????????????"
PLANTED_LAYER, OTHER_LAYER = 3, 7


@torch.no_grad()
def _plant(path: Path) -> None:
    """Makes one indexer point from QUESTION at NEEDLE: a direction of its input that tells each from other text.

    Its keys and queries are large in one dimension that does not rotate where their text stands, and noise elsewhere.
    """
    import transformers
    from safetensors.torch import load_file, save_file

    from flashqsa.commands.needle_prompt import FILLER

    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    filler = " ".join(FILLER[:8])
    texts = (filler, NEEDLE, filler, QUESTION)
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    kinds = torch.tensor([kind for kind, piece in enumerate(pieces) for _ in piece])
    indexer = model.model.layers[PLANTED_LAYER].self_attn.indexer
    seen: list[torch.Tensor] = []
    hook = indexer.index_qk_proj.register_forward_hook(lambda module, args, out: seen.append(args[0][0].double()))
    model(torch.tensor([[token_id for piece in pieces for token_id in piece]]))
    hook.remove()
    hidden = seen[0]
    gram = hidden.T @ hidden + torch.eye(hidden.shape[1], dtype=torch.float64)
    directions = [torch.linalg.solve(gram, hidden.T @ (kinds == kind).double()) for kind in (1, 3)]
    file = path / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.{PLANTED_LAYER}.self_attn.indexer.index_qk_proj.weight"
    weight = tensors[name].view(-1, indexer.index_head_dim, hidden.shape[1])
    weight[:-1, -1], weight[-1, -1] = 20 * directions[1].float(), 20 * directions[0].float()
    tensors[name] = weight.flatten(0, 1).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="session")
def planted_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers; the rows of QUESTION select the blocks of NEEDLE in PLANTED_LAYER, and nothing is known of 7."""
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("planted") / "tiny"
    write_tiny_checkpoint(path, TinyOptions(layers=8, budget=64))
    _plant(path)
    return path
