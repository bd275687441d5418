"""Curves over a size as inline SVG: plots over one another that share their axis."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from stoker.record.curve import number, ticks
from stoker.report.drawing import CHARACTER, COLORS, WIDTH, svg, text, upright, words

__all__ = ["Band", "Curve", "Mark", "Plot", "plots", "zones_of"]

Point = tuple[float, float]
LEFT, RIGHT = 84, 28


@dataclass(frozen=True)
class Curve:
    """Points joined by a line; `spread`: low and high of each, as whiskers. Not `joined`: dots alone."""

    name: str
    points: Sequence[Point]
    color: str = COLORS[0]
    spread: Sequence[Point] = ()
    joined: bool = True
    dots: bool = True
    dashed: bool = False
    hollow: bool = False


@dataclass(frozen=True)
class Band:
    """A stretch of the x axis with a name at its top."""

    name: str
    low: float
    high: float
    color: str


@dataclass(frozen=True)
class Mark:
    """A line across the plot at one value; upright at an x (left out where it is off the axis), level at a y."""

    name: str
    at: float
    color: str = "--rose"
    upright: bool = True


@dataclass(frozen=True)
class Plot:
    """One plot of several that share their x axis."""

    title: str
    curves: Sequence[Curve]
    bands: Sequence[Band] = ()
    marks: Sequence[Mark] = ()
    percent: bool = False
    height: int = 210
    least: float = 0.0
    """Where the y axis begins."""


@dataclass(frozen=True)
class _Frame:
    """Where data land, in pixels."""

    x_range: Point
    y_range: Point
    top: float
    bottom: float
    logarithmic: bool

    def x(self, value: float) -> float:
        low, high = self.x_range
        share = math.log(value / low) / math.log(high / low) if self.logarithmic else (value - low) / (high - low)
        return LEFT + 18 + share * (WIDTH - RIGHT - 18 - LEFT - 18)

    def y(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)

    def path(self, points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)


def plots(shown: Sequence[Plot], *, x_title: str, x_ticks: Sequence[float] = ()) -> str:
    """Plots over one another that share their x axis: logarithmic with labels at `x_ticks`, or from 0 without them.

    y axes begin at 0, or where a plot says.
    """
    xs = [*x_ticks, *(x for plot in shown for curve in plot.curves for x, _ in curve.points)]
    low, high = (min(xs), max(xs)) if xs else (1.0, 2.0)
    x_range = (low, high) if high > low else (low / 2, high * 2)
    if not x_ticks:
        x_range = (0.0, high)
    parts, top = [], 0.0
    for plot in shown:
        frame = _Frame(x_range, (plot.least, _top_of(plot)), top + 58, top + 58 + plot.height, bool(x_ticks))
        parts += _plot(plot, frame, x_ticks or ticks(*x_range, 8))
        top = frame.bottom + 34
    parts.append(words((LEFT + WIDTH - RIGHT) / 2, top + 14, x_title, "middle"))
    return svg(top + 26, ", ".join(plot.title for plot in shown), parts)


def _plot(plot: Plot, frame: _Frame, x_ticks: Sequence[float]) -> list[str]:
    left, right = LEFT, WIDTH - RIGHT
    named = [curve for curve in plot.curves if curve.name]
    parts = [words(0, frame.top - 38, plot.title, "start", "panel"), *_keys(named, frame.top - 38)]
    parts += _bands(plot.bands, frame)
    for value in ticks(*frame.y_range, 5):
        y, label = frame.y(value), f"{100 * value:.3g} %" if plot.percent else number(value)
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(words(left - 10, y + 4, label, "end"))
    parts.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{frame.bottom}" y2="{frame.bottom}"/>')
    last = -math.inf
    for value in x_ticks:
        label, x = number(value), frame.x(value)
        if x - last > (len(label) + 2) * CHARACTER:
            parts.append(words(x, frame.bottom + 18, label, "middle"))
            last = x
    parts += _marks(plot.marks, frame)
    for curve in plot.curves:
        parts += _curve(curve, frame)
    if not any(curve.points for curve in plot.curves):
        parts.append(words((left + right) / 2, (frame.top + frame.bottom) / 2, "not measured", "middle"))
    return parts


def _top_of(plot: Plot) -> float:
    values = [y for curve in plot.curves for _, y in curve.points]
    values += [high for curve in plot.curves for _, high in curve.spread]
    values += [mark.at for mark in plot.marks if not mark.upright]
    return plot.least + 1.12 * max(max(values, default=0.0) - plot.least, 1e-12)


def _bands(bands: Sequence[Band], frame: _Frame) -> list[str]:
    parts = []
    edge_low, edge_high = frame.x_range
    for band in bands:
        low = LEFT if band.low <= edge_low else frame.x(band.low)
        high = WIDTH - RIGHT if band.high >= edge_high else frame.x(band.high)
        parts.append(
            f'<rect x="{low:.1f}" y="{frame.top}" width="{max(high - low, 0):.1f}" height="{frame.bottom - frame.top}" '
            f'style="fill:var({band.color})" opacity="0.10"/>'
        )
        if len(band.name) * CHARACTER < high - low:
            parts.append(words((low + high) / 2, frame.top - 6, band.name, "middle", "note"))
        elif len(bands) == 1:  # nothing beside it to run into
            end = "end" if high > WIDTH / 2 else "start"
            parts.append(words(high if end == "end" else low, frame.top - 6, band.name, end, "note"))
    return parts


def _marks(marks: Sequence[Mark], frame: _Frame) -> list[str]:
    parts, row, last = [], 0, -math.inf
    for mark in sorted(marks, key=lambda each: each.at):
        if mark.upright and not frame.x_range[0] <= mark.at <= frame.x_range[1]:
            continue
        if not mark.upright:
            y = frame.y(mark.at)
            parts.append(
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke-dasharray="6 4" '
                f'style="stroke:var({mark.color})" stroke-width="1.4"/>'
            )
            parts.append(words(LEFT + 8, y - 6, mark.name, "start", "note"))
            continue
        x, wide = frame.x(mark.at), len(mark.name) * CHARACTER
        end = "end" if x + wide + 8 > WIDTH - RIGHT else "start"
        begin = x - wide - 6 if end == "end" else x + 6
        row = row + 1 if begin < last else 0  # a label that would run into the last one goes a line down
        last = max(last, begin + wide)
        parts.append(upright(x, frame.top, frame.bottom, mark.color))
        parts.append(words(x + (-6 if end == "end" else 6), frame.bottom - 10 - 16 * row, mark.name, end, "note"))
    return parts


def _curve(curve: Curve, frame: _Frame) -> list[str]:
    points = [(x, y) for x, y in curve.points if math.isfinite(y)]
    if not points:
        return []
    color, parts = f"var({curve.color})", []
    if curve.joined and len(points) > 1:
        dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
        parts.append(f'<path class="line" d="{frame.path(points)}" style="stroke:{color}"{dash}/>')
    for (x, _), (low, high) in zip(curve.points, curve.spread, strict=False):
        at = frame.x(x)
        parts.append(
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{frame.y(low):.1f}" y2="{frame.y(high):.1f}" '
            f'style="stroke:{color}" stroke-width="1.4" opacity="0.6"/>'
        )
    fill = "var(--page)" if curve.hollow else color
    for x, y in points if curve.dots else ():
        parts.append(
            f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4" style="fill:{fill};stroke:{color}" '
            f'stroke-width="1.6"><title>{text(f"{curve.name} {x:g}: {y:.4g}")}</title></circle>'
        )
    return parts


def _keys(curves: Sequence[Curve], y: float) -> list[str]:
    """Names of the curves, at the right end of the title's line."""
    parts, x = [], float(WIDTH - RIGHT)
    for curve in reversed(curves):
        x -= len(curve.name) * CHARACTER
        parts.append(words(x, y, curve.name, "start", "note"))
        color = f"var({curve.color})"
        if curve.joined:
            dash = ' stroke-dasharray="5 4"' if curve.dashed else ""
            parts.append(f'<path class="line" d="M{x - 26:.1f},{y - 4:.1f}h18" style="stroke:{color}"{dash}/>')
        if curve.dots:
            fill = "var(--page)" if curve.hollow else color
            parts.append(
                f'<circle cx="{x - 17:.1f}" cy="{y - 4:.1f}" r="4" style="fill:{fill};stroke:{color}" '
                'stroke-width="1.6"/>'
            )
        x -= 44
    return parts


def zones_of(points: Sequence[tuple[float, str]], colors: Mapping[str, str]) -> list[Band]:
    """Neighbouring sizes of one zone as a band, changing half way (by ratio) between sizes."""
    found: list[Band] = []
    edges = [points[0][0], *(math.sqrt(a * b) for (a, _), (b, _) in pairwise(points)), points[-1][0]] if points else []
    for (_, name), (low, high) in zip(points, pairwise(edges), strict=True):
        if found and found[-1].name == name:
            found[-1] = Band(name, found[-1].low, high, colors[name])
        else:
            found.append(Band(name, low, high, colors[name]))
    return found
