"""What a scan of learning rates found, for people and as plain JSON. No torch here."""

from dataclasses import dataclass
from typing import Any, Literal

from stoker.batch.scanning.arms import Apart, Arm
from stoker.batch.scanning.described import Equal
from stoker.batch.table import as_table

__all__ = ["Kind", "RateScan", "judge"]

Kind = Literal["best", "flat", "edge", "ceiling", "undetermined", "diverged"]
"""A rate that others are worse than; neighbours as good; better ones may lie outside; the next one up diverges; a
single seed; all diverge.
"""


@dataclass(frozen=True)
class RateScan:
    """The result of `scan_rates`: one batch at a few factors of its learning rate, all at equal samples."""

    equal: Equal
    arms: tuple[Arm, ...]
    """Ascending in factor. Far from the best only the first seed was trained."""
    best: Arm | None
    """The lowest mean held-out loss of those trained with every seed; None: all diverged."""
    half_width: float | None
    """Of a difference's 95 % interval; None: a single seed, or all diverged."""
    kept: tuple[float, ...]
    """Factors with every seed that aren't told from the best."""
    kind: Kind
    words: str

    def at(self, factor: float) -> Arm:
        """The arm of a factor that was tried. KeyError for another."""
        for arm in self.arms:
            if arm.setting.rate_factor == factor:
                return arm
        raise KeyError(factor)

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        best = None if self.best is None else self.best.setting.rate_factor
        return {
            "best": best,
            "half_width": self.half_width,
            "kept": list(self.kept),
            "kind": self.kind,
            "words": self.words,
            "arms": [arm.to_json() for arm in self.arms],
            "equal": self.equal.to_json(),
        }

    def __str__(self) -> str:
        return "\n".join([self.words, "", *self.table(), "", *self.equal.lines(self.arms[0].setting)])

    def table(self) -> list[str]:
        """One row a rate."""
        best = self.best
        unit = self.equal.target.unit
        names = list(dict.fromkeys(name for arm in self.arms for name in arm.figures))
        per = self.arms[0].setting.examples_per_update
        return as_table(
            [
                (f"rate at {per:,} {unit}", [f"{arm.learning_rate:.4g}" for arm in self.arms]),
                ("factor", [f"{arm.setting.rate_factor:.4g}" for arm in self.arms]),
                ("held-out loss", [loss_words(arm) for arm in self.arms]),
                *((name, [_figure(arm, name) for arm in self.arms]) for name in names),
                ("seeds", [str(len(arm.histories)) for arm in self.arms]),
                ("", [_mark(arm, best, self.kept) for arm in self.arms]),
            ]
        )


def loss_words(arm: Arm) -> str:
    """Mean and standard deviation; how many diverged."""
    lost = f"{arm.diverged} of {len(arm.histories)} diverged" if arm.diverged else ""
    if arm.diverged == len(arm.histories):
        return "diverged" if arm.diverged == 1 else lost
    spread = "" if arm.spread is None else f" ± {arm.spread:.2g}"
    return f"{arm.mean:.4g}{spread}" + (f" ({lost})" if lost else "")


def judge(arms: tuple[Arm, ...], apart: Apart | None, compared: list[Arm], seeds: int) -> tuple[Kind, str]:
    """What the arms (ascending in factor) say; `apart`: of those `compared`."""
    if apart is None:
        return "diverged", (
            f"Every rate from {arms[0].learning_rate:.3g} to {arms[-1].learning_rate:.3g} diverged: lower the rate "
            "further, or look for the fault elsewhere (data, loss, precision)."
        )
    best = compared[apart.best]
    place = arms.index(best)
    said = f"{best.learning_rate:.4g} (x {best.setting.rate_factor:.3g})"
    if seeds < 2 or apart.half_width is None:
        return "undetermined", f"The lowest loss is at {said}, by one seed, which tells no rates apart: give three."
    error = f"differences below {apart.half_width:.2g} can't be told with {seeds} seeds"
    if place in (0, len(arms) - 1):
        end = "lowest" if place == 0 else "highest"
        return "edge", f"The best rate, {said}, is the {end} tried: go on that side. {error.capitalize()}."
    kept = [compared[number] for number in apart.kept]
    beside = [arm for arm in (arms[place - 1], arms[place + 1]) if arm.whole]
    if beside and all(arm in kept for arm in beside):
        low, high = min(a.learning_rate for a in kept), max(a.learning_rate for a in kept)
        return "flat", f"Flat from {low:.3g} to {high:.3g}: the lowest loss is at {said}, but {error}."
    if not arms[place + 1].whole:
        above = arms[place + 1].learning_rate
        return "ceiling", (
            f"The best rate is {said}, and {above:.3g} already diverges: warm up, or stay a little below. "
            f"{error.capitalize()}."
        )
    others = [arm.learning_rate for arm in kept if arm is not best]
    isnt = "isn't" if len(others) == 1 else "aren't"
    as_good = f"; {', '.join(f'{each:.3g}' for each in others)} {isnt} told from it" if others else ""
    return "best", f"The best rate is {said}{as_good}: {error}."


def _figure(arm: Arm, name: str) -> str:
    return f"{arm.figures[name]:.4g}" if name in arm.figures else ""


def _mark(arm: Arm, best: Arm | None, kept: tuple[float, ...]) -> str:
    if arm is best:
        return "best"
    return "not told apart" if arm.setting.rate_factor in kept else ""
