"""Bytes of a training by arithmetic: weights, gradients, optimizer states, activations, logits, key-value cache.

Nothing here imports torch: a model is known by its config or by the headers of its checkpoint.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.memory.breakdown import Breakdown
    from stoker.memory.families import shape_of
    from stoker.memory.headers import Checkpoint, read_checkpoint
    from stoker.memory.ladder import Lever, levers
    from stoker.memory.prediction import predict, together
    from stoker.memory.setup import Setup
    from stoker.memory.shape import ModelShape

__all__ = [
    "Breakdown",
    "Checkpoint",
    "Lever",
    "ModelShape",
    "Setup",
    "levers",
    "predict",
    "read_checkpoint",
    "shape_of",
    "together",
]

_HOMES = {
    "Breakdown": "breakdown",
    "Checkpoint": "headers",
    "Lever": "ladder",
    "ModelShape": "shape",
    "Setup": "setup",
    "levers": "ladder",
    "predict": "prediction",
    "read_checkpoint": "headers",
    "shape_of": "families",
    "together": "prediction",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'stoker.memory' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"stoker.memory.{_HOMES[name]}"), name)
