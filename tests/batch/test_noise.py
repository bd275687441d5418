"""Estimators by hand, by enumeration and by what expectations must give; the meter against plain weighted sums."""

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from stoker.batch.noise import NoiseSample, NoiseScale, beale, fieller, from_parts, from_two_sizes
from stoker.errors import ConfigError


def test_two_sizes_by_hand() -> None:
    """|G|^2 = 4, tr(Sigma) = 12: 16 over one unit, 7 over four."""
    assert from_two_sizes(16.0, 1, 7.0, 4) == NoiseSample(trace=pytest.approx(12.0), signal=pytest.approx(4.0))


def test_two_parts_by_hand() -> None:
    """Gradients 3 and 1, of one unit each: their sample variance is 2, and 3 x 1 is the unbiased square of the mean."""
    for independent in (False, True):
        sample = from_parts([9.0, 1.0], 4.0, [1, 1], independent=independent)
        assert sample == NoiseSample(trace=pytest.approx(2.0), signal=pytest.approx(3.0))


def test_a_negative_signal_is_not_clamped() -> None:
    """Gradients 1 and -1: the product of two independent looks at G is -1."""
    assert from_parts([1.0, 1.0], 0.0, [1, 1]) == NoiseSample(trace=2.0, signal=-1.0)


@given(
    st.lists(st.integers(1, 50), min_size=2, max_size=9), st.floats(0.0, 9.0), st.floats(0.0, 9.0), st.integers(0, 99)
)
def test_expected_norms_give_the_truth(counts: list[int], trace: float, signal: float, seed: int) -> None:
    total = sum(counts)
    squared = [signal + trace / n for n in counts]
    for independent in (False, True):
        found = from_parts(squared, signal + trace / total, counts, independent=independent)
        assert (found.trace, found.signal) == (pytest.approx(trace, abs=1e-8), pytest.approx(signal, abs=1e-8))
    own = np.random.default_rng(seed).uniform(0, 5, len(counts))  # any noise of each part
    of_whole = sum((n / total) ** 2 * v for n, v in zip(counts, own, strict=True))
    found = from_parts([signal + v for v in own], signal + of_whole, counts)
    assert (found.trace, found.signal) == (
        pytest.approx(total * of_whole, abs=1e-8),
        pytest.approx(signal, abs=1e-8),
    )


@pytest.mark.parametrize("independent", [False, True])
def test_unbiased_over_every_draw_there_is(independent: bool) -> None:
    """Three examples' gradients; every way to draw parts of one and of two with replacement."""
    examples = np.array([[1.0, 0.0], [0.0, 2.0], [-1.0, 4.0]])
    mean = examples.mean(axis=0)
    trace = ((examples - mean) ** 2).sum(axis=1).mean()
    found = []
    for draw in itertools.product(range(3), repeat=3):
        parts = [examples[[draw[0]]].mean(axis=0), examples[list(draw[1:])].mean(axis=0)]
        whole = examples[list(draw)].mean(axis=0)
        found.append(from_parts([g @ g for g in parts], whole @ whole, [1, 2], independent=independent))
    assert np.mean([each.trace for each in found]) == pytest.approx(trace)
    assert np.mean([each.signal for each in found]) == pytest.approx(mean @ mean)


def test_what_has_no_answer_says_why() -> None:
    with pytest.raises(ConfigError, match=r"over 4 and 4 units: give a smaller and a larger one"):
        from_two_sizes(1.0, 4, 1.0, 4)
    with pytest.raises(ConfigError, match=r"2 squared norms for 1 counts"):
        from_parts([1.0, 1.0], 1.0, [1])
    for counts in ([3], [3, 0]):
        with pytest.raises(ConfigError, match=r"two parts or more, none of them empty"):
            from_parts([1.0] * len(counts), 1.0, counts)
    with pytest.raises(ConfigError, match=r"smoothing = 1.5"):
        NoiseScale(smoothing=1.5)


def test_smoothing_is_the_weighted_mean_and_its_spread() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal([5.0, 2.0], [1.0, 0.3], (30, 2))
    meter = NoiseScale(smoothing=0.9)
    for trace, signal in values:
        meter.add(NoiseSample(trace, signal))
    found = meter.estimate()
    weights = 0.9 ** np.arange(29, -1, -1)
    weights /= weights.sum()
    mean = weights @ values
    covariance = np.cov(values.T, aweights=weights)
    effective = 1 / (weights**2).sum()
    assert found.effective_updates == pytest.approx(effective)
    half = stats.t.ppf(0.975, math.floor(effective - 1)) * np.sqrt(np.diag(covariance) / effective)
    assert found.trace is not None and found.signal is not None and found.scale is not None
    for place, each in enumerate((found.trace, found.signal)):
        assert each.value == pytest.approx(mean[place])
        assert each.interval == pytest.approx((mean[place] - half[place], mean[place] + half[place]), rel=1e-3)
    assert found.scale.interval is not None
    assert found.scale.interval[0] < found.scale.value < found.scale.interval[1]


def test_without_decay_it_is_the_plain_mean_and_students_interval() -> None:
    meter = NoiseScale(smoothing=1.0)
    for trace in (1.0, 2.0, 6.0):
        meter.add(NoiseSample(trace, 1.0))
    found = meter.estimate().trace
    expected = stats.t.interval(0.95, 2, loc=3.0, scale=stats.sem([1.0, 2.0, 6.0]))
    assert found is not None and found.value == pytest.approx(3.0)
    assert found.interval == pytest.approx(expected)


def test_fiellers_ends_are_where_the_difference_leaves_its_error() -> None:
    top, bottom, spread = 10.0, 2.0, (1.0, 0.2, 0.5)
    found = fieller(top, bottom, spread)
    assert found is not None and found[0] < top / bottom < found[1]
    for end in found:
        variance = spread[0] - 2 * end * spread[1] + end**2 * spread[2]
        assert (top - end * bottom) ** 2 == pytest.approx(variance)
    assert fieller(10.0, 2.0, (0.0, 0.0, 0.0)) == (5.0, 5.0)
    assert fieller(10.0, 2.0, (1.0, 0.2, 4.0)) is None  # the bottom's interval begins at 0
    assert fieller(10.0, -2.0, (1.0, 0.2, 0.5)) is None


def test_beales_correction_by_hand() -> None:
    assert beale(6.0, 2.0, covariance=0.0, variance=0.0) == 3.0
    assert beale(6.0, 2.0, covariance=0.4, variance=0.1) == pytest.approx(3.0 * (1 + 0.4 / 12) / (1 + 0.1 / 4))


def test_a_signal_that_may_be_zero_is_undetermined() -> None:
    meter = NoiseScale(unit="tokens")
    for signal in (1.0, -1.0, 0.5, -0.4):
        meter.add(NoiseSample(4.0, signal))
    found = meter.estimate()
    assert found.scale is None and found.trace is not None
    assert found.signal is not None and found.signal.interval is not None and found.signal.interval[0] < 0
    assert str(found).startswith("noise scale undetermined: |G|^2 can't be told from 0; more updates, or more parts of")


def test_in_words_and_as_json() -> None:
    meter = NoiseScale(smoothing=1.0)
    assert str(meter.estimate()) == "noise scale undetermined: no update with two parts or more has been seen"
    meter.add(NoiseSample(8.0, 2.0))
    assert str(meter.estimate()) == (
        "noise scale undetermined: a single update has no spread; tr(Sigma) 8, |G|^2 2, over 1 updates"
    )
    meter.add(NoiseSample(8.0, 2.0))
    meter.add_parts([1.0], 1.0, [4])
    found = meter.estimate()
    assert str(found) == (
        "noise scale 4 (4 to 4) examples; tr(Sigma) 8 (8 to 8), |G|^2 2 (2 to 2), over 2 updates, 1 skipped"
    )
    plain = json.loads(json.dumps(found.to_json()))
    assert plain["scale"] == {"value": 4.0, "interval": [4.0, 4.0]}
    assert (plain["updates"], plain["skipped"], plain["unit"], plain["why"]) == (2, 1, "examples", "")


def test_an_overflow_is_skipped_and_counted() -> None:
    meter = NoiseScale()
    meter.add_parts([math.inf, 1.0], 1.0, [1, 1])
    meter.add_parts([1.0, 1.0], math.nan, [1, 1])
    assert (meter.estimate().updates, meter.estimate().skipped) == (0, 2)


def test_a_noiseless_gradient_has_the_scale_zero() -> None:
    meter = NoiseScale()
    for _ in range(3):
        meter.add_parts([4.0, 4.0], 4.0, [1, 3])
    scale = meter.estimate().scale
    assert scale is not None and (scale.value, scale.interval) == (pytest.approx(0), pytest.approx((0, 0)))


def test_intervals_cover_about_as_often_as_they_say() -> None:
    """300 runs of 60 updates with chi-square pairs; three standard errors are 3.8 %."""
    rng = np.random.default_rng(1)
    held = 0
    for pairs in rng.chisquare([30, 20], (300, 60, 2)):
        meter = NoiseScale(smoothing=1.0)
        for trace, signal in pairs.tolist():
            meter.add(NoiseSample(trace, signal))
        scale = meter.estimate().scale
        assert scale is not None and scale.interval is not None
        held += scale.interval[0] <= 1.5 <= scale.interval[1]
    assert held / 300 == pytest.approx(0.95, abs=0.038)
