"""Every batch number of a run, with its unit and scope, before the run starts. No torch here.

A step samples `prompts_per_step` prompts `samples_per_prompt` times each and passes over those samples
`epochs_per_step` times, in updates (optimizer steps) of `samples_per_update` samples. Micro-batches only
decide what is in memory together; they change no number here but their own.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from stoker.batch.advice import advise
from stoker.batch.controllers.prompts import Stage, lasting, stage_cells, stages_of, updates_to
from stoker.config.schema import RunConfig
from stoker.errors import ConfigError

__all__ = ["IDENTITIES", "BatchPlan", "Row", "from_json", "make", "render"]

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Row:
    """One line of the printed plan."""

    name: str
    value: str
    unit: str
    scope: str
    how: str
    """The key it comes from, or the arithmetic behind it."""


@dataclass(frozen=True)
class BatchPlan:
    """The batch numbers of one run, those of a step as it begins. Made by `make`; `check` holds for every instance."""

    prompts_per_step: int
    samples_per_prompt: int
    samples_per_step: int
    samples_per_update: int
    epochs_per_step: int
    updates_per_step: int
    prompts_per_update: float
    """A fraction where updates split groups."""
    max_prompt_tokens: int
    max_new_tokens: int
    greedy_samples_per_step: int
    """Drawn as baselines, not trained on."""
    draws_per_step: int
    """At most: dynamic sampling draws prompts until the step is full."""
    sampled_tokens_per_step: int
    """At most: every draw taken, every answer as long as allowed."""
    tokens_per_microbatch: int | None
    """A ceiling on padded tokens in one forward/backward; None: a fit decides when the run starts."""
    concurrent_samples: int
    steps: int
    total_samples: int
    total_updates: int
    warmup_samples: int
    warmup_updates: int
    learning_rate: float
    """At the peak, after warm-up."""
    parameters: int | None
    """The policy's, where known when the plan was made; with adapters, those of their base."""
    stages: tuple[Stage, ...]
    """What a step holds from when on; the first as above. One where nothing changes, or where the run decides."""
    decided: bool = True
    """False: the run decides when prompts per step change, so that totals and stages are those without a change."""
    trained_parameters: int | None = None
    """Those that the optimizer moves, where known: all, or the adapters'."""
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """ConfigError naming the identity that does not hold; for plans read from a file or made by hand."""
        for identity, holds in IDENTITIES.items():
            if not holds(self):
                numbers = {
                    name: value for name, value in asdict(self).items() if name in identity.replace("(", " ").split()
                }
                raise ConfigError(
                    f"batch plan: {identity} does not hold for {numbers}; make the plan anew from the run file"
                )

    def to_json(self) -> str:
        """The plan as `batch_plan.json` holds it."""
        return json.dumps({"schema_version": SCHEMA_VERSION} | asdict(self), indent=2)

    def rows(self) -> tuple[Row, ...]:
        """The table of the plan, in reading order."""
        return (*_step_rows(self), *_update_rows(self), *_run_rows(self))

    def __str__(self) -> str:
        return render(self)


IDENTITIES: Mapping[str, Callable[[BatchPlan], bool]] = {
    "samples_per_step = prompts_per_step x samples_per_prompt": (
        lambda p: p.samples_per_step == p.prompts_per_step * p.samples_per_prompt
    ),
    "updates_per_step x samples_per_update = epochs_per_step x samples_per_step": (
        lambda p: p.updates_per_step * p.samples_per_update == p.epochs_per_step * p.samples_per_step
    ),
    "samples_per_step is a multiple of samples_per_update": lambda p: p.samples_per_step % p.samples_per_update == 0,
    "prompts_per_update x samples_per_prompt = samples_per_update": (
        lambda p: math.isclose(p.prompts_per_update * p.samples_per_prompt, p.samples_per_update)
    ),
    "sampled_tokens_per_step = draws_per_step x (samples_per_step + greedy_samples_per_step) x max_new_tokens": (
        lambda p: (
            p.sampled_tokens_per_step
            == p.draws_per_step * (p.samples_per_step + p.greedy_samples_per_step) * p.max_new_tokens
        )
    ),
    "stages begin with the step's own samples_per_step and updates_per_step": (
        lambda p: (
            (p.stages[0].after_steps, p.stages[0].samples_per_step, p.stages[0].updates_per_step)
            == (0, p.samples_per_step, p.updates_per_step)
        )
    ),
    "total_samples = steps x samples_per_step, over the stages": (
        lambda p: p.total_samples == sum(steps * stage.samples_per_step for stage, steps in lasting(p.stages, p.steps))
    ),
    "total_updates = steps x updates_per_step, over the stages": (
        lambda p: p.total_updates == sum(steps * stage.updates_per_step for stage, steps in lasting(p.stages, p.steps))
    ),
    "warmup_samples <= total_samples": lambda p: 0 <= p.warmup_samples <= p.total_samples,
    "warmup_updates <= total_updates": lambda p: 0 <= p.warmup_updates <= p.total_updates,
}
"""What must hold between the numbers, whoever made the plan."""


def make(config: RunConfig, parameters: int | None = None, trained_parameters: int | None = None) -> BatchPlan:
    """The plan of a run. `parameters`: the policy's size, once known; sharpens the learning-rate advice."""
    sampling, update = config.sampling, config.update
    samples_per_step = sampling.prompts_per_step * sampling.samples_per_prompt
    samples_per_update = update.samples_per_update or samples_per_step
    greedy = sampling.prompts_per_step if config.algorithm.needs_greedy else 0
    draws = config.algorithm.dynamic_sampling_draws
    updates_per_step = update.epochs_per_step * samples_per_step // samples_per_update
    stages = stages_of(config)
    lasts = lasting(stages, config.stop.steps)
    total_samples = sum(steps * stage.samples_per_step for stage, steps in lasts)
    warmup_samples = round(config.optimizer.warmup_fraction * total_samples)
    return BatchPlan(
        prompts_per_step=sampling.prompts_per_step,
        samples_per_prompt=sampling.samples_per_prompt,
        samples_per_step=samples_per_step,
        samples_per_update=samples_per_update,
        epochs_per_step=update.epochs_per_step,
        updates_per_step=updates_per_step,
        prompts_per_update=samples_per_update / sampling.samples_per_prompt,
        max_prompt_tokens=config.task.max_prompt_tokens,
        max_new_tokens=sampling.max_new_tokens,
        greedy_samples_per_step=greedy,
        draws_per_step=draws,
        sampled_tokens_per_step=draws * (samples_per_step + greedy) * sampling.max_new_tokens,
        tokens_per_microbatch=None if update.tokens_per_microbatch == "auto" else update.tokens_per_microbatch,
        concurrent_samples=sampling.concurrent_samples,
        steps=config.stop.steps,
        total_samples=total_samples,
        total_updates=sum(steps * stage.updates_per_step for stage, steps in lasts),
        warmup_samples=warmup_samples,
        warmup_updates=updates_to(warmup_samples, lasts),
        learning_rate=config.optimizer.learning_rate,
        parameters=parameters,
        stages=stages,
        decided=not config.schedule.decides,
        trained_parameters=trained_parameters,
        warnings=tuple(advise(config, parameters)),
    )


def from_json(text: str) -> BatchPlan:
    """The plan that `to_json` wrote. ConfigError where it is damaged, of another version or inconsistent."""
    try:
        data: dict[str, Any] = json.loads(text)
        version = data.pop("schema_version")
        if version != SCHEMA_VERSION:
            raise ConfigError(f"batch plan: schema_version {version}, this stoker reads {SCHEMA_VERSION}")
        if data.keys() != {field.name for field in fields(BatchPlan)}:
            raise ConfigError("batch plan: keys are missing or unknown; make the plan anew from the run file")
        stages = tuple(Stage(**stage) for stage in data["stages"])
        return BatchPlan(**data | {"warnings": tuple(data["warnings"]), "stages": stages})
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise ConfigError(f"batch plan: not readable ({error}); make the plan anew from the run file") from None


def render(plan: BatchPlan) -> str:
    """The plan as plain text: a table, then the warnings."""
    table = [
        ("", "", "unit", "scope", "from"),
        *((row.name, row.value, row.unit, row.scope, row.how) for row in plan.rows()),
    ]
    widths = [max(len(line[column]) for line in table) for column in range(5)]
    lines = [
        "  ".join(
            cell.rjust(width) if column == 1 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
    return "\n".join([*(line.rstrip() for line in lines), *(f"warning: {warning}" for warning in plan.warnings)])


def _step_rows(p: BatchPlan) -> tuple[Row, ...]:
    return (
        Row("prompts per step", f"{p.prompts_per_step:,}", "prompts", "global", "sampling.prompts_per_step"),
        Row("samples per prompt", f"{p.samples_per_prompt:,}", "samples", "one group", "sampling.samples_per_prompt"),
        Row(
            "samples per step",
            f"{p.samples_per_step:,}",
            "samples",
            "global",
            f"{p.prompts_per_step} x {p.samples_per_prompt}",
        ),
        *_beside_the_samples(p),
        Row(
            "sampled tokens per step",
            f"{p.sampled_tokens_per_step:,}",
            "tokens",
            "global, at most",
            (f"{p.draws_per_step} x " if p.draws_per_step > 1 else "")
            + (f"{p.samples_per_step + p.greedy_samples_per_step} x {p.max_new_tokens} (sampling.max_new_tokens)"),
        ),
        Row("decoded together", f"{p.concurrent_samples:,}", "samples", "one sampler", "sampling.concurrent_samples"),
    )


def _beside_the_samples(p: BatchPlan) -> tuple[Row, ...]:
    """What some algorithms draw and don't train on."""
    greedy = Row("greedy answers per step", f"{p.greedy_samples_per_step:,}", "samples", "global", "one a prompt")
    draws = Row("draws per step", f"{p.draws_per_step}", "draws", "at most", "algorithm.dynamic_sampling_draws")
    return (*[greedy] * (p.greedy_samples_per_step > 0), *[draws] * (p.draws_per_step > 1))


def _update_rows(p: BatchPlan) -> tuple[Row, ...]:
    ceiling, how = "auto", "update.tokens_per_microbatch = 'auto': decided at the start by the fit"
    if p.tokens_per_microbatch is not None:
        ceiling, how = f"{p.tokens_per_microbatch:,}", "update.tokens_per_microbatch (memory only)"
    return (
        Row(
            "samples per update",
            f"{p.samples_per_update:,}",
            "samples",
            "global",
            "update.samples_per_update (0: the whole step)",
        ),
        Row(
            "prompts per update",
            f"{p.prompts_per_update:,.4g}",
            "prompts",
            "global",
            f"{p.samples_per_update} / {p.samples_per_prompt}",
        ),
        Row("epochs per step", f"{p.epochs_per_step}", "passes", "one step", "update.epochs_per_step"),
        Row(
            "updates per step",
            f"{p.updates_per_step:,}",
            "updates",
            "one step",
            f"{p.epochs_per_step} x {p.samples_per_step} / {p.samples_per_update}",
        ),
        Row(
            "tokens per micro-batch",
            ceiling,
            "padded tokens",
            "one forward/backward, ceiling",
            how,
        ),
    )


def _run_rows(p: BatchPlan) -> tuple[Row, ...]:
    samples, updates = f"{p.steps} x {p.samples_per_step}", f"{p.steps} x {p.updates_per_step}"
    if len(p.stages) > 1:
        samples = updates = "over the stages"
    return (
        Row("steps", f"{p.steps:,}", "steps", "run", "stop.steps"),
        *(Row(*cells) for cells in stage_cells(p.stages, decided=p.decided)),
        Row("total samples", f"{p.total_samples:,}", "samples", "run", samples),
        Row("total updates", f"{p.total_updates:,}", "updates", "run", updates),
        Row("warm-up", f"{p.warmup_samples:,}", "samples", "run", f"the first {p.warmup_updates} updates, linear"),
        Row("learning rate", f"{p.learning_rate:g}", "", "peak", "optimizer.learning_rate"),
        *_size_rows(p),
    )


def _size_rows(p: BatchPlan) -> tuple[Row, ...]:
    if p.parameters is None or p.trained_parameters is None:
        return ()
    whole = p.trained_parameters == p.parameters
    how = "all of them" if whole else f"adapters (lora.rank) beside {p.parameters:,} frozen ones"
    return (Row("trained parameters", f"{p.trained_parameters:,}", "parameters", "policy", how),)
