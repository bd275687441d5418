"""The line, the knees and the zones: values by hand."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.batch import curve

SIZES = [2**power for power in range(12)]


def line(ratio: float = 96, beta: float = 1e-3) -> list[float]:
    return [(ratio + size) * beta for size in SIZES]


def test_a_line_that_calls_itself_logarithmic_and_flat() -> None:
    """alpha / beta = 96: 8 times the batch gives 4.0x from 16, and 4 times the batch 1.47x from 128."""
    found = curve.fit(SIZES, line())
    assert found.alpha == pytest.approx(0.096)
    assert found.beta == pytest.approx(0.001)
    assert found.floor == 0
    assert found.rate(128) / found.rate(16) == pytest.approx(8 * 112 / 224)  # 4.0
    assert found.rate(512) / found.rate(128) == pytest.approx(4 * 224 / 608)  # 1.4737
    assert found.asymptote == pytest.approx(1000)


def test_shares_of_the_asymptote() -> None:
    found = curve.fit(SIZES, line())
    assert found.reaching(0.5) == pytest.approx(96)  # alpha / beta
    assert found.reaching(0.9) == pytest.approx(9 * 96)
    assert found.rate(9 * 96) == pytest.approx(900)
    assert found.gain(9 * 96) == pytest.approx(0.1 / 1.9)  # (1 - x) / (1 + x) at x = 0.9: 5.3 %
    assert found.gain(96) == pytest.approx(1 / 3)
    assert found.knee() == pytest.approx(4.5 * 96)
    assert found.gain(found.knee()) == pytest.approx(0.10)


def test_a_floor_under_a_line() -> None:
    """max(50, 2 + B) ms: a doubling from B gains 2 x 50 / (2 + 2B) - 1, a tenth at B = 44.45, just under the bend."""
    found = curve.fit(SIZES, [max(50, 2 + size) * 1e-3 for size in SIZES])
    assert found.floor == pytest.approx(0.05)
    assert found.alpha == pytest.approx(0.002, abs=1e-6)
    assert found.knee() == pytest.approx((100 / 1.1 - 2) / 2)
    assert found.gain(found.knee()) == pytest.approx(0.10)
    assert found.reaching(0.9) == pytest.approx(45)


def test_times_that_do_not_grow_have_no_knee() -> None:
    found = curve.fit(SIZES, [0.005] * len(SIZES))
    assert found.beta == pytest.approx(0, abs=1e-12)
    knee = curve.find_knee(found, curve.gains(SIZES, [0.005] * len(SIZES)), SIZES[-1])
    assert knee.agree
    assert knee.size is None
    assert found.knee() > 1e6


def test_times_in_proportion_have_no_fixed_cost() -> None:
    found = curve.fit(SIZES, [0.002 * size for size in SIZES])
    assert found.alpha == pytest.approx(0, abs=1e-9)
    knee = curve.find_knee(found, curve.gains(SIZES, [0.002 * size for size in SIZES]), SIZES[-1])
    assert knee.agree
    assert knee.size is not None
    assert knee.size <= 1


def test_one_stray_point_pulls_little() -> None:
    times = line()
    times[5] *= 1.5
    found = curve.fit(SIZES, times)
    assert found.alpha / found.beta == pytest.approx(96, rel=0.08)


def test_intervals_cover_the_truth() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        noisy = np.array(line()) * (1 + random.normal(0, 0.03, len(SIZES)))
        found = curve.fit(SIZES, noisy.tolist(), [0.03] * len(SIZES))
        covered += found.alpha_interval[0] <= 0.096 <= found.alpha_interval[1]
    assert 180 <= covered <= 200


@pytest.mark.parametrize(("sizes", "times"), [([1], [1.0]), ([2, 1], [1.0, 2.0]), ([1, 2], [1.0, 0.0])])
def test_no_line_through_too_little(sizes: list[int], times: list[float]) -> None:
    with pytest.raises(ValueError, match="a line needs at least 2 ascending sizes"):
        curve.fit(sizes, times)


def test_gains_by_hand() -> None:
    """Rates 1, 1.8, 2.7, 2.7: doublings gain 80 %, 50 % and nothing."""
    found = curve.gains([8, 16, 32, 64], [8 / 1, 16 / 1.8, 32 / 2.7, 64 / 2.7])
    assert [gain.size for gain in found] == pytest.approx([8, 16, 32])
    assert [gain.measured for gain in found] == pytest.approx([0.8, 0.5, 0.0])
    assert [gain.smoothed for gain in found] == pytest.approx([0.8, 0.5, 0.0])


def test_a_gain_that_rises_is_pooled_with_the_one_before() -> None:
    """log2 gains of 0.2 and 0.4 in a row become 0.3 each."""
    times = list(itertools.accumulate([1.0, 2**0.8, 2**0.6], lambda time, factor: time * factor))
    found = curve.gains([1, 2, 4], times)
    assert [gain.smoothed for gain in found] == pytest.approx([2**0.3 - 1] * 2)


def test_a_size_between_is_told_by_what_lies_a_doubling_away() -> None:
    found = curve.gains([8, 12, 16, 24], [8.0, 12.0, 16.0, 24.0])
    assert [gain.size for gain in found] == pytest.approx([8, 12])


def test_a_narrow_range_has_one_gain() -> None:
    assert len(curve.gains([8, 9, 10], [1.0, 1.0, 1.0])) == 1


def test_where_gains_are_spent() -> None:
    """20 % at 16 and 5 % at 32: two thirds of the way between, over log B."""
    found = [curve.Gain(16, 0.2, 0.2), curve.Gain(32, 0.05, 0.05)]
    assert curve.gains_spent_at(found) == pytest.approx(16 * 2 ** (2 / 3))
    assert curve.gains_spent_at([curve.Gain(16, 0.2, 0.2)]) is None
    assert curve.gains_spent_at([curve.Gain(16, 0.08, 0.08)]) == 16


def test_two_knees_agree_within_half_a_doubling() -> None:
    found = curve.Fit(alpha=0.1, beta=0.001)  # its knee is 450
    gains = [curve.Gain(256, 0.2, 0.2), curve.Gain(512, 0.05, 0.05)]  # 406.4
    knee = curve.find_knee(found, gains, 2048)
    assert knee.agree
    assert knee.by_fit == pytest.approx(450)
    assert knee.by_gains == pytest.approx(256 * 2 ** (2 / 3))
    assert knee.size == knee.by_fit


def test_two_knees_that_disagree_say_so() -> None:
    gains = [curve.Gain(64, 0.2, 0.2), curve.Gain(128, 0.05, 0.05)]
    knee = curve.find_knee(curve.Fit(alpha=0.1, beta=0.001, misfit=0.2), gains, 2048)
    assert not knee.agree
    assert knee.size == pytest.approx(64 * 2 ** (2 / 3))
    assert knee.why == "the line says 450, the gains 101.6; it misses the points by 20.0%"


def test_the_last_doubling_is_the_lines_alone() -> None:
    gains = [curve.Gain(128, 0.3, 0.3), curve.Gain(256, 0.17, 0.17)]
    knee = curve.find_knee(curve.Fit(alpha=0.1, beta=0.001), gains, 512)
    assert knee.agree
    assert knee.size == pytest.approx(450)
    early = curve.find_knee(curve.Fit(alpha=0.02, beta=0.001), gains, 512)  # says 90, where 30 % were measured
    assert not early.agree


def test_zones() -> None:
    assert [curve.zone(gain) for gain in (0.9, 0.34, 0.33, 0.11, 0.10, -0.2)] == [
        "steep",
        "steep",
        "gradual",
        "gradual",
        "flat",
        "flat",
    ]


def test_launch_bound_up_to() -> None:
    assert curve.launch_bound_to([1, 2, 4, 8], [1.0, 1.1, 1.25, 2.0]) == 4
    assert curve.launch_bound_to([1, 2], [1.0, 1.2]) is None
    assert curve.launch_bound_to([1, 4], [1.0, 1.43]) == 4  # 1.196 a doubling


@given(ratio=st.floats(1, 400), beta=st.floats(1e-6, 1e-2))
def test_both_methods_find_any_lines_knee(ratio: float, beta: float) -> None:
    times = line(ratio, beta)
    knee = curve.find_knee(curve.fit(SIZES, times), curve.gains(SIZES, times), SIZES[-1])
    assert knee.agree
    assert knee.size == pytest.approx(4.5 * ratio, rel=0.1)
