"""The race over factors: which are trained with which seeds, edges, divergence, and what is said of it."""

import math
from collections.abc import Callable

import pytest

from stoker.batch import Plan, RateScan, Setting, scan_rates
from stoker.batch.scanning.course import Course
from stoker.batch.trainings.history import History
from stoker.errors import ConfigError
from tests.batch.scanning.made import equal, history
from tests.batch.trainings_targets import regression

Loss = Callable[[float, int], float]


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., RateScan]:
    """A scan whose trainings end as a function of factor and seed says."""

    def run(loss: Loss, seeds: int = 3, present: float = 1.0, **told: object) -> RateScan:
        def train(course: Course, setting: Setting, what: str, after: object = ()) -> History:
            return history(setting, loss(setting.rate_factor, setting.seed))

        monkeypatch.setattr(Course, "train", train)
        monkeypatch.setattr(Course, "equal", equal(seeds))
        setting = Setting(64, rate_factor=present)
        return scan_rates(regression, Plan(1024), setting, seeds=seeds, **told)  # type: ignore[arg-type]

    return run


def bowl(best: float, curvature: float = 0.1) -> Loss:
    """A parabola over log2 of the factor, with a seed's own offset."""
    return lambda factor, seed: 0.4 + curvature * math.log2(factor / best) ** 2 + 0.001 * seed


def trained(found: RateScan) -> dict[float, int]:
    return {arm.setting.rate_factor: len(arm.histories) for arm in found.arms}


def test_only_the_best_its_neighbours_and_the_present_are_trained_with_every_seed(
    raced: Callable[..., RateScan],
) -> None:
    found = raced(lambda factor, seed: bowl(2.0)(factor, seed) + 0.001 * factor * seed)
    assert trained(found) == {0.25: 1, 0.5: 1, 1.0: 3, 2.0: 3, 4.0: 3}
    assert found.best is found.at(2.0)
    assert (found.kind, found.kept) == ("best", (2.0,))


def test_it_goes_on_past_an_edge_as_often_as_is_allowed(raced: Callable[..., RateScan]) -> None:
    found = raced(bowl(16.0))
    assert trained(found) == {0.25: 1, 0.5: 1, 1.0: 3, 2.0: 1, 4.0: 1, 8.0: 3, 16.0: 3, 32.0: 3}
    assert found.best is found.at(16.0)
    bounded = raced(bowl(16.0), extensions=1)
    assert bounded.best is bounded.at(8.0)
    assert bounded.kind == "edge"
    assert "highest tried: go on that side" in bounded.words
    low = raced(bowl(1 / 64), extensions=0, factors=(0.5, 1))
    assert "lowest tried" in low.words


def test_a_rate_that_diverges_is_a_ceiling_and_not_averaged(raced: Callable[..., RateScan]) -> None:
    found = raced(lambda factor, seed: math.inf if factor > 2 else 0.9 - 0.2 * factor + 0.01 * seed * factor)
    assert found.best is found.at(2.0)
    assert found.kind == "ceiling"
    assert trained(found)[4.0] == 1
    assert max(trained(found)) == 4.0
    assert "diverged" in str(found)


def test_factors_count_from_the_setting_s_own(raced: Callable[..., RateScan]) -> None:
    """1.5 x 0.7 / 1.5 isn't 0.7 in floating point, and the factor is the best one all the same."""
    assert 1.5 * 0.7 / 1.5 != 0.7
    found = raced(bowl(1.5 * 0.7), present=1.5, factors=(0.35, 0.7, 1.0, 1.4))
    assert found.best is found.at(1.5 * 0.7)


def test_one_seed_that_diverges_takes_the_rate_out(raced: Callable[..., RateScan]) -> None:
    found = raced(lambda factor, seed: math.inf if factor == 2 and seed == 1 else bowl(2.0)(factor, seed))
    assert found.best is not found.at(2.0)
    assert "1 of 3 diverged" in str(found)


def test_flat_rates_are_said_to_be(raced: Callable[..., RateScan]) -> None:
    found = raced(lambda factor, seed: bowl(1.0, 1e-6)(factor, seed) + 0.01 * math.sin(7 * factor + 3 * seed))
    assert found.kind == "flat"
    assert len(found.kept) >= 3


def test_one_seed_or_nothing_left(raced: Callable[..., RateScan]) -> None:
    assert raced(bowl(1.0), seeds=1).kind == "undetermined"
    lost = raced(lambda factor, seed: math.inf)
    assert (lost.kind, lost.best, lost.kept) == ("diverged", None, ())


def test_the_best_rate_of_a_real_training_is_found() -> None:
    """Least squares from 16 times too small a rate: it ends where a direct search over a wide range does."""
    plan, setting = Plan(512, evaluations=1), Setting(32)
    found = scan_rates(lambda: regression(learning_rate=0.05 / 16), plan, setting, seeds=2, extensions=4)
    wide = scan_rates(
        lambda: regression(learning_rate=0.05), plan, setting, seeds=2, factors=(1 / 16, 0.25, 1, 4, 8), extensions=0
    )
    assert found.best is not None
    assert wide.best is not None
    assert found.best.mean <= wide.best.mean * 1.02
    assert found.to_json()["best"] == found.best.setting.rate_factor > 1


def test_factors_are_positive() -> None:
    for factors in ((), (0.0, 1.0), (math.nan,)):
        with pytest.raises(ConfigError, match="factors"):
            scan_rates(regression, Plan(512), Setting(32), factors=factors)
