"""Batch numbers of one device and of all: which is which, translated both ways. No torch here.

    examples_per_update = examples_per_microbatch x microbatches_per_update x data_parallel_ranks

A micro-batch is what one rank's forward and backward hold, an update one optimizer step. Stages of a pipeline and
ranks of tensor parallelism share a micro-batch: they multiply devices, not examples.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from stoker.batch.scaling import rate_factor
from stoker.errors import ConfigError

__all__ = ["Scope", "follow", "from_update", "largest_divisor", "predicted_all_reduce_s"]

FEW_MICROBATCHES = 4
"""Micro-batches for each pipeline stage from which a bubble hardly counts (GPipe, Huang et al. 2019, section 2)."""


@dataclass(frozen=True)
class Scope:
    """The batch numbers of a data-parallel training, each of one device or of all."""

    examples_per_microbatch: int
    """One forward/backward of one rank; it decides memory."""
    microbatches_per_update: int
    """Accumulated by one rank before an update; with a pipeline they fill it."""
    data_parallel_ranks: int = 1
    pipeline_stages: int = 1
    tensor_parallel_ranks: int = 1

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise ConfigError(f"{name} = {value}: at least 1")

    @property
    def examples_per_rank(self) -> int:
        """Per update."""
        return self.examples_per_microbatch * self.microbatches_per_update

    @property
    def examples_per_update(self) -> int:
        """The global batch: what the learning rate and the gradient's noise follow."""
        return self.examples_per_rank * self.data_parallel_ranks

    @property
    def devices(self) -> int:
        return self.data_parallel_ranks * self.pipeline_stages * self.tensor_parallel_ranks

    @property
    def pipeline_bubble(self) -> float:
        """Share of an update that a stage idles, filling and draining: (p-1) / (m+p-1) for p stages and m micro-batches
        (GPipe, Huang et al. 2019).
        """
        return (self.pipeline_stages - 1) / (self.microbatches_per_update + self.pipeline_stages - 1)

    @property
    def warnings(self) -> tuple[str, ...]:
        return tuple(self._warn())

    def _warn(self) -> Iterator[str]:
        wanted = FEW_MICROBATCHES * self.pipeline_stages
        if self.pipeline_stages > 1 and self.microbatches_per_update < wanted:
            yield (
                f"{self.microbatches_per_update} micro-batches through {self.pipeline_stages} pipeline stages leave "
                f"each stage idle for {self.pipeline_bubble:.0%} of an update; {wanted} of "
                f"{_smaller(self.examples_per_rank, wanted)} examples would make it "
                f"{(self.pipeline_stages - 1) / (wanted + self.pipeline_stages - 1):.0%}"
            )

    def rows(self) -> tuple[tuple[str, str, str, str, str], ...]:
        """The table: name, value, unit, scope, arithmetic."""
        made = [
            ("examples per micro-batch", f"{self.examples_per_microbatch:,}", "examples", "one rank", "chosen; memory"),
            ("micro-batches per update", f"{self.microbatches_per_update:,}", "micro-batches", "one rank", "chosen"),
            ("data-parallel ranks", f"{self.data_parallel_ranks:,}", "ranks", "all devices", "chosen"),
            (
                "examples per rank",
                f"{self.examples_per_rank:,}",
                "examples",
                "one rank, one update",
                f"{self.examples_per_microbatch:,} x {self.microbatches_per_update:,}",
            ),
            (
                "examples per update",
                f"{self.examples_per_update:,}",
                "examples",
                "global, one update",
                f"{self.examples_per_microbatch:,} x {self.microbatches_per_update:,} x {self.data_parallel_ranks:,}",
            ),
        ]
        if self.devices > self.data_parallel_ranks:
            how = f"{self.data_parallel_ranks} x {self.pipeline_stages} stages x {self.tensor_parallel_ranks} tensor"
            made.append(("devices", f"{self.devices:,}", "devices", "all", how))
        if self.pipeline_stages > 1:
            how = f"({self.pipeline_stages} - 1) / ({self.microbatches_per_update} + {self.pipeline_stages} - 1)"
            made.append(("pipeline bubble", f"{self.pipeline_bubble:.1%}", "of an update", "one stage", how))
        return tuple(made)

    def to_json(self) -> dict[str, Any]:
        derived = {
            "examples_per_rank": self.examples_per_rank,
            "examples_per_update": self.examples_per_update,
            "devices": self.devices,
            "pipeline_bubble": self.pipeline_bubble,
            "warnings": list(self.warnings),
        }
        return asdict(self) | derived

    def __str__(self) -> str:
        head = ("", "", "unit", "scope", "from")
        rows = [head, *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])


def from_update(
    examples_per_update: int,
    *,
    examples_per_microbatch: int,
    data_parallel_ranks: int = 1,
    pipeline_stages: int = 1,
    tensor_parallel_ranks: int = 1,
) -> Scope:
    """From the global batch to each device's: how many micro-batches a rank accumulates.

    ConfigError with the nearest sizes that go where it doesn't divide.
    """
    if examples_per_update < 1:
        raise ConfigError(f"examples_per_update = {examples_per_update}: at least 1")
    made = Scope(examples_per_microbatch, 1, data_parallel_ranks, pipeline_stages, tensor_parallel_ranks)
    at_once = made.examples_per_update
    if examples_per_update % at_once:
        below = examples_per_update // at_once * at_once
        near = [str(size) for size in (below, below + at_once) if size]
        raise ConfigError(
            f"{examples_per_update} examples per update are not a multiple of {examples_per_microbatch} per "
            "micro-batch "
            f"x {data_parallel_ranks} data-parallel ranks = {at_once}: take {' or '.join(near)}, or a micro-batch of "
            f"{_fitting(examples_per_update, examples_per_microbatch, data_parallel_ranks)}"
        )
    return Scope(
        examples_per_microbatch,
        examples_per_update // at_once,
        data_parallel_ranks,
        pipeline_stages,
        tensor_parallel_ranks,
    )


def follow(learning_rate: float, before: Scope, now: Scope) -> dict[str, float]:
    """The learning rate for another global batch, by rule: "sqrt" for Adam and its kin (Malladi et al. 2022), "linear"
    for SGD (Goyal et al. 2017). It follows examples per update alone, whatever made them. `scaling.rescale` says more.
    """
    kappa = now.examples_per_update / before.examples_per_update
    return {"sqrt": learning_rate * rate_factor("sqrt", kappa), "linear": learning_rate * rate_factor("linear", kappa)}


def predicted_all_reduce_s(size: float, ranks: int, bandwidth: float, latency_s: float, calls: int = 1) -> float:
    """Seconds of a ring all-reduce of `size` bytes over `ranks`: 2 (n-1)/n size / bandwidth + 2 (n-1) latency a call.

    `bandwidth` in bytes/s of one rank's link (Patarasuk & Yuan 2009). One rank exchanges nothing.
    """
    return 2 * (ranks - 1) / ranks * size / bandwidth + calls * 2 * (ranks - 1) * latency_s


def _smaller(examples_per_rank: int, microbatches: int) -> int:
    return max(1, examples_per_rank // microbatches)


def _fitting(examples_per_update: int, examples_per_microbatch: int, ranks: int) -> str:
    """Micro-batches that divide it, not larger than the one that was asked for."""
    if examples_per_update % ranks:
        return f"none: {ranks} ranks don't divide {examples_per_update}"
    each = examples_per_update // ranks
    return str(largest_divisor(each, examples_per_microbatch))


def largest_divisor(size: int, most: int) -> int:
    """The largest that divides the size and is no more than `most`."""
    return next(each for each in range(min(size, most), 0, -1) if size % each == 0)
