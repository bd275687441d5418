"""The KL to the reference as a run has it: estimator and place, defaults resolved."""

from dataclasses import dataclass

from stoker.config.schema import RunConfig

__all__ = ["Leash", "describe", "leash"]


@dataclass(frozen=True)
class Leash:
    """How the KL to the reference enters: estimator and place, defaults resolved."""

    estimator: str
    in_reward: bool


def leash(config: RunConfig) -> Leash:
    """k1 in the reward for PPO and its like, k2 as a loss for GRPO's kin, unless the run file says otherwise."""
    in_reward = config.kl_placement == "reward"
    estimator = config.kl.estimator
    if estimator == "default":
        estimator = "k1" if in_reward else "k2"
    return Leash(estimator, in_reward)


def describe(config: RunConfig) -> str:
    """The leash in a line."""
    if not config.kl.coefficient:
        return "KL to the reference: none (kl.coefficient = 0)"
    pull = leash(config)
    place = "the reward" if pull.in_reward else "the loss"
    adaptive = f", adapted towards {config.kl.target:g} nats per sequence" if config.kl.adaptive else ""
    return (
        f"KL to the reference: {config.kl.coefficient:g} x {pull.estimator} in {place}, by {config.kl.level}{adaptive}"
    )
