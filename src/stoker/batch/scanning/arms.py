"""Trainings that differ in their seed only, and which of several such arms are told apart. No torch here."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from stoker.batch import student
from stoker.batch.trainings.history import Evaluation, History
from stoker.batch.trainings.setting import Setting

__all__ = ["Apart", "Arm", "Moment", "tell_apart"]


BLOWN_UP = 2.0
"""Overfitting raises the held-out loss, but not that of the examples trained on."""


@dataclass(frozen=True)
class Moment:
    """Held-out data at one time of an arm's trainings, over those that hadn't diverged."""

    samples: int
    updates: int
    mean: float
    low: float
    """Of the seeds."""
    high: float


@dataclass(frozen=True)
class Arm:
    """One setting, trained once with each seed."""

    histories: tuple[History, ...]

    @property
    def setting(self) -> Setting:
        """Of the first seed."""
        return self.histories[0].setting

    @cached_property
    def losses(self) -> tuple[float, ...]:
        """Of held-out data at the end, by seed; infinite where the training diverged."""
        return tuple(math.inf if _lost(history) else history.final_loss for history in self.histories)

    @property
    def diverged(self) -> int:
        """Trainings whose loss ended as no number, or far above where it began: they are in no mean."""
        return sum(math.isinf(loss) for loss in self.losses)

    @property
    def whole(self) -> bool:
        """None diverged."""
        return self.diverged == 0

    @property
    def mean(self) -> float:
        """Of the final losses, without those that diverged; NaN where all did."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        return fmean(finite) if finite else math.nan

    @property
    def standing(self) -> float:
        """What arms are ranked by: the mean; infinite where one diverged."""
        return self.mean if self.whole else math.inf

    @property
    def spread(self) -> float | None:
        """Standard deviation of one training's final loss; None: fewer than two didn't diverge."""
        finite = [loss for loss in self.losses if math.isfinite(loss)]
        return stdev(finite) if len(finite) > 1 else None

    @property
    def figures(self) -> dict[str, float]:
        """What else `validate` gives, at the end, mean over trainings that didn't diverge."""
        last = self._last()
        names = list(dict.fromkeys(name for each in last for name in each.figures))
        return {name: fmean(each.figures.get(name, math.nan) for each in last) for name in names}

    @property
    def learning_rate(self) -> float:
        """The highest of the first parameter group."""
        return max((rate for history in self.histories for rate in history.learning_rate), default=math.nan)

    @property
    def updates(self) -> int:
        """Of a whole training."""
        return max(len(history.samples) for history in self.histories)

    @property
    def seconds(self) -> float:
        """Of an update, waiting included: the median."""
        return median(each for history in self.histories for each in history.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Of the same."""
        low, high = np.percentile([each for history in self.histories for each in history.seconds], [25, 75])
        return float(low), float(high)

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.setting.examples_per_update / self.seconds

    @property
    def waited(self) -> float:
        """Share of the time that updates waited for data."""
        return sum(sum(each.waited) for each in self.histories) / sum(sum(each.seconds) for each in self.histories)

    def moments(self) -> list[Moment]:
        """Each evaluation that a training reached, over those that did and didn't diverge."""
        kept = [history.evaluations for history in self.histories if not _lost(history)]
        return [
            Moment(
                same[0].samples,
                same[0].updates,
                fmean(each.loss for each in same),
                min(each.loss for each in same),
                max(each.loss for each in same),
            )
            for same in zip(*kept, strict=True)
        ]

    def after(self, updates: int) -> Moment | None:
        """The first moment with at least so many updates; None: all trainings diverged, or end before."""
        return next((each for each in self.moments() if each.updates >= updates), None)

    def _last(self) -> list[Evaluation]:
        return [each.evaluations[-1] for each in self.histories if not _lost(each)]

    def to_json(self) -> dict[str, Any]:
        """Plain types: the setting and figures, the evaluations of each seed, not the series by update."""
        runs = []
        for history, loss in zip(self.histories, self.losses, strict=True):
            run = {"seed": history.setting.seed, "final_loss": loss, "updates": len(history.samples)}
            run |= {"seconds": sum(history.seconds), "waited": sum(history.waited)}
            runs.append(run | {key: history.to_json()[key] for key in ("evaluations", "ended")})
        names = ("diverged", "mean", "spread", "figures", "learning_rate", "updates", "seconds", "rate", "waited")
        made = {name: getattr(self, name) for name in names} | {"quartiles": list(self.quartiles)}
        made |= {"losses": list(self.losses), "moments": [asdict(each) for each in self.moments()], "runs": runs}
        return {"setting": self.setting.to_json(), **made}


def _lost(history: History) -> bool:
    """Without a final loss that is a number; or it, and what the last tenth of the updates was trained on, are
    `BLOWN_UP` times the untrained loss: divergence that hasn't come to its end.
    """
    if not math.isfinite(history.final_loss):
        return True
    bound = BLOWN_UP * history.loss[0]
    return 0 < bound < min(history.final_loss, median(history.loss[-max(1, len(history.loss) // 10) :]))


@dataclass(frozen=True)
class Apart:
    """Which arms end worse than the best one."""

    best: int
    """By number: the lowest mean of those none of whose trainings diverged."""
    half_width: float | None
    """Of the 95 % interval of a difference of two means; None: a single seed, so nothing can be told apart."""
    differences: tuple[float, ...]
    """Of each arm's mean from the best's."""
    kept: tuple[int, ...]
    """Arms that aren't told from the best, itself among them; without a half width: itself alone."""


def tell_apart(losses: Sequence[Sequence[float]]) -> Apart | None:
    """`losses` (arms, seeds), lower is better, infinite where a training diverged; equal seeds for all. None: in every
    arm one diverged.

    Seeds are blocks: the noise is what is left of the losses after the means of arms and of seeds are taken away
    (Fisher 1935), over the arms whose losses overlap the best's. An arm that is worse with each seed than the best
    with any isn't, so that one which went astray doesn't blur the others; where all are, the noise is the best's own
    spread. Each comparison is at 95 %: of four equal arms one is called worse in about a scan of eight.
    """
    whole = [number for number, each in enumerate(losses) if all(math.isfinite(loss) for loss in each)]
    if not whole:
        return None
    x = np.asarray([losses[number] for number in whole], float)
    means = x.mean(axis=1)
    place = int(means.argmin())
    differences = tuple(
        float(np.mean(each) - means[place]) if number in whole else math.inf for number, each in enumerate(losses)
    )
    seeds = x.shape[1]
    if seeds < 2:
        return Apart(whole[place], None, differences, (whole[place],))
    near = x[x.min(axis=1) <= x[place].max()]
    if len(near) > 1:
        rest = near - near.mean(axis=1, keepdims=True) - near.mean(axis=0) + near.mean()
        degrees = (len(near) - 1) * (seeds - 1)
        variance = float((rest**2).sum()) / degrees
    else:
        degrees, variance = seeds - 1, float(x[place].var(ddof=1))
    half = student.quantile(degrees) * math.sqrt(2 * variance / seeds)
    kept = tuple(number for number in whole if differences[number] <= half)
    return Apart(whole[place], half, differences, kept)
