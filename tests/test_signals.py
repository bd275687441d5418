"""Signals of series whose truth is known: by hand, by a closed form, or by how they were drawn."""

import math

import numpy as np
import pytest

from stoker import signals

LINE = [3.0 - 0.5 * i for i in range(12)]


def noise(count: int, seed: int = 0, spread: float = 1.0) -> list[float]:
    return list(spread * np.random.default_rng(seed).standard_normal(count))


def test_trend_of_a_line() -> None:
    found = signals.trend(LINE)
    assert (found.slope, found.start, found.end) == pytest.approx((-0.5, 3.0, -2.5))
    assert found.error == pytest.approx(0.0, abs=1e-12)
    assert found.z == -math.inf
    assert signals.trend([2.0, 2.0, 2.0]).z == 0.0


def test_error_of_a_trend_by_hand() -> None:
    """1, 0, 0, 1: level, residuals 1/2, -1/2, -1/2, 1/2; variance 1 / 2, over 5 = 1 / 10; neighbours don't add."""
    found = signals.trend([1.0, 0.0, 0.0, 1.0])
    assert found.slope == pytest.approx(0.0)
    assert found.error == pytest.approx(math.sqrt(0.1))


@pytest.mark.parametrize("correlation", [0.0, 0.7])
def test_errors_of_trend_and_level_hold(correlation: float) -> None:
    """|z| beyond 2 in about 5 % of series without a trend, correlated neighbours or not."""
    beyond_trend = beyond_level = 0
    for seed in range(300):
        x = noise(200, seed)
        for i in range(1, len(x)):
            x[i] += correlation * x[i - 1]
        beyond_trend += abs(signals.trend(x).z) > 2
        mean = signals.level(x)
        beyond_level += abs(mean.value) > 2 * mean.error
    assert beyond_trend < 30 and beyond_level < 30


def test_scatter_is_of_noise_not_of_a_course() -> None:
    course = [5 * math.exp(-i / 100) for i in range(1000)]
    assert signals.scatter(course) < 1e-3
    assert signals.scatter([a + b for a, b in zip(course, noise(1000, 1, 0.3), strict=True)]) == pytest.approx(0.3, 0.1)
    assert signals.scatter([0, 1, 0]) == pytest.approx(2 / math.sqrt(6))
    assert signals.scatter([1, 2]) == 0.0


def test_blocks() -> None:
    found = signals.blocks([1, 1, 3, 3, 5, 5], 3)
    assert [each.value for each in found] == [1, 3, 5]
    assert len(signals.blocks([1.0, 2.0, 3.0], 20)) == 1
    drawn = signals.blocks(noise(4000), 4)
    assert all(each.error == pytest.approx(1 / math.sqrt(1000), rel=0.1) for each in drawn)


def test_early_share() -> None:
    """An even fall has a quarter of it in its first quarter; exp(-t) from 0 to 8 has (1 - e^-2) / (1 - e^-8)."""
    assert signals.early_share([-float(i) for i in range(400)]) == pytest.approx(0.25, abs=0.01)
    fast = [math.exp(-8 * i / 4000) for i in range(4000)]
    assert signals.early_share(fast) == pytest.approx((1 - math.exp(-2)) / (1 - math.exp(-8)), abs=0.03)
    assert math.isnan(signals.early_share([float(i) for i in range(40)]))


def test_flat_from() -> None:
    series = [1 - i / 100 for i in range(100)] + [0.0] * 200
    assert signals.flat_from(series) == pytest.approx(100, abs=10)
    assert signals.flat_from([float(-i) for i in range(100)]) is None
    assert signals.flat_from([2.0] * 50) == 0


def test_swing() -> None:
    assert signals.swing([(-1.0) ** i for i in range(100)]) == pytest.approx(-1.0, abs=0.05)
    assert signals.swing(noise(2000)) == pytest.approx(0.0, abs=0.05)
    assert signals.swing([math.sin(i / 20) for i in range(500)]) > 0.9
    assert signals.swing(LINE) == 0.0


def test_growth() -> None:
    rising = [a * (1 + i / 300) for i, a in enumerate(noise(900))]
    assert signals.growth(rising) == pytest.approx(3.5 / 1.5, rel=0.15)
    assert signals.growth(noise(900)) == pytest.approx(1.0, rel=0.15)
    assert math.isnan(signals.growth([1.0] * 9))


def test_spikes() -> None:
    series = noise(300)
    for place in (40, 41, 200):
        series[place] = 15.0
    assert signals.spikes(series) == [40, 41, 200]
    assert sum(len(signals.spikes(noise(300, seed))) for seed in range(20)) <= 1
    assert signals.spikes([1.0] * 30) == []


def test_changes() -> None:
    series = [a + (3.0 if 120 <= i < 180 else 0.0) for i, a in enumerate(noise(400, 2))]
    up, down = signals.changes(series)
    assert up.at == pytest.approx(120, abs=2) and down.at == pytest.approx(180, abs=2)
    assert up.after - up.before > 0 > down.after - down.before
    assert sum(len(signals.changes(noise(400, seed))) for seed in range(50)) == 0
    assert [each.at for each in signals.changes([0.0] * 10 + [1.0] * 10)] == [10]


@pytest.mark.parametrize("bad", [[], [1.0, math.nan, 2.0], [[1.0], [2.0]]])
def test_what_is_no_series(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="a series of"):
        signals.trend(bad)
