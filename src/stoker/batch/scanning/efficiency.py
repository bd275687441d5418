"""From seconds per update to the batch from which throughput hardly rises any more. Pure, without torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from stoker.batch import curve, judging, student
from stoker.batch.scanning.arms import Arm

__all__ = ["Efficiency", "efficiency"]

QUARTILES_APART = 1.349
"""Standard deviations between the quartiles of a normal distribution."""


@dataclass(frozen=True)
class Efficiency:
    """The efficiency candidate, and how it was found."""

    size: int | None
    """Examples per update; None: two ways to find the knee disagree."""
    rates: tuple[float, ...]
    """Samples per second at each size."""
    why: str

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return {"size": self.size, "rates": list(self.rates), "why": self.why}


def efficiency(arms: Sequence[Arm], throughput: curve.Fit | None = None) -> Efficiency:
    """Of arms ascending in batch, two or more: the one at the knee, or the largest where there is none within them.

    `throughput`: seconds of a step by the examples of a micro-batch, as a sweep fits them on a quiet device; None: the
    seconds that updates took in the trainings themselves.
    """
    sizes = [arm.setting.examples_per_update for arm in arms]
    if throughput is not None:
        rates = tuple(throughput.rate(arm.setting.microbatch) for arm in arms)
        knee, spent = throughput.knee(), f"{curve.SPENT:.0%}"
        reached = [size for size in sizes if size >= knee * 2**-curve.AGREE]
        size = min(reached, default=sizes[-1])
        if math.isinf(knee) or not reached:
            return Efficiency(size, rates, f"by the sweep given a doubling still gains {spent} or more at {size:,}")
        return Efficiency(size, rates, f"by the sweep given a doubling gains less than {spent} from {knee:,.4g}")
    seconds = [arm.seconds for arm in arms]
    noise = [_error(arm) for arm in arms]
    line, gains = curve.fit(sizes, seconds, noise), curve.gains(sizes, seconds, noise)
    knee_found = curve.find_knee(line, gains, sizes[-1])
    rates = tuple(arm.rate for arm in arms)
    if not knee_found.agree:
        return Efficiency(None, rates, f"two ways to find the knee disagree: {knee_found.why}")
    size_found = judging.recommend(line, knee_found, dict(zip(sizes, seconds, strict=True)), None)
    if size_found is None:
        return Efficiency(sizes[-1], rates, knee_found.why)
    at = f"{knee_found.size:,.4g}" if knee_found.size is not None else ""
    return Efficiency(size_found, rates, f"a doubling gains less than {curve.SPENT:.0%} from {at}: {knee_found.why}")


def _error(arm: Arm) -> float:
    """Relative standard error of the median, from the quartiles of as many updates."""
    low, high = arm.quartiles
    updates = sum(len(history.seconds) for history in arm.histories)
    return student.median_error((high - low) / QUARTILES_APART, updates) / arm.seconds
