"""What a sweep found: every point, the line, both knees, the verdict, remedies. For people and as plain JSON.

No torch here: a result can be read and drawn anywhere.
"""

from dataclasses import dataclass
from typing import Any, Literal

from stoker.batch.curve import SPENT, Fit, Gain, Knee, Zone
from stoker.batch.loading import LoaderOptions
from stoker.batch.table import as_table

__all__ = ["DATA_BOUND", "Account", "DataShare", "Point", "Remedy", "Roofline", "Sweep", "Verdict"]

DATA_BOUND = 0.10
"""Of a step's time: a loader that is waited for longer is the thing to mend."""


@dataclass(frozen=True)
class DataShare:
    """What the loader costs at one size, by two measurements."""

    seconds: float
    """Per step with the loader."""
    waited: float
    """Share of that step spent waiting for the batch, its copy to the device included."""
    by_rerun: float
    """1 - (a step on one batch held ready) / (a step with the loader), both synchronised after every step."""
    steps_per_epoch: int | None

    @property
    def slowed(self) -> float:
        """Share lost otherwise than by waiting: workers that take the processor from the training."""
        return self.by_rerun - self.waited


@dataclass(frozen=True)
class Point:
    """One size. Times are of complete optimizer steps on a batch held ready, where the target lets one be held."""

    size: int
    seconds: float
    """Median."""
    quartiles: tuple[float, float]
    rate: float
    """Units per second."""
    gain: float | None
    """What doubling it adds to throughput, by the line; None: no line could be fitted."""
    zone: Zone | None
    peak_bytes: int | None = None
    data: DataShare | None = None
    flops: int | None = None
    moved_bytes: int | None = None
    """That operators read and write, as if nothing stayed in a cache."""
    share_of_peak: float | None = None
    """FLOPs per second over the device's fastest matrix product (MFU)."""
    share_of_bandwidth: float | None = None
    """Bytes per second over a plain copy's; above 1 where caches serve what was counted."""
    utilisation: float | None = None
    """The driver's: any kernel running counts as busy, so it decides nothing here."""

    @property
    def flop_per_byte(self) -> float | None:
        return self.flops / self.moved_bytes if self.flops is not None and self.moved_bytes else None


@dataclass(frozen=True)
class Roofline:
    """The device's limits, measured beside the sweep."""

    dtype: str
    flops: float
    """Per second."""
    bandwidth: float
    """Bytes per second."""
    ridge: float
    """FLOP per byte where the two limits meet."""


@dataclass(frozen=True)
class Remedy:
    """A change, the gain predicted before it was tried, and the gain when it was."""

    name: str
    change: str
    predicted: float | None
    """Of throughput, relative; None: nothing to predict from."""
    at_most: bool
    """The prediction is a bound."""
    basis: str
    """What the prediction rests on."""
    before: float | None
    """Seconds per unit."""
    after: float | None
    """None: not tried, see `note`."""
    note: str = ""
    loading: LoaderOptions | None = None
    """The loader's options with the change; None: the change isn't the loader's."""

    @property
    def measured(self) -> float | None:
        """Gain of throughput, relative."""
        return self.before / self.after - 1 if self.before and self.after else None


Kind = Literal["data-bound", "saturated", "launch-bound", "memory-limited", "rising", "undetermined"]


@dataclass(frozen=True)
class Verdict:
    """One word for programs, sentences for people."""

    kind: Kind
    words: str


@dataclass(frozen=True)
class Account:
    """One of three answers to "memory is left, raise the batch?": throughput, gradient noise, learning rate."""

    name: str
    answer: str
    """"yes", "no", "in part" or "not measured"."""
    words: str

    def __str__(self) -> str:
        return f"{self.name}: {self.answer}. {self.words}"


@dataclass(frozen=True)
class Sweep:
    """The result of `stoker.batch.sweep.sweep`. Sizes count `unit`, per device, in one forward and backward."""

    unit: str
    device: str
    points: tuple[Point, ...]
    """Ascending in size."""
    fit: Fit | None
    """None: fewer than two sizes ran."""
    gains: tuple[Gain, ...]
    knee: Knee | None
    launch_bound_to: float | None
    """Up to here a doubling took less than 1.2 times as long."""
    recommended: int | None
    """The measured size at or beside the knee that does best against the line; None: no knee within the sweep."""
    operating: tuple[int, int] | None
    """From the knee to the largest measured size that leaves headroom: where throughput and memory both allow."""
    memory_allows: int | None
    """By a line through the measured peaks, with headroom: an estimate that running it would have to confirm."""
    capacity_bytes: int | None
    present: int | None
    """The size in use, if it was given."""
    studied: int
    """The size whose loader and remedies were looked at: the present one, the recommended one or the largest."""
    stopped: str
    """Why no larger size was tried."""
    drift: float
    """How much slower steps became while the device warmed up; the points are of its steady state."""
    steady: bool
    roofline: Roofline | None
    loading: LoaderOptions | None
    """Options that the loader had; None: the target doesn't show its loader."""
    remedies: tuple[Remedy, ...]
    accounts: tuple[Account, ...]
    verdict: Verdict
    warnings: tuple[str, ...] = ()

    def at(self, size: int) -> Point:
        """The point of a measured size. KeyError for another."""
        for point in self.points:
            if point.size == size:
                return point
        raise KeyError(size)

    def to_json(self) -> dict[str, Any]:
        """Plain types; what isn't known is null."""
        made = _plain(self)
        made["fit"] = self.fit.to_json() if self.fit else None
        for remedy, each in zip(made["remedies"], self.remedies, strict=True):
            remedy["measured"] = each.measured
        for row, point in zip(made["points"], self.points, strict=True):
            row["flop_per_byte"] = point.flop_per_byte
        return dict(made)

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(found: Sweep) -> list[str]:
    lines = [found.verdict.words, "", *_table(found), ""]
    if found.fit is not None:
        lines.append(_line_in_words(found.fit, found.unit))
    if found.knee is not None:
        size = "none within the sweep" if found.knee.size is None else f"{found.knee.size:,.4g} {found.unit}"
        agree = "two methods agree" if found.knee.agree else "THE METHODS DISAGREE"
        lines.append(f"knee (a doubling gains less than {SPENT:.0%}): {size}; {agree}: {found.knee.why}")
    if found.operating:
        low, high = found.operating
        lines.append(f"throughput and memory both allow {low:,} to {high:,} {found.unit}")
    if found.roofline:
        limit = found.roofline
        lines.append(
            f"device, measured: {limit.flops / 1e9:,.0f} GFLOP/s ({limit.dtype}), {limit.bandwidth / 1e9:,.1f} GB/s, "
            f"ridge {limit.ridge:,.1f} FLOP/byte"
        )
    lines.append(f"stopped at {found.points[-1].size:,}: {found.stopped}")
    if found.remedies:
        lines += ["", f"remedies at {found.studied:,} {found.unit}:", *map(_remedy_in_words, found.remedies)]
    if found.accounts:
        lines += ["", "raise the batch?", *(f"  {each}" for each in found.accounts)]
    return lines + [f"warning: {each}" for each in found.warnings]


def _table(found: Sweep) -> list[str]:
    """One row a point, and only columns that something is known for."""
    columns: list[tuple[str, list[str]]] = [
        (found.unit, [f"{p.size:,}" for p in found.points]),
        ("ms/step", [f"{p.seconds * 1e3:,.2f}" for p in found.points]),
        (f"{found.unit}/s", [f"{p.rate:,.1f}" for p in found.points]),
        ("doubling gains", [_percent(p.gain) for p in found.points]),
        ("zone", [p.zone or "" for p in found.points]),
        ("peak MB", ["" if p.peak_bytes is None else f"{p.peak_bytes / 1e6:,.0f}" for p in found.points]),
        ("waits for data", [_percent(p.data.waited) if p.data else "" for p in found.points]),
        ("FLOP/byte", ["" if p.flop_per_byte is None else f"{p.flop_per_byte:,.1f}" for p in found.points]),
        ("of peak", [_percent(p.share_of_peak) for p in found.points]),
        ("of bandwidth", [_percent(p.share_of_bandwidth) for p in found.points]),
        ("driver busy", [_percent(p.utilisation) for p in found.points]),
    ]
    return as_table(columns)


def _line_in_words(fit: Fit, unit: str) -> str:
    one = unit.removesuffix("s")
    floor = f", but at least {fit.floor * 1e3:,.3g} ms" if fit.floor else ""
    low, high = fit.alpha_interval
    return (
        f"a step takes {fit.alpha * 1e3:,.3g} ms ({low * 1e3:,.3g} to {high * 1e3:,.3g}) + {fit.beta * 1e3:,.3g} ms "
        f"per {one}{floor}; the line misses by {fit.misfit:.1%}; never more than {fit.asymptote:,.4g} {unit}/s, 90 % "
        f"of that from {fit.reaching(0.9):,.4g} {unit}"
    )


def _remedy_in_words(remedy: Remedy) -> str:
    bound = "at most " if remedy.at_most else ""
    predicted = "none" if remedy.predicted is None else f"{bound}{remedy.predicted:+.1%}"
    measured = "not tried" if remedy.measured is None else f"{remedy.measured:+.1%}"
    note = f" ({remedy.note})" if remedy.note else ""
    return f"  {remedy.name}: {remedy.change}; predicted {predicted}, measured {measured}{note}; {remedy.basis}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _plain(value: Any) -> Any:
    """Dataclasses, tuples and numbers as JSON has them."""
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return value
