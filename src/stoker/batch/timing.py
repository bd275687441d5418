"""The time of steps at one size or at several: warm-up dropped, synchronised, medians, drift and strays told apart."""

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoker.batch import nest, student
from stoker.batch.instruments import Instruments
from stoker.batch.loading import LoaderOptions
from stoker.batch.target import Workload
from stoker.errors import ConfigError

__all__ = ["Effort", "Loaded", "Loading", "Settled", "Timed", "batches", "settle", "time_loader", "time_steps"]

STEADY = 0.03
"""Two passes over the sizes whose times differ by less, at the median, saw the same device."""
STRAY = 0.06
"""A size whose two medians differ by more than this beyond the drift of all is measured again."""
PRECISE = 0.007
"""Relative standard error of a median at which measuring stops."""
LOOK = 8
"""Rounds between looks at how precise the median is: looking costs time too."""
TURNS = 100
"""Of a loader's waits, at most."""
SHARE = 0.01
"""Standard error of the share of a step that waits, at which measuring stops."""


@dataclass(frozen=True)
class Effort:
    """How much to measure. Long steps need few repeats, so all of these are limits to one another."""

    warmup: int = 2
    """Steps dropped at each size: allocation, autotuning, caches."""
    repeats: int = 8
    """Rounds at least."""
    seconds: float = 1.0
    """For each size and pass, once the repeats are there."""
    round_steps: int = 8
    """On a device that runs ahead of its host, a round holds so many steps: launches must overlap as in training."""
    round_seconds: float = 0.1
    """No more steps in a round than take so long; long steps stand alone."""
    most: int = 200
    """Rounds at most."""
    passes: int = 5
    """Over all sizes, at most, until two in a row agree."""
    longest_step: float = 20.0
    """Seconds: a size whose step takes longer is the last."""


@dataclass
class Timed:
    """One size's rounds: seconds per step of each."""

    size: int
    rounds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    utilisation: float | None = None
    busy: float = 0.0
    """Processor seconds per step."""

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    @property
    def error(self) -> float:
        """Relative standard error of the median, by the median absolute deviation."""
        middle = self.median
        deviation = 1.4826 * statistics.median(abs(each - middle) for each in self.rounds)
        return student.median_error(deviation, len(self.rounds)) / middle

    @property
    def quartiles(self) -> tuple[float, float]:
        low, _, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return low, high


class Loading(Workload, Protocol):
    """A workload whose loader is visible; see `Target`."""

    load: Callable[[int, LoaderOptions], Iterable[Any]]

    def step_on(self, batch: Any) -> None:
        """One complete optimizer step on a batch that is there already."""


def time_steps(step: Callable[[], None], size: int, instruments: Instruments, effort: Effort) -> Timed:
    """Rounds of `step`. Errors of the step pass through."""
    clock = instruments.clock
    made = Timed(size)
    instruments.reset_peak()
    once = 0.0
    for _ in range(max(effort.warmup, 1)):
        start = clock()
        step()
        instruments.synchronize()
        once = clock() - start
    per_round = 1
    if instruments.asynchronous and once > 0:
        per_round = max(1, min(effort.round_steps, math.ceil(effort.round_seconds / once)))
    begun, busy = clock(), instruments.busy()
    while not _enough(made, clock() - begun, effort):
        start = clock()
        for _ in range(per_round):
            step()
        instruments.synchronize()
        made.rounds.append((clock() - start) / per_round)
    made.utilisation = instruments.utilisation()
    made.busy = (instruments.busy() - busy) / (per_round * len(made.rounds))
    made.peak_bytes = instruments.peak()
    return made


def _enough(made: Timed, spent: float, effort: Effort) -> bool:
    """Long steps end at three rounds, short ones when their median is precise or the time is over."""
    count = len(made.rounds)
    if count < 3:
        return False
    if count >= effort.most or spent > 3 * effort.seconds:
        return True
    return count >= effort.repeats and (spent > effort.seconds or (count % LOOK == 0 and made.error < PRECISE))


@dataclass(frozen=True)
class Settled:
    """What two passes that agree say, and how the device changed before them."""

    drift: float
    """Time per step in the passes that count over that in the first, less 1: heat, or a neighbour."""
    steady: bool
    """Two passes in a row agreed."""
    strays: tuple[int, ...]
    """Sizes measured once more, as their two medians differed."""


def settle(
    first: Mapping[int, Timed], again: Callable[[Sequence[int]], dict[int, Timed]], effort: Effort
) -> tuple[dict[int, Timed], Settled]:
    """Repeats passes over the sizes, down and up in turn, until two in a row agree; pools those two.

    Training runs for hours, so what counts is the device in its steady state, not while it is cool. Single sizes that
    disagree are measured once more and keep the faster half: a disturbance only ever adds time.
    """
    before, drift, steady, passes = dict(first), 1.0, False, 1
    while True:
        order = sorted(before, reverse=passes % 2 == 1)
        after = again(order)
        ratios = {size: after[size].median / before[size].median for size in order}
        passes += 1
        common = statistics.median(ratios.values())
        drift *= common
        steady = abs(common - 1) < STEADY
        if steady or passes >= effort.passes:
            break
        before = after
    pooled, strays = {}, []
    for size in sorted(after):
        kept = [before[size], after[size]] if steady else [after[size]]
        if steady and abs(math.log(ratios[size] / common)) > STRAY:
            strays.append(size)
            kept = sorted([*kept, again([size])[size]], key=lambda timed: timed.median)[:2]
        pooled[size] = Timed(
            size,
            [each for timed in kept for each in timed.rounds],
            first[size].peak_bytes,  # the first pass goes up, so nothing larger has been held before
            kept[-1].utilisation,
            statistics.mean(timed.busy for timed in kept),
        )
    return pooled, Settled(drift - 1, steady, tuple(strays))


@dataclass(frozen=True)
class Loaded:
    """Steps that take their batches from the loader."""

    seconds: float
    """Per step, the wait included."""
    waited: float
    """Per step, for the loader and for moving its batch to the device."""
    first_wait: float
    """Until the very first batch: workers start."""
    steps_per_epoch: int | None
    """None: the loader doesn't tell, and no epoch ended while measuring."""

    @property
    def share(self) -> float:
        """Of the step's time that waits for data."""
        return self.waited / self.seconds


def time_loader(target: Loading, size: int, options: LoaderOptions, instruments: Instruments, effort: Effort) -> Loaded:
    """Synchronised after every step, so that what the device still computes isn't read as waiting.

    What workers make ahead is taken first, without a step, so that no store of batches hides a loader that is too slow.
    Waits come in turns of as many steps as there are workers (of epochs, where those are short, as each begins with a
    wait), so whole turns are measured, until the share of waiting is exact to `SHARE` or the time is over.
    """
    stream = batches(target, size, options, instruments)
    clock, turn = instruments.clock, max(options.workers, 1)
    computed: list[float] = []
    waited: list[float] = []
    try:
        first_wait, batch, epoch = next(stream)
        for _ in range(options.workers * options.ahead):
            _, batch, _ = next(stream)
        drop, begun = effort.warmup + turn, math.inf
        while len(computed) - drop < 3 * turn or not _known(
            computed[drop:], waited[drop:], turn, clock() - begun, effort
        ):
            start = clock()
            target.step_on(batch)
            instruments.synchronize()
            computed.append(clock() - start)
            wait, batch, ended = next(stream)
            waited.append(wait)
            epoch = ended or epoch
            turn = epoch if epoch and epoch <= 4 * max(options.workers, 1) else turn
            begun = min(begun, clock()) if len(computed) >= drop else begun
    finally:
        stream.close()
    whole = (len(computed) - drop) // turn * turn
    waiting = statistics.mean(waited[drop : drop + whole])
    return Loaded(statistics.median(computed[drop : drop + whole]) + waiting, waiting, first_wait, epoch)


def _known(computed: list[float], waited: list[float], turn: int, spent: float, effort: Effort) -> bool:
    turns = [statistics.mean(waited[i : i + turn]) for i in range(0, len(waited) // turn * turn, turn)]
    if len(turns) >= TURNS or spent > 5 * effort.seconds:
        return True
    error = statistics.stdev(turns) / math.sqrt(len(turns)) / (statistics.median(computed) + statistics.mean(turns))
    return len(turns) >= 2 * effort.repeats and error < SHARE


def batches(
    target: Loading, size: int, options: LoaderOptions, instruments: Instruments
) -> Generator[tuple[float, Any, int | None], None, None]:
    """Epoch after epoch: the wait for each batch, the batch on the device, the epoch's length where it is known."""
    clock = instruments.clock
    loader = target.load(size, options)
    length = len(loader) if isinstance(loader, Sized) else None
    start = clock()
    while True:
        count = 0
        for batch in loader:
            moved = nest.move(batch, target.device, pinned=options.pin_memory)
            instruments.synchronize()
            count += 1
            yield clock() - start, moved, length
            start = clock()
        if not count:
            raise ConfigError(
                f"target: load({size}, ...) gave no batch of {size} {target.unit}: is the data set smaller than that? "
                "Set the target's `most` to the number of examples it has"
            )
        length = count  # the clock runs on: ending an epoch and beginning the next is a wait too
