"""Reads the curve after a batch was raised against the one before. Pure, without torch.

Another batch cuts the same data elsewhere, so the first dozens of losses differ from what would have been, as those of
another order do; that alone is no sign of anything, and they aren't judged.
"""

import math

import numpy as np

from stoker import signals
from stoker.batch.reading.curve import Curve
from stoker.batch.reading.found import Finding, Reading
from stoker.batch.reading.rules import set_rate

__all__ = ["read_raise"]

ORDER = 36
"""Losses after a change that order alone moves; of a shorter curve a quarter."""
LEAST = 12
"""Updates to judge by, before and after."""
RISEN, RISEN_Z = 0.10, 4.0
"""Of the level before, above it."""
NORMS = 5.0
"""Times the median gradient norm before."""
SLOWER = 0.6
"""Pace per example, over the pace that was left before."""
UNSCALED = 1.1
"""Growth of the rate up to which it wasn't scaled."""


def read_raise(before: Curve, after: Curve) -> Reading:
    """Whether a larger batch does harm: it diverges, or is merely slow because the rate wasn't scaled.

    `before` ends where `after` begins. Rates that rise or decay meanwhile are compared as they were at the change.
    ConfigError for series of unequal lengths; too little data is said in the reading.
    """
    broken = after.broken
    whole = after if broken is None else after.cut(0, broken)
    skipped = min(ORDER, len(after.losses) // 4)
    note = (
        f"the first {skipped} losses after the change aren't judged: another batch order alone changes the first dozens"
    )
    enough = min(len(before.losses), len(whole.losses) - skipped) >= LEAST
    if not enough and broken is None:
        short = (
            f"{len(before.losses)} updates before and {len(after.losses)} after: {LEAST} beyond the first are needed"
        )
        return Reading("too little data", (), (note, short), {})
    if not enough:
        return Reading(
            "look", (_diverged(before, after, f"the loss or gradient broke at update {broken}"),), (note,), {}
        )
    figures = _figures(before, whole, skipped)
    said = _risen(figures)
    if broken is not None:
        said.insert(0, f"the loss or gradient was no longer finite after {broken + 1:,} updates")
    if said:
        return Reading("look", (_diverged(before, after, "; ".join(said)),), (note,), figures)
    if figures.get("pace", math.nan) < SLOWER and figures.get("rate_growth", 1.0) <= UNSCALED:
        return Reading("look", (_slow(before, after, figures),), (note,), figures)
    return Reading("healthy", (), (note,), figures)


def _figures(before: Curve, after: Curve, skipped: int) -> dict[str, float]:
    losses, later = np.asarray(before.losses), np.asarray(after.losses[skipped:])
    half = losses[len(losses) // 2 :]
    level, now = signals.trend(list(half)), signals.blocks(list(later), 8)
    highest = max(now, key=lambda each: each.value)
    noise = signals.scatter(list(half)) / math.sqrt(len(half)) * 2
    error = math.hypot(highest.error, noise)
    found = {
        "before": level.end,
        "after": now[-1].value,
        "risen": (highest.value - level.end) / abs(level.end) if level.end else math.nan,
        "risen_z": (highest.value - level.end) / error if error > 0 else math.nan,
    }
    if len(before.gradient_norms) and len(after.gradient_norms):
        usual = float(np.median(before.gradient_norms[len(losses) // 2 :]))
        found["norms"] = max(after.gradient_norms) / usual if usual > 0 else math.nan
    if len(before.rates) and len(after.rates) and before.rates[-1] > 0:
        found["rate_growth"] = after.rates[0] / before.rates[-1]
    pace = -level.slope / before.examples_per_update
    if pace > 0 and level.z < -3:
        then = signals.trend(list(later[: max(3, len(later) // 2)]))
        found["pace"] = -then.slope / after.examples_per_update / pace
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


def _risen(figures: dict[str, float]) -> list[str]:
    said = []
    if figures.get("risen", 0.0) > RISEN and figures.get("risen_z", 0.0) > RISEN_Z:
        said.append(
            f"the loss rose {figures['risen']:.0%} above its level of {figures['before']:.4g} before the change"
        )
    if figures.get("norms", 0.0) > NORMS and said:
        said.append(f"gradient norms rose to {figures['norms']:.3g} times their median before")
    return said


def _diverged(before: Curve, after: Curve, said: str) -> Finding:
    safe = before.rates[-1] if before.rates else math.nan
    words = "as before the change" if before.rates else "back to what it was before the change"
    return Finding(
        "rate too high", said, (0, len(after.losses) * after.examples_per_update), 0.85,
        (set_rate(safe, 1.0, words) if before.rates else f"learning_rate: {words}")
        + "; clip_norm = 1.0; watch the gradient norm, halve the rate where it rises",
    )  # fmt: skip


def _slow(before: Curve, after: Curve, figures: dict[str, float]) -> Finding:
    growth = after.examples_per_update / before.examples_per_update
    rate = after.rates[0] if after.rates else math.nan
    said = f"per example the loss falls at {max(figures['pace'], 0):.0%} of the pace before"
    if after.rates:
        said += f", at {figures['rate_growth']:.3g} times the rate with {growth:.3g} times the examples"
    return Finding(
        "rate too low", said, (0, len(after.losses) * after.examples_per_update), 0.7 if after.rates else 0.5,
        set_rate(rate, math.sqrt(growth), f"x sqrt({growth:g}) for Adam and its kin")
        + f", or {set_rate(rate, growth, f'x {growth:g} for SGD')}, risen to over a warm-up",
    )  # fmt: skip
