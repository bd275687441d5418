"""The critical batch by three roads, beside one another. No torch here."""

from dataclasses import dataclass
from typing import Any

from stoker.batch.critical.branched import Branched
from stoker.batch.critical.reached import Reached
from stoker.batch.noise import NoiseEstimate

__all__ = ["Critical"]


@dataclass(frozen=True)
class Critical:
    """They answer different questions, so their numbers differ; each says what it means."""

    unit: str
    base_examples: int
    branched: Branched
    """How far the batch can grow at no loss, from one state."""
    reached: Reached | None
    """What a larger batch costs and saves over a whole training; None: not asked for."""
    noise: NoiseEstimate | None
    """Where gradients are as much noise as signal, on the way to that state; None: no training before the branches."""

    def to_json(self) -> dict[str, Any]:
        return {
            "unit": self.unit,
            "base_examples": self.base_examples,
            "branched": self.branched.to_json(),
            "reached": self.reached and self.reached.to_json(),
            "noise": self.noise and self.noise.to_json(),
            "noise_words": str(self.noise) if self.noise else "",
        }

    def __str__(self) -> str:
        parts = [str(self.branched)]
        if self.reached is not None:
            parts.append(str(self.reached))
        if self.noise is not None:
            parts.append(str(self.noise))
        return "\n\n".join(parts)
