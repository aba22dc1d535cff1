"""`flashqsa generate`: the tokens are the model's, the figures are there, and two engines are compared."""

from __future__ import annotations

import dataclasses
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashqsa.commands.app import main
from flashqsa.commands.generate_compare import Difference, compare_runs
from flashqsa.commands.generate_engine import EngineRun
from flashqsa.commands.generate_loop import Generated, generate_tokens
from flashqsa.commands.generate_memory import peak_bytes, start_peak
from flashqsa.commands.generate_output import printable

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.transformers

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "commands.md"
TEXT = "The selection decides what a row attends. " * 6
CPU = ("--device", "cpu", "--threads", "1")
BUDGET_TOKENS = 32

Changed = Callable[[Callable[[Path], Any]], Path]
EditWeights = Callable[[Callable[[dict[str, torch.Tensor]], Any]], Callable[[Path], None]]
RunJson = Callable[..., dict[str, Any]]
Capture = pytest.CaptureFixture[str]


def test_generate_text_is_a_turn_in_the_chat_template_by_default(
    small_checkpoint: Path, generate_json: RunJson
) -> None:
    result = generate_json(small_checkpoint, "--prompt", TEXT, "--max-new-tokens", 4)
    template = 3 + len("user\n" + "\n" + "assistant\n")  # and three special tokens
    assert result["prompt"] == {"source": "text", "tokens": len(TEXT) + template, "chat": True, "seed": None}
    (run,) = result["runs"].values()
    assert run["text"] == bytes(run["token_ids"]).decode(errors="replace")
    assert len(run["token_ids"]) == 4
    assert result["comparison"] is None


def test_generate_from_a_file_and_from_standard_input(
    small_checkpoint: Path, tmp_path: Path, generate_json: RunJson, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(TEXT)
    words = (small_checkpoint, "--no-chat", "--max-new-tokens", 4)
    from_text = generate_json(*words, "--prompt", TEXT)
    from_file = generate_json(*words, "--prompt-file", file)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(TEXT.encode())))
    from_input = generate_json(*words, "--prompt-file", "-")
    for result in (from_file, from_input):
        assert result["prompt"] == {"source": "file", "tokens": len(TEXT), "chat": False, "seed": None}
        assert result["runs"]["flashqsa"]["token_ids"] == from_text["runs"]["flashqsa"]["token_ids"]


def test_generate_random_prompt_is_decided_by_its_seed_and_needs_no_tokenizer(
    changed: Changed, generate_json: RunJson
) -> None:
    def remove(folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (folder / name).unlink()

    path = changed(remove)
    tokens = []
    for seed in (3, 3, 4):
        result = generate_json(path, "--random-tokens", 50, "--seed", seed, "--max-new-tokens", 6)
        assert result["prompt"] == {"source": "random", "tokens": 50, "chat": False, "seed": seed}
        assert result["runs"]["flashqsa"]["text"] is None
        tokens.append(result["runs"]["flashqsa"]["token_ids"])
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.fixture(scope="module")
def expected_tokens(small_checkpoint: Path) -> list[int]:
    """What transformers' own `generate` makes of the first 150 characters, entering at once."""
    model = transformers.AutoModelForCausalLM.from_pretrained(small_checkpoint)
    prompt = torch.tensor([list(TEXT[:150].encode())])
    made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
    tokens: list[int] = made[0, 150:].tolist()
    return tokens


@pytest.mark.parametrize("engine", ["stock", "flashqsa"])
@pytest.mark.parametrize("chunk", [1, 37, 512])
def test_generate_tokens_are_those_of_the_model_however_the_prompt_is_cut(
    engine: str, chunk: int, small_checkpoint: Path, expected_tokens: list[int], generate_json: RunJson
) -> None:
    """Also where chunks cross linear-attention layers, whose state is recurrent."""
    words = ("--prompt", TEXT[:150], "--no-chat", "--max-new-tokens", 12, "--prefill-chunk", chunk)
    run = generate_json(small_checkpoint, *words, "--engine", engine)["runs"][engine]
    assert run["token_ids"] == expected_tokens


def test_generate_loop_finds_the_cache_argument_under_its_older_name(small_checkpoint: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(small_checkpoint).eval()
    calls = []

    class OlderModel:
        config = model.config
        get_input_embeddings = model.get_input_embeddings

        def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, **how: Any) -> Any:
            calls.append(input_ids.shape[1])
            return model(input_ids=input_ids, cache=past_key_values, **how)

        __call__ = forward

    prompt = list(TEXT[:80].encode())
    older = generate_tokens(OlderModel(), prompt, max_new_tokens=5, prefill_chunk=32)
    newer = generate_tokens(model, prompt, max_new_tokens=5, prefill_chunk=32)
    assert older.token_ids == newer.token_ids
    assert older.margins == newer.margins
    assert calls == [32, 32, 16, 1, 1, 1, 1], "the last token is not fed"


def test_generate_counts_what_every_qsa_layer_attended(small_checkpoint: Path, generate_json: RunJson) -> None:
    result = generate_json(small_checkpoint, "--random-tokens", 100, "--max-new-tokens", 11, "--prefill-chunk", 33)
    run = result["runs"]["flashqsa"]
    visible = [(token + 1) // 4 for token in range(110)]
    topk_blocks = BUDGET_TOKENS // 4
    expected = {
        "layer_id": 3,
        "rows": 110,
        "dense_rows": sum(blocks <= topk_blocks for blocks in visible),
        "blocks_visible": sum(visible),
        "blocks_selected": sum(min(blocks, topk_blocks) for blocks in visible),
    }
    share = expected["blocks_selected"] / expected["blocks_visible"]
    assert run["layers"] == [expected | {"share_selected": pytest.approx(share)}]
    assert run["share_selected"] == pytest.approx(share)


def test_generate_json_holds_what_the_documentation_lists(small_checkpoint: Path, generate_json: RunJson) -> None:
    result = generate_json(small_checkpoint, "--random-tokens", 40, "--max-new-tokens", 3, "--dtype", "bfloat16")
    run = result["runs"]["flashqsa"]
    assert run["dtype"] == "bfloat16"
    assert run["total_s"] == pytest.approx(run["prefill_s"] + run["decode_s"])
    assert run["decode_tokens_per_s"] == pytest.approx(2 / run["decode_s"])
    assert run["prefill_tokens_per_s"] == pytest.approx(40 / run["prefill_s"])
    assert run["peak_bytes"] > run["growth_bytes"] >= 0
    listed = DOCUMENTATION.read_text(encoding="utf-8")
    for names in (result, result["prompt"], result["versions"], run, run["layers"][0]):
        for name in names:
            assert f"`{name}`" in listed, f"{name} is not documented"


def test_generate_stops_at_a_stop_token_unless_told_otherwise(
    small_checkpoint: Path, changed: Changed, generate_json: RunJson
) -> None:
    words = ("--prompt", TEXT, "--no-chat", "--max-new-tokens", 9)
    tokens = generate_json(small_checkpoint, *words)["runs"]["flashqsa"]["token_ids"]
    stop = tokens[5]
    path = changed(
        lambda folder: (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, stop]}))
    )
    stopped = generate_json(path, *words)["runs"]["flashqsa"]
    assert stopped["token_ids"] == tokens[: tokens.index(stop) + 1]
    assert stopped["stopped"] == "stop token"
    ignored = generate_json(path, *words, "--ignore-stop")["runs"]["flashqsa"]
    assert (ignored["token_ids"], ignored["stopped"]) == (tokens, "length")


def test_generate_prints_text_figures_and_the_path_that_ran(small_checkpoint: Path, capfd: Capture) -> None:
    threads = torch.get_num_threads()
    assert main(["generate", str(small_checkpoint), "--prompt", TEXT, "--max-new-tokens", "5", *CPU]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    for told in ("tokens/s", "peak memory", "over the loaded model", "QSA layer", "dense rows", "ran in 1 of 1 QSA"):
        assert told in captured.out
    assert max(map(len, captured.out.replace(str(small_checkpoint), "").splitlines())) <= 88
    assert torch.get_num_threads() == threads
    assert main(["generate", str(small_checkpoint), "--prompt", "Hi", "--no-chat", "--max-new-tokens", "1", *CPU]) == 0
    assert "not needed, no row saw more blocks" in capfd.readouterr().out


def test_generate_compare_finds_the_same_tokens(small_checkpoint: Path, generate_json: RunJson) -> None:
    result = generate_json(small_checkpoint, "--random-tokens", 200, "--max-new-tokens", 8, "--compare")
    stock, flashqsa = result["runs"]["stock"], result["runs"]["flashqsa"]
    comparison = result["comparison"]
    assert comparison["same_tokens"]
    assert comparison["first_difference"] is None
    assert stock["token_ids"] == flashqsa["token_ids"]
    assert stock["layers"] == []
    assert flashqsa["layers"][0]["rows"] == 207
    assert comparison["speed_ratio"]["prefill"] == pytest.approx(stock["prefill_s"] / flashqsa["prefill_s"])
    listed = DOCUMENTATION.read_text(encoding="utf-8")
    names = (*comparison, *comparison["speed_ratio"], *(field.name for field in dataclasses.fields(Difference)))
    assert all(f"`{name}`" in listed for name in names)


def test_generate_compare_tells_where_the_tokens_part(
    changed: Changed, edit_weights: EditWeights, capfd: Capture
) -> None:
    """All block scores are equal, so that each engine selects as it breaks ties."""

    def tie(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.self_attn.indexer.index_qk_proj.weight"].zero_()

    path = changed(edit_weights(tie))
    assert main(["generate", str(path), "--random-tokens", "300", "--max-new-tokens", "8", "--compare", *CPU]) == 3
    captured = capfd.readouterr()
    assert captured.err == ""
    lines = captured.out.splitlines()
    place = next(place for place, line in enumerate(lines) if line.startswith("same tokens: no, from generated token"))
    assert lines[place + 1].startswith("  stock transformers: token ")
    assert lines[place + 2].startswith("  FlashQSA: token ")
    assert "ties" in lines[place + 3]
    assert max(map(len, lines[place:])) <= 88


def _made(engine: str, token_ids: tuple[int, ...]) -> EngineRun:
    margins = tuple(token_id / 10 for token_id in token_ids)
    generated = Generated(token_ids=token_ids, margins=margins, stopped="length", prefill_s=2.0, decode_s=0.5)
    return EngineRun(engine=engine, generated=generated, dtype="float32", load_s=1.0, peak_bytes=3, loaded_bytes=2)


def test_compare_runs_finds_the_first_difference_also_past_the_end_of_one() -> None:
    difference = compare_runs(_made("stock", (5, 6, 7)), _made("flashqsa", (5, 9, 8))).first_difference
    assert difference is not None
    assert (difference.index, difference.stock_token_id, difference.flashqsa_token_id) == (1, 6, 9)
    assert (difference.stock_margin, difference.flashqsa_margin) == (0.6, 0.9)
    difference = compare_runs(_made("stock", (5,)), _made("flashqsa", (5, 9))).first_difference
    assert difference is not None
    assert (difference.index, difference.stock_token_id, difference.flashqsa_token_id) == (1, None, 9)
    assert compare_runs(_made("stock", (5,)), _made("flashqsa", (5,))).decode_ratio is None


def test_generate_unused_tensors_are_named(changed: Changed, edit_weights: EditWeights, capfd: Capture) -> None:
    path = changed(edit_weights(lambda tensors: tensors.update(surplus=torch.zeros(2))))
    assert main(["generate", str(path), "--random-tokens", "8", "--max-new-tokens", "1", *CPU]) == 0
    captured = capfd.readouterr()
    assert "unused: 1 tensor of the checkpoint, such as surplus" in captured.out
    assert captured.err == ""


def test_printable_writes_control_characters_out() -> None:
    assert printable("a\tb\n\x1b[2J\x07é漢 :smile: [b]", "utf-8") == "a\tb\n\\x1b[2J\\x07é漢 :smile: [b]"
    assert printable("é漢", "latin-1") == "é\\u6f22"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the peak restarts on Linux alone")
def test_peak_bytes_counts_from_start_peak_on() -> None:
    cpu = torch.device("cpu")
    before = start_peak(cpu)
    held = torch.ones(64 * 2**20, dtype=torch.uint8)
    del held
    assert peak_bytes(cpu) - before > 60 * 2**20
    before = start_peak(cpu)
    assert peak_bytes(cpu) - before < 10 * 2**20
