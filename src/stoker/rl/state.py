"""What a run must remember to go on as if never stopped, apart from weights and optimizer."""

from dataclasses import asdict, dataclass, field
from typing import Any

from stoker.rl.kl import KlState

__all__ = ["Evaluation", "RunState"]


@dataclass(frozen=True)
class Evaluation:
    """One look at the held-out prompts."""

    samples_seen: int
    reward: float
    reward_error: float
    accuracy: float


@dataclass
class RunState:
    """Counters and controllers; JSON-able, saved with every checkpoint."""

    kl: KlState
    step: int = 0
    """Steps finished."""
    updates: int = 0
    """Optimizer steps taken: the policy's weight version."""
    samples_seen: int = 0
    nonfinite_updates: int = 0
    """Updates refused in a row because of a NaN or an infinity."""
    evaluations: list[Evaluation] = field(default_factory=list)
    warmup_norms: list[float] = field(default_factory=list)
    """Gradient norms of the steps while the learning rate rose; steps without a gradient left out."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "RunState":
        evaluations = [Evaluation(**one) for one in data["evaluations"]]
        return cls(**{**data, "kl": KlState(**data["kl"]), "evaluations": evaluations})
