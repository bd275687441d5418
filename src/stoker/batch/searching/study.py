"""A search's file: an Optuna study in SQLite, one process at a time, that knows what it was made with.

Optuna keeps numbers, their ranges and JSON in it; nothing is pickled.
"""

import fcntl
import json
import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from stoker.batch.searching.searched import End, Trial
from stoker.batch.searching.space import Parameters, Space
from stoker.batch.trainings.history import History
from stoker.batch.trainings.setting import Setting
from stoker.errors import ConfigError, RunError

__all__ = ["Study", "opened"]

NAME = "stoker"
ASKED, MADE = "asked", "made"
"""Attributes of the study (what it was made with) and of a trial (what came of it)."""
RANDOM_TRIALS = 8
"""Drawn evenly before the model of good settings decides."""
UNPRUNED_TRIALS = 5
"""Complete trainings before any is held against their median."""
LEAST_FOR_IMPORTANCE = 10
"""Complete trials."""


class Study:
    """Ask, report, tell. The next choice is a function of the seed and of the trials that are done, so that a search
    that was killed goes on as if it never had been.
    """

    def __init__(self, optuna: ModuleType, study: Any, space: Space, seed: int) -> None:
        self._optuna, self._study, self._space, self._seed = optuna, study, space, seed

    def done(self) -> int:
        """Trials whose training ended by itself or was pruned."""
        return len(self._ended())

    def ask(self, present: Setting) -> "Asked":
        """The next trial; the present setting is the first one, where the space holds it."""
        done = self.done()
        mixed = int(np.random.SeedSequence((self._seed, done)).generate_state(1)[0])
        self._study.sampler = self._optuna.samplers.TPESampler(
            seed=mixed, multivariate=True, n_startup_trials=RANDOM_TRIALS
        )
        own = self._space.own(present)
        if not done and own is not None:
            self._study.enqueue_trial(own)
        return Asked(self._optuna, self._study, self._study.ask(self._distributions()))

    def trials(self, present: Setting) -> tuple[Trial, ...]:
        """Those that are done."""
        return tuple(_read(trial, self._space.setting(trial.params, present)) for trial in self._ended())

    def unit(self) -> str:
        """Of the target, as the trials told."""
        found: str = self._ended()[0].user_attrs[MADE]["unit"]
        return found

    def importance(self) -> dict[str, float]:
        """Of each parameter, the largest first; empty where there are too few complete trials, or one parameter."""
        complete = [t for t in self._ended() if t.state == self._optuna.trial.TrialState.COMPLETE]
        if len(complete) < LEAST_FOR_IMPORTANCE or len(complete[0].params) < 2:
            return {}
        evaluator = self._optuna.importance.PedAnovaImportanceEvaluator()
        found = self._optuna.importance.get_param_importances(self._study, evaluator=evaluator)
        return {str(name): float(share) for name, share in found.items() if math.isfinite(share)}

    def bury(self) -> None:
        """Trials whose process was killed count as failed; their choice comes up again."""
        states = self._optuna.trial.TrialState
        for trial in self._study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            self._study.tell(trial.number, state=states.FAIL)

    def _ended(self) -> list[Any]:
        states = self._optuna.trial.TrialState
        found: list[Any] = self._study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
        return found

    def _distributions(self) -> dict[str, Any]:
        make, space = self._optuna.distributions, self._space
        made = {
            "batch": make.IntDistribution(0, len(space.examples_per_update) - 1),
            "rate_factor": make.FloatDistribution(*space.rate_factor, log=True),
        }
        if space.warmup_samples is not None:
            made["warmup_samples"] = make.IntDistribution(*space.warmup_samples)
        return made


class Asked:
    """A trial under way."""

    def __init__(self, optuna: ModuleType, study: Any, trial: Any) -> None:
        self._optuna, self._study, self._trial = optuna, study, trial

    @property
    def chosen(self) -> Parameters:
        found: Parameters = self._trial.params
        return found

    def report(self, loss: float, due: int) -> bool:
        """One evaluation's; whether the training should end here."""
        self._trial.report(loss, due)
        return bool(self._trial.should_prune())

    def tell(self, end: End, history: History) -> None:
        """What the training came to. One that diverged has no loss, and is told as pruned, which teaches the search to
        keep away; as failed it would teach nothing.
        """
        states = self._optuna.trial.TrialState
        made = {"end": end, "samples": history.samples[-1], "seconds": sum(history.seconds), "unit": history.unit}
        self._trial.set_user_attr(MADE, made)
        if end == "complete":
            self._study.tell(self._trial, history.final_loss)
        else:
            self._study.tell(self._trial, state=states.PRUNED)

    def fail(self) -> None:
        """The training came to nothing (an error, an interruption)."""
        self._study.tell(self._trial, state=self._optuna.trial.TrialState.FAIL)


@contextmanager
def opened(path: Path, space: Space, seed: int, asked: Mapping[str, Any]) -> Iterator[Study]:
    """The study of that file, made where there is none.

    `asked`: all that its trials hang on, in plain types. ConfigError where the file's study was made with anything
    else, naming it, where the file is no study, and without Optuna; RunError where another process is at it.
    """
    optuna = _optuna()
    if "?" in str(path):
        raise ConfigError(f"storage = '{path}': a file name without '?'")
    if not path.parent.is_dir():
        raise ConfigError(f"storage = '{path}': there is no folder {path.parent}")
    with _alone(path), _quiet(optuna):
        storage = _storage(optuna, path)
        try:
            yield _load(optuna, storage, path, space, seed, json.loads(json.dumps(asked)))
        finally:
            storage.remove_session()
            storage.engine.dispose()


def _load(optuna: ModuleType, storage: Any, path: Path, space: Space, seed: int, asked: Mapping[str, Any]) -> Study:
    median = optuna.pruners.MedianPruner(
        n_startup_trials=UNPRUNED_TRIALS, n_warmup_steps=math.ceil(asked["evaluations"] / 4)
    )
    found = optuna.create_study(
        storage=storage, study_name=NAME, direction="minimize", pruner=median, load_if_exists=True
    )
    before = found.user_attrs.get(ASKED)
    if before is None and found.get_trials(deepcopy=False):
        raise ConfigError(f"{path} holds a study that wasn't made here: give another file")
    study = Study(optuna, found, space, seed)
    if before != asked and not study.done():  # the first training came to nothing, perhaps by these very settings
        found.set_user_attr(ASKED, asked)
    elif before != asked:
        raise ConfigError(
            f"the study in {path} was made with other settings, and its trials can't be compared with new ones: "
            f"{'; '.join(_differences(before, asked))}. Ask for the same, or give another file"
        )
    study.bury()
    return study


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], under: str = "") -> Iterator[str]:
    for name in sorted({*before, *now}):
        was, is_now = before.get(name), now.get(name)
        if isinstance(was, dict) and isinstance(is_now, dict):
            yield from _differences(was, is_now, f"{under}{name}.")
        elif was != is_now:
            yield f"{under}{name} was {was}, is {is_now}"


def _read(trial: Any, setting: Setting) -> Trial:
    made = trial.user_attrs[MADE]
    losses = tuple((due, loss) for due, loss in sorted(trial.intermediate_values.items()) if math.isfinite(loss))
    last = trial.value if made["end"] == "complete" else (losses[-1][1] if losses else None)
    return Trial(trial.number, setting, made["end"], last, made["samples"], made["seconds"], losses)


def _optuna() -> ModuleType:
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(
            f"a search needs Optuna, which isn't there ({error}): pip install 'stoker[search]'"
        ) from error
    return optuna


def _storage(optuna: ModuleType, path: Path) -> Any:
    import sqlalchemy

    try:
        return optuna.storages.RDBStorage(f"sqlite:///{path.absolute()}")
    except (sqlalchemy.exc.SQLAlchemyError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"storage = '{path}' can't be used as a study ({why}): give another file") from error


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A lock beside the file: SQLite has locks of its own on the file itself."""
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(f"another process searches with {path}: wait for it, or give another file") from None
        yield
    finally:
        os.close(lock)


@contextmanager
def _quiet(optuna: ModuleType) -> Iterator[None]:
    """Its log on stderr, and its notes on what may change in it, are none of a user's business; both are put back."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
