"""Schedules of the batch: how many examples an update holds, by how far a training is. No torch here."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from stoker.errors import ConfigError

__all__ = ["By", "Progress", "Ramp", "Stages"]

By = Literal["epoch", "step", "samples"]
"""What a schedule goes by: a field of `Progress`."""


@dataclass(frozen=True)
class Progress:
    """How far a training is when an update begins."""

    epoch: int
    """From 0."""
    step: int
    """Updates done, over all epochs."""
    samples: int
    """Examples trained on, over all epochs and ranks."""


@dataclass(frozen=True)
class Stages:
    """`sizes[i]` examples per update from `starts[i]` on.

    `Stages((512, 128), (0, 10))`: large for ten epochs, then small.
    """

    sizes: tuple[int, ...]
    starts: tuple[int, ...] = (0,)
    by: By = "epoch"

    def __post_init__(self) -> None:
        _check_by(self.by)
        if not self.sizes or len(self.sizes) != len(self.starts):
            raise ConfigError(f"{len(self.sizes)} sizes and {len(self.starts)} starts: a start for each size")
        if self.starts[0] != 0 or list(self.starts) != sorted(set(self.starts)):
            raise ConfigError(f"starts = {self.starts}: from 0, each later than the one before")
        if min(self.sizes) < 1:
            raise ConfigError(f"sizes = {self.sizes}: at least 1 example per update")

    def __call__(self, progress: Progress) -> int:
        """Examples of the update that begins."""
        reached: int = getattr(progress, self.by)
        return next(size for size, start in zip(self.sizes[::-1], self.starts[::-1], strict=True) if start <= reached)


@dataclass(frozen=True)
class Ramp:
    """A batch warm-up: examples per update grow (or shrink) evenly from `first` to `last`, reached after `over`."""

    first: int
    last: int
    over: int
    by: By = "samples"
    multiple: int = 1
    """Sizes between the two are rounded down to multiples of it: of the ranks, or of a micro-batch."""

    def __post_init__(self) -> None:
        _check_by(self.by)
        for name in ("first", "last", "over", "multiple"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: at least 1")
        for name in ("first", "last"):
            if getattr(self, name) % self.multiple:
                raise ConfigError(f"{name} = {getattr(self, name)} is not a multiple of {self.multiple}")

    def __call__(self, progress: Progress) -> int:
        """Examples of the update that begins."""
        reached: int = getattr(progress, self.by)
        if reached >= self.over:
            return self.last
        share = reached / self.over
        return math.floor((self.first + (self.last - self.first) * share) / self.multiple) * self.multiple


def _check_by(by: str) -> None:
    if by not in get_args(By):
        raise ConfigError(f"by = {by!r}: one of {', '.join(get_args(By))}")
