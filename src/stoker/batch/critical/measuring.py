"""The critical batch of a training by branches, by steps to one loss, and by its gradient's noise."""

from collections.abc import Sequence
from dataclasses import replace

from stoker.batch import randomness
from stoker.batch.critical.branched import TOLERANCE
from stoker.batch.critical.branching import MULTIPLES, ORDERS, branched
from stoker.batch.critical.measured import Critical
from stoker.batch.critical.reaching import SEEDS, measure_tradeoff
from stoker.batch.noise import NoiseScale
from stoker.batch.scope import largest_divisor
from stoker.batch.telling import OnPart
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Make, Plan, made_anew, train
from stoker.errors import ConfigError

__all__ = ["critical_batch"]

PATIENCE = 4
"""Times the base batch's samples that a batch may take to the same loss."""
PARTS = 8
"""Of an update, at most, whose gradients are compared for their noise."""
EVALUATIONS = 40
"""Of a whole budget of samples to one loss."""


def critical_batch(
    make: Make,
    base: Setting,
    plan: Plan,
    *,
    before: int = 0,
    multiples: Sequence[int] = MULTIPLES,
    tolerance: float = TOLERANCE,
    orders: int = ORDERS,
    loss: float | None = None,
    seeds: int = SEEDS,
    tell: OnPart = lambda said, left: None,
) -> Critical:
    """Trains `before` samples at `base`, measuring the noise scale, and from there the branches (`branched`) of
    `plan.samples` each. With `loss`, then the steps to that held-out loss (`measure_tradeoff`) at the same batches,
    each for at most `PATIENCE` times the samples of both.

    ConfigError where one of them refuses.
    """
    with randomness.kept():
        target = made_anew(make, base.seed)
        noise = NoiseScale(unit=target.unit, every=1)
        if before:
            base = replace(base, base_examples=base.base_examples or base.examples_per_update)
            first = train(target, _in_parts(base), replace(plan, samples=before, evaluations=0), noise=noise)
            if first.diverged:
                raise ConfigError(f"the training before the branches {first.ended}: begin with a lower learning rate")
        branches = branched(
            target, base, plan, multiples=multiples, tolerance=tolerance, orders=orders, trained=before, tell=tell
        )
    reached = None
    if loss is not None:
        sizes = [base.examples_per_update * each for each in multiples]
        budget = Plan(PATIENCE * (before + plan.samples), EVALUATIONS, plan.loader, plan.kind)
        reached = measure_tradeoff(make, sizes, loss, base, budget, seeds=seeds, unit=target.unit, tell=tell)
    return Critical(target.unit, base.examples_per_update, branches, reached, noise.estimate() if before else None)


def _in_parts(base: Setting) -> Setting:
    """Micro-batches whose gradients can be compared, where the update is a single one."""
    if base.microbatches > 1:
        return base
    size = base.examples_per_update
    return replace(base, examples_per_microbatch=size // largest_divisor(size, PARTS))
