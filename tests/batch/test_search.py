"""The search against simulated devices, whose capacity is known."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.batch.search import Observation, Search


def run(search: Search, capacity: float, peak=None) -> Search:
    """Until the search has its answer, on a device that runs exactly the sizes up to `capacity`."""
    while (size := search.next_size()) is not None:
        fits = size <= capacity
        search = search.observe(Observation(size, fits, peak(size) if peak and fits else None))
        assert len(search.seen) < 100
    return search


@pytest.mark.parametrize("start", [1, 2, 3, 7, 64, 100])
def test_exact_for_every_capacity_from_1_to_64(start: int) -> None:
    for capacity in range(1, 65):
        search = run(Search(start), capacity)
        assert search.answer == capacity
        assert search.first_failed == capacity + 1


@given(
    capacity=st.integers(1, 64),
    start=st.integers(1, 80),
    fixed=st.integers(0, 10**9),
    slope=st.integers(1, 10**8),
    room=st.floats(0, 0.999),
    bend=st.floats(-0.5, 0.5),
    grain=st.integers(1, 10**7),
)
def test_exact_whatever_the_peaks_suggest(
    capacity: int, start: int, fixed: int, slope: int, room: float, bend: float, grain: int
) -> None:
    """The peaks may be straight, bent or coarse, and so say too much or too little: the answer stays exact."""

    def peak(size: int) -> int:
        return (fixed + int(slope * size ** (1 + bend))) // grain * grain

    limit = int(fixed + slope * (capacity + room))
    assert run(Search(start, limit_bytes=limit), capacity, peak).answer == capacity


def test_straight_memory_takes_few_trials() -> None:
    """1, 2, then leaps: the limit and the size that fails just above it."""
    for capacity in (17, 63, 1000, 100_000):
        limit = 10**9 + 10**6 * capacity
        search = run(Search(limit_bytes=limit), capacity, lambda size: 10**9 + 10**6 * size)
        assert search.answer == capacity
        assert len(search.seen) <= 4 + math.log(capacity, 8)


def test_without_peaks_the_trials_stay_logarithmic() -> None:
    for capacity in (1, 5, 100, 4097, 100_000):
        assert len(run(Search(precision=0), capacity).seen) <= 2 * math.log2(capacity) + 8


def test_a_slope_that_misleads_costs_no_more_than_steps_that_double_and_halve() -> None:
    for factor in (0.2, 0.8, 1.3, 5.0):
        search = run(
            Search(limit_bytes=1000, precision=0), 5000, lambda size, factor=factor: int(size * factor * 1000 / 5000)
        )
        assert search.answer == 5000
        assert len(search.seen) <= 4 * math.log2(5000)


def test_memory_that_is_flat_at_first_takes_few_trials_too() -> None:
    """Where the optimizer's step is the peak at small sizes, their slope says nothing of the limit."""
    for capacity in (2000, 3624, 7000):
        limit = 200_000 + 42 * capacity

        def peak(size: int) -> int:
            return max(265_000 + size, 200_000 + 42 * size)

        search = run(Search(limit_bytes=limit), capacity, peak)
        assert search.answer == pytest.approx(capacity, rel=0.01) and search.answer <= capacity
        assert len(search.seen) <= 15


def test_precision_is_a_fraction_of_the_answer() -> None:
    search = run(Search(precision=0.05), 10_000)
    assert search.answer <= 10_000 < search.first_failed <= search.answer * 1.05
    assert run(Search(precision=0.05), 19).answer == 19


@given(capacity=st.integers(1, 200), most=st.integers(1, 200), start=st.integers(1, 300))
def test_peer_fault_25_no_size_beyond_the_data_set_is_tried(capacity: int, most: int, start: int) -> None:
    search = run(Search(start, most), capacity)
    assert search.answer == min(capacity, most)
    assert all(one.size <= most for one in search.seen)


def test_where_the_data_end_first_nothing_needs_to_fail() -> None:
    search = run(Search(1, 40), 10**6)
    assert (search.answer, search.first_failed) == (40, None)


def test_nothing_fits() -> None:
    search = run(Search(64), 0)
    assert (search.answer, search.first_failed) == (0, 1)


@given(seed=st.integers(0, 10**6), noise=st.floats(0, 0.5), start=st.integers(1, 50))
def test_failures_that_are_not_monotone(seed: int, noise: float, start: int) -> None:
    """The answer ran, and nothing at or below it failed, however the failures fall."""
    draw = random.Random(seed)
    search = Search(start, limit_bytes=10**9)
    while (size := search.next_size()) is not None:
        fits = size <= 64 * draw.uniform(1 - noise, 1 + noise)
        search = search.observe(Observation(size, fits, int(size * draw.uniform(1, 2) * 10**7) if fits else None))
        assert len(search.seen) < 60
    failed = [one.size for one in search.seen if not one.fits]
    assert search.answer == 0 or any(one.fits for one in search.seen if one.size == search.answer)
    assert all(search.answer < size for size in failed)


def test_a_size_that_fails_on_its_second_run_is_withdrawn() -> None:
    search = run(Search(), 40)
    search = search.observe(Observation(40, fits=False))
    assert search.answer < 40
    assert run(search, 39).answer == 39


@pytest.mark.parametrize(("start", "most"), [(0, None), (-1, None), (1, 0)])
def test_sizes_below_one_are_refused(start: int, most: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Search(start, most)


@given(capacity=st.integers(0, 300), least=st.integers(1, 80), further=st.integers(0, 100), most=st.integers(80, 400))
def test_no_size_below_the_least_is_tried_or_answered(capacity: int, least: int, further: int, most: int) -> None:
    search = run(Search(least + further, most, least=least, precision=0), capacity)
    assert search.answer == (min(capacity, most) if capacity >= least else 0)
    assert all(one.size >= least for one in search.seen)


def test_a_least_that_fails_ends_the_search() -> None:
    assert [one.size for one in run(Search(63, 630, least=63), 62).seen] == [63]


@given(capacity=st.integers(1, 3000), least=st.integers(1, 50), most=st.one_of(st.none(), st.integers(50, 3000)))
def test_no_more_trials_than_were_said_to_be_left(capacity: int, least: int, most: int | None) -> None:
    search, told = Search(least, most, least=least), []
    while (size := search.next_size()) is not None:
        search = search.observe(Observation(size, size <= capacity))
        told.append(search.trials_left())
    assert told[-1] == 0
    first = next((place for place, one in enumerate(search.seen) if not one.fits), None)
    if first is not None:  # from the first failure on it is halving; the steps near the limit cost a few more
        rest = told[first]
        assert rest is not None and len(told) - first - 1 <= 2 * rest + 4
    else:
        assert most is not None and None not in told
