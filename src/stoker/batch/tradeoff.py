"""Optimizer steps against examples: what a larger batch saves and what it costs (McCandlish et al. 2018). No torch.

To reach one given loss a training of S steps of B examples each uses E = S B examples, and

    (S / S_min - 1) (E / E_min - 1) = 1,    so that    S = S_min (1 + B_crit / B),    E = E_min (1 + B / B_crit),

with B_crit = E_min / S_min. A k times larger batch needs fewer steps, never more: a k-th of them far below B_crit, the
same number far above, where all it adds is examples.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.batch import student
from stoker.errors import ConfigError

__all__ = ["Doubling", "Tradeoff", "doubling", "fit_tradeoff"]

MORE_EXAMPLES = 0.2
"""The other usual definition's allowance: a fifth more examples."""
BEYOND = 100.0
"""How many times outside the measured batches B_crit is looked for: farther out the points can't place it."""
GRID = 4001
"""Candidates for B_crit between those ends, 0.35 % apart for batches that span a factor of 100."""

Interval = tuple[float, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Doubling:
    """What twice the batch costs and saves, to the same loss. Shares of the present amounts."""

    batch: float
    more_examples: float
    fewer_steps: float
    less_time: float | None
    """Below 0: it takes longer. None: seconds per step weren't given."""
    exchange: tuple[float, float] | None
    """Share of an update's time that ranks spend exchanging gradients, at the batch and at its double."""
    more_examples_interval: Interval | None = None
    fewer_steps_interval: Interval | None = None
    """By the ends of the critical batch's interval."""
    unit: str = "examples"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        more, fewer = _range(self.more_examples_interval), _range(self.fewer_steps_interval)
        said = (
            f"{self.batch:,.4g} to {2 * self.batch:,.4g}: costs {self.more_examples:.1%}{more} more {self.unit}, saves "
            f"{self.fewer_steps:.1%}{fewer} of the steps"
        )
        if self.less_time is not None:
            said += f" and {'saves' if self.less_time >= 0 else 'costs'} {abs(self.less_time):.1%} of the time"
        if self.exchange is not None:
            said += f" (exchange of gradients: {self.exchange[0]:.1%} of an update, then {self.exchange[1]:.1%})"
        return said


def doubling(
    batch: float,
    critical: float,
    *,
    interval: Interval | None = None,
    seconds: Callable[[float], float] | None = None,
    exchange_seconds: float = 0.0,
    unit: str = "examples",
) -> Doubling:
    """What doubling a batch costs and saves where the critical batch is `critical` (with its `interval`), in one unit.

    `seconds` gives those of an update of any batch without the exchange of gradients over ranks, which takes
    `exchange_seconds` of every update. ConfigError for batches that aren't positive.
    """
    if not (0 < batch < math.inf and 0 < critical < math.inf):
        raise ConfigError(f"batch {batch:g}, critical batch {critical:g}: both are positive numbers of examples")

    def more(edge: float) -> float:
        return batch / (edge + batch)

    def fewer(edge: float) -> float:
        return edge / (2 * (edge + batch)) if edge < math.inf else 0.5

    less_time = exchange = None
    if seconds is not None:
        once, twice = seconds(batch) + exchange_seconds, seconds(2 * batch) + exchange_seconds
        less_time = 1 - (1 - fewer(critical)) * twice / once
        exchange = (exchange_seconds / once, exchange_seconds / twice) if exchange_seconds else None
    return Doubling(
        batch=batch,
        more_examples=more(critical),
        fewer_steps=fewer(critical),
        less_time=less_time,
        exchange=exchange,
        more_examples_interval=(more(interval[1]), more(interval[0])) if interval else None,
        fewer_steps_interval=(fewer(interval[0]), fewer(interval[1])) if interval else None,
        unit=unit,
    )


@dataclass(frozen=True)
class Tradeoff:
    """The curve through the measured points."""

    steps_min: float
    """However large the batch."""
    examples_min: float
    """However small the batch."""
    critical_interval: Interval | None
    """Of B_crit, 95 %; an end is 0 or infinite where the points don't bound it. None: two points have no scatter."""
    misfit: float
    """Root mean square of the steps' relative residuals."""
    points: tuple[tuple[float, float], ...]
    """(batch, steps)."""

    @property
    def critical(self) -> float:
        """B_crit = E_min / S_min: there both steps and examples are double their minima."""
        return self.examples_min / self.steps_min

    def steps(self, batch: float) -> float:
        return self.steps_min * (1 + self.critical / batch)

    def examples(self, batch: float) -> float:
        return self.examples_min * (1 + batch / self.critical)

    def allowing(self, more: float = MORE_EXAMPLES, start: float = 0.0) -> float:
        """The batch that needs a share of `more` examples beyond those of the batch `start`.

        From 0 on, of the fewest possible: 0.2 B_crit. With the best small batch as `start` it is the critical batch of
        Zhang et al. 2024 (arXiv 2410.21676): 20 % over linear scaling, 0.2 B_crit + 1.2 `start`.
        """
        return more * self.critical + (1 + more) * start

    def doubling(
        self, batch: float, *, seconds: Callable[[float], float] | None = None, exchange_seconds: float = 0.0
    ) -> Doubling:
        """See `doubling`."""
        return doubling(
            batch, self.critical, interval=self.critical_interval, seconds=seconds, exchange_seconds=exchange_seconds
        )

    def to_json(self) -> dict[str, Any]:
        """Plain types; an end without bound is null."""
        made = asdict(self) | {"critical": self.critical, "critical_20_percent_more_examples": self.allowing()}
        if self.critical_interval is not None:
            made["critical_interval"] = [end if 0 < end < math.inf else None for end in self.critical_interval]
        return made

    def __str__(self) -> str:
        lines = [
            f"critical batch {self.critical:,.4g}{_bounds(self.critical_interval)}: steps and examples are both double "
            "their minima there (McCandlish et al. 2018)",
            f"20 % more examples than the fewest possible at {self.allowing():,.4g}; from a best small batch B on, at "
            f"{self.allowing():,.4g} + {1 + MORE_EXAMPLES:g} B (Zhang et al. 2024)",
            f"at least {self.steps_min:,.4g} steps and {self.examples_min:,.4g} examples; steps miss the curve by "
            f"{self.misfit:.1%}",
        ]
        return "\n".join(lines)


def fit_tradeoff(points: Sequence[tuple[float, float]]) -> Tradeoff:
    """The curve through (batch, steps to one given loss) points, at two batches or more; a batch may come repeatedly.

    Least squares of log steps, as errors are relative and steps span decades. For each B_crit the best S_min is closed,
    so that one dimension is left to search. The interval is of all B_crit whose residuals aren't larger than the best's
    by Student's t, at n - 2 degrees of freedom. The rate must be tuned at each batch: an untuned one measures the rate.

    ConfigError for too few or wrong points, and where steps don't place B_crit near the batches that were measured.
    """
    if any(not (0 < batch < math.inf and 0 < steps < math.inf) for batch, steps in points):
        raise ConfigError(f"points {list(points)}: each is (batch, steps), both positive")
    if len({batch for batch, _ in points}) < 2:
        raise ConfigError(f"points {list(points)}: a trade-off needs two different batches or more")
    batches, steps = np.asarray(points, float).T
    grid = np.geomspace(batches.min() / BEYOND, batches.max() * BEYOND, GRID)
    squares, lowest = _squares(grid, batches, np.log(steps))
    best = int(squares.argmin())
    if best in (0, GRID - 1):
        side, why = ("below", "don't fall with the batch") if best == 0 else ("above", "fall as the batch grows")
        raise ConfigError(
            f"steps {why} at {min(batches):g} to {max(batches):g}: the critical batch lies far {side} them; measure "
            f"{'smaller' if best == 0 else 'larger'} batches"
        )
    fine = np.geomspace(grid[best - 1], grid[best + 1], GRID)
    squares_there, lowest = _squares(fine, batches, np.log(steps))
    place = int(squares_there.argmin())
    critical, steps_min = float(fine[place]), math.exp(lowest[place])
    least, degrees = float(squares_there[place]), len(points) - 2
    interval = None
    if degrees:
        inside = grid[squares <= least * (1 + student.quantile(degrees) ** 2 / degrees)]
        low, high = (float(inside[0]), float(inside[-1])) if len(inside) else (critical, critical)
        interval = (0.0 if low == grid[0] else low, math.inf if high == grid[-1] else high)
    return Tradeoff(
        steps_min=steps_min,
        examples_min=steps_min * critical,
        critical_interval=interval,
        misfit=math.sqrt(least / len(points)),
        points=tuple((float(batch), float(count)) for batch, count in points),
    )


def _squares(criticals: Floats, batches: Floats, log_steps: Floats) -> tuple[Floats, Floats]:
    """For each candidate (c,) the sum of squared residuals and the best log S_min, both (c,)."""
    rest = log_steps - np.log1p(criticals[:, None] / batches)
    lowest: Floats = rest.mean(axis=1)
    squares: Floats = ((rest - lowest[:, None]) ** 2).sum(axis=1)
    return squares, lowest


def _range(interval: Interval | None) -> str:
    return f" ({interval[0]:.1%} to {interval[1]:.1%})" if interval else ""


def _bounds(interval: Interval | None) -> str:
    if interval is None:
        return ""
    low, high = interval
    if low <= 0 and high == math.inf:
        return " (not bounded by these points)"
    if low <= 0:
        return f" (at most {high:,.4g})"
    return f" (at least {low:,.4g})" if high == math.inf else f" ({low:,.4g} to {high:,.4g})"
