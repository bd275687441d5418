"""Pictures of a fit: trials against the limit, memory predicted beside measured, and what each lever would save."""

from collections.abc import Iterator, Mapping
from typing import Any

from stoker.report.bars import Bar, stacked
from stoker.report.charts import Curve, Mark, Plot, plots
from stoker.report.html import Section, Table
from stoker.report.memory import size, traced_ladder

__all__ = ["sections"]

GIB = 2**30
Json = Mapping[str, Any]


def sections(found: Json) -> Iterator[Section]:
    """Of a fit's JSON."""
    unit = found["unit"]
    settings = " ".join(f"{key}={value}" for key, value in found["environment"].items())
    yield Section(
        f"{found['size']:,} {unit} fit, certified",
        lead=_lead(found),
        picture=_trials(found),
        table=_table(found),
        notes=[
            *([f"the certifying batch: {'; '.join(found['batch'])}"] if found["batch"] else []),
            *([f"train with {settings}, as the trials did"] if settings else []),
        ],
        warnings=found["notes"],
    )
    if found["parts"]:
        yield _parts(found)
    yield from traced_ladder(found["levers"], unit)


def _lead(found: Json) -> str:
    where = f"each of {found['ranks']} ranks ({found['device']})" if found["ranks"] > 1 else found["device"]
    seconds = found["seconds_per_step"]
    each = "" if seconds is None else f", {seconds:.3g} s each"
    ends = "the data set has no more" if found["bound"] == "data" else f"limited by: {found['bound']}"
    return (
        f"{found['steps']} complete optimizer steps ran at that size on {where}{each}, with "
        f"{found['headroom']:.0%} of the memory kept free. Without headroom {found['without_headroom']:,}; {ends}."
    )


def _trials(found: Json) -> str:
    """Peaks against the size; a trial that failed has no peak and stands at its limit."""
    ran = sorted({(t["size"], t["peak_bytes"] / GIB) for t in found["trials"] if t["end"] == "ran" and t["peak_bytes"]})
    limit = found["limit_bytes"]
    failed = [
        (t["size"], (t["limit_bytes"] or limit) / GIB)
        for t in found["trials"]
        if t["end"] != "ran" and (t["limit_bytes"] or limit)
    ]
    if not ran and not failed:
        return ""
    curves = [Curve("ran", ran, color="--green"), Curve("failed", failed, color="--rose", joined=False, hollow=True)]
    marks = [Mark(f"certified {found['size']:,}", found["size"], "--green")]
    if limit:
        marks.append(Mark(f"limit {size(limit)}", limit / GIB, upright=False))
    plot = Plot("Peak memory of each trial, GiB", [c for c in curves if c.points], marks=marks, height=230)
    return plots([plot], x_title=f"{found['unit']} in one step")


def _table(found: Json) -> Table:
    rows = [
        (
            str(number),
            f"{trial['size']:,}",
            trial["end"],
            str(trial["steps"]) if trial["steps"] else "",
            size(trial["peak_bytes"]) if trial["peak_bytes"] is not None else "",
            size(trial["limit_bytes"]) if trial["limit_bytes"] is not None else "",
            f"{trial['seconds']:.1f} s",
        )
        for number, trial in enumerate(found["trials"], 1)
    ]
    head = ("trial", found["unit"], "end", "steps", "peak", "limit", "took")
    return Table(head, rows, strong=[len(rows) - 1], words=(2,))


def _parts(found: Json) -> Section:
    predicted = [(p["name"], float(p["predicted"])) for p in found["parts"] if p["predicted"]]
    measured = [(p["name"], float(p["measured"])) for p in found["parts"] if p["measured"]]
    bars_of = [Bar("predicted", predicted), Bar("measured", measured)]
    limit = ("limit", float(found["limit_bytes"])) if found["limit_bytes"] else None
    if limit and limit[1] > 3 * sum(value for _, value in measured):
        limit = None
    layer = found["largest_layer"]
    notes = [f"limiting part: {found['limiting']}"] if found["limiting"] else []
    if layer:
        name = layer["name"] or "the model itself"
        notes.append(f"largest activation: {name} ({layer['kind']}), {size(layer['bytes_kept'])}")
    known = [
        [size(p[key]) if p[key] is not None else "not known" for key in ("predicted", "measured")]
        for p in found["parts"]
    ]
    return Section(
        "Memory at that size, predicted beside measured",
        lead="Predicted from the trace of a small forward pass, before the search; nothing is predicted of the rest.",
        picture=stacked([bar for bar in bars_of if bar.parts], form=size, limit=limit),
        table=Table(
            ("part", "predicted", "measured"),
            [(p["name"], *cells) for p, cells in zip(found["parts"], known, strict=True)],
        ),
        notes=notes,
    )
