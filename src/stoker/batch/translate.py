"""Batch numbers of other frameworks in stoker's words, with the arithmetic spelled out. No torch here.

Each framework counts something else: TRL completions per device, verl prompts over all devices,
OpenRLHF prompts for the rollout but samples for the update.
"""

from dataclasses import dataclass

from stoker.errors import ConfigError

__all__ = ["Translation", "from_openrlhf", "from_trl", "from_verl"]


@dataclass(frozen=True)
class Translation:
    """The same batch in stoker's units."""

    prompts_per_step: int
    samples_per_prompt: int
    samples_per_update: int
    epochs_per_step: int
    microbatch_samples: int | None
    """Samples in one forward/backward of one device. stoker caps tokens instead
    (update.tokens_per_microbatch), so this one is only shown; None: not given."""
    arithmetic: tuple[str, ...]
    """One line for each number, e.g. `samples_per_update = 8 per device x 4 devices x 2 accumulated = 64`."""

    def overrides(self) -> tuple[str, ...]:
        """As overrides of a run file."""
        return (
            f"sampling.prompts_per_step={self.prompts_per_step}",
            f"sampling.samples_per_prompt={self.samples_per_prompt}",
            f"update.samples_per_update={self.samples_per_update}",
            f"update.epochs_per_step={self.epochs_per_step}",
        )

    def __str__(self) -> str:
        return "\n".join([*self.arithmetic, f"overrides: {' '.join(self.overrides())}"])


def from_trl(
    *,
    per_device_train_batch_size: int,
    num_generations: int,
    gradient_accumulation_steps: int = 1,
    world_size: int = 1,
    steps_per_generation: int | None = None,
    generation_batch_size: int | None = None,
    num_iterations: int = 1,
) -> Translation:
    """TRL's GRPOConfig, which counts completions: per device, then over devices and accumulation."""
    per_pass = per_device_train_batch_size * world_size
    if generation_batch_size is not None:
        if steps_per_generation is not None:
            raise ConfigError("TRL: give generation_batch_size or steps_per_generation, not both")
        steps_per_generation = _divide(
            generation_batch_size, per_pass, "TRL: generation_batch_size", "per_device_train_batch_size x world_size"
        )
    elif steps_per_generation is None:
        steps_per_generation = gradient_accumulation_steps
    generated = per_pass * steps_per_generation
    per_update = per_pass * gradient_accumulation_steps
    _divide(generated, num_generations, "TRL: generation_batch_size", "num_generations")
    per_step = max(generated, per_update)
    if per_step % min(generated, per_update) or (generated < per_update and num_iterations > 1):
        raise ConfigError(
            f"TRL: {generated} completions per generation against {per_update} per optimizer step has no equal in "
            "whole steps; make steps_per_generation a multiple of gradient_accumulation_steps"
        )
    prompts = per_step // num_generations
    rounds = per_step // generated
    together = f" x {rounds} generations without an update between them" if rounds > 1 else ""
    return Translation(
        prompts_per_step=prompts,
        samples_per_prompt=num_generations,
        samples_per_update=per_update,
        epochs_per_step=num_iterations,
        microbatch_samples=per_device_train_batch_size,
        arithmetic=(
            f"samples per step = {per_device_train_batch_size} per device x {world_size} devices x "
            f"{steps_per_generation} steps per generation{together} = {per_step}",
            f"prompts_per_step = {per_step} samples / {num_generations} generations = {prompts}",
            f"samples_per_prompt = num_generations = {num_generations}",
            f"samples_per_update = {per_device_train_batch_size} per device x {world_size} devices x "
            f"{gradient_accumulation_steps} accumulated = {per_update}",
            f"epochs_per_step = num_iterations = {num_iterations}",
        ),
    )


def from_verl(
    *,
    train_batch_size: int,
    ppo_mini_batch_size: int,
    n: int,
    ppo_epochs: int = 1,
    ppo_micro_batch_size_per_gpu: int | None = None,
) -> Translation:
    """verl's `data.train_batch_size` and `actor.ppo_mini_batch_size` (global prompts) and `rollout.n`."""
    _divide(train_batch_size, ppo_mini_batch_size, "verl: data.train_batch_size", "actor.ppo_mini_batch_size")
    return Translation(
        prompts_per_step=train_batch_size,
        samples_per_prompt=n,
        samples_per_update=ppo_mini_batch_size * n,
        epochs_per_step=ppo_epochs,
        microbatch_samples=ppo_micro_batch_size_per_gpu,
        arithmetic=(
            f"prompts_per_step = data.train_batch_size = {train_batch_size}",
            f"samples_per_prompt = rollout.n = {n}",
            f"samples_per_update = actor.ppo_mini_batch_size x rollout.n = {ppo_mini_batch_size} x {n} = "
            f"{ppo_mini_batch_size * n}",
            f"epochs_per_step = actor.ppo_epochs = {ppo_epochs}",
        ),
    )


def from_openrlhf(
    *,
    rollout_batch_size: int,
    n_samples_per_prompt: int,
    train_batch_size: int,
    max_epochs: int = 1,
    micro_train_batch_size: int | None = None,
) -> Translation:
    """OpenRLHF's `rollout.batch_size` (global prompts) and `train.batch_size` (global samples)."""
    per_step = rollout_batch_size * n_samples_per_prompt
    _divide(per_step, train_batch_size, "OpenRLHF: rollout.batch_size x n_samples_per_prompt", "train.batch_size")
    return Translation(
        prompts_per_step=rollout_batch_size,
        samples_per_prompt=n_samples_per_prompt,
        samples_per_update=train_batch_size,
        epochs_per_step=max_epochs,
        microbatch_samples=micro_train_batch_size,
        arithmetic=(
            f"prompts_per_step = rollout.batch_size = {rollout_batch_size}",
            f"samples_per_prompt = rollout.n_samples_per_prompt = {n_samples_per_prompt}",
            f"samples_per_update = train.batch_size = {train_batch_size} of the {rollout_batch_size} x "
            f"{n_samples_per_prompt} = {per_step} samples of a step",
            f"epochs_per_step = train.max_epochs = {max_epochs}",
        ),
    )


def _divide(total: int, part: int, total_name: str, part_name: str) -> int:
    if total % part:
        raise ConfigError(f"{total_name} = {total} is not a multiple of {part_name} = {part}")
    return total // part
