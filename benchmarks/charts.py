"""A small line chart as SVG, without a library: panels side by side, one legend. Readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 400, 300  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 62, 18, 40, 52  # margins in a panel
LEGEND = 34
COLOURS = ("#d1603d", "#b8860b", "#7a6fd0", "#1f8a70")
MARKS = ("circle", "square", "diamond", "triangle")
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #748089 }
.title { font-weight: 600; font-size: 13px }
.axis { stroke: #748089; fill: none }
.grid { stroke: #748089; stroke-opacity: 0.3; fill: none }
"""
"""Greys half way: readable on white and on black alike, whatever the page says or the viewer understands."""


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """All panels of a chart have the same series, in the same order. With `log`, all values are above zero."""

    title: str
    x_label: str
    lines: Sequence[Series]
    log: bool = False


def chart(panels: Sequence[Panel]) -> str:
    width, height = WIDTH * len(panels), HEIGHT + LEGEND
    body = "".join(
        f'<g transform="translate({WIDTH * n},{LEGEND})">{_panel(panel)}</g>\n' for n, panel in enumerate(panels)
    )
    names = ", ".join(panel.title for panel in panels)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(names)}">\n<style>{STYLE}</style>\n{_legend(panels[0].lines)}\n{body}</svg>\n'
    )


def ticks(low: float, high: float, log: bool) -> list[float]:
    """Round values that enclose `low` to `high`."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**n for n in range(first, max(last, first + 1) + 1)]
    rough = high / 4
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 2.5, 5, 10) if size * m >= rough)
    return [step * n for n in range(math.ceil(high / step) + 1)]


def _panel(panel: Panel) -> str:
    xs = sorted({x for line in panel.lines for x, _ in line.points})
    ys = [y for line in panel.lines for _, y in line.points]
    marks = ticks(min(ys), max(ys), panel.log)

    def across(x: float) -> float:
        spread = (xs[-1] - xs[0]) or 1
        return LEFT + 16 + (x - xs[0]) / spread * (WIDTH - LEFT - RIGHT - 32)

    def up(y: float) -> float:
        low, high, value = (math.log10(v) if panel.log else v for v in (marks[0], marks[-1], y))
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text class="title" x="{LEFT}" y="{TOP - 16}">{escape(panel.title)}</text>']
    for mark in marks:
        parts.append(f'<path class="grid" d="M{LEFT} {up(mark):.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{up(mark) + 4:.1f}" text-anchor="end">{mark:,.10g}</text>')
    for x in xs:
        parts.append(f'<path class="axis" d="M{across(x):.1f} {HEIGHT - BOTTOM}v5"/>')
        parts.append(f'<text x="{across(x):.1f}" y="{HEIGHT - BOTTOM + 19}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">{escape(panel.x_label)}</text>')
    for number, line in enumerate(panel.lines):
        points = [(across(x), up(y)) for x, y in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[number]}" stroke-width="2"/>')
        parts += [_mark(number, x, y) for x, y in points]
    return "\n".join(parts)


def _legend(lines: Sequence[Series]) -> str:
    parts, x = [], float(LEFT)
    for number, line in enumerate(lines):
        parts.append(_mark(number, x, 20))
        parts.append(f'<text x="{x + 10}" y="24">{escape(line.name)}</text>')
        x += 34 + 6.6 * len(line.name)
    return "\n".join(parts)


def _mark(number: int, x: float, y: float) -> str:
    """One shape a series, so that nobody needs the colours."""
    return mark(MARKS[number], COLOURS[number], x, y)


def mark(shape: str, colour: str, x: float, y: float) -> str:
    """Args: shape: of `MARKS`."""
    fill = f'fill="{colour}"'
    match shape:
        case "circle":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" {fill}/>'
        case "square":
            return f'<path d="M{x - 4:.1f} {y - 4:.1f}h8v8h-8z" {fill}/>'
        case "diamond":
            return f'<path d="M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z" {fill}/>'
        case _:
            return f'<path d="M{x:.1f} {y - 5.5:.1f}l5.5 10h-11z" {fill}/>'
