"""The critical batch by branches: from one state, the same examples in larger and larger batches (Merrill et al. 2025,
arXiv 2505.23971).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, median

from stoker.batch import randomness
from stoker.batch.critical.branched import TOLERANCE, Branched, Rung
from stoker.batch.critical.tuning import settle, tune
from stoker.batch.in_process import unchanged
from stoker.batch.target import Target
from stoker.batch.telling import OnPart
from stoker.batch.trainings.history import History
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Make, Plan, made_anew, train
from stoker.errors import ConfigError

__all__ = ["branched", "smoothed"]

MULTIPLES = (1, 2, 4, 8, 16)
ORDERS = 3
APART = 10_000
"""Epochs between two orders of the data, so that they share none."""
FEWEST = 4
"""Updates of a branch, below which no batch can show what it can do."""
SHOWN = 16
"""Points of a smoothed training loss that are kept."""


def branched(
    target: Make | Target,
    base: Setting,
    plan: Plan,
    *,
    multiples: Sequence[int] = MULTIPLES,
    trained: int = 0,
    tolerance: float = TOLERANCE,
    orders: int = ORDERS,
    search_orders: int = 1,
    refine: int = 1,
    tell: OnPart = lambda said, left: None,
) -> Branched:
    """Trains branches of `plan.samples` at each multiple of the base's examples per update, from the state that the
    target is in. `trained`: samples that led there, to be told with the result. A `Target` is afterwards as it was.

    All branches of one order see the same examples. At each batch the learning rate is searched for around the rule's
    times what served the last batch best (`tuning.tune`, whose `refine` this is), by the mean loss on `search_orders`
    orders of the data. Where that ends, and at rates beside it until the best is inside, each of `orders` others is
    trained once (`tuning.settle`): the best of these means is the batch's, so that a search misled by noise, or an
    order that goes astray at a rate near its edge, doesn't speak for the batch.

    The loss is the held-out one at the end where the target has `validate`; else the training loss, smoothed so that a
    sample's weight halves with every largest batch. That of an update is of the weights before it, which is to the
    disadvantage of large batches: by held-out loss is better.

    ConfigError for multiples that don't begin at 1 and rise, a tolerance that isn't positive, fewer than `FEWEST`
    updates in the largest batch's branch, and for all that a training refuses.
    """
    sizes = [base.examples_per_update * each for each in multiples]
    _check(multiples, sizes, tolerance, min(orders, search_orders), plan)
    base = replace(base, base_examples=base.base_examples or base.examples_per_update)
    with randomness.kept():
        if not isinstance(target, Target):
            target = made_anew(target, base.seed)
        branches = _Branches(target, base, plan, max(sizes), tell)
        with unchanged(target):  # sweeps up after all of them
            rungs = branches.climb(sizes, orders, search_orders, refine)
    return Branched(
        unit=target.unit,
        before=trained,
        samples=plan.samples,
        tolerance=tolerance,
        measured="held-out loss" if target.validate else "smoothed training loss",
        rungs=rungs,
        samples_spent=branches.spent,
    )


class _Branches:
    """Trains them, and counts what that costs."""

    def __init__(self, target: Target, base: Setting, plan: Plan, largest: int, tell: OnPart) -> None:
        self._target, self._base, self._largest, self._tell = target, base, largest, tell
        self._plan = replace(plan, evaluations=max(1, plan.evaluations) if target.validate else 0)
        self.spent = 0

    def climb(self, sizes: Sequence[int], orders: int, searched: int, refine: int) -> tuple[Rung, ...]:
        """From the smallest batch up."""
        rungs: list[Rung] = []
        factor, began = self._base.rate_factor, time.perf_counter()
        for size in sizes:
            rungs.append(self._rung(size, factor, orders, searched, refine))
            factor = rungs[-1].rate_factor
            left = (time.perf_counter() - began) / len(rungs) * (len(sizes) - len(rungs))
            self._tell(f"branches of {size:,} {self._target.unit}: loss {rungs[-1].loss:.4f}", left)
        return tuple(rungs)

    def _rung(self, size: int, start: float, orders: int, searched: int, refine: int) -> Rung:
        def cost(factor: float) -> float:
            return fmean(self._loss(self._branch(size, factor, order)) for order in range(searched))

        measured: dict[float, list[History]] = {}

        def mean(factor: float) -> float:
            measured[factor] = [self._branch(size, factor, searched + order) for order in range(orders)]
            return fmean(map(self._loss, measured[factor]))

        found = tune(cost, start, refine=refine)
        settled = settle(mean, found.factor)
        factor, _ = min(settled, key=lambda each: each[1])
        histories = measured[factor]
        return Rung(
            examples_per_update=size,
            learning_rate=histories[0].learning_rate[-1],
            rate_factor=factor,
            tried=found.tried,
            settled=settled,
            losses=tuple(self._loss(each) for each in histories),
            curve=self._curve(histories),
            seconds=median(seconds for each in histories for seconds in each.seconds),
        )

    def _branch(self, size: int, factor: float, order: int) -> History:
        setting = replace(self._base, examples_per_update=size, rate_factor=factor)
        with unchanged(self._target, swept=False):
            history = train(self._target, setting, self._plan, first_epoch=APART * (order + 1))
        self.spent += history.samples[-1]
        return history

    def _loss(self, history: History) -> float:
        if self._plan.evaluations:
            return history.final_loss
        return math.inf if history.diverged else smoothed(history, self._largest)[-1][1]

    def _curve(self, histories: Sequence[History]) -> tuple[tuple[int, float], ...]:
        """Mean over the orders, as far as all of them went."""
        if self._plan.evaluations:
            series = [[(each.samples, each.loss) for each in history.evaluations] for history in histories]
        else:
            series = [smoothed(history, self._largest) for history in histories]
        shared = list(zip(*series, strict=False))
        every = max(1, len(shared) // SHOWN)
        return tuple(
            (points[0][0], math.fsum(loss for _, loss in points) / len(points)) for points in shared[::-every][::-1]
        )


def smoothed(history: History, half_life: float) -> list[tuple[int, float]]:
    """(samples, training loss) of each update, averaged over those before with weights that halve every `half_life`
    samples: at batches that differ, over the same examples.
    """
    kept = 0.5 ** (history.setting.examples_per_update / half_life)
    total = weight = 0.0
    made = []
    for samples, loss in zip(history.samples, history.loss, strict=True):
        total, weight = kept * total + loss, kept * weight + 1.0
        made.append((samples, total / weight))
    return made


def _check(multiples: Sequence[int], sizes: Sequence[int], tolerance: float, orders: int, plan: Plan) -> None:
    if len(multiples) < 2 or multiples[0] != 1 or sorted(set(multiples)) != list(multiples):
        raise ConfigError(f"multiples = {list(multiples)}: 1 and then larger ones, ascending")
    if not 0 < tolerance < math.inf:
        raise ConfigError(f"tolerance = {tolerance}: a positive difference of losses")
    if orders < 1:
        raise ConfigError(f"orders or search_orders = {orders}: at least 1")
    if plan.samples < FEWEST * sizes[-1]:
        raise ConfigError(
            f"a branch of {plan.samples:,} samples holds fewer than {FEWEST} updates of {sizes[-1]:,}: take "
            f"{FEWEST * sizes[-1]:,} samples or more, or smaller multiples"
        )
