"""Steps to a loss: read off by hand, fitted, and what never got there told."""

import json
import math

import pytest

from stoker.batch.critical.reached import Reached, Steps, samples_to
from stoker.batch.trainings.history import Evaluation, History
from stoker.batch.trainings.setting import Setting


def history(*points: tuple[int, float], start: float = 4.0) -> History:
    made = History(Setting(10), "examples")
    made.note(10, start, 1.0, 0.1, 0.01, 0.0)
    made.evaluations = [Evaluation(samples, samples // 10, 0.0, loss) for samples, loss in points]
    return made


def test_straight_in_log_loss_between_evaluations() -> None:
    # far apart, so that each is averaged with itself alone
    assert samples_to(history((100, 4.0), (200, 1.0)), 2.0) == pytest.approx(150)
    assert samples_to(history((100, 1.0)), 2.0) == pytest.approx(50)  # from the first training loss of 4
    assert samples_to(history((100, 3.0), (200, 2.5)), 2.0) == math.inf
    assert samples_to(history((100, 1.5), start=1.9), 2.0) == 100  # one batch's loss says nothing of the start


def test_a_line_through_the_evaluations_near_it_has_the_last_word() -> None:
    # a power law, on which means of bent curves are too high, and one that scatters about it
    exact = [(samples, 4.0 * (samples / 100) ** -2) for samples in range(100, 401, 10)]
    assert samples_to(history(*exact), 1.0) == pytest.approx(200, rel=1e-6)
    noisy = [(samples, value * (1.1 if samples % 20 else 1 / 1.1)) for samples, value in exact]
    assert samples_to(history(*noisy), 1.0) == pytest.approx(200, rel=0.01)


def test_a_lucky_dip_is_not_yet_the_loss() -> None:
    dip = history((1000, 3.0), (1100, 1.9), (1200, 3.0), (1300, 2.6), (2600, 1.0))
    assert samples_to(dip, 2.0) > 1300


def steps(size: int, *samples: float) -> Steps:
    return Steps(size, 0.1, 1.0, ((1.0, samples[0]),), samples, 0.002 + 0.0001 * size)


def reached(*batches: Steps) -> Reached:
    return Reached("examples", 2.0, 100_000, 32, batches, 77_000)


def on_curve(size: int) -> float:
    """100 steps and 6,400 examples at least, critical 64."""
    return 6_400 * (1 + size / 64)


def test_points_of_a_curve_give_its_critical_batch_and_a_doublings_time() -> None:
    found = reached(*(steps(size, on_curve(size), on_curve(size)) for size in (16, 32, 64, 128)))
    assert found.tradeoff is not None
    assert found.tradeoff.critical == pytest.approx(64, rel=1e-3)
    doubled = found.doubling(32, exchange_seconds=0.001)
    assert doubled is not None
    assert doubled.more_examples == pytest.approx(1 / 3, rel=1e-3)
    assert doubled.fewer_steps == pytest.approx(1 / 3, rel=1e-3)
    once, twice = 0.002 + 0.0032 + 0.001, 0.002 + 0.0064 + 0.001
    assert doubled.less_time == pytest.approx(1 - 2 / 3 * twice / once, abs=1e-3)
    assert doubled.exchange == pytest.approx((0.001 / once, 0.001 / twice), rel=1e-2)
    assert "costs 33.3%" in str(found) and "saves 33.3%" in str(found)


def test_seeds_of_one_batch_are_one_point() -> None:
    scattered = reached(*(steps(size, on_curve(size) / 2, on_curve(size) * 2) for size in (16, 32, 64)))
    assert len(scattered.points) == 3
    assert scattered.tradeoff is not None and scattered.tradeoff.critical == pytest.approx(64, rel=1e-3)
    off = reached(*(steps(size, *[on_curve(size) * far] * 5) for size, far in ((16, 1.1), (32, 0.9), (64, 1.1))))
    assert off.tradeoff is not None and off.tradeoff.critical_interval is not None
    low, high = off.tradeoff.critical_interval
    assert low < 64 / 3 and high > 64 * 3  # five seeds at one rate don't make the curve's misfit smaller


def test_what_never_got_there_is_told_and_not_fitted() -> None:
    found = reached(steps(16, on_curve(16)), steps(32, on_curve(32)), steps(1024, math.inf))
    assert len(found.points) == 2
    assert "0 of 1" in str(found)
    told = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert told["batches"][2]["samples"] == [None]


def test_too_few_batches_have_no_curve_and_say_why() -> None:
    found = reached(steps(16, on_curve(16)), steps(32, math.inf))
    assert found.tradeoff is None
    assert found.doubling(16) is None
    assert "reached at 1" in found.unfitted and "no curve" in str(found)
    flat = reached(steps(16, 1600.0), steps(32, 6400.0))  # more steps for a larger batch
    assert "smaller" in flat.unfitted
