"""Means over a training's updates that forget the oldest, with intervals, and to be saved. No torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.batch import student
from stoker.errors import ConfigError

__all__ = ["Interval", "Mean", "Smoothed", "require_keys"]

Interval = tuple[float, float]


@dataclass(frozen=True)
class Mean:
    """A smoothed quantity and its 95 % interval."""

    value: float
    interval: Interval | None
    """None: a single update has no spread."""

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} ({self.interval[0]:.4g} to {self.interval[1]:.4g})"


class Smoothed:
    """Decayed means of numbers that come together, one set an update, and how well they are known.

    Sums about the running means (West 1979), which lose no digits. `keep` is the factor by which an update's weight
    shrinks with each later one; 1 weighs all alike.
    """

    def __init__(self, size: int, keep: float) -> None:
        self.keep = keep
        self.updates = 0
        self.means = [0.0] * size
        self._mass = self._mass_of_squares = 0.0
        self._spread = [[0.0] * size for _ in range(size)]

    def add(self, values: Sequence[float]) -> None:
        """One update's."""
        self.updates += 1
        self._mass = self.keep * self._mass + 1
        self._mass_of_squares = self.keep**2 * self._mass_of_squares + 1
        share = 1 - 1 / self._mass
        away = [value - mean for value, mean in zip(values, self.means, strict=True)]
        self.means = [mean + off / self._mass for mean, off in zip(self.means, away, strict=True)]
        self._spread = [
            [self.keep * spread + share * one * other for spread, other in zip(row, away, strict=True)]
            for row, one in zip(self._spread, away, strict=True)
        ]

    @property
    def effective_updates(self) -> float:
        """As many equally weighted ones tell as much."""
        return self._mass**2 / self._mass_of_squares if self.updates else 0.0

    @property
    def quantile(self) -> float:
        """Student's, two-sided 95 %."""
        return student.quantile(max(1.0, self.effective_updates - 1))

    def covariance(self) -> list[list[float]]:
        """Of the means: updates are independent draws given the weights, so one update's times the sum of squared
        weights. Needs two updates.
        """
        unbiased = self._mass - self._mass_of_squares / self._mass
        return [[spread / unbiased / self.effective_updates for spread in row] for row in self._spread]

    def mean(self, place: int) -> Mean:
        """With its 95 % interval."""
        value = self.means[place]
        if self.updates < 2:
            return Mean(value, None)
        half = self.quantile * math.sqrt(self.covariance()[place][place])
        return Mean(value, (value - half, value + half))

    def state_dict(self) -> dict[str, Any]:
        """Plain types; a float's JSON is exact."""
        return {
            "updates": self.updates,
            "means": list(self.means),
            "mass": self._mass,
            "mass_of_squares": self._mass_of_squares,
            "spread": [list(row) for row in self._spread],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of `state_dict`. ConfigError for one of another shape."""
        require_keys(state, self.state_dict(), "of smoothed means")
        if len(state["means"]) != len(self.means) or [len(row) for row in state["spread"]] != [len(self.means)] * len(
            self.means
        ):
            raise ConfigError(
                f"a saved state of {len(state['means'])} smoothed means for a meter of {len(self.means)}: "
                "give that of a meter made alike"
            )
        self.updates = int(state["updates"])
        self.means = [float(mean) for mean in state["means"]]
        self._mass, self._mass_of_squares = float(state["mass"]), float(state["mass_of_squares"])
        self._spread = [[float(one) for one in row] for row in state["spread"]]


def require_keys(state: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """ConfigError where a saved state has other keys than one that would be saved now."""
    if state.keys() != wanted.keys():
        odd = ", ".join(sorted(map(str, state.keys() ^ wanted.keys())))
        raise ConfigError(f"a saved state {what} has missing or unknown keys ({odd}): another version's, or damaged")
