"""A tiny policy whose gradients can all be enumerated: what the noise of groups is, and draws of it.

Four prompts, each with a softmax over three actions, in groups of n samples. Every group there is (3^n for each prompt)
is listed with its probability, so |G|^2, the variance between prompts and within their groups are exact sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from stoker.config.load import from_dict
from stoker.rl.advantages import Scale, sample_advantages
from stoker.rl.noise import GroupNoise, baseline_factor, from_groups, to_metrics

__all__ = ["Policy", "Truth", "runs"]

Floats = NDArray[np.float64]

FEATURES = np.array([[1.0, 0.2], [0.9, -0.4], [0.7, 0.6], [1.1, 0.1]])
POLICY = np.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.4, 0.4, 0.2], [0.6, 0.2, 0.2]])
REWARDS = np.array([[1.0, 0.0, 0.0], [1.0, 0.5, 0.0], [1.0, 0.0, 0.3], [0.7, 0.0, 0.0]])
"""By prompt: (4, 2) features, (4, 3) probabilities of the actions and what they earn. Logits are a matrix times the
features, so the gradient of a sample\'s log-prob is (onehot - probabilities) x features, 6 numbers.
"""


@dataclass(frozen=True)
class Truth:
    """What the enumeration gives."""

    trace: float
    signal: float
    between: float
    within: float

    @property
    def scale(self) -> float:
        return self.trace / self.signal


class Policy:
    """With one way to make advantages; `first`, `second` (groups there are, 6): what the halves of each add to it."""

    def __init__(self, samples: int, advantage: str, scale: Scale = "none") -> None:
        run = {
            "name": "tiny",
            "task": {"sources": [{"path": "none.jsonl"}]},
            "sampling": {"samples_per_prompt": samples},
        }
        algorithm = {"advantage": advantage, "advantage_scale": scale}
        self.factor = baseline_factor(from_dict(run | {"algorithm": algorithm}))
        actions = np.array(list(product(range(3), repeat=samples)))  # (3^n, n)
        grads = (np.eye(3) - POLICY[:, None, :])[..., None] * FEATURES[:, None, None, :]  # (4, 3, 3, 2)
        of_action = grads.reshape(4, 3, 6)
        halves, chances = [], []
        for prompt in range(4):
            worth = sample_advantages(REWARDS[prompt][actions], name=advantage, scale=scale)
            each = worth[..., None] * of_action[prompt][actions] / samples  # (3^n, n, 6)
            halves.append((each[:, ::2].sum(1), each[:, 1::2].sum(1)))
            chances.append(POLICY[prompt][actions].prod(1) / 4)
        self.first = np.concatenate([first for first, _ in halves])
        self.second = np.concatenate([second for _, second in halves])
        self.chances = np.concatenate(chances)
        self.samples = samples

    def truth(self) -> Truth:
        """Exact sums over every group there is."""
        group = (self.first + self.second).reshape(4, -1, 6)
        chances = self.chances.reshape(4, -1, 1)
        of_prompt = (group * chances).sum(1) / chances.sum(1)  # (4, 6)
        mean = of_prompt.mean(0)
        between = float(((of_prompt - mean) ** 2).sum(1).mean())
        within = float((chances * (group - of_prompt[:, None]) ** 2).sum())
        return Truth(between + within, float(mean @ mean), between, within)

    def draw(self, rng: np.random.Generator, updates: int, prompts: int) -> tuple[Floats, Floats]:
        """(updates, prompts, 6): the halves of each drawn group."""
        drawn = rng.choice(len(self.chances), size=(updates, prompts), p=self.chances)
        return self.first[drawn], self.second[drawn]


def runs(
    policy: Policy, count: int, updates: int, prompts: int, parts: int, smoothing: float, seed: int
) -> Iterator[GroupNoise]:
    """Meters of `count` runs, each update in `parts` of equally many groups."""
    rng = np.random.default_rng(seed)
    first_share = (policy.samples + 1) // 2 / policy.samples / prompts
    shares = [[(first_share, 1 / prompts - first_share)] * (prompts // parts)] * parts
    for _ in range(count):
        first, second = (
            half.reshape(updates, parts, -1, 6).sum(2) / prompts for half in policy.draw(rng, updates, prompts)
        )
        both = first + second
        squared, products = (both**2).sum(2).tolist(), (first * second).sum(2).tolist()
        whole = (both.sum(1) ** 2).sum(1).tolist()
        meter = GroupNoise(smoothing)
        for of_update in zip(squared, products, whole, strict=True):
            meter.add(to_metrics(from_groups(shares, *of_update, policy.factor)))
        yield meter
