"""What a series of measurements shows: trend, scatter, flatness, swings, change points, spikes. Pure, without torch.

A series is a sequence of numbers at even distances, oldest first. Scatter is what remains of it between neighbours when
a smooth course is taken out, so that a series that falls steeply isn't called rough.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "Change", "Level", "Trend", "blocks", "changes", "early_share", "flat_from", "growth", "level", "running_median",
    "scatter", "spikes", "swing", "trend",
]  # fmt: skip

Floats = NDArray[np.float64]

NORMAL_MAD = 1.4826
"""A normal distribution's standard deviation over its median absolute deviation."""


@dataclass(frozen=True)
class Level:
    """A mean and its standard error."""

    value: float
    error: float


@dataclass(frozen=True)
class Trend:
    """A least-squares line."""

    slope: float
    """Per entry."""
    error: float
    """Standard error of the slope, correlation of neighbours allowed for."""
    start: float
    """The line at the first entry."""
    end: float
    """And at the last."""

    @property
    def z(self) -> float:
        """The slope in standard errors; infinite for a line without scatter, 0 for one that is level."""
        if self.slope == 0:
            return 0.0
        return self.slope / self.error if self.error else math.copysign(math.inf, self.slope)


@dataclass(frozen=True)
class Change:
    """From entry `at` on the level is another."""

    at: int
    before: float
    after: float
    z: float
    """The difference in standard errors."""


def scatter(values: Sequence[float], *, robust: bool = False) -> float:
    """Standard deviation of single entries around a smooth course (von Neumann 1941, successive differences).

    Entries that are correlated with their neighbours show less than their whole spread. `robust`: by the median, which
    a few wild entries don't move. 0 for fewer than three.
    """
    x = _array(values)
    if len(x) < 3:
        return 0.0
    curved = x[2:] - 2 * x[1:-1] + x[:-2]  # a straight course leaves nothing; variance 6 times an entry's
    return float(NORMAL_MAD * np.median(np.abs(curved)) / math.sqrt(6) if robust else np.sqrt((curved**2).mean() / 6))


def level(values: Sequence[float]) -> Level:
    """The mean, with the error that neighbours' correlation leaves it. Infinite for a single entry.

    ValueError for none.
    """
    x = _array(values)
    if len(x) < 2:
        return Level(float(x[0]), math.inf)
    return Level(float(x.mean()), float(x.std(ddof=1) * math.sqrt(_inflation(x - x.mean()) / len(x))))


def trend(values: Sequence[float]) -> Trend:
    """The line through a series. ValueError for fewer than three entries."""
    y = _array(values, 3)
    t = np.arange(len(y)) - (len(y) - 1) / 2
    square = float((t**2).sum())
    slope = float((t * y).sum() / square)
    rest = y - y.mean() - slope * t
    variance = float((rest**2).sum() / (len(y) - 2))
    if variance <= (1e-12 * max(1e-300, float(np.abs(y).max()))) ** 2:  # rounding
        variance = 0.0
    error = math.sqrt(variance * _inflation(rest) / square)
    return Trend(slope, error, float(y.mean() + slope * t[0]), float(y.mean() + slope * t[-1]))


def blocks(values: Sequence[float], count: int) -> list[Level]:
    """Means of `count` stretches of about equal length, of at least two entries each; fewer where there aren't so many.

    Their errors are from the scatter of the whole around its course: a stretch's own trend isn't noise.
    """
    x = _array(values)
    count = max(1, min(count, len(x) // 2))
    parts = np.array_split(x, count)
    return [Level(float(part.mean()), scatter(list(part)) / math.sqrt(len(part))) for part in parts]


def early_share(values: Sequence[float], part: float = 0.25) -> float:
    """Of a series' whole fall, the share in its first part: `part` where it falls evenly, more where it slows down.

    From means of stretches. NaN where it doesn't fall.
    """
    means = [each.value for each in blocks(values, 20)]
    fall = means[0] - means[-1]
    if not fall > 0:
        return math.nan
    place = part * (len(means) - 1)
    low = math.floor(place)
    high = min(low + 1, len(means) - 1)
    reached = means[low] + (place - low) * (means[high] - means[low])
    return (means[0] - reached) / fall


def flat_from(values: Sequence[float], share: float = 0.05) -> int | None:
    """The entry from which on a series stays within `share` of its whole range of where it ends; None: it moves to the
    last. By means of stretches, and no later than in the last tenth.
    """
    x = _array(values, 3)
    parts = np.array_split(np.arange(len(x)), max(1, min(40, len(x) // 3)))
    means = np.array([x[part].mean() for part in parts])
    errors = scatter(values) / np.sqrt([len(part) for part in parts])
    final = float(means[-max(1, len(means) // 10) :].mean())
    allowed = share * float(means.max() - means.min())
    away = np.abs(means - final) > allowed + 2 * errors
    if not away.any():
        return 0
    first = int(np.flatnonzero(away)[-1]) + 1
    return int(parts[first][0]) if first < 0.9 * len(parts) else None


def swing(values: Sequence[float]) -> float:
    """Correlation of neighbours around the line through the series: -1 where it swings from side to side, 0 for noise,
    towards 1 where it wanders. 0 where nothing varies.
    """
    y = _array(values, 3)
    line = trend(values)
    rest = y - np.linspace(line.start, line.end, len(y))
    square = float((rest**2).sum())
    if square <= (1e-12 * max(1e-300, float(np.abs(y).max()))) ** 2 * len(y):
        return 0.0
    return float((rest[1:] * rest[:-1]).sum() / square)


def growth(values: Sequence[float]) -> float:
    """Scatter of the last third over that of the first. NaN where the first has none."""
    third = max(3, len(values) // 3)
    first, last = scatter(values[:third]), scatter(values[-third:])
    return last / first if first > 0 else math.nan


def running_median(values: Sequence[float], window: int) -> list[float]:
    """Of the entries up to window // 2 to either side, fewer at the ends."""
    x = _array(values)
    half = window // 2
    return [float(np.median(x[max(0, i - half) : i + half + 1])) for i in range(len(x))]


def spikes(values: Sequence[float], times: float = 6.0, window: int = 25) -> list[int]:
    """Entries more than `times` robust standard deviations over the median of those around them.

    The deviation is of the whole series around its running median, so that a stretch of spikes stays one.
    """
    x = _array(values)
    rest = x - np.asarray(running_median(values, window))
    spread = NORMAL_MAD * float(np.median(np.abs(rest)))
    if spread <= 1e-9 * float(np.abs(x).max()):  # what hardly varies has no scale of its own
        return []
    return [int(i) for i in np.flatnonzero(rest > times * spread)]


def changes(values: Sequence[float], z: float = 8.0, least: int = 5) -> list[Change]:
    """Entries from which on the level is another, by halving at the clearest place again and again (Vostrikova 1981).

    `z`: how many standard errors apart the levels must be; `least`: entries of a stretch. Steps of a level, not a
    smooth course: take that out before.
    """
    x = _array(values)
    found: list[Change] = []
    _split(x, 0, z, least, found)
    return sorted(found, key=lambda each: each.at)


def _split(x: Floats, start: int, z: float, least: int, found: list[Change]) -> None:
    n = len(x)
    if n < 2 * least:
        return
    sums = np.cumsum(x)
    sizes = np.arange(1, n)
    before, after = sums[:-1] / sizes, (sums[-1] - sums[:-1]) / (n - sizes)
    spread = max(scatter(list(x)), 1e-12 * float(np.abs(x).max()), 1e-300)
    scores = np.abs(after - before) / (spread * np.sqrt(1 / sizes + 1 / (n - sizes)))
    scores[: least - 1] = scores[n - least :] = 0.0
    best = int(scores.argmax())
    if scores[best] < z:
        return
    found.append(Change(start + best + 1, float(before[best]), float(after[best]), float(scores[best])))
    _split(x[: best + 1], start, z, least, found)
    _split(x[best + 1 :], start + best + 1, z, least, found)


def _inflation(rest: Floats) -> float:
    """Of a mean's variance by correlation that falls off as in an autoregression: (1 + r) / (1 - r), at least 1."""
    square = float((rest**2).sum())
    if square <= 0:
        return 1.0
    r = min(max(float((rest[1:] * rest[:-1]).sum() / square), 0.0), 0.95)
    return (1 + r) / (1 - r)


def _array(values: Sequence[float], least: int = 1) -> Floats:
    x = np.asarray(values, float)
    if x.ndim != 1 or len(x) < least:
        raise ValueError(f"a series of at least {least} numbers, not of shape {x.shape}")
    if not np.isfinite(x).all():
        raise ValueError("a series of finite numbers: cut it before the first that isn't")
    return x
