"""The trade-off by hand, and from points of a known curve."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.batch.tradeoff import Tradeoff, doubling, fit_tradeoff
from stoker.errors import ConfigError

KNOWN = Tradeoff(
    steps_min=1000.0, examples_min=64_000.0, critical_interval=(32.0, 128.0), misfit=0.0, points=((64.0, 2000.0),)
)


@given(st.floats(0.01, 1e4))
def test_steps_and_examples_lie_on_the_hyperbola(batch: float) -> None:
    steps, examples = KNOWN.steps(batch), KNOWN.examples(batch)
    assert examples == pytest.approx(steps * batch)
    assert (steps / 1000 - 1) * (examples / 64_000 - 1) == pytest.approx(1.0)


def test_k_times_the_batch_needs_fewer_steps_never_more() -> None:
    """Far below the critical batch a k-th of the steps; far above it k times the examples."""
    assert KNOWN.steps(0.004) / KNOWN.steps(0.001) == pytest.approx(1 / 4, rel=1e-3)
    assert KNOWN.examples(4e6) / KNOWN.examples(1e6) == pytest.approx(4.0, rel=1e-3)
    steps = [KNOWN.steps(batch) for batch in (1, 2, 64, 1e6)]
    assert steps == sorted(steps, reverse=True)


def test_both_definitions_of_critical() -> None:
    assert (KNOWN.critical, KNOWN.steps(64), KNOWN.examples(64)) == (64.0, 2000.0, 128_000.0)
    assert KNOWN.allowing() == pytest.approx(12.8)
    assert KNOWN.examples(12.8) == pytest.approx(1.2 * 64_000)
    zhang = KNOWN.allowing(start=10.0)
    assert zhang == pytest.approx(24.8)
    assert KNOWN.examples(zhang) == pytest.approx(1.2 * KNOWN.examples(10.0))


def test_a_doubling_at_the_critical_batch_by_hand() -> None:
    """Examples 2 -> 3 minima, steps 2 -> 1.5; a step of 10 ms + 1 ms an example, 16 ms of it an exchange."""
    found = KNOWN.doubling(64, seconds=lambda batch: 0.01 + 0.001 * batch, exchange_seconds=0.016)
    assert (found.more_examples, found.fewer_steps) == (0.5, 0.25)
    assert found.less_time == pytest.approx(1 - 0.75 * 154 / 90)
    assert found.exchange == pytest.approx((16 / 90, 16 / 154))
    assert found.more_examples_interval == pytest.approx((1 / 3, 2 / 3))
    assert found.fewer_steps_interval == pytest.approx((1 / 6, 1 / 3))
    assert str(found) == (
        "64 to 128: costs 50.0% (33.3% to 66.7%) more examples, saves 25.0% (16.7% to 33.3%) of the steps and costs "
        "28.3% of the time (exchange of gradients: 17.8% of an update, then 10.4%)"
    )
    assert json.loads(json.dumps(found.to_json()))["fewer_steps"] == 0.25


def test_a_step_that_takes_no_longer_saves_time_as_it_saves_steps() -> None:
    found = doubling(10, 30, seconds=lambda batch: 0.1)
    assert found.less_time == found.fewer_steps == pytest.approx(1 - (1 + 30 / 20) / (1 + 30 / 10))
    assert found.exchange is None and str(found).endswith("of the steps and saves 37.5% of the time")
    assert doubling(10, 30).less_time is None


def test_an_unbounded_interval_bounds_the_doubling() -> None:
    found = doubling(10, 30, interval=(0.0, math.inf))
    assert (found.more_examples_interval, found.fewer_steps_interval) == ((0.0, 1.0), (0.0, 0.5))


@given(st.floats(1, 1e4), st.floats(1, 1e6))
def test_points_of_a_curve_give_the_curve(critical: float, steps_min: float) -> None:
    points = [(critical * scale, steps_min * (1 + 1 / scale)) for scale in (0.1, 0.5, 2, 10)]
    found = fit_tradeoff(points)
    assert found.critical == pytest.approx(critical, rel=1e-3)
    assert found.steps_min == pytest.approx(steps_min, rel=1e-3)
    assert found.misfit < 1e-4
    assert found.critical_interval == pytest.approx((critical, critical), rel=0.01)


def test_two_points_have_a_curve_and_no_interval() -> None:
    found = fit_tradeoff([(32, 3000), (128, 1500)])
    assert (found.critical, found.steps_min) == (pytest.approx(64, rel=1e-4), pytest.approx(1000, rel=1e-4))
    assert found.critical_interval is None


def test_the_interval_holds_the_planted_critical_batch() -> None:
    """300 fits to six points with 3 % noise; three standard errors are 3.8 %."""
    rng = np.random.default_rng(0)
    batches = np.array([8.0, 16.0, 32.0, 64.0, 128.0, 256.0])
    held = 0
    for _ in range(300):
        steps = 1000 * (1 + 64 / batches) * np.exp(0.03 * rng.standard_normal(6))
        interval = fit_tradeoff(list(zip(batches, steps, strict=True))).critical_interval
        assert interval is not None
        held += interval[0] <= 64 <= interval[1]
    assert held / 300 == pytest.approx(0.95, abs=0.038)


def test_points_far_below_the_critical_batch_bound_it_from_below_only() -> None:
    points = [(batch, 64_000 / batch * noise) for batch, noise in ((1, 1.02), (2, 0.98), (4, 0.99), (8, 1.03))]
    found = fit_tradeoff(points)
    assert found.critical_interval is not None
    assert found.critical_interval[0] > 8 and found.critical_interval[1] == math.inf
    assert "(at least " in str(found)
    assert json.loads(json.dumps(found.to_json()))["critical_interval"][1] is None


def test_in_words() -> None:
    assert str(KNOWN) == (
        "critical batch 64 (32 to 128): steps and examples are both double their minima there (McCandlish et al. "
        "2018)\n20 % more examples than the fewest possible at 12.8; from a best small batch B on, at 12.8 + 1.2 B "
        "(Zhang et al. 2024)\nat least 1,000 steps and 6.4e+04 examples; steps miss the curve by 0.0%"
    )


def test_points_that_can_not_place_it_say_so() -> None:
    with pytest.raises(ConfigError, match=r"each is \(batch, steps\), both positive"):
        fit_tradeoff([(1, 10), (2, 0)])
    with pytest.raises(ConfigError, match=r"two different batches or more"):
        fit_tradeoff([(8, 10), (8, 11)])
    with pytest.raises(ConfigError, match=r"don't fall with the batch at 8 to 32: .* far below them; measure smaller"):
        fit_tradeoff([(8, 100), (16, 101), (32, 102)])
    with pytest.raises(ConfigError, match=r"far above them; measure larger"):
        fit_tradeoff([(8, 400), (16, 190), (32, 90)])
    with pytest.raises(ConfigError, match=r"batch 0, critical batch 3"):
        doubling(0, 3)
