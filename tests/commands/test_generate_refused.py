"""`flashqsa generate`: what goes wrong is told in one line, and by the exit code."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa.commands import generate as generate_command
from flashqsa.commands import generate_vllm
from flashqsa.commands.app import main
from flashqsa.commands.generate_child import _ended
from flashqsa.commands.generate_engine import run_engine

pytest.importorskip("transformers")

pytestmark = pytest.mark.transformers

CPU = ("--device", "cpu", "--threads", "1")
HEAD = "lm_head.weight"

Change = Callable[[Path], Any]
Changed = Callable[[Change], Path]
EditWeights = Callable[[Callable[[dict[str, torch.Tensor]], Any]], Change]
Refused = Callable[..., None]
Capture = pytest.CaptureFixture[str]


def _edit_json(name: str, **values: Any) -> Change:
    def edit(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return edit


def _remove(*names: str) -> Change:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def _truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "exactly one of --prompt, --prompt-file, --random-tokens must be given, got none"),
        (["--prompt", "a", "--random-tokens", "4"], "got --prompt and --random-tokens"),
        (["--prompt", " \n"], "must hold text"),
        (["--prompt-file", "no/such/file"], "No such file"),
        (["--prompt-file", "."], "Is a directory"),
        (["--random-tokens", "0"], "random-tokens must be at least 1"),
        (["--prompt", "a", "--seed", "3"], "seed must come with --random-tokens, got 3 with --prompt"),
        (["--prompt", "a", "--engine", "stock", "--compare"], "engine must be left out with --compare, got stock"),
        (["--random-tokens", "-3"], "random-tokens must be at least 1"),
        (["--random-tokens", "4", "--seed", "-1"], "seed must be at least 0"),
        (["--random-tokens", "4", "--seed", f"{1 << 63}"], r"seed must be at least 0 and below 2\^63"),
        (["--random-tokens", f"{1 << 50}"], "must fit into the model's 262,144 positions, got 1,125,899,906,842,624"),
        (["--prompt", "na\udcefve"], "prompt must be UTF-8, got 'na.*, character 2 of which is not"),
        (["--prompt", "a", "--threads", "1025"], "threads must be at least 1 and at most 1,024, got 1025"),
        (["--random-tokens", "4", "--chat"], "chat must be off"),
        (["--random-tokens", "262144"], "must fit into the model's 262,144 positions"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max-new-tokens must be at least 1"),
        (["--prompt", "a", "--prefill-chunk", "-5"], "prefill-chunk must be at least 1"),
        (["--prompt", "a", "--threads", "0"], "threads must be at least 1"),
        (["--prompt", "a", "--max-new-tokens", "few"], "Invalid value for '--max-new-tokens'"),
        (["--prompt", "a", "--dtype", "int4"], "dtype must be among auto, float32, bfloat16, float16"),
        (["--prompt", "a", "--engine", "other"], "engine must be among flashqsa, stock"),
        (["--prompt", "a", "--device", "abacus"], "device must be auto, cpu, cuda or cuda:N"),
        (["--prompt", "a", "--device", "cuda:99"], "device must be there"),
    ],
)
def test_generate_tells_a_bad_option_in_one_line(
    words: list[str], told: str, small_checkpoint: Path, refused: Refused
) -> None:
    refused(small_checkpoint, *words, told=told)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_generate_tells_that_vllm_is_missing(
    small_checkpoint: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in generate_vllm.ENVIRONMENT | {"FLASHQSA_VLLM": ""}:
        monkeypatch.setenv(name, os.environ.get(name, ""))  # put back afterwards
    refused(
        small_checkpoint, "--prompt", "a", "--engine", "vllm", *CPU, told="vllm must be installed for --engine vllm"
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (shutil.rmtree, "must hold a config.json"),
        (_edit_json("config.json", model_type="llama"), "model_type must be qwen4_exp"),
        (_edit_json("config.json", num_experts="many"), "num_experts"),
        (_remove("tokenizer.json", "tokenizer_config.json"), "must hold a tokenizer for a prompt of text"),
        (_edit_json("tokenizer_config.json", chat_template=None), "must hold a chat template for --chat"),
        (_edit_json("tokenizer_config.json", chat_template="{{ raise_exception('no') }}"), "chat template must take"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "must hold a tokenizer, got"),
        (_remove("model.safetensors"), "no file named model.safetensors"),
        (_truncate, "file not fully covered"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_generate_tells_a_bad_checkpoint_in_one_line(
    change: Change, told: str, changed: Changed, refused: Refused
) -> None:
    refused(changed(change), "--prompt", "Hello", "--chat", *CPU, told=told)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda tensors: tensors.pop(HEAD), f"must hold all weights, got .* such as {HEAD}"),
        (lambda tensors: tensors.update({HEAD: torch.zeros(2, 2)}), f"of its config.json's shapes, got .* as {HEAD}"),
        (lambda tensors: tensors[HEAD].fill_(torch.nan), "logits must be finite, got .*nan"),
    ],
)
def test_generate_tells_wrong_weights_in_one_line(
    edit: Callable[[dict[str, torch.Tensor]], Any],
    told: str,
    changed: Changed,
    edit_weights: EditWeights,
    refused: Refused,
) -> None:
    refused(changed(edit_weights(edit)), "--random-tokens", 8, *CPU, told=told)


def test_generate_compare_passes_on_what_its_processes_tell(changed: Changed, refused: Refused) -> None:
    refused(changed(_truncate), "--random-tokens", 8, "--compare", *CPU, told="file not fully covered")


def test_generate_compare_tells_of_a_process_that_was_killed() -> None:
    assert "must fit in memory" in str(_ended("stock", -9))
    assert "got exit code 1" in str(_ended("stock", 1))


def test_generate_tells_an_unreadable_prompt_file_in_one_line(
    small_checkpoint: Path, tmp_path: Path, refused: Refused
) -> None:
    (tmp_path / "latin").write_bytes("naïve".encode("latin-1"))
    refused(small_checkpoint, "--prompt-file", tmp_path / "latin", told="byte 2 is not UTF-8")
    (tmp_path / "empty").write_text("")
    refused(small_checkpoint, "--prompt-file", tmp_path / "empty", told="got an empty file")


def test_generate_interrupted_is_one_line(
    small_checkpoint: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate_command, "run_engine", interrupt)
    assert main(["generate", str(small_checkpoint), "--random-tokens", "8"]) == 130
    assert capfd.readouterr().err == "flashqsa: interrupted\n"


def test_generate_fails_when_a_qsa_layer_did_not_run_on_flashqsa(
    small_checkpoint: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_command, "run_engine", lambda request, engine, show: run_engine(request, "stock"))
    refused(small_checkpoint, "--random-tokens", 8, *CPU, told="must run all its rows on FlashQSA")


def test_generate_names_the_extra_that_is_missing(small_checkpoint: Path) -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from flashqsa.commands.app import main\n"
        f"sys.exit(main(['generate', {str(small_checkpoint)!r}, '--random-tokens', '8']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "flashqsa: the command line needs transformers, which is not installed. Run: pip install 'flashqsa[cli]'"
    ]


@pytest.mark.parametrize("words", [["--version"], ["--help"]], ids=str)
def test_an_output_that_takes_nothing_is_told_in_one_line(words: list[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    with full.open("w") as out:
        done = subprocess.run(
            [sys.executable, "-m", "flashqsa", *words], stdout=out, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "flashqsa: standard output must be writable, got No space left on device. Send it somewhere else."
    ]


def test_a_reader_that_leaves_is_no_error_to_tell() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "flashqsa", "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 1
