"""The series of a training that are read together. No torch here."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.batch.trainings.history import History
from stoker.errors import ConfigError

__all__ = ["Curve"]


@dataclass(frozen=True)
class Curve:
    """A training's series, one entry per update: what `read_curve` reads. Empty: not known."""

    losses: Sequence[float]
    examples_per_update: int
    gradient_norms: Sequence[float] = ()
    """Before clipping."""
    rates: Sequence[float] = ()
    agreements: Sequence[float] = ()
    """Cosine of the update's gradient and the one before."""
    held_out: Sequence[tuple[int, float]] = ()
    """(updates done, loss)."""
    unit: str = "examples"

    def __post_init__(self) -> None:
        for name in ("gradient_norms", "rates", "agreements"):
            given = len(getattr(self, name))
            if given and given != len(self.losses):
                raise ConfigError(f"{given} {name} for {len(self.losses)} losses: give one for each update, or none")
        if self.examples_per_update < 1:
            raise ConfigError(f"examples_per_update = {self.examples_per_update}: at least 1")
        if any(not 0 < updates <= len(self.losses) for updates, _ in self.held_out):
            raise ConfigError(f"held_out holds evaluations that aren't after one of the {len(self.losses)} updates")

    @classmethod
    def of(cls, history: History) -> "Curve":
        """Of a training by `stoker.batch.trainings`."""
        return cls(
            losses=history.loss,
            examples_per_update=history.setting.examples_per_update,
            gradient_norms=history.gradient_norm,
            rates=history.learning_rate,
            agreements=history.agreement,
            held_out=[(each.updates, each.loss) for each in history.evaluations],
            unit=history.unit,
        )

    @property
    def broken(self) -> int | None:
        """The first update whose loss or gradient wasn't finite."""
        for place, loss in enumerate(self.losses):
            if not math.isfinite(loss) or (self.gradient_norms and not math.isfinite(self.gradient_norms[place])):
                return place
        return None

    def cut(self, start: int, end: int) -> "Curve":
        """Its updates from `start` to before `end`."""
        part = slice(start, end)
        return Curve(
            self.losses[part],
            self.examples_per_update,
            self.gradient_norms[part],
            self.rates[part],
            self.agreements[part],
            [(updates - start, loss) for updates, loss in self.held_out if start < updates <= end],
            self.unit,
        )
