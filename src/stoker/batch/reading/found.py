"""What a reading of a curve found. No torch here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

__all__ = ["CAUSES", "Cause", "Finding", "Reading"]

Cause = Literal["rate too high", "rate too low", "batch too small", "batch too large", "bad data", "plateau"]
CAUSES: tuple[Cause, ...] = (
    "rate too high", "rate too low", "batch too small", "batch too large", "bad data", "plateau",
)  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """One cause of what is wrong with a curve."""

    cause: Cause
    evidence: str
    """What was seen, in figures."""
    samples: tuple[int, int]
    """Where: from and to which sample trained on."""
    confidence: float
    """0 to 1: how well the evidence fits this cause rather than another. No probability."""
    change: str
    """What to set instead, as lines of a configuration with a reason."""

    @property
    def sure(self) -> str:
        """The confidence in a word."""
        return "likely" if self.confidence >= 0.7 else "possible"

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self) | {"samples": list(self.samples)}

    def __str__(self) -> str:
        return (
            f"{self.cause} ({self.sure}, {self.confidence:.1f}), samples {self.samples[0]:,} to {self.samples[1]:,}\n"
            f"   seen: {self.evidence}\n   set:  {self.change}"
        )


@dataclass(frozen=True)
class Reading:
    """Of one training's curves."""

    verdict: Literal["healthy", "look", "too little data"]
    findings: tuple[Finding, ...]
    """The likeliest first; of one symptom several causes may be listed."""
    notes: tuple[str, ...]
    """What isn't a fault, or couldn't be looked at."""
    figures: Mapping[str, float]
    """What was measured of the curves and judged by; those that couldn't be are left out."""

    @property
    def causes(self) -> tuple[Cause, ...]:
        """In the order of the findings."""
        return tuple(each.cause for each in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return {
            "verdict": self.verdict,
            "findings": [each.to_json() for each in self.findings],
            "notes": list(self.notes),
            "figures": dict(self.figures),
        }

    def __str__(self) -> str:
        head = {
            "healthy": "healthy: nothing in these curves asks for a change",
            "too little data": "too little data to read",
            "look": f"{len(self.findings)} finding{'s' if len(self.findings) > 1 else ''}, the likeliest first",
        }[self.verdict]
        numbered = [f"{place}. {each}" for place, each in enumerate(self.findings, start=1)]
        return "\n".join([head, *numbered, *(f"note: {each}" for each in self.notes)])
