"""Builds a run: one attempt's records, then model, task, rewards and engine, wired to the loop's ports."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from stoker.batch import plan as batch_plan
from stoker.batch.certificate import Trial
from stoker.batch.controllers.prompts import schedule_of
from stoker.config import load as config_load
from stoker.config import secrets
from stoker.config.schema import RunConfig
from stoker.engine.fitting import explained, fit_microbatch
from stoker.engine.local.assembly import assemble, policy_source
from stoker.engine.local.load import count_planned, load_tokenizer
from stoker.engine.profiling import Profiler
from stoker.engine.resume import RunCheckpoints
from stoker.engine.trackers import open_trackers
from stoker.errors import StokerError
from stoker.record import environment
from stoker.record.clock import Clock
from stoker.record.disk import Patience, write_json, write_text
from stoker.record.folder import RunFolder
from stoker.record.progress import Mode, Progress, duration
from stoker.record.write import Recorder
from stoker.rl import advantages, losses, rewards, tasks
from stoker.rl.interrupt import Interrupt
from stoker.rl.kl import KlState
from stoker.rl.run import Run
from stoker.rl.state import RunState

__all__ = ["Attempt", "add_trackers", "answer_encoder", "build", "open_attempt", "planned"]


@dataclass(frozen=True)
class Attempt:
    """One process's go at a run: what it writes to and what it listens to."""

    folder: RunFolder
    recorder: Recorder
    clock: Clock
    display: Progress
    interrupt: Interrupt
    closing: ExitStack
    """What must be closed when the attempt ends, however it ends."""


@contextmanager
def open_attempt(config: RunConfig, *, resume: bool, mode: Mode) -> Iterator[Attempt]:
    """Take the run folder and open its records. Raises RunError before anything expensive happens."""
    with ExitStack() as stack:
        folder = stack.enter_context(RunFolder.create(config.runs_dir, config.name, resume=resume))
        display = stack.enter_context(Progress(mode, config.stop.steps))
        interrupt = Interrupt()
        # a full disk is waited for, and said, unless the run is asked to stop
        patience = Patience(warn=display.warn, called_off=lambda: interrupt.received is not None)
        recorder = stack.enter_context(Recorder(folder, patience=patience))
        clock = stack.enter_context(Clock(folder.path / "clock.jsonl", "0", folder.attempt, patience=patience))
        stack.enter_context(interrupt)
        yield Attempt(folder, recorder, clock, display, interrupt, stack)


def planned(config: RunConfig) -> tuple[batch_plan.BatchPlan, str]:
    """The plan before anything is loaded, and why the model's size isn't in it, where it isn't."""
    try:
        total, trained = count_planned(config, policy_source(config).path)
    except StokerError as error:
        return batch_plan.make(config), str(error)
    return batch_plan.make(config, total, trained), ""


def build(config: RunConfig, attempt: Attempt, rows: tasks.TaskRows, *, profile_steps: int = 0) -> Run:
    """The run at its very start: weights loaded, nothing sampled. Notes and warnings are said and recorded.

    `profile_steps`: how many steps after the first to profile.
    """
    attempt.display.phase("setup")
    torch.manual_seed(config.seed)  # a model's own code may draw; stoker's draws don't use torch's generator
    for of_user in (advantages.estimator, losses.surrogate):
        of_user.cache_clear()  # a user's file may be another than in this process's last run
    if not config.algorithm.needs_critic:
        advantages.estimator(config.algorithm.advantage)
    losses.surrogate(config.algorithm.loss)
    suite = rewards.build(config.rewards)  # its faults, too, show before a model loads
    attempt.closing.callback(suite.close)
    tokenizer = load_tokenizer(policy_source(config))
    data = tasks.load(config, tokenizer, rows)
    if config.update.tokens_per_microbatch == "auto":
        prompts = [prompt for found in data.validation.values() for prompt in found]
        longest = max([data.train.longest, *(len(prompt.token_ids) for prompt in prompts)])
        config = _fitted(config, attempt, longest)
    engine = assemble(config, tokenizer)
    plan, learner, sampler = engine.plan, engine.learner, engine.sampler
    attempt.folder.require_free(learner.checkpoint_bytes(), "a checkpoint")
    facts = environment.collect(
        device=str(engine.model.device),
        threads=torch.get_num_threads(),
        sampling=sampler.arithmetic,
        update=engine.update_arithmetic,
    )
    for warning in plan.warnings:
        attempt.recorder.event("warning", warning)
        attempt.display.warn(warning)
    run = Run(
        config=config,
        plan=plan,
        state=RunState(kl=KlState(config.kl.coefficient)),
        schedule=schedule_of(config),
        sampler=sampler,
        learner=learner,
        reward=suite,
        prompts=data.train,
        validation=data.validation,
        recorder=attempt.recorder,
        clock=attempt.clock,
        display=attempt.display,
        interrupt=attempt.interrupt,
        checkpoints=RunCheckpoints(attempt.folder, config, facts),
        encode_answer=answer_encoder(tokenizer),
    )
    run.tell([*data.notes, *learner.notes, *sampler.notes])
    sampler.on_progress = _sampling_progress(run)
    if profile_steps:
        run.watchers.append(
            attempt.closing.enter_context(Profiler(run, engine.model, attempt.folder.path, profile_steps))
        )
    _write_facts(attempt.folder, config, plan, facts)
    return run


def add_trackers(run: Run, attempt: Attempt) -> None:
    """TensorBoard and wandb see each step's record; they can fail without the run noticing."""
    config = run.config.model_dump(mode="json")
    names, folder, step = run.config.record.trackers, attempt.folder.path, run.state.step
    for tracker in open_trackers(names, folder, config, warn=run.display.warn, first_step=step):
        attempt.closing.callback(tracker.close)

        def watch(record: Mapping[str, float], log: Callable[[int, Mapping[str, float]], None] = tracker.log) -> None:
            log(int(record["step"]), record)

        run.watchers.append(watch)


def answer_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """A reference answer as the tokens a model should write, its end token included."""

    def encode(text: str) -> list[int]:
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return [*tokenizer(text, add_special_tokens=False).input_ids, *end]

    return encode


def _fitted(config: RunConfig, attempt: Attempt, prompt_tokens: int) -> RunConfig:
    """The config with the micro-batch that fits in the place of `auto`; said, and every trial kept in fit.json."""
    attempt.display.say(
        "update.tokens_per_microbatch = auto: trying steps of growing size in processes of their own, with prompts of "
        f"{prompt_tokens} tokens and answers of {config.sampling.max_new_tokens}"
    )
    attempt.display.phase("fit")
    attempt.interrupt.at_once = True  # a trial takes long, and nothing is lost with it
    try:
        found = fit_microbatch(config, prompt_tokens, _trial_progress(attempt.display))
    finally:
        attempt.interrupt.at_once = False
    write_json(attempt.folder.path / "fit.json", found.to_json())
    text = explained(found)
    attempt.recorder.event("fit", text, tokens_per_microbatch=found.size)
    attempt.display.say(text)
    attempt.display.phase("setup")
    return config.model_copy(update={"update": config.update.model_copy(update={"tokens_per_microbatch": found.size})})


def _trial_progress(display: Progress) -> Callable[[Trial, int | None], None]:
    seconds: list[float] = []

    def report(trial: Trial, left: int | None) -> None:
        seconds.append(trial.seconds)
        ended = trial.end if trial.peak_bytes is None else f"{trial.end}, peak {trial.peak_bytes / 2**30:.3g} GiB"
        line = f"  {trial.size:,} tokens: {ended} ({trial.seconds:.1f} s)"
        if left is not None:
            recent = seconds[-3:]
            eta = f"ETA {duration(left * sum(recent) / len(recent))}"
            display.advance(len(seconds), len(seconds) + left, f"trials  {eta}")
            line += f"; about {left} more, {eta}"
        display.say(line)

    return report


def _sampling_progress(run: Run) -> Callable[[int, int, int], None]:
    def report(done: int, total: int, tokens: int) -> None:
        run.display.advance(done, total, "samples")
        if run.abandonable:
            run.interrupt.check()

    return report


def _write_facts(folder: RunFolder, config: RunConfig, plan: batch_plan.BatchPlan, facts: Mapping[str, Any]) -> None:
    write_text(folder.path / "config.toml", config_load.to_toml(config))
    write_text(folder.path / "batch_plan.json", plan.to_json())
    write_json(folder.path / "environment.json", {**facts, "command": secrets.redact_argv(sys.argv)})
