"""The losses, as pure functions of (B, T) tensors: a token's log-prob in, its loss out.

A loss never averages. Each row carries weights with the update's one denominator already in them
(`rl.batches.weigh`), so the update's loss is sum(weights * loss), however it is cut into micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from stoker.errors import RunError
from stoker.rl.kl import importance, k3, kl_loss
from stoker.rl.types import Objective

__all__ = ["LOSSES", "Metrics", "Terms", "evaluate", "policy", "sft", "value"]

Metrics = dict[str, Tensor]
"""Per-token numbers (B, T), detached, to be averaged over the mask."""


@dataclass(frozen=True)
class Terms:
    """What a loss may need, all (B, T); None: not at hand. Gradients flow to logprobs, entropy and values."""

    mask: Tensor
    """Bool: tokens that count. Elsewhere anything may stand, NaN included."""
    logprobs: Tensor | None = None
    """Of the tokens under the sampled distribution, by the model being trained."""
    entropy: Tensor | None = None
    """Of the full distribution at the sampling temperature, in nats."""
    old_logprobs: Tensor | None = None
    """By the policy that began the step; None: the policy hasn't moved, so the current ones, detached."""
    sampler_logprobs: Tensor | None = None
    reference_logprobs: Tensor | None = None
    advantages: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None

    def need(self, name: str) -> Tensor:
        """The tensor of that name; RunError if it isn't at hand."""
        tensor: Tensor | None = getattr(self, name)
        if tensor is None:
            raise RunError(f"the loss needs {name}, but the batch came without: score its rows before the update")
        return tensor


def policy(terms: Terms, objective: Objective) -> tuple[Tensor, Metrics]:
    """Clipped surrogate (Schulman et al. 2017, arXiv 1707.06347) + KL leash - entropy bonus.

    -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); the two bounds may differ (Yu et al. 2025,
    arXiv 2503.14476).
    """
    logprobs, advantages = terms.need("logprobs"), terms.need("advantages")
    old = logprobs.detach() if terms.old_logprobs is None else terms.old_logprobs
    log_ratio = logprobs - old
    ratio = importance(log_ratio)
    free = ratio * advantages
    clipped = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantages
    loss = -torch.minimum(free, clipped)
    metrics = {"ratio": ratio, "clip_fraction": (clipped < free).to(ratio.dtype), "approx_kl": k3(-log_ratio)}
    if objective.kl_coefficient:
        leash = kl_loss(
            logprobs - terms.need("reference_logprobs"),
            log_ratio,
            terms.mask,
            estimator=objective.kl_estimator,
            level=objective.kl_level,
        )
        loss = loss + objective.kl_coefficient * leash
        metrics["kl_loss"] = leash
    if objective.entropy_coefficient:
        loss = loss - objective.entropy_coefficient * terms.need("entropy")
    return loss, metrics | _observed(terms, logprobs, old)


def _observed(terms: Terms, logprobs: Tensor, old: Tensor) -> Metrics:
    """What is worth logging whatever the objective. `old` is the trainer's view of the policy that sampled."""
    metrics: Metrics = {}
    if terms.sampler_logprobs is not None:
        mismatch = terms.sampler_logprobs - old
        metrics |= {"mismatch_abs": mismatch.abs(), "mismatch_kl": k3(mismatch)}
    if terms.reference_logprobs is not None:
        metrics["reference_kl"] = logprobs - terms.reference_logprobs
    if terms.entropy is not None:
        metrics["entropy"] = terms.entropy
    return metrics


def value(terms: Terms, objective: Objective) -> tuple[Tensor, Metrics]:
    """Half the squared error of the critic; a step of more than value_clip from the old value earns nothing.

    value_coefficient / 2 max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2), as in PPO's code (Huang et
    al. 2022, "The 37 implementation details of PPO").
    """
    values, returns = terms.need("values"), terms.need("returns")
    free = clipped = (values - returns).square()
    if objective.value_clip:
        old = terms.need("old_values")
        near = old + (values - old).clamp(-objective.value_clip, objective.value_clip)
        clipped = (near - returns).square()
    loss = objective.value_coefficient * torch.maximum(free, clipped) / 2
    metrics = {"value": values, "value_error": free, "value_clip_fraction": (clipped > free).to(values.dtype)}
    return loss, metrics


def sft(terms: Terms, objective: Objective) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the given answers, nats per token: the warm start."""
    loss = -terms.need("logprobs")
    return loss, {"nll": loss} if terms.entropy is None else {"nll": loss, "entropy": terms.entropy}


LOSSES: dict[str, Callable[[Terms, Objective], tuple[Tensor, Metrics]]] = {"policy": policy, "value": value, "sft": sft}


def evaluate(terms: Terms, objective: Objective) -> tuple[Tensor, Metrics]:
    """Loss per token and metrics per token, both (B, T) and exactly 0 outside the mask, where no gradient flows either.

    Masked entries are replaced before any arithmetic, not multiplied by 0 after it: 0 * NaN is NaN, and
    so is the gradient of a NaN that a later `where` hides.
    """

    def only_counted(tensor: Tensor) -> Tensor:
        return torch.where(terms.mask, tensor.to(torch.promote_types(tensor.dtype, torch.float32)), 0.0)

    given = {field.name: getattr(terms, field.name) for field in fields(terms) if field.name != "mask"}
    counted = replace(terms, **{name: only_counted(tensor) for name, tensor in given.items() if tensor is not None})
    loss, metrics = LOSSES[objective.loss](counted, objective)
    return only_counted(loss), {name: only_counted(metric.detach()) for name, metric in metrics.items()}
