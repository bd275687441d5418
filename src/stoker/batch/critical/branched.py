"""What branches of one training found: how far its batch can grow at no loss. No torch here."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stoker.batch import student
from stoker.batch.finite import finite
from stoker.batch.table import aligned

__all__ = ["TOLERANCE", "Branched", "Excess", "Rung", "crossing"]

TOLERANCE = 0.01
"""Of loss: what counts as equal (Merrill et al. 2025)."""

Interval = tuple[float, float]
Bound = Literal["", "at least", "at most"]


@dataclass(frozen=True)
class Rung:
    """The branches at one batch, at the rate that served it best."""

    examples_per_update: int
    learning_rate: float
    rate_factor: float
    """Of the rate, beyond the rule's."""
    tried: tuple[tuple[float, float], ...]
    """(factor, loss) of the search for it, on other orders of the data than the losses below."""
    settled: tuple[tuple[float, float], ...]
    """(factor, loss) where it ended and beside it, mean over the orders below: the best of these is this rung's."""
    losses: tuple[float, ...]
    """At the end, for each order of the data, equal orders in equal places."""
    curve: tuple[tuple[int, float], ...]
    """(samples into the branch, loss), mean over orders."""
    seconds: float
    """Median of an update."""

    @property
    def loss(self) -> float:
        """Mean over orders."""
        return math.fsum(self.losses) / len(self.losses)


@dataclass(frozen=True)
class Excess:
    """Loss above the lowest that any smaller batch reached, over the same examples."""

    mean: float
    half_width: float
    """Of the 95 % interval over orders; infinite where one order has no scatter."""


@dataclass(frozen=True)
class Branched:
    """The largest batch whose loss stays within `tolerance` of every smaller one's (Merrill et al. 2025)."""

    unit: str
    before: int
    """Samples trained on before the branches."""
    samples: int
    """Of each branch."""
    tolerance: float
    measured: Literal["held-out loss", "smoothed training loss"]
    rungs: tuple[Rung, ...]
    """Ascending."""
    samples_spent: int
    """Over all trainings, the search for rates included."""

    @property
    def excess(self) -> tuple[Excess, ...]:
        """Of each rung; the first has nothing below it."""
        made = [Excess(0.0, 0.0)]
        for place in range(1, len(self.rungs)):
            lowest = min(self.rungs[:place], key=lambda rung: rung.loss)
            made.append(_excess(self.rungs[place].losses, lowest.losses))
        return tuple(made)

    @property
    def critical(self) -> float:
        """In examples per update, straight between rungs."""
        return crossing(self._sizes(), [each.mean for each in self.excess], self.tolerance)

    @property
    def bound(self) -> Bound:
        """At least: no rung failed. At most: the first larger one did, so that the first may be too large itself."""
        return _bound(self._sizes(), self.critical)

    @property
    def interval(self) -> Interval | None:
        """95 %, from the scatter over orders; 0 or infinite where it doesn't end within the rungs. None: one order."""
        if len(self.rungs[0].losses) < 2:
            return None
        sizes, excess = self._sizes(), self.excess
        low = crossing(sizes, [each.mean + each.half_width for each in excess], self.tolerance)
        high = crossing(sizes, [each.mean - each.half_width for each in excess], self.tolerance)
        return (0.0 if low < sizes[1] else low), (math.inf if high >= sizes[-1] else high)

    def _sizes(self) -> list[int]:
        return [rung.examples_per_update for rung in self.rungs]

    def to_json(self) -> dict[str, Any]:
        """Plain types; what is infinite is null."""
        rungs = [
            finite(asdict(rung) | {"loss": rung.loss, "excess": each.mean, "half_width": each.half_width})
            for rung, each in zip(self.rungs, self.excess, strict=True)
        ]
        interval = self.interval
        return {
            "unit": self.unit,
            "before": self.before,
            "samples": self.samples,
            "tolerance": self.tolerance,
            "measured": self.measured,
            "orders": len(self.rungs[0].losses),
            "critical": self.critical,
            "bound": self.bound,
            "interval": interval and [end if 0 < end < math.inf else None for end in interval],
            "rungs": rungs,
            "samples_spent": self.samples_spent,
            "definition": self.definition,
        }

    @property
    def definition(self) -> str:
        """In words."""
        return (
            f"the largest batch whose {self.measured}, {self.samples:,} {self.unit} after {self.before:,}, stays "
            f"within {self.tolerance:g} of every smaller one's, each at its best rate (Merrill et al. 2025)"
        )

    def __str__(self) -> str:
        head = f"critical batch by branches: {self.bound or 'about'} {self.critical:,.4g} {self.unit}"
        interval = self.interval
        if interval is not None:
            low, high = interval
            ends = [f"at least {low:,.4g}"] * (low > 0) + [f"at most {high:,.4g}"] * (high < math.inf)
            head += f" ({' and '.join(ends) or 'not bounded'}, 95 %)"
        rows = [(self.unit, "rate", "x rule", "loss", "above smaller", "ms/update")]
        for rung, each in zip(self.rungs, self.excess, strict=True):
            above = f"{each.mean:+.4f}" + (f" ± {each.half_width:.4f}" if each.half_width < math.inf else "")
            rows.append(
                (
                    f"{rung.examples_per_update:,}",
                    f"{rung.learning_rate:.3g}",
                    f"{rung.rate_factor:.3g}",
                    f"{rung.loss:.4f}",
                    above if rung is not self.rungs[0] else "",
                    f"{rung.seconds * 1e3:,.3g}",
                )
            )
        orders = len(self.rungs[0].losses)
        cost = f"{orders} orders of the data for each batch, {self.samples_spent:,} {self.unit} trained on in all"
        return "\n".join([head, f"that is {self.definition}", "", *aligned(rows), "", cost])


def crossing(sizes: Sequence[int], excess: Sequence[float], tolerance: float) -> float:
    """Where the excess leaves the tolerance for good: after the largest size within it, straight in the size, as
    a batch costs examples in proportion to it (McCandlish et al. 2018), and so, for a short way, loss.

    The largest size itself where none beyond it failed by a finite excess. NaN fails.
    """
    within = [place for place, each in enumerate(excess) if each <= tolerance]
    if not within or within[-1] == len(sizes) - 1 or not math.isfinite(excess[within[-1] + 1]):
        return float(sizes[within[-1] if within else 0])
    (low, below), (high, above) = ((sizes[place], excess[place]) for place in (within[-1], within[-1] + 1))
    return float(low + (high - low) * (tolerance - below) / (above - below))


def _bound(sizes: Sequence[int], critical: float) -> Bound:
    if critical >= sizes[-1]:
        return "at least"
    return "at most" if critical < sizes[1] else ""


def _excess(losses: Sequence[float], lowest: Sequence[float]) -> Excess:
    """Paired: the same order in the same place."""
    differences = [a - b for a, b in zip(losses, lowest, strict=True)]
    count = len(differences)
    mean = math.fsum(differences) / count
    if not math.isfinite(mean):
        return Excess(math.inf, 0.0)
    if count < 2:
        return Excess(mean, math.inf)
    variance = math.fsum((each - mean) ** 2 for each in differences) / (count - 1)
    return Excess(mean, student.quantile(count - 1) * math.sqrt(variance / count))
