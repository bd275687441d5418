"""What to set for another batch; expected values by hand and from simulations."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.batch.scaling import (
    adascale_gain,
    decay_per_example,
    half_life_betas,
    malladi_betas,
    rescale,
    saturating_rate,
)
from stoker.errors import ConfigError


def test_sgd_is_linear() -> None:
    made = rescale("sgd", 64, 128, learning_rate=0.02, weight_decay=1e-4)
    assert (made.rule, made.learning_rate, made.weight_decay) == ("linear", pytest.approx(0.04), pytest.approx(1e-4))
    assert made.warnings == ()
    assert (made.betas, made.eps) == (None, None)


def test_adamw_takes_the_root_and_keeps_decay_and_memory_per_example() -> None:
    made = rescale("adamw", 256, 1024, learning_rate=3e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    assert made.learning_rate == pytest.approx(6e-4)
    assert made.betas == pytest.approx((0.9**4, 0.95**4))
    assert made.eps == pytest.approx(5e-9)
    assert made.weight_decay == pytest.approx(0.2)  # x sqrt(kappa)
    text = str(made)
    assert "256 -> 1,024 examples per update (x 4)" in text and "0.9^" not in text and "beta^4" in text
    assert json.loads(json.dumps(made.to_json()))["betas"] == pytest.approx([0.6561, 0.95**4])


def test_malladi_and_where_it_ends() -> None:
    made = rescale("adam", 10, 40, learning_rate=1.0, betas=(0.9, 0.999), eps=1e-8, moments="malladi")
    assert made.betas == pytest.approx((0.6, 0.996))
    assert malladi_betas((0.9, 0.95), 10) == pytest.approx((0.0, 0.5))
    with pytest.raises(ConfigError, match=r"up to 1 / \(1 - 0.9\) = 10 times the batch"):
        malladi_betas((0.9, 0.95), 10.5)
    with pytest.raises(ConfigError, match=r"= 20 times the batch.*half-life"):
        rescale("adamw", 1, 21, learning_rate=1.0, betas=(0.95, 0.999), moments="malladi")
    assert malladi_betas((0.9, 0.95), 0.5) == pytest.approx((0.95, 0.975))


@given(st.floats(0.5, 0.9999), st.floats(0.05, 50))
def test_half_life_in_examples_stays(beta: float, kappa: float) -> None:
    now, _ = half_life_betas((beta, beta), kappa)
    assert kappa * np.log(0.5) / np.log(now) == pytest.approx(np.log(0.5) / np.log(beta))


@given(st.integers(1, 4096), st.integers(1, 4096))
def test_there_and_back_again(before: int, now: int) -> None:
    there = rescale("adamw", before, now, learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    kappa = now / before
    assert there.weight_decay is not None
    assert there.learning_rate * there.weight_decay == pytest.approx(kappa * 1e-3 * 0.1)
    assert decay_per_example(there.weight_decay, 1 / kappa, kappa**-0.5) == pytest.approx(0.1)


def test_saturating_is_the_best_rate_of_a_noisy_quadratic() -> None:
    """Of w^2 / 2 with gradient noise: its mean after a step is least at w^2 / (w^2 + T/B) = 1 / (1 + B_noise / B)."""
    w, variance = 1.5, 9.0
    for examples in (1, 4, 64):
        rates = np.linspace(0, 1, 100_001)
        after = (1 - rates) ** 2 * w**2 + rates**2 * variance / examples
        assert rates[after.argmin()] == pytest.approx(saturating_rate(1, examples, variance / w**2), abs=1e-5)


def test_saturating_rescales_between_linear_and_none() -> None:
    far_below = rescale("sgd", 1, 2, learning_rate=1.0, rule="saturating", noise_scale=1e6)
    far_above = rescale("sgd", 10**6, 10**7, learning_rate=1.0, rule="saturating", noise_scale=1.0)
    assert (far_below.learning_rate, far_above.learning_rate) == pytest.approx((2.0, 1.0), rel=1e-5)
    assert rescale("sgd", 100, 300, learning_rate=1.0, rule="saturating", noise_scale=100).learning_rate == 1.5
    with pytest.raises(ConfigError, match="needs the noise_scale"):
        rescale("sgd", 1, 2, learning_rate=1.0, rule="saturating")


def test_adascale_by_hand() -> None:
    assert adascale_gain(variance=6.0, squared_norm=1.0, before=2, now=6) == 2.0  # (3 + 1) / (1 + 1)
    assert adascale_gain(variance=0.0, squared_norm=1.0, before=2, now=6) == 1.0
    assert adascale_gain(variance=1.0, squared_norm=0.0, before=2, now=6) == 3.0
    with pytest.raises(ConfigError, match="for batches that grow"):
        adascale_gain(1.0, 1.0, 6, 2)
    with pytest.raises(ConfigError, match="finite"):
        adascale_gain(float("nan"), 1.0, 2, 6)
    assert rescale("sgd", 2, 6, learning_rate=0.1, rule="adascale", gain=2.0).learning_rate == pytest.approx(0.2)
    with pytest.raises(ConfigError, match="adascale_gain gives it"):
        rescale("sgd", 2, 6, learning_rate=0.1, rule="adascale", gain=3.5)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.integers(1, 1000), st.integers(1, 1000))
def test_the_gain_is_between_one_and_kappa(variance: float, norm: float, before: int, more: int) -> None:
    assert 1 <= adascale_gain(variance, norm, before, before + more) <= (before + more) / before


def test_muon_has_no_settled_rule() -> None:
    made = rescale("muon", 64, 256, learning_rate=0.02, weight_decay=0.1)
    assert (made.learning_rate, made.weight_decay) == (0.02, 0.1)
    assert "no rule for Muon's learning rate is settled" in made.warnings[0]
    guess = rescale("muon", 64, 256, learning_rate=0.02, rule="sqrt")
    assert guess.learning_rate == pytest.approx(0.04) and "sqrt is a guess" in guess.warnings[0]


def test_warnings_name_what_to_do() -> None:
    (far,) = rescale("sgd", 32, 1024, learning_rate=0.1).warnings
    assert "Measure the noise scale, or take rule = 'sqrt'" in far
    (over,) = rescale("sgd", 100, 300, learning_rate=0.1, noise_scale=100).warnings
    assert "the linear rate is 2 times" in over  # 0.3 against 0.1 x 1.5
    assert rescale("sgd", 1, 2, learning_rate=0.1, noise_scale=1e5).warnings == ()
    (surge,) = rescale("adamw", 64, 512, learning_rate=0.1, noise_scale=200).warnings
    assert "Adam's best learning rate falls again" in surge
    (coupled,) = rescale("adam", 64, 128, learning_rate=0.1, weight_decay=0.1).warnings
    assert "use AdamW" in coupled


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"kind": "lamb"}, "kind = 'lamb': one of sgd, adam, adamw, muon"),
        ({"rule": "cubic"}, "rule = 'cubic'"),
        ({"moments": "none"}, "moments = 'none'"),
        ({"now": 0}, "now = 0 examples per update"),
        ({"learning_rate": float("nan")}, "learning_rate = nan"),
    ],
)
def test_what_cannot_be_is_refused(keywords: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"kind": "sgd", "before": 1, "now": 2, "learning_rate": 0.1} | keywords
    with pytest.raises(ConfigError, match=message):
        rescale(**given)  # type: ignore[arg-type]
