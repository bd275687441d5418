"""Trains settings one after the other, tells how long the rest takes, and watches what seeds change."""

import time
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from torch import Tensor

from stoker.batch.rates import FOLLOWING, kind_of
from stoker.batch.scanning.described import Described, Equal
from stoker.batch.target import Target
from stoker.batch.telling import OnPart
from stoker.batch.trainings.first_weights import FirstWeights
from stoker.batch.trainings.history import History
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Make, Plan, check, targeted, train_anew
from stoker.errors import ConfigError

__all__ = ["Course", "seeds_of"]

SHOWN = (*FOLLOWING, "momentum", "nesterov", "dampening", "amsgrad")
"""Settings of an optimizer that change what it learns, by torch's names."""


def seeds_of(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """So many from 0 on, or those given. ConfigError where there is none, or one twice."""
    found = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"seeds = {seeds}: at least one, each once; three or more let trainings be told apart")
    return found


class Course:
    """Trainings of one target, all by one plan."""

    def __init__(
        self,
        make: Make,
        plan: Plan,
        seeds: tuple[int, ...],
        on_part: OnPart | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """ConfigError for a plan without evaluations, by which trainings are compared."""
        if not plan.evaluations:
            raise ConfigError("evaluations = 0: trainings are compared by their held-out loss, so at least 1")
        self._make, self._plan, self._on_part, self._clock = make, plan, on_part, clock
        self.seeds = seeds
        self._took: dict[tuple[int, int], list[float]] = {}
        self._first = FirstWeights()
        self._described: Described | None = None

    @property
    def equal(self) -> Equal:
        """What all trainings had in common, once one has run."""
        assert self._described is not None
        return Equal(self._described, self._plan.samples, self._plan.evaluations, self.seeds, self._plan.loader)

    @property
    def same_first_weights(self) -> bool:
        """Several seeds began with the same weights."""
        return self._first.same

    def train(self, setting: Setting, what: str, after: Sequence[Setting] | None = ()) -> History:
        """One training; `after`: those still to come, for the time that is left; None: not known yet."""
        start = self._clock()
        history = train_anew(lambda: self._made(setting.seed), setting, self._plan)
        if not history.diverged:  # which ends early and tells nothing of the others' time
            self._took.setdefault(_work(setting), []).append(self._clock() - start)
        if self._on_part is not None:
            end = history.ended or f"held-out loss {history.final_loss:.4g}"
            self._on_part(f"{what}, seed {setting.seed}: {end}", self._left(after))
        return history

    def _left(self, after: Sequence[Setting] | None) -> float | None:
        """Seconds of the trainings to come: as long as others of their sizes took, or as all did on average."""
        if not after:
            return None if after is None else 0.0
        if not self._took:
            return None
        typical = fmean(fmean(times) for times in self._took.values())
        return sum(fmean(self._took.get(_work(each), [typical])) for each in after)

    def _made(self, seed: int) -> Target:
        made = self._first.noted(seed, targeted(self._make))
        check(made, self._plan)
        self._described = self._described or _describe(made, self._plan)
        return made


def _work(setting: Setting) -> tuple[int, int]:
    return setting.examples_per_update, setting.microbatch


def _describe(target: Target, plan: Plan) -> Described:
    group: dict[str, Any] = target.optimizer.param_groups[0]
    return Described(
        unit=target.unit,
        device=str(target.device),
        parameters=sum(weight.numel() for weight in target.weights() if weight.requires_grad),
        optimizer=type(target.optimizer).__name__,
        kind=plan.kind or kind_of(target.optimizer),
        settings={name: _value(group[name]) for name in SHOWN if name in group},
    )


def _value(value: Any) -> Any:
    """Numbers out of tensors, which captured steps keep their settings in."""
    if isinstance(value, tuple | list):
        return tuple(map(_value, value))
    return value.item() if isinstance(value, Tensor) else value
