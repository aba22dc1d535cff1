"""`flashqsa inspect`: numbers of the definition, planted structure in the pictures, a report that stands alone."""

from __future__ import annotations

import base64
import json
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from flashqsa.analysis import context_share
from flashqsa.commands import inspect_command
from flashqsa.commands.app import main
from flashqsa.commands.inspect_model import run_prompt
from flashqsa.commands.inspect_source import MassRows, recorded_rows, sample_positions
from flashqsa.commands.inspect_study import LINE_POINTS, _line, _median, study_recording
from flashqsa.commands.needle_prompt import FILLER
from flashqsa.recording import LayerRecord, Recording, StepRecord

transformers = pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.transformers

CPU = ("--device", "cpu", "--threads", "1")
R, TOPK = 4, 16
PLANTED_LAYER, OTHER_LAYER = 3, 7
NEEDLE = "\nZQXZXQXZZQXQZXXQZQXZ\n" * 3
QUESTION = "\n" + "?" * 100
BEFORE, BETWEEN = " ".join(FILLER[:8])[:300], " ".join(FILLER[8:])[:100]
TEXT = BEFORE + NEEDLE + BETWEEN + QUESTION

Changed = Callable[[Callable[[Path], Any]], Path]
Capture = pytest.CaptureFixture[str]
Refuse = Callable[..., None]

LAYER = {
    "layer_id": int,
    "rows": int,
    "sparse_rows": int,
    "context_share": float,
    "block_share": (float, None),
    "neighbour_overlap": (float, None),
    "median_distance": (int, None),
    "median_visible_distance": (int, None),
    "kept_mass": (float, None),
    "best_mass": (float, None),
    "recent_mass": (float, None),
    "distances": {"edges": [int], "selected": [int], "visible": [int]},
    "mass": ({"positions": [int], "kept": [float], "best": [float], "recent": [float]}, None),
}
RUN = {
    "prompt": {"source": str, "tokens": int, "chat": bool, "seed": (int, None)},
    "prefill_chunk": int,
    "device": str,
    "threads": int,
    "dtype": str,
    "versions": {"torch": str, "transformers": str},
}
FORM = {
    "source": str,
    "kind": str,
    "versions": {"flashqsa": str},
    "run": (RUN, None),
    "request_id": int,
    "steps": int,
    "block_tokens": int,
    "layers": [LAYER],
    "layer_overlap": [[(float, None)]],
    "layer_overlap_rows": int,
}


def _json(capfd: Capture, *words: Any) -> dict[str, Any]:
    capfd.readouterr()
    assert main(["inspect", *map(str, words), "--json"]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    result: dict[str, Any] = json.loads(captured.out)
    return result


@pytest.fixture(scope="module")
def inspected(planted_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with everything that one call writes, and what it printed."""
    folder = tmp_path_factory.mktemp("inspected")
    (folder / "prompt.txt").write_text(TEXT)
    words = ["--prompt-file", folder / "prompt.txt", "--no-chat", "--mass-rows", 9, "--prefill-chunk", 300, *CPU]
    for name, file in (("save", "rec.safetensors"), ("plot", "layer.svg"), ("html", "report.html")):
        words += [f"--{name}", folder / file]
    with pytest.MonkeyPatch.context() as patch:
        shown: list[str] = []
        patch.setattr("typer.echo", lambda text: shown.append(str(text)))
        assert main(["inspect", str(planted_checkpoint), *map(str, words), "--json"]) == 0
    return folder, "\n".join(shown)


def _sets(record: list[LayerRecord]) -> list[list[int]]:
    return [
        ids[:count]
        for layer in record
        for ids, count in zip(layer.block_ids.tolist(), layer.block_counts.tolist(), strict=True)
    ]


def test_inspect_numbers_are_those_of_the_recording(
    inspected: tuple[Path, str], assert_form: Callable[[Any, Any], None]
) -> None:
    folder, printed = inspected
    result = json.loads(printed)
    assert_form(result, FORM)
    recording = Recording.load(folder / "rec.safetensors")
    tokens = len(TEXT)
    assert result["run"]["prompt"] == {"source": "file", "tokens": tokens, "chat": False, "seed": None}
    assert (result["kind"], result["steps"], result["block_tokens"]) == ("checkpoint", -(-tokens // 300), R)
    chosen = {}
    for layer in result["layers"]:
        sets = chosen[layer["layer_id"]] = _sets([step.layers[layer["layer_id"]] for step in recording.steps])
        sparse = [p for p in range(tokens) if (p + 1) // R > TOPK]
        assert (layer["rows"], layer["sparse_rows"]) == (tokens, len(sparse))
        attended = [(len(ids) * R + (p + 1) % R) / (p + 1) for p, ids in enumerate(sets)]
        assert layer["context_share"] == pytest.approx(sum(attended) / tokens, rel=1e-5)
        overlaps = [len(set(sets[p]) & set(sets[p - 1])) / TOPK for p in sparse]
        assert layer["neighbour_overlap"] == pytest.approx(sum(overlaps) / len(sparse), rel=1e-5)
        chances = [TOPK / ((p + 1) // R) for p in sparse]
        assert layer["block_share"] == pytest.approx(sum(chances) / len(sparse), rel=1e-5)
        distances = sorted(p - (g * R + R - 1) for p, ids in enumerate(sets) for g in ids)
        assert layer["median_distance"] == distances[(len(distances) - 1) // 2] // R * R
        assert sum(layer["distances"]["selected"]) == len(distances)
    same = [len(set(chosen[3][p]) & set(chosen[7][p])) / TOPK for p in sparse]
    assert result["layer_overlap"][0][1] == pytest.approx(sum(same) / len(sparse), rel=1e-5)
    assert result["layer_overlap_rows"] == len(sparse)


def test_inspect_weighs_rows_against_dense_attention(planted_checkpoint: Path, inspected: tuple[Path, str]) -> None:
    """Softmax over everything, row by row, from queries and keys of the same model."""
    from flashqsa.integrations import hf

    folder, printed = inspected
    recording = Recording.load(folder / "rec.safetensors")
    model = transformers.AutoModelForCausalLM.from_pretrained(planted_checkpoint).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(planted_checkpoint)
    contexts: dict[tuple[int, int], Any] = {}

    def keep(context: Any, selection: Any) -> None:
        contexts.update({(context.layer_id, position): context for position in context.plan.positions.tolist()})

    with hf.observed(model, keep):
        run_prompt(model, tokenizer(TEXT)["input_ids"], prefill_chunk=300)
    for layer in json.loads(printed)["layers"]:
        mass = layer["mass"]
        assert len(mass["positions"]) == 9
        assert mass["positions"] == sorted(mass["positions"])
        assert (mass["positions"][0], mass["positions"][-1]) == ((TOPK + 1) * R - 1, len(TEXT) - 1)
        sets = _sets([step.layers[layer["layer_id"]] for step in recording.steps])
        for place, position in enumerate(mass["positions"]):
            context = contexts[layer["layer_id"], position]
            row = context.plan.positions.tolist().index(position)
            q, k = context.q[row].double(), context.keys(0)[: position + 1].double()
            logits = torch.einsum("hgd,nhd->hgn", q.view(2, 3, -1), k) * context.softmax_scale
            weights = logits.softmax(dim=-1).mean(dim=(0, 1)).tolist()
            visible = (position + 1) // R
            blocks = [sum(weights[g * R : g * R + R]) for g in range(visible)]
            tail = sum(weights[visible * R :])
            for name, ids in (
                ("kept", sets[position]),
                ("best", sorted(range(visible), key=lambda g, blocks=blocks: -blocks[g])[:TOPK]),
                ("recent", range(visible - TOPK, visible)),
            ):
                assert mass[name][place] == pytest.approx(tail + sum(blocks[g] for g in ids), abs=2e-5)
        assert layer["kept_mass"] == pytest.approx(sum(mass["kept"]) / 9, rel=1e-6)


@pytest.mark.gpu
def test_inspect_on_a_gpu(small_checkpoint: Path, capfd: Capture) -> None:
    words = (small_checkpoint, "--random-tokens", 300, "--mass-rows", 5)
    on_gpu = _json(capfd, *words, "--device", "cuda:0")
    on_cpu = _json(capfd, *words, *CPU)
    for mine, theirs in zip(on_gpu["layers"], on_cpu["layers"], strict=True):
        assert mine["mass"]["positions"] == theirs["mass"]["positions"]
        for name in ("context_share", "neighbour_overlap", "kept_mass", "best_mass", "recent_mass"):
            assert mine[name] == pytest.approx(theirs[name], abs=2e-2)


def test_what_is_planted_stands_in_the_heat_map(inspected: tuple[Path, str]) -> None:
    study = study_recording(Recording.load(inspected[0] / "rec.safetensors"), {}, layer_ids=(3, 7))
    shares = {}
    for layer in study.layers:
        positions, blocks = layer.heat.position_edges, layer.heat.block_edges
        rows = (positions[:-1] >= len(TEXT) - 80) & (positions[1:] <= len(TEXT))
        first, end = len(BEFORE) // R + 1, (len(BEFORE) + len(NEEDLE)) // R - 1
        columns = (blocks[:-1] >= first) & (blocks[1:] <= end)
        assert int(columns.sum()) > 8
        inside = layer.heat.share[rows][:, columns].mean()
        outside = layer.heat.share[rows][:, ~columns].nanmean()
        shares[layer.layer_id] = float(inside), float(outside)
    inside, outside = shares[PLANTED_LAYER]
    assert inside > 0.7
    assert outside < 0.1
    assert shares[OTHER_LAYER][0] < 0.4


class _Page(HTMLParser):
    """Open tags, links, ids and pictures of a page."""

    EMPTY = ("meta", "img", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def values(self, wanted: str) -> list[str]:
        return [value for _, name, value in self.attributes if name == wanted]


def _read_page(file: Path) -> _Page:
    page = _Page()
    page.feed(file.read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    return page


def test_the_report_is_whole_and_fetches_nothing(inspected: tuple[Path, str]) -> None:
    page = _read_page(inspected[0] / "report.html")
    sources = page.values("src")
    assert len(sources) == 3, "overlap, and two layers"
    for source in sources:
        head, _, data = source.partition(",")
        assert head == "data:image/svg+xml;base64"
        root = ElementTree.fromstring(base64.b64decode(data))
        assert root.tag.endswith("svg")
        for element in root.iter():
            for name, value in element.attrib.items():
                assert not name.endswith("href") or value.startswith(("#", "data:image/png;base64,"))
    assert {href.removeprefix("#") for href in page.values("href")} <= set(page.values("id"))
    assert set(page.values("id")) == {"layer-3", "layer-7"}
    assert not {tag for tag, _, _ in page.attributes} & {"script", "link", "iframe"}
    assert all(page.values("alt"))
    text = " ".join(page.text)
    result = json.loads(inspected[1])
    for layer in result["layers"]:
        for name in ("context_share", "neighbour_overlap", "kept_mass", "best_mass", "recent_mass"):
            assert f"{layer[name]:.1%}" in text


def test_the_picture_of_a_layer_has_its_parts(inspected: tuple[Path, str]) -> None:
    root = ElementTree.parse(inspected[0] / "layer.svg").getroot()
    texts = {"".join(element.itertext()).strip() for element in root.iter() if element.tag.endswith("text")}
    assert {"QSA layer 3", "selected: share of the pairs in a cell", "context attended", "overlap with the row before",
            "visible blocks selected", "dense mass kept", "position of the row"} <= texts  # fmt: skip
    assert "dense attention: share of a row's mass, 9 rows" in texts


def test_inspect_of_a_recording_is_that_of_its_checkpoint(
    inspected: tuple[Path, str], capfd: Capture, tmp_path: Path, assert_form: Callable[[Any, Any], None]
) -> None:
    live = json.loads(inspected[1])
    read = _json(capfd, inspected[0] / "rec.safetensors", "--plot", tmp_path / "layer.png")
    assert_form(read, FORM)
    assert read["run"] is None
    assert read["kind"] == "recording"
    without_mass = {"kept_mass", "best_mass", "recent_mass", "mass"}
    for mine, theirs in zip(read["layers"], live["layers"], strict=True):
        assert all(mine[name] is None for name in without_mass)
        assert {k: v for k, v in mine.items() if k not in without_mass} == {
            k: v for k, v in theirs.items() if k not in without_mass
        }
    assert read["layer_overlap"] == live["layer_overlap"]
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")


def test_inspect_of_one_layer_for_people(inspected: tuple[Path, str], capfd: Capture) -> None:
    assert main(["inspect", str(inspected[0] / "rec.safetensors"), "--layer", "7", "--steps", "0-1"]) == 0
    out = capfd.readouterr().out
    assert f"recorded: request 0, 2 forwards, {len(TEXT)} rows" in out
    assert "not in a recording" in out
    assert "overlap between layers" not in out
    assert all(len(line) <= 80 for line in out.splitlines()[1:])


@pytest.fixture
def batch_recording(tmp_path: Path) -> Path:
    """Two requests of 40 and 30 tokens that select their newest blocks; then a second prompt of request 0."""
    recording = Recording(R, (5,))
    for tokens in ((40, 30), (9,)):
        pairs = [(request, p) for request, count in enumerate(tokens) for p in range(count)]
        requests, positions = torch.tensor(pairs).T
        visible = ((positions + 1) // R).to(torch.int32)
        counts = visible.clamp(max=2)
        ids = visible[:, None] - counts[:, None] + torch.arange(2, dtype=torch.int32)
        ids = torch.where(torch.arange(2)[None] < counts[:, None], ids, -1).to(torch.int32)
        record = {5: LayerRecord(ids, counts, visible)}
        recording.steps.append(StepRecord(requests.to(torch.int32), positions.contiguous(), record))
    path = tmp_path / "batch.safetensors"
    recording.save(path)
    return path


def test_inspect_of_a_request_in_a_batch(batch_recording: Path, capfd: Capture) -> None:
    result = _json(capfd, batch_recording, "--request", 1)
    (layer,) = result["layers"]
    assert (layer["rows"], layer["sparse_rows"], layer["median_distance"]) == (30, 19, 0)
    assert result["layer_overlap"] == [[1.0]]
    dense = _json(capfd, batch_recording, "--steps", 1)
    assert dense["layers"][0]["sparse_rows"] == 0
    assert dense["layers"][0]["neighbour_overlap"] is None
    assert dense["layer_overlap"] == [[None]]


def test_inspect_of_dense_rows_draws_and_says_so(batch_recording: Path, capfd: Capture, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    assert main(["inspect", str(batch_recording), "--steps", "1", "--html", str(report)]) == 0
    assert "attention was dense" in capfd.readouterr().out
    assert "attention was dense" in " ".join(_read_page(report).text)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_inspect_of_short_prompts(small_checkpoint: Path, capfd: Capture, tmp_path: Path, tokens: int) -> None:
    words = (small_checkpoint, "--random-tokens", tokens, *CPU, "--html", tmp_path / "report.html")
    result = _json(capfd, *words)
    (layer,) = result["layers"]
    assert layer["rows"] == tokens
    assert (layer["mass"] is None) == (tokens < 36)
    assert (layer["median_distance"] is None) == (tokens < 4)
    assert not [name for name, value in layer.items() if value != value], "no NaN"


def test_inspect_without_weighed_rows(small_checkpoint: Path, capfd: Capture) -> None:
    result = _json(capfd, small_checkpoint, "--random-tokens", 50, "--mass-rows", 0, *CPU)
    assert result["layers"][0]["mass"] is None


def test_names_are_text_in_the_report(small_checkpoint: Path, tmp_path: Path, capfd: Capture) -> None:
    odd = tmp_path / '<b>&amp; "quoted"'
    odd.symlink_to(small_checkpoint, target_is_directory=True)
    _json(capfd, odd, "--random-tokens", 40, *CPU, "--html", tmp_path / "r.html")
    page = _read_page(tmp_path / "r.html")
    assert '<b>&amp; "quoted"' in " ".join(page.text)
    assert "b" not in {tag for tag, _, _ in page.attributes}


def test_sampled_positions() -> None:
    assert sample_positions(10, 20, 100).tolist() == list(range(10, 20))
    assert sample_positions(0, 1000, 3).tolist() == [0, 500, 999]
    assert sample_positions(0, 1000, 1).tolist() == [999]
    assert sample_positions(10, 10, 5).numel() == sample_positions(0, 9, 0).numel() == 0


def test_lines_and_medians() -> None:
    positions = torch.arange(1000)
    line = _line(positions, torch.where(positions % 2 == 0, 0.25, torch.nan))
    assert line.shape == (2, LINE_POINTS)
    assert bool((line[1] == 0.25).all())
    assert float(line[0].mean()) == pytest.approx(499, abs=2)
    assert _line(positions, torch.full((1000,), torch.nan)).shape == (2, 0)
    edges = torch.tensor([0, 4, 8, 12])
    assert _median(edges, torch.tensor([1, 1, 1])) == 4
    assert _median(edges, torch.tensor([2, 0, 2])) == 0
    assert _median(edges, torch.tensor([0, 0, 0])) is None


def test_a_layer_with_weighed_rows_is_drawn(batch_recording: Path) -> None:
    """The map of dense attention has the mass where it belongs, grey where nothing is visible yet."""
    from flashqsa.commands.inspect_plots import draw_layer

    mass = MassRows(
        torch.tensor([11, 39]), torch.tensor([0.5, 0.6]), torch.tensor([0.9, 0.9]), torch.tensor([0.1, 0.2]),
        torch.tensor([[0.7, 0.3, 0.0, 0.0, 0.0], [0.2, 0.2, 0.2, 0.2, 0.2]]), torch.tensor([0, 2, 4, 6, 8, 10]),
    )  # fmt: skip
    recording = Recording.load(batch_recording)
    study = study_recording(recording, {5: mass}, layer_ids=(5,), steps=range(1))
    figure = draw_layer(study.layers[0], R)
    image = next(ax for ax in figure.axes if ax.get_title(loc="left").startswith("dense attention")).images[0]
    shown = image.get_array()
    assert shown.mask.tolist() == [[False, False, True, True, True], [False] * 5]
    assert float(shown[0, 0]) == pytest.approx(0.7)
    assert image.get_extent() == [0, 40, 40, 11]


@pytest.fixture
def refused_inspect(capfd: Capture) -> Refuse:
    def run(*words: Any, told: str) -> None:
        assert main(["inspect", *map(str, words)]) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert line.startswith("flashqsa: ")
        assert told in line, line

    return run


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "inspect: exactly one of --prompt, --prompt-file, --random-tokens must be given, got none"),
        (["--random-tokens", "5", "--layer", "2"], "layer must be one of [3], got 2"),
        (["--random-tokens", "5", "--mass-rows", "-1"], "mass-rows must be at least 0"),
        (["--random-tokens", "5", "--request", "1"], "request must come with a recording"),
        (["--random-tokens", "5", "--steps", "1"], "steps must come with a recording"),
        (["--random-tokens", "5", "--plot", "a.pdf"], "plot must end in .png or .svg"),
        (["--random-tokens", "5", "--html", "a.txt"], "html must end in .html or .htm"),
        (["--random-tokens", "5", "--save", "a.bin"], "save must end in .safetensors"),
        (["--random-tokens", "5", "--html", "no/such/folder/a.html"], "html must be a file that can be written"),
        (["--random-tokens", "5", "--html", "a" * 300 + ".html"], "html must be a file that can be written"),
        (["--random-tokens", "5", "--device", "cuda:99"], "inspect: device must be there"),
        (["--prompt", "a", "--seed", "3"], "inspect: seed must come with --random-tokens"),
    ],
)
def test_inspect_tells_a_bad_option_in_one_line(
    words: list[str], told: str, small_checkpoint: Path, refused_inspect: Refuse
) -> None:
    refused_inspect(small_checkpoint, *words, told=told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--prompt", "a"], "a prompt must be left out with a recording"),
        (["--dtype", "float32"], "how to run must be left out with a recording"),
        (["--mass-rows", "4"], "mass-rows must be left out with a recording"),
        (["--save", "b.safetensors"], "save must be left out with a recording"),
        (["--layer", "3"], "layer must be one of [5], got 3"),
        (["--request", "2"], "request_id must be one of [0, 1], got 2"),
        (["--steps", "0-2"], "steps must be such as 0-12, within the recording's 2, got 0-2"),
        (["--steps", "1-0"], "steps must be such as 0-12"),
        (["--steps", "some"], "steps must be such as 0-12"),
        ([], "steps must hold one prompt of request 0, got positions that go back to 0"),
    ],
)
def test_inspect_of_a_recording_tells_a_bad_option_in_one_line(
    words: list[str], told: str, batch_recording: Path, refused_inspect: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(batch_recording.parent)
    refused_inspect(batch_recording, *words, told=told)


def _damaged(path: Path, how: Callable[[LayerRecord], Any]) -> Path:
    recording = Recording.load(path)
    how(recording.steps[0].layers[5])
    recording.save(path)
    return path


@pytest.mark.parametrize(
    "how",
    [
        lambda layer: layer.block_ids[20].fill_(9),
        lambda layer: layer.block_ids[20].copy_(layer.block_ids[20].flip(0)),
        lambda layer: layer.block_counts[20].fill_(3),
        lambda layer: layer.block_counts[20].fill_(-1),
        lambda layer: layer.visible_blocks[20].fill_(6),
        lambda layer: layer.block_ids[20].fill_(-1),
    ],
)
def test_inspect_refuses_ids_that_no_selection_holds(
    how: Callable[[LayerRecord], Any], batch_recording: Path, refused_inspect: Refuse
) -> None:
    refused_inspect(
        _damaged(batch_recording, how), "--request", 0, "--steps", 0, told="must hold ascending ids of visible blocks"
    )


def test_inspect_tells_a_bad_source_in_one_line(
    tmp_path: Path, batch_recording: Path, changed: Changed, refused_inspect: Refuse
) -> None:
    from safetensors.torch import load_file, save_file

    refused_inspect(
        tmp_path / "nowhere", "--random-tokens", 5, told="source must be a checkpoint's folder or a recording"
    )
    refused_inspect("a" * 300, "--random-tokens", 5, told="source must be a checkpoint's folder or a recording")
    refused_inspect(tmp_path, "--random-tokens", 5, told="must hold a config.json")
    text = tmp_path / "a.txt"
    text.write_text("no recording")
    refused_inspect(text, told="no safetensors file")
    tensors = load_file(batch_recording)
    for about in ("{", "[]", "{}", '{"block_tokens": 4, "layer_ids": 3, "steps": 1}'):
        save_file(tensors, text, metadata={"format": "flashqsa.recording", "version": "1", "recording": about})
        refused_inspect(text, told="source must be a recording that can be read")
    path = changed(lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100))
    refused_inspect(path, "--random-tokens", 5, *CPU, told="flashqsa: inspect: checkpoint must hold weights")


def test_inspect_tells_a_recording_that_cannot_be_read(
    batch_recording: Path, refused_inspect: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Recording, "load", refuse)
    refused_inspect(batch_recording, told="source must be a recording that can be read, got")


@pytest.mark.parametrize("at", ["record_prompt", "study_recording", "_write_outputs"])
def test_inspect_interrupted_leaves_no_file(
    at: str, small_checkpoint: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_command, at, interrupt)
    words = ("--random-tokens", "20", "--html", str(tmp_path / "r.html"), "--plot", str(tmp_path / "p.png"), *CPU)
    assert main(["inspect", str(small_checkpoint), *words]) == 130
    assert capfd.readouterr().err == "flashqsa: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_writing_leaves_the_old_file(
    small_checkpoint: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = tmp_path / "r.html"
    report.write_text("old")

    def fail(path: Path, text: str) -> None:
        path.write_text(text[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inspect_command, "_write_text", fail)
    assert main(["inspect", str(small_checkpoint), "--random-tokens", "20", "--html", str(report), *CPU]) == 2
    assert "No space left on device" in capfd.readouterr().err
    assert report.read_text() == "old"
    assert list(tmp_path.iterdir()) == [report]


def test_recorded_rows_are_those_of_the_recording(batch_recording: Path) -> None:
    rows = recorded_rows(Recording.load(batch_recording), 5, 1, range(1))
    assert rows.positions.tolist() == list(range(30))
    assert context_share(rows).shape == (30,)


def test_inspect_without_matplotlib_says_so_before_the_work(
    small_checkpoint: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delitem(sys.modules, "flashqsa.commands.inspect_figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert (
        main(["inspect", str(small_checkpoint), "--random-tokens", "9", "--html", str(tmp_path / "r.html"), *CPU]) == 2
    )
    captured = capfd.readouterr()
    assert captured.out == ""
    told = "flashqsa: the command line needs matplotlib, which is not installed. Run: pip install 'flashqsa[cli]'\n"
    assert captured.err == told
    assert list(tmp_path.iterdir()) == []


def test_the_documentation_names_all_fields() -> None:
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text(encoding="utf-8")
    section = page.partition("## flashqsa inspect")[2].partition("\n## ")[0]
    names = {*FORM, *RUN, *LAYER, "positions", "kept", "best", "recent", "edges", "selected", "visible"}
    for name in names:
        assert f"`{name}`" in section, name
