"""What a proof of accumulation says: each split that ran, how far its gradient was from the whole's, and why."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stoker.batch.gradients import Gap

__all__ = ["Cause", "Kind", "Proof", "Split", "Trial", "Weighting"]

Kind = Literal[
    "coupled examples",
    "per-microbatch mean",
    "wrong weights",
    "random draws",
    "changing state",
    "per-rank mean",
    "unknown",
]
"""coupled examples: an example's part of the gradient depends on which others are with it. per-microbatch mean: a mean
over tokens, of each micro-batch alone, weighted as if all held equally many. wrong weights: any other weights than
those that give the whole. random draws: other masks for other splits, equal in expectation. changing state: the same
batch gives another gradient the next time. per-rank mean: right on one rank, but ranks are averaged as if all held
equally many."""

SHOWN = 3
HEAD = ("micro-batches (examples)", "precision", "relative", "absolute", "furthest parameter", "corrected")


@dataclass(frozen=True)
class Split:
    """Examples of each micro-batch, in order; one tuple for each rank."""

    ranks: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        ranks = [_sizes(sizes) for sizes in self.ranks]
        return ranks[0] if len(ranks) == 1 else f"{len(ranks)} ranks: {' | '.join(ranks)}"


@dataclass(frozen=True)
class Trial:
    """The gradient of one split against that of the whole."""

    split: Split
    precision: str
    """What it was computed in: "float64", or the model's own dtype."""
    gaps: tuple[Gap, ...]
    """One for each parameter, furthest first."""
    corrected: Gap | None = None
    """The furthest parameter with the weights that were found right; None where the given ones are."""


@dataclass(frozen=True)
class Weighting:
    """One way to weigh micro-batches, and how far its sum is from the whole."""

    name: str
    code: str
    """The function to give as `count`; empty where there is none."""
    weights: tuple[float, ...]
    """Of the micro-batches that it was tried on."""
    relative: float


@dataclass(frozen=True)
class Cause:
    """One reason why a split is not the whole."""

    kind: Kind
    place: str
    """The path of a module, "the loss" or "the loop"."""
    relative: float
    """The difference it comes with, of a parameter's largest gradient."""
    what: str
    fix: str

    def __str__(self) -> str:
        return _together([self])


@dataclass(frozen=True)
class Proof:
    """Whether micro-batches, accumulation and ranks give the gradient of the whole batch. Made by `prove`."""

    examples: int
    precision: str
    """What decided: "float64", or the model's own dtype where it can't compute in float64."""
    rounding: float
    """The relative difference that reordering the examples, or scaling the loss, makes in that precision."""
    tolerance: float
    """A larger relative difference is a fault."""
    weighed_by: str
    weighed: tuple[int, ...]
    """Examples of the micro-batches that ways to weigh were tried on."""
    weightings: tuple[Weighting, ...]
    trials: tuple[Trial, ...]
    causes: tuple[Cause, ...]
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Every split gives the gradient of the whole, to rounding, and nothing is drawn anew."""
        return not self.causes and all(
            trial.gaps[0].relative <= self.tolerance for trial in self._deciding() if trial.gaps
        )

    @property
    def largest(self) -> Gap | None:
        """The furthest parameter of all splits, in the precision that decided; None where none was run."""
        return max((trial.gaps[0] for trial in self._deciding()), key=lambda gap: gap.relative, default=None)

    def _deciding(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.precision == self.precision]

    @property
    def verdict(self) -> str:
        """In one sentence."""
        if self.equal:
            return "every split gives the gradient of the whole batch, to rounding"
        if all(cause.kind == "random draws" for cause in self.causes) and self.causes:
            return "equal in expectation: but for random draws, every split gives the gradient of the whole batch"
        return "NOT the gradient of the whole batch"

    def to_json(self) -> dict[str, Any]:
        largest = None if self.largest is None else asdict(self.largest)
        return asdict(self) | {"equal": self.equal, "verdict": self.verdict, "largest": largest}

    def __str__(self) -> str:
        lines = [f"Accumulation of {self.examples} examples: {self.verdict}."]
        if self.largest is not None:
            lines += [
                f"Largest difference {_share(self.largest.relative)} ({self.largest.parameter}, {self.precision}); "
                f"rounding makes {_share(self.rounding)}, a fault is more than "
                f"{_share(self.tolerance)}.",
                "",
                *_table([HEAD, *(_row(trial) for trial in self.trials)]),
                "",
                f"Weighed by {self.weighed_by}. {_sizes(self.weighed)} examples, weighed by:",
                *(f"  {weighting.name}: {_share(weighting.relative)}" for weighting in self._telling()),
            ]
        for number, alike in enumerate(_grouped(self.causes), 1):
            lines += ["", f"{number}. {_together(alike)}"]
        return "\n".join([*lines, *(f"\nNote: {note}" for note in self.notes)])

    def _telling(self) -> list[Weighting]:
        """What was given, the plain division by their number, and the nearest others."""
        plain = [one for one in self.weightings if len(set(one.weights)) == 1 and sum(one.weights) < 1.5]
        nearest = sorted(self.weightings, key=lambda one: one.relative)[:SHOWN]
        return [one for one in self.weightings if one in (self.weightings[0], *plain, *nearest)]


def _grouped(causes: Sequence[Cause]) -> list[list[Cause]]:
    groups: dict[tuple[str, str], list[Cause]] = {}
    for cause in causes:
        groups.setdefault((cause.kind, cause.fix), []).append(cause)
    return list(groups.values())


def _together(alike: Sequence[Cause]) -> str:
    """Causes of one kind with one fix: twelve layers with dropout are one paragraph."""
    places = ", ".join(dict.fromkeys(cause.place for cause in alike))
    whats = "; ".join(dict.fromkeys(cause.what for cause in alike))
    return f"{alike[0].kind} in {places} ({_share(alike[0].relative)}): {whats}\n   Fix: {alike[0].fix}"


def _row(trial: Trial) -> tuple[str, ...]:
    gap = trial.gaps[0]
    corrected = "" if trial.corrected is None else _share(trial.corrected.relative)
    return str(trial.split), trial.precision, _share(gap.relative), f"{gap.absolute:.1e}", gap.parameter, corrected


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _share(relative: float) -> str:
    return f"{relative:.1%}" if relative >= 0.001 else f"{relative:.1e}"


def _sizes(sizes: tuple[int, ...]) -> str:
    """5 x 1, or 3 + 3 + 2."""
    if len(sizes) > 1 and len(set(sizes)) == 1:
        return f"{len(sizes)} x {sizes[0]}"
    if len(sizes) > 4 and len(set(sizes[:-1])) == 1:
        return f"{len(sizes) - 1} x {sizes[0]} + {sizes[-1]}"
    return " + ".join(map(str, sizes))
