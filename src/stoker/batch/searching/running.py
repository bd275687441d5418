"""Runs a search: one training after the other, each at the setting that the ones before it speak for."""

import math
import time
from pathlib import Path
from typing import Any

from stoker.batch.searching.searched import End, Searched
from stoker.batch.searching.space import Space, around
from stoker.batch.searching.study import Asked, Study, opened
from stoker.batch.target import Maker
from stoker.batch.telling import OnPart
from stoker.batch.trainings.first_weights import FirstWeights
from stoker.batch.trainings.history import History
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Make, Plan, targeted, train_anew
from stoker.config.secrets import redact
from stoker.errors import ConfigError

__all__ = ["search"]


def search(
    make: Make,
    present: Setting,
    plan: Plan,
    space: Space | None = None,
    *,
    trials: int = 30,
    storage: str | Path = "study.db",
    on_part: OnPart | None = None,
) -> Searched:
    """The batch and learning rate (and warm-up, if the space has it) with the lowest held-out loss at equal samples.

    `present`: what the target is trained with today. It is the first trial; the others differ from it in what the
    `space` holds, and share its seed, so that all see the same examples in the same order. `trials`: how many there
    are to be in the end, those of earlier calls with the same `storage` counted.

    Choices come from a tree-structured Parzen estimator (Bergstra et al. 2011) over all parameters at once. A training
    whose held-out losses so far are all worse than the median of the complete trainings' at as many samples is ended
    (Golovin et al. 2017), from a quarter of the samples on and once five are complete. Hyperband would need ten trials
    in each of its brackets before the estimator decides anything.

    The file is SQLite, made by Optuna: a call after this process was killed goes on with the trials that are done, and
    chooses as if it never had been. ConfigError where the file's trials were made with other settings, by name, and
    where Optuna is missing; an error in a training ends the search, whose trials stay.
    """
    space = space or Space(around(present.examples_per_update))
    space.check(present)
    if trials < 1 or plan.evaluations < 1:
        raise ConfigError(f"trials = {trials}, evaluations = {plan.evaluations}: each at least 1")
    asked, first = _asked(make, present, plan, space), FirstWeights()
    with opened(Path(storage), space, present.seed, asked) as study:
        resumed, start = study.done(), time.perf_counter()
        for done in range(resumed, trials):
            _trial(study, lambda: first.noted(present.seed, targeted(make)), present, plan, space)
            if on_part is not None:
                each = (time.perf_counter() - start) / (done + 1 - resumed)
                on_part(f"trial {done + 1} of {trials}", each * (trials - done - 1))
        found, importance, unit = study.trials(present), study.importance(), study.unit()
    return Searched(unit, plan.samples, plan.evaluations, present, space, found, importance, resumed, str(storage))


def _trial(study: Study, make: Make, present: Setting, plan: Plan, space: Space) -> None:
    asked = study.ask(present)
    try:
        history = train_anew(make, space.setting(asked.chosen, present), plan, stop=_stop(asked, plan))
        asked.tell(_end(history), history)
    except BaseException:
        asked.fail()
        raise


def _stop(asked: Asked, plan: Plan) -> Any:
    def stop(history: History) -> bool:
        loss, due = history.evaluations[-1].loss, plan.due(history.samples[-1])
        if not math.isfinite(loss):
            return True
        return asked.report(loss, due) and due < plan.evaluations

    return stop


def _end(history: History) -> End:
    if not math.isfinite(history.final_loss):
        return "diverged"
    return "pruned" if history.ended else "complete"


def _asked(make: Make, present: Setting, plan: Plan, space: Space) -> dict[str, Any]:
    """All that a trial's loss hangs on, for the file."""
    if isinstance(make, str | Maker):
        maker = Maker(make) if isinstance(make, str) else make
        target = " ".join((redact(maker.path), *map(redact, maker.arguments)))
    else:
        target = f"{getattr(make, '__module__', '')}.{getattr(make, '__qualname__', type(make).__qualname__)}"
    return {
        "target": target,
        "present": present.to_json(),
        "samples": plan.samples,
        "evaluations": plan.evaluations,
        "kind": plan.kind,
        "space": space.to_json(),
    }
