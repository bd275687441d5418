"""Simulated devices for `bench.sweep` and the tests: a clock of their own, and a truth that is known without measuring.

A step of B units takes the p-norm of what the host needs to issue it and what the device needs to compute it, alpha +
beta B' with B' the next multiple of the tile: a soft maximum, which is not the line that a sweep fits.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from stoker.batch.instruments import Instruments
from stoker.batch.loading import LoaderOptions

__all__ = ["KINDS", "Device", "Truth", "draw", "truth"]

KINDS = ("launch-bound", "data-bound", "saturating", "noisy", "memory-limited", "tile-quantised", "throttled")
SPENT, LAUNCH_BOUND, DATA_BOUND = 0.10, 1.2, 0.10
"""The definitions a verdict goes by; typed again, so that a change in the product doesn't move the truth with it."""


@dataclass
class Device:
    """Offers what a sweep asks of a workload; every step only moves `now`."""

    kind: str
    alpha: float
    beta: float
    host: float = 0.0
    sharpness: float = 8.0
    """The norm's p: 2 is a wide bend, 16 nearly a corner."""
    tile: int = 1
    jitter: float = 0.01
    """Standard deviation of a step's log time."""
    spikes: float = 0.0
    """Share of steps that take 3 times as long."""
    slowdown: float = 1.0
    """Factor that heat brings, from `cool` seconds on, in full after `heating` more."""
    cool: float = math.inf
    heating: float = 1.0
    held_bytes: int = 1 << 30
    bytes_per_unit: int = 1 << 20
    capacity: int = 1 << 60
    largest: int = 4096
    fetch: float = 0.0
    """Seconds that making one unit of a batch takes; 0: there is no loader."""
    options: LoaderOptions = field(default_factory=LoaderOptions)
    asynchronous: bool = False
    """Steps can be timed only in rounds."""
    seed: int = 0
    unit: str = "examples"
    most: int | None = None
    now: float = 0.0
    peak: int = 0
    steps: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        if not self.fetch:
            self.load: Any = None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def seconds(self, size: float) -> float:
        """Of a step, without noise and cool."""
        whole = math.ceil(size / self.tile) * self.tile if self.tile > 1 else size
        computing = self.alpha + self.beta * whole
        top = max(computing, self.host)
        return float(
            top * ((computing / top) ** self.sharpness + (self.host / top) ** self.sharpness) ** (1 / self.sharpness)
        )

    def make_batch(self, size: int) -> int:
        return size

    def step(self, size: int) -> None:
        self.step_on(self.make_batch(size))

    def step_on(self, batch: int) -> None:
        needed = self.held_bytes + self.bytes_per_unit * batch
        if needed > self.capacity:
            raise torch.OutOfMemoryError(f"simulated: {needed} bytes of {self.capacity}")
        self.peak = max(self.peak, needed)
        heat = min(max((self.now - self.cool) / self.heating, 0.0), 1.0)
        taken = self.seconds(batch) * (1 + (self.slowdown - 1) * heat)
        taken *= math.exp(self.random.normal(0, self.jitter)) * (3.0 if self.random.random() < self.spikes else 1.0)
        self.now += taken
        self.steps += 1

    def load(self, size: int, options: LoaderOptions) -> Iterable[int]:
        return _Loader(self, size, options)

    def instruments(self) -> Instruments:
        def reset() -> None:
            self.peak = self.held_bytes

        return Instruments(
            clock=lambda: self.now,
            asynchronous=self.asynchronous,
            busy=lambda: 0.0,
            reset_peak=reset,
            peak=lambda: self.peak,
            capacity=self.capacity if self.capacity < 1 << 60 else None,
            cores=16,
        )


@dataclass
class _Loader:
    """An endless epoch, by the queue's rules."""

    device: Device
    size: int
    options: LoaderOptions

    def __iter__(self) -> Iterator[int]:
        device, workers = self.device, self.options.workers
        outstanding = workers * self.options.ahead
        asked = [device.now] * outstanding
        finished: list[float] = []
        while True:
            takes = device.fetch * self.size * math.exp(device.random.normal(0, 0.2) - 0.02)
            if not workers:
                device.now += takes
                yield self.size
                continue
            i = len(finished)
            finished.append(max(asked[i], finished[i - workers] if i >= workers else 0.0) + takes)
            device.now = max(device.now, finished[i])
            asked.append(device.now)
            yield self.size


@dataclass(frozen=True)
class Truth:
    """What is right about a device, from its definition alone."""

    knee: float | None
    """None: no doubling within the sweep gains as little as `SPENT`."""
    last: int
    """The largest size that runs."""
    verdict: str


def truth(device: Device, studied: int) -> Truth:
    """The knee is the smallest size, in sixteenths of a doubling, from which on no doubling gains more than `SPENT`.

    Of whole tiles: sizes between are taken as if tiles could be divided, sizes below one as one. The verdict's order: a
    loader that takes over a tenth of the studied size's step; a knee; memory; launches; rising.
    """
    fits = (device.capacity - device.held_bytes) // device.bytes_per_unit
    last = max(2**power for power in range(63) if 2**power <= min(device.largest, fits))
    whole = replaced(device, tile=1)

    def gain(size: float) -> float:
        return 2 * whole.seconds(max(size, device.tile)) / whole.seconds(max(2 * size, device.tile)) - 1

    grid = [2 ** (k / 16) for k in range(16 * 24)]
    knee = next(size for size, larger in pairwise(reversed(grid)) if gain(larger) > SPENT) if gain(1) > SPENT else 1.0
    reached = knee if knee <= last else None
    ratio = device.seconds(last) / device.seconds(last // 2)
    if device.fetch and waits(device, studied) > DATA_BOUND:
        verdict = "data-bound"
    elif reached is not None:
        verdict = "saturated"
    elif fits < device.largest:
        verdict = "memory-limited"
    else:
        verdict = "launch-bound" if ratio < LAUNCH_BOUND else "rising"
    return Truth(reached, last, verdict)


def waits(device: Device, size: int, steps: int = 2000) -> float:
    """Share of a step that waits for the loader: over so many steps by the queue's rules, with draws of its own."""
    twin = replaced(device, fetch=device.fetch, options=device.options, jitter=0.0, seed=device.seed + 10**6)
    loader = iter(twin.load(size, twin.options))
    for _ in range(twin.options.workers * twin.options.ahead):
        next(loader)
    start, step = twin.now, twin.seconds(size)
    for _ in range(steps):
        next(loader)
        twin.now += step
    return 1 - steps * step / (twin.now - start)


def borderline(device: Device) -> bool:
    """Truths so close to a definition's edge that either answer would do are not drawn."""
    found = truth(replaced(device), 1)
    beyond = truth(replaced(device, largest=1 << 40, capacity=1 << 62), 1).knee or math.inf
    ratio = device.seconds(found.last) / device.seconds(found.last // 2)
    edge = abs(math.log2(beyond / found.last)) < 0.5
    return edge or (found.verdict in ("launch-bound", "rising") and abs(ratio - LAUNCH_BOUND) < 0.03)


def replaced(device: Device, **changes: Any) -> Device:
    names = (
        "kind",
        "alpha",
        "beta",
        "host",
        "sharpness",
        "tile",
        "held_bytes",
        "bytes_per_unit",
        "capacity",
        "largest",
    )
    return Device(**{name: getattr(device, name) for name in names} | changes)


def draw(kind: str, seed: int) -> Device:
    """A device of that kind; the same for the same seed."""
    random = np.random.default_rng([seed, KINDS.index(kind)])
    while borderline(device := _draw(kind, seed, random)):
        continue
    return device


def _draw(kind: str, seed: int, random: np.random.Generator) -> Device:
    def between(low: float, high: float) -> float:
        return float(np.exp(random.uniform(math.log(low), math.log(high))))

    largest = 2 ** int(random.integers(8, 13))
    knee = largest * between(1 / 64, 1 / 2)
    beta = between(1e-6, min(2e-3, 0.2 / largest))
    made = Device(
        kind,
        alpha=beta * knee / 4.5,
        beta=beta,
        host=beta * knee / 4.5 * random.uniform(0, 1.5),
        sharpness=between(2, 16),
        jitter=between(0.003, 0.03),
        spikes=random.uniform(0, 0.03),
        largest=largest,
        asynchronous=bool(random.random() < 0.5),
        seed=seed,
    )
    if kind == "launch-bound":
        made.host = beta * largest * between(1.3, 10)
        made.alpha = made.host * random.uniform(0, 0.3)
    elif kind == "noisy":
        made.jitter, made.spikes = between(0.05, 0.15), random.uniform(0.03, 0.12)
    elif kind == "memory-limited":
        fits = knee * between(1 / 32, 1 / 1.5)
        made.capacity = made.held_bytes + int(made.bytes_per_unit * max(fits, 4))
    elif kind == "tile-quantised":
        made.tile = int(2 ** random.integers(3, 7))
    elif kind == "throttled":
        made.slowdown, made.cool, made.heating = random.uniform(1.1, 1.5), between(0.5, 10), between(1, 10)
    _give_loader(made, random, kind == "data-bound" or random.random() < 0.3)
    return made


def _give_loader(made: Device, random: np.random.Generator, has: bool) -> None:
    """Whose share of a step at the knee is what it should be: over a tenth for data-bound ones, else under 7 %."""
    if not has:
        made.load = None
        return
    workers = int(random.choice([0, 1, 2, 4])) if made.kind == "data-bound" else 0
    share = float(random.uniform(0.2, 0.8) if made.kind == "data-bound" else random.uniform(0.01, 0.07))
    made.options = LoaderOptions(workers)
    size = max(1, min(made.largest, round(truth(replaced(made), 1).knee or made.largest)))
    step = made.seconds(size)
    each = step / (1 - share) * workers if workers else step * share / (1 - share)
    made.fetch = each / size
    del made.__dict__["load"]
