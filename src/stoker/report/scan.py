"""Pictures of scans: loss by samples, loss and throughput against the batch, loss against the learning rate."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.report.charts import Curve, Mark, Plot, plots
from stoker.report.drawing import COLORS
from stoker.report.html import Section, Table

__all__ = ["rate_sections", "sections"]

TALL = 4.0
"""A loss beyond so many times the lowest is left out of a picture, that the others can be told apart; the table has it.
"""
Json = Mapping[str, Any]


def sections(found: Json) -> Iterator[Section]:
    """Of a scan's JSON."""
    unit, equal = found["equal"]["target"]["unit"], found["equal"]
    yield Section(
        f"Batches at {equal['samples']:,} {unit} each",
        lead=found["conclusion"]["words"],
        picture=_by_size(found),
        table=_table(found),
        notes=[f"efficiency candidate: {found['efficiency']['why']}", *_settings(found["arms"][0]["setting"], equal)],
        warnings=found["warnings"],
    )
    yield Section(
        f"Held-out loss by {unit} trained on",
        lead="Mean over seeds that didn't diverge; whiskers from the lowest to the highest.",
        picture=_by_samples(found),
    )
    if found["rates"] is not None:
        yield from rate_sections(found["rates"])


def rate_sections(found: Json) -> Iterator[Section]:
    """Of the JSON of a scan of learning rates."""
    setting, equal = found["arms"][0]["setting"], found["equal"]
    unit = equal["target"]["unit"]
    yield Section(
        f"Learning rates at {setting['examples_per_update']:,} {unit} per update",
        lead=found["words"],
        picture=_by_rate(found),
        table=Table(
            ("rate", "factor", "held-out loss", *_names(found), "seeds", ""),
            [
                (
                    f"{arm['learning_rate']:.4g}",
                    f"{arm['setting']['rate_factor']:.4g}",
                    _loss(arm),
                    *(_figure(arm, name) for name in _names(found)),
                    str(len(arm["runs"])),
                    "not told from the best" if arm["setting"]["rate_factor"] in found["kept"] else "",
                )
                for arm in found["arms"]
            ],
            strong=[i for i, arm in enumerate(found["arms"]) if arm["setting"]["rate_factor"] == found["best"]],
            words=(),
        ),
        notes=_settings(setting, equal),
    )


def _by_size(found: Json) -> str:
    unit, arms = found["equal"]["target"]["unit"], found["arms"]
    shown = _shown(arms)
    ends = Curve(
        f"at {found['equal']['samples']:,} {unit}",
        [(_size(arm), arm["mean"]) for arm in shown],
        spread=[_range(arm) for arm in shown],
    )
    least_updates, low = found["equal_updates"], min((arm["mean"] for arm in shown), default=1.0)
    same = [(_size(arm), loss) for arm in arms if (loss := _after(arm, least_updates)) is not None]
    same = [(size, loss) for size, loss in same if loss <= TALL * low or low <= 0]
    early = Curve(f"at {least_updates:,} updates", same, color="--amber", dashed=True)
    marks = []
    if found["best"] is not None and found["half_width"] is not None and shown:
        best = next(arm["mean"] for arm in arms if _size(arm) == found["best"])
        marks = [Mark("below: not told from the best", best + found["half_width"], color="--slate", upright=False)]
    losses = Plot("Held-out loss", [ends, early], marks=[*marks, *_lost(arms)], height=230, least=_floor([ends, early]))
    rates = list(zip(map(_size, arms), found["efficiency"]["rates"], strict=True))
    speed = Plot(f"Throughput, {unit}/s", [Curve("", rates, color="--green")], marks=_efficient(found), height=150)
    return plots([losses, speed], x_title=f"{unit} per update (logarithmic)", x_ticks=[_size(arm) for arm in arms])


def _efficient(found: Json) -> list[Mark]:
    size = found["efficiency"]["size"]
    return [] if size is None else [Mark("efficiency candidate", size)]


def _by_samples(found: Json) -> str:
    unit = found["equal"]["target"]["unit"]
    curves = []
    for number, arm in enumerate(_shown(found["arms"])):
        points = [(moment["samples"], moment["mean"]) for moment in arm["moments"]]
        spread = [(moment["low"], moment["high"]) for moment in arm["moments"]]
        curves.append(Curve(f"{_size(arm):,}", points, COLORS[number % len(COLORS)], spread))
    return plots(
        [Plot("Held-out loss by batch", curves, height=300, least=_floor(curves))], x_title=f"{unit} trained on"
    )


def _by_rate(found: Json) -> str:
    shown = _shown(found["arms"])
    seeds = max(len(arm["runs"]) for arm in found["arms"])
    every = [arm for arm in shown if len(arm["runs"]) == seeds]
    first = [arm for arm in shown if len(arm["runs"]) < seeds]
    curves = [
        Curve(
            f"{seeds} seeds" if first else "",
            [(arm["learning_rate"], arm["mean"]) for arm in every],
            spread=[_range(arm) for arm in every],
        )
    ]
    if first:
        curves.append(
            Curve("first seed only", [(a["learning_rate"], a["mean"]) for a in first], joined=False, hollow=True)
        )
    rates = [arm["learning_rate"] for arm in found["arms"]]
    plot = Plot("Held-out loss", curves, marks=_lost(found["arms"], "learning_rate"), height=230, least=_floor(curves))
    return plots([plot], x_title="learning rate (logarithmic)", x_ticks=rates)


def _shown(arms: Sequence[Json]) -> list[Json]:
    """Those with a loss that a picture has room for."""
    known = [arm for arm in arms if _number(arm["mean"])]
    low = min((arm["mean"] for arm in known), default=0.0)
    return [arm for arm in known if low <= 0 or arm["mean"] <= TALL * low]


def _lost(arms: Sequence[Json], name: str = "") -> list[Mark]:
    return [
        Mark("diverged" if arm["diverged"] == len(arm["runs"]) else f"{arm['diverged']} diverged", _at(arm, name))
        for arm in arms
        if arm["diverged"]
    ]


def _at(arm: Json, name: str) -> float:
    return float(arm[name]) if name else float(_size(arm))


def _floor(curves: Sequence[Curve]) -> float:
    """Where the axis begins: a little below the lowest, where 0 is far."""
    values = [y for curve in curves for _, y in curve.points]
    values += [low for curve in curves for low, _ in curve.spread]
    if not values:
        return 0.0
    low, high = min(values), max(values)
    return low - 0.15 * (high - low) if low < 0 or low > 0.3 * high else 0.0


def _after(arm: Json, updates: int) -> float | None:
    return next((moment["mean"] for moment in arm["moments"] if moment["updates"] >= updates), None)


def _table(found: Json) -> Table:
    unit, names = found["equal"]["target"]["unit"], _names(found)
    rows = []
    for arm, rate in zip(found["arms"], found["efficiency"]["rates"], strict=True):
        setting = arm["setting"]
        micro = setting["examples_per_microbatch"] or setting["examples_per_update"]
        after = _after(arm, found["equal_updates"])
        marks = ["efficiency"] if _size(arm) == found["efficiency"]["size"] else []
        marks += ["quality"] if _size(arm) in found["quality"] else []
        rows.append(
            (
                f"{_size(arm):,}",
                f"{_size(arm) // micro} x {micro:,}",
                f"{arm['learning_rate']:.4g}",
                f"{arm['updates']:,}",
                _loss(arm),
                *(_figure(arm, name) for name in names),
                "" if after is None else f"{after:.4g}",
                f"{rate:,.0f}",
                f"{arm['waited']:.1%}",
                ", ".join(marks),
            )
        )
    head = (
        f"{unit} per update", "micro-batches", "rate", "updates", "loss at the end", *names,
        f"loss at {found['equal_updates']:,} updates", f"{unit}/s", "waits", "candidate",
    )  # fmt: skip
    taken = found["conclusion"]["examples_per_update"]
    strong = [i for i, arm in enumerate(found["arms"]) if _size(arm) == taken]
    return Table(head, rows, strong, words=())


def _settings(setting: Json, equal: Json) -> list[str]:
    target = equal["target"]
    own = ", ".join(f"{name} {value}" for name, value in target["settings"].items())
    varied = ("examples_per_update", "examples_per_microbatch", "rate_factor", "seed")
    common = ", ".join(f"{name} {value}" for name, value in setting.items() if name not in varied)
    loader = ", ".join(f"{name} {value}" for name, value in equal["loader"].items())
    return [
        f"{target['optimizer']} of {target['parameters']:,} parameters on {target['device']}: {own}",
        f"equal for all: {equal['samples']:,} {target['unit']}, seeds {', '.join(map(str, equal['seeds']))}, "
        f"{equal['evaluations']} evaluations; {common}; loader: {loader}",
    ]


def _size(arm: Json) -> int:
    return int(arm["setting"]["examples_per_update"])


def _range(arm: Json) -> tuple[float, float]:
    finite = [loss for loss in arm["losses"] if _number(loss)]
    return min(finite), max(finite)


def _names(found: Json) -> list[str]:
    return list(dict.fromkeys(name for arm in found["arms"] for name in arm["figures"]))


def _figure(arm: Json, name: str) -> str:
    return f"{arm['figures'][name]:.4g}" if name in arm["figures"] else ""


def _loss(arm: Json) -> str:
    lost = f"{arm['diverged']} of {len(arm['runs'])} diverged" if arm["diverged"] else ""
    if not _number(arm["mean"]):
        return lost
    spread = "" if arm["spread"] is None else f" ± {arm['spread']:.2g}"
    return f"{arm['mean']:.4g}{spread}" + (f" ({lost})" if lost else "")


def _number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
