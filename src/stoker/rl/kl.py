"""The leash to the reference: KL estimators, the KL term of the loss, and the controller of its coefficient.

For samples from the policy p and d = log p - log q (q: the reference), in nats:

    k1 = d                  unbiased, noisy
    k2 = d^2 / 2            its gradient is that of KL(p || q), exactly
    k3 = exp(-d) - 1 + d    unbiased, never negative; its gradient is that of KL(q || p)

(Schulman 2020, "Approximating KL divergence"). tests/rl/test_kl.py enumerates small vocabularies to show it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from stoker.errors import ConfigError, RunError

__all__ = [
    "ALARM_HIGH",
    "ESTIMATORS",
    "AdaptiveKl",
    "KlState",
    "alarm",
    "default_horizon",
    "importance",
    "k1",
    "k2",
    "k3",
    "kl_loss",
]

ALARM_LOW, ALARM_HIGH = 0.5, 10.0
"""Nats per sequence above step 0 between which a leash is neither too tight nor too loose."""
LOG_RATIO_LIMIT = 20.0
"""exp(20) = 4.9e8 still has a finite gradient, and a ratio beyond it says nothing more."""


def k1(d: Tensor) -> Tensor:
    """The log-ratio itself. The only one that belongs in a reward."""
    return d


def k2(d: Tensor) -> Tensor:
    """Half the squared log-ratio. The default as a loss."""
    return d.square() / 2


def k3(d: Tensor) -> Tensor:
    """exp(-d) - 1 + d, kept finite. Right only if all that q can draw p can, too: top-k must cut both alike."""
    d = d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(-d) + d


ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def importance(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), kept finite."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def kl_loss(d: Tensor, log_ratio: Tensor, mask: Tensor, *, estimator: str, level: str) -> Tensor:
    """The KL part of the loss per token, (B, T), in nats, for samples of an older policy.

    `d` is current minus reference log-prob, `log_ratio` current minus old log-prob (0, but with a
    gradient, on-policy). Level `sequence` estimates from sum(d) and spreads the result evenly over the
    sample's counted tokens, so that a row sums to it: token-level k2 omits a token's effect on later
    states, (sum d)^2 / 2 doesn't.

    Importance weights correct for the older policy. k1 needs a live one: without the weight's gradient
    it has none. k2's and k3's are detached: live, k2's gradient would be wrong and k3's would be that
    of KL(p || q), while on-policy, and in TRL, it is that of KL(q || p); the gradient of a run file must
    not hang on whether the policy has moved yet.
    """
    d, log_ratio = torch.where(mask, d, 0.0), torch.where(mask, log_ratio, 0.0)
    tokens = torch.ones_like(d)
    if level == "sequence":
        d, log_ratio = d.sum(-1, keepdim=True), log_ratio.sum(-1, keepdim=True)  # (B, 1)
        tokens = mask.sum(-1, keepdim=True).clamp(min=1).expand_as(mask)
    weight = importance(log_ratio)
    if estimator != "k1":
        weight = weight.detach()
    return torch.where(mask, weight * ESTIMATORS[estimator](d) / tokens, 0.0)


@dataclass(frozen=True)
class KlState:
    """What the controller remembers; JSON-able by dataclasses.asdict."""

    coefficient: float
    baseline: float | None = None
    """KL at step 0, nats per sequence: not 0 where the reference is another or a quantised model."""


@dataclass(frozen=True)
class AdaptiveKl:
    """Proportional control of the KL coefficient (Ziegler et al. 2019, arXiv 1909.08593).

    KL below the target means that the leash is tighter than asked for, so the coefficient falls; above
    it rises. An observation in, a new state out.
    """

    target: float
    """Nats per sequence above the step-0 value."""
    horizon_samples: int

    def update(self, state: KlState, measured: float, samples: int) -> KlState:
        """The state after a step of `samples` samples whose mean summed KL was `measured` nats per sequence.

        The first measurement is the baseline and moves nothing. Raises ConfigError where the horizon is
        too short for the step: the coefficient could reach 0 and would never come back.
        """
        if samples >= 5 * self.horizon_samples:
            raise ConfigError(
                f"kl.horizon_samples = {self.horizon_samples} is too short for steps of {samples} samples: "
                f"set it above {samples // 5}, better to several steps' worth"
            )
        if not math.isfinite(measured):
            raise RunError(f"the KL to the reference is {measured}: look for NaN or infinite log-probs in the samples")
        if state.baseline is None:
            return replace(state, baseline=measured)
        error = min(max((measured - state.baseline) / self.target - 1, -0.2), 0.2)
        return replace(state, coefficient=state.coefficient * (1 + error * samples / self.horizon_samples))


def default_horizon(run_samples: int, samples_per_step: int) -> int:
    """5 % of the run's samples, and at least one step's, so that a short run's coefficient stays positive."""
    return max(run_samples // 20, samples_per_step)


def alarm(
    state: KlState, measured: float, *, low: float = ALARM_LOW, high: float = ALARM_HIGH
) -> Literal["low", "high"] | None:
    """Is the policy too near to its reference, or too far? None too before there is a baseline."""
    if state.baseline is None:
        return None
    moved = measured - state.baseline
    return "low" if moved < low else "high" if moved > high else None
