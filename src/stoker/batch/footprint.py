"""The memory of a model or of any target: its breakdown, what layers keep, how much would fit, the ladder of levers.

A model is known by its config alone, without torch, and so are the models of a reinforcement-learning run; any other
training is traced.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.batch.levers import TracedLever, levers_of
from stoker.batch.roles import roles_of
from stoker.batch.telling import OnPart
from stoker.config.schema import RunConfig
from stoker.errors import ConfigError
from stoker.memory import Breakdown, Lever, Setup, levers, predict, shape_of, together

if TYPE_CHECKING:
    from stoker.batch.target import Workload
    from stoker.batch.tracing import Trace

__all__ = ["Footprint", "of_model", "of_run", "of_target"]


@dataclass(frozen=True)
class Footprint:
    """What `stoker batch memory` says."""

    breakdown: Breakdown
    levers: tuple[Lever, ...] | tuple[TracedLever, ...]
    """From the cheapest on: of a model each with all above it, of a trace each alone."""
    capacity: float | None = None
    """Bytes of the device, where they were given."""
    trace: "Trace | None" = None

    @property
    def most_examples(self) -> int | None:
        """Of a micro-batch within the capacity, by these figures."""
        return None if self.capacity is None else self.breakdown.most_examples(self.capacity)

    def to_json(self) -> dict[str, Any]:
        """Everything, in plain types."""
        return {
            "breakdown": self.breakdown.to_json(),
            "levers": [lever.to_json() for lever in self.levers],
            "capacity_bytes": self.capacity,
            "most_examples": self.most_examples,
            "trace": None if self.trace is None else self.trace.to_json(),
        }

    def __str__(self) -> str:
        lines = [str(self.breakdown)]
        if self.capacity is not None:
            lines.append(
                f"  in {self.capacity / 2**30:,.2f} GiB: up to {self.most_examples:,} examples, by these figures"
            )
        lines += [] if self.trace is None else ["", str(self.trace)]
        if self.levers:
            lines += ["", "levers, cheapest first" + ("" if self.trace is None else ", each alone")]
        return "\n".join([*lines, *(f"  {_lever(each)}" for each in self.levers)])


def of_model(source: Path, setup: Setup, capacity: float | None = None) -> Footprint:
    """Of a model's folder or `config.json`, by formula. ConfigError where it isn't there or its family isn't known."""
    if not source.exists():
        raise ConfigError(
            f"{source}: no such folder or config.json, and neither a function (file.py:make_target) nor a run file "
            "(.toml)"
        )
    shape = shape_of(source)
    return Footprint(predict(shape, setup), levers(shape, setup, capacity), capacity)


def of_run(config: RunConfig, capacity: float | None = None) -> Footprint:
    """Of a reinforcement-learning run: all its models together, by formula. ConfigError as by `roles_of`.

    No ladder: most levers of a plain training aren't a run file's to pull.
    """
    return Footprint(together(roles_of(config)), (), capacity)


def of_target(
    target: "Workload",
    size: int,
    capacity: float | None = None,
    on_part: OnPart | None = None,
) -> Footprint:
    """Of any training that shows its model and loss: its forward pass is traced, and left as it was.

    `on_part`: as for `trace`.
    Raises ConfigError for one that doesn't, or whose optimizer's states aren't known.
    """
    from stoker.batch.predicting import predicted
    from stoker.batch.target import Target
    from stoker.batch.tracing import trace

    if not isinstance(target, Target):
        raise ConfigError(
            f"a {type(target).__name__} doesn't show its model and loss, so it can't be traced: `stoker batch fit` "
            "measures what its steps take"
        )
    few = 2 if target.most is None or target.most >= 4 else 1
    traced = trace(target, (few, 2 * few), on_part=on_part)
    found = predicted(traced, size, target.optimizer)
    told = traced.to_json() | {"device": str(target.device)}
    states, grows = int(found.row("optimizer states")), found.per_example(found.moment)
    return Footprint(found, levers_of(told, size, states, grows, target.unit), capacity, traced)


def _lever(lever: Lever | TracedLever) -> str:
    if isinstance(lever, Lever):
        return str(lever)
    saves = "saving unknown" if lever.saves_bytes is None else f"saves {lever.saves_bytes / 2**20:,.2f} MiB"
    return f"{lever.name}: {saves}. Costs: {lever.costs}. How: {lever.how}"
