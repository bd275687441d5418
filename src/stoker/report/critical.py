"""Pictures of the critical batch: loss of the branches against the batch, and steps and samples to one loss."""

from collections.abc import Iterator, Mapping
from typing import Any

from stoker.report.charts import Band, Curve, Mark, Plot, plots
from stoker.report.html import Section, Table

__all__ = ["sections"]

POINTS = 60
"""Of a drawn curve."""
Json = Mapping[str, Any]


def sections(found: Json) -> Iterator[Section]:
    """Of a critical batch's JSON."""
    yield _branches(found["branched"])
    if found["reached"] is not None:
        yield _reached(found["reached"])
    if found["noise_words"]:
        yield Section("Noise of the gradient, before the branches", lead=found["noise_words"])


def _branches(found: Json) -> Section:
    unit, rungs = found["unit"], found["rungs"]
    known = [rung for rung in rungs if rung["excess"] is not None]
    shown = [(rung["examples_per_update"], max(0.0, rung["excess"])) for rung in known]
    spread = [
        (max(0.0, rung["excess"] - rung["half_width"]), max(0.0, rung["excess"] + rung["half_width"]))
        for rung in known
        if rung["half_width"] is not None
    ]
    marks = [Mark(f"tolerance {found['tolerance']:g}", found["tolerance"], "--slate", upright=False)]
    marks.append(Mark("", found["critical"]))
    band = Band(f"critical: {_about(found)}", rungs[0]["examples_per_update"], found["critical"], "--green")
    curve = Curve("", shown, spread=spread if len(spread) == len(shown) else ())
    picture = plots(
        [Plot(f"{found['measured']}, above the lowest of smaller batches", [curve], [band], marks)],
        x_title=f"{unit} per update (logarithmic)",
        x_ticks=[rung["examples_per_update"] for rung in known],
    )
    rows = [
        (
            f"{rung['examples_per_update']:,}",
            f"{rung['learning_rate']:.3g}",
            f"{rung['rate_factor']:.3g}",
            _number(rung["loss"], ".4f"),
            "" if place == 0 else _number(rung["excess"], "+.4f"),
            f"{rung['seconds'] * 1e3:,.3g}",
        )
        for place, rung in enumerate(rungs)
    ]
    return Section(
        f"How far the batch can grow at no loss: {_about(found)} {unit}",
        lead=f"Measured: {found['definition']}.",
        picture=picture,
        table=Table((unit, "rate", "x rule", "loss", "above smaller", "ms/update"), rows, words=()),
        notes=[f"{found['orders']} orders of the data each; {found['samples_spent']:,} {unit} trained on in all"],
    )


def _about(found: Json) -> str:
    low, high = found["interval"] or (None, None)
    within = ""
    if low is not None or high is not None:
        within = (
            f" ({low:,.3g} to {high:,.3g})"
            if low and high
            else f" (at {'least' if low else 'most'} {low or high:,.3g})"
        )
    return f"{found['bound'] or 'about'} {found['critical']:,.4g}{within}"


def _reached(found: Json) -> Section:
    unit, batches, curve = found["unit"], found["batches"], found["tradeoff"]
    sizes = [each["examples_per_update"] for each in batches]
    points = [(size, took) for size, each in zip(sizes, batches, strict=True) for took in each["samples"] if took]
    steps, samples, marks = [], [], []
    if curve is not None:
        low, high = sizes[0], sizes[-1]  # whether or not all of them got there
        for size in (low * (high / low) ** (i / POINTS) for i in range(POINTS + 1)):
            steps.append((size, curve["steps_min"] * (1 + curve["critical"] / size)))
            samples.append((size, curve["examples_min"] * (1 + size / curve["critical"])))
        marks = [Mark(f"critical {curve['critical']:,.4g}", curve["critical"])]
    shown = [
        Plot(
            f"Updates to a held-out loss of {found['loss']:.4g}",
            [Curve("the curve", steps, dots=False), Curve("trainings", [(s, t / s) for s, t in points], joined=False)],
            marks=marks,
        ),
        Plot(
            f"{unit} to it",
            [
                Curve("the curve", samples, "--amber", dots=False),
                Curve("trainings", points, "--amber", joined=False),
            ],
            marks=[Mark("", mark.at) for mark in marks],
        ),
    ]
    rows = [_row(each) for each in batches]
    return Section(
        f"What a larger batch costs and saves, to a held-out loss of {found['loss']:.4g}",
        lead=found["words"] or f"No curve: {found['unfitted']}.",
        picture=plots(shown, x_title=f"{unit} per update (logarithmic)", x_ticks=sizes) if curve else "",
        table=Table((unit, "rate", "x rule", "updates", unit, "reached", "ms/update"), rows, words=()),
        notes=[f"{found['samples_spent']:,} {unit} trained on in all, at most {found['budget']:,} in one training"],
    )


def _row(each: Json) -> tuple[str, ...]:
    reached = [took for took in each["samples"] if took is not None]
    mean = sum(reached) / len(reached) if reached else None
    return (
        f"{each['examples_per_update']:,}",
        f"{each['learning_rate']:.3g}",
        f"{each['rate_factor']:.3g}",
        _number(mean and mean / each["examples_per_update"], ",.0f"),
        _number(mean, ",.0f"),
        f"{len(reached)} of {len(each['samples'])}",
        f"{each['seconds'] * 1e3:,.3g}",
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
