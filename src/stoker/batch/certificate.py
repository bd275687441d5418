"""What `stoker.batch.fit` certifies: a size that ran, under which limit, how it was found, what fills the memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stoker.batch.levers import TracedLever
from stoker.errors import ConfigError

__all__ = ["Accumulation", "Fit", "Layer", "Part", "Trial", "growth"]

_MIB = 2**20


@dataclass(frozen=True)
class Trial:
    """One size, tried."""

    size: int
    end: str
    """"ran", "out of memory", "killed" (by the operating system), "deadline"."""
    steps: int
    """Optimizer steps completed; 0 where it didn't run."""
    peak_bytes: int | None
    """Over the process without the target; None where it didn't run or can't be measured."""
    seconds_per_step: float | None
    seconds: float
    """The whole trial, its process and the making of the target included."""
    limit_bytes: int | None
    reason: str = ""
    """How it ended, where it didn't run."""

    @property
    def ran(self) -> bool:
        return self.end == "ran"


@dataclass(frozen=True)
class Part:
    """One part of the memory at the certified size. Bytes; None: not known."""

    name: str
    predicted: int | None
    """From the trace of a small forward pass, before the search."""
    measured: int | None


@dataclass(frozen=True)
class Layer:
    """What keeps most for the backward pass."""

    name: str
    kind: str
    bytes_kept: int
    """At the certified size."""


@dataclass(frozen=True)
class Accumulation:
    """How an update of a given size is made of micro-batches that fit."""

    examples_per_update: int
    """Of all ranks together. The learning rate belongs to this number."""
    ranks: int
    accumulation_steps: int
    """Micro-batches per update and rank."""
    examples_per_microbatch: int
    """The largest micro-batch of a rank; where it doesn't divide the update some are smaller."""

    def __str__(self) -> str:
        each = f" x {self.ranks} ranks" if self.ranks > 1 else ""
        parts = (
            "1 micro-batch of" if self.accumulation_steps == 1 else f"{self.accumulation_steps} micro-batches of up to"
        )
        return (
            f"{self.examples_per_update:,} per update = {parts} {self.examples_per_microbatch:,}{each}; the update is "
            "the same, and so is the learning rate"
        )


@dataclass(frozen=True)
class Fit:
    """The certificate. Made by `stoker.batch.fit.fit`."""

    unit: str
    size: int
    """Certified for one rank: it ran `steps` complete optimizer steps in a trial of its own after the search."""
    without_headroom: int
    """The largest size that ran under the whole limit."""
    first_failed: int | None
    """The smallest size that didn't run under the whole limit; None: the data end first."""
    bound: str
    """What ends it: "memory", "host memory" (the operating system killed the trial), "data", "deadline"."""
    steps: int
    batch: tuple[str, ...]
    """Every tensor of the certifying batch: the lengths that were used."""
    limit_bytes: int | None
    headroom: float
    """Share of the limit that the size leaves free."""
    device: str
    ranks: int
    in_process: bool
    peak_bytes: int | None
    seconds_per_step: float | None
    trials: tuple[Trial, ...]
    """Every one, in order; the last one certifies."""
    parts: tuple[Part, ...]
    limiting: str | None
    """The largest part."""
    largest_layer: Layer | None
    levers: tuple[TracedLever, ...]
    """From the cheapest on, each pulled alone."""
    environment: Mapping[str, str]
    """Settings of the C library's allocator in the trials: on a CPU the certificate is for these; train with them."""
    notes: tuple[str, ...] = ()

    def for_update(self, examples_per_update: int) -> Accumulation:
        """The fewest micro-batches that make an update of so many examples over all ranks, as equal as can be.

        The update stays what was asked for, whatever fits: nothing that depends on it (the learning rate, warm-up)
        changes. ConfigError where there is less than one example a rank.
        """
        if examples_per_update < self.ranks:
            raise ConfigError(f"an update of {examples_per_update} has less than one for each of {self.ranks} ranks")
        each = math.ceil(examples_per_update / self.ranks)
        steps = math.ceil(each / self.size)
        return Accumulation(examples_per_update, self.ranks, steps, math.ceil(each / steps))

    def to_json(self) -> dict[str, Any]:
        """Everything, in plain types."""
        plain = asdict(self)
        plain["batch"], plain["notes"] = list(self.batch), list(self.notes)
        for key in ("trials", "parts", "levers"):
            plain[key] = list(plain[key])
        return plain

    def __str__(self) -> str:
        return "\n".join([*_head(self), *_log(self), *_breakdown(self), *_ladder(self), *_said(self.notes, "note")])


def growth(trials: Sequence[Trial]) -> float | None:
    """Bytes that each further unit adds to the peak, between the smallest and the largest size that ran.

    None where the peaks don't show it: too few of them, or memory that was there before covers what grew.
    """
    peaks = sorted({trial.size: trial.peak_bytes for trial in trials if trial.peak_bytes is not None}.items())
    if len(peaks) < 2:
        return None
    (few, less), (many, more) = peaks[0], peaks[-1]
    return (more - less) / (many - few) if more > less else None


def _bytes(value: float | None) -> str:
    return "?" if value is None else f"{value / _MIB:,.1f} MiB"


def _head(fit: Fit) -> list[str]:
    where = f"on each of {fit.ranks} ranks ({fit.device})" if fit.ranks > 1 else f"on {fit.device}"
    limit = "the device's memory" if fit.limit_bytes is None else _bytes(fit.limit_bytes)
    ends = {
        "memory": f"{fit.first_failed} ran out of memory",
        "host memory": f"{fit.first_failed} was killed by the operating system: the host's memory ran out",
        "data": "the data set has no more",
        "deadline": f"{fit.first_failed} was not done by its deadline: larger ones may fit",
    }[fit.bound]
    each = "" if fit.seconds_per_step is None else f", {fit.seconds_per_step:.3g} s each"
    return [
        f"{fit.size:,} {fit.unit} fit {where}, certified: {fit.steps} complete optimizer steps ran{each}",
        f"batch used        {'; '.join(fit.batch) or 'not shown by this workload'}",
        f"limit             {limit}, peak {_bytes(fit.peak_bytes)}, {fit.headroom:.0%} kept free",
        *([f"environment       {' '.join(f'{k}={v}' for k, v in fit.environment.items())}"] if fit.environment else []),
        f"without headroom  {fit.without_headroom:,} {fit.unit}; {ends}",
    ]


def _log(fit: Fit) -> list[str]:
    ran = sum(trial.ran for trial in fit.trials)
    lines = [f"trials            {len(fit.trials)}, of which {ran} ran"]
    for trial in fit.trials:
        under = "" if trial.limit_bytes in (None, fit.limit_bytes) else f"  under {_bytes(trial.limit_bytes)}"
        lines.append(
            f"  {trial.size:>10,}  {trial.end:<13}  {_bytes(trial.peak_bytes) if trial.ran else '':>13}"
            f"  {trial.seconds:>6.1f} s{under}"
        )
    return lines


def _breakdown(fit: Fit) -> list[str]:
    if not fit.parts:
        return []
    lines = [f"{'memory':<18}{'predicted':>13}  {'measured':>13}"]
    lines += [f"  {part.name:<16}{_bytes(part.predicted):>13}  {_bytes(part.measured):>13}" for part in fit.parts]
    lines.append(f"limiting part     {fit.limiting}")
    if fit.largest_layer:
        layer = fit.largest_layer
        lines.append(
            f"largest layer     {layer.name or 'the model itself'} ({layer.kind}), keeps {_bytes(layer.bytes_kept)}"
        )
    return lines


def _ladder(fit: Fit) -> list[str]:
    lines = ["levers, cheapest first, each alone:"] if fit.levers else []
    for lever in fit.levers:
        more = "" if not lever.more_units else f", room for {lever.more_units:,} more {fit.unit}"
        saves = "saving unknown" if lever.saves_bytes is None else f"saves {_bytes(lever.saves_bytes)}{more}"
        lines += [f"  {lever.name}: {saves}", f"      costs  {lever.costs}", f"      how    {lever.how}"]
    return lines


def _said(lines: Sequence[str], what: str) -> list[str]:
    return [f"{what}: {line}" for line in lines]
