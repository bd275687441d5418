"""The table of the run file that lets prompts per step change while a run goes on."""

from typing import Literal

from stoker.config.base import BelowOne, NonNegativeInt, Positive, PositiveInt, Section

__all__ = ["Schedule"]

Kind = Literal["fixed", "stages", "ramp", "plateau", "noise"]
NEEDED: dict[str, tuple[str, ...]] = {
    "fixed": (),
    "stages": ("prompts", "starts"),
    "ramp": ("last", "over"),
    "plateau": ("last",),
    "noise": ("last",),
}
OPTIONAL: dict[str, tuple[str, ...]] = {
    "fixed": (),
    "stages": ("by", "rule"),
    "ramp": ("by", "multiple", "rule"),
    "plateau": ("multiple", "rule", "patience", "threshold"),
    "noise": ("multiple", "rule", "times", "wait_steps"),
}


class Schedule(Section):
    """Prompts per step that change while the run goes on. It begins with sampling.prompts_per_step, for which the
    learning rates are right; they follow the samples per update by `rule`.
    """

    kind: Kind = "fixed"
    """stages: `prompts` from `starts` on. ramp: evenly to `last`, reached after `over`. plateau: doubled (or halved)
    towards `last` each time the held-out reward no longer rises. noise: as the measured noise scale asks, between the
    beginning and `last`, by at most a factor of two at once."""
    by: Literal["step", "samples"] = "step"
    """What `starts` and `over` count: steps done, or samples (answers) trained on."""
    prompts: tuple[PositiveInt, ...] = ()
    """stages: prompts per step, from each of `starts` on."""
    starts: tuple[PositiveInt, ...] = ()
    """stages: where each of `prompts` begins, one later than the other."""
    last: NonNegativeInt = 0
    """ramp, plateau: the prompts per step that it ends with. noise: the most, or the fewest, that it may come to."""
    over: NonNegativeInt = 0
    """ramp: where `last` is reached."""
    multiple: PositiveInt = 1
    """ramp, plateau, noise: prompts per step are a multiple of it."""
    patience: PositiveInt = 3
    """plateau: evaluations in a row without a higher reward."""
    threshold: BelowOne = 0.01
    """plateau: a reward counts as higher from this share above the best one on."""
    times: Positive = 1.0
    """noise: prompts per step for a noise scale of one prompt."""
    wait_steps: PositiveInt = 20
    """noise: steps that a size lasts at least."""
    rule: Literal["default", "linear", "sqrt", "keep"] = "default"
    """Factor of the learning rates where an update has k times the samples: k, its root, or 1. default: the
    optimizer's, sqrt for adamw and adafactor, linear for sgd."""

    @property
    def decides(self) -> bool:
        """What the run shows decides, so that its samples aren't known before."""
        return self.kind in ("plateau", "noise")

    def most(self, first: int) -> int:
        """Prompts of the largest step that there may be; `first`: of the first one."""
        return max(self._sizes(first))

    def _sizes(self, first: int) -> tuple[int, ...]:
        """Prompts per step that are sure to come, or that bound what comes."""
        return (first, *self.prompts, *[self.last] * (self.last > 0))

    def conflict(self, first: int, samples_per_prompt: int, samples_per_update: int) -> str | None:
        """What is missing, too much or impossible, and the way out."""
        return self._keys() or self._numbers(first) or self._whole(first, samples_per_prompt, samples_per_update)

    def undecided(self, decay: str, evaluates: bool, measures: bool) -> str | None:
        """What a schedule that is decided on the way can't go with, and the way out."""
        if not self.decides:
            return None
        if decay != "constant":
            return (
                f"optimizer.decay = '{decay}' ends with the run's last sample, which isn't known where "
                f"schedule.kind = '{self.kind}' decides how many there are: use 'constant'"
            )
        if self.kind == "noise" and not measures:
            return (
                "schedule.kind = 'noise' goes by the noise scale of updates of whole steps: set "
                "record.noise_every_steps to 1 or more, and update.samples_per_update = 0"
            )
        if self.kind == "plateau" and not evaluates:
            return (
                f"schedule.kind = '{self.kind}' goes by the held-out reward: set validation.holdout (or sets), and "
                "validation.every_samples"
            )
        return None

    def _keys(self) -> str | None:
        needed = NEEDED[self.kind]
        plain = Schedule.model_construct()
        given = [key for key in type(self).model_fields if key != "kind" and getattr(self, key) != getattr(plain, key)]
        if missing := [key for key in needed if key not in given]:
            return f"schedule.kind = '{self.kind}' needs {' and '.join(f'schedule.{key}' for key in missing)}"
        if odd := [key for key in given if key not in (*needed, *OPTIONAL[self.kind])]:
            takes = ", ".join((*needed, *OPTIONAL[self.kind])) or "no other key"
            return (
                f"schedule.{odd[0]} does nothing with schedule.kind = '{self.kind}', which takes {takes}: leave it out"
            )
        return None

    def _numbers(self, first: int) -> str | None:
        if len(self.prompts) != len(self.starts):
            return f"schedule.prompts has {len(self.prompts)} entries, schedule.starts {len(self.starts)}: one for each"
        if list(self.starts) != sorted(set(self.starts)):
            return f"schedule.starts = {list(self.starts)}: each must be later than the one before"
        if odd := [size for size in (first, self.last) if size % self.multiple]:
            return f"schedule.multiple = {self.multiple} does not divide the {odd[0]} prompts per step at one end"
        if "last" in NEEDED[self.kind] and self.last == first:
            return f"schedule.last = {self.last} is sampling.prompts_per_step, so nothing changes: give another"
        return None

    def _whole(self, first: int, samples_per_prompt: int, samples_per_update: int) -> str | None:
        if not samples_per_update:
            return None
        between = (self.multiple,) if "last" in NEEDED[self.kind] else ()
        for prompts in (*self._sizes(first), *between):
            if prompts * samples_per_prompt % samples_per_update:
                what = "schedule.multiple" if prompts in between else "steps"
                return (
                    f"update.samples_per_update = {samples_per_update} does not divide the "
                    f"{prompts * samples_per_prompt} samples of {what} of {prompts} prompts: choose schedule's numbers "
                    "so that it does, or update.samples_per_update = 0"
                )
        return None
