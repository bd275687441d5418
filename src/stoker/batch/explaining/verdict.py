"""Which way to move the batch, by three signals: throughput, memory, validation. Pure, without torch."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stoker.batch.curve import SPENT
from stoker.errors import ConfigError

__all__ = ["MEMORY_FULL", "MEMORY_ROOM", "Rung", "Signal", "Verdict", "Way", "decide", "worse"]

MEMORY_ROOM, MEMORY_FULL = 0.85, 0.95
"""Shares of the limit between which a peak is right: below there is room, above the next long batch may not fit."""

Way = Literal["larger", "stay", "smaller"]


@dataclass(frozen=True)
class Rung:
    """One batch of a ladder: what it costs and what it trains to, at equal samples."""

    examples_per_update: int
    rate: float
    """Examples per second."""
    memory: float | None
    """Peak over the limit; None: not known. Above 1: it doesn't fit at once."""
    losses: tuple[float, ...]
    """Of held-out data at the end, one per seed, in the order of seeds; infinite where a training diverged."""

    @property
    def loss(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.losses)

    @property
    def spread(self) -> float:
        """Standard deviation over seeds; NaN where one seed or a divergence leaves none."""
        if len(self.losses) < 2 or not all(map(math.isfinite, self.losses)):
            return math.nan
        return statistics.stdev(self.losses)


@dataclass(frozen=True)
class Signal:
    """One of the three."""

    name: Literal["throughput", "memory", "validation"]
    says: Way | None
    """None: not known."""
    words: str


@dataclass(frozen=True)
class Verdict:
    """The answer, and what it rests on."""

    way: Way
    present: int
    """Examples per update."""
    recommended: int
    signals: tuple[Signal, ...]
    words: str

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [self.words, *(f"  {each.name}: {each.says or 'not known'}. {each.words}" for each in self.signals)]
        return "\n".join(lines)


def worse(losses: Sequence[float], reference: Sequence[float], resolution: float = 0.0) -> bool:
    """Whether trainings (one per seed) end plainly worse than those of the reference, seed by seed.

    In every seed, and on average by more than one standard deviation of the reference's and than the `resolution`, a
    difference of two means that chance alone makes. Also where more of them diverged. ConfigError for fewer than two
    seeds, or other ones on the other side.
    """
    if len(losses) != len(reference) or len(losses) < 2:
        raise ConfigError(f"{len(losses)} trainings against {len(reference)}: one of each seed, of two seeds or more")
    diverged, there = (sum(not math.isfinite(each) for each in side) for side in (losses, reference))
    if diverged or there:
        return diverged > there
    apart = [mine - theirs for mine, theirs in zip(losses, reference, strict=True)]
    return min(apart) > 0 and statistics.fmean(apart) > max(resolution, statistics.stdev(reference))


def decide(rungs: Sequence[Rung], present: int, resolution: float = 0.0) -> Verdict:
    """From a ladder of batches, ascending, of which `present` is one. `resolution`: see `worse`.

    Smaller where smaller batches train plainly better at equal samples: the largest of those that isn't worse than the
    best of them. Otherwise larger, doubling by doubling, while each gains a tenth of throughput or more, fits, and
    isn't plainly worse than the present one. Otherwise stay. ConfigError for a ladder without the present batch.
    """
    sizes = [rung.examples_per_update for rung in rungs]
    if present not in sizes or sizes != sorted(set(sizes)):
        raise ConfigError(f"a ladder of {sizes} examples per update: ascending, with the present {present} in it")
    place = sizes.index(present)
    here, smaller, larger = rungs[place], rungs[:place], rungs[place + 1 :]
    better = [rung for rung in smaller if worse(here.losses, rung.losses, resolution)]
    signals = (_throughput(here, larger), _memory(here), _validation(here, smaller, better))
    if better:
        best = _best(better)
        taken = next(
            rung for rung in reversed(better) if rung is best or not worse(rung.losses, best.losses, resolution)
        )
        size = taken.examples_per_update
        words = f"Smaller: {size:,} examples per update instead of {present:,}. {_by(here, taken)} at equal samples"
        slower = 1 - taken.rate / here.rate
        words += f", for {slower:.0%} less throughput." if slower > 0 else "."
        return Verdict("smaller", present, size, signals, words)
    reached, stop = _climb(here, larger, resolution)
    if reached is not here:
        size = reached.examples_per_update
        words = (
            f"Larger: {size:,} examples per update instead of {present:,}: {reached.rate / here.rate - 1:.0%} more "
            f"throughput, and validation keeps ({_both(here, reached)}). {stop}"
        )
        return Verdict("larger", present, size, signals, words)
    return Verdict("stay", present, present, signals, f"Stay at {present:,} examples per update. {stop}")


def _climb(here: Rung, larger: Sequence[Rung], resolution: float) -> tuple[Rung, str]:
    """The rung to go to, and why no further."""
    reached = here
    for rung in larger:
        size = rung.examples_per_update
        gain = _per_doubling(reached, rung)
        if gain < SPENT:
            return reached, f"From there to {size:,} a doubling gains {gain:.0%} of throughput, less than {SPENT:.0%}."
        if rung.memory is not None and rung.memory > MEMORY_FULL:
            return reached, f"{size:,} would take {rung.memory:.0%} of the memory."
        if worse(rung.losses, here.losses, resolution):
            return reached, f"At {size:,} validation suffers at equal samples ({_both(here, rung)})."
        reached = rung
    return reached, "No larger batch was tried."


def _throughput(here: Rung, larger: Sequence[Rung]) -> Signal:
    if not larger:
        return Signal("throughput", None, "no larger batch was timed.")
    gain = _per_doubling(here, larger[0])
    what = f"a doubling from {here.examples_per_update:,} gains {gain:.0%}"
    return Signal("throughput", "larger" if gain >= SPENT else "stay", f"{what}; worth it from {SPENT:.0%} on.")


def _memory(here: Rung) -> Signal:
    if here.memory is None:
        return Signal("memory", None, "the peak or the limit isn't known.")
    says: Way = "larger" if here.memory < MEMORY_ROOM else "stay" if here.memory <= MEMORY_FULL else "smaller"
    cure = "" if says != "smaller" else "; smaller micro-batches, accumulated, leave the update as it is"
    return Signal(
        "memory",
        says,
        f"the peak is {here.memory:.0%} of the limit; right is {MEMORY_ROOM:.0%} to {MEMORY_FULL:.0%}{cure}.",
    )


def _validation(here: Rung, smaller: Sequence[Rung], better: Sequence[Rung]) -> Signal:
    """`better`: those of the smaller ones that train plainly better."""
    if not smaller:
        return Signal("validation", None, "no smaller batch was trained.")
    if better:
        return Signal("validation", "smaller", f"{_by(here, _best(better))} at equal samples.")
    best = _best(smaller)
    return Signal(
        "validation", "stay", f"not plainly worse than with {best.examples_per_update:,} ({_both(best, here)})."
    )


def _best(rungs: Sequence[Rung]) -> Rung:
    return min(rungs, key=lambda rung: rung.loss)


def _per_doubling(low: Rung, high: Rung) -> float:
    doublings = math.log2(high.examples_per_update / low.examples_per_update)
    gain: float = (high.rate / low.rate) ** (1 / doublings) - 1
    return gain


def _by(here: Rung, other: Rung) -> str:
    return f"{other.examples_per_update:,} trains better in every seed ({_both(other, here)})"


def _both(first: Rung, second: Rung) -> str:
    return "held-out loss " + ", ".join(f"{_loss(rung)} at {rung.examples_per_update:,}" for rung in (first, second))


def _loss(rung: Rung) -> str:
    if not math.isfinite(rung.loss):
        return f"diverged in {sum(not math.isfinite(each) for each in rung.losses)} of {len(rung.losses)} seeds"
    return f"{rung.loss:.4g}" if math.isnan(rung.spread) else f"{rung.loss:.4g} ± {rung.spread:.2g}"
