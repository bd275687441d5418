"""Means and spreads over seeds, what diverged, and which arms are told apart."""

import math

import numpy as np
import pytest

from stoker.batch.scanning.arms import Arm, tell_apart
from stoker.batch.trainings.setting import Setting
from tests.batch.scanning.made import arm, history


def test_figures_of_an_arm_by_hand() -> None:
    made = arm(64, [0.4, 0.5, 0.9], seconds=0.02)
    assert made.mean == pytest.approx(0.6)
    assert made.spread == pytest.approx(math.sqrt((0.04 + 0.01 + 0.09) / 2))
    assert made.figures == {"accuracy": pytest.approx(0.85)}
    assert (made.updates, made.seconds, made.rate, made.waited) == (16, 0.02, 3200, pytest.approx(0.1))
    last = made.moments()[-1]
    assert (last.samples, last.updates, last.low, last.high) == (1024, 16, *map(pytest.approx, (0.4, 0.9)))


def test_equal_updates_are_at_other_samples() -> None:
    small, large = arm(16, [0.4]), arm(64, [0.4])
    moment = small.after(large.updates)
    assert moment is not None
    assert (moment.updates, moment.samples) == (16, 256)
    assert moment.mean == pytest.approx(2 - 1.6 / 4)
    assert large.after(17) is None


def test_a_diverged_training_is_counted_and_in_no_mean() -> None:
    made = arm(64, [0.4, math.inf, 0.6])
    assert (made.diverged, made.whole, made.mean, made.standing) == (1, False, pytest.approx(0.5), math.inf)
    assert made.moments()[-1].high == pytest.approx(0.6)
    assert "diverged" in made.to_json()["runs"][1]["ended"]
    lost = arm(64, [math.inf, math.inf])
    assert math.isnan(lost.mean)
    assert lost.spread is None
    assert lost.moments() == []


def test_a_loss_far_above_where_it_began_has_diverged_but_overfitting_has_not() -> None:
    blown = history(Setting(64), 1e20)
    overfitted = history(Setting(64), 0.1)
    last = overfitted.evaluations[-1]
    overfitted.evaluations[-1] = type(last)(last.samples, last.updates, last.seconds, 9.0)
    assert Arm((blown,)).losses == (math.inf,)
    assert Arm((overfitted,)).losses == (9.0,)


def test_seeds_are_blocks() -> None:
    """Two-way layout by hand: rows differ by 0.1, columns by 10; what is left is +-0.005, on 1 degree of freedom."""
    apart = tell_apart([[1.0, 11.01], [1.1, 11.1]])
    assert apart is not None
    rest = math.sqrt(4 * 0.0025**2 / 1)
    assert apart.half_width == pytest.approx(12.7062 * rest * math.sqrt(2 / 2))
    assert apart.differences == (0.0, pytest.approx(0.095))
    assert apart.kept == (0,)


def test_an_arm_that_went_astray_does_not_blur_the_others() -> None:
    near = [[0.30, 0.31, 0.32], [0.315, 0.318, 0.34]]
    alone = tell_apart(near)
    beside = tell_apart([*near, [1.0, 50.0, 9000.0], [0.2, math.inf, 0.3]])
    assert alone is not None
    assert beside is not None
    assert beside.half_width == alone.half_width
    assert beside.kept == alone.kept
    assert beside.differences[3] == math.inf


def test_one_seed_tells_nothing_apart_and_nothing_whole_is_none() -> None:
    apart = tell_apart([[0.5], [0.4]])
    assert apart is not None
    assert (apart.best, apart.half_width, apart.kept) == (1, None, (1,))
    assert tell_apart([[math.inf, 0.1]]) is None


def test_equal_arms_are_rarely_told_apart_and_unequal_ones_are() -> None:
    """As the docstring says: in about one scan of eight, of four equal arms and three seeds."""
    draw = np.random.default_rng(0)
    wrong = seen = 0
    for _ in range(1000):
        losses = draw.normal(5.0, 1.0, (4, 3))
        apart = tell_apart(losses.tolist())
        losses[3] += 3.5
        worse = tell_apart(losses.tolist())
        assert apart is not None
        assert worse is not None
        wrong += len(apart.kept) < 4
        seen += 3 not in worse.kept
    assert wrong / 1000 == pytest.approx(0.125, abs=0.035)
    assert seen / 1000 > 0.85
