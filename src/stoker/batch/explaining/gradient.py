"""The gradient's noise scale of a training, in examples whatever its loss counts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from stoker.batch.estimates.smoothed import Mean
from stoker.batch.noise import NoiseEstimate, NoiseScale
from stoker.batch.scope import largest_divisor
from stoker.batch.target import Target
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Make, Plan, targeted, train_anew

__all__ = ["noise_of"]

PARTS = 8
"""Micro-batches of an update that the noise is seen between, at most."""


def noise_of(make: Make, setting: Setting, plan: Plan) -> NoiseEstimate | None:
    """Over one training, whose updates are cut into micro-batches; None: an update of one example can't be cut.

    A loss that is a mean over tokens has its noise in tokens; there are so many of them to an example, on average.
    """
    size = setting.examples_per_update
    parts = largest_divisor(size, PARTS)
    if parts == 1:
        return None
    counted: list[float] = []

    def made() -> Target:
        target = targeted(make)
        if target.count is not None:
            target.count = _noting(target.count, counted)
        return target

    meter = NoiseScale(every=1)
    cut = replace(setting, examples_per_microbatch=min(size // parts, setting.microbatch))
    history = train_anew(made, cut, replace(plan, evaluations=0), noise=meter)
    found = meter.estimate()
    return _per_example(found, len(history.samples) * size / sum(counted)) if counted else found


def _noting(count: Callable[[Any], float | Tensor], counted: list[float]) -> Callable[[Any], float]:
    def noting(batch: Any) -> float:
        counted.append(float(count(batch)))
        return counted[-1]

    return noting


def _per_example(found: NoiseEstimate, examples: float) -> NoiseEstimate:
    """`examples` to each unit that was counted."""
    return replace(found, trace=_times(found.trace, examples), scale=_times(found.scale, examples))


def _times(mean: Mean | None, factor: float) -> Mean | None:
    if mean is None:
        return None
    interval = mean.interval and (mean.interval[0] * factor, mean.interval[1] * factor)
    return Mean(mean.value * factor, interval)
