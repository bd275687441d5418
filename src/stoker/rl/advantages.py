"""Advantages: how much better a token's answer did than expected. Numpy in, numpy out, no state.

Of whole answers, from the rewards of G groups of n samples, (G, n): a baseline (ESTIMATORS) and a scale. Of
tokens: KL penalties and GAE. Token arrays are (..., T): one row or a padded batch. `mask` is True on tokens that
count: written by the model, in a sample that stays. Whatever stands elsewhere (padding, tool output, NaN) is never
read.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker import dotted
from stoker.errors import ConfigError, RunError

__all__ = [
    "ESTIMATORS",
    "Scale",
    "deviation",
    "deviations",
    "estimator",
    "gae",
    "reward_to_go",
    "sample_advantages",
    "token_rewards",
    "whiten",
]

Array = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]
Scale = Literal["group", "batch", "whiten", "none"]

ROUNDING = 1e-6
"""Relative spread below which values are equal: 0.1 + 0.2 and 0.3 must not become advantages of +-1."""


def deviation(values: Array) -> float:
    """Sample standard deviation (n - 1); exactly 0 for fewer than two values or a spread of mere rounding."""
    if values.size < 2 or np.ptp(values) <= ROUNDING * np.abs(values).max():
        return 0.0
    return float(values.std(ddof=1))


def deviations(rewards: Array) -> Array:
    """(G,): the same of each row of (G, n), where NaN marks a sample that left."""
    present = ~np.isnan(rewards)
    values, count = np.where(present, rewards, 0.0), present.sum(axis=1)
    spread = np.where(present, rewards, -np.inf).max(1, initial=-np.inf)
    spread = spread - np.where(present, rewards, np.inf).min(1, initial=np.inf)
    differ = (count > 1) & (spread > ROUNDING * np.abs(values).max(1, initial=0.0))
    squares = (np.where(present, rewards - _means(rewards), 0.0) ** 2).sum(axis=1)
    return np.where(differ, np.sqrt(squares / np.maximum(count - 1, 1)), 0.0)


def _means(rewards: Array) -> Array:
    """(G, 1) over the samples that stay; 0 where none does."""
    present = ~np.isnan(rewards)
    total = np.where(present, rewards, 0.0).sum(axis=1, keepdims=True)
    return np.asarray(total / np.maximum(present.sum(axis=1, keepdims=True), 1))


def _from_group(rewards: Array, greedy: Array | None) -> Array:
    """Minus the group's mean (GRPO: Shao et al. 2024, arXiv 2402.03300); exactly 0 in a group of equals."""
    return np.where(deviations(rewards)[:, None] > 0, rewards - _means(rewards), 0.0)


def _from_others(rewards: Array, greedy: Array | None) -> Array:
    """Minus the mean of the group's others (RLOO: Ahmadian et al. 2024, arXiv 2402.14740).

    r_i - sum_{j != i} r_j / (n - 1) = n / (n - 1) (r_i - mean).
    """
    count = (~np.isnan(rewards)).sum(axis=1, keepdims=True)
    return np.asarray(_from_group(rewards, None) * (count / np.maximum(count - 1, 1)))


def _from_greedy(rewards: Array, greedy: Array | None) -> Array:
    """Minus the greedy answer's reward (ReMax: Li et al. 2023, arXiv 2310.10505); 0 where that has none."""
    if greedy is None:
        raise RunError("advantage = 'greedy' needs a greedy answer of each prompt: the groups came without")
    return rewards - greedy[:, None]


def _as_is(rewards: Array, greedy: Array | None) -> Array:
    """No baseline but what a scale brings (REINFORCE++: Hu et al. 2025, arXiv 2501.03262)."""
    return rewards


Estimator = Callable[[Array, Array | None], Array]
"""Rewards (G, n) of G groups, NaN where a sample left, and the greedy answers' (G,), to advantages (G, n)."""

ESTIMATORS: dict[str, Estimator] = {
    "group": _from_group,
    "leave_one_out": _from_others,
    "greedy": _from_greedy,
    "reward": _as_is,
}


@cache
def estimator(name: str) -> Estimator:
    """By name, or a user's by path: (G, n) rewards to (G, n) advantages, NaN allowed where a reward is NaN."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    own = dotted.load(name, "algorithm.advantage", ConfigError)

    def checked(rewards: Array, greedy: Array | None) -> Array:
        try:
            returned = own(rewards.copy())
        except Exception as error:
            raise RunError(f"advantage '{name}' raised\n{dotted.users_traceback(error)}") from error
        try:
            found = np.asarray(returned, dtype=np.float64)
        except (TypeError, ValueError, RuntimeError) as error:  # the last from a tensor that wants a gradient
            raise RunError(f"advantage '{name}' returned what isn't an array of numbers: {error}") from error
        if found.shape != rewards.shape:
            raise RunError(f"advantage '{name}' returned shape {found.shape} for rewards of shape {rewards.shape}")
        if not np.isfinite(found[~np.isnan(rewards)]).all():
            raise RunError(f"advantage '{name}' returned NaN or infinity for a sample that has a reward")
        return found

    return checked


def sample_advantages(rewards: Array, greedy: Array | None = None, *, name: str = "group", scale: Scale) -> Array:
    """(G, n): how much better each sample did than its baseline. Rewards (G, n), greedy answers' rewards (G,).

    `scale` divides by the std of the group's rewards, or of all rewards of the step (Liu et al. 2025, arXiv
    2508.08221); `none` (Liu et al. 2025, arXiv 2503.20783) and `whiten`, which is of tokens, don't. NaN marks a
    sample that leaves: it is in no statistic and gets 0. Where there is no spread to divide by, all get 0.
    """
    advantages = estimator(name)(rewards, greedy)
    if scale in ("group", "batch"):
        step = np.full(len(rewards), deviation(rewards[~np.isnan(rewards)])) if scale == "batch" else None
        divisor = (deviations(rewards) if step is None else step)[:, None]
        advantages = np.divide(advantages, divisor, out=np.zeros(rewards.shape), where=divisor > 0)
    return np.where(np.isnan(rewards) | np.isnan(advantages), 0.0, advantages)


def token_rewards(
    reward: ArrayLike,
    log_ratio: Array,
    mask: Mask,
    *,
    kl_coefficient: float,
    level: Literal["token", "sequence"] = "token",
) -> Array:
    """(..., T): the sample's reward (...) on its last counted token, minus the KL penalty in nats (k1).

    `log_ratio` is policy minus reference log-prob. Level `token` charges each token for its own part,
    `sequence` charges the last one for the sum. Only k1 has the right gradient here: as a reward its
    score-function gradient is the whole gradient of the reverse KL.
    """
    last = mask & (np.flip(np.cumsum(np.flip(mask, -1), -1), -1) == 1)
    penalty = kl_coefficient * np.where(mask, log_ratio, 0.0)
    if level == "sequence":
        penalty = np.where(last, penalty.sum(-1, keepdims=True), 0.0)
    return np.where(last, np.asarray(reward)[..., None], 0.0) - penalty


def gae(
    rewards: Array, values: Array, mask: Mask, *, gamma: float, lam: float, final_values: ArrayLike = 0.0
) -> tuple[Array, Array]:
    """Generalised advantage estimates and the critic's targets, both (..., T) (Schulman et al. 2015, arXiv 1506.02438).

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1}, where t + 1 is the next
    counted token: others are skipped, undiscounted. `values` are those of the states before each token.
    `final_values` (...) is the value after the last counted token: 0 where the episode ended there, the
    critic's estimate where it was only cut off and no reward was given.
    """
    next_value = np.broadcast_to(np.asarray(final_values, dtype=np.float64), mask.shape[:-1])
    next_advantage = np.zeros(mask.shape[:-1])
    advantages = np.zeros(mask.shape)
    for t in reversed(range(mask.shape[-1])):
        counts = mask[..., t]
        delta = rewards[..., t] + gamma * next_value - values[..., t]
        next_advantage = np.where(counts, delta + gamma * lam * next_advantage, next_advantage)
        next_value = np.where(counts, values[..., t], next_value)
        advantages[..., t] = np.where(counts, next_advantage, 0.0)
    return advantages, np.where(mask, advantages + values, 0.0)


def reward_to_go(rewards: Array, mask: Mask, gamma: float = 1.0) -> Array:
    """(..., T): discounted sum of this and all later counted rewards."""
    return gae(rewards, np.zeros(mask.shape), mask, gamma=gamma, lam=1.0)[0]


def whiten(values: Array, mask: Mask) -> Array:
    """Zero mean, unit variance over all counted tokens; 0 elsewhere, and everywhere where they are equal."""
    counted = values[mask]
    scale = deviation(counted)
    result = np.zeros(values.shape)
    if scale > 0:
        result[mask] = (counted - counted.mean()) / scale
    return result
