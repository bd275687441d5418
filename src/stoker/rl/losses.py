"""The losses, as pure functions of (B, T) tensors: a token's log-prob in, its loss out.

A loss never averages. Each row carries weights with the update's one denominator already in them
(`rl.updates.weigh`), so the update's loss is sum(weights * loss), however it is cut into micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache

import torch
from torch import Tensor

from stoker import dotted
from stoker.batch.out_of_memory import is_out_of_memory
from stoker.errors import ConfigError, RunError
from stoker.rl.kl import importance, k3, kl_loss
from stoker.rl.types import Objective

__all__ = [
    "LOSSES",
    "SURROGATES",
    "Metrics",
    "Terms",
    "evaluate",
    "policy",
    "sequence_mean",
    "sft",
    "surrogate",
    "value",
]

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
    """Surrogate of the policy gradient + KL leash - entropy bonus.

    The surrogate sees the ratio of new over old probability: each token's, or for the whole answer that of its
    mean log-ratio (GSPO: Zheng et al. 2025, arXiv 2507.18071). A row must be whole, as it is in every batch.
    """
    logprobs = terms.need("logprobs")
    old = logprobs.detach() if terms.old_logprobs is None else terms.old_logprobs
    log_ratio = logprobs - old
    of_surrogate = sequence_mean(log_ratio, terms.mask) if objective.ratio == "sequence" else log_ratio
    loss, metrics = surrogate(objective.surrogate)(terms, of_surrogate, objective)
    metrics = {"ratio": importance(of_surrogate), "approx_kl": k3(-log_ratio)} | metrics
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


def sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """(B, T): at each token the mean over its row's counted tokens."""
    total = torch.where(mask, values, 0.0).sum(-1, keepdim=True)
    return (total / mask.sum(-1, keepdim=True).clamp(min=1)).expand_as(values)


def clip(terms: Terms, log_ratio: Tensor, objective: Objective) -> tuple[Tensor, Metrics]:
    """Clipped surrogate (Schulman et al. 2017, arXiv 1707.06347): a step outside the clip range earns nothing.

    -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A); the two bounds may differ (Yu et al. 2025,
    arXiv 2503.14476). With a dual clip, where A < 0 never more than -dual_clip A (Ye et al. 2020, arXiv 1912.09729).
    """
    advantages, ratio = terms.need("advantages"), importance(log_ratio)
    free = ratio * advantages
    earned = torch.minimum(free, ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high) * advantages)
    if objective.dual_clip:
        earned = torch.where(advantages < 0, torch.maximum(earned, objective.dual_clip * advantages), earned)
    return -earned, {"clip_fraction": (earned != free).to(ratio.dtype)}


def reinforce(terms: Terms, log_ratio: Tensor, objective: Objective) -> tuple[Tensor, Metrics]:
    """-ratio A, not clipped: the gradient is -A grad log p (Williams 1992), corrected where the policy has moved."""
    return -importance(log_ratio) * terms.need("advantages"), {}


def cispo(terms: Terms, log_ratio: Tensor, objective: Objective) -> tuple[Tensor, Metrics]:
    """-w A log p, w the clipped ratio, detached: no token loses its gradient (MiniMax 2025, arXiv 2506.13585)."""
    ratio = importance(log_ratio).detach()
    weight = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    loss = -weight * terms.need("advantages") * terms.need("logprobs")
    return loss, {"clip_fraction": (weight != ratio).to(ratio.dtype)}


def sapo(terms: Terms, log_ratio: Tensor, objective: Objective) -> tuple[Tensor, Metrics]:
    """-(4 / tau) sigmoid(tau (ratio - 1)) A: a soft gate instead of a clip (Gao et al. 2025, arXiv 2511.20347).

    Its slope is 1 at ratio 1, and fades on both sides; tau is gate_positive where A > 0, else gate_negative.
    """
    advantages, ratio = terms.need("advantages"), importance(log_ratio)
    tau = torch.full_like(ratio, objective.gate_negative).masked_fill(advantages > 0, objective.gate_positive)
    return -4 / tau * torch.sigmoid(tau * (ratio - 1)) * advantages, {}


Surrogate = Callable[[Terms, Tensor, Objective], tuple[Tensor, Metrics]]
"""Terms, log-ratio (B, T) and numbers to loss (B, T) and metrics, of which `clip_fraction` is recorded."""

SURROGATES: dict[str, Surrogate] = {"clip": clip, "reinforce": reinforce, "cispo": cispo, "sapo": sapo}


@cache
def surrogate(name: str) -> Surrogate:
    """By name, or a user's by path: the same arguments, the loss alone returned."""
    if name in SURROGATES:
        return SURROGATES[name]
    own = dotted.load(name, "algorithm.loss", ConfigError)

    def checked(terms: Terms, log_ratio: Tensor, objective: Objective) -> tuple[Tensor, Metrics]:
        try:
            loss = own(terms, log_ratio, objective)
        except Exception as error:
            if is_out_of_memory(error):  # tried again with smaller micro-batches
                raise
            raise RunError(f"loss '{name}' raised\n{dotted.users_traceback(error)}") from error
        if not isinstance(loss, Tensor) or loss.shape != log_ratio.shape:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise RunError(
                f"loss '{name}' returned {found}: a tensor of shape {tuple(log_ratio.shape)} is needed, a value for "
                "each token; masks and means are stoker's"
            )
        if log_ratio.requires_grad and not loss.requires_grad:
            raise RunError(f"loss '{name}' returned a tensor without a gradient: use log_ratio or terms.logprobs")
        return loss, {}

    return checked


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
