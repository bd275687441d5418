"""Step time against batch: the line t(B) = alpha + beta B, the knee by two methods, zones. Pure, without torch.

alpha is what a step costs however small its batch (launches, the optimizer, reading the weights), beta what each unit
adds. Throughput B / t(B) rises towards 1 / beta: steeply while alpha rules, and hardly any more where beta B does.
The knee is the batch from which a doubling gains less than `SPENT`.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.batch import student

__all__ = [
    "AGREE", "LAUNCH_BOUND", "RESOLUTION", "SPENT", "STEEP", "Fit", "Gain", "Knee", "Zone", "find_knee", "fit", "gains",
    "gains_spent_at", "launch_bound_to", "zone",
]  # fmt: skip

SPENT = 0.10
"""A doubling that gains less throughput than this is not worth its memory."""
STEEP = 1 / 3
"""A doubling gains more than this below B = alpha / beta, where more than half of a step is its fixed cost."""
LAUNCH_BOUND = 1.2
"""T(2B) < 1.2 T(B): the device hardly notices that its work doubled."""
AGREE = 0.5
"""Doublings between the two methods' knees that still count as agreement: half of what a doubling sweep resolves."""
PAIR = (0.8, 1.3)
"""Doublings apart: nearer sizes tell too little of a doubling, farther ones of too many."""
HUBER = 2.0
"""Residuals beyond so many robust deviations pull with constant force."""
RESOLUTION = 0.01
"""Relative: medians closer than this to a fit are as good as on it."""

Zone = Literal["steep", "gradual", "flat"]
Interval = tuple[float, float]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fit:
    """t(B) = max(floor, alpha + beta B), in seconds; the floor is 0 unless the small sizes plainly lie on one."""

    alpha: float
    beta: float
    floor: float = 0.0
    """What a step takes at least: the host issues its launches while the device computes, so the slower one counts."""
    alpha_interval: Interval = (0.0, math.inf)
    beta_interval: Interval = (0.0, math.inf)
    """95 %, from the scatter about the line."""
    misfit: float = 0.0
    """Root mean square of the relative residuals."""

    def seconds(self, size: float) -> float:
        return max(self.floor, self.alpha + self.beta * size)

    def rate(self, size: float) -> float:
        """Units per second."""
        return size / self.seconds(size)

    @property
    def asymptote(self) -> float:
        """Units per second that no batch exceeds."""
        return 1 / self.beta if self.beta > 0 else math.inf

    def reaching(self, share: float) -> float:
        """The batch whose throughput is this share of the asymptote: x / (1 - x) alpha / beta."""
        if self.beta <= 0:
            return math.inf
        return max(share / (1 - share) * self.alpha, share * self.floor) / self.beta

    def gain(self, size: float) -> float:
        """What doubling the batch adds to throughput, relative; where it is x of the asymptote: (1 - x) / (1 + x)."""
        return 2 * self.seconds(size) / self.seconds(2 * size) - 1

    def knee(self, spent: float = SPENT) -> float:
        """The smallest batch from which a doubling gains at most `spent`: 4.5 alpha / beta for a tenth."""
        if self.beta <= 0:
            return math.inf
        on_line = self.alpha * (1 - spent) / (2 * spent * self.beta)
        on_floor = (2 * self.floor / (1 + spent) - self.alpha) / (2 * self.beta)
        return max(on_line, on_floor)

    @property
    def knee_interval(self) -> Interval:
        """Of the knee, 95 %, by the ends of alpha's and beta's: wide, as the two errors pull against one another."""
        (low, high), (slow, fast) = self.alpha_interval, self.beta_interval
        return replace(self, alpha=low, beta=fast).knee(), replace(self, alpha=high, beta=slow).knee()

    def to_json(self) -> dict[str, Any]:
        made = asdict(self) | {"asymptote": self.asymptote, "knee": self.knee(), "knee_interval": self.knee_interval}
        return {key: _plain(value) for key, value in made.items()}


def fit(sizes: Sequence[float], seconds: Sequence[float], noise: Sequence[float] | None = None) -> Fit:
    """The line through median seconds (n,) of steps of so many units (n,), n >= 2, sizes ascending.

    Least squares of relative residuals, reweighted so that a stray point pulls little (Huber 1964); `noise` (n,) is
    each median's own relative error. Neither alpha nor beta falls below 0. A floor is used where it explains the points
    better by the Bayesian information criterion (Schwarz 1978) than a line alone.
    """
    x, t = np.asarray(sizes, float), np.asarray(seconds, float)
    if len(x) < 2 or len(x) != len(t) or (np.diff(x) <= 0).any() or (t <= 0).any():
        raise ValueError(f"a line needs at least 2 ascending sizes with positive times; got {list(sizes)}, {list(t)}")
    own = np.full_like(t, RESOLUTION) if noise is None else np.hypot(np.asarray(noise, float), RESOLUTION)
    alpha, beta, covariance = _line(x, t, own)
    best, floor = _criterion(alpha + beta * x, t, own, 2), 0.0
    for on_floor in range(2, len(x) - 2):
        level = float(np.average(t[:on_floor], weights=1 / (own[:on_floor] * t[:on_floor]) ** 2))
        line = _line(x[on_floor:], t[on_floor:], own[on_floor:])
        score = _criterion(np.maximum(level, line[0] + line[1] * x), t, own, 3)
        if score < best:
            best, floor, (alpha, beta, covariance) = score, level, line
    predicted = np.maximum(floor, alpha + beta * x)
    half = student.quantile(max(len(x) - 2, 1)) * np.sqrt(np.diag(covariance))
    return Fit(
        alpha=alpha,
        beta=beta,
        floor=floor,
        alpha_interval=(max(0.0, alpha - float(half[0])), alpha + float(half[0])),
        beta_interval=(max(0.0, beta - float(half[1])), beta + float(half[1])),
        misfit=float(np.sqrt(np.mean(((t - predicted) / t) ** 2))),
    )


@dataclass(frozen=True)
class Gain:
    """What a doubling from `size` added to throughput, as measured."""

    size: float
    measured: float
    smoothed: float
    """The nearest gains that never rise with the batch."""


def gains(sizes: Sequence[float], seconds: Sequence[float], noise: Sequence[float] | None = None) -> tuple[Gain, ...]:
    """Per doubling, of each pair of sizes about a doubling apart (and of neighbours farther apart), by where it begins.

    Smoothed by isotonic regression (pool adjacent violators), weighted by how well each pair tells: only the order of
    gains is assumed, not a line.
    """
    x, t = np.asarray(sizes, float), np.asarray(seconds, float)
    own = np.full_like(t, RESOLUTION) if noise is None else np.hypot(np.asarray(noise, float), RESOLUTION)
    found: list[tuple[float, float, float]] = []
    for i, j in combinations(range(len(x)), 2):
        doublings = math.log2(x[j] / x[i])
        only = doublings < PAIR[0] and j - i == len(x) - 1
        if PAIR[0] <= doublings <= PAIR[1] or (j == i + 1 and doublings > PAIR[1]) or only:
            rise = math.log2(x[j] / t[j] * t[i] / x[i]) / doublings  # log2 of the rate, per doubling
            found.append((math.sqrt(x[i] * x[j] / 2), rise, (doublings / math.hypot(own[i], own[j])) ** 2))
    found.sort()
    smooth = _falling([rise for _, rise, _ in found], [weight for _, _, weight in found])
    return tuple(Gain(start, 2**rise - 1, 2**level - 1) for (start, rise, _), level in zip(found, smooth, strict=True))


def gains_spent_at(found: Sequence[Gain], spent: float = SPENT) -> float | None:
    """Where the smoothed gains fall to `spent`, straight between neighbours over log B; None: not within them."""
    if found[0].smoothed <= spent:
        return found[0].size
    for before, after in pairwise(found):
        if after.smoothed <= spent:
            way = (before.smoothed - spent) / (before.smoothed - after.smoothed)
            return float(before.size * (after.size / before.size) ** way)
    return None


@dataclass(frozen=True)
class Knee:
    """The batch from which a doubling gains less than `SPENT`, by the fitted line and by the gains alone."""

    by_fit: float | None
    """None: beyond the largest size."""
    by_gains: float | None
    """None: no measured doubling gained so little."""
    agree: bool
    size: float | None
    """Where they agree, by the line, which all points bear; otherwise by the gains, which assume no line."""
    why: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find_knee(fitted: Fit, found: Sequence[Gain], largest: float) -> Knee:
    """Both methods' knees, and whether they agree within `AGREE` doublings; `largest`: the largest size measured."""
    by_fit, by_gains = fitted.knee(), gains_spent_at(found)
    seen = found[-1].size  # the gains see no further than where their last doubling begins
    shown = by_fit if by_fit <= largest else None
    if by_gains is None:
        agree = by_fit >= seen * 2**-AGREE
        if shown is None:
            return Knee(None, None, agree, None, f"still gaining {SPENT:.0%} or more a doubling at {largest:g}")
        if agree:
            return Knee(shown, None, True, shown, "read off the line; the gains only show that it isn't much lower")
        why = f"the line says {by_fit:.4g}, but every measured doubling up to {largest:g} gained {SPENT:.0%} or more"
        return Knee(shown, None, False, None, why)
    apart = abs(math.log2(max(by_fit, found[0].size) / by_gains)) if by_fit < math.inf else math.inf
    if apart <= AGREE:
        return Knee(
            shown,
            by_gains,
            True,
            max(by_fit, found[0].size),
            f"the line and the measured gains lie {apart:.2f} doublings apart",
        )
    line = f"{by_fit:.4g}" if shown is not None else f"beyond {largest:g}"
    why = f"the line says {line}, the gains {by_gains:.4g}; it misses the points by {fitted.misfit:.1%}"
    return Knee(shown, by_gains, False, by_gains, why)


def zone(gain: float) -> Zone:
    """By what a doubling gains there."""
    if gain > STEEP:
        return "steep"
    return "gradual" if gain > SPENT else "flat"


def launch_bound_to(sizes: Sequence[float], seconds: Sequence[float]) -> float | None:
    """The size up to which every doubling took less than `LAUNCH_BOUND` of the time; None: not even the first did."""
    reached = None
    for i in range(len(sizes) - 1):
        doublings = math.log2(sizes[i + 1] / sizes[i])
        if (seconds[i + 1] / seconds[i]) ** (1 / doublings) >= LAUNCH_BOUND:
            break
        reached = sizes[i + 1]
    return reached


def _line(x: Floats, t: Floats, own: Floats) -> tuple[float, float, Floats]:
    """alpha, beta >= 0 and their covariance (2, 2), by iteratively reweighted least squares of relative residuals."""
    weights = 1 / (own * t) ** 2
    design = np.stack([np.ones_like(x), x], axis=1)
    alpha = beta = 0.0
    for _ in range(20):
        before = alpha, beta
        alpha, beta = _bounded(design, t, weights)
        residual = (t - alpha - beta * x) / (own * t)
        scale = max(1.0, 1.4826 * float(np.median(np.abs(residual))))
        far = np.maximum(np.abs(residual) / (HUBER * scale), 1.0)
        weights = 1 / (own * t) ** 2 / far
        if np.allclose(before, (alpha, beta), rtol=1e-6, atol=0):
            break
    spread = float(np.sum(weights * (t - alpha - beta * x) ** 2)) / max(len(x) - 2, 1)
    information: Floats = design.T @ (design * weights[:, None])
    covariance: Floats = np.asarray(np.linalg.inv(information) * max(spread, 1.0), np.float64)
    return alpha, beta, covariance


def _bounded(design: Floats, t: Floats, weights: Floats) -> tuple[float, float]:
    """Weighted least squares with both coefficients >= 0: with two of them, try all and then each alone."""
    root = np.sqrt(weights)
    alpha, beta = np.linalg.lstsq(design * root[:, None], t * root, rcond=None)[0]
    if alpha < 0:
        return 0.0, float(np.sum(weights * design[:, 1] * t) / np.sum(weights * design[:, 1] ** 2))
    if beta < 0:
        return float(np.sum(weights * t) / np.sum(weights)), 0.0
    return float(alpha), float(beta)


def _criterion(predicted: Floats, t: Floats, own: Floats, parameters: int) -> float:
    """The Bayesian information criterion of a fit; residuals within the noise can't be improved on."""
    squares = float(np.mean(((t - predicted) / (own * t)) ** 2))
    return len(t) * math.log(squares + 1.0) + parameters * math.log(len(t))


def _falling(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The weighted least-squares sequence that never rises."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        block = (value, weight, 1)
        while blocks and blocks[-1][0] < block[0]:
            level, mass, count = blocks.pop()
            total = mass + block[1]
            block = ((level * mass + block[0] * block[1]) / total, total, count + block[2])
        blocks.append(block)
    return [level for level, _, count in blocks for _ in range(count)]


def _plain(value: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and math.isinf(value) else value
