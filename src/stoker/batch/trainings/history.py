"""What one training showed, update by update. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from stoker.batch.trainings.setting import Setting

__all__ = ["Evaluation", "History"]


@dataclass(frozen=True)
class Evaluation:
    """Of held-out data."""

    samples: int
    """Trained on before it."""
    updates: int
    seconds: float
    """Of training before it, evaluations left out."""
    loss: float
    """Lower is better."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What else the target's `validate` gives (accuracy, say): shown, not decided by."""


@dataclass
class History:
    """Series with one entry per update, and evaluations between them."""

    setting: Setting
    unit: str
    samples: list[int] = field(default_factory=list)
    """Trained on, with the update's own."""
    loss: list[float] = field(default_factory=list)
    """Of the update's examples, before it."""
    gradient_norm: list[float] = field(default_factory=list)
    """Before clipping."""
    learning_rate: list[float] = field(default_factory=list)
    """Of the first parameter group."""
    seconds: list[float] = field(default_factory=list)
    """Of each update, `waited` included."""
    waited: list[float] = field(default_factory=list)
    """Of them for data."""
    agreement: list[float] = field(default_factory=list)
    """Cosine of the gradient and the update's before; 0 for the first. Empty where it wasn't asked for."""
    evaluations: list[Evaluation] = field(default_factory=list)
    ended: str = ""
    """Why it ended before its last sample; empty where it didn't."""

    @property
    def diverged(self) -> bool:
        """It ended because a loss or a gradient was no longer finite."""
        return self.ended.startswith("diverged")

    @property
    def final_loss(self) -> float:
        """Of held-out data at the end; infinite where it diverged, NaN where nothing was evaluated."""
        if self.diverged:
            return math.inf
        return self.evaluations[-1].loss if self.evaluations else math.nan

    def note(
        self, samples: int, loss: float, gradient_norm: float, learning_rate: float, seconds: float, waited: float
    ) -> None:
        """One update."""
        self.samples.append(samples)
        self.loss.append(loss)
        self.gradient_norm.append(gradient_norm)
        self.learning_rate.append(learning_rate)
        self.seconds.append(seconds)
        self.waited.append(waited)

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        series = ("samples", "loss", "gradient_norm", "learning_rate", "agreement")
        made = {name: getattr(self, name) for name in ("unit", *series)}
        made |= {"seconds": self.seconds, "waited": self.waited, "ended": self.ended}
        evaluations = [asdict(each) | {"figures": dict(each.figures)} for each in self.evaluations]
        return {"setting": self.setting.to_json(), **made, "evaluations": evaluations}
