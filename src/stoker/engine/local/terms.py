"""What the losses see of a micro-batch, all (B, T): its rows' own columns beside what a model says of its tokens."""

from torch import Tensor

from stoker.engine.local.chunked import Scores
from stoker.engine.local.layout import Microbatch
from stoker.rl.losses import Terms

__all__ = ["policy_terms", "value_terms"]


def policy_terms(micro: Microbatch, scores: Scores) -> Terms:
    """`scores` are of the scored tokens, (N,)."""
    names = ("old_logprobs", "sampler_logprobs", "reference_logprobs", "advantages")
    known = {name: micro.known(name) for name in names}
    return Terms(micro.column("mask"), micro.spread(scores.logprobs), micro.spread(scores.entropy), **known)


def value_terms(micro: Microbatch, values: Tensor) -> Terms:
    """`values` are of the states before the scored tokens, (N,)."""
    known = {name: micro.known(name) for name in ("old_values", "returns")}
    return Terms(micro.column("mask"), values=micro.spread(values), **known)
