"""Held-out evaluation: how good is the policy, how sure are we, and has it passed its best."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from stoker.config import schema
from stoker.rl.ports import RewardPort, Sampler
from stoker.rl.sampling import draw, draw_seed, greedy_params, groups_by_prompt, sampling_params
from stoker.rl.types import Group, Prompt, Scored

__all__ = ["evaluate", "pass_at_k", "past_its_best", "standard_error", "summarise"]


def pass_at_k(samples: int, solved: int, k: int) -> float:
    """Chance that k of the samples hold a solved one: 1 - C(n-c, k)/C(n, k) (Chen et al. 2021, arXiv 2107.03374)."""
    if samples - solved < k:
        return 1.0
    return 1.0 - math.comb(samples - solved, k) / math.comb(samples, k)


def past_its_best(rewards: Sequence[float], errors: Sequence[float], patience: int) -> bool:
    """True once the last `patience` evaluations all lie below the best one by more than its standard error."""
    if patience == 0 or len(rewards) <= patience:
        return False
    best = int(np.argmax(rewards))
    floor = rewards[best] - errors[best]
    return all(reward < floor for reward in rewards[-patience:])


def summarise(groups: Sequence[Group], solved: Callable[[Scored], bool]) -> dict[str, float]:
    """Accuracy with its standard error, reward, and apart: unparsed, truncated, wrong (shares of all samples).

    `wrong` is neither solved nor unparsed; `truncated` overlaps them all. Samples of one prompt are not
    independent, so the standard errors are over prompts.
    """
    samples = [one for group in groups for one in group.scored]
    rewards = [one.reward for one in samples if one.reward is not None]
    right = np.array([[solved(one) for one in group.scored] for group in groups], dtype=np.float64)  # (prompts, n)
    by_prompt = right.mean(axis=1)
    reward_by_prompt = [
        float(np.mean([one.reward for one in group.scored if one.reward is not None]))
        for group in groups
        if any(one.reward is not None for one in group.scored)
    ]
    summary = {
        "accuracy": float(right.mean()),
        "accuracy_error": standard_error(by_prompt),
        "reward": float(np.mean(rewards)) if rewards else 0.0,
        "reward_error": standard_error(np.array(reward_by_prompt)),
        "unparsed": float(np.mean([one.parsed is False for one in samples])),
        "wrong": float(np.mean([not solved(one) and one.parsed is not False for one in samples])),
        "truncated": float(np.mean([one.sample.truncated for one in samples])),
        "tokens": float(np.mean([len(one.sample.token_ids) for one in samples])),
        "prompts": float(len(groups)),
    }
    n = right.shape[1]
    for k in (2**i for i in range(1, n.bit_length())):
        summary[f"pass@{k}"] = float(np.mean([pass_at_k(n, int(c), k) for c in right.sum(axis=1)]))
    return summary


def standard_error(values: NDArray[np.float64]) -> float:
    """Of the mean of independent values; 0 for fewer than two."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def evaluate(
    sampler: Sampler,
    reward: RewardPort,
    sets: Mapping[str, Sequence[Prompt]],
    config: schema.RunConfig,
    solved: Callable[[Scored], bool],
    step: int,
) -> tuple[dict[str, float], dict[str, list[Group]]]:
    """Metrics `eval/<set>/<name>` and the groups behind them, greedy or over several samples per prompt."""
    n = config.validation.samples_per_prompt
    params = greedy_params(config.sampling) if n == 1 else sampling_params(config.sampling)
    metrics: dict[str, float] = {}
    groups: dict[str, list[Group]] = {}
    for name, prompts in sets.items():
        seed = draw_seed(config.seed, f"eval/{name}", 0)
        samples = draw(sampler, prompts, n, params, seed, group_done=partial(reward.begin, step=step))
        groups[name] = groups_by_prompt(reward(samples, step))
        metrics |= {f"eval/{name}/{key}": value for key, value in summarise(groups[name], solved).items()}
    return metrics, groups
