"""Pictures of a sweep: throughput and peak memory over one another against the size, and what each remedy gains."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from stoker.report.bars import bars
from stoker.report.charts import Band, Curve, Mark, Plot, plots, zones_of
from stoker.report.html import Section, Table

__all__ = ["accounts", "sections"]

ZONES = {"steep": "--green", "gradual": "--amber", "flat": "--rose"}
Json = Mapping[str, Any]


def sections(found: Json) -> Iterator[Section]:
    """Of a sweep's JSON."""
    yield Section(
        f"Throughput and memory against {found['unit']} per step",
        lead=found["verdict"]["words"],
        picture=_curves(found),
        table=_table(found),
        notes=_line(found),
        warnings=found["warnings"],
    )
    if found["remedies"]:
        yield _remedies(found)
    if found["accounts"]:
        yield accounts(found["accounts"])


def accounts(answers: Sequence[Json]) -> Section:
    """The three accounts of a question that is asked whenever memory is left."""
    rows = [(each["name"], each["answer"], each["words"]) for each in answers]
    return Section("Memory is left: raise the batch?", table=Table(("account", "answer", "why"), rows, words=(0, 1, 2)))


def _curves(found: Json) -> str:
    points, unit = found["points"], found["unit"]
    sizes = [point["size"] for point in points]
    shown = [_throughput(found), *_memory(found), *_waiting(points)]
    return plots(shown, x_title=f"{unit} per step (logarithmic)", x_ticks=sizes)


def _throughput(found: Json) -> Plot:
    points, fit = found["points"], found["fit"]
    measured = Curve(
        "measured",
        [(point["size"], point["rate"]) for point in points],
        spread=[tuple(sorted(point["size"] / each for each in point["quartiles"])) for point in points],
        joined=fit is None,
    )
    curves = [measured]
    if fit is not None:
        low, high = points[0]["size"], points[-1]["size"]
        between = [low * (high / low) ** (i / 60) for i in range(61)]
        floor = fit.get("floor") or 0.0
        line = [(size, size / max(floor, fit["alpha"] + fit["beta"] * size)) for size in between]
        curves.insert(0, Curve("line through times", line, dots=False))
    zoned = [(point["size"], point["zone"]) for point in points if point["zone"]]
    return Plot(f"Throughput, {found['unit']}/s", curves, zones_of(zoned, ZONES), _knees(found["knee"]), height=230)


def _knees(knee: Json | None) -> list[Mark]:
    if knee is None:
        return []
    if knee["agree"] and knee["size"] is not None:
        return [Mark(f"knee {knee['size']:,.3g}", knee["size"])]
    named = (("by the line", knee["by_fit"]), ("by the gains", knee["by_gains"]))
    return [Mark(f"knee {name} {at:,.3g}", at) for name, at in named if at is not None]


def _memory(found: Json) -> Iterator[Plot]:
    measured = [(point["size"], point["peak_bytes"] / 1e9) for point in found["points"] if point["peak_bytes"]]
    if not measured:
        return
    marks = [Mark("", mark.at) for mark in _knees(found["knee"])]
    bands = []
    capacity = found["capacity_bytes"]
    if capacity and capacity / 1e9 < 4 * max(peak for _, peak in measured):
        marks.append(Mark(f"capacity {capacity / 1e9:,.3g} GB", capacity / 1e9, upright=False))
    if found["operating"]:
        low, high = found["operating"]
        bands.append(Band("throughput and memory both allow", low, high, "--blue"))
    yield Plot("Peak memory, GB", [Curve("", measured, color="--purple")], bands, marks, height=150)


def _waiting(points: Sequence[Json]) -> Iterator[Plot]:
    waited = [(point["size"], point["data"]["waited"]) for point in points if point["data"]]
    if waited:
        yield Plot(
            "Share of a step spent waiting for data", [Curve("", waited, color="--amber")], percent=True, height=110
        )


def _table(found: Json) -> Table:
    columns: list[tuple[str, Callable[[Json], str]]] = [
        (found["unit"], lambda p: f"{p['size']:,}"),
        ("ms/step", lambda p: f"{p['seconds'] * 1e3:,.2f}"),
        (f"{found['unit']}/s", lambda p: f"{p['rate']:,.1f}"),
        ("doubling gains", lambda p: _percent(p["gain"])),
        ("zone", lambda p: p["zone"] or ""),
        ("peak MB", lambda p: f"{p['peak_bytes'] / 1e6:,.0f}" if p["peak_bytes"] else ""),
        ("FLOP/byte", lambda p: f"{p['flop_per_byte']:,.1f}" if p["flop_per_byte"] else ""),
        ("of peak", lambda p: _percent(p["share_of_peak"])),
        ("of bandwidth", lambda p: _percent(p["share_of_bandwidth"])),
        ("driver busy", lambda p: _percent(p["utilisation"])),
    ]
    filled = [(name, [form(point) for point in found["points"]]) for name, form in columns]
    known = [(name, cells) for name, cells in filled if any(cells)]
    strong = [i for i, point in enumerate(found["points"]) if point["size"] == found["recommended"]]
    return Table(
        [name for name, _ in known], list(zip(*(cells for _, cells in known), strict=True)), strong, words=_zone(known)
    )


def _zone(columns: Sequence[tuple[str, Any]]) -> list[int]:
    return [i for i, (name, _) in enumerate(columns) if name == "zone"]


def _line(found: Json) -> list[str]:
    notes = [f"stopped after {found['points'][-1]['size']:,} {found['unit']}: {found['stopped']}"]
    if found["knee"] is not None:
        agree = "the two methods agree" if found["knee"]["agree"] else "the two methods disagree"
        notes.append(f"knee: {agree}: {found['knee']['why']}")
    if limit := found["roofline"]:
        notes.append(
            f"device as measured: {limit['flops'] / 1e9:,.0f} GFLOP/s ({limit['dtype']}), "
            f"{limit['bandwidth'] / 1e9:,.1f} GB/s; below {limit['ridge']:,.1f} FLOP/byte bandwidth is the limit"
        )
    return notes


def _remedies(found: Json) -> Section:
    rows = []
    for each in found["remedies"]:
        name = f"{each['name']}: {each['change']}" if each["change"] else each["name"]
        for what, color in (("predicted", "--slate"), ("measured", "--blue")):
            if (gain := each[what]) is not None:
                bound = "at most, predicted" if what == "predicted" and each["at_most"] else what
                rows.append((name if what == "predicted" or each["predicted"] is None else "", gain, color, bound))
    shown = [row for row in rows if math.isfinite(row[1])]
    picture = (
        bars([(n, v, c if v >= 0 else "--rose", note) for n, v, c, note in shown], form=lambda v: f"{v:+.1%}")
        if shown
        else ""
    )
    table = [
        (
            each["name"],
            each["change"],
            _percent(each["predicted"]),
            _percent(each["measured"]),
            each["note"] or each["basis"],
        )
        for each in found["remedies"]
    ]
    return Section(
        f"Remedies at {found['studied']:,} {found['unit']}: gain of throughput",
        picture=picture,
        table=Table(("remedy", "change", "predicted", "measured", ""), table, words=(0, 1, 4)),
    )


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"
