"""The end of a run in one picture: a few characters, a plot in text, or a small SVG. No plotting library."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from statistics import fmean

from stoker.record.printable import printable

__all__ = ["Panel", "Series", "smooth", "sparkline", "svg", "text_plot", "ticks"]

Point = tuple[float, float]
BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a row of bars from the smallest to the largest, at most `width` characters (means of stretches)."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    count = min(width, len(values))
    cuts = [round(i * len(values) / count) for i in range(count + 1)]
    means = [fmean(values[a:b]) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[3] * count
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in means)


def smooth(points: Sequence[Point], window: int) -> list[Point]:
    """Running mean over the points up to window // 2 to either side."""
    half = window // 2
    return [(x, fmean(y for _, y in points[max(0, i - half) : i + half + 1])) for i, (x, _) in enumerate(points)]


def ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers (1, 2, 2.5 or 5 times a power of ten apart) within [low, high]."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    gap = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / gap - 1e-9)
    last = math.floor(high / gap + 1e-9)
    return [round(i * gap, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """An axis label: 0.5, 12, 4k, 2.5M."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size * (10 if suffix == "k" else 1):
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def text_plot(points: Sequence[Point], *, title: str, x_title: str, width: int = 72, height: int = 10) -> str:
    """A curve in braille dots (2 x 4 a character) with axes; a line break at the end of each row but the last."""
    finite = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not finite:
        return f"{printable(title)}: nothing to show"
    (x0, x1), (y0, y1) = _range([x for x, _ in finite], 0.0), _range([y for _, y in finite], 0.0)
    columns, rows = 2 * width, 4 * height
    dots = [[0] * width for _ in range(height)]
    at = [((x - x0) / (x1 - x0) * (columns - 1), (1 - (y - y0) / (y1 - y0)) * (rows - 1)) for x, y in sorted(finite)]
    for (ax, ay), (bx, by) in pairwise(at if len(at) > 1 else at * 2):
        steps = max(1, math.ceil(max(abs(bx - ax), abs(by - ay))))
        for i in range(steps + 1):
            column, row = round(ax + (bx - ax) * i / steps), round(ay + (by - ay) * i / steps)
            dots[row // 4][column // 2] |= _BRAILLE[row % 4][column % 2]
    labels = {0: f"{y1:.3g}", height - 1: f"{y0:.3g}"}
    margin = max(map(len, labels.values()))
    edges = [f"{labels.get(i, ''):>{margin}} {'┤' if i in labels else '│'}" for i in range(height)]
    lines = [edge + "".join(map(_dot, row_dots)) for edge, row_dots in zip(edges, dots, strict=True)]
    left, right = number(x0), number(x1)
    axis = " " * margin + " └" + "─" * width
    below = " " * (margin + 2) + left + printable(x_title).center(width - len(left) - len(right)) + right
    return "\n".join([" " * (margin + 2) + printable(title), *lines, axis, below])


_BRAILLE = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def _dot(bits: int) -> str:
    return chr(0x2800 + bits) if bits else " "


def _range(values: Sequence[float], room: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    if low == high:
        return low - 0.5, high + 0.5
    return low - room * (high - low), high + room * (high - low)


@dataclass(frozen=True)
class Series:
    """One line of a picture. `errors`: half-widths of a band around the points, as many as points."""

    name: str
    points: Sequence[Point]
    color: str = "#2563eb"
    errors: Sequence[float] = ()
    markers: bool = False
    faint: bool = False
    """Raw data behind a smoothed line of the same colour; has no label of its own."""


@dataclass(frozen=True)
class Panel:
    """One plot of a picture; all panels share the x axis."""

    title: str
    series: Sequence[Series]
    percent: bool = False
    y_range: Point | None = None
    """None: from the data."""
    least_span: float = 0.0
    """The axis spans at least this share of the largest value: noise on a steady line shall not look like change."""


@dataclass(frozen=True)
class _Frame:
    """Where data land on the page, in pixels."""

    x_range: Point
    y_range: Point
    left: float
    right: float
    top: float
    bottom: float

    def x(self, value: float) -> float:
        return self.left + (value - self.x_range[0]) / (self.x_range[1] - self.x_range[0]) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_range[0]) / (self.y_range[1] - self.y_range[0]) * (self.bottom - self.top)

    def path(self, points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


_STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", Arial, "DejaVu Sans", sans-serif; fill: #64748b }
  .title { font-size: 17px; font-weight: 600; fill: #0f172a }
  .panel { font-size: 13px; font-weight: 600; fill: #334155 }
  .end { font-size: 13px; font-weight: 600 }
  .line { fill: none; stroke-linejoin: round; stroke-linecap: round }
  .page { fill: #ffffff }
  .grid { stroke: #e8edf3; stroke-width: 1 }
  .axis { stroke: #94a3b8; stroke-width: 1 }
  @media (prefers-color-scheme: dark) {
    text { fill: #94a3b8 } .title { fill: #f1f5f9 } .panel { fill: #cbd5e1 } .page { fill: #0f172a }
    .grid { stroke: #1e293b } .axis { stroke: #475569 }
  }
"""


def svg(title: str, panels: Sequence[Panel], *, subtitle: str = "", x_title: str = "step", width: int = 860) -> str:
    """A picture with its panels below one another, as a self-contained SVG document.

    Points that are not finite are left out; a panel without points says so.
    """
    head, tall, gap = 78 if subtitle else 60, 190, 52
    height = head + len(panels) * (tall + gap) + 4
    xs = [x for panel in panels for series in panel.series for x, _ in _finite(series.points)]
    x_range = _range(xs, 0.0) if xs else (0.0, 1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{_safe(title)}">',
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{width}" height="{height}" rx="10"/>',
        f'<text class="title" x="28" y="36">{_safe(title)}</text>',
    ]
    if subtitle:
        parts.append(f'<text x="28" y="57">{_safe(subtitle)}</text>')
    for i, panel in enumerate(panels):
        top = head + i * (tall + gap) + 22
        parts += _panel(panel, _Frame(x_range, _y_range(panel), 76, width - 96, top, top + tall - 22))
    parts.append(_centred((76 + width - 96) / 2, height - 14, _safe(x_title)))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _safe(text: str) -> str:
    return escape(printable(text).replace("\n", " "))


def _centred(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{text}</text>'


def _finite(points: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]


def _y_range(panel: Panel) -> Point:
    if panel.y_range is not None:
        return panel.y_range
    ys = [y for series in panel.series for _, y in _finite(series.points)]
    for series in panel.series:
        ys += [y + sign * e for (_, y), e in zip(series.points, series.errors, strict=False) for sign in (-1, 1)]
    ys = [y for y in ys if math.isfinite(y)]
    low, high = _range(ys, 0.08) if ys else (0.0, 1.0)
    if ys and (missing := panel.least_span * max(map(abs, ys)) - (high - low)) > 0:
        low, high = low - missing / 2, high + missing / 2
    return (max(0.0, low), min(1.0, high)) if panel.percent else (low, high)


def _panel(panel: Panel, frame: _Frame) -> list[str]:
    left, right = frame.left, frame.right
    parts = [f'<text class="panel" x="28" y="{frame.top - 16:.0f}">{_safe(panel.title)}</text>']
    for value in ticks(*frame.y_range, 5):
        y, label = frame.y(value), f"{100 * value:.3g} %" if panel.percent else number(value)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{frame.bottom}" y2="{frame.bottom}"/>')
    for value in ticks(*frame.x_range, 8):
        parts.append(_centred(frame.x(value), frame.bottom + 18, number(value)))
    drawn = [part for series in panel.series for part in _line(series, frame, panel.percent)]
    if not drawn:
        drawn = [_centred((left + right) / 2, (frame.top + frame.bottom) / 2, "nothing recorded")]
    return parts + drawn


def _line(series: Series, frame: _Frame, percent: bool) -> list[str]:
    points = _finite(series.points)
    if not points:
        return []
    color, parts = _safe(series.color), []
    if series.errors:
        pairs = [(x, y, e) for (x, y), e in zip(series.points, series.errors, strict=True) if math.isfinite(y + e)]
        low, high = frame.y_range
        outline = [(x, min(y + e, high)) for x, y, e in pairs] + [(x, max(y - e, low)) for x, y, e in reversed(pairs)]
        parts.append(f'<path d="{frame.path(outline)}Z" fill="{color}" opacity="0.13"/>')
    look = 'stroke-width="1" opacity="0.35"' if series.faint else 'stroke-width="2.2"'
    parts.append(f'<path class="line" d="{frame.path(points)}" stroke="{color}" {look}/>')
    if series.faint:
        return parts
    shown = points if series.markers else points[-1:]
    parts += [f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3.2" fill="{color}"/>' for x, y in shown]
    x, y = points[-1]
    at = f'x="{frame.x(x) + 10:.1f}" y="{frame.y(y) + 4:.1f}"'
    value = f"{100 * y:.1f} %" if percent else f"{y:.3f}"
    parts.append(f'<text class="end" {at} style="fill:{color}">{value}</text>')
    return parts
