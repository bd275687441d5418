"""Timing by a clock of our own: warm-up, rounds, drift, strays, and waits for a loader."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from stoker.batch.instruments import Instruments
from stoker.batch.loading import LoaderOptions
from stoker.batch.timing import Effort, Timed, batches, settle, time_loader, time_steps
from stoker.errors import ConfigError

CPU = torch.device("cpu")
EFFORT = Effort(warmup=2, repeats=5, seconds=0.1, round_steps=1)


@dataclass
class Clock:
    now: float = 0.0

    def instruments(self) -> Instruments:
        return Instruments(clock=lambda: self.now, busy=lambda: self.now / 2, peak=lambda: 123, asynchronous=True)


def steps(clock: Clock, seconds: Iterable[float]) -> Callable[[], None]:
    left = iter(seconds)

    def step() -> None:
        clock.now += next(left)

    return step


def test_warm_up_is_dropped_and_a_spike_does_not_move_the_median() -> None:
    clock = Clock()
    found = time_steps(steps(clock, [9, 9, 1, 1, 5, 1, 1, *[1] * 99]), 4, clock.instruments(), EFFORT)
    assert found.median == 1
    assert 9 not in found.rounds
    assert found.peak_bytes == 123
    assert found.busy == pytest.approx(sum(found.rounds) / len(found.rounds) / 2)


def test_short_steps_share_a_round() -> None:
    clock = Clock()
    found = time_steps(steps(clock, [0.001] * 10**5), 4, clock.instruments(), Effort(round_steps=8))
    assert found.rounds[0] == pytest.approx(0.001)
    assert clock.now == pytest.approx(0.002 + 0.008 * len(found.rounds))


def test_long_steps_end_at_three_rounds() -> None:
    clock = Clock()
    found = time_steps(steps(clock, [100.0] * 99), 4, clock.instruments(), EFFORT)
    assert len(found.rounds) == 3


def test_medians_and_their_errors_by_hand() -> None:
    found = Timed(1, [1.0, 2.0, 3.0, 4.0, 5.0])
    assert found.median == 3
    assert found.quartiles == (2, 4)
    assert found.error == pytest.approx(math.sqrt(math.pi / 2) * 1.4826 * 1 / 5**0.5 / 3)


def passes(*each: dict[int, float]) -> tuple[dict[int, Timed], Callable[[Sequence[int]], dict[int, Timed]]]:
    """The first pass, and a function that gives the rest."""
    left = {size: iter([one[size] for one in each[1:]]) for size in each[0]}

    def again(sizes: Sequence[int]) -> dict[int, Timed]:
        return {size: Timed(size, [next(left[size])] * 3) for size in sizes}

    return {size: Timed(size, [seconds] * 3) for size, seconds in each[0].items()}, again


def test_two_passes_that_agree_are_pooled() -> None:
    first, again = passes({1: 1.0, 2: 1.5, 4: 2.5}, {1: 1.0, 2: 1.51, 4: 2.5})
    pooled, settled = settle(first, again, EFFORT)
    assert pooled[2].rounds == [1.5] * 3 + [1.51] * 3
    assert (settled.drift, settled.steady, settled.strays) == (0, True, ())


def test_a_device_that_heats_up_counts_from_when_it_is_steady() -> None:
    cool = {1: 1.0, 2: 1.5, 4: 2.5}
    hot = {size: seconds * 1.3 for size, seconds in cool.items()}
    first, again = passes(cool, hot, hot)
    pooled, settled = settle(first, again, EFFORT)
    assert pooled[4].median == pytest.approx(2.5 * 1.3)
    assert settled.drift == pytest.approx(0.3)
    assert settled.steady


def test_a_stray_size_is_measured_again_and_keeps_the_faster_half() -> None:
    first, again = passes({1: 1.0, 2: 1.5, 4: 2.5}, {1: 1.0, 2: 1.9, 4: 2.5}, {1: 9.0, 2: 1.5, 4: 9.0})
    pooled, settled = settle(first, again, EFFORT)
    assert settled.strays == (2,)
    assert pooled[2].median == 1.5


def test_a_device_that_never_settles_says_so() -> None:
    first, again = passes(*({1: 1.1**i, 2: 2 * 1.1**i} for i in range(9)))
    _, settled = settle(first, again, EFFORT)
    assert not settled.steady


@dataclass
class Loaded:
    """Batches of `fetch` seconds made in this process, steps of `compute`."""

    clock: Clock
    fetch: float = 0.3
    compute: float = 0.1
    epoch: int = 1000
    start: float = 0.0
    seen: list[Any] = field(default_factory=list)
    unit: str = "examples"
    most: int | None = None
    device: torch.device = CPU

    def load(self, size: int, options: LoaderOptions) -> "Loaded":
        return self

    def __iter__(self) -> Iterator[int]:
        self.clock.now += self.start
        for i in range(self.epoch):
            self.clock.now += self.fetch
            yield i

    def step(self, size: int) -> None: ...

    def step_on(self, batch: Any) -> None:
        self.seen.append(batch)
        self.clock.now += self.compute


def test_the_share_of_a_step_that_waits() -> None:
    clock = Clock()
    found = time_loader(Loaded(clock), 4, LoaderOptions(), clock.instruments(), EFFORT)
    assert found.seconds == pytest.approx(0.4)
    assert found.waited == pytest.approx(0.3)
    assert found.share == pytest.approx(0.75)
    assert found.steps_per_epoch is None


def test_short_epochs_count_the_wait_at_their_start() -> None:
    """Three batches of 0.3 and a start of 0.6: 0.5 a step."""
    clock = Clock()
    found = time_loader(Loaded(clock, epoch=3, start=0.6), 4, LoaderOptions(), clock.instruments(), EFFORT)
    assert found.waited == pytest.approx(0.5)
    assert found.steps_per_epoch == 3
    assert found.first_wait == pytest.approx(0.9)


def test_a_loader_without_a_batch_is_an_error() -> None:
    clock = Clock()
    with pytest.raises(ConfigError, match="gave no batch of 4 examples"):
        next(batches(Loaded(clock, epoch=0), 4, LoaderOptions(), clock.instruments()))
