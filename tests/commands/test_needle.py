"""`flashqsa needle`: it finds what is planted, its numbers are those of the definition, wrong use is told in a line."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa.commands import needle as needle_command
from flashqsa.commands.app import main
from flashqsa.commands.needle_prompt import FILLER, Haystack, make_haystack, parse_contexts, parse_depths, plant
from flashqsa.commands.needle_search import LayerFinding, Search, _best_rank
from flashqsa.errors import ArgumentError
from flashqsa.testing import oracles

transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.transformers

CPU = ("--device", "cpu", "--threads", "1")
TEXTS = ("--needle", "\nZQXZXQXZZQXQZXXQZQXZ\n", "--question", "\n????????????????????????")
PLANTED_LAYER, OTHER_LAYER = 3, 7

Changed = Callable[[Callable[[Path], Any]], Path]
Capture = pytest.CaptureFixture[str]

LAYER = {
    "layer_id": int,
    "rows": int,
    "rows_found": int,
    "blocks_found": int,
    "selected_share": float,
    "chance": float,
    "best_rank": int,
    "dense_mass": float,
}
SEARCH = {
    "context": int,
    "depth": float,
    "needle_tokens": [int],
    "needle_blocks": [int],
    "visible_blocks": int,
    "layers": [LAYER],
}
FORM = {
    "checkpoint": str,
    "device": str,
    "threads": int,
    "dtype": str,
    "prefill_chunk": int,
    "versions": {"flashqsa": str, "torch": str, "transformers": str},
    "block_tokens": int,
    "budget_tokens": int,
    "filler": str,
    "seed": int,
    "needle_tokens": int,
    "question_tokens": int,
    "final_rows": int,
    "searches": [SEARCH],
}


def _json(capfd: Capture, *words: Any) -> dict[str, Any]:
    capfd.readouterr()
    assert main(["needle", *map(str, words), *CPU, "--json"]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    result: dict[str, Any] = json.loads(captured.out)
    return result


def test_needle_finds_what_is_planted_where_it_is_planted(
    planted_checkpoint: Path, capfd: Capture, assert_form: Callable[[Any, Any], None], tmp_path: Path
) -> None:
    picture = tmp_path / "needle.svg"
    result = _json(capfd, planted_checkpoint, *TEXTS, "--contexts", "500,1k", "--depths", "0,40,100", "--plot", picture)
    assert_form(result, FORM)
    assert [(s["context"], s["depth"]) for s in result["searches"]] == [
        (c, d) for c in (500, 1024) for d in (0, 40, 100)
    ]
    assert (result["needle_tokens"], result["question_tokens"], result["final_rows"]) == (22, 25, 8)
    for search in result["searches"]:
        room = search["context"] - 22 - 25
        first = round(room * search["depth"] / 100)
        assert search["needle_tokens"] == [first, first + 22]
        assert search["needle_blocks"] == [first // 4, -(-(first + 22) // 4)]
        planted, other = search["layers"]
        assert (planted["layer_id"], other["layer_id"]) == (PLANTED_LAYER, OTHER_LAYER)
        assert planted["best_rank"] == 1
        assert planted["selected_share"] > 0.8
        assert planted["rows_found"] == planted["rows"] == 8
        assert other["selected_share"] < 0.5
        assert planted["chance"] == pytest.approx(16 / search["visible_blocks"], rel=0.03)
    texts = {
        "".join(element.itertext()).strip() for element in ElementTree.parse(picture).iter() if "text" in element.tag
    }
    assert {"500 tokens", "1,024 tokens", "100%"} <= texts, "the picture shows it"


def test_needle_numbers_are_those_of_the_definition(planted_checkpoint: Path, capfd: Capture) -> None:
    """The same prompt through the model, scores and dense attention of the final rows computed row by row."""
    from flashqsa.commands.needle_prompt import NEEDLE
    from flashqsa.integrations import hf

    words = ("--contexts", 900, "--depths", 30, "--final-rows", 5, "--prefill-chunk", 897)  # rows of two forwards
    result = _json(capfd, planted_checkpoint, *words)
    (search,) = result["searches"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(planted_checkpoint)
    haystack = make_haystack(
        tokenizer, needle=None, question=None, filler_file=None, seed=0, block_tokens=4, vocab_size=512, stop_ids=()
    )
    planted = plant(haystack, 900, 30)
    assert tokenizer.decode(planted.token_ids).count(NEEDLE) == 1
    model = transformers.AutoModelForCausalLM.from_pretrained(planted_checkpoint).eval()
    contexts: dict[int, Any] = {}
    with torch.no_grad(), hf.observed(model, lambda context, selection: contexts.update({context.layer_id: context})):
        model(torch.tensor([planted.token_ids]))
    blocks = range(*search["needle_blocks"])
    for layer in search["layers"]:
        context = contexts[layer["layer_id"]]
        keys = context.cache.block_keys[0]
        pairs, found, ranks, masses = [], set(), [], []
        for row in range(895, 900):
            scores = oracles.score_blocks(context.index_q[row], keys[: (row + 1) // 4])
            order = sorted(range(len(scores)), key=lambda g, scores=scores: (-float(scores[g]), g))
            ranks.append(min(order.index(g) + 1 for g in blocks))
            chosen = set(order[:16])
            pairs += [g in chosen for g in blocks]
            found |= chosen & set(blocks)
            q, k = context.q[row].double(), context.keys(0)[: row + 1].double()
            logits = torch.einsum("hgd,nhd->hgn", q.view(2, 3, -1), k) * context.softmax_scale
            mass = logits.softmax(dim=-1).mean(dim=(0, 1))
            masses.append(float(mass[blocks[0] * 4 : blocks[-1] * 4 + 4].sum()))
        assert layer["selected_share"] == pytest.approx(sum(pairs) / len(pairs))
        assert layer["blocks_found"] == len(found)
        assert layer["best_rank"] == min(ranks)
        assert layer["dense_mass"] == pytest.approx(sum(masses) / 5, rel=1e-4)


def test_needle_is_found_in_bfloat16_too(planted_checkpoint: Path, capfd: Capture) -> None:
    result = _json(capfd, planted_checkpoint, *TEXTS, "--contexts", 500, "--depths", 30, "--dtype", "bfloat16")
    assert result["dtype"] == "bfloat16"
    planted, other = result["searches"][0]["layers"]
    assert planted["selected_share"] > 0.8 > 0.5 > other["selected_share"]


@pytest.mark.gpu
def test_needle_is_found_on_a_gpu(planted_checkpoint: Path, capfd: Capture) -> None:
    words = ("--contexts", "1k", "--depths", "0,40,100", "--json")
    capfd.readouterr()
    assert main(["needle", str(planted_checkpoint), *TEXTS, *words, "--device", "cuda:0"]) == 0
    on_gpu = json.loads(capfd.readouterr().out)
    on_cpu = _json(capfd, planted_checkpoint, *TEXTS, *words[:-1])
    for mine, theirs in zip(on_gpu["searches"], on_cpu["searches"], strict=True):
        assert mine["layers"][0]["selected_share"] == pytest.approx(theirs["layers"][0]["selected_share"], abs=0.1)
        assert mine["layers"][0]["dense_mass"] == pytest.approx(theirs["layers"][0]["dense_mass"], abs=1e-2)


def test_needle_for_people(planted_checkpoint: Path, capfd: Capture, tmp_path: Path) -> None:
    picture = tmp_path / "needle.png"
    words = (*TEXTS, "--contexts", "60,1k", "--depths", "50", "--plot", str(picture), *CPU)
    assert main(["needle", str(planted_checkpoint), *words]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    for part in ("needle: 22 tokens in filler from text, seed 0", "15 blocks in sight, all of them selected",
                 "256 blocks in sight, 6.2% selected", "100% #1", f"drawn: {picture}"):  # fmt: skip
        assert part in captured.out, part
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [picture]


def test_needle_without_a_tokenizer_repeats_the_beginning_of_random_tokens(changed: Changed, capfd: Capture) -> None:
    def remove(folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).unlink()

    path = changed(remove)
    results = [_json(capfd, path, "--contexts", "200", "--depths", "50", "--seed", seed) for seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2]
    assert (results[0]["filler"], results[0]["needle_tokens"], results[0]["question_tokens"]) == ("random", 16, 12)
    assert main(["needle", str(path), "--contexts", "200", "--question", "Where?", *CPU]) == 2
    assert "must hold a tokenizer for texts" in capfd.readouterr().err


def test_needle_in_a_file(small_checkpoint: Path, tmp_path: Path, capfd: Capture) -> None:
    file = tmp_path / "filler.txt"
    file.write_text("Nothing to see here. ")
    result = _json(capfd, small_checkpoint, "--contexts", 300, "--depths", 50, "--filler-file", file)
    assert result["filler"] == "file"
    assert result["searches"][0]["layers"][0]["rows"] == 8


def test_the_prompt_is_needle_and_question_in_repeated_filler() -> None:
    haystack = Haystack(needle=(90, 91), question=(80,), filler=(1, 2, 3), source="random")
    for depth, expected in ((0, [90, 91, 1, 2, 3, 1, 2, 80]), (50, [1, 2, 90, 91, 3, 1, 2, 80]),
                            (100, [1, 2, 3, 1, 2, 90, 91, 80])):  # fmt: skip
        planted = plant(haystack, 8, depth)
        assert list(planted.token_ids) == expected
        assert planted.token_ids[planted.first_token] == 90
    assert len(set(FILLER)) == len(FILLER)


def test_contexts_and_depths(refuses: Any) -> None:
    assert parse_contexts("4k, 100,1M,4K") == (4096, 100, 1 << 20)
    assert parse_depths("0, 12.5,100,0") == (0.0, 12.5, 100.0)
    for text in ("", "4k,", "-3", "0", "4kb", "1.5k"):
        with refuses(ArgumentError, "needle", "contexts"):
            parse_contexts(text)
    for text in ("", "-1", "101", "half", "nan"):
        with refuses(ArgumentError, "needle", "depths"):
            parse_depths(text)


def test_rank_counts_better_scores_and_lower_ids_among_equals() -> None:
    scores = torch.tensor([0.0, 3.0, 3.0, torch.nan, 0.0, 5.0])
    for block, rank in ((5, 1), (1, 2), (2, 3), (0, 4), (4, 5), (3, 6)):
        assert int(_best_rank(scores, torch.tensor([block]))) == rank
    assert int(_best_rank(scores, torch.tensor([3, 2, 4]))) == 3


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--contexts", "many"], "contexts must be numbers of tokens such as 4k,32k, got many"),
        (["--contexts", "100"], "contexts must be longer than needle and question"),
        (["--contexts", "1m"], "must fit into the model's 262,144 positions, got 1,048,576"),
        (["--depths", "50,120"], "depths must be percentages from 0 to 100, got 120"),
        (["--final-rows", "0"], "final-rows must be at least 1"),
        (["--final-rows", "86"], "final-rows must be at most 85"),
        (["--seed", "-1"], "seed must be at least 0"),
        (["--seed", f"{1 << 63}"], "flashqsa: needle: seed must be at least 0 and below 2^63"),
        (["--needle", "na\udcefve"], "flashqsa: needle: needle must be UTF-8"),
        (["--question", "\udcef"], "flashqsa: needle: question must be UTF-8"),
        (["--needle", " "], "needle: needle must hold text"),
        (["--filler-file", "no/such/file"], "filler-file must be a readable text file"),
        (["--prefill-chunk", "0"], "flashqsa: needle: prefill-chunk must be at least 1"),
        (["--device", "cuda:99"], "flashqsa: needle: device must be there"),
        (["--dtype", "int4"], "flashqsa: needle: dtype must be among"),
        (["--plot", "needle.jpg"], "plot must end in .png or .svg, got needle.jpg"),
        (["--plot", "no/such/folder/needle.png"], "plot must be a file that can be written"),
    ],
)
def test_needle_tells_a_bad_option_in_one_line(
    words: list[str], told: str, small_checkpoint: Path, capfd: Capture
) -> None:
    assert main(["needle", str(small_checkpoint), "--contexts", "1k", *words]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert told in line


def test_needle_tells_a_bad_checkpoint_in_one_line(changed: Changed, capfd: Capture) -> None:
    path = changed(lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100))
    for folder, told in ((path, "flashqsa: needle: checkpoint must hold weights"), (path / "none", "a config.json")):
        assert main(["needle", str(folder), "--contexts", "1k", *CPU]) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        assert len(captured.err.splitlines()) == 1
        assert told in captured.err


@pytest.mark.parametrize("at", ["search_needle", "_draw"])
def test_needle_interrupted_leaves_no_picture(
    at: str, small_checkpoint: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(needle_command, at, interrupt)
    picture = tmp_path / "needle.png"
    words = ("--contexts", "300", "--depths", "0", "--plot", str(picture), *CPU)
    assert main(["needle", str(small_checkpoint), *words]) == 130
    captured = capfd.readouterr()
    assert captured.err == "flashqsa: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_needle_without_memory_is_told_in_one_line(
    small_checkpoint: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    monkeypatch.setattr(needle_command, "search_needle", fail)
    assert main(["needle", str(small_checkpoint), "--contexts", "300", *CPU]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("flashqsa: needle: the model and its context must fit in memory, got: CUDA out of memory.")


def test_many_contexts_fill_a_second_line_of_the_picture() -> None:
    from flashqsa.commands.needle_plot import draw_needle

    finding = LayerFinding(
        layer_id=3, rows=1, rows_found=1, blocks_found=1, selected_share=0.25, chance=0.1, best_rank=1, dense_mass=0.0
    )
    searches = [
        Search(
            context=c, depth=0.0, needle_tokens=(0, 4), needle_blocks=(0, 1), visible_blocks=c // 4, layers=(finding,)
        )
        for c in (100, 200, 300, 400, 500)
    ]
    figure = draw_needle(searches)
    shown = [ax for ax in figure.axes if ax.images]
    assert [ax.get_title() for ax in shown] == [f"{c} tokens" for c in (100, 200, 300, 400, 500)]
    assert all(float(ax.images[0].get_array()[0, 0]) == 0.25 for ax in shown)


def test_needle_without_matplotlib_says_so_before_the_work(
    small_checkpoint: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "flashqsa.commands.inspect_figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["needle", str(small_checkpoint), "--contexts", "300", "--plot", str(tmp_path / "n.png"), *CPU]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    told = "flashqsa: the command line needs matplotlib, which is not installed. Run: pip install 'flashqsa[cli]'\n"
    assert captured.err == told
    assert list(tmp_path.iterdir()) == []


def test_the_documentation_names_all_fields() -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    section = page.partition("## flashqsa needle")[2].partition("\n## ")[0]
    for name in {*FORM, *SEARCH, *LAYER}:
        assert f"`{name}`" in section, name
