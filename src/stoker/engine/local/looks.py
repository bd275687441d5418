"""Looks at an update's gradient sums while they grow: what each part of the update added, for the noise scale.

A difference of two looks is what was added between them, so nothing is hooked into the backward pass, and gradients
that were there before don't count. Of large models each look takes one weight in so many, drawn anew for every update:
products over them, times that many, are products over all weights in expectation.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from stoker.config.schema import RunConfig
from stoker.engine.local.optim import MasterOptimizer
from stoker.rl import noise
from stoker.rl.types import TrainBatch, TrainRow

__all__ = ["Looks", "measured"]

WEIGHTS = 2**22
"""Looked at, at most: four vectors of so many are in memory at once, 64 MiB."""


def measured(
    optimizer: MasterOptimizer,
    batch: TrainBatch,
    seed: int,
    config: RunConfig,
    add: Callable[[Sequence[TrainRow]], None],
) -> dict[str, float]:
    """Have `add` add the gradients of a batch's rows, part by part, and tell what that showed (`noise.to_metrics`)."""
    parts = noise.parts_of(batch.rows, config.algorithm.loss_weighting)
    looks = Looks(optimizer, seed)
    for part in parts:
        for half in part.halves:
            add(half)
            looks.look()
    return noise.to_metrics(looks.sample(parts, noise.baseline_factor(config)) if len(parts) > 1 else None)


class Looks:
    """Of one update, part by part: `look` after each half of a part has been added."""

    def __init__(self, optimizer: MasterOptimizer, seed: int, weights: int = WEIGHTS) -> None:
        self._optimizer = optimizer
        sizes = optimizer.sizes()
        self._stride = _prime_from(math.ceil(sum(sizes) / weights))
        first = int(np.random.default_rng(seed % 2**64).integers(self._stride))
        self._firsts = [(first - sum(sizes[:place])) % self._stride for place in range(len(sizes))]
        self._sizes = sizes
        self._start = self._last = self._now()
        self._half: Tensor | None = None
        self._found: list[Tensor] = []  # of each part: the square of its sum, the product of its halves

    def look(self) -> None:
        """A half has been added."""
        now = self._now()
        added, self._last = now - self._last, now
        if self._half is None:
            self._half = added
            return
        both = self._half + added
        self._found += [both @ both, self._half @ added]
        self._half = None

    def sample(self, parts: Sequence[noise.Part], factor: float) -> noise.GroupSample:
        """What they showed; `parts` are those that were added, in their order."""
        whole = self._last - self._start
        numbers = (torch.stack([whole @ whole, *self._found]).double() * self._stride).tolist()
        return noise.from_groups([part.shares for part in parts], numbers[1::2], numbers[2::2], numbers[0], factor)

    def _now(self) -> Tensor:
        """The sums at the weights that are looked at."""
        gradients = self._optimizer.gradients()
        device = self._optimizer.device
        pieces = [
            torch.zeros(len(range(first, size, self._stride)), device=device)
            if gradient is None
            else gradient.detach().reshape(-1)[first :: self._stride].float()
            for gradient, size, first in zip(gradients, self._sizes, self._firsts, strict=True)
        ]
        return torch.cat(pieces)


def _prime_from(least: int) -> int:
    """The first prime from there on, or 1: hardly a width is a multiple of it, so looks go through all columns."""
    number = least
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number
