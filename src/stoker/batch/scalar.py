"""What a target's loss must give: one number that can be differentiated."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stoker.errors import ConfigError

__all__ = ["scalar"]


def scalar(found: Any) -> Tensor:
    """The loss as it is. ConfigError for what training couldn't differentiate either, with what to return instead."""
    if not isinstance(found, Tensor):
        raise ConfigError(f"loss(model, batch) gives {_named(found)}, not the scalar that training differentiates")
    if found.numel() != 1:
        raise ConfigError(
            f"loss(model, batch) gives {list(found.shape)} numbers, not the scalar that training differentiates: take "
            "their mean or sum"
        )
    if not found.requires_grad:
        raise ConfigError(
            "loss(model, batch) gives a loss without a gradient: no parameter that is trained takes part in it, or it "
            "was detached or computed under no_grad (a loss that runs its own backward pass must leave that to stoker)"
        )
    return found


def _named(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"a {type(found).__name__} of {', '.join(map(repr, found))}"
    if isinstance(found, tuple | list):
        return f"a {type(found).__name__} of {len(found)}"
    return "None (is a `return` missing?)" if found is None else f"a {type(found).__name__} (no .item() in a loss)"
