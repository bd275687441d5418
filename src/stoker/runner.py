"""From a run file to a better model: `train` carries a run from its data checks to its closed books."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from stoker.config import load as config_load
from stoker.config import secrets
from stoker.config.changes import diff
from stoker.config.schema import RunConfig
from stoker.engine import checkpoint
from stoker.engine.local.dtype import fastest_dtype, wasteful
from stoker.engine.local.load import pick_device
from stoker.engine.resume import restore
from stoker.errors import CheckpointError, ConfigError, RunError
from stoker.record import environment, read
from stoker.record.disk import when_full, write_text
from stoker.record.progress import Mode
from stoker.report.curves import held_out_summary, learning_curve
from stoker.rl import tasks
from stoker.rl.interrupt import Interrupted
from stoker.rl.loop import train as train_loop
from stoker.rl.run import Run
from stoker.rl.state import Evaluation
from stoker.rl.warm_start import warm_start
from stoker.wiring import Attempt, add_trackers, build, open_attempt

__all__ = ["Result", "train"]


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    folder: Path
    ending: str
    step: int
    evaluations: tuple[Evaluation, ...]
    policy: Path | None
    """The newest saved policy: loads with AutoModelForCausalLM.from_pretrained. None: nothing was saved."""
    exit_code: int
    """0, or 128 + the signal that stopped the run."""


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    allow_changes: bool = False,
    mode: Mode = "table",
    profile_steps: int = 0,
) -> Result:
    """Train to the run's end, or on from its last checkpoint. Raises StokerError that says what to do.

    `profile_steps`: profile so many steps after the first of this attempt (see `engine.profiling`).
    """
    _require_one_process()
    if profile_steps >= config.stop.steps:
        raise ConfigError(
            f"profiling {profile_steps} steps after an unprofiled first needs stop.steps = {profile_steps + 1} or "
            f"more, and it is {config.stop.steps}"
        )
    rows = tasks.read_rows(config)  # faults of the data show before a model loads
    with open_attempt(config, resume=resume, mode=mode) as attempt:
        try:
            saved = _saved_config(attempt) if resume else None
            config = _with_tokens(_with_dtype(attempt, config, saved), saved)
            if saved is not None:
                _compare(attempt, saved, config, allow_changes)
            run = build(config, attempt, rows, profile_steps=profile_steps)
            begin(run, attempt)
            add_trackers(run, attempt)
            ending = train_loop(run)
            return _finish(run, attempt, ending)
        except Interrupted as signal:
            return _stopped_early(config, attempt, str(signal))
        except BaseException as error:
            _explain(error, attempt)
            raise


def _require_one_process() -> None:
    processes = os.environ.get("WORLD_SIZE", "1")
    if processes != "1":
        raise RunError(
            f"WORLD_SIZE = {processes}, but the local engine runs in one process: start stoker without a launcher "
            "such as torchrun (a run's state can't be split over processes)"
        )


def _config_file(folder: Path) -> Path:
    return folder / "config.toml"


def _saved_config(attempt: Attempt) -> RunConfig | None:
    """What the run was started with; None where it never came so far."""
    file = _config_file(attempt.folder.path)
    return config_load.load(file) if file.exists() else None


def _with_dtype(attempt: Attempt, config: RunConfig, saved: RunConfig | None) -> RunConfig:
    """The config with `auto` made a dtype. A resume keeps the run's: another machine may be faster in another."""
    device, dtype = pick_device(config.model.device), config.model.dtype
    if dtype != "auto":
        if warning := wasteful(dtype, device):
            attempt.display.warn(warning)
        return config
    chosen = saved.model.dtype if saved else fastest_dtype(device)
    attempt.display.say(
        f"model.dtype = {chosen} ({'as the run began' if saved else f'the fastest on this {device.type}'})"
    )
    return config.model_copy(update={"model": config.model.model_copy(update={"dtype": chosen})})


def _with_tokens(config: RunConfig, saved: RunConfig | None) -> RunConfig:
    """A resume keeps the micro-batch that the run's first start found: `auto` is decided once."""
    if saved is None or config.update.tokens_per_microbatch != "auto":
        return config
    kept = {"tokens_per_microbatch": saved.update.tokens_per_microbatch}
    return config.model_copy(update={"update": config.update.model_copy(update=kept)})


def _compare(attempt: Attempt, saved: RunConfig, config: RunConfig, allow_changes: bool) -> None:
    """Say what changed since the run was started. Raises ConfigError for what would make it another run."""
    changes = diff(saved, config)
    breaking = [str(change) for change in changes if change.breaks]
    if breaking and not allow_changes:
        raise ConfigError(
            "the run file differs from the one this run was started with:\n  " + "\n  ".join(breaking) + "\n"
            f"resume with {_config_file(attempt.folder.path)}, or go on all the same with --allow-changes "
            "(it is recorded)"
        )
    for change in changes:
        attempt.recorder.event("config_change", str(change), breaks=change.breaks)
        attempt.display.say(f"changed since the start: {change}")


def begin(run: Run, attempt: Attempt) -> None:
    """Resume from the newest sound checkpoint, or warm up and fix the initial policy."""
    found = checkpoint.find(attempt.folder.checkpoints, say=run.display.warn)
    reference = attempt.folder.path / "reference"
    if found is not None:
        with run.phase("checkpoint"):
            _load_reference(run, reference)
            restore(run, found.path)
        run.checkpoints.saved_step = found.step
        for line in environment.differences(found.environment, run.checkpoints.environment):
            run.display.warn(f"not bit-exact with the run so far: {line}")
        run.recorder.event("resume", f"resumed from step {found.step}", step=found.step)
        run.display.at_step(found.step)
        run.display.say(f"resumed from step {found.step}")
        return
    if run.config.warm_start.updates:
        _warm_up(run)
    run.learner.begin_rl()
    when_full(lambda: run.learner.save_reference(reference), "reference", reference.parent, run.recorder.patience)
    run.sampler.push(0)
    if run.config.warm_start.updates:
        with run.phase("checkpoint"):
            run.checkpoints.save(run)


def _load_reference(run: Run, folder: Path) -> None:
    try:
        run.learner.load_reference(folder)
    except CheckpointError as error:
        raise CheckpointError(
            f"the run's reference model can't be restored ({error}). Where the run file has another model, leash or "
            f"lora.rank than the run began with, resume with the saved config.toml; else bring {folder} back from a "
            "copy; without it the run can't go on as it was: start a new one with start_from"
        ) from error


def _warm_up(run: Run) -> None:
    def progress(done: int, total: int, loss: float) -> None:
        run.display.advance(done, total, f"warm-start updates, loss {loss:.3f}")
        run.interrupt.check()

    run.display.say(f"warm start: up to {run.config.warm_start.updates} supervised updates on the task's answers")
    loss = warm_start(run.config, run.learner, run.prompts, run.encode_answer, progress)
    run.recorder.event("warm_start", f"warm start ended at a loss of {loss:.4f} nats/token", step=0, loss=loss)
    run.display.say(f"warm start ended at a loss of {loss:.3f} nats/token")


def _finish(run: Run, attempt: Attempt, ending: str) -> Result:
    folder, state = attempt.folder.path, run.state
    run.recorder.event("end", ending, step=state.step)
    found = checkpoint.saved(attempt.folder.checkpoints)
    policy = found[0][1] / "policy" if found else None
    whole = state.step == run.config.stop.steps
    lines = [f"{run.config.name} {ending}" if whole else f"{run.config.name} {ending}, at step {state.step}"]
    try:
        recorded = read.Run.load(folder)
        write_text(folder / "curve.svg", learning_curve(recorded))
        lines += [*held_out_summary(recorded), f"picture: {folder / 'curve.svg'}"]
    except RunError as error:  # a damaged record must not turn a trained model into a failure
        run.display.warn(f"no picture of the run: {error}")
    if run.config.record.noise_every_steps:
        lines += run.noise.summary(run.plan.prompts_per_update)
    lines.append(f"run folder: {folder}")
    if policy is not None:
        lines.append(f"model: {policy}")
    if not whole:
        lines.append(way_back(folder))
    run.display.final("\n".join(lines))
    return Result(folder, ending, state.step, tuple(state.evaluations), policy, attempt.interrupt.exit_code)


def _stopped_early(config: RunConfig, attempt: Attempt, signal: str) -> Result:
    folder, ending = attempt.folder.path, f"stopped by {signal} before its first step"
    attempt.recorder.event("end", ending, step=0)
    attempt.display.final(f"{config.name} {ending}\nrun folder: {folder}\n{way_back(folder)}")
    return Result(folder, ending, 0, (), None, attempt.interrupt.exit_code)


def _explain(error: BaseException, attempt: Attempt) -> None:
    """Leave the cause in the record, and the way back on the error."""
    folder = attempt.folder.path
    saved = checkpoint.saved(attempt.folder.checkpoints)
    last = f"last good step: {saved[0][0]}" if saved else "no checkpoint was saved yet"
    attempt.recorder.last_words("failed", secrets.redact(f"{type(error).__name__}: {error}"))
    error.add_note(f"run folder: {folder}\n{last}\n{way_back(folder)}")


def way_back(folder: Path) -> str:
    if not (file := _config_file(folder)).exists():
        return "nothing was trained yet: mend the cause and start the run again"
    return f"go on with: stoker train {shlex.quote(str(file))} --resume"
