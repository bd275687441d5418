"""Batch sizes side by side: equal samples, the same seeds, the same order of the data."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from stoker.batch.curve import Fit
from stoker.batch.scanning.arms import Arm, tell_apart
from stoker.batch.scanning.course import Course, seeds_of
from stoker.batch.scanning.deciding import conclude, wants_rates
from stoker.batch.scanning.efficiency import efficiency
from stoker.batch.scanning.rates import raced
from stoker.batch.scanning.scanned import Scan
from stoker.batch.scope import largest_divisor
from stoker.batch.telling import OnPart
from stoker.batch.trainings.history import History
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Make, Plan
from stoker.errors import ConfigError

__all__ = ["microbatch", "scan"]


def scan(
    make: Make,
    sizes: Sequence[int],
    plan: Plan,
    present: Setting,
    *,
    seeds: int | Sequence[int] = 3,
    fits: int | None = None,
    throughput: Fit | None = None,
    factors: Sequence[float] | None = None,
    on_part: OnPart | None = None,
) -> Scan:
    """Trains at each of the `sizes` (examples per update, two or more) with each of the seeds, and decides; see `Scan`.

    make: gives a target with `load` and `validate`, anew for each training.
    plan: samples, evaluations (of held-out data, at equal samples; 1 or more), loader: equal for all.
    present: the training as it is now. The target's learning rate is right for its `base_examples` (None: for its
        `examples_per_update`) and follows by its `rule`; warm-up, decay, clipping and rate factor are every arm's. Its
        own seed isn't used.
    seeds: how many, from 0 on, or which. Each is the first weights and the order of the data; one tells nothing apart.
    fits: the largest micro-batch that fits in memory (`stoker.batch.fit`); a larger update accumulates the largest
        divisor of it that does. None: the present micro-batch, if it has one, or each update at once.
    throughput: `sweep(...).fit`, measured on a quiet device. None: the time that updates took in these trainings.
    factors: of the learning rate, where it is scanned (as `scan_rates`): at the batch that throughput wants, if the
        losses don't keep it.
    on_part: told of each training that ended and about how many seconds the rest takes (a scan of rates, if one
        follows, tells its own).

    ConfigError for sizes or seeds that can't be, or a target that can't be trained so.
    """
    ordered = sorted(set(sizes))
    if len(ordered) < 2:
        raise ConfigError(f"sizes = {list(sizes)}: a scan compares two or more, as 16, 32, 64, 128")
    base = present.base_examples or present.examples_per_update
    fits = present.examples_per_microbatch if fits is None else fits
    settings = [
        replace(present, examples_per_update=size, base_examples=base, examples_per_microbatch=microbatch(size, fits))
        for size in ordered
    ]
    if plan.samples < ordered[-1]:
        raise ConfigError(f"samples = {plan.samples:,}: fewer than one update of {ordered[-1]:,}")
    course = Course(make, plan, seeds_of(seeds), on_part)
    found, is_one = _trained(course, settings)
    arms = tuple(Arm(tuple(histories)) for histories in found)
    apart = tell_apart([arm.losses for arm in arms])
    efficient = efficiency(arms, throughput)
    wanted = wants_rates(arms, apart, efficient)
    rates = None if wanted is None else raced(course, wanted.setting, factors)
    told = apart is not None and apart.half_width is not None
    return Scan(
        equal=course.equal,
        arms=arms,
        apart=apart,
        efficiency=efficient,
        quality=tuple(ordered[number] for number in apart.kept) if apart is not None and told else (),
        rates=rates,
        conclusion=conclude(arms, apart, efficient, rates, course.equal.target.unit),
        warnings=tuple(_warnings(course, arms, apart.half_width if apart else None, is_one)),
    )


def microbatch(size: int, fits: int | None) -> int | None:
    """The largest micro-batch that fits and divides the update; None: the update itself fits."""
    if fits is not None and fits < 1:
        raise ConfigError(f"fits = {fits}: the largest micro-batch that fits in memory, at least 1")
    if fits is None or fits >= size:
        return None
    return largest_divisor(size, fits)


def _trained(course: Course, settings: Sequence[Setting]) -> tuple[list[list[History]], bool]:
    """Of each setting, one a seed; and whether a second seed gave the same training, so that one is all there is.

    All sizes with one seed first, so that soon the time of each is known.
    """
    jobs = [(place, replace(each, seed=seed)) for seed in course.seeds for place, each in enumerate(settings)]
    found: list[list[History]] = [[] for _ in settings]
    for number, (place, setting) in enumerate(jobs):
        what = f"{setting.examples_per_update:,} per update"
        history = course.train(setting, what, [each for _, each in jobs[number + 1 :]])
        if found[place] and history.loss == found[place][0].loss:
            course.seeds = course.seeds[:1]
            return [each[:1] for each in found], True
        found[place].append(history)
    return found, False


def _warnings(course: Course, arms: Sequence[Arm], half_width: float | None, is_one: bool) -> Iterator[str]:
    if is_one:
        yield (
            "another seed gave the same training to the bit, so the seeds are one: the function that makes the target, "
            "or its `load`, seeds itself; take that out, as each training is seeded"
        )
    elif course.same_first_weights:
        yield (
            "every seed begins with the same first weights, so the spread is that of the data's order alone: right for "
            "weights that are loaded, but otherwise the function that makes the target seeds itself: take that out"
        )
    early = [arm for arm in arms if half_width is not None and _rose(arm) > half_width]
    if early:
        sizes = ", ".join(f"{arm.setting.examples_per_update:,}" for arm in early)
        yield (
            f"at {sizes} the held-out loss was lowest before the end and rose again (overfitting, or a learning rate "
            "that is too high): compare at fewer samples, regularise, or lower the rate"
        )


def _rose(arm: Arm) -> float:
    """By how much the mean held-out loss ends above its lowest, where each seed ends above where any was then."""
    moments = arm.moments()
    lowest = min(moments, key=lambda each: each.mean, default=None)
    return moments[-1].mean - lowest.mean if lowest is not None and lowest.high < moments[-1].low else 0.0
