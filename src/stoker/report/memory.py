"""Pictures of memory: a breakdown moment by moment beside what was measured, and the ladder of levers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from stoker.report.bars import Bar, bars, stacked
from stoker.report.html import Section, Table

__all__ = ["breakdown", "ladder", "sections", "size", "traced_ladder"]

SMALL = 0.005
"""Rows below this share of the peak are shown together."""
Json = Mapping[str, Any]


def size(nbytes: float) -> str:
    """GiB; MiB or KiB where there is less than a tenth of one."""
    for power, unit in ((3, "GiB"), (2, "MiB")):
        if abs(nbytes) >= 0.1 * 1024**power:
            return f"{nbytes / 1024**power:,.{2 if power == 3 else 1}f} {unit}"
    return f"{nbytes / 1024:,.1f} KiB"


def sections(found: Json) -> Iterator[Section]:
    """Of what `stoker batch memory --json` prints."""
    yield breakdown(found["breakdown"], capacity=found["capacity_bytes"])
    if found["trace"] is not None:
        yield _layers(found["trace"])
        yield from traced_ladder(found["levers"], found["trace"]["unit"])
    else:
        yield from ladder(found["levers"], found["breakdown"]["expected"])


def breakdown(found: Json, *, measured: float | None = None, capacity: float | None = None) -> Section:
    """Of a breakdown's JSON; `measured`: the peak of complete steps, in bytes."""
    rows = [_moment(found, moment) for moment in found["moments"]]
    if measured is not None:
        rows.append(Bar("measured", [("", measured)]))
    limit = ("capacity", capacity) if capacity is not None and capacity < 3 * found["expected"] else None
    notes = [f"{row['name']}: {size(row['nbytes'])} in the host's memory" for row in found["rows"] if row["host"]]
    return Section(
        f"Memory: {size(found['expected'])}, the peak at: {found['moment']}",
        lead=f"{found['name']}, {found['examples']:,} examples in one micro-batch.",
        picture=stacked(rows, form=size, limit=limit),
        table=_rows(found),
        notes=notes,
    )


def _moment(found: Json, moment: str) -> Bar:
    """Small rows go together; what the allocator adds comes last."""
    there = [row for row in found["rows"] if moment in row["moments"] and not row["host"] and row["nbytes"] > 0]
    least = SMALL * found["peak"]
    parts = [(row["name"], row["nbytes"]) for row in there if row["nbytes"] >= least]
    if small := sum(row["nbytes"] for row in there if row["nbytes"] < least):
        parts.append(("smaller ones", small))
    total = found["moments"][moment]
    if beyond := total * found["margin"]["share"] + found["margin"]["fixed"]:
        parts.append(("allocator (fitted)", beyond))
    return Bar(moment, parts, "peak" if moment == found["moment"] else "")


def _rows(found: Json) -> Table:
    shown = [row for row in found["rows"] if row["nbytes"]]
    cells = [
        (
            row["name"],
            size(row["nbytes"]),
            size(row["per_example"]) if row["per_example"] else "",
            "host"
            if row["host"]
            else "always"
            if len(row["moments"]) == len(found["moments"])
            else ", ".join(row["moments"]),
            row["note"],
        )
        for row in shown
    ]
    return Table(("part", "bytes", "an example adds", "there at", ""), cells, words=(0, 3, 4))


def ladder(levers: Sequence[Json], now: float) -> Iterator[Section]:
    """Of the levers' JSON, from the cheapest; `now`: bytes expected as it is."""
    if not levers:
        return
    rows = [("as it is", now, "--slate", "")]
    rows += [
        (f"+ {lever['name']}", lever["peak"], "--blue", f"{lever['most_examples']:,} examples fit") for lever in levers
    ]
    yield Section(
        "If memory is short: the ladder, cheapest first",
        lead="Predicted peak with each lever and all above it; each lever's own saving stands in the table.",
        picture=bars(rows, form=size),
        table=Table(
            ("lever", "saves alone", "costs", "how"),
            [
                (each["name"], size(each["saves"]) if each["saves"] else "", each["costs"], each["how"])
                for each in levers
            ],
            words=(0, 2, 3),
        ),
    )


def traced_ladder(levers: Sequence[Json], unit: str) -> Iterator[Section]:
    """Of a trace's levers, each pulled alone; `unit`: what a size counts."""
    if not levers:
        return
    rows = [
        (
            lever["name"],
            float(lever["saves_bytes"]),
            "--blue",
            f"room for {lever['more_units']:,} more {unit}" if lever["more_units"] else "",
        )
        for lever in levers
        if lever["saves_bytes"]
    ]
    yield Section(
        "If more should fit: the ladder of levers, cheapest first",
        lead="Predicted saving of each, pulled alone.",
        picture=bars(rows, form=size) if rows else "",
        table=Table(
            ("lever", "saves", "costs", "how"),
            [
                (
                    each["name"],
                    size(each["saves_bytes"]) if each["saves_bytes"] else "unknown",
                    each["costs"],
                    each["how"],
                )
                for each in levers
            ],
            words=(0, 2, 3),
        ),
    )


def _layers(trace: Json) -> Section:
    """What keeps most for the backward pass."""
    ranked = sorted(trace["layers"], key=lambda layer: -layer["per_unit"])[:12]
    rows = [
        (layer["name"] or "the model itself", layer["per_unit"], "--purple", layer["kind"])
        for layer in ranked
        if layer["per_unit"] > 0
    ]
    return Section(
        f"What layers keep for the backward pass, by each of the {trace['unit']}",
        lead=f"{trace['model']}: {trace['parameters']:,} parameters, {trace['trainable']:,} of them trained.",
        picture=bars(rows, form=size) if rows else "",
    )
