"""The small-range scan of learning rates: a few factors around the one in use, at equal samples.

A batch that changes moves the best rate by a rule that holds only roughly: SGD's is scanned anew at every change,
AdamW's adjusted a little.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from stoker.batch.scaling import Kind
from stoker.batch.scanning.arms import Arm, tell_apart
from stoker.batch.scanning.course import Course, seeds_of
from stoker.batch.scanning.rate_scan import RateScan, judge
from stoker.batch.telling import OnPart
from stoker.batch.trainings.history import History
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Make, Plan
from stoker.errors import ConfigError

__all__ = ["FACTORS", "scan_rates"]

FACTORS: dict[Kind, tuple[float, ...]] = {
    "sgd": (0.25, 0.5, 1.0, 2.0, 4.0),
    "adam": (0.5, 0.707, 1.0, 1.414, 2.0),
    "adamw": (0.5, 0.707, 1.0, 1.414, 2.0),
    "muon": (0.25, 0.5, 1.0, 2.0, 4.0),
}
"""Of the rate in use, by the optimizer's kind."""
EXTENSIONS = 3
"""Factors that are tried beyond the range, where the best is at its edge."""


def scan_rates(
    make: Make,
    plan: Plan,
    setting: Setting,
    *,
    factors: Sequence[float] | None = None,
    seeds: int | Sequence[int] = 3,
    extensions: int = EXTENSIONS,
    on_part: OnPart | None = None,
) -> RateScan:
    """Trains the setting with its `rate_factor` times each of the factors (None: by the optimizer, `FACTORS`), all for
    the plan's samples: short runs would favour rates that only begin well (Wu et al. 2018).

    The first seed is trained at every factor; where the best is at an edge, up to `extensions` more beyond it. The
    other seeds are trained only beside the best, and at the setting's own rate, until both neighbours of the best have
    been (a race, as Maron and Moore 1994). The setting's own seed is not used. ConfigError for factors that aren't
    positive.
    """
    if factors is not None and (not factors or not all(isfinite(each) and each > 0 for each in factors)):
        raise ConfigError(f"factors = {list(factors)}: positive numbers")
    course = Course(make, plan, seeds_of(seeds), on_part)
    return raced(course, setting, factors, extensions)


def raced(course: Course, setting: Setting, factors: Sequence[float] | None, extensions: int = EXTENSIONS) -> RateScan:
    """`scan_rates` in a course of trainings."""
    race = _Race(course, setting, extensions)
    race.first(1.0, factors)
    tried = sorted({1.0, *(factors or FACTORS[course.equal.target.kind])})
    for number, factor in enumerate(tried):
        race.first(factor, tried[number + 1 :])
    while race.extended(min(race.found, key=race.begun)):
        pass
    race.finish()
    complete = race.complete()
    arms = {factor: race.arm(factor) for factor in sorted(race.found)}
    compared = [arm for factor, arm in arms.items() if factor in complete]
    apart = tell_apart([arm.losses for arm in compared])
    kind, words = judge(tuple(arms.values()), apart, compared, len(course.seeds))
    best = compared[apart.best] if apart else None
    kept = tuple(compared[number].setting.rate_factor for number in apart.kept) if apart else ()
    half_width = apart.half_width if apart else None
    return RateScan(course.equal, tuple(arms.values()), best, half_width, kept, kind, words)


class _Race:
    """Trainings by factor of the setting's rate, seed by seed."""

    def __init__(self, course: Course, setting: Setting, extensions: int) -> None:
        self._course, self._setting, self._extensions = course, setting, extensions
        self.found: dict[float, list[History]] = {}

    def first(self, factor: float, after: Sequence[float] | None = ()) -> None:
        """The first seed, unless it was trained; `after`: factors still to come."""
        if factor not in self.found:
            rest = None if after is None else [each for each in after if each not in (factor, *self.found)]
            self._train(factor, None if rest is None else [self._at(each, self._course.seeds[0]) for each in rest])

    def begun(self, factor: float) -> float:
        """The first seed's loss; infinite where it diverged."""
        return self.arm(factor).losses[0]

    def extended(self, best: float) -> bool:
        """Whether the best is at an edge, and the next factor past it was trained: as often as is allowed."""
        beyond = self._beyond(best) if self._extensions else None
        if beyond is None:
            return False
        self._extensions -= 1
        self.first(beyond)
        return True

    def finish(self) -> None:
        """The other seeds at the setting's own rate, and around the best until its neighbours have them too."""
        best = min(self.found, key=self.begun)
        if not isfinite(self.begun(best)):
            return
        self._complete([1.0, best, *self._beside(best)])
        while True:
            best = min(self.complete(), key=lambda factor: self.arm(factor).standing)
            self.extended(best)
            missing = [each for each in self._beside(best) if each not in self.complete()]
            if not missing:
                return
            self._complete(missing)

    def complete(self) -> list[float]:
        """Factors that were trained with every seed."""
        return [factor for factor, each in self.found.items() if len(each) == len(self._course.seeds)]

    def arm(self, factor: float) -> Arm:
        return Arm(tuple(self.found[factor]))

    def _beyond(self, factor: float) -> float | None:
        """The next one past the edge that this factor is; None: it is no edge."""
        ladder = sorted(self.found)
        if factor == ladder[0]:
            return float(f"{factor * (ladder[0] / ladder[1] if len(ladder) > 1 else 0.5):.4g}")
        if factor == ladder[-1] and isfinite(self.begun(factor)):
            return float(f"{factor * ladder[-1] / ladder[-2]:.4g}")
        return None

    def _beside(self, factor: float) -> list[float]:
        """Neighbours that didn't diverge with the first seed."""
        ladder = sorted(self.found)
        place = ladder.index(factor)
        beside = [*ladder[max(0, place - 1) : place], *ladder[place + 1 : place + 2]]
        return [each for each in beside if isfinite(self.begun(each))]

    def _complete(self, factors: Sequence[float]) -> None:
        wanted = [factor for factor in dict.fromkeys(factors) if isfinite(self.begun(factor))]
        jobs = [(factor, seed) for factor in wanted for seed in self._course.seeds[len(self.found[factor]) :]]
        for number, (factor, _) in enumerate(jobs):
            self._train(factor, [self._at(*each) for each in jobs[number + 1 :]])

    def _train(self, factor: float, after: Sequence[Setting] | None) -> None:
        histories = self.found.setdefault(factor, [])
        setting = self._at(factor, self._course.seeds[len(histories)])
        what = f"{setting.examples_per_update:,} per update, rate x {setting.rate_factor:.4g}"
        histories.append(self._course.train(setting, what, after))

    def _at(self, factor: float, seed: int) -> Setting:
        return replace(self._setting, rate_factor=self._setting.rate_factor * factor, seed=seed)
