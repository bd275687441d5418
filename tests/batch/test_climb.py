"""Which sizes are measured, and why no more: on simulated devices."""

from dataclasses import replace

import pytest

from bench.devices import Device
from stoker.batch.climb import Run, climb, refine
from stoker.batch.timing import Effort
from stoker.errors import ConfigError

QUICK = Effort(repeats=4, seconds=0.05)
DOUBLINGS = [2**power for power in range(14)]


def run(device: Device, **instruments: bool) -> Run:
    return Run(device, replace(device.instruments(), **instruments), QUICK)


def test_three_doublings_that_gain_nothing_end_it() -> None:
    """alpha / beta = 10: a doubling gains under a tenth from 45, so from 64, 128 and 256."""
    going = run(Device("saturating", alpha=0.01, beta=0.001, jitter=0.001))
    assert climb(going, DOUBLINGS)[0] == "spent"
    assert list(going.timed) == DOUBLINGS[:10]


def test_memory_that_runs_out_ends_it_and_leaves_what_ran() -> None:
    going = run(Device("memory-limited", 0.1, 0.0005, jitter=0.001, capacity=(1 << 30) + 20 * (1 << 20)))
    ended, why = climb(going, DOUBLINGS)
    assert ended == "memory"
    assert why.startswith("32 ran out of memory (simulated")
    assert list(going.timed) == [1, 2, 4, 8, 16]


def test_where_it_would_end_the_process_a_size_too_large_is_not_tried() -> None:
    device = Device("memory-limited", 0.1, 0.0005, jitter=0.001, capacity=2 << 30)
    going = run(device, survives=False)
    assert climb(going, DOUBLINGS)[0] == "memory"
    assert max(going.timed) == 512  # 1.5 GiB; 1024 would be all of it


def test_steps_that_take_too_long_end_it() -> None:
    going = run(Device("saturating", alpha=1.0, beta=3.0, jitter=0.001))
    ended, why = climb(going, DOUBLINGS)
    assert ended == "time"
    assert why == f"a step of 8 takes {going.timed[8].median:.1f} s"


def test_the_largest_size_is_no_early_end() -> None:
    assert climb(run(Device("saturating", 0.01, 0.001, jitter=0.001)), [1, 2, 4])[0] == "largest"


def test_sizes_beside_the_knee_are_measured_and_bad_tiles_left_out_of_the_line() -> None:
    """Tiles of 64, a knee at 225: 160 takes as long as 192 and 320 is whole."""
    going = run(Device("tile-quantised", 0.05, 0.001, jitter=0.0005, tile=64))
    climb(going, [64, 128, 256, 512])
    going.ladder = tuple(going.timed)
    refine(going)
    line, _, knee = going.fitted()
    beside = set(going.timed) - {64, 128, 256, 512}
    assert beside
    assert knee.agree
    assert line.alpha / line.beta == pytest.approx(50, rel=0.05)
    assert going.quantised() == sorted(size for size in beside if size % 64)


def test_one_batch_is_held_for_all_steps_of_a_size() -> None:
    made = []

    class Maker(Device):
        def make_batch(self, size: int) -> int:
            made.append(size)
            return size

    going = run(Maker("saturating", 0.01, 0.001))
    going.time(8, ())
    assert made == [8]


@pytest.mark.parametrize(
    ("size", "error", "hints"),
    [
        (1, ValueError("more than 1 value per channel"), True),
        (2, ValueError("more than 1 value per channel"), False),
        (1, ConfigError("loss(model, batch) gives None"), False),  # it knows what is wrong
    ],
)
def test_an_error_of_one_example_has_a_hint(size: int, error: Exception, hints: bool) -> None:
    class Failing(Device):
        def step_on(self, batch: int) -> None:
            raise error

    with pytest.raises(type(error)) as caught:
        run(Failing("saturating", 0.01, 0.001)).time(size, ())
    assert ("BatchNorm refuses it): then sizes from 2 on" in str(getattr(caught.value, "__notes__", ""))) is hints
