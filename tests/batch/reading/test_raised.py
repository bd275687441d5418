"""A batch that is really raised in a training, and what its curves say."""

import pytest

from stoker.batch.reading.curve import Curve
from stoker.batch.reading.found import Reading
from stoker.batch.reading.raising import read_raise
from stoker.batch.trainings.setting import Setting
from stoker.batch.trainings.training import Plan, made_anew, train
from tests.batch.trainings_targets import regression

SMALL, LARGE = 16, 128


def raised(rate_factor: float, seed: int) -> Reading:
    """From 16 examples per update to 128, in the middle of a training."""
    target = made_anew(lambda: regression(learning_rate=0.002, noise=0.1), seed)
    before = train(target, Setting(SMALL, seed=seed), Plan(4096, evaluations=0, agreement=True))
    grown = Setting(LARGE, rate_factor=rate_factor, seed=seed)
    after = train(target, grown, Plan(6144, evaluations=0, agreement=True), first_epoch=8)
    return read_raise(Curve.of(before), Curve.of(after))


@pytest.mark.parametrize("seed", range(2))
def test_the_rate_kept_is_merely_slow(seed: int) -> None:
    found = raised(1.0, seed)
    assert found.causes == ("rate too low",)
    assert "of the pace before, at 1 times the rate with 8 times the examples" in found.findings[0].evidence


@pytest.mark.parametrize("seed", range(2))
def test_the_rate_scaled_with_the_batch_is_healthy(seed: int) -> None:
    assert raised(8.0, seed).verdict == "healthy"


@pytest.mark.parametrize("seed", range(2))
def test_a_rate_far_too_high_diverges(seed: int) -> None:
    found = raised(1500.0, seed)
    assert found.causes == ("rate too high",)
    assert "learning_rate = 0.002  (as before the change); clip_norm = 1.0" in found.findings[0].change
