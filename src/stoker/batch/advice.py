"""Warnings about batch numbers, each with the reason and a way out. No torch here."""

from collections.abc import Iterator

from stoker.batch.ranges import remarks
from stoker.config.algorithm import same_as_other
from stoker.config.schema import RunConfig

__all__ = ["advise", "learning_rate_range"]

FEW_PROMPTS, VERY_FEW_PROMPTS = 16, 8
FEW_SAMPLES = 4
MANY_EPOCHS = 4
WARMUP = (0.02, 0.05)
SPARSE_REWARD_LAMBDA = (0.95, 0.98)
LORA_RATE = 10.0
"""Adapters stand about ten times the learning rate of all weights, nearly whatever the rank, where alpha is a constant
(Schulman et al. 2025, "LoRA Without Regret")."""
_7B = 7e9
_SMALLEST = 10**6
"""Models below a million parameters are not told apart."""


def advise(config: RunConfig, parameters: int | None) -> Iterator[str]:
    """What is unusual in this run's batch numbers; `parameters` is the policy's size where it is known."""
    yield from _sampling(config)
    yield from _update(config)
    yield from _warmup(config)
    yield from _learning_rate(config, parameters)
    yield from _algorithm(config)
    if config.algorithm.needs_critic:
        yield from _discounting(config)


def learning_rate_range(parameters: int) -> tuple[float, float]:
    """Usual peak learning rates of AdamW for RL on all weights of a model with so many parameters.

    1e-6 to 5e-6 is usual around 7B. Smaller models take more: muP (Yang et al. 2022, arXiv
    2203.03466) has Adam's rate for hidden matrices fall as 1/width, and N grows between width^2
    (depth fixed) and width^3 (depth in proportion), so the rate goes as N^-1/2 to N^-1/3; GPT-3's
    table (Brown et al. 2020, arXiv 2005.14165) falls as N^-0.40 from 125M to 6.7B and N^-0.32 to
    175B. Of the two exponents each end takes the one that widens the range: the further from 7B,
    the less is claimed.
    """
    ratio = _7B / max(parameters, _SMALLEST)
    factors = (ratio ** (1 / 3), ratio**0.5)
    return 1e-6 * min(factors), 5e-6 * max(factors)


def _sampling(config: RunConfig) -> Iterator[str]:
    prompts, samples = config.sampling.prompts_per_step, config.sampling.samples_per_prompt
    if prompts < FEW_PROMPTS:
        strength = "far too few" if prompts < VERY_FEW_PROMPTS else "few"
        yield (
            f"sampling.prompts_per_step = {prompts}: {strength} distinct prompts behind a step, so its gradient "
            f"follows those prompts; {FEW_PROMPTS} or more are usual. At the same {prompts * samples} samples per "
            "step, lower sampling.samples_per_prompt instead"
        )
    if samples < FEW_SAMPLES and config.algorithm.compares_samples:
        yield (
            f"sampling.samples_per_prompt = {samples}: a baseline over so few samples is noisy, and groups without "
            f"contrast are frequent; {FEW_SAMPLES} is the floor unless rewards are dense"
        )
    longest = config.task.max_prompt_tokens + config.sampling.max_new_tokens
    ceiling = config.update.tokens_per_microbatch
    if ceiling != "auto" and longest > ceiling:
        yield (
            f"update.tokens_per_microbatch = {ceiling}: the longest possible sample has "
            f"{longest} tokens ({config.task.max_prompt_tokens} of prompt + {config.sampling.max_new_tokens} new) and "
            f"would not fit; set it to at least {longest}, or lower task.max_prompt_tokens"
        )


def _update(config: RunConfig) -> Iterator[str]:
    epochs, per_update = config.update.epochs_per_step, config.update.samples_per_update
    if epochs > MANY_EPOCHS:
        yield (
            f"update.epochs_per_step = {epochs}: after more than {MANY_EPOCHS} passes the policy has left the one that "
            "sampled, and clipping hides it; 1 to 4 are usual"
        )
    if per_update % config.sampling.samples_per_prompt:
        yield (
            f"update.samples_per_update = {per_update} splits groups of {config.sampling.samples_per_prompt}: one "
            "prompt's samples push in different updates; a multiple of "
            f"{config.sampling.samples_per_prompt} keeps them together"
        )
    warm = config.warm_start
    if warm.updates and not config.model.from_scratch:
        for remark in remarks("finetuning", all_devices=warm.examples_per_update):
            yield f"warm_start.examples_per_update = {warm.examples_per_update}: {remark}"


def _algorithm(config: RunConfig) -> Iterator[str]:
    algorithm, sampling = config.algorithm, config.sampling
    per_step = sampling.prompts_per_step * sampling.samples_per_prompt
    several = config.update.epochs_per_step > 1 or config.update.samples_per_update not in (0, per_step)
    if algorithm.loss == "reinforce" and several:
        yield (
            "algorithm.loss = 'reinforce' doesn't clip: after a step's first update its importance weights can grow "
            "without bound. Take one update a step (update.samples_per_update = 0, update.epochs_per_step = 1), or "
            "algorithm.loss = 'clip'"
        )
    if (other := same_as_other(algorithm)) is not None:
        yield (
            f"every key of [algorithm] but its name is that of '{other}', so this run is {other}: set algorithm.name = "
            f"'{other}', or take out the keys that should be {algorithm.name}'s"
        )


def _warmup(config: RunConfig) -> Iterator[str]:
    low, high = WARMUP
    fraction = config.optimizer.warmup_fraction
    if not low <= fraction <= high:
        effect = (
            "the rate is full before the gradient's scale is known"
            if fraction < low
            else "much of the run is spent slow"
        )
        yield (f"optimizer.warmup_fraction = {fraction:g}: {low:.0%} to {high:.0%} of the run are usual; {effect}")


def _learning_rate(config: RunConfig, parameters: int | None) -> Iterator[str]:
    """Only for AdamW: the ranges are of Adam's normalised steps. `parameters`: with adapters, those of their base."""
    if config.optimizer.name != "adamw":
        return
    rate = config.optimizer.learning_rate
    if parameters is None:
        low, high = learning_rate_range(int(_7B))[0], learning_rate_range(_SMALLEST)[1]
        what = "any model from a million to 7B parameters"
    else:
        low, high = learning_rate_range(parameters)
        what = f"a model of {_size(parameters)} parameters"
    if config.lora.rank:
        low, high, what = (
            low * LORA_RATE,
            high * LORA_RATE,
            f"adapters ({LORA_RATE:.0f} times that of all weights) of {what}",
        )
    if rate < low:
        yield (
            f"optimizer.learning_rate = {rate:g}: under the {low:.1g} to {high:.1g} usual in RL for {what}; "
            "the run may stall"
        )
    elif rate > high:
        yield (
            f"optimizer.learning_rate = {rate:g}: over the {low:.1g} to {high:.1g} usual in RL for {what} "
            "(an order below supervised training); the policy may drift or collapse"
        )


def _discounting(config: RunConfig) -> Iterator[str]:
    gamma, tokens = config.algorithm.gamma, config.sampling.max_new_tokens
    left = gamma**tokens
    if left < 0.5:
        yield (
            f"algorithm.gamma = {gamma:g} is per token: over {tokens} tokens {left:.1%} of an end reward reach the "
            "first one; use 1 for single-turn answers"
        )
    if config.algorithm.gae_lambda < 0.9:
        low, high = SPARSE_REWARD_LAMBDA
        yield (
            f"algorithm.gae_lambda = {config.algorithm.gae_lambda:g}: {low} to {high} suit one reward at the "
            "end of an answer, about 0.9 a reward at every step"
        )


def _size(parameters: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{name}"
    return str(parameters)
