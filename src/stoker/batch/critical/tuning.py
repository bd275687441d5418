"""Which learning rate serves a batch best: a short search over factors. No torch here."""

import math
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Tuned", "tune"]

SPACING = 2.0
"""Between the factors that are tried first."""
MOST = 9
"""Factors that are tried at that spacing."""


@dataclass(frozen=True)
class Tuned:
    """The factor whose training cost least."""

    factor: float
    tried: tuple[tuple[float, float], ...]
    """(factor, cost), ascending; infinite where the training diverged or never got there."""

    @property
    def inside(self) -> bool:
        """Factors on both sides of the best cost more."""
        return self.tried[0][0] < self.factor < self.tried[-1][0]


def tune(cost: Callable[[float], float], start: float = 1.0, *, refine: int = 1) -> Tuned:
    """The best factor near `start`: its half and double, further out while the best is at an edge; then, `refine`
    times, half as far (in logarithm) to both sides of the best.

    `cost(factor)` is lower where it is better; NaN counts as infinite. Where every factor fails, smaller ones are
    tried, as a rate that is too high is what ends trainings.
    """
    found: dict[float, float] = {}

    def ask(factor: float) -> None:
        value = cost(factor)
        found[factor] = math.inf if math.isnan(value) else value

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
    return Tuned(_best(found), tuple(sorted(found.items())))


def _best(found: dict[float, float]) -> float:
    """The smaller of equals."""
    return min(sorted(found), key=lambda factor: found[factor])
