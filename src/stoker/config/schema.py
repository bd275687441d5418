"""The run file as a frozen, typed tree. No torch here: planning works on a laptop without it.

Every batch number names its unit and scope: a *prompt* is one row of the task, a *sample* one
generated answer, a *step* one rollout with its updates, an *update* one optimizer step and a
*micro-batch* what one forward/backward holds. Derived numbers live in `stoker.batch.plan`.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from stoker.config.algorithm import RECIPES, Algorithm
from stoker.config.base import (
    BelowOne,
    Dtype,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    PositiveIntOrAuto,
    Section,
    Text,
)
from stoker.config.model import Lora, Model, Reference
from stoker.config.reward import Reward
from stoker.config.schedule import Schedule
from stoker.config.task import Source, Task, Validation, ValidationSet
from stoker.errors import ConfigError

__all__ = [
    "Algorithm",
    "Checkpoint",
    "Critic",
    "Dtype",
    "Kl",
    "Lora",
    "Model",
    "Optimizer",
    "Record",
    "Reference",
    "Reward",
    "RunConfig",
    "Sampling",
    "Schedule",
    "Source",
    "Stop",
    "Task",
    "Update",
    "Validation",
    "ValidationSet",
    "WarmStart",
]


class WarmStart(Section):
    """Supervised learning on the task's own answers before RL (0 updates: none)."""

    updates: NonNegativeInt = 0
    """Optimizer steps; 0: no warm start."""
    examples_per_update: PositiveInt = 64
    """Prompt-and-answer rows behind one optimizer step."""
    learning_rate: Positive = 1e-3
    """The same for every update: no warm-up, no decay."""
    stop_at_loss: NonNegative = 0.0
    """Stop early once the smoothed loss (nats per token) is below this; 0: never."""


class Sampling(Section):
    """How many answers a step draws, and from which distribution."""

    prompts_per_step: PositiveInt = 16
    """Distinct prompts in one step, over all devices."""
    samples_per_prompt: PositiveInt = 8
    """Samples of each prompt in one step: a group."""
    temperature: Annotated[float, Field(ge=0.001, allow_inf_nan=False)] = 1.0
    """Divides the logits before sampling; the trainer's log-probs use the same."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1: no limit. Less: the smallest set of tokens with this probability, renormalised."""
    top_k: NonNegativeInt = 0
    """0: no limit."""
    max_new_tokens: PositiveInt = 256
    """Of one sample, with its stop token."""
    stop: tuple[Text, ...] = ()
    """Strings that end an answer, besides every stop token of the model."""
    concurrent_samples: PositiveInt = 64
    """Samples decoded together (halved, and kept, when memory runs out)."""
    compiled: bool = True
    """On a CPU: decode with functions compiled for its processor, where there is a C++ compiler (Linux; some seconds,
    once) and the model is of a family that stoker decodes itself; false: with PyTorch's operators alone."""


class Kl(Section):
    """The leash on the distance from the reference."""

    coefficient: NonNegative = 0.04
    """0: no leash, and no reference model in memory; so by default for algorithms whose paper has none
    (dr_grpo, dapo, gspo, cispo, sapo)."""
    estimator: Literal["default", "k1", "k2", "k3"] = "default"
    """default: k1 in the reward, k2 in the loss."""
    placement: Literal["default", "reward", "loss"] = "default"
    """default: the algorithm's: reward for ppo, rloo, remax and reinforce_plus_plus, loss for the others."""
    level: Literal["token", "sequence"] = "token"
    """Charge each token its own part, or each answer the sum over its tokens (docs/algorithms.md)."""
    adaptive: bool = False
    """The coefficient follows the measured KL, towards `target`; false: it stays."""
    target: Positive = 6.0
    """Adaptive: nats per sequence, above the step-0 value."""
    horizon_samples: NonNegativeInt = 0
    """Adaptive: samples over which the coefficient moves; 0: 5 % of the run's samples."""

    def conflict(self, samples_per_step: int) -> str | None:
        """What makes an adaptive leash impossible, and the way out."""
        if self.adaptive and not self.coefficient:
            return "kl.adaptive = true has nothing to adapt at kl.coefficient = 0: set one above 0"
        if self.adaptive and 0 < 5 * self.horizon_samples <= samples_per_step:  # see `rl.kl.AdaptiveKl`
            return (
                f"kl.horizon_samples = {self.horizon_samples} is too short for steps of {samples_per_step} samples: "
                f"set it above {samples_per_step // 5}, better to several steps' worth"
            )
        return None


class Optimizer(Section):
    """The update rule and its learning-rate schedule (by samples seen)."""

    name: Literal["adamw", "sgd", "adafactor"] = "adamw"
    """AdamW keeps two numbers a parameter, SGD with momentum one, Adafactor far fewer."""
    learning_rate: Positive = 1e-6
    """At the peak, after warm-up."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """AdamW only."""
    eps: Positive = 1e-8
    """AdamW only."""
    momentum: Fraction = 0.9
    """SGD only."""
    weight_decay: NonNegative = 0.0
    """Decoupled: weights shrink by this times the learning rate in each update."""
    max_grad_norm: NonNegative = 1.0
    """0: no clipping."""
    warmup_fraction: Fraction = 0.03
    """Share of the run's samples over which the learning rate rises linearly."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls from its peak to the end of the run."""
    final_fraction: Fraction = 0.1
    """Learning rate at the end of a decay, relative to the peak."""
    skip_grad_norm_ratio: NonNegative = 0.0
    """Skip an update whose gradient norm exceeds this many running medians (prompt ids are named); 0: never."""
    warmup_stop_ratio: NonNegative = 5.0
    """End the run where, in the warm-up, a step's gradient norm exceeds this many running medians; 0: never."""


class Critic(Section):
    """PPO's value model."""

    path: str = ""
    """Empty: start from the policy."""
    optimizer: Optimizer = Optimizer(learning_rate=1e-5, warmup_fraction=0.0)
    warmup_steps: NonNegativeInt = 0
    """Steps at the start that train the critic alone."""


class Update(Section):
    """How a step's samples become optimizer steps and micro-batches."""

    samples_per_update: NonNegativeInt = 0
    """Samples behind one optimizer step, over all micro-batches and ranks; 0: all samples of the step."""
    epochs_per_step: PositiveInt = 1
    """Passes over a step's samples (PPO: 1-4)."""
    tokens_per_microbatch: PositiveIntOrAuto = 4096
    """Ceiling on padded tokens in one forward/backward; changes memory and speed, never the gradient. `auto`: the most
    that memory holds, found when the run starts by trying steps in processes of their own, and kept for its life."""
    logits_per_chunk: PositiveInt = 1024
    """Positions whose vocabulary logits are in memory at once."""
    activation_gib: NonNegative | None = None
    """GiB of activations that the layers of one micro-batch may keep for its backward pass: the first layers, as many
    as it takes, keep only their input and are computed again. Changes memory and speed, never the gradient. 0: all
    layers; left out: none."""
    compiled: bool = True
    """On a CPU: attention's backward pass, sums of gradients and, of the families that stoker decodes itself, norms and
    gates by functions compiled for its processor, where there is a C++ compiler (Linux); false: PyTorch's operators."""

    @property
    def microbatch_tokens(self) -> int:
        """`tokens_per_microbatch` as a number. Raises ConfigError while it is still to be found."""
        if self.tokens_per_microbatch == "auto":
            raise ConfigError(
                "update.tokens_per_microbatch = 'auto' becomes a number when a run starts (stoker train); here give one"
            )
        return self.tokens_per_microbatch


class Stop(Section):
    """When the run ends."""

    steps: PositiveInt = 100
    """Rollouts with their updates."""
    max_nonfinite_updates: PositiveInt = 3
    """Stop after this many updates in a row with a NaN or infinite loss or gradient."""


class Checkpoint(Section):
    """How often the state is saved and how many saves are kept."""

    every_steps: NonNegativeInt = 0
    """0: as often as keeps saving within 2 % of the time, and at the end."""
    keep: PositiveInt = 2
    """Complete checkpoints kept; older ones are removed."""


class Record(Section):
    """What is written beside the metrics."""

    samples_every_steps: NonNegativeInt = 1
    """Write the step's samples to samples/step_N.jsonl.gz; 0: never."""
    noise_every_steps: NonNegativeInt = 8
    """Measure the gradient's noise scale in the first update of every so many steps (docs/noise.md); 0: never."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()


class RunConfig(Section):
    """One run, whole: what `run.toml` says after overrides."""

    schema_version: Literal[1] = 1
    name: str
    """Folder of the run under runs_dir: letters, digits, `.`, `_`, `-`."""
    runs_dir: Text = "runs"
    """Where run folders are made."""
    seed: int = 0
    """Of random weights, data order and every draw."""
    start_from: str = ""
    """A checkpoint folder whose policy (and critic) weights replace model.path's."""
    model: Model = Model()
    lora: Lora = Lora()
    reference: Reference = Reference()
    task: Task
    validation: Validation = Validation()
    warm_start: WarmStart = WarmStart()
    sampling: Sampling = Sampling()
    rewards: Annotated[tuple[Reward, ...], Field(min_length=1)] = (Reward(function="math"),)
    algorithm: Algorithm = Algorithm()
    kl: Kl = Kl()
    optimizer: Optimizer = Optimizer()
    critic: Critic = Critic()
    update: Update = Update()
    schedule: Schedule = Schedule()
    stop: Stop = Stop()
    checkpoint: Checkpoint = Checkpoint()
    record: Record = Record()

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        step = self.sampling.prompts_per_step * self.sampling.samples_per_prompt
        update = self.update.samples_per_update or step
        if step % update:
            raise ValueError(
                f"update.samples_per_update = {update} does not divide the {step} samples of a step "
                f"({self.sampling.prompts_per_step} prompts x {self.sampling.samples_per_prompt}); "
                f"use a divisor of {step}"
            )
        algorithm, samples = self.algorithm, self.sampling.samples_per_prompt
        if samples < 2 and (algorithm.compares_samples or algorithm.advantage_scale == "group"):
            raise ValueError(
                f"algorithm.name = '{algorithm.name}' compares the samples of one prompt (advantage = "
                f"'{algorithm.advantage}', advantage_scale = '{algorithm.advantage_scale}'): set "
                "sampling.samples_per_prompt >= 2"
            )
        leashed_by_token = self.kl_placement == "reward" and self.kl.level == "token" and self.kl.coefficient
        if algorithm.ratio == "sequence" and leashed_by_token:
            raise ValueError(
                "algorithm.ratio = 'sequence' needs one advantage for the whole answer, and kl.placement = 'reward' "
                "charges each token: set kl.level = 'sequence', or kl.placement = 'loss'"
            )
        if self.kl_placement == "reward" and self.kl.estimator in ("k2", "k3"):
            raise ValueError(
                "kl.placement = 'reward' (the default of ppo and its like) is only right with kl.estimator = 'k1' "
                "(k2 and k3 there have the wrong gradient): use 'k1', or kl.placement = 'loss'"
            )
        if self.kl_placement == "loss" and self.kl.estimator == "k1":
            raise ValueError(
                "kl.estimator = 'k1' in the loss (the default of grpo and its kin) has no gradient but that of "
                "its importance weight, which is noisier than k2's: use 'k2' (or 'k3'), or kl.placement = 'reward'"
            )
        measures = bool(self.record.noise_every_steps and not self.update.samples_per_update)
        conflict = (
            self.schedule.conflict(self.sampling.prompts_per_step, samples, self.update.samples_per_update)
            or self.schedule.undecided(self.optimizer.decay, self.validation.regular, measures)
            or self.kl.conflict(self.schedule.most(self.sampling.prompts_per_step) * samples)
            or self.lora.conflict(algorithm.needs_critic, self.model, self.reference, self.start_from)
        )
        if conflict:
            raise ValueError(conflict)
        return self

    @property
    def kl_placement(self) -> Literal["reward", "loss"]:
        """Where the leash acts, the algorithm's default resolved."""
        if self.kl.placement == "default":
            return "reward" if RECIPES[self.algorithm.name].leash == "reward" else "loss"
        return self.kl.placement
