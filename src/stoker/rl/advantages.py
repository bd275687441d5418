"""Advantages: how much better a token's answer did than expected. Numpy in, numpy out, no state.

Token arrays are (..., T): one row or a padded batch. `mask` is True on tokens that count: written by
the model, in a sample that stays. Whatever stands elsewhere (padding, tool output, NaN) is never read.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["deviation", "gae", "group_relative", "reward_to_go", "token_rewards", "whiten"]

Array = NDArray[np.floating[Any]]
Mask = NDArray[np.bool_]
Scale = Literal["group", "batch", "none"]

ROUNDING = 1e-6
"""Relative spread below which values are equal: 0.1 + 0.2 and 0.3 must not become advantages of +-1."""


def deviation(values: Array) -> float:
    """Sample standard deviation (n - 1); exactly 0 for fewer than two values or a spread of mere rounding."""
    if values.size < 2 or np.ptp(values) <= ROUNDING * np.abs(values).max():
        return 0.0
    return float(values.std(ddof=1))


def group_relative(rewards: Sequence[Sequence[float | None]], scale: Scale = "group") -> list[Array]:
    """Reward minus its group's mean, by group (GRPO: Shao et al. 2024, arXiv 2402.03300).

    `scale` divides by the std of the group, of all rewards of the step (Liu et al. 2025, arXiv 2508.08221)
    or not at all (Liu et al. 2025, arXiv 2503.20783). None marks a sample that leaves: it is in no
    statistic and gets 0. So does every sample of a group of equals, exactly.
    """
    groups = [np.array([r for r in group if r is not None], dtype=np.float64) for group in rewards]
    of_step = deviation(np.concatenate([*groups, np.empty(0)]))
    result: list[Array] = []
    for group, staying in zip(rewards, groups, strict=True):
        of_group = deviation(staying)
        advantages = np.zeros(len(group))
        if of_group > 0:
            divisor = {"group": of_group, "batch": of_step, "none": 1.0}[scale]
            advantages[[r is not None for r in group]] = (staying - staying.mean()) / divisor
        result.append(advantages)
    return result


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
