"""Which learning rate serves a batch best: a short search over factors, and a second look at its end. No torch here."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

__all__ = ["Tuned", "settle", "tune"]

SPACING = 2.0
"""Between the factors that are tried first."""
MOST = 9
"""Factors that are tried at that spacing."""
NEAR = 0.6
"""Of that spacing, in logarithm: how far from the best a cost has 1/e of the weight in the parabola through them."""
BESIDE = math.sqrt(2)
"""Between factors of the second look."""
LOOKS = 6
"""Factors of it, at most."""


@dataclass(frozen=True)
class Tuned:
    """The factor that costs least by a parabola through those tried."""

    factor: float
    tried: tuple[tuple[float, float], ...]
    """(factor, cost), ascending; infinite where the training diverged or never got there."""

    @property
    def inside(self) -> bool:
        """Factors on both sides of it were tried."""
        return self.tried[0][0] < self.factor < self.tried[-1][0]


def tune(cost: Callable[[float], float], start: float = 1.0, *, refine: int = 1) -> Tuned:
    """The best factor near `start`: its half and double, further out while the best is at an edge; then, `refine`
    times, half as far (in logarithm) to both sides of the best. As costs are noisy, what is taken is the
    lowest point of a parabola through those near the best, where both its neighbours are known, and within them.

    `cost(factor)` is lower where it is better; NaN counts as infinite. Where every factor fails, smaller ones are
    tried, as a rate that is too high is what ends trainings.
    """
    found: dict[float, float] = {}

    def ask(factor: float) -> None:
        found[factor] = _number(cost(factor))

    for factor in (start, start / SPACING, start * SPACING):
        ask(factor)
    while len(found) < MOST:
        best = _best(found)
        if best == min(found) or math.isinf(found[best]):
            ask(min(found) / SPACING)
        elif best == max(found):
            ask(best * SPACING)
        else:
            break
    spacing = SPACING
    for _ in range(refine if math.isfinite(found[_best(found)]) else 0):
        best, spacing = _best(found), math.sqrt(spacing)
        for factor in (best / spacing, best * spacing):
            ask(factor)
    return Tuned(_lowest(found), tuple(sorted(found.items())))


def settle(cost: Callable[[float], float], start: float) -> tuple[tuple[float, float], ...]:
    """A second look at what a search came to, by a cost that is dearer and less noisy: `start`, and factors beside it
    until the best has both its neighbours. (factor, cost), ascending; the best is `min` by cost.

    So a search that was misled, or a factor that only now shows that it fails, is put right.
    """
    factors, found = {0: start}, {0: _number(cost(start))}
    while True:
        best = min(sorted(found), key=lambda place: found[place])
        beside = [place for place in (best - 1, best + 1) if place not in found]
        if not beside or len(found) >= LOOKS:
            return tuple((factors[place], found[place]) for place in sorted(found))
        factors[beside[0]] = start * BESIDE ** beside[0]
        found[beside[0]] = _number(cost(factors[beside[0]]))


def _lowest(found: dict[float, float]) -> float:
    """Of a parabola over log factor, by weighted least squares; the best one itself where there is none.

    A cost far from the best factor, or far above the best cost, says little of where the lowest point is.
    """
    best = _best(found)
    near = sorted(each for each in found if abs(math.log(each / best)) <= math.log(SPACING) * (1 + 1e-9))
    known = [each for each in near if math.isfinite(found[each])]
    place = near.index(best)
    if not (0 < place < len(near) - 1 and {near[place - 1], near[place + 1]} <= set(known)):
        return best
    x = np.log(np.array(known) / best) / math.log(SPACING)
    above = np.array([found[each] - found[best] for each in known])
    usual = median(above[above > 0]) if (above > 0).any() else 1.0
    weights = np.exp(-((x / NEAR) ** 2)) / np.maximum(1.0, above / usual) ** 2
    bend, slope, _ = np.polyfit(x, above / usual, 2, w=np.sqrt(weights))
    if not bend > 0:
        return best
    low, high = near[place - 1], near[place + 1]
    return float(min(max(best * SPACING ** (-slope / (2 * bend)), low), high))


def _number(cost: float) -> float:
    return math.inf if math.isnan(cost) else cost


def _best(found: dict[float, float]) -> float:
    """The smaller of equals."""
    return min(sorted(found), key=lambda factor: found[factor])
