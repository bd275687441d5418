"""What the best of a family's trainings reaches, by a grid of learning rates and batches, for bench.curves.

Nothing about a family's rate is guessed: the grid goes on until its best rate lies inside.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch

from bench.curve_tasks import Family, target
from stoker.batch.trainings.history import History
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan, train_anew

__all__ = ["HARMED", "HEALTHY", "Grid", "gridded"]

HEALTHY = 0.03
"""Regret of a healthy training at most: of the fall from the untrained held-out loss to the grid's best."""
HARMED = 0.06
"""Regret of a training that something harmed, at least. What lies between is neither."""
SEEDS = (90_001, 90_002)
FEWEST, MOST = -4, 4
"""Powers of two of the first rates tried, around the one a family was written with."""


@dataclass(frozen=True)
class Grid:
    """A family at its best rate, and what that reaches."""

    family: Family
    untrained: float
    best: float
    """Held-out loss of the best cell, mean over seeds."""
    cells: dict[tuple[int, float], float]
    """(examples per update, factor of the written rate) to held-out loss."""

    def regret(self, history: History) -> float:
        """Of the fall to the best; infinite where it diverged, below 0 where it was better still."""
        return (history.final_loss - self.best) / (self.untrained - self.best)

    def healthy(self, history: History) -> bool:
        return self.regret(history) <= HEALTHY

    def harmed(self, history: History) -> bool:
        return not self.regret(history) <= HARMED

    def __str__(self) -> str:
        sizes = sorted({size for size, _ in self.cells})
        lines = [f"{self.family.name}: {self.untrained:.4g} untrained, best {self.best:.4g} at {self.family.rate:.3g}"]
        for size in sizes:
            row = sorted((factor, loss) for (each, factor), loss in self.cells.items() if each == size)
            lines.append(f"  {size:4} examples  " + "  ".join(f"x{factor:g} {loss:.4g}" for factor, loss in row))
        return "\n".join(lines)


def gridded(family: Family) -> Grid:
    """Rates by factors of two at the family's batch, two seeds each, and at 4 times the batch by the optimizer's rule.

    The family's rate is then the best at its own batch.
    """
    cells: dict[tuple[int, float], float] = {}
    powers = list(range(FEWEST, MOST + 1))
    while True:
        for power in powers:
            cells.setdefault((family.examples, 2.0**power), _reached(family, family.examples, 2.0**power, SEEDS))
        best = min(powers, key=lambda power: cells[family.examples, 2.0**power])
        if powers[0] < best < powers[-1]:
            break
        powers = [powers[0] - 2, powers[0] - 1, *powers] if best == powers[0] else [*powers, best + 1, best + 2]
    for power in (best - 1, best, best + 1):
        cells[4 * family.examples, 2.0**power] = _reached(family, 4 * family.examples, 2.0**power, SEEDS)
    rate = family.rate * 2.0**best
    return Grid(replace(family, rate=rate), _untrained(family), min(cells.values()), cells)


def _reached(family: Family, size: int, factor: float, seeds: Sequence[int]) -> float:
    plan = Plan(family.samples, evaluations=1, kind=family.optimizer)
    done = [
        train_anew(
            lambda: target(family),
            Setting(size, family.examples, rate_factor=factor, decay="linear", warmup_samples=family.samples // 20,
                    seed=seed),
            plan,
        )
        for seed in seeds
    ]  # fmt: skip
    found = fmean(each.final_loss for each in done)
    return found if math.isfinite(found) else math.inf


def _untrained(family: Family) -> float:
    found = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        made = target(family)
        assert made.validate is not None
        with torch.no_grad():
            found.append(float(made.validate(made.model)))  # type: ignore[arg-type]
    return fmean(found)
