"""How training loads its data, and what a loader's options should give, from how long its batches take. No torch here.

The queue is torch's DataLoader's, in its own rules: batch i belongs to worker i mod w; w x prefetch batches are asked
for at the start and one more whenever one is received; batches are received in order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

__all__ = ["Fetches", "LoaderOptions", "fewest_workers", "seconds_per_step"]

PREFETCH = 2
"""torch's DataLoader's, where none is given."""
SIMULATED = 64
"""Steps per worker and prefetched batch: enough for the queue to forget how it began."""
ENOUGH = 0.02
"""More workers than needed to come this close to the best only take memory."""


@dataclass(frozen=True)
class LoaderOptions:
    """What can be changed about a torch DataLoader without changing its batches."""

    workers: int = 0
    """Processes that make batches; 0: the training process makes them itself, between steps."""
    prefetch_factor: int | None = None
    """Batches that each worker makes ahead; None: torch's 2. Only with workers."""
    pin_memory: bool = False
    """Batches in page-locked memory, from where a copy to a GPU is faster and can overlap."""
    persistent_workers: bool = False
    """Workers outlive the epoch instead of starting anew in each. Only with workers."""

    def __post_init__(self) -> None:
        if not self.workers and (self.prefetch_factor is not None or self.persistent_workers):
            raise ValueError("prefetch_factor and persistent_workers are of workers: set workers to 1 or more")

    def keywords(self) -> dict[str, Any]:
        """As arguments of torch.utils.data.DataLoader."""
        return {
            "num_workers": self.workers,
            "prefetch_factor": self.prefetch_factor,
            "pin_memory": self.pin_memory,
            "persistent_workers": self.persistent_workers,
        }

    @property
    def ahead(self) -> int:
        """Batches that each worker makes ahead."""
        return (self.prefetch_factor or PREFETCH) if self.workers else 0


@dataclass(frozen=True)
class Fetches:
    """How long batches take to make, one by one in the training process, and what of that the processor works."""

    seconds: tuple[float, ...]
    busy: float
    """Processor seconds of one batch, on average: the rest waits for a disk or a network."""
    step_busy: float
    """Processor seconds of one training step."""
    cores: int


def seconds_per_step(fetches: Fetches, compute: float, options: LoaderOptions) -> float:
    """Of a training whose steps compute for so long, in a steady state.

    Without workers a step takes both one after the other. With them it is simulated; the processor's cores bound it
    from below, as workers that compute share them with the training.
    """
    mean = sum(fetches.seconds) / len(fetches.seconds)
    if not options.workers:
        return mean + compute
    queued = _queue(fetches.seconds, compute, options.workers, options.ahead)
    return max(queued, (fetches.busy + fetches.step_busy) / fetches.cores)


def fewest_workers(fetches: Fetches, compute: float, most: int) -> int:
    """The fewest workers, 1 to `most`, within `ENOUGH` of the best predicted time of a step."""
    times = [seconds_per_step(fetches, compute, LoaderOptions(count)) for count in range(1, most + 1)]
    return next(count for count, each in enumerate(times, start=1) if each <= min(times) * (1 + ENOUGH))


def _queue(seconds: Sequence[float], compute: float, workers: int, ahead: int) -> float:
    """Mean seconds between steps over the second half of a simulation."""
    steps = SIMULATED * workers * ahead
    received: list[float] = []
    finished: list[float] = []
    free = 0.0  # when the training asks for its next batch
    for i, fetch in enumerate(islice(cycle(seconds), steps)):
        asked = received[i - workers * ahead] if i >= workers * ahead else 0.0
        finished.append(max(asked, finished[i - workers] if i >= workers else 0.0) + fetch)
        received.append(max(free, finished[i]))
        free = received[i] + compute
    half = steps // 2
    return (received[-1] - received[half - 1]) / (steps - half)
