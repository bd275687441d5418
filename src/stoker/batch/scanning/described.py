"""What a comparison was of, and what was equal for all its trainings. No torch here."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from stoker.batch.loading import LoaderOptions
from stoker.batch.scaling import RULES, Kind
from stoker.batch.trainings.setting import Setting

__all__ = ["Described", "Equal"]


@dataclass(frozen=True)
class Described:
    """The target, as it was first made."""

    unit: str
    device: str
    parameters: int
    """Trained ones."""
    optimizer: str
    """Its class."""
    kind: Kind
    """What it is like, for rules."""
    settings: Mapping[str, Any]
    """Of its first parameter group, as the target made it."""


@dataclass(frozen=True)
class Equal:
    """What all trainings of a comparison had in common; the rest is in each arm's setting."""

    target: Described
    samples: int
    evaluations: int
    seeds: tuple[int, ...]
    """Of the first weights and of the data's order."""
    loader: LoaderOptions

    def to_json(self) -> dict[str, Any]:
        """Plain types."""
        made = asdict(self)
        made["target"]["settings"] = {key: _plain(value) for key, value in self.target.settings.items()}
        return made | {"seeds": list(self.seeds)}

    def lines(self, setting: Setting) -> list[str]:
        """For people: all of it, with what `setting` and its like share."""
        target = self.target
        own = ", ".join(f"{name} {_short(value)}" for name, value in target.settings.items())
        base = setting.base_examples or setting.examples_per_update
        rule = setting.rule or RULES[target.kind]
        loader = ", ".join(f"{name} {value}" for name, value in asdict(self.loader).items() if value) or "no workers"
        clip = "none" if setting.clip_norm is None else f"{setting.clip_norm:g}"
        return [
            f"equal for all: {self.samples:,} {target.unit}, seeds {', '.join(map(str, self.seeds))} (first weights "
            f"and order of the data), {self.evaluations} evaluations, loader: {loader}, {target.device}",
            f"{target.optimizer} of {target.parameters:,} parameters, right for {base:,} {target.unit} per update: "
            f"{own}; rule {rule}, moments {setting.moments}, warm-up {setting.warmup_samples:,} {target.unit}, "
            f"decay {setting.decay}, clipping {clip}",
        ]


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _short(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_short, value)) + ")"
    return f"{value:g}" if isinstance(value, float) else str(value)
