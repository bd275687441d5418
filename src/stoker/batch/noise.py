"""The gradient's noise scale (McCandlish et al. 2018, arXiv 1812.06162), from squared norms and counts alone. No torch.

A gradient over B examples is G plus noise whose covariance is Sigma / B, so E|g_B|^2 = |G|^2 + tr(Sigma) / B. Squared
norms at two sizes or more give both unknowns without bias; B_noise = tr(Sigma) / |G|^2 is the batch whose noise is as
large as its signal. One update's pair is very noisy, and its |G|^2 often negative: both are averaged over updates as
they come, never clamped, and divided last.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stoker.batch.estimates.smoothed import Interval, Mean, Smoothed, require_keys
from stoker.errors import ConfigError

__all__ = ["NoiseEstimate", "NoiseSample", "NoiseScale", "from_parts", "from_two_sizes"]


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

    `every`: it measures the first of every so many updates, which costs as much less and is as free of bias.
    `smoothing` is the factor by which a measured update's weight shrinks with each later one, from 0.5 to 1; 1 weighs
    all alike, for weights that stand still. `unit` is what counts count. `independent`: see `from_parts`.
    """

    def __init__(
        self, *, unit: str = "examples", smoothing: float = 0.99, independent: bool = False, every: int = 4
    ) -> None:
        if not 0.5 <= smoothing <= 1:
            raise ConfigError(f"smoothing = {smoothing}: a factor from 0.5 to 1; 0.99 averages about 200 updates")
        if every < 1:
            raise ConfigError(f"every = {every}: 1 measures each update, 4 the first of every four")
        self.unit = unit
        self.smoothing = smoothing
        self.independent = independent
        self.every = every
        self._passed = self._skipped = 0
        self._smoothed = Smoothed(2, smoothing)

    def begin_update(self) -> bool:
        """Count an update that begins; True where it is one to measure."""
        self._passed += 1
        return (self._passed - 1) % self.every == 0

    def add_parts(self, squared: Sequence[float], whole: float, counts: Sequence[float]) -> None:
        """One update by its parts, as `from_parts` takes them.

        An update of a single part has nothing to compare, and one that overflowed says nothing: both are skipped, and
        counted.
        """
        if len(counts) == 1 or not math.isfinite(whole) or not all(map(math.isfinite, squared)):
            self.skip()
        else:
            self.add(from_parts(squared, whole, counts, independent=self.independent))

    def add(self, sample: NoiseSample) -> None:
        """One update's pair."""
        self._smoothed.add((sample.trace, sample.signal))

    def skip(self) -> None:
        """Count an update that was to be measured and can't be."""
        self._skipped += 1

    def estimate(self) -> NoiseEstimate:
        """Where things stand.

        Intervals are Student's. That of the ratio is Fieller's (1954): all ratios r for which mean(T - r S) is
        compatible with 0. It needs no expansion around a noisy denominator, and is bounded exactly where |G|^2's own
        interval leaves 0 out: elsewhere the scale is undetermined.
        """
        seen, unit = self._smoothed, self.unit
        if not seen.updates:
            why = "no update with two parts or more has been seen"
            return NoiseEstimate(unit, 0, 0.0, self._skipped, None, None, None, why)
        scale, why = None, "a single update has no spread"
        if seen.updates > 1:
            scale, why = self._ratio()
        return NoiseEstimate(
            unit, seen.updates, seen.effective_updates, self._skipped, seen.mean(0), seen.mean(1), scale, why
        )

    def _ratio(self) -> tuple[Mean | None, str]:
        """tr(Sigma) / |G|^2, or why there is none."""
        trace, signal = self._smoothed.means
        (top, joint), (_, bottom) = self._smoothed.covariance()
        reach = self._smoothed.quantile**2
        interval = fieller(trace, signal, (top * reach, joint * reach, bottom * reach))
        if interval is None:
            return None, "|G|^2 can't be told from 0; more updates, or more parts of each, would tell"
        value = beale(trace, signal, joint, bottom)
        return Mean(value, (max(0.0, interval[0]), max(0.0, interval[1]))), ""

    def state_dict(self) -> dict[str, Any]:
        """All that a checkpoint must keep, in plain types: a meter that loads it goes on to the bit."""
        settings = {"unit": self.unit, "smoothing": self.smoothing, "independent": self.independent}
        seen = {"every": self.every, "passed": self._passed, "skipped": self._skipped}
        return settings | seen | {"smoothed": self._smoothed.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`. ConfigError for one of another layout, or of a meter that measures otherwise."""
        own = self.state_dict()
        require_keys(state, own, "of a noise meter")
        if other := [name for name in ("unit", "smoothing", "independent", "every") if state[name] != own[name]]:
            name = other[0]
            raise ConfigError(
                f"the saved noise meter has {name} = {state[name]!r} and this one {own[name]!r}: make it as the saved "
                "one was, or begin anew without its state"
            )
        self._smoothed.load_state_dict(state["smoothed"])
        self._passed, self._skipped = int(state["passed"]), int(state["skipped"])


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
