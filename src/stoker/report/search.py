"""Pictures of a search: every trial on the map of batch and rate, and how the best loss fell."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from stoker.record.curve import number
from stoker.report.charts import Curve, Mark, Plot, plots
from stoker.report.drawing import CHARACTER, WIDTH, svg, words
from stoker.report.html import Section, Table

__all__ = ["sections"]

LEFT, RIGHT, TOP, HEIGHT = 84, 28, 60, 300
FAINTEST = 0.15
"""Opacity of the worst complete trial; the best is solid, and the rest lie between by their rank."""
Json = Mapping[str, Any]


def sections(found: Json) -> Iterator[Section]:
    """Of a search's JSON."""
    ended = found["ended"]
    shares = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in found["importance"].items())
    yield Section(
        f"Batch and learning rate, at {found['samples']:,} {found['unit']} each",
        lead=found["verdict"],
        picture=_map(found),
        table=_table(found),
        notes=[
            ", ".join(f"{count} {end}" for end, count in ended.items() if count)
            + f"; ending early saved {found['saved']:.0%} of all {found['unit']}",
            *([f"what decides about a place in the best tenth: {shares}"] if shares else []),
        ],
        warnings=found["warnings"],
    )
    if ended["complete"]:
        yield Section("Held-out loss, trial by trial", picture=_course(found))


def _map(found: Json) -> str:
    """Batch to the right, factor of the rate upwards, both logarithmic."""
    trials, best = found["trials"], found["best"]
    sizes = sorted({trial["setting"]["examples_per_update"] for trial in trials})
    factors = [trial["setting"]["rate_factor"] for trial in trials]
    across, up = _axis(sizes, LEFT + 40, WIDTH - RIGHT - 40), _axis(factors, TOP + HEIGHT - 14, TOP + 14)
    parts = [words(0, TOP - 38, "Factor of the learning rate, logarithmic", "start", "panel"), *_legend()]
    for value in _decades(min(factors), max(factors)):
        y = up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(words(LEFT - 10, y + 4, number(value), "end"))
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{TOP + HEIGHT}" y2="{TOP + HEIGHT}"/>')
    last = -math.inf
    for size in sizes:
        x, label = across(size), number(size)
        if x - last > (len(label) + 2) * CHARACTER:
            parts.append(words(x, TOP + HEIGHT + 18, label, "middle"))
            last = x
    complete = sorted((trial for trial in trials if trial["end"] == "complete"), key=lambda trial: trial["loss"])
    place = {trial["number"]: rank / max(1, len(complete) - 1) for rank, trial in enumerate(complete)}
    for trial in sorted(trials, key=lambda trial: -place.get(trial["number"], 2.0)):  # the best on top
        x, y = across(trial["setting"]["examples_per_update"]), up(trial["setting"]["rate_factor"])
        parts += _dot(x, y, trial["end"], place.get(trial["number"], 1.0), _told(trial))
        if trial["number"] == best:
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="11" style="fill:none;stroke:var(--rose)" stroke-width="2"/>'
            )
            left = x > WIDTH / 2
            label = f"best: {trial['loss']:.4g}"
            parts.append(words(x - 16 if left else x + 16, y + 4, label, "end" if left else "start", "note"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(words(middle, TOP + HEIGHT + 44, f"{found['unit']} per update (logarithmic)", "middle"))
    return svg(TOP + HEIGHT + 56, "trials by batch and learning rate", parts)


def _axis(values: Sequence[float], low: float, high: float) -> Any:
    """From a value to its place, logarithmic; one value alone stands in the middle."""
    least, most = min(values), max(values)
    if least == most:
        return lambda value: (low + high) / 2
    return lambda value: low + (high - low) * math.log(value / least) / math.log(most / least)


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten inside."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    inside = [m * 10.0**power for power in powers for m in (1, 2, 5) if low <= m * 10.0**power <= high]
    return inside or [low]


def _dot(x: float, y: float, end: str, rank: float, told: str) -> list[str]:
    title = f"<title>{told}</title>"
    if end == "complete":
        opacity = 1 - (1 - FAINTEST) * rank
        look = f"fill:var(--blue);fill-opacity:{opacity:.2f};stroke:var(--blue)"
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" style="{look}">{title}</circle>']
    if end == "pruned":
        look = "fill:none;stroke:var(--slate)"
        return [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="{look}" stroke-width="1.4">{title}</circle>']
    left, right, top, bottom = x - 4, x + 4, y - 4, y + 4
    path = f"M{left:.1f},{top:.1f}L{right:.1f},{bottom:.1f}M{right:.1f},{top:.1f}L{left:.1f},{bottom:.1f}"
    return [f'<path d="{path}" style="stroke:var(--amber)" stroke-width="2">{title}</path>']


def _legend() -> list[str]:
    parts, x, y = [], float(WIDTH - RIGHT), float(TOP - 38)
    for end, name in (("diverged", "diverged"), ("pruned", "pruned"), ("complete", "complete: the darker the better")):
        x -= len(name) * CHARACTER
        parts += [words(x, y, name, "start", "note"), *_dot(x - 12, y - 4, end, 0.0, name)]
        x -= 34
    return parts


def _told(trial: Json) -> str:
    loss = "" if trial["loss"] is None else f", loss {trial['loss']:.4g}"
    setting = trial["setting"]
    return f"trial {trial['number']}: {setting['examples_per_update']} at {setting['rate_factor']:.3g}{loss}"


def _course(found: Json) -> str:
    done = [(float(at + 1), trial["loss"]) for at, trial in enumerate(found["trials"]) if trial["end"] == "complete"]
    best = list(zip([at for at, _ in done], accumulate((loss for _, loss in done), min), strict=True))
    marks = [
        Mark(f"the present setting {trial['loss']:.4g}", trial["loss"], upright=False)
        for trial in found["trials"]
        if trial["number"] == found["own"]
    ]
    curves = [
        Curve("complete trials", done, joined=False),
        Curve("best so far", best, color="--green", dots=False),
    ]
    return plots([Plot("Held-out loss at the end", curves, marks=marks, height=180)], x_title="trial")


def _table(found: Json) -> Table:
    ordered = sorted(found["trials"], key=_rank)
    rows = [
        (
            str(trial["number"]),
            f"{trial['setting']['examples_per_update']:,}",
            f"{trial['setting']['rate_factor']:.3g}",
            f"{trial['setting']['warmup_samples']:,}",
            trial["end"],
            f"{trial['samples']:,}",
            "" if trial["loss"] is None else f"{trial['loss']:.4g}",
            f"{trial['seconds']:.1f}",
        )
        for trial in ordered
    ]
    head = ("trial", f"{found['unit']} per update", "rate factor", "warm-up", "ended", "at", "held-out loss", "seconds")
    strong = [place for place, trial in enumerate(ordered) if trial["number"] == found["best"]]
    return Table(head, rows, strong, words=(4,))


def _rank(trial: Json) -> tuple[bool, int, float]:
    """The best first; those that ended early after them, the longest first."""
    early = trial["end"] != "complete"
    return early, -trial["samples"] if early else 0, math.inf if trial["loss"] is None else trial["loss"]
