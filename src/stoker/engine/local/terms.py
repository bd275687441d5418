"""What the losses see of a micro-batch, all (B, T): its rows' own columns beside what a model says of its tokens."""

from torch import Tensor

from stoker.engine.local.chunked import Scores
from stoker.engine.local.layout import Microbatch
from stoker.rl.losses import Terms

__all__ = ["policy_terms", "value_terms"]


def policy_terms(micro: Microbatch, scores: Scores) -> Terms:
    """`scores` are of the scored tokens, (N,)."""
    given = ("mask", "old_logprobs", "sampler_logprobs", "reference_logprobs", "advantages")
    known = {name: micro.column(name) for name in given}
    return Terms(logprobs=micro.spread(scores.logprobs), entropy=micro.spread(scores.entropy), **known)


def value_terms(micro: Microbatch, values: Tensor) -> Terms:
    """`values` are of the states before the scored tokens, (N,)."""
    known = {name: micro.column(name) for name in ("mask", "old_values", "returns")}
    return Terms(values=micro.spread(values), **known)
