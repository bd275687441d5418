"""The measuring of a sweep: up through the sizes, until the device is steady, and once more beside the knee."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from stoker.batch import curve, judging
from stoker.batch.asked import alone, check_growth, check_size, numbers, shapes_of
from stoker.batch.instruments import Instruments
from stoker.batch.out_of_memory import is_out_of_memory
from stoker.batch.target import Target, Workload
from stoker.batch.telling import OnPart
from stoker.batch.timing import Effort, Timed, time_steps
from stoker.errors import StokerError

__all__ = ["LONGER", "Run", "climb", "refine"]

FLAT_DOUBLINGS = 3
"""Doublings in a row that gain less than `SPENT` end a sweep."""
LOOKS = 2
"""Times that all sizes are measured again where the two methods disagree."""
BESIDE = 3
"""Sizes beside the knee."""
LOADED = 3
"""Times the seconds of a size that it usually takes with the loader and, beside that, without."""
LONGER = 4
"""Times as long as usual are these measured, and the loader at the studied size, as waits come in bursts."""
MULTIPLES = (64, 32, 16, 8)
"""Neighbours of the knee are of the largest of these that is at most a quarter of it: tiles are."""


@dataclass
class Run:
    """One sweep under way: what runs, what reads, and what has been measured so far."""

    target: Workload
    instruments: Instruments
    effort: Effort
    timed: dict[int, Timed] = field(default_factory=dict)
    ladder: tuple[int, ...] = ()
    """The sizes that were tried first: doublings, usually."""
    on_part: OnPart | None = None
    spent: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Seconds that timing a size took when it last was, and those of one of its steps."""
    elements: dict[int, int] = field(default_factory=dict)
    """Numbers in the batches of the sizes that were made."""

    def step(self, size: int) -> Callable[[], None]:
        """A step on one batch that is made now and held, or where the target holds none, one that makes its own.

        DataError, RunError where a target's batch isn't of that size.
        """
        make, step_on = getattr(self.target, "make_batch", None), getattr(self.target, "step_on", None)
        if make is None or step_on is None:
            return lambda: self.target.step(size)
        batch = make(size)
        if isinstance(self.target, Target):
            shapes = shapes_of(batch)
            check_size(shapes, size, None, self.target.unit)
            for before in self.elements.items():
                check_growth(before, (size, numbers(shapes)), self.target.unit)
            self.elements[size] = numbers(shapes)
        return lambda: step_on(batch)

    def time(self, size: int, ahead: Sequence[int] | None) -> Timed:
        """`ahead`: the sizes that are timed after this one, as far as is known; None: that isn't."""
        start = self.instruments.clock()
        try:
            timed = time_steps(self.step(size), size, self.instruments, self.effort)
        except Exception as error:
            if size == 1 and not isinstance(error, StokerError):
                error.add_note(alone("sizes from 2 on"))
            raise
        self.spent[size] = self.instruments.clock() - start, timed.median
        what = f"{size:,}: {timed.median * 1e3:,.2f} ms/step, {size / timed.median:,.0f}/s"
        self.told(what, None if ahead is None else self._seconds_of(ahead) + self._loader_seconds())
        return timed

    def times(self, sizes: Sequence[int]) -> dict[int, Timed]:
        """One after the other; those beside the knee, which lies in the middle as a rule, are still to come."""
        beside = sorted(sizes)[len(sizes) // 2 :][:BESIDE]
        return {size: self.time(size, [*sizes[place + 1 :], *beside]) for place, size in enumerate(sizes)}

    def told(self, what: str, left: float | None) -> None:
        if self.on_part is not None:
            self.on_part(what, left)

    def _seconds_of(self, sizes: Sequence[int]) -> float:
        """As long as last time; a new size as long as the largest so far, or as the few steps that are the least."""
        largest = max(self.spent)
        seconds, step = self.spent[largest]
        least = (self.effort.warmup + 3) * step / largest
        return sum(self.spent[size][0] if size in self.spent else max(seconds, least * size) for size in sizes)

    def _loader_seconds(self) -> float:
        """Of steps with the loader, at every size and longer at one, where the target shows its loader."""
        sizes = len(self.timed) + BESIDE + LONGER
        return 0.0 if getattr(self.target, "load", None) is None else LOADED * self.effort.seconds * sizes

    def again(self, sizes: Sequence[int]) -> None:
        """More rounds of sizes that were measured, first rounds of others."""
        for place, size in enumerate(sizes):
            more = self.time(size, sizes[place + 1 :])
            if size in self.timed:
                self.timed[size].rounds += more.rounds
            else:
                self.timed[size] = more

    @property
    def seconds(self) -> dict[int, float]:
        return {size: self.timed[size].median for size in sorted(self.timed)}

    @property
    def noise(self) -> dict[int, float]:
        return {size: self.timed[size].error for size in sorted(self.timed)}

    def fitted(self) -> tuple[curve.Fit, tuple[curve.Gain, ...], curve.Knee]:
        """From the ladder and those sizes beside the knee that are worth their time: tiles make some worse."""
        bad = {*self.quantised(), *judging.dominated(self.seconds, self.ladder)}
        sizes = [size for size in self.seconds if size not in bad]
        seconds, noise = [self.seconds[size] for size in sizes], [self.noise[size] for size in sizes]
        line, found = curve.fit(sizes, seconds, noise), curve.gains(sizes, seconds, noise)
        return line, found, curve.find_knee(line, found, sizes[-1])

    def quantised(self) -> list[int]:
        """Sizes between those of the ladder that lie above the ladder's line."""
        ladder = [size for size in self.seconds if size in self.ladder]
        line = curve.fit(ladder, [self.seconds[size] for size in ladder], [self.noise[size] for size in ladder])
        between = [size for size in self.seconds if size not in self.ladder]
        return judging.quantised(line, self.seconds, self.noise, between)


def climb(run: Run, sizes: Sequence[int], *, bounded: bool = True) -> tuple[judging.Ended, str]:
    """The first pass: until a size doesn't fit, takes too long, or follows several doublings that gained nothing.

    `bounded`: the sizes may all be reached, so that it is known about how long they take.
    """
    for place, size in enumerate(sizes):
        if (reason := _would_not_fit(run, size)) is not None:
            return "memory", reason
        error = ""
        try:
            run.timed[size] = run.time(size, [*sizes[place + 1 :], *sizes] if bounded else None)
        except (RuntimeError, MemoryError) as raised:
            if not is_out_of_memory(raised):
                raise
            error = str(raised).splitlines()[0] if str(raised) else type(raised).__name__
        if error:  # outside `except`, whose exception holds the failed step's tensors
            _release(run.target)
            return "memory", f"{size:,} ran out of memory ({error})"
        if run.timed[size].median > run.effort.longest_step:
            return "time", f"a step of {size:,} takes {run.timed[size].median:.1f} s"
        if _spent(run.seconds) and size != sizes[-1]:
            return "spent", f"{FLAT_DOUBLINGS} doublings in a row gained less than {curve.SPENT:.0%} each"
    return "largest", "it is the largest size asked for, or that there is data for"


def refine(run: Run) -> None:
    """Measures what lies beside the knee too, where tiles that a size fills badly would show.

    Where the two methods disagree still, all sizes are measured again, and longer.
    """
    knee = run.fitted()[2]
    centre = knee.size or knee.by_fit
    if centre is not None:
        step = next((each for each in MULTIPLES if each <= centre / 4), 1)
        beside = {max(1, round(centre * factor / step) * step) for factor in (0.7, 1.0, 1.4)}
        smallest, last = min(run.timed), max(run.timed)
        run.again(sorted(size for size in beside if smallest < size <= last))
    usual = run.effort
    for _ in range(LOOKS):
        if run.fitted()[2].agree:
            return
        run.effort = replace(usual, seconds=LONGER * usual.seconds)
        run.again(list(run.seconds))
        run.effort = usual


def _would_not_fit(run: Run, size: int) -> str | None:
    """Where the system would end the process instead of raising, a line through the last two peaks must suffice."""
    capacity = run.instruments.capacity
    if run.instruments.survives or capacity is None:
        return None
    allows = judging.memory_allows(list(run.timed), [each.peak_bytes for each in run.timed.values()], capacity)
    if allows is None or size <= allows:
        return None
    return f"{size:,} would need more than the {capacity / 1e9:.1f} GB there are, by the growth of the last two peaks"


def _release(target: Workload) -> None:
    optimizer = getattr(target, "optimizer", None)
    if optimizer is not None:
        optimizer.zero_grad(set_to_none=True)
    if target.device.type == "cuda":
        torch.cuda.empty_cache()


def _spent(seconds: dict[int, float]) -> bool:
    """The last doublings all gained less than `SPENT`."""
    if len(seconds) <= FLAT_DOUBLINGS + 1:
        return False
    sizes = list(seconds)[-FLAT_DOUBLINGS - 1 :]
    found = curve.gains(sizes, [seconds[size] for size in sizes])
    return all(gain.measured < curve.SPENT for gain in found)
