"""Steps to one loss at several batches, with the learning rate searched for at each."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from stoker.batch.critical.reached import AROUND, Reached, Steps, samples_to
from stoker.batch.critical.tuning import tune
from stoker.batch.telling import OnPart
from stoker.batch.trainings.history import History
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Make, Plan, train_anew
from stoker.errors import ConfigError

__all__ = ["measure_tradeoff"]

SEEDS = 3
LATE = 2.0
"""Times the samples of the first so far, after which a training of the search is given up."""


def measure_tradeoff(
    make: Make,
    sizes: Sequence[int],
    loss: float,
    base: Setting,
    plan: Plan,
    *,
    seeds: int = SEEDS,
    refine: int = 1,
    unit: str = "examples",
    tell: OnPart = lambda said, left: None,
) -> Reached:
    """Trains at each of `sizes` examples per update until the held-out loss is `loss`, for at most `plan.samples`.

    At each batch the learning rate is searched for around the rule's times what served the last batch best
    (`tuning.tune`), with the base's seed; at the best rate it is trained with `seeds` others. A training of the search
    ends where it is late. `plan.evaluations` are over the whole budget: many, as the steps are read
    off between them. `refine`: see `tuning.tune`. `unit`: what a size counts.

    ConfigError for sizes that don't rise, a plan without evaluations, a loss that isn't below the untrained model's,
    and for all that a training refuses.
    """
    if len(sizes) < 2 or sorted(set(sizes)) != list(sizes):
        raise ConfigError(f"sizes = {list(sizes)}: two or more, ascending")
    if seeds < 1 or not math.isfinite(loss):
        raise ConfigError(f"seeds = {seeds} (at least 1), loss = {loss} (a number)")
    if plan.evaluations < 1:
        raise ConfigError("evaluations = 0: the loss can't be seen to be reached; ask for 20 or more")
    base = replace(base, base_examples=base.base_examples or base.examples_per_update)
    trainings = _Trainings(make, base, plan, loss)
    batches: list[Steps] = []
    factor, began = base.rate_factor, time.perf_counter()
    for size in sizes:
        batches.append(trainings.at(size, factor, seeds, refine))
        factor = batches[-1].rate_factor
        left = (time.perf_counter() - began) / len(batches) * (len(sizes) - len(batches))
        took = ", ".join(f"{steps:,.0f}" for steps in batches[-1].steps) or "never"
        tell(f"{size:,} {unit}: updates to the loss {took}", left)
    return Reached(
        unit=unit,
        loss=loss,
        budget=plan.samples,
        base_examples=base.examples_per_update,
        batches=tuple(batches),
        samples_spent=trainings.spent,
    )


class _Trainings:
    """Runs them, and counts what that costs."""

    def __init__(self, make: Make, base: Setting, plan: Plan, loss: float) -> None:
        self._make, self._base, self._plan, self._loss = make, base, plan, loss
        self.spent = 0

    def at(self, size: int, start: float, seeds: int, refine: int) -> Steps:
        least = math.inf

        def cost(factor: float) -> float:
            nonlocal least
            took = samples_to(self._train(size, factor, self._base.seed, least), self._loss)
            least = min(least, took)
            return took

        found = tune(cost, start, refine=refine)
        histories = [self._train(size, found.factor, self._base.seed + each, math.inf) for each in range(1, seeds + 1)]
        return Steps(
            examples_per_update=size,
            learning_rate=histories[0].learning_rate[-1],
            rate_factor=found.factor,
            tried=found.tried,
            samples=tuple(samples_to(each, self._loss) for each in histories),
            seconds=median(seconds for each in histories for seconds in each.seconds),
        )

    def _train(self, size: int, factor: float, seed: int, least: float) -> History:
        """Until the loss is reached, or so many samples were trained on that another rate was there before."""
        setting = replace(self._base, examples_per_update=size, rate_factor=factor, seed=seed)

        def stop(history: History) -> bool:
            last = history.evaluations[-1]
            if last.samples >= LATE * least:
                return True
            return last.loss <= self._loss and last.samples >= AROUND * samples_to(history, self._loss)

        history = train_anew(self._make, setting, self._plan, stop=stop)
        self.spent += history.samples[-1]
        return history
