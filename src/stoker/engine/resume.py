"""Everything a run must remember, into a checkpoint and back: continue as if never stopped."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.batch.controllers.switching import Switching
from stoker.config.schema import RunConfig
from stoker.engine import checkpoint
from stoker.errors import CheckpointError
from stoker.record.folder import RunFolder
from stoker.rl.run import Run
from stoker.rl.state import RunState

__all__ = ["RunCheckpoints", "read_state", "restore"]

SCHEMA_VERSION = 2
STATE = "run_state.json"
FIRST_SAVE_SECONDS = 120.0
"""Training to lose at most before the first checkpoint has shown what saving costs."""


class RunCheckpoints:
    """Implements `rl.run.Checkpoints` in the run's folder."""

    def __init__(self, folder: RunFolder, config: RunConfig, environment: Mapping[str, Any]) -> None:
        self.saved_step = -1
        self._folder = folder
        self._config = config
        self.environment = environment
        self._save_seconds: float | None = None
        self._since = time.monotonic()

    def due(self, step: int, step_seconds: float) -> bool:
        every = self._config.checkpoint.every_steps
        if every:
            return step % every == 0
        if self._save_seconds is None:
            return time.monotonic() - self._since >= FIRST_SAVE_SECONDS
        return step - max(self.saved_step, 0) >= checkpoint.interval(step_seconds, self._save_seconds)

    def save(self, run: Run) -> None:
        started = time.monotonic()

        def write(folder: Path) -> None:
            run.learner.save(folder)
            state = {
                "schema_version": SCHEMA_VERSION,
                "run": run.state.to_json(),
                "prompts": run.prompts.state(),
                "schedule": run.schedule.state_dict() if isinstance(run.schedule, Switching) else None,
                "sampler": run.sampler.state(),
                "noise": run.noise.state_dict(),
                "learner": run.learner.state(),
                "processes": 1,
            }
            (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")

        checkpoint.save(
            self._folder.checkpoints,
            run.state.step,
            write,
            keep=self._config.checkpoint.keep,
            environment=self.environment,
            expected_bytes=run.learner.checkpoint_bytes(),
            patience=run.recorder.patience,
        )
        run.recorder.sync()
        run.clock.sync()
        self.saved_step = run.state.step
        self._save_seconds = time.monotonic() - started
        self._since = time.monotonic()


def read_state(path: Path) -> dict[str, Any]:
    """The saved state of a checkpoint. Raises CheckpointError if it can't be read or is of another layout."""
    try:
        state: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / STATE} can't be read ({error}): resume from an earlier checkpoint") from error
    if state.get("schema_version") != SCHEMA_VERSION:
        raise CheckpointError(
            f"{path} has state of schema_version {state.get('schema_version')}, this stoker reads {SCHEMA_VERSION}; "
            "resume with the version that wrote it, or start a new run from it with start_from"
        )
    missing = {"run", "prompts", "sampler", "noise", "learner", "processes"} - state.keys()
    if missing:
        raise CheckpointError(f"{path / STATE} lacks {', '.join(sorted(missing))}: resume from an earlier checkpoint")
    if state["processes"] != 1:
        raise CheckpointError(
            f"{path} was written by {state['processes']} processes, and the local engine runs in one: its optimizer "
            "state can't be resharded here. Start a new run from its weights with start_from"
        )
    return state


def restore(run: Run, path: Path) -> None:
    """Put a checkpoint's state back into a freshly built run."""
    saved = read_state(path)
    run.learner.load(path)
    run.learner.restore(saved["learner"])
    run.sampler.restore(saved["sampler"])
    run.prompts.restore(saved["prompts"])
    run.noise.load_state_dict(saved["noise"])
    run.state = RunState.from_json(saved["run"])
    if isinstance(run.schedule, Switching) and saved.get("schedule") is not None:  # else the kind was changed since
        run.schedule.load_state_dict(saved["schedule"])
    if not run.config.kl.adaptive:  # no controller moved it, so the run file decides, changed or not
        run.state.kl = replace(run.state.kl, coefficient=run.config.kl.coefficient)
    run.sampler.push(run.state.updates)
