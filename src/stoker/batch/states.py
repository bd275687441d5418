"""What an optimizer will keep, found by letting it step over tensors that have shapes and no contents."""

import copy
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["state_bytes"]


def state_bytes(optimizer: torch.optim.Optimizer) -> int | None:
    """Bytes that it holds of the weights it trains, from its second step on; None where it can't step without values.

    A twin of it steps: weights, gradients and states are left alone, and take no memory. Counters aren't counted.
    """
    twin = _twin(optimizer)
    try:
        with torch.no_grad():
            twin.step()
            twin.step()
    except Exception:  # of whatever kind an optimizer of somebody's own has for what it can't do
        return None
    kept = [leaf for leaf in tree_leaves(dict(twin.state)) if isinstance(leaf, Tensor) and leaf.ndim]
    return sum(tensor.nbytes for tensor in kept)


def _twin(optimizer: torch.optim.Optimizer) -> Any:
    """Of the same class and settings, with all that is of a size on the meta device."""
    made: Any = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    vars(made).pop("step", None)  # a scheduler's, which counts the original's steps
    made._optimizer_step_pre_hooks, made._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    made.state, made.param_groups = defaultdict(dict), []
    for group in optimizer.param_groups:
        plain = {key: copy.copy(value) for key, value in group.items() if key != "params"}
        plain |= {key: False for key in ("foreach", "fused", "capturable") if key in plain}
        weights = [_empty(weight) for weight in group["params"]]
        made.param_groups.append(plain | {"params": weights})
        for weight, twin in zip(group["params"], weights, strict=True):
            if weight in optimizer.state:
                made.state[twin] = tree_map(_emptied, optimizer.state[weight])
    return made


def _empty(weight: Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(weight, device="meta"), requires_grad=weight.requires_grad)
    made.grad = torch.empty_like(made) if weight.requires_grad else None
    return made


def _emptied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return copy.copy(value)
    return torch.empty_like(value, device="meta") if value.ndim else value.clone()
