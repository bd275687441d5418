"""The batch numbers of a run's steps where prompts per step change, before it runs and while it does. No torch here."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from stoker.batch.controllers.by_noise import ByNoise
from stoker.batch.controllers.by_plateau import ByPlateau
from stoker.batch.scaling import rate_factor
from stoker.batch.stages import Progress, Ramp, Stages
from stoker.config.schema import RunConfig

__all__ = ["Stage", "growth_factor", "lasting", "schedule_of", "stage_cells", "stage_of", "stages_of", "updates_to"]

FOLLOWS: dict[str, Literal["linear", "sqrt"]] = {"adamw": "sqrt", "adafactor": "sqrt", "sgd": "linear"}
"""By optimizer.name; Adafactor divides by the gradient's size as Adam does."""
SHOWN = 12
"""Changes that a plan's table has at most."""


@dataclass(frozen=True)
class Stage:
    """The batch numbers of the steps from one on."""

    after_steps: int
    """Steps done when it begins."""
    prompts_per_step: int
    samples_per_step: int
    samples_per_update: int
    updates_per_step: int
    learning_rate: float
    """Of the policy, at the peak."""


def schedule_of(config: RunConfig) -> Callable[[Progress], int]:
    """Prompts per step by progress, whose samples are answers trained on."""
    schedule, first = config.schedule, config.sampling.prompts_per_step
    if schedule.kind == "ramp":
        return Ramp(first, schedule.last, over=schedule.over, by=schedule.by, multiple=schedule.multiple)
    if schedule.kind == "plateau":
        return ByPlateau(
            first,
            schedule.last,
            patience=schedule.patience,
            threshold=schedule.threshold,
            multiple=schedule.multiple,
        )
    if schedule.kind == "noise":
        return ByNoise(
            first,
            lowest=min(first, schedule.last),
            highest=max(first, schedule.last),
            multiple=schedule.multiple,
            times=schedule.times,
            unit="prompts",
            wait=schedule.wait_steps,
        )
    return Stages((first, *schedule.prompts), (0, *schedule.starts), schedule.by)


def growth_factor(config: RunConfig, role: str, growth: float) -> float:
    """Of the learning rate of "policy" or "critic", where an update has `growth` times the samples it is right for."""
    rule, optimizer = config.schedule.rule, config.critic.optimizer if role == "critic" else config.optimizer
    if rule == "keep" or growth == 1:
        return 1.0
    return rate_factor(FOLLOWS[optimizer.name] if rule == "default" else rule, growth)


def stage_of(config: RunConfig, prompts: int, after_steps: int = 0) -> Stage:
    """The numbers of a step with so many prompts."""
    each = config.sampling.samples_per_prompt
    samples = prompts * each
    update = config.update.samples_per_update or samples
    base = config.update.samples_per_update or config.sampling.prompts_per_step * each
    return Stage(
        after_steps=after_steps,
        prompts_per_step=prompts,
        samples_per_step=samples,
        samples_per_update=update,
        updates_per_step=config.update.epochs_per_step * samples // update,
        learning_rate=config.optimizer.learning_rate * growth_factor(config, "policy", update / base),
    )


def stages_of(config: RunConfig) -> tuple[Stage, ...]:
    """Of the whole run, each as long as its numbers last; where the run decides, as it would go without a decision."""
    schedule, samples = schedule_of(config), 0
    settled = max(config.schedule.over, *config.schedule.starts, 0)  # from there on nothing changes
    made: list[Stage] = []
    for step in range(config.stop.steps):
        at = Progress(0, step, samples)
        prompts = schedule(at)
        if not made or made[-1].prompts_per_step != prompts:
            made.append(stage_of(config, prompts, step))
        if getattr(at, config.schedule.by) >= settled:
            break
        samples += made[-1].samples_per_step
    return tuple(made)


def lasting(stages: Sequence[Stage], steps: int) -> list[tuple[Stage, int]]:
    """Each stage with the steps that it lasts, in a run of so many."""
    ends = [*(stage.after_steps for stage in stages[1:]), steps]
    return [(stage, end - stage.after_steps) for stage, end in zip(stages, ends, strict=True)]


def updates_to(samples: int, lasts: Sequence[tuple[Stage, int]]) -> int:
    """Updates that reach so many samples; the last one is counted whole."""
    updates = 0
    for stage, steps in lasts:
        if samples <= steps * stage.samples_per_step:
            return updates + math.ceil(samples * stage.updates_per_step / stage.samples_per_step)
        samples, updates = samples - steps * stage.samples_per_step, updates + steps * stage.updates_per_step
    return updates


def stage_cells(stages: Sequence[Stage], *, decided: bool) -> list[tuple[str, str, str, str, str]]:
    """Where prompts per step change, as lines of a plan's table: name, value, unit, scope, how."""
    if not decided:
        return [("changes", "undecided", "", "run", "schedule: the run decides; totals are those without a change")]
    lines = [
        (
            f"from step {stage.after_steps + 1:,}",
            f"{stage.prompts_per_step:,}",
            "prompts",
            "global",
            f"schedule: {stage.samples_per_step:,} samples per step, {stage.samples_per_update:,} per update, "
            f"{stage.updates_per_step:,} update{'s' * (stage.updates_per_step > 1)}, learning rate "
            f"{stage.learning_rate:.4g} at its peak",
        )
        for stage in stages[1:]
    ]
    if len(lines) <= SHOWN:
        return lines
    left = f"{len(lines) - SHOWN:,}"
    return [*lines[: SHOWN - 1], ("...", left, "changes", "run", "schedule: in batch_plan.json"), lines[-1]]
