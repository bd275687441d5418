"""Where the bytes of a training step go, moment by moment, and which of them grow with the batch."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["MOMENTS", "Breakdown", "Margin", "Row"]

MOMENTS = ("loss", "backward begins", "backward ends", "embeddings", "step")
"""When memory may be at its peak: all activations and the logits' gradients; the last layer's backward pass; the first
layer's, with most gradients there; the input tables', with all; the optimizer's step."""


@dataclass(frozen=True)
class Row:
    """One thing in memory."""

    name: str
    nbytes: float
    moments: tuple[str, ...] = MOMENTS
    """When it is there."""
    per_example: float = 0.0
    """Bytes that each further example of the micro-batch adds; part of `nbytes`."""
    host: bool = False
    """In the host's memory, not the device's."""
    note: str = ""


@dataclass(frozen=True)
class Margin:
    """What an allocator takes beyond what is asked of it, fitted on measurements."""

    share: float = 0.0
    """Of the bytes asked for."""
    fixed: float = 0.0
    checkpointing: float = 0.0
    """A further share where layers are computed again: what comes and goes between gradients leaves holes."""

    def resolved(self, checkpointing: bool) -> "Margin":
        """For a set-up with or without checkpointing."""
        return Margin(self.share + self.checkpointing * checkpointing, self.fixed)


@dataclass(frozen=True)
class Breakdown:
    """The memory of one set-up on one device."""

    name: str
    examples: int
    """In the micro-batch that `rows` are for."""
    rows: tuple[Row, ...]
    margin: Margin = Margin()

    def at(self, moment: str) -> float:
        """Bytes on the device at that moment, without the margin."""
        return sum(row.nbytes for row in self.rows if moment in row.moments and not row.host)

    @property
    def moment(self) -> str:
        """When the peak is."""
        return max(MOMENTS, key=self.at)

    @property
    def peak(self) -> float:
        """Bytes asked for at the most."""
        return self.at(self.moment)

    @property
    def expected(self) -> float:
        """Bytes taken at the most: the peak and the margin."""
        return self.peak * (1 + self.margin.share) + self.margin.fixed

    def per_example(self, moment: str) -> float:
        """Bytes that each further example adds at that moment."""
        return sum(row.per_example for row in self.rows if moment in row.moments and not row.host)

    def row(self, name: str) -> float:
        """Bytes of the rows of that name; 0: there is none."""
        return sum(row.nbytes for row in self.rows if row.name == name)

    @property
    def limiting(self) -> Row:
        """The largest row at the peak."""
        return max((row for row in self.rows if self.moment in row.moments and not row.host), key=lambda r: r.nbytes)

    def most_examples(self, capacity: float) -> int:
        """Examples of a micro-batch that fit into so many bytes, margin included; 0: not even one."""
        room = (capacity - self.margin.fixed) / (1 + self.margin.share)
        found = math.inf
        for moment in MOMENTS:
            grows = self.per_example(moment)
            fixed = self.at(moment) - grows * self.examples
            if fixed > room:
                return 0
            if grows:
                found = min(found, (room - fixed) // grows)
        return int(found) if found < math.inf else self.examples

    def to_json(self) -> dict[str, Any]:
        """Everything, in plain types."""
        return {
            "name": self.name,
            "examples": self.examples,
            "rows": [asdict(row) | {"moments": list(row.moments)} for row in self.rows],
            "moments": {moment: self.at(moment) for moment in MOMENTS},
            "per_example": {moment: self.per_example(moment) for moment in MOMENTS},
            "moment": self.moment,
            "peak": self.peak,
            "margin": asdict(self.margin),
            "expected": self.expected,
        }

    def __str__(self) -> str:
        shown = [row for row in self.rows if row.nbytes]
        width = max((len(row.name) for row in shown), default=0)
        lines = [f"{self.name}, {self.examples} examples: {gib(self.expected)}, the peak at: {self.moment}"]
        for row in shown:
            grows = f"{gib(row.per_example)} an example" if row.per_example else ""
            there = "host" if row.host else "at the peak" if self.moment in row.moments else "at other times"
            text = f"  {row.name:<{width}}  {gib(row.nbytes):>11}  {there:<14}  {grows:<22}  {row.note}"
            lines.append(text.rstrip())
        lines += _margin_line(self)
        return "\n".join(lines)


def gib(nbytes: float) -> str:
    """For people: GiB, or MiB where there is less than a tenth of one."""
    return f"{nbytes / 2**30:,.2f} GiB" if abs(nbytes) >= 0.1 * 2**30 else f"{nbytes / 2**20:,.2f} MiB"


def _margin_line(found: Breakdown) -> Iterable[str]:
    if found.expected != found.peak:
        yield f"  beyond what is asked for: {gib(found.expected - found.peak)} (fitted)"
