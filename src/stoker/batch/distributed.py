"""What more devices change: batch numbers, step time and memory on real ranks, and what exchanging gradients costs.

One device is the baseline. Then as many ranks as asked for run the same updates, with the exchange of gradients and
without it: the difference is its share. It is also predicted, from bandwidth and latency that probes of other sizes
measure.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from stoker.batch.ranks import launch
from stoker.batch.scope import Scope, follow, predicted_all_reduce_s
from stoker.batch.target import Maker
from stoker.errors import ConfigError

__all__ = ["Distributed", "Exchange", "Point", "distributed", "fit_link"]

PROBES = (2**16, 2**18, 2**20, 2**22, 2**24)
"""Bytes of the all-reduces that measure the link."""
MODULE = "stoker.batch.distributed_rank"
FORECAST = (1, 2, 4, 8, 16, 32)
"""Micro-batches per update that the amortisation is shown for."""


@dataclass(frozen=True)
class Point:
    """One measured set-up."""

    scope: Scope
    update_s: float
    """Median over updates of the slowest rank: forward, backward, exchange, optimizer step; no data loading."""
    without_exchange_s: float
    """The same without exchanging gradients."""
    updates_s: tuple[float, ...]
    """Every update, of the slowest rank."""
    peak_bytes: int
    """Of one rank's process (CPU) or of its allocator (CUDA), over all points of that number of ranks; the largest
    rank.
    """
    start_bytes: int
    """Of those, there before the first batch: weights, and in a process its libraries."""

    @property
    def exchange_share(self) -> float:
        """Of an update, the part that is there only because gradients are exchanged; 0 where it hides."""
        return max(0.0, 1 - self.without_exchange_s / self.update_s)

    @property
    def examples_per_s(self) -> float:
        return self.scope.examples_per_update / self.update_s


@dataclass(frozen=True)
class Exchange:
    """All-reduces of one number of ranks, on their own."""

    ranks: int
    gradient_bytes: int
    calls: int
    """Buckets that the gradient goes in."""
    measured_s: float
    """The gradient's bytes, median of the slowest rank."""
    predicted_s: float
    bandwidth: float
    """Bytes/s of one rank's link, fitted to the probes."""
    latency_s: float
    """Of one of the 2 (n-1) messages of a call, fitted."""
    probes: tuple[tuple[int, float], ...]
    """(bytes, median seconds), without the gradient's."""


@dataclass(frozen=True)
class Distributed:
    """Made by `distributed`."""

    points: tuple[Point, ...]
    """One rank first."""
    exchanges: tuple[Exchange, ...]
    learning_rate: float
    """The target's, taken to be right for the baseline's examples per update."""
    rule: str
    """"sqrt" or "linear", by the optimizer."""
    threads: int
    """Of each rank, on a CPU."""
    warnings: tuple[str, ...] = ()

    @property
    def baseline(self) -> Point:
        return self.points[0]

    def amortised(self, ranks: int) -> tuple[tuple[int, float], ...]:
        """(micro-batches per update, predicted share of the exchange): measured work, a line through it, plus the
        predicted all-reduce. What hides behind the backward, or slows it, is left out.
        """
        exchange = next(one for one in self.exchanges if one.ranks == ranks)
        points = [point for point in self.points if point.scope.data_parallel_ranks == ranks]
        fixed, each = _line([(p.scope.microbatches_per_update, p.without_exchange_s) for p in points])
        return tuple(
            (number, exchange.predicted_s / (fixed + each * number + exchange.predicted_s)) for number in FORECAST
        )

    def rate(self, point: Point) -> float:
        """The learning rate that follows that point's global batch."""
        return follow(self.learning_rate, self.baseline.scope, point.scope)[self.rule]

    def efficiency(self, point: Point) -> float:
        """Examples/s of each rank against one rank alone with as many micro-batches."""
        same = point.scope.microbatches_per_update
        alone = next(
            one
            for one in self.points
            if one.scope.data_parallel_ranks == 1 and one.scope.microbatches_per_update == same
        )
        return point.examples_per_s / point.scope.data_parallel_ranks / alone.examples_per_s

    def to_json(self) -> dict[str, Any]:
        points = [
            asdict(point)
            | {
                "scope": point.scope.to_json(),
                "exchange_share": point.exchange_share,
                "examples_per_s": point.examples_per_s,
                "learning_rate": self.rate(point),
                "efficiency": self.efficiency(point),
            }
            for point in self.points
        ]
        amortised = {str(one.ranks): self.amortised(one.ranks) for one in self.exchanges}
        return asdict(self) | {"points": points, "amortised": amortised}

    def __str__(self) -> str:
        head = (
            "ranks", "micro-batches", "examples per update (global)", "learning rate", "ms per update", "examples/s",
            "efficiency", "exchange", "peak MB per rank", "at the start",
        )  # fmt: skip
        rows = [head, *(self._row(point) for point in self.points)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        first = self.baseline.scope
        lines.insert(
            0,
            f"{first.examples_per_microbatch} examples per micro-batch of one rank; global = per micro-batch x "
            "micro-batches x data-parallel ranks",
        )
        for one in self.exchanges:
            shares = ", ".join(f"{number}: {share:.1%}" for number, share in self.amortised(one.ranks))
            lines += [
                "",
                f"{one.ranks} ranks exchange {one.gradient_bytes / 1e6:.2f} MB an update in {one.calls} calls: "
                f"{one.measured_s * 1e3:.2f} ms measured, {one.predicted_s * 1e3:.2f} ms predicted "
                f"({one.bandwidth / 1e9:.2f} GB/s, {one.latency_s * 1e6:.0f} us a message)",
                f"predicted share of an update, by micro-batches per update: {shares}",
            ]
        return "\n".join([*lines, *(f"warning: {text}" for text in self.warnings)])

    def _row(self, point: Point) -> tuple[str, ...]:
        return (
            f"{point.scope.data_parallel_ranks}",
            f"{point.scope.microbatches_per_update}",
            f"{point.scope.examples_per_update:,}",
            f"{self.rate(point):.3g}",
            f"{point.update_s * 1e3:.2f}",
            f"{point.examples_per_s:,.0f}",
            f"{self.efficiency(point):.0%}",
            f"{point.exchange_share:.1%}",
            f"{point.peak_bytes / 1e6:,.0f}",
            f"{point.start_bytes / 1e6:,.0f}",
        )


def distributed(
    maker: Maker,
    *,
    size: int,
    ranks: Sequence[int] = (2,),
    microbatches: Sequence[int] = (1, 4),
    updates: int = 7,
    unused_parameters: bool = False,
    deadline_s: float = 300.0,
) -> Distributed:
    """Time `updates` updates of micro-batches of `size` examples on one rank, then on each number of `ranks`.

    `microbatches`: micro-batches per update to measure. `unused_parameters`: some parameters get no gradient. Ranks
    share this machine: on a CPU each has its share of the threads, the baseline too, so that all are devices of one
    kind.

    Raises ConfigError for numbers that don't fit, RunError where a rank fails or isn't done in `deadline_s` seconds.
    """
    if size < 1 or updates < 1 or not microbatches or min(microbatches) < 1:
        raise ConfigError(f"size = {size}, updates = {updates}, microbatches = {tuple(microbatches)}: each at least 1")
    if not ranks or min(ranks) < 2:
        raise ConfigError(f"ranks = {tuple(ranks)}: from 2, as one rank is always measured first")
    threads = max(1, (os.cpu_count() or 1) // max(ranks))
    numbers = {
        "path": maker.path,
        "arguments": list(maker.arguments),
        "size": size,
        "microbatches": sorted(set(microbatches)),
        "updates": updates,
        "unused": unused_parameters,
        "probes": list(PROBES),
        "threads": threads,
    }
    points: list[Point] = []
    exchanges: list[Exchange] = []
    first: dict[str, Any] = {}
    for number in (1, *sorted(set(ranks))):
        answers = launch(MODULE, number, numbers, {}, deadline_s)
        first = first or answers[0]
        points += _points(answers, size, number)
        if number > 1:
            exchanges.append(_exchange(answers, number))
    rule = "sqrt" if first["adam"] else "linear"
    made = Distributed(tuple(points), tuple(exchanges), first["learning_rate"], rule, threads)
    return Distributed(**made.__dict__ | {"warnings": tuple(_warnings(made))})


def fit_link(probes: Sequence[tuple[int, float]], ranks: int) -> tuple[float, float]:
    """Bandwidth (bytes/s) and latency (s) whose ring formula comes closest to the probes, in relative error."""
    rows = np.array([[2 * (ranks - 1) / ranks * size / seconds, 2 * (ranks - 1) / seconds] for size, seconds in probes])
    (inverse, latency), *_ = np.linalg.lstsq(rows, np.ones(len(probes)), rcond=None)
    if latency < 0:  # noise: a link without latency then, at the bandwidth that fits best
        latency, inverse = 0.0, float(rows[:, 0].sum() / (rows[:, 0] ** 2).sum())
    elif inverse <= 0:
        raise ConfigError("the link's probes take no longer for more bytes: measure on a machine with less going on")
    return 1 / float(inverse), float(latency)


def _points(answers: Sequence[Mapping[str, Any]], size: int, ranks: int) -> list[Point]:
    made = []
    for place, point in enumerate(answers[0]["points"]):
        all_ranks = [answer["points"][place] for answer in answers]
        slowest = [max(times) for times in zip(*(each["with"] for each in all_ranks), strict=True)]
        without = [max(times) for times in zip(*(each["without"] for each in all_ranks), strict=True)]
        made.append(
            Point(
                Scope(size, point["microbatches"], ranks),
                median(slowest),
                median(without),
                tuple(slowest),
                max(answer["peak_bytes"] for answer in answers),
                max(answer["start_bytes"] for answer in answers),
            )
        )
    return made


def _exchange(answers: Sequence[Mapping[str, Any]], ranks: int) -> Exchange:
    timed = [
        (each[0]["bytes"], median(max(times) for times in zip(*(one["seconds"] for one in each), strict=True)))
        for each in zip(*(answer["all_reduces"] for answer in answers), strict=True)
    ]
    *probes, (moved, measured) = timed
    bandwidth, latency = fit_link(probes, ranks)
    calls = answers[0]["calls"]
    predicted = predicted_all_reduce_s(moved, ranks, bandwidth, latency, calls)
    return Exchange(ranks, moved, calls, measured, predicted, bandwidth, latency, tuple(probes))


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds that an update takes anyway, and those of each micro-batch, neither below 0."""
    if len(points) == 1:
        return 0.0, points[0][1] / points[0][0]
    each, fixed = np.polyfit([x for x, _ in points], [y for _, y in points], 1)
    if each <= 0 or fixed < 0:
        return 0.0, float(np.mean([y / x for x, y in points]))
    return float(fixed), float(each)


def _warnings(made: Distributed) -> list[str]:
    last = made.points[-1]
    told = [
        f"{last.scope.examples_per_update:,} examples per update are "
        f"{last.scope.examples_per_update / made.baseline.scope.examples_per_update:g} times the baseline's "
        f"{made.baseline.scope.examples_per_update:,}: learning rate {made.learning_rate:g} becomes "
        f"{made.rate(last):.3g} "
        f"({made.rule} rule), or take fewer micro-batches to keep the global batch"
    ]
    told += [
        f"the exchange takes {point.exchange_share:.0%} of an update with {point.scope.data_parallel_ranks} ranks and "
        f"{point.scope.microbatches_per_update} micro-batches: more micro-batches or more examples in each make it less"
        for point in made.points
        if point.exchange_share > 0.2
    ]
    return told
