"""Trainings that are compared begin with the same weights, where they have the same seed."""

import torch

from stoker.batch.target import Target
from stoker.errors import ConfigError

__all__ = ["FirstWeights"]


class FirstWeights:
    """What each seed began with, to hold its next training against."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[str, ...]] = {}

    @property
    def same(self) -> bool:
        """Several seeds began alike."""
        return len(self._first) > 1 and len(set(self._first.values())) == 1

    def noted(self, seed: int, target: Target) -> Target:
        """The same target, before it is trained. ConfigError where its weights aren't those that the seed began with
        before.
        """
        with torch.no_grad():
            sums = tuple(repr(float(weight.double().sum())) for weight in target.weights())  # as words, NaN is NaN
        if self._first.setdefault(seed, sums) != sums:
            raise ConfigError(
                f"two trainings with seed {seed} begin with different weights, so that they can't be compared: the "
                "function that makes the target gives a model that was trained before, or draws it from random numbers "
                "of its own. Make the model in it, anew each time, from the global ones of torch, numpy or Python"
            )
        return target
