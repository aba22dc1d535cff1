"""The report of `flashqsa inspect` in a real browser, where headless Chromium is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from html import unescape
from pathlib import Path

import pytest

from flashqsa.commands.app import main
from flashqsa.commands.needle_prompt import FILLER

pytest.importorskip("transformers")
image = pytest.importorskip("matplotlib.image")

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.transformers,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]

NEEDLE, QUESTION = "\nZQXZXQXZZQXQZXXQZQXZ\n" * 3, "\n" + "?" * 100
TEXT = " ".join(FILLER[:8])[:300] + NEEDLE + " ".join(FILLER[8:])[:100] + QUESTION
YELLOW = (253 / 255, 231 / 255, 37 / 255)
"""Of a cell that is selected throughout."""

PROBE = """<script>addEventListener("load", () => { document.body.dataset.seen = JSON.stringify({
  pictures: [...document.images].map(picture => [picture.complete, picture.naturalWidth, picture.naturalHeight]),
  fetched: performance.getEntriesByType("resource").map(entry => entry.name.slice(0, 60)),
  wide: document.documentElement.scrollWidth - innerWidth,
  page: getComputedStyle(document.body).backgroundColor,
}); });</script>"""
"""Tells what the browser made of the page. The report itself has no script."""


def _chromium(folder: Path, page: Path, *words: str) -> str:
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", *words]
    command += [f"--user-data-dir={folder / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def report(planted_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a prompt whose question, the rows from 467 on, selects the needle at tokens 300 to 365."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    words = ["--prompt", TEXT, "--no-chat", "--html", str(file), "--mass-rows", "16", "--quiet"]
    assert main(["inspect", str(planted_checkpoint), *words, "--device", "cpu", "--threads", "1"]) == 0
    return file


@pytest.mark.parametrize("width", [1000, 500])
def test_a_browser_shows_every_picture_and_fetches_nothing(report: Path, tmp_path: Path, width: int) -> None:
    page = tmp_path / "probed.html"
    page.write_text(report.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    shown = _chromium(tmp_path, page, f"--window-size={width},2600", "--virtual-time-budget=5000", "--dump-dom")
    seen = json.loads(unescape(re.search(r'data-seen="([^"]+)"', shown)[1]))
    assert len(seen["pictures"]) == 3, "overlap, and two layers"
    for complete, picture_width, picture_height in seen["pictures"]:
        assert complete
        assert min(picture_width, picture_height) > 100
    assert all(name.startswith("data:") for name in seen["fetched"])
    assert seen["wide"] <= 0, "nothing reaches beyond the window"
    assert seen["page"] == "rgb(251, 251, 249)", "the page's own style"


def test_a_screenshot_shows_what_is_planted(report: Path, tmp_path: Path) -> None:
    """In the map of the planted layer the question's rows are yellow at the needle and dark elsewhere."""
    shot = tmp_path / "shot.png"
    _chromium(tmp_path, report, "--window-size=1000,2600", f"--screenshot={shot}")
    pixels = image.imread(shot)[..., :3]
    yellow = (abs(pixels - YELLOW) < 0.02).all(axis=-1)
    places: Counter[tuple[int, int]] = Counter()
    for line in yellow[:, :500]:
        if line.any():
            first, last = line.nonzero()[0][[0, -1]].tolist()
            if line[first : last + 1].all() and 30 < last - first < 60:  # 65 of 567 tokens
                places[first, last] += 1
    assert places.most_common(1)[0][1] > 30, "101 of 567 rows"
