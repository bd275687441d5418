"""Bars as inline SVG: parts of a whole after one another, and one bar for each name."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stoker.report.drawing import CHARACTER, COLORS, WIDTH, svg, text, upright, words

__all__ = ["Bar", "bars", "stacked"]

STEP = 44
"""Pixels from one row of parts to the next."""
OWN = {
    "weights": "--blue",
    "gradients": "--amber",
    "optimizer states": "--green",
    "states": "--green",
    "activations": "--purple",
    "logits": "--rose",
    "16-bit copies of weights": "--cyan",
    "other": "--slate",
    "allocator (fitted)": "--slate",
    "": "--slate",
}
"""Colours of the parts that most pictures of memory have."""


@dataclass(frozen=True)
class Bar:
    """One row of bars: `parts` are (name, value), drawn after one another; one without a name has no legend."""

    name: str
    parts: Sequence[tuple[str, float]]
    note: str = ""


def stacked(rows: Sequence[Bar], *, form: Callable[[float], str], limit: tuple[str, float] | None = None) -> str:
    """Rows of parts after one another, their names in a legend above; `limit`: a named value as an upright line."""
    looks = _looks(rows)
    totals = [sum(value for _, value in row.parts) for row in rows]
    margin = max((len(row.name) for row in rows), default=0) * CHARACTER + 18
    said = [f"{form(total)} {row.note}".strip() for row, total in zip(rows, totals, strict=True)]
    most = max([*totals, limit[1] if limit else 0.0, 1e-12])
    scale = (WIDTH - margin - max(map(len, said), default=0) * CHARACTER - 16) / most
    parts, top = _legend(looks)
    at = 0.0
    if limit is not None:
        top += 16
        at = margin + limit[1] * scale
        parts.append(upright(at, top - 6, top + STEP * len(rows) - 8, "--rose"))
        parts.append(words(at, top - 12, f"{limit[0]} {form(limit[1])}", "end" if at > WIDTH / 2 else "start"))
    for row, total in zip(rows, said, strict=True):
        parts.append(words(margin - 12, top + 20, row.name, "end", "strong"))
        x = margin
        for name, value in row.parts:
            parts += _part(name, value, form, looks[name], x, value * scale, top)
            x += value * scale
        if limit is not None and x < at < x + 8 + len(total) * CHARACTER:
            x = at  # beyond the line that would go through it
        parts.append(words(x + 8, top + 19, total, "start", "value"))
        top += STEP
    return svg(top, "memory by part", parts)


def _value(shown: str, note: str) -> str:
    return f"{shown} · {note}" if note else shown


def _looks(rows: Sequence[Bar]) -> dict[str, tuple[str, float]]:
    """(colour, opacity) of each name, the largest parts first; what has a colour of its own has it in every picture."""
    largest: dict[str, float] = {}
    for name, value in (part for row in rows for part in row.parts):
        largest[name] = max(value, largest.get(name, 0.0))
    names = sorted(largest, key=lambda name: -largest[name])
    others = [name for name in names if name not in OWN]
    paler = {name: (COLORS[i % len(COLORS)], 0.7 if i < len(COLORS) else 0.35) for i, name in enumerate(others)}
    return {name: (OWN[name], 1.0) if name in OWN else paler[name] for name in names}


def _part(
    name: str, value: float, form: Callable[[float], str], look: tuple[str, float], x: float, wide: float, top: float
) -> list[str]:
    color, opacity = look
    shape = (
        f'<rect x="{x:.1f}" y="{top:.1f}" width="{max(wide, 0.5):.1f}" height="30" style="fill:var({color})" '
        f'opacity="{opacity}"><title>{text(f"{name}: {form(value)}")}</title></rect>'
    )
    if len(form(value)) * CHARACTER + 10 >= wide:
        return [shape]
    return [shape, words(x + wide / 2, top + 19, form(value), "middle", "inside")]


def bars(
    rows: Sequence[tuple[str, float, str, str]], *, form: Callable[[float], str], log_from: float | None = None,
    mark: tuple[str, float] | None = None,
) -> str:  # fmt: skip
    """One bar a row of (name, value, colour, note); a negative value has none.

    `log_from`: a logarithmic axis that begins there; what is less has no bar. `mark`: a named value as an upright line.
    """
    margin = min(380.0, max((len(name) for name, *_ in rows), default=0) * CHARACTER + 18)
    room = max((len(_value(form(value), note)) for _, value, _, note in rows), default=0) * CHARACTER + 8
    room = min(room, WIDTH * 0.45)
    most = max([value for _, value, *_ in rows] + ([mark[1]] if mark else []) + [1e-300])
    wide = WIDTH - margin - room - 12

    def length(value: float) -> float:
        if log_from is None:
            return value / most * wide
        if value <= log_from:
            return 0.0
        return math.log(value / log_from) / max(math.log(most / log_from), 1e-9) * wide

    parts: list[str] = []
    top = 24.0 if mark else 4.0
    first = top
    for name, value, color, note in rows:
        shown = name if len(name) * CHARACTER + 12 <= margin else f"{name[: int((margin - 24) / CHARACTER)]}…"
        parts.append(words(margin - 12, top + 16, shown, "end"))
        parts.append(
            f'<rect x="{margin:.1f}" y="{top + 2:.1f}" width="{max(length(value), 1.5):.1f}" height="20" rx="3" '
            f'style="fill:var({color})"><title>{text(f"{name}: {form(value)} {note}")}</title></rect>'
        )
        parts.append(words(margin + length(value) + 8, top + 16, _value(form(value), note), "start", "value"))
        top += 30
    if mark is not None:
        at = margin + length(mark[1])
        parts.append(upright(at, first - 4, top - 2, "--rose"))
        end = "end" if at > WIDTH * 0.6 else "start"
        parts.append(words(at, 12, f"{mark[0]} {form(mark[1])}", end))
    return svg(top + 2, "bars", parts)


def _legend(looks: Mapping[str, tuple[str, float]]) -> tuple[list[str], float]:
    parts, x, y = [], 0.0, 10.0
    for name, (color, opacity) in looks.items():
        wide = len(name) * CHARACTER + 34
        if not name:
            continue
        if x + wide > WIDTH:
            x, y = 0.0, y + 22
        parts.append(
            f'<rect x="{x:.1f}" y="{y - 9:.1f}" width="12" height="12" rx="2" style="fill:var({color})" '
            f'opacity="{opacity}"/>'
        )
        parts.append(words(x + 18, y + 2, name, "start"))
        x += wide
    return parts, y + 22
