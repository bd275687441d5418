"""The largest batch that fits in memory, found by running complete steps, and certified by running them once more.

`print(fit("train.py:make_target", limit_bytes=8 * 2**30))` is all that it needs.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import psutil
import torch

from stoker.batch.account import largest_layer, parts_of_peak
from stoker.batch.agreement import Agreement
from stoker.batch.asked import alone, check_growth
from stoker.batch.certificate import Fit, Trial, growth
from stoker.batch.in_process import InProcess
from stoker.batch.levers import levers_of
from stoker.batch.search import Observation, Search
from stoker.batch.target import Maker, Target
from stoker.batch.trials import Ending, Trials, least_memory
from stoker.errors import ConfigError, RunError
from stoker.record.memory import available_bytes

__all__ = ["Fit", "fit"]

_CERTIFYING_STEPS = 5
"""More than a trial's: an allocator's holes still grow for some steps."""
_CERTIFYING_RUNS = 4
_STEADY = 0.01
"""Share of the limit that the peaks of one size may lie apart, and must leave free, for one certifying run to do."""
_BOUNDS = {"out of memory": "memory", "killed": "host memory", "deadline": "deadline"}


class _Runner(Protocol):
    @property
    def environment(self) -> Mapping[str, str]: ...
    def inspect(self) -> dict[str, Any]: ...
    def try_size(self, size: int, limit_bytes: int | None, steps: int | None = None) -> Ending: ...


def fit(
    target: Target | Maker | str,
    *,
    limit_bytes: int | None = None,
    headroom: float = 0.05,
    start: int = 1,
    most: int | None = None,
    longest: int | None = None,
    in_process: bool = False,
    ranks: int = 1,
    steps: int = 3,
    precision: float = 0.01,
    deadline_seconds: float = 600.0,
    environment: Mapping[str, str] | None = None,
    on_trial: Callable[[Trial, int | None], None] | None = None,
) -> Fit:
    """The largest size of `target` whose complete optimizer steps run, certified.

    `target`: where to find a function that makes one (`file.py:function`): each trial is then a process of its own.
    Or a Target, with `in_process`: trials run here, and leave it as it was.
    `limit_bytes`: what a training may take, beyond a process that has loaded torch; in process on a CPU, beyond what
    this one has now. None: on CUDA the device, on a CPU what memory the host, or its container, has available.
    `headroom`: share of the limit to leave free. `start`: the first size tried. `most`: the largest worth trying;
    the target's own `most` holds in any case. `longest`: a length that each batch must have, refused otherwise.
    `ranks`: processes side by side on this host, who all must run. Where torch.distributed is initialised, every
    process of the group calls this, and they agree on the smallest.
    `steps`: of each trial, at least 2. `precision`: the limit is known to this fraction, and to the unit below its
    inverse. `deadline_seconds`: of each trial. `environment`: variables of trial processes, for the C library's
    allocator; None: with which a CPU's memory is the least and steady (docs/fit.md).
    `on_trial`: told of each as it ends, with about how many are left.

    Raises ConfigError where the arguments don't fit together or the target isn't one, RunError where not even one unit
    fits, and with the traceback where a trial fails for anything but memory.
    """
    if not 0 <= headroom < 1 or steps < 2 or min(start, ranks, 1 if limit_bytes is None else limit_bytes) < 1:
        raise ConfigError(
            f"headroom = {headroom}, steps = {steps}, start = {start}, ranks = {ranks}, limit_bytes = {limit_bytes}: "
            "headroom is a share from 0 up to 1, at least 2 steps hold the optimizer's state, the others begin at 1"
        )
    if in_process and ranks > 1:
        raise ConfigError(f"in_process = True, ranks = {ranks}: one process is one rank")
    settings = least_memory() if environment is None else environment
    runner = _runner(target, in_process, steps, longest, ranks, deadline_seconds, settings)
    agreement = Agreement()
    found = agreement.all_have(runner.inspect)
    limit = agreement.smallest(_default_limit(found, ranks, in_process) if limit_bytes is None else limit_bytes)
    largest = agreement.smallest(min((bound for bound in (most, found["most"]) if bound is not None), default=None))
    capacity = agreement.smallest(limit or found["capacity_bytes"])
    least: int = found["least"]
    if largest is not None:
        least, start = min(least, largest), min(start, largest)
    headroom *= capacity is not None  # else there is nothing to take it from, and the certificate says so
    seek = Search(max(start, least), largest, capacity, precision, least)
    return _Fitting(runner, found, seek, limit, headroom, ranks, in_process, agreement, on_trial).certified()


def _runner(
    target: Target | Maker | str,
    in_process: bool,
    steps: int,
    longest: int | None,
    ranks: int,
    deadline_seconds: float,
    environment: Mapping[str, str],
) -> _Runner:
    if in_process and isinstance(target, Target):
        return InProcess(target, steps, longest)
    if not in_process and isinstance(target, Maker | str):
        maker = Maker(target) if isinstance(target, str) else target
        return Trials(maker, ranks, steps, deadline_seconds, longest, environment)
    raise ConfigError(
        "in_process = True needs a Target that is in this process. Without it a trial makes a target of its own: "
        "give the path of a function that does, 'file.py:function'"
    )


def _default_limit(found: Mapping[str, Any], ranks: int, in_process: bool) -> int | None:
    """On a CPU what is available, so that the operating system needn't kill; elsewhere the device's own end is met."""
    if torch.device(found["device"]).type != "cpu":
        return None
    return (available_bytes() - (0 if in_process else psutil.Process().memory_info().rss * ranks)) // ranks


@dataclass
class _Fitting:
    """One call of `fit`."""

    runner: _Runner
    found: Mapping[str, Any]
    seek: Search
    limit: int | None
    headroom: float
    ranks: int
    in_process: bool
    agreement: Agreement
    on_trial: Callable[[Trial, int | None], None] | None = None
    trials: list[Trial] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)

    def certified(self) -> Fit:
        """Search under the whole limit, then under what the headroom leaves of it, then one more trial."""
        whole = self._searched(self.seek, self.limit)
        capacity = self.seek.limit_bytes
        under = None if capacity is None else int(capacity * (1 - self.headroom))
        if self.headroom and under is not None:
            search = self._searched(_carried(whole, under), under)
        else:
            search, under = whole, self.limit
        while not self._runs_again(search.answer, under):
            search = self._searched(search.observe(Observation(search.answer, fits=False)), under)
        return self._certificate(whole if self.headroom else search, search.answer)

    def _runs_again(self, size: int, limit: int | None) -> bool:
        """Once; and where chance could decide so often that it can't certify: the same steps take another peak in each
        process, or leave so little free that the next process's might not fit.
        """
        for _ in range(_CERTIFYING_RUNS):
            if not self._try(size, limit, _CERTIFYING_STEPS).ran:
                return False
            capacity, peaks = self.seek.limit_bytes or 0, self._peaks(size)
            if self._spread(size) <= _STEADY * capacity and max(peaks, default=0) <= (1 - _STEADY) * capacity:
                break
        return True

    def _peaks(self, size: int) -> list[int]:
        return [one.peak_bytes for one in self.trials if one.size == size and one.peak_bytes is not None]

    def _spread(self, size: int) -> int:
        """Bytes between the least and the largest peak of that size."""
        peaks = self._peaks(size)
        return max(peaks) - min(peaks) if peaks else 0

    def _searched(self, search: Search, limit: int | None) -> Search:
        while (size := search.next_size()) is not None:
            trial = self._try(size, limit)
            search = search.observe(Observation(size, trial.ran, trial.peak_bytes))
            if self.on_trial is not None:
                left = search.trials_left()
                self.on_trial(trial, None if left is None else left + 1)  # the one that certifies
        if search.answer == 0:
            least = search.first_failed
            reasons = [trial.reason for trial in self.trials if trial.size == least and not trial.ran]
            raise RunError(
                f"not even {least} {self.found['unit']} fits under "
                f"{'what the device has' if limit is None else f'{limit:,} bytes'} "
                f"({reasons[-1] if reasons else 'its peak is above that'}): a smaller model, 16-bit weights or "
                "adapters, shorter examples, or more memory"
            )
        return search

    def _try(self, size: int, limit: int | None, steps: int | None = None) -> Trial:
        start = time.monotonic()
        try:
            ending = self.agreement.reached(lambda: self.runner.try_size(size, limit, steps))
        except RunError as error:
            if size == 1 and not self.trials:
                error.add_note(alone("start = 2 (--start 2)"))
            raise
        told = ending.told if ending.end == "ran" else {}
        trial = Trial(
            size,
            ending.end,
            told.get("steps", 0),
            told.get("peak_bytes"),
            told.get("seconds_per_step"),
            time.monotonic() - start,
            limit,
            ending.reason,
        )
        self.trials.append(trial)
        if trial.ran:
            if self.told:
                here = (size, told["elements"])
                check_growth((self.told["size"], self.told["elements"]), here, self.found["unit"])
            self.told = told | {"size": size}
        return trial

    def _certificate(self, whole: Search, size: int) -> Fit:
        last, trace = self.trials[-1], self.found["trace"]
        peak = max(self._peaks(size), default=None)
        ran = [trial for trial in self.trials if trial.ran]
        parts = parts_of_peak(trace, self.told["parts"], ran, size, peak)
        failed = next((one for one in self.trials if one.size == whole.first_failed and not one.ran), None)
        sized = [part for part in parts if part.measured]
        levers = (
            levers_of(trace, size, self.told["parts"].get("states", 0), growth(ran), self.found["unit"])
            if trace
            else ()
        )
        return Fit(
            unit=self.found["unit"],
            size=size,
            without_headroom=whole.answer,
            first_failed=whole.first_failed,
            bound=_BOUNDS[failed.end] if failed else "data",
            steps=last.steps,
            batch=tuple(self.told["batch"]),
            limit_bytes=self.limit,
            headroom=self.headroom,
            device=self.found["device"],
            ranks=self.agreement.ranks or self.ranks,
            in_process=self.in_process,
            peak_bytes=peak,
            seconds_per_step=last.seconds_per_step,
            trials=tuple(self.trials),
            parts=parts,
            limiting=max(sized, key=lambda part: part.measured or 0).name if sized else None,
            largest_layer=largest_layer(trace, size),
            levers=levers,
            environment=self.runner.environment if torch.device(self.found["device"]).type == "cpu" else {},
            notes=self._notes(size, failed),
        )

    def _notes(self, size: int, failed: Trial | None) -> tuple[str, ...]:
        notes = []
        if self._spread(size) > _STEADY * (self.seek.limit_bytes or 0):
            notes.append(
                f"not steady: the peaks of {size} {self.found['unit']} lie {self._spread(size) / 2**20:,.1f} MiB apart "
                "from trial to trial; with little headroom chance decides whether it runs"
            )
        if self.in_process and torch.device(self.found["device"]).type == "cpu":
            notes.append(
                "peaks are of resident memory: what the process had free when `fit` was called is taken first, and "
                "doesn't show in them; the limit counts address space"
            )
        if self.found["trace"] is None:
            notes.append(f"no layers and no levers: {self.found['untraced']}")
        if failed is not None and failed.end == "killed":
            notes.append(
                "the host's memory ended it: fewer loader workers, or a smaller prefetch_factor, leave more of it"
            )
        return tuple(notes)


def _carried(whole: Search, under: int) -> Search:
    """What the search under the whole limit says of a smaller one: sizes whose peak is above it don't fit."""
    fits = [one for one in whole.seen if one.fits and one.peak_bytes is not None and one.peak_bytes <= under]
    fails = [one.size for one in whole.seen if not one.fits or (one.peak_bytes or 0) > under]
    seen = (*fits, *([Observation(min(fails), fits=False)] if fails else []))
    return Search(whole.answer, whole.answer, under, whole.precision, whole.least, seen)
