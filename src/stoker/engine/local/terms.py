"""What the losses see of a micro-batch, all (B, T): its rows' own columns beside what a model says of its tokens."""

import numpy as np
import torch
from torch import Tensor

from stoker.engine.local.chunked import Scores
from stoker.engine.local.layout import Microbatch
from stoker.rl.losses import Terms

__all__ = ["column", "policy_terms", "value_terms"]


def policy_terms(micro: Microbatch, scores: Scores) -> Terms:
    """`scores` are of the scored tokens, (N,)."""
    given = ("old_logprobs", "sampler_logprobs", "reference_logprobs", "advantages")
    known = {name: _if_given(micro, name) for name in given}
    return Terms(column(micro, "mask"), micro.spread(scores.logprobs), micro.spread(scores.entropy), **known)


def value_terms(micro: Microbatch, values: Tensor) -> Terms:
    """`values` are of the states before the scored tokens, (N,)."""
    old_values, returns = (_if_given(micro, name) for name in ("old_values", "returns"))
    return Terms(column(micro, "mask"), values=micro.spread(values), old_values=old_values, returns=returns)


def column(micro: Microbatch, name: str) -> Tensor:
    """A field of the rows on the device, 0 behind each row's end."""
    values = [getattr(row, name) for row in micro.rows]
    padded = np.zeros(micro.shape, dtype=values[0].dtype)
    for line, value in zip(padded, values, strict=True):
        line[: len(value)] = value
    return torch.from_numpy(padded).to(micro.token_ids.device)


def _if_given(micro: Microbatch, name: str) -> Tensor | None:
    return None if any(getattr(row, name) is None for row in micro.rows) else column(micro, name)
