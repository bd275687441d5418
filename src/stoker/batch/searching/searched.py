"""What a search found. No torch here."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from stoker.batch.searching.space import Space
from stoker.batch.table import as_table
from stoker.batch.trainings.setting import Setting

__all__ = ["End", "Searched", "Trial"]

End = Literal["complete", "pruned", "diverged"]


@dataclass(frozen=True)
class Trial:
    """One training of a search."""

    number: int
    setting: Setting
    end: End
    loss: float | None
    """Of held-out data, the last one seen: at the end only where it is complete. None: none was a number."""
    samples: int
    """Trained on."""
    seconds: float
    """Of training, evaluations left out."""
    losses: tuple[tuple[int, float], ...]
    """(evaluations due by then, held-out loss)."""

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        return asdict(self) | {"setting": self.setting.to_json()}


@dataclass(frozen=True)
class Searched:
    """Made by `search`."""

    unit: str
    samples: int
    """Of a complete training: what all losses at the end are compared at."""
    evaluations: int
    """Of a complete training."""
    present: Setting
    space: Space
    trials: tuple[Trial, ...]
    importance: Mapping[str, float]
    """Of each searched parameter for being among the best tenth of the complete trials, adding up to 1
    (PED-ANOVA, Watanabe et al. 2023); empty where there are too few."""
    resumed: int
    """Trials that an earlier call had done."""
    storage: str

    @property
    def best(self) -> Trial | None:
        """The complete trial with the lowest loss; None: there is none."""
        done = [trial for trial in self.trials if trial.end == "complete" and trial.loss is not None]
        return min(done, key=lambda trial: trial.loss or 0.0, default=None)

    @property
    def own(self) -> Trial | None:
        """The trial of the present setting, where it was among them."""
        wanted = (self.present.examples_per_update, self.present.rate_factor, self.present.warmup_samples)
        return next((t for t in self.trials if _chosen(t.setting) == wanted and t.end == "complete"), None)

    @property
    def ended(self) -> dict[End, int]:
        """How many trials ended in which way."""
        return {end: sum(trial.end == end for trial in self.trials) for end in get_args(End)}

    @property
    def saved(self) -> float:
        """Share of the samples of all trials that wasn't trained on, as they ended early."""
        return 1 - sum(min(t.samples, self.samples) for t in self.trials) / max(1, self.samples * len(self.trials))

    @property
    def warnings(self) -> list[str]:
        """About the best."""
        told = [
            "chosen by one seed, on the held-out data that it is shown on: train the best ones with other seeds before "
            "you believe a small difference"
        ]
        best = self.best
        if best is None:
            return []
        if edges := self.space.edges(best.setting, self.present):
            told.insert(0, f"the best lies at the edge of what was searched: {'; '.join(edges)}: search beyond it")
        return told

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        found = {
            name: getattr(self, name) for name in ("unit", "samples", "evaluations", "resumed", "storage", "saved")
        }
        best, own = self.best, self.own
        return found | {
            "present": self.present.to_json(),
            "trials": [trial.to_json() for trial in self.trials],
            "importance": dict(self.importance),
            "best": None if best is None else best.number,
            "own": None if own is None else own.number,
            "space": self.space.to_json(),
            "ended": self.ended,
            "warnings": self.warnings,
            "verdict": self.verdict,
        }

    @property
    def verdict(self) -> str:
        """In words."""
        best, own = self.best, self.own
        if best is None:
            return "No training came to its end: every one diverged. Search lower rate factors."
        said = f"Best of {len(self.trials)}: {_words(best.setting, self.unit)}, held-out loss {best.loss:.4g}"
        if own is None or own.loss is None or best.loss is None:
            return f"{said}."
        if own is best:
            return f"{said}: the present setting."
        return f"{said}, against {own.loss:.4g} ({best.loss / own.loss - 1:+.1%}) of the present setting."

    def __str__(self) -> str:
        ended = ", ".join(f"{count} {end}" for end, count in self.ended.items() if count)
        before = f"; {self.resumed} of the trials were in {self.storage}" if self.resumed else ""
        lines = [
            self.verdict,
            f"{self.samples:,} {self.unit} each; {ended}; ending early saved {self.saved:.0%} of them all{before}",
        ]
        if self.importance:
            shares = ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in self.importance.items())
            lines.append(f"what decides about a place in the best tenth: {shares}")
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n".join([*lines, "", *self._table()])

    def _table(self) -> list[str]:
        best, shown = self.best, sorted(self.trials, key=_rank)
        return as_table(
            [
                ("trial", [f"{trial.number}{' *' if trial is best else ''}" for trial in shown]),
                (f"{self.unit} per update", [f"{trial.setting.examples_per_update:,}" for trial in shown]),
                ("rate factor", [f"{trial.setting.rate_factor:.3g}" for trial in shown]),
                ("warm-up", [f"{trial.setting.warmup_samples:,}" for trial in shown]),
                ("ended", [trial.end for trial in shown]),
                ("at", [f"{trial.samples:,}" for trial in shown]),
                ("held-out loss", ["" if trial.loss is None else f"{trial.loss:.4g}" for trial in shown]),
                ("seconds", [f"{trial.seconds:.1f}" for trial in shown]),
            ]
        )


def _chosen(setting: Setting) -> tuple[int, float, int]:
    return setting.examples_per_update, setting.rate_factor, setting.warmup_samples


def _rank(trial: Trial) -> tuple[bool, int, float]:
    """The best first; those that ended early after them, the longest first."""
    early = trial.end != "complete"
    return early, -trial.samples if early else 0, math.inf if trial.loss is None else trial.loss


def _words(setting: Setting, unit: str) -> str:
    said = f"{setting.examples_per_update:,} {unit} per update at {setting.rate_factor:.3g} x the learning rate"
    base = setting.base_examples
    if base is not None and base != setting.examples_per_update:
        said += f" that follows from {base:,}"
    return said + (f", {setting.warmup_samples:,} {unit} of warm-up" if setting.warmup_samples else "")
