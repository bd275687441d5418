"""The gradient's noise scale (McCandlish et al. 2018, arXiv 1812.06162), from squared norms and counts alone. No torch.

A gradient over B examples is G plus noise whose covariance is Sigma / B, so E|g_B|^2 = |G|^2 + tr(Sigma) / B. Squared
norms at two sizes or more give both unknowns without bias; B_noise = tr(Sigma) / |G|^2 is the batch whose noise is as
large as its signal. One update's pair is very noisy, and its |G|^2 often negative: both are averaged over updates as
they come, never clamped, and divided last.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stoker.batch import student
from stoker.errors import ConfigError

__all__ = ["Interval", "Mean", "NoiseEstimate", "NoiseSample", "NoiseScale", "from_parts", "from_two_sizes"]

Interval = tuple[float, float]


@dataclass(frozen=True)
class NoiseSample:
    """One update's unbiased pair. Either may be negative."""

    trace: float
    """tr(Sigma): the variance of the gradient of one unit, summed over parameters."""
    signal: float
    """|G|^2 of the noiseless gradient."""


def from_two_sizes(small: float, small_count: float, large: float, large_count: float) -> NoiseSample:
    """From the squared norms of a gradient over few units and of one over many (McCandlish et al. 2018, appendix A.1).

    Both are gradients of means over their counts; the large one may contain the small one. ConfigError for counts that
    don't ascend.
    """
    if not 0 < small_count < large_count:
        raise ConfigError(f"gradients over {small_count:g} and {large_count:g} units: give a smaller and a larger one")
    signal = (large_count * large - small_count * small) / (large_count - small_count)
    return NoiseSample(trace=(small - large) / (1 / small_count - 1 / large_count), signal=signal)


def from_parts(
    squared: Sequence[float], whole: float, counts: Sequence[float], *, independent: bool = False
) -> NoiseSample:
    """From the parts of one batch: its micro-batches, its ranks, or the micro-batches of all ranks.

    `squared` (k,) are the squared norms of each part's gradient, of the mean over its own `counts` (k,) units; `whole`
    is that of the gradient of the whole, sum over i of n_i / N x g_i. Parts are independent of one another, k >= 2.

    What holds for any noise of each part, as tokens of one text are correlated: E|g_i|^2 = |G|^2 + v_i and E|whole|^2 =
    |G|^2 + sum (n_i / N)^2 v_i, which give |G|^2; tr(Sigma) is N times the noise of the whole. With `independent` units
    v_i = tr(Sigma) / n_i, and unequal parts can be used a little better. For equal counts the two are the same.

    ConfigError for fewer than two parts or counts that aren't positive.
    """
    if len(squared) != len(counts):
        raise ConfigError(f"{len(squared)} squared norms for {len(counts)} counts: give one for each part")
    if len(counts) < 2 or min(counts) <= 0:
        raise ConfigError(
            f"parts of {list(counts)} units: the noise shows between two parts or more, none of them empty"
        )
    total = math.fsum(counts)
    if independent:
        within = math.fsum(n * square for n, square in zip(counts, squared, strict=True)) / total
        trace = total / (len(counts) - 1) * (within - whole)
        return NoiseSample(trace=trace, signal=whole - trace / total)
    crossed = total**2 * whole - math.fsum(n * n * square for n, square in zip(counts, squared, strict=True))
    signal = crossed / (total**2 - math.fsum(n * n for n in counts))
    return NoiseSample(trace=total * (whole - signal), signal=signal)


@dataclass(frozen=True)
class Mean:
    """A smoothed quantity and its 95 % interval."""

    value: float
    interval: Interval | None
    """None: a single update has no spread."""

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} ({self.interval[0]:.4g} to {self.interval[1]:.4g})"


@dataclass(frozen=True)
class NoiseEstimate:
    """What the updates so far say. Intervals are of 95 %."""

    unit: str
    updates: int
    """That were used."""
    effective_updates: float
    """As many equally weighted ones tell as much as the smoothed ones."""
    skipped: int
    """Updates of a single part, and those whose gradient overflowed."""
    trace: Mean | None
    """tr(Sigma), per unit; None: no update yet."""
    signal: Mean | None
    """|G|^2."""
    scale: Mean | None
    """B_noise = tr(Sigma) / |G|^2 in units; None: undetermined."""
    why: str
    """Why it is undetermined; empty where it isn't."""

    def to_json(self) -> dict[str, Any]:
        """Plain types; what isn't known is null."""
        return asdict(self)

    def __str__(self) -> str:
        left_out = f", {self.skipped:,} skipped" if self.skipped else ""
        said = f"noise scale {self.scale} {self.unit}" if self.scale else f"noise scale undetermined: {self.why}"
        if self.trace is None or self.signal is None:
            return f"{said}{left_out}"
        return f"{said}; tr(Sigma) {self.trace}, |G|^2 {self.signal}, over {self.updates:,} updates{left_out}"


class NoiseScale:
    """Smooths tr(Sigma) and |G|^2 over updates; hand it to `stoker.batch.accumulate(..., noise=...)`.

    `smoothing` is the factor by which an update's weight shrinks with each later one, from 0.5 to 1; 1 weighs all
    alike, for weights that stand still. `unit` is what counts count. `independent`: see `from_parts`.
    """

    def __init__(self, *, unit: str = "examples", smoothing: float = 0.99, independent: bool = False) -> None:
        if not 0.5 <= smoothing <= 1:
            raise ConfigError(f"smoothing = {smoothing}: a factor from 0.5 to 1; 0.99 averages about 200 updates")
        self.unit = unit
        self.smoothing = smoothing
        self.independent = independent
        self._updates = self._skipped = 0
        self._mass = self._mass_of_squares = 0.0
        self._trace = self._signal = 0.0
        self._trace_spread = self._signal_spread = self._joint_spread = 0.0

    def add_parts(self, squared: Sequence[float], whole: float, counts: Sequence[float]) -> None:
        """One update by its parts, as `from_parts` takes them.

        An update of a single part has nothing to compare, and one that overflowed says nothing: both are skipped, and
        counted.
        """
        if len(counts) == 1 or not math.isfinite(whole) or not all(map(math.isfinite, squared)):
            self._skipped += 1
        else:
            self.add(from_parts(squared, whole, counts, independent=self.independent))

    def add(self, sample: NoiseSample) -> None:
        """One update's pair. Decayed sums about the running mean (West 1979), which lose no digits."""
        keep = self.smoothing
        self._updates += 1
        self._mass = keep * self._mass + 1
        self._mass_of_squares = keep * keep * self._mass_of_squares + 1
        trace, signal = sample.trace - self._trace, sample.signal - self._signal
        self._trace += trace / self._mass
        self._signal += signal / self._mass
        share = 1 - 1 / self._mass
        self._trace_spread = keep * self._trace_spread + share * trace * trace
        self._signal_spread = keep * self._signal_spread + share * signal * signal
        self._joint_spread = keep * self._joint_spread + share * trace * signal

    def estimate(self) -> NoiseEstimate:
        """Where things stand.

        Updates are independent draws given the weights, so the variance of a smoothed value is that of one update times
        the sum of squared weights, and Student's t does the rest. The interval of the ratio is Fieller's (1954): all
        ratios r for which mean(T - r S) is compatible with 0. It needs no expansion around a noisy denominator, and is
        bounded exactly where |G|^2's own interval leaves 0 out: elsewhere the scale is undetermined.
        """
        if not self._updates:
            return NoiseEstimate(
                self.unit, 0, 0.0, self._skipped, None, None, None, "no update with two parts or more has been seen"
            )
        effective = self._mass**2 / self._mass_of_squares
        if self._updates == 1:
            why = "a single update has no spread"
            trace, signal = Mean(self._trace, None), Mean(self._signal, None)
            return NoiseEstimate(self.unit, 1, effective, self._skipped, trace, signal, None, why)
        quantile = student.quantile(max(1.0, effective - 1))
        unbiased = self._mass - self._mass_of_squares / self._mass
        reduced = quantile**2 / effective / unbiased
        spread = (self._trace_spread * reduced, self._joint_spread * reduced, self._signal_spread * reduced)
        trace, signal = _mean(self._trace, spread[0]), _mean(self._signal, spread[2])
        interval = fieller(self._trace, self._signal, spread)
        scale, why = None, ""
        if interval is None:
            why = "|G|^2 can't be told from 0; more updates, or more parts of each, would tell"
        else:
            value = beale(self._trace, self._signal, spread[1] / quantile**2, spread[2] / quantile**2)
            scale = Mean(value, (max(0.0, interval[0]), max(0.0, interval[1])))
        return NoiseEstimate(self.unit, self._updates, effective, self._skipped, trace, signal, scale, why)


def fieller(top: float, bottom: float, spread: tuple[float, float, float]) -> Interval | None:
    """The interval of top / bottom; None where the bottom's contains 0 or lies below (Fieller 1954).

    `spread`: the variance of the top, the covariance, and the variance of the bottom, each times the quantile squared.
    The ends are the roots r of (top - r bottom)^2 = spread_tt - 2 r spread_tb + r^2 spread_bb.
    """
    a = bottom**2 - spread[2]
    if a <= 0 or bottom <= 0:
        return None
    b = top * bottom - spread[1]
    root = math.sqrt(max(0.0, b * b - a * (top**2 - spread[0])))
    return (b - root) / a, (b + root) / a


def beale(top: float, bottom: float, covariance: float, variance: float) -> float:
    """top / bottom of two means, without the bias of dividing by a noisy one, to second order (Beale 1962)."""
    return (top + covariance / bottom) / (bottom + variance / bottom)


def _mean(value: float, squared_half: float) -> Mean:
    half = math.sqrt(squared_half)
    return Mean(value, (value - half, value + half))
