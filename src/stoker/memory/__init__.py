"""Bytes of a training by arithmetic: weights, gradients, optimizer states, activations, logits, key-value cache.

Nothing here imports torch: a model is known by its config or by the headers of its checkpoint.
"""

from typing import TYPE_CHECKING

from stoker.lazy import lazy

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

if not TYPE_CHECKING:
    # Of the parts a command needs few.
    __getattr__, __dir__ = lazy(
        __name__,
        {
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
        },
    )
