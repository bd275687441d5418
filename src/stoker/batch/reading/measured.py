"""The figures of a curve that the rules go by. Pure, without torch.

Shares of a fall are by the learning rate spent (the sum of the rates so far), where rates are known: a decayed rate
slows every curve, and that is no sign of anything.
"""

import math
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from stoker import signals
from stoker.batch.reading.curve import Curve

__all__ = ["Measured", "measure"]

Floats = NDArray[np.float64]

STRETCHES = 20
"""That a curve is divided into."""
FIRST_EXAMPLES = 32
"""By which the loss at the beginning is known well enough."""
FIRST_UNSURE = 0.25
"""Standard error of the first loss over the fall, from which more losses are averaged."""
LATE_UNSURE = 0.04
"""Standard error of the last quarter's share of the fall from which held-out losses are asked instead."""


@dataclass(frozen=True)
class Measured:
    """Figures of a curve whose numbers are all finite. NaN: couldn't be measured."""

    updates: int
    examples: int
    """Per update."""
    first: float
    """Loss of the first update."""
    last: float
    """Of the last tenth."""
    noise: float
    """Scatter of a single update's loss, in the last third."""
    fall: float
    """Share of the first loss that is gone."""
    fall_z: float
    """The clearest difference between the beginning and the end, in standard errors."""
    early: float
    """Of the fall, by the first quarter of the learning rate spent: 0.25 where it is even."""
    late: float
    """Of the fall, by the last quarter: 0.25 where it is even."""
    late_error: float
    peak: float
    """The highest mean of three losses over the first, at least: less what noise explains."""
    norm_peak: float
    """The highest mean of three gradient norms, over the first or the median, whichever is larger."""
    norm_end: float
    """The median gradient norm of the last quarter, over the first."""
    agreement: float
    """Mean cosine of neighbouring gradients."""
    agreement_end: float
    """In the last quarter."""
    rate_tail: float
    """Share of the updates, at the end, at less than a thirtieth of the highest rate."""
    held_rough: float
    """Scatter of held-out losses around their course, over their fall."""
    gap: float
    """Training loss over held-out loss in the second half, over the held-out fall."""
    gap_z: float
    """The same in standard errors of the training loss."""
    rise: float
    """Of the last twentieth above the lowest stretch, over the fall."""
    rise_z: float
    step: float
    """How far a stretch, after the first fifth, stands above those before and after it, over the fall."""
    step_z: float
    """The same in standard errors."""
    flat: float
    """Share of the updates after which the loss stays where it ends; NaN where it moves to the end."""
    spiky: float
    """Tenths of the training in which losses stand out of those around them."""

    @property
    def figures(self) -> dict[str, float]:
        """All that could be measured."""
        return {name: value for name, value in asdict(self).items() if math.isfinite(value)}


def measure(curve: Curve) -> Measured:
    """Of at least 8 updates with finite numbers."""
    losses = np.asarray(curve.losses, float)
    n = len(losses)
    norms = np.asarray(curve.gradient_norms, float)
    begun = _begun(losses, curve.examples_per_update)
    flat = signals.flat_from(curve.losses)
    usual = float(max(norms[0], np.median(norms))) if len(norms) else math.nan
    first = float(losses[:begun].mean())
    tail = losses[-max(2, n // 10) :]
    last, noise = float(tail.mean()), signals.scatter(list(losses[-max(6, n // 3) :]))
    place = _spent(np.asarray(curve.rates, float), n)
    early, late, late_error = _shares(losses, place, first)
    if late_error > LATE_UNSURE and not math.isnan(known := _late_held(curve, place, first)):
        late, late_error = known, 0.0
    held_rough, gap, gap_z = _held_out(curve, losses, first)
    agreement = np.asarray(curve.agreements[1:], float)
    quarter = max(3, n // 4)
    rise, rise_z = _rise(losses, first)
    step, step_z = _step(losses)
    return Measured(
        updates=n,
        examples=curve.examples_per_update,
        first=first,
        last=last,
        noise=noise,
        fall=(first - last) / abs(first) if first else math.nan,
        fall_z=_fall_z(losses, begun),
        early=early,
        late=late,
        late_error=late_error,
        peak=_peak(losses, first, begun),
        norm_peak=_highest(norms) / usual if usual > 0 else math.nan,
        norm_end=float(np.median(norms[-quarter:]) / norms[0]) if len(norms) and norms[0] > 0 else math.nan,
        agreement=float(agreement.mean()) if len(agreement) else math.nan,
        agreement_end=float(agreement[-quarter:].mean()) if len(agreement) else math.nan,
        rate_tail=_rate_tail(np.asarray(curve.rates, float)),
        held_rough=held_rough,
        gap=gap,
        gap_z=gap_z,
        rise=rise,
        rise_z=rise_z,
        step=step / abs(first - last) if first != last else math.nan,
        step_z=step_z,
        flat=flat / n if flat is not None else math.nan,
        spiky=float(len({10 * place // n for place in signals.spikes(list(losses))})),
    )


def _begun(losses: Floats, examples: int) -> int:
    """Losses that the first is the mean of.

    One where it is of enough examples, as a rate that is too high shows from the second on; more where a single one
    isn't known well enough to tell the fall by.
    """
    n = len(losses)
    begun = max(1, min(n // 100, -(-FIRST_EXAMPLES // examples)))
    fall = abs(float(losses[: max(1, n // 10)].mean() - losses[-max(2, n // 10) :].mean()))
    noise = signals.scatter(list(losses[n // 2 :]), robust=True)
    while 2 * begun <= n // 10 and noise / math.sqrt(begun) > FIRST_UNSURE * fall:
        if losses[: 2 * begun].max() > losses[0] + 4 * noise:  # a burst is no beginning
            break
        begun *= 2
    return begun


def _spent(rates: Floats, n: int) -> Floats:
    """Share of the whole learning rate that was spent by each update; of the updates, where rates aren't known."""
    if not len(rates) or not rates[1:].sum() > 0:
        return np.linspace(0, 1, n)
    spent = np.cumsum(rates)
    return np.asarray((spent - spent[0]) / (spent[-1] - spent[0]))


def _shares(losses: Floats, place: Floats, first: float) -> tuple[float, float, float]:
    """Of the fall by the first and the last quarter of the learning rate spent, and the latter's standard error.

    The latter is the slope of a line through the last two fifths, which hardly hears the noise of single updates.
    """
    late = place >= 0.6
    x, y = place[late], losses[late]
    across = float(((x - x.mean()) ** 2).sum())
    if len(x) < 4 or not across > 0:
        return math.nan, math.nan, math.nan
    slope = float(((x - x.mean()) * y).sum()) / across
    end = float(y.mean()) + slope * float(x[-1] - x.mean())
    begin = max(first, float(losses[place <= 0.02].mean()))
    fall = begin - end
    quarter = losses[(place >= 0.2) & (place <= 0.3)]
    if not fall > 0:
        return math.nan, math.nan, math.nan
    early = (begin - float(quarter.mean())) / fall if len(quarter) else math.nan
    return early, -slope / 4 / fall, signals.scatter(list(y)) / math.sqrt(across) / 4 / fall


def _late_held(curve: Curve, place: Floats, first: float) -> float:
    """The share of the last quarter by held-out losses, which have no noise of updates; NaN for too few."""
    seen = [(place[updates - 1], loss) for updates, loss in curve.held_out if math.isfinite(loss)]
    late = np.array([each for each in seen if each[0] >= 0.5])
    if len(late) < 3 or not late[-1, 0] > late[0, 0]:
        return math.nan
    slope, start = np.polyfit(late[:, 0], late[:, 1], 1)
    fall = first - (start + slope)
    return float(-slope / 4 / fall) if fall > 0 else math.nan


def _peak(losses: Floats, first: float, begun: int) -> float:
    """The highest mean of three over the first loss, each as far towards the other as noise may have moved it.

    Noise is that of the beginning, of the same size or in proportion to a loss that falls at once, whichever is larger;
    its tails are as heavy as those of the second half.
    """
    n = len(losses)
    if not first > 0:
        return math.nan
    half = list(losses[n // 2 :])
    usual = signals.scatter(half, robust=True)
    tails = max(1.0, signals.scatter(half) / usual) if usual > 0 else 1.0
    begin = losses[: max(8, n // 5)]
    noise = signals.scatter(list(begin), robust=True)
    if begin.min() > 0:
        noise = max(noise, first * signals.scatter(list(np.log(begin)), robust=True))
    noise *= tails
    return (_highest(losses) - noise * math.sqrt(2 * math.log(n) / 3)) / (first + 2 * noise / math.sqrt(begun))


def _highest(values: Floats) -> float:
    """Mean of three neighbours."""
    return float(np.convolve(values, np.ones(3) / 3, "valid").max())


def _fall_z(losses: Floats, begun: int) -> float:
    """The clearest difference between a beginning, of any length up to a tenth, and the end."""
    n = len(losses)
    tail = losses[-max(2, n // 10) :]
    noise = max(signals.scatter(list(losses[n // 2 :])), 1e-300)
    lengths = [begun * 2**k for k in range(20) if begun * 2**k <= max(begun, n // 10)]
    return max(float(losses[:k].mean() - tail.mean()) / (noise * math.sqrt(1 / k + 1 / len(tail))) for k in lengths)


def _rate_tail(rates: Floats) -> float:
    if not len(rates) or not rates.max() > 0:
        return math.nan
    high = np.flatnonzero(rates >= rates.max() / 30)
    return float(1 - (high[-1] + 1) / len(rates))


def _rise(losses: Floats, first: float) -> tuple[float, float]:
    means = signals.blocks(list(losses), STRETCHES)
    lowest = min(means, key=lambda each: each.value)
    up = means[-1].value - lowest.value
    error = math.hypot(means[-1].error, lowest.error)
    fall = first - lowest.value
    return (up / fall if fall > 0 else math.nan), (up / error if error > 0 else 0.0)


def _step(losses: Floats) -> tuple[float, float]:
    """The clearest stretch that stands above those of the same length before and after it, after the first fifth.

    How far above the higher of them, and its standard errors. Falling curves have none, however they are bent.
    """
    n = len(losses)
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    noise = max(signals.scatter(list(losses)), 1e-300)
    best = (0.0, 0.0)
    for length in sorted({max(6, n // part) for part in (32, 16, 8, 5)}):
        starts = np.arange(n // 5 + length, n - 2 * length + 1)
        if not len(starts):
            continue
        before, inside, after = (
            (sums[starts + (k + 1) * length] - sums[starts + k * length]) / length for k in (-1, 0, 1)
        )
        above = inside - np.maximum(before, after)
        up = float(above.max())
        z = up / (noise * math.sqrt(2 / length))
        best = max(best, (up, z), key=lambda each: each[1])
    return best


def _held_out(curve: Curve, losses: Floats, first: float) -> tuple[float, float, float]:
    seen = [(updates, loss) for updates, loss in curve.held_out if math.isfinite(loss)]
    if len(seen) < 4:
        return math.nan, math.nan, math.nan
    at = np.array([updates for updates, _ in seen], float)
    held = np.array([loss for _, loss in seen])
    fall = first - held.min()
    if not fall > 0:
        return math.nan, math.nan, math.nan
    n, half = len(losses), len(losses) // 2
    second = losses[half:]
    between = np.interp(np.arange(half, n), at, held)  # update i's loss is of the weights after i updates
    part = signals.level(list(second - between))
    rough = signals.scatter(list(held[-max(4, len(held) // 2 + 1) :])) / fall
    return rough, part.value / fall, part.value / part.error if part.error > 0 else 0.0
