"""Reads a training's curves: what they say about its learning rate, its batch and its data. Pure, without torch."""

import math

from stoker import signals
from stoker.batch.reading.curve import Curve
from stoker.batch.reading.found import Finding, Reading
from stoker.batch.reading.measured import Measured, measure
from stoker.batch.reading.rules import BURST, LATE, TINY, findings, larger_batch, set_rate
from stoker.batch.trainings.history import History

__all__ = ["read_curve"]

LEAST = 12
"""Updates from which a curve has a shape."""
LEAST_HELD = 4


def read_curve(curve: Curve | History, *, finished: bool = True) -> Reading:
    """What these curves say, by one training alone.

    Judged by the losses and whatever else the curve has: with gradient norms, rates, agreements of neighbouring
    gradients (`Plan(agreement=True)`) and four or more evaluations of held-out data it sees most, and notes say what
    was missing. A healthy reading says that nothing looks wrong, not that no better setting exists: that takes a second
    training. `finished`: the curve is of a whole training, so that few updates in all count as a fault.

    ConfigError for series of unequal lengths.
    """
    curve = Curve.of(curve) if isinstance(curve, History) else curve
    rate = max(curve.rates, default=math.nan)
    broken = curve.broken
    seen = curve if broken is None else curve.cut(0, broken)
    measured = measure(seen) if len(seen.losses) >= LEAST else None
    figures = {} if measured is None else measured.figures
    if broken is not None:
        found = _broken(curve, broken, rate)
        if measured is not None:
            found += [
                each
                for each in findings(measured, rate, finished=False)
                if each.cause not in {one.cause for one in found}
            ]
        return Reading("look", tuple(found), tuple(_missing(curve)), figures)
    if measured is None:
        note = f"{len(curve.losses)} updates: from {LEAST} on a curve has a shape"
        return Reading("too little data", (), (note,), {})
    listed = tuple(findings(measured, rate, finished))
    notes = (*_notes(curve, measured, bool(listed)), *_missing(curve))
    return Reading("look" if listed else "healthy", listed, notes, figures)


def _broken(curve: Curve, at: int, rate: float) -> list[Finding]:
    """It ended because a number was no longer finite."""
    what = "loss" if not math.isfinite(curve.losses[at]) else "gradient norm"
    number = curve.losses[at] if what == "loss" else curve.gradient_norms[at]
    where = (at * curve.examples_per_update, (at + 1) * curve.examples_per_update)
    said = f"the {what} was {number} at update {at + 1:,}"
    if at == 0:
        return [
            Finding(
                "bad data", f"{said}, before any step was taken: no learning rate did that", where, 0.9,
                "data: look for numbers that aren't finite, logarithms or divisions of 0, overflow in half precision",
            )
        ]  # fmt: skip
    if curve.gradient_norms and (before := max(curve.gradient_norms[:at])) > 0:
        said += f"; gradient norms had reached {before / curve.gradient_norms[0]:.3g} times the first"
    change = (
        set_rate(rate, 1 / 10, "a tenth") + "; clip_norm = 1.0; watch the gradient norm, halve again where it rises"
    )
    rows = f"{said}; a row out of range does that too"
    found = [
        Finding("rate too high", said, where, 0.9, change),
        Finding("bad data", rows, where, 0.45, "data: look at the batches of the last updates, and at their range"),
    ]
    if curve.examples_per_update <= TINY:
        few = f"{said}, with examples_per_update = {curve.examples_per_update}"
        found.insert(0, Finding("batch too small", few, where, 0.95, larger_batch(curve.examples_per_update)))
    return found


def _notes(curve: Curve, seen: Measured, faults: bool) -> list[str]:
    notes = []
    if not faults and seen.flat < 0.6:
        notes.append(
            f"flat from sample {round(seen.flat * seen.updates) * seen.examples:,} on: either this is what model and "
            "data allow, or a plateau; a higher rate or a smaller batch for a while tells"
        )
    if not faults and seen.late > LATE and seen.late > 3 * seen.late_error:
        notes.append(
            f"{seen.late:.0%} of the fall came in the last quarter of the learning rate spent: more samples would help"
        )
    if not faults and seen.peak > BURST:
        notes.append(
            f"the loss rose to {seen.peak:.3g} times its start and came back: a warm-up or clip_norm would spare that"
        )
    if spikes := signals.spikes(curve.losses):
        notes.append(
            f"{len(spikes)} of {len(curve.losses):,} losses stand out of those around them, the first at update "
            f"{spikes[0] + 1:,}: look at those batches"
        )
    held = [loss for _, loss in curve.held_out if math.isfinite(loss)]
    if len(held) >= LEAST_HELD and held[-1] - min(held) > 0.05 * (seen.first - min(held)) and seen.last < held[-1]:
        notes.append(
            f"held-out losses rise again, from {min(held):.4g} to {held[-1]:.4g}, while training losses don't: "
            "overfitting; stop earlier, or take more data"
        )
    return notes


def _missing(curve: Curve) -> list[str]:
    lacks = {
        "gradient norms": not curve.gradient_norms,
        "learning rates": not curve.rates,
        "agreement of neighbouring gradients": not curve.agreements,
        f"{LEAST_HELD} evaluations of held-out data": len(curve.held_out) < LEAST_HELD,
    }
    names = [name for name, lacking in lacks.items() if lacking]
    return [f"read without {', '.join(names)}"] if names else []
