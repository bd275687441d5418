"""The largest size that fits, found in few trials: what was observed in, the next size to try out. No torch, no I/O.

Sizes double until one fails. Peaks measured at two sizes give a slope, and the slope the size to try next; it saves
trials and decides nothing: the answer is a size that ran, and the size just above it is one that failed. Where the
slope misleads, steps that double, and then halving, close in on the limit.
"""

import math
from dataclasses import dataclass, replace

__all__ = ["Observation", "Search"]

_LONGEST_LEAP = 8
"""No trial is larger than this many times the largest that ran: a slope between small sizes says little of far ones."""
_CREDIBLE = 1.05
"""A predicted limit further above a size that failed than this is none: another part of the memory has come to grow."""
_BY_SLOPE = 8
"""Trials from the first failure on that the slope may choose; then halving ends the search in any case."""


@dataclass(frozen=True)
class Observation:
    """What one trial showed."""

    size: int
    fits: bool
    peak_bytes: int | None = None
    """Where it was measured; a trial that failed has none."""


@dataclass(frozen=True)
class Search:
    """A search under way. `observe` gives the next state; nothing here changes.

    Failures need not be monotone: nothing at or above a size that failed is answered, though it ran once.
    """

    start: int = 1
    """The first size to try."""
    most: int | None = None
    """The largest size there is data for."""
    limit_bytes: int | None = None
    """What peaks are held against when the next size is chosen."""
    precision: float = 0.01
    """The limit is known to this fraction of itself, and to the unit where that is less than one."""
    least: int = 1
    """Smaller sizes are no answers."""
    seen: tuple[Observation, ...] = ()

    def __post_init__(self) -> None:
        if self.start < self.least or self.least < 1 or (self.most is not None and self.most < 1):
            raise ValueError(
                f"least {self.least}, most {self.most}: at least 1; start {self.start}: at least the least"
            )

    @property
    def first_failed(self) -> int | None:
        """The smallest size that failed."""
        return min((one.size for one in self.seen if not one.fits), default=None)

    @property
    def answer(self) -> int:
        """The largest size that ran with none at or below it failing; 0: none did."""
        return max((one.size for one in self._fitting()), default=0)

    @property
    def resolution(self) -> int:
        """How far apart the answer and the first failure may stay."""
        return max(1, int(self.answer * self.precision))

    def observe(self, observation: Observation) -> "Search":
        """The state after one more trial."""
        return replace(self, seen=(*self.seen, observation))

    def next_size(self) -> int | None:
        """What to try next; None: the answer is final."""
        low, high = self.answer, self.first_failed
        if high is None:
            return self._larger(low)
        if high - low <= self.resolution or high <= self.least:
            return None
        return min(max(self._between(low, high), low + 1, self.least), high - 1)

    def trials_left(self) -> int | None:
        """About how many more there will be, halving at worst; None: nothing says where the search ends."""
        low, high = self.answer, self.first_failed
        if high is None and self.most is None:
            return None
        if high is None and self.most is not None:
            return math.ceil(math.log2(max(self.most / max(low, self.start), 1))) + (low == 0)
        return math.ceil(math.log2(max(((high or 0) - max(low, self.least - 1)) / self.resolution, 1)))

    def predicted_limit(self) -> int | None:
        """The largest size that the measured slope lets fit; None where it says nothing."""
        points = sorted({one.size: one.peak_bytes for one in self._fitting() if one.peak_bytes is not None}.items())
        if self.limit_bytes is None or len(points) < 2:
            return None
        (size_a, peak_a), (size_b, peak_b) = points[-2:]
        if peak_b <= peak_a:
            return None
        return size_b + (self.limit_bytes - peak_b) * (size_b - size_a) // (peak_b - peak_a)

    def _fitting(self) -> list[Observation]:
        high = self.first_failed
        return [one for one in self.seen if one.fits and (high is None or one.size < high)]

    def _larger(self, low: int) -> int | None:
        """While nothing has failed."""
        if self.most is not None and low >= self.most:
            return None
        predicted = self.predicted_limit()
        if low == 0:
            size = self.start
        elif predicted is None:
            size = 2 * low
        elif predicted > low:
            size = min(max(predicted, low + self.resolution), _LONGEST_LEAP * low)
        else:  # it should have failed: steps that double find where it does
            past = sum(one.peak_bytes is not None and one.size >= predicted for one in self._fitting())
            size = low + self.resolution * 2 ** (past - 1)
        return size if self.most is None else min(size, self.most)

    def _between(self, low: int, high: int) -> int:
        """Once something failed: by the slope where it is credible, for a few trials; else halving."""
        middle = math.isqrt(low * high) if 4 * low < high and low else (low + high) // 2
        predicted = self.predicted_limit()
        tried = len(self.seen) - [one.fits for one in self.seen].index(False)
        if predicted is None or predicted > _CREDIBLE * high or tried > _BY_SLOPE:
            return middle
        if low < predicted < high:
            return predicted
        if predicted <= low:  # it should have failed, or the reverse: steps that double find the place
            near = low + self.resolution * 2 ** (sum(one.size >= predicted for one in self._fitting()) - 1)
        else:
            failed = sum(not one.fits and one.size <= _CREDIBLE * predicted for one in self.seen)
            near = high - self.resolution * 2 ** (failed - 1)
        return near if low < near < high else middle
