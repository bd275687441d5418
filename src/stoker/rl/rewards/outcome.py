"""What one reward says of one sample, and what a reward must offer to be part of a suite."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from stoker.rl.types import Sample

__all__ = ["Answered", "Kind", "Outcome", "Score"]

Kind = Literal["scored", "correct", "wrong", "unparsed", "truncated", "abstained", "timeout", "error"]
"""correct .. truncated come from rule rewards; truncated: no answer found, and the sample hit its limit."""


@dataclass(frozen=True)
class Outcome:
    """One reward's word on one sample."""

    value: float | None
    """None: abstains."""
    kind: Kind
    detail: str = ""
    """A traceback (error) or the stack at the deadline (timeout)."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns for the samples record."""


@dataclass(frozen=True)
class Answered:
    """The outcomes of one call, in the samples' order, and what the function logged."""

    outcomes: list[Outcome]
    metrics: Mapping[str, list[float]] = field(default_factory=dict)


class Score(Protocol):
    """One reward function, ready to be called."""

    @property
    def range(self) -> tuple[float, float]:
        """What it may return, both ends included."""
        ...

    @property
    def rule(self) -> bool:
        """True: right, wrong and unparsed are told apart."""
        ...

    def __call__(self, samples: Sequence[Sample], step: int) -> Answered: ...

    def close(self) -> None: ...
