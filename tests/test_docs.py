"""README and docs: Python blocks run, links lead somewhere, pictures exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")])
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "reported" / "README.md"]
FENCED = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|href|srcset)=\"([^\"]+)\"")
LARGEST_PICTURE = 25_000
LARGEST_SCREENSHOT = 75_000
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Line and text of each fenced block in a language."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start(2)) + 1, found[2]) for found in FENCED.finditer(text) if found[1] == language
    ]


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the `tiny-checkpoint` that pages have written by `flashqsa tiny tiny-checkpoint`."""
    pytest.importorskip("transformers")
    from flashqsa.commands.tiny_checkpoint import TinyOptions, write_tiny_checkpoint

    folder = tmp_path_factory.mktemp("docs")
    write_tiny_checkpoint(folder / "tiny-checkpoint", TinyOptions())
    return folder


@pytest.mark.transformers
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=page_id)
def test_python_blocks_run(page: Path, checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """In order, one namespace a page, in a folder with a tiny checkpoint."""
    monkeypatch.chdir(checkpoint_folder)
    names: dict[str, object] = {"__name__": "__page__"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for line, text in blocks(page, "python"):
            code = compile("\n" * (line - 1) + text, page_id(page), "exec")
            exec(code, names)


@pytest.mark.parametrize("page", LINKING, ids=page_id)
def test_links_and_images_exist(page: Path):
    for found in LINK.finditer(prose(page)):
        target = found[1] or found[2]
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page_id(page)}: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page_id(page)}: {target}"


COMMANDS = [
    pytest.param(page, shlex.split(line, comments=True)[1:], id=f"{page_id(page)}: {line[:60].strip()}")
    for page in LINKING
    for line in re.findall(r"^ *(?:\$ )?(flashqsa (?!.*[A-Z]{4}).*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    if not line.startswith("flashqsa: ")
]
"""Command lines, without those that name a placeholder in capitals."""


@pytest.mark.transformers
@pytest.mark.parametrize(("page", "words"), COMMANDS)
def test_command_lines_are_understood_and_those_of_the_readme_run(
    page: Path, words: list[str], checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    typer = pytest.importorskip("typer")
    from flashqsa.commands.app import build_app, main

    words = words[: words.index(">")] if ">" in words else words
    typer.main.get_command(build_app()).commands[words[0]].make_context(words[0], words[1:])
    if page.name == "README.md":
        monkeypatch.chdir(checkpoint_folder)
        again = ["--force"] if words[0] == "tiny" else []
        assert main([*words, *again]) == 0


def anchors(page: Path) -> set[str]:
    """Names of a page's headings as links use them."""
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(prose(page)))
    return {heading.strip().replace(" ", "-") for heading in kept}


def test_every_picture_is_shown_somewhere_and_adapts_to_dark_pages():
    shown = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = list((ROOT / "docs" / "img").iterdir())
    assert pictures
    for picture in pictures:
        assert f"img/{picture.name}" in shown, picture.name
        largest = LARGEST_SCREENSHOT if picture.name == "report.png" else LARGEST_PICTURE
        assert picture.stat().st_size < largest, picture.name
        if picture.suffix == ".png":  # it has a page of its own
            continue
        text = picture.read_text(encoding="utf-8")
        assert "prefers-color-scheme: dark" in text, picture.name
        assert "<title" in text, picture.name


def test_every_page_is_reached_from_the_readme():
    linked = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f"(docs/{page.name}" in linked, page.name


def test_numerics_and_contracts_name_the_tiles_of_the_code():
    from flashqsa.attention.plain import PIECE_TOKENS
    from flashqsa.attention.tiles import SPLITS, TILE_ROWS
    from flashqsa.selection.plain import BLOCK_TILE, ROW_TILE

    numerics, contracts = (
        " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split()) for name in ("numerics.md", "contracts.md")
    )
    assert f"products of one shape, {ROW_TILE} rows \N{MULTIPLICATION SIGN} {BLOCK_TILE:,} blocks" in numerics
    assert f"`position % {ROW_TILE}` of its tile and a block at `id % {BLOCK_TILE}`" in numerics
    assert f"{PIECE_TOKENS:,} tokens at a time" in numerics
    *lower, last = (str(rows) for rows in SPLITS[1:])
    assert f"multiples of {TILE_ROWS} tokens of the request and are split to {', '.join(lower)} or {last}" in numerics
    assert f"absolute multiples of {TILE_ROWS} tokens" in contracts


def test_numerics_name_the_segments_and_tiles_of_the_kernels():
    pytest.importorskip("triton")
    from flashqsa.attention.triton_attend import tile_rows
    from flashqsa.attention.triton_rows import GROUP_SEGMENTS, SEGMENT_TOKENS

    numerics = " ".join((ROOT / "docs" / "numerics.md").read_text(encoding="utf-8").split())
    assert f"segments of {SEGMENT_TOKENS}," in numerics
    assert (GROUP_SEGMENTS == 4) == ("Four segments merge" in numerics)
    few, more, most = (tile_rows(group) for group in (12, 6, 3))
    assert f"{few}, {more} or {most} at 12, 6 or 3 query heads a KV head" in numerics


def test_contracts_name_every_error():
    from flashqsa import errors

    listed = set(re.findall(r"^\| `(\w+Error)` \| `(\w+)`", prose(ROOT / "docs" / "contracts.md"), re.MULTILINE))
    known = {
        (name, kind.__bases__[1].__name__)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and name.endswith("Error") and kind is not errors.FlashQSAError
    }
    assert listed == known
