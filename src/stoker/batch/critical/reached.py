"""Steps to one loss at several batches, as measured, with the curve through them and what a doubling gives."""

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.batch.curve import Fit, fit
from stoker.batch.finite import finite
from stoker.batch.table import aligned
from stoker.batch.tradeoff import Doubling, Tradeoff, fit_tradeoff
from stoker.batch.trainings.history import History
from stoker.errors import ConfigError

__all__ = ["AROUND", "Reached", "Steps", "samples_to"]

AROUND = 1.3
"""How many times fewer and more samples an evaluation is averaged with, and a line is fitted to."""
FEWEST = 4
"""Evaluations that a line is fitted to."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Steps:
    """Of one batch, at the rate that got there first."""

    examples_per_update: int
    learning_rate: float
    rate_factor: float
    """Of the rate, beyond the rule's."""
    tried: tuple[tuple[float, float], ...]
    """(factor, samples to the loss) of the search for it, by a seed that the samples below aren't from; infinite: not
    reached, or not sooner than by a factor tried before.
    """
    samples: tuple[float, ...]
    """To the loss, by seed, between evaluations by log loss; infinite: not reached."""
    seconds: float
    """Median of an update."""

    @property
    def steps(self) -> tuple[float, ...]:
        """To the loss, of the seeds that reached it."""
        return tuple(each / self.examples_per_update for each in self.samples if math.isfinite(each))


@dataclass(frozen=True)
class Reached:
    """What every batch took to one loss."""

    unit: str
    loss: float
    """Of held-out data, to be reached."""
    budget: int
    """Samples after which a training gave up."""
    base_examples: int
    batches: tuple[Steps, ...]
    """Ascending."""
    samples_spent: int
    """Over all trainings, the search for rates included."""

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(batch, steps), geometric means over the seeds that reached the loss.

        One for each batch: its seeds share its rate, and whatever else takes it off the curve, so that they don't count
        as so many points where the scatter about the curve is to tell how well it is known.
        """
        return tuple(
            (float(each.examples_per_update), math.exp(math.fsum(map(math.log, each.steps)) / len(each.steps)))
            for each in self.batches
            if each.steps
        )

    @property
    def tradeoff(self) -> Tradeoff | None:
        """The curve through the points; None: see `unfitted`."""
        return self._fitted()[0]

    @property
    def unfitted(self) -> str:
        """Why there is no curve; empty where there is one."""
        return self._fitted()[1]

    def _fitted(self) -> tuple[Tradeoff | None, str]:
        reached = [each for each in self.batches if each.steps]
        if len(reached) < 2:
            return None, f"the loss was reached at {len(reached)} batches, and a curve needs two: a larger budget"
        try:
            return fit_tradeoff(self.points), ""
        except ConfigError as error:
            return None, str(error)

    @property
    def seconds(self) -> Fit | None:
        """An update's time as a line over the batch; None: fewer than two batches."""
        if len(self.batches) < 2:
            return None
        return fit([each.examples_per_update for each in self.batches], [each.seconds for each in self.batches])

    def doubling(self, batch: float, *, exchange_seconds: float = 0.0) -> Doubling | None:
        """What twice the batch costs and saves, by the curve and the times of updates as they ran here.

        `exchange_seconds`: of an update with several ranks, for exchanging gradients, in addition.
        """
        curve, line = self.tradeoff, self.seconds
        if curve is None:
            return None
        seconds = None if line is None else line.seconds
        return curve.doubling(batch, seconds=seconds, exchange_seconds=exchange_seconds)

    def to_json(self) -> dict[str, Any]:
        """Plain types; what is infinite is null."""
        curve, line = self.tradeoff, self.seconds
        doubled = self.doubling(self.base_examples)
        return {
            "unit": self.unit,
            "loss": self.loss,
            "budget": self.budget,
            "base_examples": self.base_examples,
            "batches": [finite(asdict(each)) for each in self.batches],
            "tradeoff": curve and curve.to_json(),
            "unfitted": self.unfitted,
            "seconds": line and line.to_json(),
            "doubling": doubled and doubled.to_json(),
            "words": str(doubled) if doubled else "",
            "samples_spent": self.samples_spent,
        }

    def __str__(self) -> str:
        rows = [(self.unit, "rate", "x rule", "updates", self.unit, "reached", "ms/update")]
        for each in self.batches:
            steps = each.steps
            mean = math.fsum(steps) / len(steps) if steps else math.nan
            rows.append(
                (
                    f"{each.examples_per_update:,}",
                    f"{each.learning_rate:.3g}",
                    f"{each.rate_factor:.3g}",
                    f"{mean:,.0f}" if steps else "",
                    f"{mean * each.examples_per_update:,.0f}" if steps else "",
                    f"{len(steps)} of {len(each.samples)}",
                    f"{each.seconds * 1e3:,.3g}",
                )
            )
        curve, doubled = self.tradeoff, self.doubling(self.base_examples)
        return "\n".join(
            [
                str(curve) if curve else f"no curve: {self.unfitted}",
                *([str(doubled)] if doubled else []),
                "",
                f"to a held-out loss of {self.loss:.4f}, within {self.budget:,} {self.unit}:",
                *aligned(rows),
                "",
                f"{self.samples_spent:,} {self.unit} trained on in all",
            ]
        )


def samples_to(history: History, loss: float) -> float:
    """Samples at which the held-out loss, smoothed, first is `loss`, straight in log loss between evaluations.

    The first time that a noisy loss is that low comes before its mean is, the more so the noisier it is, and a small
    batch is noisy: each evaluation is therefore averaged with those at up to `AROUND` times fewer or more samples. Such
    a mean of a bent curve is higher than its middle: with four evaluations or more so near, a line through their log
    losses over log samples, by least squares, has the last word.
    Where the first evaluation is that low the start is taken to have the training loss of the first update. Infinite
    where the loss is never reached.
    """
    samples = np.array([each.samples for each in history.evaluations], float)
    losses = np.array([each.loss for each in history.evaluations], float)
    if not len(samples):
        return math.inf
    total = np.concatenate([[0.0], losses.cumsum()])
    first, last = np.searchsorted(samples, samples / AROUND), np.searchsorted(samples, samples * AROUND, side="right")
    means = (total[last] - total[first]) / (last - first)
    place = int((means <= loss).argmax())
    if not means[place] <= loss:
        return math.inf
    if place:
        start, high = float(samples[place - 1]), float(means[place - 1])
    else:
        start, high = 0.0, history.loss[0]
    if not high > loss:  # a single batch's loss, which may be low by chance
        return float(samples[place])
    crossed = start + _share(high, float(means[place]), loss) * (float(samples[place]) - start)
    near = (samples >= crossed / AROUND) & (samples <= crossed * AROUND)
    return _on_line(samples[near], losses[near], loss, crossed)


def _on_line(samples: Floats, losses: Floats, loss: float, crossed: float) -> float:
    """Where a line through the points has the loss; `crossed` where they are few, or don't fall to it among them."""
    if len(samples) < FEWEST or not (losses > 0).all() or not loss > 0:
        return crossed
    slope, level = np.polyfit(np.log(samples / crossed), np.log(losses / loss), 1)
    if not slope < 0 or abs(level / slope) > math.log(AROUND):
        return crossed
    return float(crossed * math.exp(-level / slope))


def _share(high: float, low: float, loss: float) -> float:
    """Of the way from `high` down to `low` at which it is `loss`."""
    if low > 0 and math.isfinite(high):
        return math.log(high / loss) / math.log(high / low)
    return (high - loss) / (high - low) if math.isfinite(high) else 1.0
