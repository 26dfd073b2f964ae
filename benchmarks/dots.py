"""A dot plot as SVG: a line a workload, a mark a peer, on a logarithmic axis. Readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from benchmarks.charts import COLOURS, STYLE, mark

ROW, LEFT, WIDTH, TOP, BOTTOM = 20, 240, 860, 64, 40
MARKS = ("circle", "square", "diamond", "triangle", "bar")
OWN = "#2f7fd1"
"""The colour of the first series: what the plot is about."""


@dataclass(frozen=True)
class Dots:
    """`rows`: a label and the value of each series that has one, 1 or more."""

    title: str
    x_label: str
    series: Sequence[str]
    rows: Sequence[tuple[str, Mapping[str, float]]]


def dots(plot: Dots) -> str:
    values = [value for _, row in plot.rows for value in row.values()]
    top = max([*values, 2.0])
    height = TOP + ROW * len(plot.rows) + BOTTOM

    def across(value: float) -> float:
        return LEFT + math.log(max(value, 1.0)) / math.log(top) * (WIDTH - LEFT - 30)

    parts = [f'<text class="title" x="12" y="20">{escape(plot.title)}</text>']
    for tick in (1, 1.5, 2, 3, 5, 10, 20, 50, 100, 200, 500):
        if tick <= top:
            parts.append(f'<path class="grid" d="M{across(tick):.1f} {TOP - 8}V{height - BOTTOM}"/>')
            parts.append(
                f'<text x="{across(tick):.1f}" y="{height - BOTTOM + 18}" text-anchor="middle">{tick:g}</text>'
            )
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{height - 6}" text-anchor="middle">{escape(plot.x_label)}</text>')
    x = float(LEFT)
    for number, name in enumerate(plot.series):
        parts.append(_mark(number, x, 36))
        parts.append(f'<text x="{x + 10}" y="40">{escape(name)}</text>')
        x += 34 + 6.6 * len(name)
    for index, (label, row) in enumerate(plot.rows):
        y = TOP + ROW * index + ROW / 2
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4:.1f}" text-anchor="end">{escape(label)}</text>')
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - 20}"/>')
        for number in reversed(range(len(plot.series))):  # the first on top
            value = row.get(plot.series[number])
            if value is not None:
                parts.append(_mark(number, across(value), y))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(plot.title)}">\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _mark(number: int, x: float, y: float) -> str:
    colour = (OWN, *COLOURS)[number]
    if MARKS[number] == "bar":
        return f'<path d="M{x - 1.5:.1f} {y - 6:.1f}h3v12h-3z" fill="{colour}"/>'
    return mark(MARKS[number], colour, x, y)
