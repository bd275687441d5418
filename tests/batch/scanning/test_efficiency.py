"""The batch from which throughput hardly rises, from updates' times or a sweep's line."""

import pytest

from stoker.batch.curve import Fit
from stoker.batch.scanning.efficiency import efficiency
from tests.batch.scanning.made import arm

SIZES = (16, 32, 64, 128)


def test_the_knee_of_a_line_is_found_among_the_sizes() -> None:
    """t = 1 ms + 0.1 ms x size: a doubling gains a tenth at 4.5 alpha / beta = 45."""
    found = efficiency([arm(size, [0.5], seconds=0.001 + 0.0001 * size) for size in SIZES])
    assert found.size in (32, 64)
    assert "45" in found.why
    assert found.rates == tuple(pytest.approx(size / (0.001 + 0.0001 * size)) for size in SIZES)


def test_where_throughput_still_rises_the_largest_is_it() -> None:
    assert efficiency([arm(size, [0.5], seconds=0.01) for size in SIZES]).size == 128


def test_a_sweep_that_was_given_decides_by_its_line() -> None:
    arms = [arm(size, [0.5], seconds=0.01) for size in SIZES]
    found = efficiency(arms, Fit(alpha=0.001, beta=0.0001))
    assert found.size == 32  # the first within half a doubling of 45
    assert "sweep" in found.why
    assert found.rates[0] == pytest.approx(16 / 0.0026)
    assert efficiency(arms, Fit(alpha=1.0, beta=0.0001)).size == 128


def test_ways_that_disagree_give_no_candidate() -> None:
    times = (0.000493, 0.000564, 0.000672, 0.001341)
    found = efficiency([arm(size, [0.5], seconds=each) for size, each in zip(SIZES, times, strict=True)])
    assert found.size is None
    assert "disagree" in found.why
