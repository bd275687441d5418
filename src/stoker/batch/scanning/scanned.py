"""What a scan of batch sizes found, for people and as plain JSON. No torch here."""

from dataclasses import dataclass
from typing import Any

from stoker.batch.scanning.arms import Apart, Arm
from stoker.batch.scanning.deciding import Conclusion
from stoker.batch.scanning.described import Equal
from stoker.batch.scanning.efficiency import Efficiency
from stoker.batch.scanning.rate_scan import RateScan, loss_words
from stoker.batch.table import as_table

__all__ = ["Scan"]


@dataclass(frozen=True)
class Scan:
    """The result of `scan`: batch sizes at equal samples."""

    equal: Equal
    arms: tuple[Arm, ...]
    """Ascending in examples per update."""
    apart: Apart | None
    """None: at every size a training diverged."""
    efficiency: Efficiency
    quality: tuple[int, ...]
    """Examples per update whose held-out loss isn't told from the best; empty where nothing can be said."""
    rates: RateScan | None
    """Of the batch that throughput wants and the losses don't keep; None: there was no need."""
    conclusion: Conclusion
    warnings: tuple[str, ...] = ()

    @property
    def equal_updates(self) -> int:
        """That the largest batch had: the other axis, at which the others have seen fewer samples."""
        return min(arm.updates for arm in self.arms)

    def at(self, examples_per_update: int) -> Arm:
        """The arm of a size. KeyError for one that wasn't scanned."""
        for arm in self.arms:
            if arm.setting.examples_per_update == examples_per_update:
                return arm
        raise KeyError(examples_per_update)

    def tuned(self, examples_per_update: int) -> Arm:
        """`at`, or what the scan of rates found better at that size."""
        arm, best = self.at(examples_per_update), None if self.rates is None else self.rates.best
        if best is None or best.setting.examples_per_update != examples_per_update or best.mean >= arm.standing:
            return arm
        return best

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        apart = self.apart
        return {
            "equal": self.equal.to_json(),
            "equal_updates": self.equal_updates,
            "arms": [arm.to_json() for arm in self.arms],
            "best": None if apart is None else self.arms[apart.best].setting.examples_per_update,
            "half_width": None if apart is None else apart.half_width,
            "differences": None if apart is None else list(apart.differences),
            "quality": list(self.quality),
            "efficiency": self.efficiency.to_json(),
            "rates": None if self.rates is None else self.rates.to_json(),
            "conclusion": self.conclusion.to_json(),
            "warnings": list(self.warnings),
        }

    def __str__(self) -> str:
        unit, found = self.equal.target.unit, self.efficiency
        lines = [self.conclusion.words, "", *self._table(), ""]
        if found.size is not None:
            lines.append(f"efficiency candidate: {found.size:,} {unit} per update: {found.why}")
        else:
            lines.append(f"efficiency candidate: none: {found.why}")
        lines.append(f"quality candidates: {self._quality()}")
        if self.rates is not None:
            per = self.rates.arms[0].setting.examples_per_update
            lines += ["", f"learning rates at {per:,} {unit} per update: {self.rates.words}", *self.rates.table()]
        lines += ["", *self.equal.lines(self.arms[0].setting)]
        return "\n".join([*lines, *(f"warning: {each}" for each in self.warnings)])

    def _quality(self) -> str:
        if self.apart is None:
            return "none: at every size a training diverged"
        if self.apart.half_width is None:
            return "not known: a single seed tells nothing apart"
        sizes = ", ".join(f"{size:,}" for size in self.quality)
        return (
            f"{sizes} {self.equal.target.unit} per update: within {self.apart.half_width:.2g} of the best loss, which "
            f"{len(self.equal.seeds)} seeds can't tell apart"
        )

    def _table(self) -> list[str]:
        """One row a size: at equal samples, at equal updates, and what each was run with."""
        unit, arms = self.equal.target.unit, self.arms
        names = list(dict.fromkeys(name for arm in arms for name in arm.figures))
        same = [arm.after(self.equal_updates) for arm in arms]
        exact = all(each is None or each.updates == self.equal_updates for each in same)
        about = "at" if exact else "at about"
        return as_table(
            [
                (f"{unit}/update", [f"{arm.setting.examples_per_update:,}" for arm in arms]),
                ("as", [_made_of(arm) for arm in arms]),
                ("rate", [f"{arm.learning_rate:.4g}" for arm in arms]),
                ("updates", [f"{arm.updates:,}" for arm in arms]),
                (f"loss at {self.equal.samples:,} {unit}", [loss_words(arm) for arm in arms]),
                *((name, [f"{arm.figures[name]:.4g}" if arm.figures else "" for arm in arms]) for name in names),
                (f"loss {about} {self.equal_updates:,} updates", [f"{each.mean:.4g}" if each else "" for each in same]),
                (f"{unit}/s", [f"{rate:,.0f}" for rate in self.efficiency.rates]),
                ("waits", [f"{arm.waited:.1%}" for arm in arms]),
                ("candidate", [self._mark(arm) for arm in arms]),
            ]
        )

    def _mark(self, arm: Arm) -> str:
        size = arm.setting.examples_per_update
        marks = ["efficiency"] if size == self.efficiency.size else []
        return ", ".join(marks + (["quality"] if size in self.quality else []))


def _made_of(arm: Arm) -> str:
    return f"{arm.setting.microbatches} x {arm.setting.microbatch:,}" if arm.setting.microbatches > 1 else ""
