"""The three accounts of raising the batch: what each says of known figures."""

import pytest

from stoker.batch.estimates.smoothed import Mean
from stoker.batch.explaining.accounts import rate_account, smooth_account
from stoker.batch.noise import NoiseEstimate
from stoker.batch.scaling import rescale


def noise(low: float, value: float, high: float) -> NoiseEstimate:
    return NoiseEstimate("examples", 100, 99.0, 0, Mean(1.0, None), Mean(1.0, None), Mean(value, (low, high)), "")


@pytest.mark.parametrize(
    ("estimate", "answer"),
    [(noise(900, 1000, 1100), "no"), (noise(80, 90, 99), "yes"), (noise(80, 100, 120), "in part")],
)
def test_a_batch_beyond_the_noise_scale_is_smooth(estimate: NoiseEstimate, answer: str) -> None:
    assert smooth_account(estimate, 100).answer == answer


def test_a_doubling_at_the_noise_scale_costs_half_more_and_saves_a_quarter() -> None:
    words = smooth_account(noise(80, 100, 120), 100).words  # (B + 2B) / (B + B), (1 + 1/2) / (1 + 1)
    assert "a doubling costs 50% more examples and saves 25% of the updates" in words


def test_noise_that_is_not_known_is_said() -> None:
    assert smooth_account(None, 1).answer == "not measured"
    unknown = NoiseEstimate("examples", 3, 2.0, 0, Mean(1.0, None), Mean(0.1, None), None, "it can't be told from 0")
    assert "undetermined: it can't be told from 0" in smooth_account(unknown, 64).words


def test_noise_that_does_not_show_is_smooth() -> None:
    """A ratio of means may be negative, and no doubling can be reckoned from it."""
    found = smooth_account(noise(0, -3, 0), 64)
    assert found.answer == "yes"
    assert "no more than without noise" in found.words


def test_the_rate_follows_the_rule_and_the_scan() -> None:
    raised = rescale("adamw", 64, 256, learning_rate=1e-3)
    assert rate_account(raised, 1.0, scanned_at=256).words == (
        "0.002 for 256 examples per update by the sqrt rule; a scan of rates at 256 confirms it."
    )
    found = rate_account(raised, 0.5, scanned_at=64).words
    assert found.startswith("0.001 for 256 examples per update by the sqrt rule; a scan of rates at 64 prefers it")
    stays = rescale("sgd", 64, 64, learning_rate=0.1)
    assert rate_account(stays, 1.0, scanned_at=64).answer == "no"
    assert rate_account(stays, 2.0, scanned_at=64).answer == "yes"
    assert rate_account(stays, 2.0, scanned_at=64).words == "0.2; a scan of rates at 64 prefers it, 2 times as high."
