"""Pictures of the documentation drawn from the result files: plain SVG, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from benchmarks.tables import Row, rows_of

STYLE = """
    text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; fill: #1f2328; }
    .small { font-size: 12px; fill: #59636e; } .name { font-weight: 600; } .end { text-anchor: end; }
    .middle { text-anchor: middle; }
    .page { fill: #ffffff; stroke: #d0d7de; } .grid { stroke: #d0d7de; stroke-width: 1; }
    .line { fill: none; stroke-width: 2; } .a { stroke: #0969da; } .b { stroke: #bc4c00; } .c { stroke: #6e7781; }
    .d { stroke: #1a7f37; stroke-dasharray: 3 4; } .fa { fill: #54aeff; } .fb { fill: #ffb77c; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3; } .small { fill: #9da7b3; } .page { fill: #0d1117; stroke: #30363d; }
      .grid { stroke: #30363d; } .a { stroke: #58a6ff; } .b { stroke: #f0883e; } .c { stroke: #9da7b3; }
      .d { stroke: #3fb950; } .fa { fill: #1f6feb; } .fb { fill: #bd561d; }
    }
  """
CURVES = (
    ("flashqsa row_exact", "row by row", "c"),
    ("vllm attend", "vLLM 0.33", "b"),
    ("flashqsa attend", "FlashQSA", "a"),
)
GROWING = (("flashqsa", "FlashQSA", "a"), ("vllm", "vLLM 0.33", "b"), ("floor", "floor", "d"))
DECODES = ("1 x 8192", "1 x 131072", "1 x 1048576", "32 x 131072", "128 x 131072", "256 x 8192")


def pictures(decode: Sequence[Row], prefill: Sequence[Row], curves: Sequence[Row]) -> dict[str, str]:
    """SVG by file name; those without results are left out.

    Args:
        decode: Rows of gpu-decode.
        prefill: Rows of gpu-prefill.
        curves: Rows of gpu-curves.
    """
    made = {
        "overlap.svg": overlap_curve(rows_of(prefill, "gpu curve")),
        "time.svg": stage_shares(decode, prefill),
        "growth.svg": growth(curves),
    }
    return {name: text for name, text in made.items() if text is not None}


def overlap_curve(rows: Sequence[Row]) -> str | None:
    """Attention's time against the share of blocks that neighbouring rows have in common."""
    if not rows:
        return None
    rows = sorted(rows, key=lambda row: 1 - row["churn"])
    left, right, top, bottom, width, height = 60, 130, 44, 52, 760, 360
    times = {name: [row["times"].get(name, {}).get("median_us") for row in rows] for name, _, _ in CURVES}
    curves = [(label, style, times[name]) for name, label, style in CURVES if None not in times[name]]
    curves.append(("floor", "d", [row["floors_us"]["attend"] for row in rows]))
    most = max(max(values) for _, _, values in curves) / 1e3
    step = next(step for step in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if most / step <= 6)
    end = step * -(-most // step)

    def x(share: float) -> float:
        return left + share * (width - left - right)

    def y(ms: float) -> float:
        return height - bottom - ms / end * (height - top - bottom)

    first = rows[0]
    subject = f"{first['rows']:,} rows at {first['context']:,} tokens, {first['heads'][0]}/{first['heads'][1]} heads"
    parts = [_text(16, 27, f"Attention alone, {subject}: milliseconds", "name")]
    for tick in range(round(end / step) + 1):
        ms = tick * step
        parts.append(f'<path class="grid" d="M{left} {y(ms):.1f} H{width - right}"/>')
        parts.append(_text(left - 8, y(ms) + 4, f"{ms:g}", "small end"))
    parts += [_text(x(share / 5), height - bottom + 20, f"{share / 5:g}", "small middle") for share in range(6)]
    place = "share of its blocks that a row has in common with the row before it"
    parts.append(_text((left + width - right) / 2, height - 12, place, "small middle"))
    for label, style, values in curves:
        points = " ".join(f"{x(1 - row['churn']):.1f},{y(us / 1e3):.1f}" for row, us in zip(rows, values, strict=True))
        parts.append(f'<polyline class="line {style}" points="{points}"/>')
        parts.append(_text(x(1 - rows[-1]["churn"]) + 10, y(values[-1] / 1e3) + 4, label, ""))
    title = "Time of attention against the share of blocks that neighbouring rows have in common"
    return _page(width, height, title, parts)


def growth(rows: Sequence[Row]) -> str | None:
    """Time of selection and attention as one number of the step grows, a panel each; both axes are logarithmic."""
    axes: dict[str, str] = {}
    for row in rows:
        axes |= row["curves"]
    points = {name: sorted((row for row in rows if name in row["curves"]), key=lambda row: row[axes[name]])
              for name in axes}  # fmt: skip
    shown = [name for name in sorted(axes) if len(points[name]) > 1]
    if not shown:
        return None
    width, top, wide, high = 760, 52, 372, 260
    parts = [_text(16, 27, "Selection and attention as the work grows: microseconds", "name")]
    for place, (_, label, style) in enumerate(GROWING):
        x = 452 + 112 * place
        parts += [f'<path class="line {style}" d="M{x} 22 h24"/>', _text(x + 30, 27, label, "small")]
    for place, name in enumerate(shown):
        parts += _panel(8 + place % 2 * wide, top + place // 2 * high, wide, high, name, axes[name], points[name])
    return _page(width, top + -(-len(shown) // 2) * high, "Time of selection and attention as the work grows", parts)


def _panel(left: int, top: int, wide: int, high: int, name: str, axis: str, rows: Sequence[Row]) -> list[str]:
    """One curve of each contender and of the floor; a contender that was not measured everywhere is left out."""
    times = {
        "floor": [row["floor_us"] for row in rows],
        **{e: [row[e]["all"]["median_us"] for row in rows] for e in ("flashqsa", "vllm") if all(r[e] for r in rows)},
    }
    every = [us for values in times.values() for us in values]
    low = math.floor(math.log10(min(every)))
    most = max(low + 1, math.ceil(math.log10(max(every))))
    start, end = math.log2(rows[0][axis]), math.log2(rows[-1][axis])
    west, east, north, south = left + 52, left + wide - 16, top + 28, top + high - 28

    def x(number: float) -> float:
        return west + (math.log2(number) - start) / (end - start) * (east - west)

    def y(us: float) -> float:
        return south - (math.log10(us) - low) / (most - low) * (south - north)

    parts = [_text(west, top + 14, name, "small")]
    for power in range(low, most + 1):
        parts.append(f'<path class="grid" d="M{west} {y(10**power):.1f} H{east}"/>')
        parts.append(_text(west - 8, y(10**power) + 4, f"{10**power:,g}", "small end"))
    last = -math.inf
    for number in (row[axis] for row in rows):
        if x(number) - last > 26:
            last = x(number)
            parts.append(_text(last, south + 18, _short(number), "small middle"))
    for engine, _, style in GROWING:
        if engine in times:
            line = " ".join(f"{x(r[axis]):.1f},{y(us):.1f}" for r, us in zip(rows, times[engine], strict=True))
            parts.append(f'<polyline class="line {style}" points="{line}"/>')
    return parts


def _short(number: int) -> str:
    for power, unit in ((20, "M"), (10, "k")):
        if number >= 1 << power:
            return f"{number >> power}{unit}"
    return str(number)


def stage_shares(decode: Sequence[Row], prefill: Sequence[Row]) -> str | None:
    """Selection's and attention's share of their time, from one short request to a long prefill."""
    bars = [*_decode_bars(decode), *_prefill_bars(rows_of(prefill, "gpu prefill"))]
    if not bars:
        return None
    left, width, line = 232, 760, 30
    parts = [_text(16, 27, "Where the time of selection and attention goes", "name")]
    for place, (label, select, attend) in enumerate(bars):
        y, whole = 44 + place * line, width - left - 16
        split = whole * select / (select + attend)
        parts.append(_text(left - 10, y + 16, label, "small end"))
        parts.append(f'<rect class="fa" x="{left}" y="{y}" width="{split:.1f}" height="22"/>')
        parts.append(f'<rect class="fb" x="{left + split:.1f}" y="{y}" width="{whole - split:.1f}" height="22"/>')
        if split > 100:
            parts.append(_text(left + 8, y + 16, f"select {_time(select)}", ""))
        parts.append(_text(width - 24, y + 16, f"attend {_time(attend)}", "end"))
    return _page(width, 56 + len(bars) * line, "Share of selection and attention in their time", parts)


def _decode_bars(rows: Sequence[Row]) -> Iterable[tuple[str, float, float]]:
    by_name = {row["name"]: row["flashqsa"] for row in rows}
    for name in DECODES:
        if name in by_name:
            requests, _, context = name.partition(" x ")
            label = f"decode, {requests} x {int(context):,} tokens"
            yield label, *(by_name[name][stage]["median_us"] for stage in ("select", "attend"))


def _prefill_bars(rows: Sequence[Row]) -> Iterable[tuple[str, float, float]]:
    for row in rows:
        if row["requests"] == 1 and not row["fp8_index"] and row["keep"]:
            times: Mapping[str, Row] = row["times"]
            label = f"{row['rows']:,} rows at {row['context']:,} tokens"
            yield label, *(times[f"flashqsa {stage}"]["median_us"] for stage in ("select", "attend"))


def _time(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f} ms" if microseconds >= 1000 else f"{microseconds:.0f} us"


def _text(x: float, y: float, text: str, style: str) -> str:
    named = f' class="{style}"' if style else ""
    return f'<text{named} x="{x:.0f}" y="{y:.0f}">{escape(text)}</text>'


def _page(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    body = "\n  ".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-labelledby="title">\n'
        f'  <title id="title">{escape(title)}</title>\n  <style>{STYLE}</style>\n'
        f'  <rect class="page" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n  {body}\n</svg>\n'
    )
