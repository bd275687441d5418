"""Where a device's throughput saturates: steps timed at doubling sizes, the knee, what limits it, what would help.

`sweep(target)` runs complete optimizer steps, and leaves a `Target` as it was; what a `Maker` makes is thrown away.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from stoker.batch import curve, judging
from stoker.batch.climb import LONGER, Run, climb, refine
from stoker.batch.counted import Counted, count, limits
from stoker.batch.in_process import unchanged
from stoker.batch.instruments import Instruments, instruments_of
from stoker.batch.loading import LoaderOptions
from stoker.batch.ranges import remarks
from stoker.batch.remedies import At, compiled, larger_batch, loader_remedies
from stoker.batch.swept import DATA_BOUND, DataShare, Point, Remedy, Roofline, Sweep, Verdict
from stoker.batch.target import Maker, Target, Workload
from stoker.batch.telling import OnPart
from stoker.batch.timing import Effort, Loaded, Settled, Timed, settle, time_loader, time_steps
from stoker.errors import ConfigError

__all__ = ["sweep"]

DRIFT = 0.05
"""A device that slowed by more while it was measured is worth a warning."""
DIFFER = 0.05
"""Points of a step's share between waiting for data and a rerun without the loader that are worth a warning."""
PEAK_SECONDS = 0.3
"""For each size of product, and for the copy, that the device's limits are measured by."""


def sweep(
    target: Workload | Maker | str,
    sizes: Sequence[int] | None = None,
    *,
    present: int | None = None,
    largest: int | None = None,
    loader: LoaderOptions | None = None,
    remedies: bool = True,
    compile_model: bool | None = None,
    roofline: bool = True,
    scenario: str | None = None,
    effort: Effort | None = None,
    instruments: Instruments | None = None,
    on_part: OnPart | None = None,
) -> Sweep:
    """Measures, fits and judges; see `Sweep`.

    `target`: one, or where to find a function that makes one (`file.py:function`). `sizes`: in the target's unit,
    ascending; None: 1, 2, 4, ... until memory ends, `largest` or the target's `most` is reached, or three doublings
    gained nothing. `present`: the size in use. `loader`: the options in use, for a target that shows its loader.
    `compile_model`: try torch.compile (it can take minutes); None: where steps are launch-bound. `roofline`: also
    measure the device's peak and bandwidth. `scenario`: one of `ranges.SCENARIOS`. `on_part`: told of
    each size that was timed (most are several times) and each remedy that was tried.
    Errors of the target that aren't a lack of memory pass through; ConfigError where not even the smallest size runs.
    """
    if scenario is not None:
        list(remarks(scenario))  # an unknown one is an error before anything is measured
    workload = Maker(target)() if isinstance(target, str) else target() if isinstance(target, Maker) else target
    options = loader or LoaderOptions()
    run = Run(workload, instruments or instruments_of(workload.device), effort or Effort(), on_part=on_part)
    with unchanged(target) if isinstance(target, Target) else nullcontext():
        ended, stopped, settled = _measure(run, sizes, present, largest)
        found = _study(run, present, options, roofline)
        verdict = found.verdict(ended, workload.unit)
        try_compile = verdict.kind == "launch-bound" if compile_model is None else compile_model
        tried = tuple(_told(run, _remedies(run, found, present, options, try_compile))) if remedies else ()
    return Sweep(
        unit=workload.unit,
        device=str(workload.device),
        points=found.points,
        fit=found.line,
        gains=found.gains,
        knee=found.knee,
        launch_bound_to=found.nearly_free,
        recommended=found.recommended,
        operating=judging.operating(found.recommended, found.points, run.instruments.capacity),
        memory_allows=found.allows,
        capacity_bytes=run.instruments.capacity,
        present=present,
        studied=found.shown.size,
        stopped=stopped,
        drift=settled.drift,
        steady=settled.steady,
        roofline=found.roofline,
        loading=options if found.data else None,
        remedies=tried,
        accounts=judging.accounts(found.points, found.line, found.shown, workload.unit),
        verdict=verdict,
        warnings=tuple(_warnings(run, settled, found, present, scenario)),
    )


def _measure(
    run: Run, sizes: Sequence[int] | None, present: int | None, largest: int | None
) -> tuple[judging.Ended, str, Settled]:
    """Times every size; why no larger one was tried, and how steady the device was."""
    most = min((each for each in (largest, run.target.most, max(sizes) if sizes else None) if each), default=None)
    ended, stopped = climb(run, list(_ladder(sizes, present, most)), bounded=most is not None)
    if len(run.timed) < 2:
        raise ConfigError(
            f"sweep: only {len(run.timed)} size ran ({stopped}); a curve needs two. Allow larger sizes, or free memory"
        )
    run.timed, settled = settle(run.timed, run.times, run.effort)
    run.ladder = tuple(run.timed)
    refine(run)
    return ended, stopped, settled


def _ladder(sizes: Sequence[int] | None, present: int | None, most: int | None) -> Iterator[int]:
    """Sizes to try, ascending: those given, or doublings and the end of what is allowed; and the present one."""
    if sizes is not None:
        chosen = {size for size in sizes if most is None or size <= most}
    else:
        chosen = {2**power for power in range(63) if most is None or 2**power <= most} | ({most} if most else set())
    if present is not None:
        chosen.add(present)
    if min(chosen, default=0) < 1:
        raise ConfigError(f"sweep: sizes must be 1 or more, and at most {most}; got {list(sizes or [])}")
    yield from sorted(chosen)


@dataclass(frozen=True)
class _Studied:
    """What the measured times say, with the loader and the device's limits beside them."""

    line: curve.Fit
    gains: tuple[curve.Gain, ...]
    knee: curve.Knee
    nearly_free: float | None
    allows: int | None
    recommended: int | None
    points: tuple[Point, ...]
    shown: Point
    """Of the studied size."""
    data: Mapping[int, tuple[Loaded, Timed]]
    roofline: Roofline | None

    def verdict(self, ended: judging.Ended, unit: str) -> Verdict:
        return judging.judge(self.points, self.line, self.knee, self.nearly_free, ended, self.shown, unit)


def _study(run: Run, present: int | None, options: LoaderOptions, roofline: bool) -> _Studied:
    line, gains, knee = run.fitted()
    peaks = [run.timed[size].peak_bytes for size in run.ladder]  # those beside the knee came after larger ones
    allows = judging.memory_allows(run.ladder, peaks, run.instruments.capacity)
    recommended = judging.recommend(line, knee, run.seconds, allows)
    studied = next(size for size in (present, recommended, max(run.timed)) if size in run.timed)
    data = _loaded(run, options, studied)
    counted = {size: count(run.step(size)) for size in run.seconds} if isinstance(run.target, Target) else {}
    limit = _limits(run, counted) if roofline else None
    shown = judging.own_peaks({size: run.timed[size].peak_bytes for size in run.seconds})
    points = tuple(
        _point(run.timed[size], shown[size], line, knee, data.get(size), counted.get(size), limit)
        for size in run.seconds
    )
    return _Studied(
        line,
        gains,
        knee,
        curve.launch_bound_to(list(run.seconds), list(run.seconds.values())),
        allows,
        recommended,
        points,
        next(point for point in points if point.size == studied),
        data,
        limit,
    )


def _loaded(run: Run, options: LoaderOptions, studied: int) -> dict[int, tuple[Loaded, Timed]]:
    """By size: steps with the loader, and right after it the same on one batch held ready; the studied size longer."""
    target: Any = run.target
    if getattr(target, "load", None) is None:
        return {}
    found = {}
    weights = {size: LONGER if size == studied else 1 for size in run.seconds}
    start = run.instruments.clock()
    for size, weight in weights.items():
        effort = replace(run.effort, seconds=run.effort.seconds * weight)
        loaded = time_loader(target, size, options, run.instruments, effort)
        each_alone = replace(run.effort, round_steps=1)
        found[size] = loaded, time_steps(run.step(size), size, run.instruments, each_alone)
        done = sum(weights[each] for each in found)
        left = (run.instruments.clock() - start) * (sum(weights.values()) / done - 1)
        run.told(f"{size:,} with the loader: {loaded.share:.0%} of a step waits", left)
    return found


def _limits(run: Run, counted: Mapping[int, Counted]) -> Roofline | None:
    """The device's, in the dtype that most products of the largest step have; None where no step was counted."""
    if not counted:
        return None
    dtype = counted[max(counted)].dtype
    found = limits(run.target.device, dtype, min(PEAK_SECONDS, run.effort.seconds))
    return Roofline(str(dtype).removeprefix("torch."), found.flops, found.bandwidth, found.ridge)


def _point(
    timed: Timed,
    peak_bytes: int | None,
    line: curve.Fit,
    knee: curve.Knee,
    data: tuple[Loaded, Timed] | None,
    counted: Counted | None,
    limit: Roofline | None,
) -> Point:
    size, seconds = timed.size, timed.median
    return Point(
        size=size,
        seconds=seconds,
        quartiles=timed.quartiles,
        rate=size / seconds,
        gain=line.gain(size),
        zone=judging.zone_at(size, line, knee),
        peak_bytes=peak_bytes,
        data=_share(*data) if data else None,
        flops=counted.flops if counted else None,
        moved_bytes=counted.moved if counted else None,
        share_of_peak=counted.flops / seconds / limit.flops if counted and limit else None,
        share_of_bandwidth=counted.moved / seconds / limit.bandwidth if counted and limit else None,
        utilisation=timed.utilisation,
    )


def _share(loaded: Loaded, held: Timed) -> DataShare:
    return DataShare(loaded.seconds, loaded.share, 1 - held.median / loaded.seconds, loaded.steps_per_epoch)


def _remedies(
    run: Run, found: _Studied, present: int | None, options: LoaderOptions, try_compile: bool
) -> Iterator[Remedy]:
    studied, target = found.shown.size, run.target
    if studied in found.data:
        loaded, held = found.data[studied]
        loading: Any = target
        yield from loader_remedies(At(loading, studied, run.instruments, run.effort, held), options, loaded)
    if present is not None and found.recommended is not None and found.recommended > present:
        yield larger_batch(present, found.recommended, run.seconds)
    if try_compile and isinstance(target, Target):
        batch = target.make_batch(studied)
        yield compiled(target, studied, batch, run.seconds[studied], found.line, run.instruments, run.effort)


def _told(run: Run, remedies: Iterable[Remedy]) -> Iterator[Remedy]:
    for remedy in remedies:
        if remedy.measured is not None:
            run.told(f"{remedy.name}, {remedy.change}: {remedy.measured:+.0%}", None)
        yield remedy


def _warnings(run: Run, settled: Settled, found: _Studied, present: int | None, scenario: str | None) -> Iterator[str]:
    if present is not None and present not in run.timed:
        yield f"the present size, {present:,}, was not reached; what is said of a size is of {found.shown.size:,}"
    if abs(settled.drift) > DRIFT:
        yield (
            f"steps became {abs(settled.drift):.0%} {'longer' if settled.drift > 0 else 'shorter'} while the device "
            "was measured (heat, or other programs); the figures are of its later, steady state"
        )
    if not settled.steady:
        yield (
            f"the device never settled: after {run.effort.passes} passes step times still changed by more than "
            "3 % from one to the next; measure on a quieter machine"
        )
    if found.knee.size is not None and found.allows is not None and found.knee.size > found.allows:
        yield f"the knee lies beyond the {found.allows:,} {run.target.unit} that memory allows with headroom"
    for size in run.quantised():
        over = run.seconds[size] / found.line.seconds(size) - 1
        yield f"{size:,} {run.target.unit} take {over:.0%} longer than sizes beside it suggest: it fills tiles badly"
    data = found.shown.data
    if data is not None and abs(data.slowed) > DIFFER and data.by_rerun > DATA_BOUND:
        yield (
            f"waiting is {data.waited:.0%} of a step with the loader, but without the loader steps are "
            f"{data.by_rerun:.0%} shorter: its workers take the processor from the training"
        )
    if scenario is not None:
        yield from remarks(scenario, per_device=found.shown.size)
