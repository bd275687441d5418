"""What the loop holds: the ports, the state, and the few decisions around a step."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from stoker.batch import stages
from stoker.batch.controllers.by_noise import ByNoise
from stoker.batch.controllers.by_plateau import ByPlateau
from stoker.batch.controllers.prompts import Stage, stage_of
from stoker.batch.controllers.switching import Switch
from stoker.batch.plan import BatchPlan
from stoker.config import schema
from stoker.config.leash import leash
from stoker.record.clock import Clock
from stoker.record.progress import Progress
from stoker.record.write import Recorder
from stoker.rl.batches import KlPenalty, mean_sequence_kl, with_scores
from stoker.rl.evaluate import evaluate, past_its_best
from stoker.rl.interrupt import Interrupt, Interrupted
from stoker.rl.kl import AdaptiveKl, default_horizon
from stoker.rl.noise import GroupNoise
from stoker.rl.ports import Learner, PromptSource, RewardPort, Sampler, Watcher
from stoker.rl.sampling import draw_seed, sample_record
from stoker.rl.state import Evaluation, RunState
from stoker.rl.types import Objective, Prompt, Scored, TrainRow

__all__ = ["Run", "objective_of", "scored"]


class RewardSource(RewardPort, Protocol):
    """Rewards that also say when an answer is right, and what they logged."""

    def solved(self, scored: Scored) -> bool: ...

    def metrics(self) -> dict[str, float]: ...

    def extras(self) -> list[dict[str, Any]]: ...


class Checkpoints(Protocol):
    """Where the state goes. `saved_step` is the step of the newest checkpoint, -1: there is none."""

    saved_step: int
    environment: Mapping[str, Any]
    """What the run runs on now (see `record.environment`)."""

    def due(self, step: int, step_seconds: float) -> bool:
        """Is it time for one, by the run file or by what saving and stepping cost?"""
        ...

    def save(self, run: "Run") -> None: ...


def objective_of(config: schema.RunConfig, kl_coefficient: float, *, critic_only: bool = False) -> Objective:
    """The loss that a run file asks for, with the leash at that coefficient."""
    algorithm, pull = config.algorithm, leash(config)
    return Objective(
        loss="value" if critic_only else "policy",
        surrogate=algorithm.loss,
        ratio=algorithm.ratio,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        dual_clip=algorithm.dual_clip,
        gate_positive=algorithm.gate_positive,
        gate_negative=algorithm.gate_negative,
        kl_coefficient=0.0 if pull.in_reward else kl_coefficient,
        kl_estimator=pull.estimator,
        kl_level=config.kl.level,
        entropy_coefficient=algorithm.entropy_coefficient,
        value_clip=algorithm.value_clip,
        value_coefficient=algorithm.value_coefficient,
    )


def scored(learner: Learner, rows: Sequence[TrainRow], *, old: bool, reference: bool, critic: bool) -> list[TrainRow]:
    """The rows with what the learner says of them. `old`: needed where the policy moves before they are all used."""
    return with_scores(
        rows,
        old_logprobs=learner.score(rows, "policy") if old else None,
        reference_logprobs=learner.score(rows, "reference") if reference else None,
        old_values=learner.score(rows, "critic") if critic else None,
    )


@dataclass
class Run:
    """One run of the loop. Built by `stoker.wiring`; nothing here knows a file format or a device."""

    config: schema.RunConfig
    plan: BatchPlan
    state: RunState
    schedule: Callable[[stages.Progress], int]
    """Prompts per step."""
    sampler: Sampler
    learner: Learner
    reward: RewardSource
    prompts: PromptSource
    validation: Mapping[str, Sequence[Prompt]]
    recorder: Recorder
    clock: Clock
    display: Progress
    interrupt: Interrupt
    checkpoints: Checkpoints
    encode_answer: Callable[[str], list[int]]
    """A reference answer as the tokens a model should write, end token included."""
    watchers: list[Watcher] = field(default_factory=list)
    stop_reason: str | None = None
    """Set by a watcher."""
    step_seconds: float = 0.0
    """Of the last step."""
    abandonable: bool = False
    """True where a signal may end the work at hand at once: nothing has changed that can't be done again."""
    noise: GroupNoise = field(default_factory=GroupNoise)
    update_in_step: int = 0
    """Optimizer steps of the step at hand, taken or refused."""
    _said: set[str] = field(default_factory=set)
    """Kinds of warnings and notes that the user has been told."""

    # -- the loop's questions ----------------------------------------------------------------------

    def ending(self) -> str | None:
        """Why the run is over, in words; None: it goes on."""
        if self.interrupt.received is not None:
            return f"stopped by {self.interrupt.received.name}"
        if self.state.step >= self.config.stop.steps:
            steps = self.config.stop.steps
            return f"finished its {steps} step{'' if steps == 1 else 's'}"
        seen = self.state.evaluations
        if past_its_best(
            [e.reward for e in seen], [e.reward_error for e in seen], self.config.validation.early_stop_after
        ):
            best = max(seen, key=lambda e: e.reward)
            return (
                f"stopped early: {self.config.validation.early_stop_after} evaluations in a row below the best "
                f"held-out reward {best.reward:.3f} (at {best.samples_seen:,} samples) by more than its standard error"
            )
        return self.stop_reason

    @property
    def stage(self) -> Stage:
        """The batch numbers of the step at hand."""
        at = stages.Progress(0, self.state.step, self.state.samples_seen)
        return stage_of(self.config, self.schedule(at), self.state.step)

    @property
    def growth(self) -> float:
        """Samples of an update over those that the learning rates are right for."""
        return self.stage.samples_per_update / self.plan.samples_per_update

    def objective(self) -> Objective:
        """The loss of this step, with the leash's present coefficient; the critic alone while it warms up."""
        critic_only = self.config.algorithm.needs_critic and self.state.step < self.config.critic.warmup_steps
        return objective_of(self.config, self.state.kl.coefficient, critic_only=critic_only)

    def penalty(self) -> KlPenalty:
        """The leash's part of the reward."""
        in_reward = leash(self.config).in_reward
        return KlPenalty(self.state.kl.coefficient if in_reward else 0.0, self.config.kl.level)

    def scored(self, rows: list[TrainRow]) -> list[TrainRow]:
        """Log-probs and values that the updates need, each by one pass without gradients."""
        several, leashed = self.stage.updates_per_step > 1, bool(self.state.kl.coefficient)
        return scored(self.learner, rows, old=several, reference=leashed, critic=self.config.algorithm.needs_critic)

    def commit(self) -> None:
        """The last moment at which a signal abandons the step: from here on the policy moves."""
        self.interrupt.check()
        self.abandonable = False

    def measure(self) -> int | None:
        """The seed of the present step's look at the gradient's noise; None: it isn't one to measure.

        Step 8 of every 8, not step 1: cut into its parts an update is rounded otherwise, and of a run's first step the
        KL from the reference should be 0 to the bit.
        """
        every = self.config.record.noise_every_steps
        due = every and (self.state.step + 1) % every == 0
        return draw_seed(self.config.seed, "noise", self.state.step) if due else None

    def samples_after_update(self) -> int:
        """Samples trained on once the present update is done; what learning-rate schedules count."""
        self.update_in_step += 1
        stage = self.stage
        return self.state.samples_seen + stage.samples_per_step * self.update_in_step // stage.updates_per_step

    def adapt(self, rows: Sequence[TrainRow]) -> None:
        """Move the leash by the KL that this step's samples showed (it starts at the step-0 value)."""
        measured = mean_sequence_kl(rows) if self.state.kl.coefficient else None
        if measured is None:
            return
        if not self.config.kl.adaptive:
            baseline = measured if self.state.kl.baseline is None else self.state.kl.baseline
            self.state.kl = replace(self.state.kl, baseline=baseline)
            return
        most = self.config.schedule.most(self.plan.prompts_per_step)
        horizon = self.config.kl.horizon_samples or default_horizon(
            self.plan.total_samples, most * self.plan.samples_per_prompt
        )
        controller = AdaptiveKl(self.config.kl.target, horizon)
        self.state.kl = controller.update(self.state.kl, measured, self.stage.samples_per_step)

    def evaluation_due(self) -> bool:
        """At the end, and whenever the samples seen pass a multiple of validation.every_samples."""
        if not self.validation:
            return False
        seen = self.state.samples_seen + self.stage.samples_per_step
        every = self.config.validation.every_samples
        crossed = every > 0 and seen // every > self.state.samples_seen // every
        return crossed or self.state.step + 1 == self.config.stop.steps

    # -- doing -------------------------------------------------------------------------------------

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Give the device's time inside to this phase, and show it."""
        self.display.phase(name)
        if self.abandonable:
            self.interrupt.check()
        with self.clock.phase(name):  # outside, so that no signal cuts into its own writing
            self.interrupt.at_once = self.abandonable and name in ("reward", "evaluate")  # a hung reward takes minutes
            try:
                yield
            finally:
                self.interrupt.at_once = False

    def warn_once(self, kind: str, text: str) -> None:
        """A warning that would be the same at every step."""
        if kind not in self._said:
            self._said.add(kind)
            self.recorder.event(kind, text, step=self.state.step + 1)
            self.display.warn(f"step {self.state.step + 1}: {text}")

    def tell(self, notes: Iterable[str]) -> None:
        """Say and record notes, each once: some are about the start, others come when memory runs out."""
        for note in notes:
            if note not in self._said:
                self._said.add(note)
                self.recorder.event("note", note, step=self.state.step)
                self.display.say(note)

    def follow_noise(self) -> None:
        """Between two steps: change prompts per step where the schedule goes by the noise scale."""
        if isinstance(self.schedule, ByNoise):
            at = stages.Progress(0, self.state.step, self.state.samples_seen)
            switch = self.schedule.observe(self.noise.estimate(), at)
            self.tell_switch(switch, switch.why if switch is not None else "")

    def tell_switch(self, switch: Switch | None, why: str) -> None:
        """Say and record a change of prompts per step, where one was decided."""
        if switch is not None:
            text = f"from step {switch.step + 1} on {switch.now} prompts per step, {switch.before} before: {why}"
            self.recorder.event("batch_switch", text, step=switch.step, before=switch.before, now=switch.now)
            self.display.say(text)

    def evaluate_start(self) -> None:
        """The policy as it is before the first update: step 0 of the record."""
        if not self.validation or self.state.evaluations:
            return
        self.abandonable = True
        try:
            metrics = self.evaluate(after_step=False)
        except Interrupted:
            return
        finally:
            self.abandonable = False
        self.recorder.metrics(0, metrics)
        self.display.step({"step": 0, **metrics})

    def evaluate(self, *, after_step: bool = True) -> dict[str, float]:
        """Held-out metrics, with the step at hand done or not yet begun; remembered for the early stop."""
        with self.phase("evaluate"):
            seen = self.state.samples_seen + (self.stage.samples_per_step if after_step else 0)
            metrics, groups = evaluate(
                self.sampler, self.reward, self.validation, self.config, self.reward.solved, self.state.step
            )
            self.reward.metrics(), self.reward.extras()  # of held-out answers: not the step's
            step = self.state.step + (1 if after_step else 0)
            for name, found in groups.items():
                records = [sample_record(one) for group in found for one in group.scored]
                self.recorder.evaluation(step, name, records)
            first = next(iter(self.validation))
            one = {name: metrics[f"eval/{first}/{name}"] for name in ("reward", "reward_error", "accuracy")}
            self.state.evaluations.append(Evaluation(samples_seen=seen, **one))
            if isinstance(self.schedule, ByPlateau):
                switch = self.schedule.observe(-one["reward"], stages.Progress(0, step, seen))
                self.tell_switch(switch, "the held-out reward no longer rises")
            return metrics

    def checkpoint_if_due(self) -> None:
        """At the end, and when the run file or the cost of saving says so."""
        step = self.state.step
        if step == self.checkpoints.saved_step:
            return
        if self.ending() is not None or self.checkpoints.due(step, self.step_seconds):
            with self.phase("checkpoint"):
                self.checkpoints.save(self)
