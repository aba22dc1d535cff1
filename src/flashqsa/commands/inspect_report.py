"""The HTML report of `flashqsa inspect`: one file, pictures inside, nothing fetched and nothing to run."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from html import escape
from typing import Any

from flashqsa import __version__
from flashqsa.commands.inspect_figures import figure_bytes
from flashqsa.commands.inspect_output import COLUMNS, InspectOutcome, cell
from flashqsa.commands.inspect_plots import draw_layer, draw_overlap
from flashqsa.commands.inspect_study import Study

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --page: #fbfbf9; --line: #d9d9d4; --soft: #5f6b7a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e3; --page: #181b20; --line: #3a4049; --soft: #9aa5b1; } }
body { margin: 0 auto; max-width: 1100px; padding: 1.5rem; font: 16px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--page); }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .4rem 0; } .soft, figcaption, footer { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem .7rem; border-bottom: 1px solid var(--line); } th { font-weight: 600; }
figure { margin: .5rem 0 0; }
img { box-sizing: border-box; max-width: 100%; height: auto; background: #fff; border-radius: 6px; padding: 6px; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1rem; } nav a { margin-right: .8rem; } a { color: inherit; }
footer { margin-top: 2rem; border-top: 1px solid var(--line); padding-top: .6rem; }
"""

MEANINGS = {
    "sparse rows": "rows that saw more blocks than they selected; the means of the other columns are over them, but "
    "for context attended and median distance, which are over all rows",
    "context attended": "share of the tokens in sight that a row attends: its blocks and the open block's tokens",
    "neighbour overlap": "share of a row's blocks that the row before it selected too",
    "by chance": "the overlap of two rows that select at random: the share of visible blocks that is selected",
    "median distance": "tokens from the last token of a selected block to the row",
    "mass kept": "share of the attention of a dense model that falls on what the row attends, mean over query heads",
    "best": "the most that as many blocks could keep",
    "newest": "what as many of the newest blocks would keep: a sliding window",
}


def make_report(outcome: InspectOutcome) -> str:
    """The report as one HTML page.

    Args:
        outcome: What was found.
    """
    return "\n".join(_lines(outcome)) + "\n"


def _lines(outcome: InspectOutcome) -> Iterator[str]:
    study = outcome.study
    title = f"What {outcome.source} selects"
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
    yield f'<h1>{escape(title)}</h1><p class="soft">{escape(outcome.about)}</p>'
    yield "<h2>Layers</h2>"
    yield from _table(study)
    if any(layer.sparse_rows for layer in study.layers):
        yield "<details><summary>What the columns mean</summary><dl>"
        yield from (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in MEANINGS.items())
        yield "</dl></details>"
    else:
        yield "<p>No row saw more blocks than it selected: attention was dense.</p>"
    if len(study.layers) > 1 and study.overlap_rows:
        caption = f"Mean over {study.overlap_rows:,} rows that are sparse in all of these layers."
        yield "<h2>Overlap between layers</h2>"
        yield _picture(draw_overlap(study), "Share of one layer's blocks that another layer selects too", caption)
    yield "<h2>How to read the pictures</h2>"
    yield f"<p>{escape(_reading(any(layer.mass is not None for layer in study.layers)))}</p>"
    for layer in study.layers:
        yield f'<h2 id="layer-{layer.layer_id}">Layer {layer.layer_id}</h2>'
        alternative = f"Blocks selected by the rows of layer {layer.layer_id}, and curves over positions"
        yield _picture(draw_layer(layer, study.block_tokens), alternative)
    yield f"<footer>flashqsa {escape(__version__)} inspect</footer></body></html>"


def _table(study: Study) -> Iterator[str]:
    yield '<div class="wide"><table><thead><tr>'
    yield "".join(f"<th>{escape(heading)}</th>" for heading in COLUMNS) + "</tr></thead><tbody>"
    for layer in study.layers:
        cells = [escape(cell(layer, name)) for name in COLUMNS.values()]
        cells[0] = f'<a href="#layer-{layer.layer_id}">{cells[0]}</a>'
        yield "<tr>" + "".join(f"<td>{text}</td>" for text in cells) + "</tr>"
    yield "</tbody></table></div>"


def _reading(weighed: bool) -> str:
    text = (
        "Rows run from top to bottom, the tokens that they may attend from left to right; grey is not visible yet. A "
        "cell holds many rows and blocks; its colour is the share of its pairs that is selected, on a log scale."
    )
    if weighed:
        text += (
            " Beside it stands the attention of a dense model in some of these rows, which the selection should follow."
        )
    return text


def _picture(figure: Any, alternative: str, caption: str = "") -> str:
    data = base64.b64encode(figure_bytes(figure, "svg")).decode("ascii")
    told = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure><img alt="{escape(alternative)}" src="data:image/svg+xml;base64,{data}">{told}</figure>'
